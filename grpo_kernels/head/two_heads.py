"""The divergence of a row of logits from those of a reference: another model on the same tokens.

The reference's logits are made beside the policy's, a strip at a time, and one kernel reads both.
It computes what the object in `kernels/divergences.py` says. Four GEMMs: one for the logits of
each, two for the gradients of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels import RowGrads, StatGrads, pairs_of
from ..kernels.pair_stats import PairStats
from .call import HeadSpec
from .chunked_head import ChunkLogits, SingleRank, TargetReadout
from .row_plan import Chunk, RowPlan


class DivergenceReadout(TargetReadout):
    """The target's log-prob and the entropy under both, and a divergence of the two softmaxes."""

    stats: PairStats  # type: ignore[assignment]

    def __init__(
        self, spec: HeadSpec, tensors: Sequence[Tensor], ranks: SingleRank, rows: RowPlan, *,
        with_grad: bool,
    ) -> None:  # fmt: skip
        super().__init__(spec, ranks, entropy=True)
        # Not if batch-invariant: whether slopes are stored depends on the size of a chunk.
        self.with_grad = with_grad and not spec.execution.batch_invariant
        assert spec.reference is not None and spec.divergence is not None
        self.reference, self.divergence = spec.reference, spec.divergence
        self.ref_logits = ChunkLogits(tensors, spec.reference, replace(rows, num_grad_rows=0))
        self.pairs = pairs_of(spec.backend)

    def select(self, chunk: Chunk) -> None:
        super().select(chunk)
        self.ref_logits.select(chunk)
        self.ref_transform = self.reference.transform.at(chunk.index)
        self.ref_strip: slice | None = None  # whose logits of the reference are in the buffer
        self.may_store_slopes = self.with_grad and chunk.needs_grad
        self.has_slopes = False  # stored by the forward, in the place of the reference's logits

    def allocate(self, like: Tensor, exps: Tensor | None) -> None:
        self.stats = PairStats.empty(like)

    def forward(self, strip: slice, logits: Tensor) -> None:
        stats, targets, alone = self.stats.at(strip), self.targets[strip], self.ranks.alone
        both = logits, self._reference_logits(strip)
        transforms = self.transform.at(strip), self.ref_transform.at(strip)
        self.has_slopes = self.pairs.pair_stats(
            *both,
            targets,
            *transforms,
            stats,
            divergence=self.divergence if alone else None,
            invariant=self.spec.execution.batch_invariant,
            # Only if the chunk is one strip: the next one would overwrite them.
            store_slopes=self.may_store_slopes and strip == slice(0, len(self.stats.logps)),
        )
        if alone:
            return
        self._merge(stats, targets)
        self.pairs.divergences(*both, *transforms, stats, divergence=self.divergence)
        self.ranks.sum(stats.divergence)
        self.ranks.sum(stats.mean)

    def _reference_logits(self, strip: slice) -> Tensor:
        """The reference's logits of a strip of the rows in flight."""
        if self.ref_strip == strip:
            return self.ref_logits.buffer[: strip.stop - strip.start]
        self.ref_strip = strip
        return self.ref_logits.compute(strip)

    def _merge(self, stats: PairStats, targets: Tensor) -> None:
        """Sets the statistics of whole rows, from those of this rank's columns."""
        policy, reference = (
            self.ranks.merge(x, targets, None) for x in (stats.policy_stats, stats.reference_stats)
        )
        peak, ref_at_peak = self.ranks.largest(stats.peak, stats.ref_at_peak)
        (ref_peak,) = self.ranks.largest(stats.ref_peak)
        shift = policy.logsumexp - reference.logsumexp
        merged = (*policy[:3], *reference[:3], shift, None, None, peak, ref_at_peak, ref_peak)
        for row, x in zip(stats, merged, strict=False):
            if x is not None:
                row.copy_(x)
        stats.set_zero_anchors()

    def finish(self) -> PairStats:  # type: ignore[override]
        return self.stats

    def set_grads(self, d_stats: StatGrads) -> tuple[Tensor, Tensor] | None:
        assert d_stats.divergence is not None
        self.d_divergence = d_divergence = d_stats.divergence
        self.policy_grads: RowGrads | None = None  # by the policy's own statistics
        if d_stats.logps is not None:
            self.policy_grads = RowGrads.of(self.stats.policy_stats, d_stats)
        elif self.has_slopes and self.spec.dtype == torch.float32:
            slopes = self.ref_logits.buffer[: len(d_divergence)]
            return slopes, self.pairs.slope_factors(self.transform, d_divergence, self.divergence)
        return None

    def backward(self, strip: slice, logits: Tensor, out: Tensor) -> None:
        both = logits, self._reference_logits(strip)
        rest = (
            None if self.policy_grads is None else self.policy_grads.at(strip),
            self.d_divergence[strip],
            out,
        )
        targets, transform = self.targets[strip], self.transform.at(strip)
        if self.has_slopes:
            self.pairs.stored_grads_(*both, targets, transform, *rest, divergence=self.divergence)
            return
        self.pairs.pair_grads_(
            *both,
            targets,
            transform,
            self.ref_transform.at(strip),
            self.stats.at(strip),
            *rest,
            divergence=self.divergence,
        )

"""The divergence of a row of logits from a reference's: another model on the same tokens.

Both models' logits are made a strip at a time. Kernels read both in three sweeps: statistics,
divergence, gradient (`kernels/divergences.py` has the formulas). Four GEMMs: one for the logits of
each model, two for the gradients of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..kernels import RowGrads, StatGrads, pairs_of
from ..kernels.pair_stats import PairStats
from .call import HeadSpec
from .chunked_head import ChunkLogits, SingleRank, TargetReadout
from .row_plan import Chunk, RowPlan


class DivergenceReadout(TargetReadout):
    """The target's log-prob and the entropy under both models, and a divergence of the two."""

    stats: PairStats  # type: ignore[assignment]

    def __init__(
        self, spec: HeadSpec, tensors: Sequence[Tensor], ranks: SingleRank, rows: RowPlan
    ) -> None:
        super().__init__(spec, ranks, entropy=True)
        assert spec.reference is not None and spec.divergence is not None
        self.reference, self.divergence = spec.reference, spec.divergence
        self.ref_logits = ChunkLogits(tensors, spec.reference, replace(rows, num_grad_rows=0))
        self.pairs = pairs_of(spec.backend)

    def select(self, chunk: Chunk) -> None:
        super().select(chunk)
        self.ref_logits.select(chunk)
        self.ref_transform = self.reference.transform.at(chunk.index)
        self.ref_strip: slice | None = None  # rows in the reference's buffer of logits

    def allocate(self, like: Tensor, exps: Tensor | None) -> None:
        self.stats = PairStats.empty(like)

    def forward(self, strip: slice, logits: Tensor) -> None:
        stats, targets = self.stats.at(strip), self.targets[strip]
        both = logits, self._reference_logits(strip)
        transforms = self.transform.at(strip), self.ref_transform.at(strip)
        invariant = self.spec.execution.batch_invariant
        self.pairs.pair_stats(*both, targets, *transforms, stats, invariant=invariant)
        if not self.ranks.alone:
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
        """Merges the ranks' statistics of their columns, in place."""
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
        self.pairs.set_anchors(stats)

    def finish(self) -> PairStats:  # type: ignore[override]
        return self.stats

    def set_grads(self, d_stats: StatGrads) -> None:
        assert d_stats.divergence is not None
        self.d_divergence = d_stats.divergence
        self.policy_grads: RowGrads | None = None  # by the policy's own statistics
        if d_stats.logps is not None:
            self.policy_grads = RowGrads.of(self.stats.policy_stats, d_stats)

    def backward(self, strip: slice, logits: Tensor, out: Tensor) -> None:
        self.pairs.pair_grads_(
            logits,
            self._reference_logits(strip),
            self.targets[strip],
            self.transform.at(strip),
            self.ref_transform.at(strip),
            self.stats.at(strip),
            None if self.policy_grads is None else self.policy_grads.at(strip),
            self.d_divergence[strip],
            out,
            divergence=self.divergence,
        )

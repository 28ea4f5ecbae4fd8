"""The divergence of a row of logits from those of a reference: another model on the same tokens.

The reference's logits are made beside the policy's, a strip at a time, and one kernel reads both.
What it computes, and the gradient, is in `kernels/pairs.py`. Four GEMMs: one for the logits of
each, two for the gradients of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import RowGrads, StatGrads, pairs_of
from ..kernels.pair_stats import PairStats
from .call import HeadSpec
from .dense import LogitStrips, SingleRank, TargetReadout
from .plan import Chunk, RowPlan


class DivergenceReadout(TargetReadout):
    """The target's log-prob and the entropy under both, and a divergence of the two softmaxes."""

    stats: PairStats  # type: ignore[assignment]

    def __init__(
        self, spec: HeadSpec, tensors: Sequence[Tensor], ranks: SingleRank, rows: RowPlan, *,
        at_once: bool,
    ) -> None:  # fmt: skip
        super().__init__(spec, ranks, entropy=True)
        # The gradient is made in the pass that reads the logits, by products of any rows.
        self.at_once = at_once and not spec.execution.batch_invariant
        assert spec.reference is not None and spec.divergence is not None
        self.reference, self.divergence = spec.reference, spec.divergence
        self.logits = LogitStrips(tensors, spec.reference, rows)
        self.pairs = pairs_of(spec.backend)

    def select(self, chunk: Chunk) -> None:
        super().select(chunk)
        self.logits.select(chunk)
        self.ref_transform = self.reference.transform.at(chunk.index)
        self.made: slice | None = None  # whose logits of the reference are there
        self.left, self.leaves = False, self.at_once and chunk.needs_grad

    def allocate(self, like: Tensor, exps: Tensor | None) -> None:
        self.stats = PairStats.empty(like)

    def forward(self, strip: slice, logits: Tensor) -> None:
        (kind, beta), found, alone = self.divergence, self.stats.at(strip), self.ranks.alone
        both = logits, self._of_reference(strip)
        transforms = self.transform.at(strip), self.ref_transform.at(strip)
        self.left = self.pairs.pair_stats(
            *both,
            self.targets[strip],
            *transforms,
            found,
            kind=kind if alone else None,
            beta=beta,
            invariant=self.spec.execution.batch_invariant,
            # Where all rows have their logits at hand.
            leave=self.leaves and strip == slice(0, len(self.stats.logps)),
        )
        if alone:
            return
        self._merge(found, self.targets[strip])
        self.pairs.divergences(*both, *transforms, found, **self.divergence._asdict())
        self.ranks.sum(found.divergence)
        self.ranks.sum(found.mean)

    def _of_reference(self, strip: slice) -> Tensor:
        """The reference's logits of a strip of the rows in flight."""
        if self.made == strip:
            return self.logits.buffer[: strip.stop - strip.start]
        self.made = strip
        return self.logits.compute(strip)

    def _merge(self, found: PairStats, targets: Tensor) -> None:
        """Sets the statistics of whole rows, from those of the columns here."""
        own, other = (
            self.ranks.merge(x, targets, None) for x in (found.of_policy, found.of_reference)
        )
        peak, ref_at_peak = self.ranks.largest(found.peak, found.ref_at_peak)
        (ref_peak,) = self.ranks.largest(found.ref_peak)
        shift = own.logsumexp - other.logsumexp
        whole = (*own[:3], *other[:3], shift, None, None, peak, ref_at_peak, ref_peak)
        for place, x in zip(found, whole, strict=False):
            if x is not None:
                place.copy_(x)
        found.set_without_anchors()

    def finish(self) -> PairStats:  # type: ignore[override]
        return self.stats

    def set_grads(self, d_stats: StatGrads) -> tuple[Tensor, Tensor] | None:
        assert d_stats.divergence is not None
        self.d_divergence = d_divergence = d_stats.divergence
        self.by_policy: RowGrads | None = None  # those of its own statistics, if there are any
        if d_stats.logps is not None:
            of_policy = self.stats.of_policy
            self.by_policy = RowGrads.of(of_policy, d_stats)
        elif self.left and self.spec.dtype == torch.float32:
            slopes = self.logits.buffer[: len(d_divergence)]
            return slopes, self.pairs.left_factors(self.transform, d_divergence)
        return None

    def backward(self, strip: slice, logits: Tensor, out: Tensor) -> None:
        if self.left:
            self.pairs.left_grads_(
                logits,
                self._of_reference(strip),
                self.targets[strip],
                self.transform.at(strip),
                None if self.by_policy is None else self.by_policy.at(strip),
                self.d_divergence[strip],
                out,
            )
            return
        self.pairs.pair_grads_(
            logits,
            self._of_reference(strip),
            self.targets[strip],
            self.transform.at(strip),
            self.ref_transform.at(strip),
            self.stats.at(strip),
            None if self.by_policy is None else self.by_policy.at(strip),
            self.d_divergence[strip],
            out,
            **self.divergence._asdict(),
        )

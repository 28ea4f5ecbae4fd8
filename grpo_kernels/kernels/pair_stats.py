"""Statistics of a row of two models' logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import TokenStats


class _Row:
    """Statistic of each row, float32 `[C]`."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __get__(self, stats: PairStats, _: object) -> Tensor:
        return stats.values[self.place]


@dataclass(frozen=True)
class PairStats:
    """Statistics of each row of two models' logits, `values` float32 `[15, C]`.

    Attributes:
        logps: log-probs of the targets under the policy, whose logits come first.
        logsumexp: of its logits.
        entropy: of its softmax.
        ref_logps: log-probs of the targets under the reference.
        ref_logsumexp: of its logits.
        ref_entropy: of its softmax.
        shift: `logsumexp - ref_logsumexp`, without the cancellation of that difference.
        divergence: of the softmaxes.
        mean: mean of h under the policy (`divergences.py`), computed with `shift`: the same
            rounding error.
        peak: the policy's largest logit.
        ref_at_peak: the reference's logit there.
        ref_peak: the reference's largest logit.
        anchor: subtracted from the policy's logits: by Triton's kernels before the temperature (0
            on several ranks), by torch after it.
        ref_anchor: subtracted from the reference's logits.
        log_total: log2 of the sum of the exponentials of the policy's logits minus the anchor.
    """

    values: Tensor

    logps, logsumexp, entropy = _Row(0), _Row(1), _Row(2)
    ref_logps, ref_logsumexp, ref_entropy = _Row(3), _Row(4), _Row(5)
    shift, divergence, mean = _Row(6), _Row(7), _Row(8)
    peak, ref_at_peak, ref_peak = _Row(9), _Row(10), _Row(11)
    anchor, ref_anchor, log_total = _Row(12), _Row(13), _Row(14)

    @staticmethod
    def size() -> int:
        """The number of statistics."""
        return 15

    @staticmethod
    def of(values: Sequence[Tensor], *, entropy: bool = True) -> PairStats:
        return PairStats(torch.stack(list(values)))

    @staticmethod
    def empty(like: Tensor) -> PairStats:
        """Uninitialized statistics of the rows of `like [C, V]`."""
        return PairStats(like.new_empty((PairStats.size(), len(like)), dtype=torch.float32))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.values.unbind())

    @property
    def policy_stats(self) -> TokenStats:
        """The policy's statistics."""
        return TokenStats(self.logps, self.logsumexp, self.entropy)

    @property
    def reference_stats(self) -> TokenStats:
        """The reference's statistics."""
        return TokenStats(self.ref_logps, self.ref_logsumexp, self.ref_entropy)

    def at(self, rows: Tensor | slice) -> PairStats:
        return PairStats(self.values[:, rows])

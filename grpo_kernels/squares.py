"""The sum of the squared probabilities of each token, beside the statistics of its logits.

    sum over j of p_j^2 = e^(lse(2 z) - 2 lse(z))

so it takes a second look at a chunk's logits, at half the temperature, and no other product. An
optimal baseline per token weighs with 1 - 2 p_y + sum p^2, the squared norm of the score.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .arguments import selected
from .backends import TokenStats
from .dense import Dense
from .row_plan import Chunk


@cache
def with_squares(kind: type[Dense]) -> type[Dense]:
    """A route as `kind`, whose sweeps also fill `squares`, float32 `[N]`, the first argument."""

    class WithSquares(kind):  # type: ignore[misc, valid-type]
        def __init__(self, squares: Tensor, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.squares = squares
            self.halves: list[TokenStats] | None = None

        def sweep(self, rows: Chunk) -> TokenStats:
            self.halves = []
            stats = super().sweep(rows)
            halves = [torch.cat(x) for x in zip(*(half[:2] for half in self.halves), strict=True)]
            self.halves = None
            lse = self.mine(self.merge_halves(TokenStats(*halves))).logsumexp
            found = (lse - 2 * stats.logsumexp).exp_()
            if self.plan.has_masked and self.call.mask is not None:
                found = selected(self.call.mask[rows.index], found, 0.0)
            self.squares[rows.index] = found
            return stats

        def merge_halves(self, halves: TokenStats) -> TokenStats:
            # As of a sweep that leaves nothing behind; what `add` needs stays as it is.
            swept: bool = self.swept  # type: ignore[has-type]
            self.swept = False
            whole: TokenStats = self.merge(halves)
            self.swept = swept
            return whole

        def logits(self, part: slice) -> Tensor:
            found: Tensor = super().logits(part)
            if self.halves is not None:
                transform = self.transform.at(part)
                half = replace(transform, temperature=transform.temperature / 2)
                targets = self.targets[part]
                self.halves.append(self.backend.token_stats(found, targets, half, entropy=False))
            return found

    return WithSquares

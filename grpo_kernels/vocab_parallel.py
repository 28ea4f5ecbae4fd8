"""A head whose rows of W lie on several ranks: each sweeps some columns of every row of logits.

The statistics of whole rows are merged from those of the ranks (`vocab_shard.py`). With these the
gradient of a rank's logits follows from its own; dH = sum_r D_r W_r is reduced.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import HeadCall
from .backends import Entries, LogitTransform, TokenStats
from .dense import Dense, Gradients, put_rows
from .row_plan import Buffers, Chunk, RowPlan, buffer_rows, plan_rows
from .support import KeptSets
from .vocab_shard import VocabShard


def plan_of_ranks(
    shard: VocabShard, call: HeadCall, weight: Tensor, active: Tensor | None,
    with_grad: Tensor | None, buffers: Buffers,
) -> RowPlan:  # fmt: skip
    """Plans as the rank with the most columns has to, and as all ranks agree."""
    checks, N, chunk_bytes = call.checks, call.layout.num_tokens, call.execution.chunk_bytes
    buffers = buffers._replace(columns=shard.most)
    sizes = buffer_rows(weight, buffers, chunk_bytes)
    shard.check_equal(
        checks,
        "mask, advantages, chunk_bytes: expected the same on all ranks that share the "
        "vocabulary, as each has other columns for the same tokens; got others",
        torch.tensor(sizes, device=weight.device), active, with_grad,
    )  # fmt: skip
    plan = plan_rows(active, with_grad, checks, weight, N, buffers, chunk_bytes)
    return replace(plan, tiles=None)


class VocabParallel(Dense):
    """Rows of logits of which each rank has some columns."""

    def __init__(
        self, shard: VocabShard, call: HeadCall, plan: RowPlan, *, entropy: bool, keeps: bool
    ) -> None:
        super().__init__(call, plan, entropy=entropy, keeps=keeps)
        self.shard = shard
        self.sums: list[tuple[Tensor, Tensor, dist.Work]] = []

    def operands(self, rows: Chunk) -> tuple[list[Tensor], Tensor, LogitTransform]:
        xs, targets, transform = super().operands(rows)
        return xs, self.shard.place(targets), transform

    def sweep(self, rows: Chunk) -> TokenStats:
        self.slopes: list[Tensor] = []
        return super().sweep(rows)

    def logits(self, part: slice) -> Tensor:
        found = super().logits(part)
        if self.swept and self.transform.softcap is not None:
            of_targets = found.gather(1, self.targets[part, None].clamp(min=0)).squeeze(1)
            self.slopes.append(self.transform.at(part).softcap_slope(of_targets))  # type: ignore[arg-type]
        return found

    def merge(self, stats: TokenStats) -> TokenStats:
        whole = self.shard.merge(stats, self.targets)
        if self.swept:
            exps = self.gradient_rows(len(self.targets))
            slope = torch.cat(self.slopes) if self.slopes else None
            self.shard.mend(exps, self.targets, slope, stats, whole)
        return whole

    def multiply(self, rows: Chunk, d: Tensor, factors: Tensor | None, grads: Gradients) -> None:
        super().multiply(rows, d, factors, grads)
        for grad, share, work in self.sums:
            work.wait()
            put_rows(grad, rows.index, share)
        self.sums.clear()

    def put(self, grad: Tensor, rows: Chunk, share: Tensor, factors: Tensor | None) -> None:
        """Begins to add up the gradient of rows, which goes on beside the product with y."""
        if self.shard.layout == "partial":
            super().put(grad, rows, share, factors)
            return
        if factors is not None:
            share.mul_(factors[:, None])
        self.sums.append((grad, share, self.shard.sum(share)))


class SharedSets(KeptSets):
    """Kept sets of which each rank has the entries of its rows of the head.

    Each makes the logits of its own, which are added up: 4 bytes per entry. Statistics and D are
    then the same on all ranks, dy is each rank's own, and dx is added up once.
    """

    shard: VocabShard

    @cached_property
    def _mine(self) -> tuple[Entries, Tensor]:
        """This rank's entries, with the ids of its columns; and which of all they are."""
        entries, shard = self.entries, self.shard
        places = entries.ids - shard.start
        here = (places >= 0) & (places < shard.columns)
        which = here.nonzero().squeeze(1)
        ids = places[which]
        offsets = torch.nn.functional.pad(here.cumsum(0), (1, 0))[entries.offsets]
        order = ids.argsort(stable=True)
        return Entries(ids, entries.tokens[which], offsets, entries.positions, order), which

    @property
    def here(self) -> Entries:
        return self._mine[0]

    def own(self, d: Tensor) -> Tensor:
        return d[self._mine[1]]

    def whole(self, z: Tensor) -> Tensor:
        everyone = z.new_zeros(len(self.entries)).index_put_((self._mine[1],), z)
        return self._sum(everyone)

    def whole_rows(self, d_x: Tensor) -> Tensor:
        return d_x if self.shard.layout == "partial" else self._sum(d_x)

    def _sum(self, share: Tensor) -> Tensor:
        if share.numel():
            self.shard.sum(share).wait()
        return share


def kept_sets_of_ranks(
    shard: VocabShard, call: HeadCall, support: Any, targets: Tensor | None, *, logsumexp: bool
) -> KeptSets:
    """The kept sets, of which all ranks have to have the same."""
    sets = SharedSets(call, support, targets, shard.size, logsumexp=logsumexp)
    sets.shard = shard
    shard.check_equal(
        call.checks,
        "support: expected the same on all ranks that share the vocabulary; got others",
        *(x.long() for x in support),
    )
    return sets

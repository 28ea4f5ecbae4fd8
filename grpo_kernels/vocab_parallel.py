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
from .dense import OneRank, put_rows
from .row_plan import Buffers, RowPlan, buffer_rows, plan_rows
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


class ManyRanks(OneRank):
    """Ranks of which each has some columns of every row of logits."""

    def __init__(self, shard: VocabShard) -> None:
        self.shard = shard
        self.slopes: list[Tensor] = []
        self.sums: list[tuple[Tensor, slice | Tensor, Tensor, dist.Work]] = []

    def place(self, targets: Tensor) -> Tensor:
        return self.shard.place(targets)

    def see(self, logits: Tensor, targets: Tensor, transform: LogitTransform) -> None:
        slope = transform.softcap_slope(logits.gather(1, targets.clamp(min=0)[:, None]))
        if slope is not None:
            self.slopes.append(slope.squeeze(1))

    def merge(self, stats: TokenStats, targets: Tensor, exps: Tensor | None) -> TokenStats:
        whole = self.shard.merge(stats, targets)
        if exps is not None:
            slope = torch.cat(self.slopes) if self.slopes else None
            self.shard.mend(exps, targets, slope, stats, whole)
        self.slopes.clear()
        return whole

    def sum(self, picked: Tensor, ids: Tensor) -> Tensor:
        """Adds them up over the ranks, 4 bytes each."""
        total = torch.where(ids < 0, 0.0, picked)
        self.shard.sum(total).wait()
        return total

    def put(
        self, grad: Tensor, index: slice | Tensor, share: Tensor, factors: Tensor | None
    ) -> None:
        """Begins to add up the gradient of rows, which goes on beside the product with y."""
        if self.shard.layout == "partial":
            put_rows(grad, index, share, factors)
            return
        if factors is not None:
            share.mul_(factors[:, None])
        self.sums.append((grad, index, share, self.shard.sum(share)))

    def wait(self) -> None:
        for grad, index, share, work in self.sums:
            work.wait()
            put_rows(grad, index, share)
        self.sums.clear()


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

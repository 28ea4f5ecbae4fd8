"""Which sequence each token belongs to, and sums over sequences, which may lie on several ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Sequences:
    """The sequence of each token: `ids`, int64 `[N]`, in `[0, count)`.

    With a `group`, other tokens of the same sequences are on its other ranks.
    """

    ids: Tensor
    count: int
    group: ProcessGroup | None = None

    def sum(self, x: Tensor) -> Tensor:
        """Sums `x [..., N]` over each sequence, `[..., B]`, on all ranks that have a part of it.

        In float64 where there is one: a GPU adds in any order, and the differences that makes are
        then rounded away.
        """
        wide = widened(x)
        total = wide.new_zeros(*x.shape[:-1], self.count)
        return self.over_ranks(total.index_add_(-1, self.ids, wide)).to(x.dtype)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Gives every token its sequence's value, `[N]` from `[B]`."""
        return per_sequence[self.ids]

    def over_ranks(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, with its gradient."""
        return x if self.group is None else _SumOverRanks.apply(x, self.group)

    def largest(self, x: Tensor) -> Tensor:
        """The maximum of all ranks' `x`; without a gradient."""
        if self.group is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def across(self, group: object) -> Sequences:
        """The same sequences with parts on all ranks of `group`, which are asked how many they are.

        Raises:
            TypeError: no process group.
            ValueError: on all ranks alike, if they have different numbers of sequences.
        """
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "seq_group: expected a torch.distributed process group that this rank is in; got "
                f"{group!r}"
            )
        mine = torch.tensor([self.count], device=self.ids.device)
        of_ranks = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(of_ranks, mine, group=group)
        counts = [int(x) for x in torch.cat(of_ranks)]
        if len(set(counts)) > 1:
            raise ValueError(
                "seq_group: expected the same sequences on all ranks, of which each has some "
                f"tokens or none; got {counts} sequences"
            )
        return replace(self, group=group)


def widened(x: Tensor) -> Tensor:
    """The same in float64, except on devices that have none."""
    return x.double() if x.device.type in ("cpu", "cuda", "meta") else x


class _SumOverRanks(torch.autograd.Function):
    """Each rank's loss depends on the sum, so that the gradients of all of them add up, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor, None]:
        d_x = d_total.contiguous().clone()
        dist.all_reduce(d_x, group=ctx.group)
        return d_x, None

"""A head whose rows of W lie on several ranks: each sweeps some columns of every row of logits.

The statistics of whole rows are merged from those of the ranks (`vocab_shard.py`). With these the
gradient of a rank's logits follows from its own; dH = sum_r D_r W_r is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import HeadCall
from .backends import Entries, LogitTransform, TokenStats
from .dense import Dense, Gradients, put_rows
from .row_plan import Buffers, Chunk, RowPlan, buffer_rows, order_of, plan_rows
from .support import KeptSets
from .vocab_shard import Counts, VocabShard


@dataclass(frozen=True)
class SharedChunk(Chunk):
    """A chunk of the rows of all ranks: this rank's, and how many each has."""

    of_ranks: tuple[int, ...]


@dataclass(frozen=True)
class SharedPlan(RowPlan):
    """The rows of one call where each rank has its own: every chunk has a part of each rank's.

    Args:
        ranks: what each rank has of rows with a gradient and of all.
        rank: this one.
    """

    ranks: Counts = ()
    rank: int = 0

    def chunks(self) -> Iterator[Chunk]:
        for rows, needs_grad, of_ranks in self._shared_parts():
            index = rows if self.order is None else self.order[rows]
            yield SharedChunk(index, rows.stop - rows.start, needs_grad, of_ranks)

    def _shared_parts(self) -> Iterator[tuple[slice, bool, tuple[int, ...]]]:
        grad_rows = [(0, grad) for grad, _ in self.ranks]
        yield from self._cut(grad_rows, self.max_chunk_rows, True)
        yield from self._cut(self.ranks, self.max_logit_rows, False)

    def _cut(
        self, ranges: Sequence[tuple[int, int]], most: int, needs_grad: bool
    ) -> Iterator[tuple[slice, bool, tuple[int, ...]]]:
        """Cuts each rank's range of rows into as many parts as leave `most` at a time in all."""
        # Each rank's part may be rounded up.
        total, most = sum(end - begin for begin, end in ranges), most - len(ranges)
        count = -(-total // max(1, most))
        for place in range(count):
            parts = []
            for begin, end in ranges:
                step = -(-(end - begin) // count)
                start = min(begin + place * step, end)
                parts.append(slice(start, min(start + step, end)))
            sizes = tuple(part.stop - part.start for part in parts)
            yield parts[self.rank], needs_grad, sizes

    @property
    def largest_chunk(self) -> int:
        """The rows of the largest chunk, those of other ranks included."""
        return max((sum(of_ranks) for *_, of_ranks in self._shared_parts()), default=0)

    @property
    def logit_rows(self) -> int:
        return min(max(self.max_logit_rows, len(self.ranks)), self.largest_chunk)


def plan_of_ranks(
    shard: VocabShard, call: HeadCall, weight: Tensor, active: Tensor | None,
    with_grad: Tensor | None, buffers: Buffers,
) -> RowPlan:  # fmt: skip
    """Plans as the rank with the most columns has to, and as all ranks agree."""
    checks, N, chunk_bytes = call.checks, call.layout.num_tokens, call.execution.chunk_bytes
    # States, their gradients and what is sent of both, of the rows of all ranks.
    row_bytes = 14 * weight.shape[1] if shard.own_rows else 0
    buffers = buffers._replace(columns=shard.most, row_bytes=row_bytes)
    sizes = buffer_rows(weight, buffers, chunk_bytes)
    if not shard.own_rows:
        shard.check_equal(
            checks,
            "mask, advantages, chunk_bytes: expected the same on all ranks that share the "
            "vocabulary, as each has other columns for the same tokens; got others",
            torch.tensor(sizes, device=weight.device), active, with_grad,
        )  # fmt: skip
        plan = plan_rows(active, with_grad, checks, weight, N, buffers, chunk_bytes)
        return replace(plan, tiles=None)
    if active is not None and with_grad is not None:
        with_grad = with_grad & active
    try:
        counts = iter(checks.read(*(x.sum() for x in (active, with_grad) if x is not None)))
    except ValueError:
        shard.agree(0, 0, sizes, weight.device, failed=True)
        raise
    num_rows = N if active is None else next(counts)
    num_grad_rows = num_rows if with_grad is None else next(counts)
    ranks, sizes = shard.agree(num_grad_rows, num_rows, sizes, weight.device, failed=False)
    order = order_of(active, with_grad, N, num_rows, num_grad_rows, weight.device)
    rank = shard.group.rank()
    return SharedPlan(order, num_grad_rows, num_rows, *sizes, ranks=ranks, rank=rank)


class VocabParallel(Dense):
    """Rows of logits of which each rank has some columns."""

    def __init__(
        self, shard: VocabShard, call: HeadCall, plan: RowPlan, *, entropy: bool, keeps: bool
    ) -> None:
        super().__init__(call, plan, entropy=entropy, keeps=keeps)
        self.shard = shard
        # Of the ranks' rows in flight, if each has its own.
        self.sizes: tuple[int, ...] | None = None
        self.sums: list[tuple[Tensor, Chunk, Tensor, dist.Work]] = []

    def operands(self, rows: Chunk) -> tuple[list[Tensor], Tensor, LogitTransform]:
        xs, targets, transform = super().operands(rows)
        if self.shard.own_rows:
            assert isinstance(rows, SharedChunk)
            self.sizes = rows.of_ranks
            own = len(xs) - self.shard.biased
            # A bias has ones on every rank.
            ones = [x.new_ones(()).expand(sum(self.sizes), 1) for x in xs[own:]]
            xs, targets = [*map(self._of_all, xs[:own]), *ones], self._of_all(targets)
            if isinstance(transform.temperature, Tensor):
                temperature = self._of_all(transform.temperature)
                transform = replace(transform, temperature=temperature)
        return xs, self.shard.place(targets), transform

    def _of_all(self, x: Tensor) -> Tensor:
        """The values of the rows in flight, from those of this rank's."""
        return x if self.sizes is None else self.shard.gather_rows(x, self.sizes)

    def mine(self, stats: TokenStats) -> TokenStats:
        if self.sizes is None:
            return stats
        rank = self.shard.group.rank()
        begin = sum(self.sizes[:rank])
        return stats.at(slice(begin, begin + self.sizes[rank]))

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

    def resume(self, rows: Chunk, stats: TokenStats) -> None:
        super().resume(rows, stats)
        self.stats = TokenStats(*(None if x is None else self._of_all(x) for x in stats))  # type: ignore[arg-type]

    def add(
        self,
        rows: Chunk,
        grads: Gradients,
        d_logps: Tensor,
        d_entropy: Tensor | None = None,
        d_logsumexp: Tensor | None = None,
    ) -> None:
        if self.sizes is not None:
            given = [d_logps if d_logps.ndim == 2 else d_logps[:, None]]  # one per target
            if not self.swept:
                # What is gathered has to be the same on all ranks, of whatever the losses are made.
                none = torch.zeros_like(given[0][:, 0])
                given += [(none if x is None else x)[:, None] for x in (d_logsumexp, d_entropy)]
            # One value per row lies behind the other, as kernels address them.
            found = self._of_all(torch.cat(given, 1)).T.contiguous()
            count = given[0].shape[1]
            d_logps = found[0] if d_logps.ndim == 1 else found[:count].T
            if not self.swept:
                d_logsumexp, d_entropy = found[count], found[-1] if self.entropy else None
        super().add(rows, grads, d_logps, d_entropy, d_logsumexp)

    def multiply(
        self, rows: Chunk, xs: Sequence[Tensor], d: Tensor, factors: Tensor | None, grads: Gradients
    ) -> None:
        super().multiply(rows, xs, d, factors, grads)
        for grad, of_rows, share, work in self.sums:
            work.wait()
            put_rows(grad, of_rows.index, share)
        self.sums.clear()

    def put(self, grad: Tensor, rows: Chunk, share: Tensor, factors: Tensor | None) -> None:
        """Begins to add up the gradient of rows, which goes on beside the product with y."""
        if self.shard.layout == "partial":
            super().put(grad, rows, share, factors)
            return
        if factors is not None:
            share.mul_(factors[:, None])
        self.sums.append((grad, rows, *self.shard.sum(share, self.sizes)))


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
            share, work = self.shard.sum(share, None)
            work.wait()
        return share


def kept_sets_of_ranks(
    shard: VocabShard, call: HeadCall, support: Any, targets: Tensor | None, *, logsumexp: bool
) -> KeptSets:
    """The kept sets, of which all ranks have to have the same."""
    if shard.own_rows:
        raise ValueError(
            "support: expected None where ranks with tokens of their own share the vocabulary, "
            f"ranks.hidden={shard.layout!r}; got a support"
        )
    sets = SharedSets(call, support, targets, shard.size, logsumexp=logsumexp)
    sets.shard = shard
    shard.check_equal(
        call.checks,
        "support: expected the same on all ranks that share the vocabulary; got others",
        *(x.long() for x in support),
    )
    return sets

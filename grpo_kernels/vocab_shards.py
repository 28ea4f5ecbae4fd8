"""A head whose rows of W lie on several ranks: each has some of the vocabulary's columns.

Every rank sweeps its own logits. One gather of 12 bytes per token then tells all of them

    lse_r      log-sum-exp of the rank's columns
    E_r        entropy within them
    l_r        log-prob of the target within them, where the rank has it

from which each merges, in the order of the ranks and thus to the same bits,

    lse = log sum_r e^(lse_r),    w_r = e^(lse_r - lse)
    l   = l_r + log w_r           of the rank that has the target
    E   = sum_r w_r (E_r - log w_r)

With these the gradient of a rank's logits follows from its own; dH = sum_r D_r W_r is reduced.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .backends import LogitTransform, RowGrads, TokenStats, Words
from .config import check_choice
from .head_call import LAYOUTS, OWN_ROWS
from .layout import HEAD_DTYPES, ValueChecks

if TYPE_CHECKING:
    from .head_call import HeadOperands

# The least share of a row's softmax that a rank with the target is taken to have, so that the
# entry of the target stays finite. By less it is too much than float32 resolves.
_LEAST_SHARE = 2.0**-24
# Rows with a gradient, and all that take part, of each rank.
Counts = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class VocabShard:
    """The columns of the vocabulary that this rank has, of those of a group.

    Args:
        group: whose ranks have the others.
        start: the vocabulary's id of this rank's first column.
        columns: of this rank.
        size: columns of all ranks.
        most: columns of the rank that has the most.
        layout: of the rows, one of `LAYOUTS`.
        device: of all tensors.
    """

    group: dist.ProcessGroup
    start: int
    columns: int
    size: int
    most: int
    layout: str
    device: torch.device

    @property
    def own_rows(self) -> bool:
        """Whether each rank has rows of its own."""
        return self.layout in OWN_ROWS

    @property
    def share(self) -> float:
        """What gradients of the head are multiplied with: means are over batches."""
        return 1 / self.group.size() if self.layout == "data" else 1.0

    def check_plan(self, checks: ValueChecks, decisive: Sequence[Any]) -> None:
        """Asks whether all ranks have the same of what decides on the chunks they compute."""
        none = torch.zeros(0, dtype=torch.int64, device=decisive[0].device)
        mine = torch.stack([_checksum(none if x is None else x) for x in decisive])
        checks.add(
            (_gathered(mine, self.group) != mine).any(1),
            "mask, advantages, chunk_bytes: expected the same on all ranks that share the "
            "vocabulary, as each has other columns for the same tokens; got others",
        )

    def check_support(self, checks: ValueChecks, ids: Tensor, offsets: Tensor) -> None:
        """Asks whether all ranks have the same words for each token."""
        mine = torch.stack([_checksum(ids), _checksum(offsets)])
        checks.add(
            (_gathered(mine, self.group) != mine).any(1),
            "support: expected the same on all ranks that share the vocabulary; got others",
        )

    def own_words(self, words: Words) -> tuple[Words, Tensor]:
        """The words that this rank has, with the ids of its columns; and which of all they are."""
        places = words.ids - self.start
        here = (places >= 0) & (places < self.columns)
        mine = here.nonzero().squeeze(1)
        ids = places[mine]
        offsets = torch.nn.functional.pad(here.cumsum(0), (1, 0))[words.offsets]
        order = ids.argsort(stable=True)
        return Words(ids, words.tokens[mine], offsets, words.positions, order), mine

    def agree(
        self, grad_rows: int, rows: int, sizes: tuple[int, int], failed: bool
    ) -> tuple[Counts, tuple[int, int]]:
        """What each rank has of rows with a gradient and of all; the smallest `sizes` of chunks.

        Raises:
            ValueError: on all ranks but it, if one has failed.
        """
        mine = torch.tensor([grad_rows, rows, *sizes, failed], device=self.device)
        told = _gathered(mine, self.group).tolist()
        lost = [rank for rank, row in enumerate(told) if row[4]]
        if lost and not failed:
            raise ValueError(f"vocab_group: expected all ranks to call; rank {lost[0]} refused")
        smallest = min(row[2] for row in told), min(row[3] for row in told)
        return tuple((row[0], row[1]) for row in told), smallest

    def gather_rows(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks, `[M, ...]`, from this one's; `sizes` has how many each has."""
        if len(set(sizes)) == 1:
            return _gathered(x.contiguous(), self.group).flatten(0, 1)
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: len(x)] = x
        ranks = _gathered(padded, self.group)
        return torch.cat([ranks[rank, :size] for rank, size in enumerate(sizes)])

    def check_equal(self, d_loss: Tensor) -> None:
        """Raises if ranks scale their losses differently, whose gradients are one sum by now."""
        equal = (_gathered(d_loss[None], self.group) == d_loss).all()
        torch._assert_async(
            equal, "hidden_layout: expected all ranks to scale the loss alike; some do not"
        )

    def factors(self, factor: Tensor) -> list[Tensor]:
        """What the gradients are multiplied with, in the order of `HeadOperands`."""
        of_head = factor * self.share
        return [factor, of_head, of_head, factor, of_head]

    def least(self, x: Tensor) -> Tensor:
        """The smallest of the ranks' values, 0-d."""
        return _gathered(x[None], self.group).amin()

    def place(self, targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Places of targets among this rank's columns, and whether they are there.

        The first column stands for those that are not.
        """
        places = targets - self.start
        here = (places >= 0) & (places < columns)
        return torch.where(here, places, 0), here

    def merge(self, stats: TokenStats, here: Tensor) -> tuple[TokenStats, TokenStats]:
        """The statistics of whole rows, from those of this rank's columns.

        Args:
            stats: of rows `[C]` of this rank's logits.
            here: bool `[C]`, whether the rank has the target.

        Returns:
            The statistics as one rank with all columns has them; and the same, but where the target
            is elsewhere with the log-prob of the column that stands for it. `total` is such that
            p = X / total for this rank's X.
        """
        # Columns that are -inf throughout have no share, whatever they are among themselves.
        absent = stats.logsumexp == -torch.inf
        told = [stats.logsumexp, stats.logps.masked_fill(~here | absent, -torch.inf)]
        if stats.entropy is not None:
            told.append(stats.entropy.masked_fill(absent, 0.0))
        ranks = _gathered(torch.stack(told), self.group)
        logsumexps, of_targets = ranks[:, 0], ranks[:, 1]
        peak = logsumexps.amax(0)
        shifted = logsumexps - peak
        log_total = shifted.exp().sum(0).log()
        log_shares = shifted - log_total
        logps = (of_targets + log_shares).amax(0)
        entropy = total = None
        if stats.entropy is not None:
            terms = log_shares.exp() * (ranks[:, 2] - log_shares)
            entropy = torch.where(log_shares == -torch.inf, 0.0, terms).sum(0)
        log_share = log_shares[self.group.rank()]
        if stats.total is not None:
            share = log_share.exp()
            share = torch.where(here, share.clamp(min=_LEAST_SHARE), share)
            # Where the share is 0 the total is inf, and the gradient 0.
            total = torch.where(absent, torch.inf, stats.total / share)
        whole = TokenStats(logps, peak + log_total, entropy, total)
        own = torch.where(here, logps, stats.logps + log_share)
        return whole, whole._replace(logps=own.masked_fill(absent, -torch.inf))

    def mend(
        self, exps: Tensor, places: Tensor, transform: LogitTransform, here: Tensor,
        stats: TokenStats, own: TokenStats, biased: bool,
    ) -> None:  # fmt: skip
        """Sets the targets' entries in `exps [C, V]` to those of whole rows.

        Args:
            exps: as the sweep over this rank's columns has left it.
            places: of the targets `[C]`, as `place` gives them.
            transform: of the logits.
            here: bool `[C]`, whether the rank has the target.
            stats: of this rank's columns.
            own: those that `merge` made of them.
            biased: whether the logits have a bias, which alone may be -inf.
        """
        assert own.total is not None and stats.total is not None
        elsewhere = stats.total * stats.logps.exp()
        values = torch.where(here, own.total * own.logps.expm1(), elsewhere)
        if transform.softcap is not None:
            z = (stats.logps + stats.logsumexp) * transform.temperature
            values = values * (1 - (z / transform.softcap).square())
        exps.scatter_(1, places[:, None], values.to(exps.dtype)[:, None])
        if biased:
            exps.masked_fill_((stats.logsumexp == -torch.inf)[:, None], 0.0)

    def sum(self, share: Tensor, sizes: Sequence[int] | None) -> tuple[Tensor, dist.Work]:
        """Begins to add up the ranks' shares in a gradient of rows; returns where the sum will be.

        `sizes`: where each rank has rows of its own, how many; it gets the sum of these alone.
        """
        if sizes is None:
            return share, _begun(dist.all_reduce(share, group=self.group, async_op=True))
        parts = share.view(len(sizes), -1, share.shape[1]) if len(set(sizes)) == 1 else None
        if parts is None:
            parts, begin = share.new_zeros((len(sizes), max(sizes), share.shape[1])), 0
            for rank, size in enumerate(sizes):
                parts[rank, :size] = share[begin : begin + size]
                begin += size
        mine = torch.empty_like(parts[0])
        # Newer versions of torch have it under the first name.
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        work = scatter(mine, parts.flatten(0, 1), group=self.group, async_op=True)
        return mine[: sizes[self.group.rank()]], _begun(work)

    def stand_ins(
        self, grads: RowGrads, transform: LogitTransform, logits: Tensor, here: Tensor
    ) -> RowGrads:
        """The gradient of rows, some of whose targets other ranks have.

        Args:
            grads: of rows that have their targets here.
            transform: of the logits.
            logits: raw `[C, V]`; the first column stands for targets elsewhere.
            here: bool `[C]`, whether the rank has the target.
        """
        first = transform.of_columns(slice(0, 1)).apply(logits[:, :1]).squeeze(1)
        stats = TokenStats(first - grads.logsumexp, grads.logsumexp, grads.entropy)
        nothing = torch.zeros_like(grads.d_logps)
        other = RowGrads.of(stats, nothing, grads.d_softmax, grads.d_entropy)
        return grads._replace(
            d_logps=torch.where(here, grads.d_logps, 0.0),
            at_target=torch.where(here, grads.at_target, other.at_target),
        )


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def local_parts(
    weight: object, bias: object, low_rank: object, group: object
) -> tuple[Any, Any, Any, Any]:
    """This rank's parts of a head that is given as DTensors, and the group that has the others."""
    b = low_rank[1] if isinstance(low_rank, (tuple, list)) and len(low_rank) == 2 else None
    parts = {"weight": weight, "bias": bias, "low_rank[1]": b}
    given = {name: x for name, x in parts.items() if x is not None}
    if not any(isinstance(x, DTensor) for x in given.values()):
        return weight, bias, low_rank, group
    for name, x in given.items():
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{name}: expected a DTensor, as another tensor of the head is one; got "
                f"{type(x).__name__}"
            )
        if x.device_mesh.ndim != 1 or x.placements != (Shard(0),):
            raise ValueError(
                f"{name}: expected a DTensor with Shard(0) on a mesh of one dimension, or a plain "
                f"tensor, whole; got {x.placements}: pass {name}.full_tensor(), or call this "
                "inside the wrapped module's forward"
            )
    if group is not None:
        raise ValueError("vocab_group: expected None with a DTensor, which has its own; got one")
    assert isinstance(weight, DTensor)
    local = {name: x.to_local() for name, x in given.items() if isinstance(x, DTensor)}
    if b is not None:
        low_rank = (low_rank[0], local["low_rank[1]"])  # type: ignore[index]
    return local["weight"], local.get("bias"), low_rank, weight.device_mesh.get_group()


def shard_of(
    group: object,
    start: object,
    layout: str,
    operands: HeadOperands,
    targets: Tensor,
    dtype: torch.dtype,
    refused: Mapping[str, tuple[object, object]],
    agreed: Mapping[str, float],
) -> VocabShard:
    """Which of the group's columns the rows of `weight` are; asks the other ranks.

    Args:
        group: a process group.
        start: the first column's id, or None.
        layout: one of `LAYOUTS`.
        operands: this rank's rows of the head.
        targets: ids `[N]`, which all ranks have.
        dtype: of the GEMMs.
        refused: options that are not for shards: what is expected instead, and what came.
        agreed: further numbers that have to be the same on all ranks.

    Raises:
        ValueError: on all ranks alike, if their columns are not those of one vocabulary, or if they
            would not compute the same.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"vocab_group: expected a torch.distributed process group that this rank is in; got "
            f"{group!r}"
        )
    if start is not None and (isinstance(start, bool) or not isinstance(start, int)):
        raise TypeError(f"vocab_start: expected an int, or None; got {start!r}")
    check_choice("hidden_layout", layout, LAYOUTS)
    for name, (expected, given) in refused.items():
        if given != expected:
            raise ValueError(
                f"{name}: expected {expected!r} where ranks share the vocabulary; got {given!r}"
            )
    weight, bias, b, wanted = operands.weight, operands.bias, operands.lora_b, operands.wants_grad()
    rank = 0 if b is None else b.shape[1]
    flags = {
        "vocab_start": start is not None, "bias": bias is not None, "low_rank": rank > 0,
        "gradient of hidden": wanted[0], "gradient of low_rank[0]": wanted[3],
        "gradient": any(wanted),
    }  # fmt: skip
    dtypes = {"weight's dtype": weight.dtype, "dtype of the GEMMs": dtype}
    own_rows = layout in OWN_ROWS
    numbers = {
        "hidden_layout": LAYOUTS.index(layout), "H": weight.shape[1], "rank of low_rank": rank,
        "tokens": 0 if own_rows else len(targets),
    }  # fmt: skip
    mine = [
        start or 0, len(weight), *map(int, flags.values()),
        *map(HEAD_DTYPES.index, dtypes.values()), *numbers.values(),
        *struct.unpack(f"{len(agreed)}q", struct.pack(f"{len(agreed)}d", *agreed.values())),
    ]  # fmt: skip
    ids = _checksum(targets[:0] if own_rows else targets)[None]
    told = _gathered(torch.cat([torch.tensor(mine, device=ids.device), ids]), group)
    begins, counts, *columns, of_ids = told.T.tolist()
    for name, values in zip((*flags, *dtypes, *numbers, *agreed), columns, strict=True):
        if len(set(values)) == 1:
            continue
        if name in flags:
            having = [r for r, value in enumerate(values) if value]
            raise ValueError(f"{name}: expected on all ranks or on none; got it on ranks {having}")
        if name in dtypes:
            values = [str(HEAD_DTYPES[x]).removeprefix("torch.") for x in values]
        if name == "hidden_layout":
            values = [LAYOUTS[x] for x in values]
        if name in agreed:
            values = [struct.unpack("d", struct.pack("q", x))[0] for x in values]
        raise ValueError(f"{name}: expected the same on all ranks; got {values}")
    if len(set(of_ids)) > 1:
        raise ValueError(
            "targets: expected the same on all ranks that share the vocabulary, as each has other "
            "columns for the same tokens; got others. Ranks with tokens of their own say so: "
            "hidden_layout='data' or 'sequence'. A weight that FSDP shards is whole inside the "
            "wrapped module's forward: call this there"
        )
    if min(counts) < 1:
        raise ValueError(f"weight: expected a row or more on every rank; got {counts} rows")
    if start is None:
        begins = [sum(counts[:place]) for place in range(len(counts))]
    spans = sorted(zip(begins, counts, strict=True))
    if [begin for begin, _ in spans] != [0, *_ends(spans)][:-1]:
        raise ValueError(
            "vocab_start: expected every column on one rank; got columns "
            + ", ".join(f"{a} to {a + n - 1}" for a, n in zip(begins, counts, strict=True))
        )
    begin, own = begins[group.rank()], counts[group.rank()]
    return VocabShard(group, begin, own, sum(counts), max(counts), layout, weight.device)


def _ends(spans: Sequence[tuple[int, int]]) -> list[int]:
    return [begin + count for begin, count in spans]


def _checksum(x: Tensor) -> Tensor:
    """A number, int64 0-d, that changes with any value `[N]`, its place, and N."""
    bits = x.float().view(torch.int32).long() if x.is_floating_point() else x.long()
    return ((bits + 1) * torch.arange(1, len(x) + 1, device=x.device)).sum() + len(x)


def _gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What each rank has, in the order of the ranks: `[R, ...]`."""
    ranks = mine.new_empty((group.size(), *mine.shape))
    dist.all_gather([*ranks], mine, group=group)
    return ranks

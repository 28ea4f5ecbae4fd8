"""Shards of the vocabulary: what each rank has of it, and what the ranks gather.

Every rank sweeps its own columns of every row of logits. One gather of 12 bytes per token then
tells all of them

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

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..base.checks import HEAD_DTYPES, ValueChecks, name_of
from ..kernels import Entries, LogitTransform, TokenStats
from .budget import Buffers, buffer_rows
from .call import HeadCall, HeadSpec
from .chunked_head import SingleRank
from .lm_head import HIDDEN_LAYOUTS, LMHead, Support, VocabRanks
from .products import put_rows
from .row_plan import RowPlan

# The least share of a row's softmax that a rank with the target is taken to have, so that the
# entry of the target stays finite. By less it is too much than float32 resolves.
_LEAST_SHARE = 2.0**-24


class VocabShards(SingleRank):
    """Ranks of which each has some columns of every row of logits.

    Args:
        group: of the ranks.
        start: the vocabulary's id of this rank's first column.
        counts: columns of each rank.
        layout: whose gradients of rows are, one of `HIDDEN_LAYOUTS`.
        biased: whether the last term of the raw logits is a bias, which alone may be -inf.
    """

    alone = False

    def __init__(
        self, group: dist.ProcessGroup, start: int, counts: list[int], layout: str, biased: bool
    ) -> None:
        super().__init__(sum(counts))
        self.group, self.start, self.layout, self.biased = group, start, layout, biased
        self.own, self.most = counts[group.rank()], max(counts)
        self.slopes: list[Tensor] = []
        self.sums: list[tuple[Tensor, slice | Tensor, Tensor, dist.Work]] = []

    def plan(
        self, spec: HeadSpec, weight: Tensor, active: Tensor | None, with_grad: Tensor | None,
        buffers: Buffers,
    ) -> RowPlan:  # fmt: skip
        """Plans as the rank with the most columns has to, and as all ranks agree."""
        buffers = buffers._replace(columns=self.most)
        sizes = buffer_rows(weight, buffers, spec.execution.chunk_bytes)
        self._ask_same(
            spec.checks,
            "mask, advantages, chunk_bytes: expected the same on all ranks that share the "
            "vocabulary, as each has other columns for the same tokens; got others",
            torch.tensor(sizes, dtype=torch.int64, device=weight.device), active, with_grad,
        )  # fmt: skip
        return super().plan(spec, weight, active, with_grad, buffers)

    def _ask_same(self, checks: ValueChecks, what: str, *tensors: Tensor | None) -> None:
        """Asks whether all ranks have the same of `given`, `[N]` each."""
        device = next(x.device for x in tensors if x is not None)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        local = torch.stack([_checksum(none if x is None else x) for x in tensors])
        checks.add((_gathered(local, self.group) != local).any(1), what)

    def local_ids(self, targets: Tensor) -> Tensor:
        places = targets - self.start
        return torch.where((places >= 0) & (places < self.own), places, -1)

    def before_overwrite(self, logits: Tensor, targets: Tensor, transform: LogitTransform) -> None:
        slope = transform.softcap_slope(logits.gather(1, targets.clamp(min=0)[:, None]))
        if slope is not None:
            self.slopes.append(slope.squeeze(1))

    def merge(self, stats: TokenStats, targets: Tensor, exps: Tensor | None) -> TokenStats:
        whole = self._merged(stats, targets)
        if exps is not None:
            slope = torch.cat(self.slopes) if self.slopes else None
            self._mend(exps, targets, slope, stats, whole)
        self.slopes.clear()
        return whole

    def _merged(self, stats: TokenStats, places: Tensor) -> TokenStats:
        """The statistics of whole rows, from those of this rank's columns.

        Args:
            stats: of rows `[C]` of this rank's logits.
            places: of their targets, as `local_ids` gives them.

        Returns:
            The statistics as one rank with all columns has them. `total` is such that p = X / total
            for this rank's X.
        """
        # Columns that are -inf throughout have no share, whatever they are among themselves.
        absent = stats.logsumexp == -torch.inf
        told = [stats.logsumexp, stats.logps.masked_fill(absent, -torch.inf)]
        if stats.entropy is not None:
            told.append(stats.entropy.masked_fill(absent, 0.0))
        ranks = _gathered(torch.stack(told), self.group)
        logsumexps, target_logps = ranks[:, 0], ranks[:, 1]
        peak = logsumexps.amax(0)
        shifted = logsumexps - peak
        log_total = shifted.exp().sum(0).log()
        log_shares = shifted - log_total
        logps = (target_logps + log_shares).amax(0)
        entropy = total = None
        if stats.entropy is not None:
            terms = log_shares.exp() * (ranks[:, 2] - log_shares)
            entropy = torch.where(log_shares == -torch.inf, 0.0, terms).sum(0)
        log_share = log_shares[self.group.rank()]
        if stats.total is not None:
            share = log_share.exp()
            share = torch.where(places < 0, share, share.clamp(min=_LEAST_SHARE))
            # Where the share is 0 the total is inf, and the gradient 0.
            total = torch.where(absent, torch.inf, stats.total / share)
        return TokenStats(logps, peak + log_total, entropy, total)

    def _mend(
        self, exps: Tensor, places: Tensor, slope: Tensor | None, stats: TokenStats,
        whole: TokenStats,
    ) -> None:  # fmt: skip
        """Sets the targets' entries in `exps [C, V]` to those of whole rows.

        Args:
            exps: as the sweep over this rank's columns has left it.
            places: of the targets `[C]`, as `local_ids` gives them.
            slope: of the softcap at the targets `[C]`; None without one.
            stats: of this rank's columns.
            whole: those that `_merged` made of them.
        """
        assert whole.total is not None
        values = whole.total * whole.logps.expm1()
        if slope is not None:
            values = values * slope
        mended = torch.where(places < 0, exps[:, 0], values.to(exps.dtype))
        exps.scatter_(1, places.clamp(min=0)[:, None], mended[:, None])
        if self.biased:
            exps.masked_fill_((stats.logsumexp == -torch.inf)[:, None], 0.0)

    def largest(self, values: Tensor, *values_at_peak: Tensor) -> tuple[Tensor, ...]:
        ranks = _gathered(torch.stack([values, *values_at_peak]), self.group)
        of = ranks[:, 0].argmax(0)
        return tuple(ranks.gather(0, of.expand(1, *ranks.shape[1:]))[0])

    def sum(self, share: Tensor) -> Tensor:
        """Adds up the ranks' shares, in place."""
        if share.numel():
            self._begin_sum(share).wait()
        return share

    def _begin_sum(self, share: Tensor) -> dist.Work:
        work = dist.all_reduce(share, group=self.group, async_op=True)
        assert work is not None
        return work

    def store_rows(
        self, grad: Tensor, index: slice | Tensor, share: Tensor, factors: Tensor | None
    ) -> None:
        """Begins to add up the gradient of rows, which goes on beside the product with y."""
        if self.layout == "partial":
            put_rows(grad, index, share, factors)
            return
        if factors is not None:
            share.mul_(factors[:, None])
        self.sums.append((grad, index, share, self._begin_sum(share)))

    def finish_stores(self) -> None:
        for grad, index, share, work in self.sums:
            work.wait()
            put_rows(grad, index, share)
        self.sums.clear()

    # Of a support. Each rank makes the logits of the entries of its rows, which are added up: 4
    # bytes per entry. Statistics and D are then the same on all ranks, dy is each rank's own, and
    # dx is added up once.

    def same(self, support: Support, checks: ValueChecks) -> None:
        what = "support: expected the same on all ranks that share the vocabulary; got others"
        self._ask_same(checks, what, *(x.long() for x in support))

    def here(self, entries: Entries) -> tuple[Entries, Tensor]:
        """Entries of this rank, with the ids of its columns; and which of all they are."""
        places = self.local_ids(entries.ids)
        is_local = places >= 0
        which = is_local.nonzero().squeeze(1)
        ids = places[which]
        offsets = torch.nn.functional.pad(is_local.cumsum(0), (1, 0))[entries.offsets]
        order = ids.argsort(stable=True)
        return Entries(ids, entries.tokens[which], offsets, entries.positions, order), which

    def whole(self, z: Tensor, which: slice | Tensor, count: int) -> Tensor:
        everyone = z.new_zeros(count)
        everyone[which] = z
        return self.sum(everyone)

    def sum_rows(self, share: Tensor) -> Tensor:
        return share if self.layout == "partial" else self.sum(share)


def local_parts(head: LMHead) -> LMHead:
    """Returns this rank's parts of a head of DTensors."""
    b = None if head.low_rank is None else head.low_rank[1]
    parts = {"weight": head.weight, "bias": head.bias, "low_rank[1]": b}
    local: dict[str, Any] = {}
    for name, x in parts.items():
        if x is None:
            continue
        if not isinstance(x, DTensor):
            raise TypeError(
                f"{name}: expected a DTensor, as another tensor of the head is one; got "
                f"{type(x).__name__}"
            )
        if x.device_mesh.ndim != 1 or x.placements != (Shard(0),):
            raise ValueError(
                f"{name}: expected a DTensor with Shard(0) on a mesh of one dimension, or a plain "
                f"tensor, whole; got {x.placements}. A weight that FSDP shards is whole inside "
                "the wrapped module's forward: call this there"
            )
        local[name] = x.to_local()
    ranks = head.ranks or VocabRanks()
    if ranks.group is not None:
        raise ValueError("ranks.group: expected None with a DTensor, which has its own; got one")
    assert isinstance(head.weight, DTensor)
    low_rank = None if head.low_rank is None else (head.low_rank[0], local["low_rank[1]"])
    return head.replace(
        weight=local["weight"], bias=local.get("bias"), low_rank=low_rank,
        ranks=replace(ranks, group=head.weight.device_mesh.get_group()),
    )  # fmt: skip


def ranks_of(call: HeadCall, agreed: Mapping[str, float]) -> VocabShards:
    """Finds this rank's columns of the vocabulary; asks the other ranks.

    `agreed`: numbers of the caller's that have to be the same on all ranks.

    Raises:
        ValueError: on all ranks alike, if their columns are not those of one vocabulary, or if they
            would not compute the same.
    """
    head, spec, ranks = call.head, call.spec, call.head.ranks
    execution = spec.execution
    assert ranks is not None
    if ranks.group is None:
        raise ValueError("ranks.group: expected a process group, as weight is no DTensor; got None")
    if execution.capturable:
        raise ValueError("capturable: expected False where ranks share the vocabulary; got True")
    needs_grad, per_token = call.needs_grad(), isinstance(head.temperature, Tensor)
    flags = {
        "ranks.start": ranks.start is not None, "bias": head.bias is not None,
        "low_rank": head.low_rank is not None, "gradient of hidden": needs_grad[0],
        "gradient of low_rank[0]": head.low_rank is not None and needs_grad[2],
        "gradient": any(needs_grad), "temperature per token": per_token,
        "logits_dtype='model'": spec.rounding is not None,
        "batch_invariant": execution.batch_invariant,
    }  # fmt: skip
    dtypes = {"weight's dtype": head.weight.dtype, "dtype of the GEMMs": spec.dtype}
    numbers = {
        "ranks.hidden": HIDDEN_LAYOUTS.index(ranks.hidden), "H": head.weight.shape[1],
        "rank of low_rank": 0 if head.low_rank is None else head.low_rank[1].shape[1],
        "tokens": spec.layout.num_tokens,
        "temperature": 1.0 if per_token else head.temperature, "logit_scale": head.logit_scale,
        "softcap (0: none)": head.softcap or 0.0, **agreed,
    }  # fmt: skip
    # Whole numbers below 2^53 as well.
    local = [
        ranks.start or 0, len(head.weight), *flags.values(),
        *map(HEAD_DTYPES.index, dtypes.values()), *numbers.values(),
    ]  # fmt: skip
    packed = torch.tensor(local, dtype=torch.float64, device=head.weight.device)
    ids = packed.new_zeros(1, dtype=torch.int64)
    if spec.targets is not None:
        ids = _checksum(spec.targets)[None]
    gathered = _gathered(torch.cat([packed.view(torch.int64), ids]), ranks.group).cpu()
    begins, counts, *columns = gathered[:, :-1].view(torch.float64).T.tolist()
    for name, values in zip((*flags, *dtypes, *numbers), columns, strict=True):
        if len(set(values)) == 1:
            continue
        if name in flags:
            having = [rank for rank, value in enumerate(values) if value]
            raise ValueError(f"{name}: expected on all ranks or on none; got it on ranks {having}")
        if name in dtypes:
            values = [name_of(HEAD_DTYPES[int(x)]) for x in values]
        elif name == "ranks.hidden":
            values = [HIDDEN_LAYOUTS[int(x)] for x in values]
        else:
            values = [int(x) if x.is_integer() else x for x in values]
        raise ValueError(f"{name}: expected the same on all ranks; got {values}")
    if len(set(gathered[:, -1].tolist())) > 1:
        raise ValueError(
            "targets: expected the same on all ranks that share the vocabulary, as each has other "
            "columns for the same tokens; got others: gather those of all ranks first. A weight "
            "that FSDP shards is whole inside the wrapped module's forward: call this there"
        )
    begins, counts = [int(x) for x in begins], [int(x) for x in counts]
    if min(counts) < 1:
        raise ValueError(f"weight: expected a row or more on every rank; got {counts} rows")
    if ranks.start is None:
        begins = [sum(counts[:place]) for place in range(len(counts))]
    spans = sorted(zip(begins, counts, strict=True))
    if [begin for begin, _ in spans] != [0, *(begin + count for begin, count in spans)][:-1]:
        raise ValueError(
            "ranks.start: expected every column on one rank; got columns "
            + ", ".join(f"{a} to {a + n - 1}" for a, n in zip(begins, counts, strict=True))
        )
    start = begins[ranks.group.rank()]
    return VocabShards(ranks.group, start, counts, ranks.hidden, head.bias is not None)


def _checksum(x: Tensor) -> Tensor:
    """A number, int64 0-d, that changes with any value `[N]`, its place, and N."""
    x = x.flatten()
    bits = x.float().view(torch.int32).long() if x.is_floating_point() else x.long()
    return ((bits + 1) * torch.arange(1, len(x) + 1, device=x.device)).sum() + len(x)


def _gathered(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The values of all ranks, in their order: `[R, ...]`."""
    ranks = local.new_empty(group.size() * local.numel())
    # Its name from PyTorch 2.13 on.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(ranks, local.flatten(), group=group)
    return ranks.view(group.size(), *local.shape)

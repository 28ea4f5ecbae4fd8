"""Shards of the vocabulary: the columns of each rank, and the statistics that ranks gather.

Every rank sweeps its columns of every row of logits. One gather of 12 bytes per token shares

    lse_r      log-sum-exp of the rank's columns
    E_r        entropy within them
    l_r        log-prob of the target within them, where the rank has it

which each rank merges in the order of the ranks, to the same bits:

    lse = log sum_r e^(lse_r),    w_r = e^(lse_r - lse)
    l   = l_r + log w_r           of the rank that has the target
    E   = sum_r w_r (E_r - log w_r)

The gradient of a rank's logits then needs no other rank; dH = sum_r D_r W_r is reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..base.checks import HEAD_DTYPES, ValueChecks, dtype_name
from ..kernels import Entries, LogitTransform, TokenStats
from .budget import RowBytes, buffer_rows
from .call import HeadCall, HeadSpec
from .chunked_head import SingleRank
from .lm_head import HIDDEN_LAYOUTS, LMHead, Support, VocabRanks
from .products import put_rows
from .row_plan import RowPlan

# The least share of a row's softmax on the target's rank, so that the entry of the target stays
# finite. The error is below float32's resolution.
_LEAST_SHARE = 2.0**-24


class VocabShards(SingleRank):
    """Ranks that each have some columns of every row of logits.

    `start`: the id of this rank's first column. `counts`: columns of each rank. `layout`: who sums
    the gradients of rows, one of `HIDDEN_LAYOUTS`. `has_bias`: raw logits may be -inf.
    """

    alone = False

    def __init__(
        self, group: dist.ProcessGroup, start: int, counts: list[int], layout: str, has_bias: bool
    ) -> None:
        super().__init__(sum(counts))
        self.group, self.start, self.layout, self.has_bias = group, start, layout, has_bias
        self.num_columns, self.most_columns = counts[group.rank()], max(counts)
        self.slopes: list[Tensor] = []
        self.sums: list[tuple[Tensor, slice | Tensor, Tensor, dist.Work]] = []

    def plan(
        self, spec: HeadSpec, weight: Tensor, active: Tensor | None, with_grad: Tensor | None,
        row_bytes: RowBytes,
    ) -> RowPlan:  # fmt: skip
        """Plans for the rank with the most columns: the same plan on all ranks."""
        row_bytes = row_bytes._replace(columns=self.most_columns)
        sizes = buffer_rows(weight, row_bytes, spec.execution.chunk_bytes)
        self._ask_same(
            spec.checks,
            "mask, advantages, chunk_bytes: expected the same on all ranks that share the "
            "vocabulary, as each has other columns for the same tokens; got others",
            torch.tensor(sizes, dtype=torch.int64, device=weight.device), active, with_grad,
        )  # fmt: skip
        return super().plan(spec, weight, active, with_grad, row_bytes)

    def _ask_same(self, checks: ValueChecks, what: str, *tensors: Tensor | None) -> None:
        """Adds the check that each of `tensors`, `[N]`, is the same on all ranks."""
        device = next(x.device for x in tensors if x is not None)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        local = torch.stack([_checksum(none if x is None else x) for x in tensors])
        checks.add((_gathered(local, self.group) != local).any(1), what)

    def local_ids(self, targets: Tensor) -> Tensor:
        ids = targets - self.start
        return torch.where((ids >= 0) & (ids < self.num_columns), ids, -1)

    def before_overwrite(self, logits: Tensor, targets: Tensor, transform: LogitTransform) -> None:
        slope = transform.softcap_slope(logits.gather(1, targets.clamp(min=0)[:, None]))
        if slope is not None:
            self.slopes.append(slope.squeeze(1))

    def merge(self, stats: TokenStats, targets: Tensor, exps: Tensor | None) -> TokenStats:
        merged = self._merged(stats, targets)
        if exps is not None:
            slope = torch.cat(self.slopes) if self.slopes else None
            self._set_global_target_entries(exps, targets, slope, stats, merged)
        self.slopes.clear()
        return merged

    def _merged(self, stats: TokenStats, targets: Tensor) -> TokenStats:
        """Merges the ranks' statistics of rows `[C]`.

        `targets` are local ids. `total` is such that p = X / total for this rank's X.
        """
        # A rank whose columns are all -inf has no share, whatever its softmax is.
        absent = stats.logsumexp == -torch.inf
        local = [stats.logsumexp, stats.logps.masked_fill(absent, -torch.inf)]
        if stats.entropy is not None:
            local.append(stats.entropy)
        ranks = _gathered(torch.stack(local), self.group)
        logsumexps, target_logps = ranks[:, 0], ranks[:, 1]
        peak, top = logsumexps.max(0, keepdim=True)
        shifted = logsumexps - peak
        # Added to the 1 of the largest share, a small sum of the others would lose its digits.
        log_total = shifted.exp().scatter_(0, top, 0.0).sum(0).log1p()
        log_shares = shifted - log_total
        logps = (target_logps + log_shares).amax(0)
        entropy = total = None
        if stats.entropy is not None:
            terms = log_shares.exp() * (ranks[:, 2] - log_shares)
            entropy = torch.where(log_shares == -torch.inf, 0.0, terms).sum(0)
        log_share = log_shares[self.group.rank()]
        if stats.total is not None:
            share = log_share.exp()
            share = torch.where(targets < 0, share, share.clamp(min=_LEAST_SHARE))
            # Where the share is 0 the total is inf, and the gradient 0.
            total = torch.where(absent, torch.inf, stats.total / share)
        return TokenStats(logps, peak.squeeze(0) + log_total, entropy, total)

    def _set_global_target_entries(
        self, exps: Tensor, targets: Tensor, slope: Tensor | None, stats: TokenStats,
        merged: TokenStats,
    ) -> None:  # fmt: skip
        """Sets the targets' entries of this rank's `exps [C, V]` to the merged softmax's.

        `targets` are local ids. `slope`: of the softcap at the targets, `[C]`, or None.
        """
        assert merged.total is not None
        values = merged.total * merged.logps.expm1()
        if slope is not None:
            values = values * slope
        entries = torch.where(targets < 0, exps[:, 0], values.to(exps.dtype))
        exps.scatter_(1, targets.clamp(min=0)[:, None], entries[:, None])
        if self.has_bias:
            exps.masked_fill_((stats.logsumexp == -torch.inf)[:, None], 0.0)

    def largest(self, values: Tensor, *values_at_peak: Tensor) -> tuple[Tensor, ...]:
        ranks = _gathered(torch.stack([values, *values_at_peak]), self.group)
        rank = ranks[:, 0].argmax(0)
        return tuple(ranks.gather(0, rank.expand(1, *ranks.shape[1:]))[0])

    def sum(self, share: Tensor) -> Tensor:
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
        """Starts to sum the gradient of rows, while the product with y is computed."""
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

    # With a support, each rank makes the logits of the entries whose rows it has. A sum of 4 bytes
    # per entry shares them; statistics and D are then the same on all ranks. dx is summed once.

    def check_same_support(self, support: Support, checks: ValueChecks) -> None:
        what = "support: expected the same on all ranks that share the vocabulary; got others"
        self._ask_same(checks, what, *(x.long() for x in support))

    def local_entries(self, entries: Entries) -> tuple[Entries, Tensor]:
        """Selects this rank's entries, with local ids; also returns their index in `entries`."""
        local_ids = self.local_ids(entries.ids)
        is_local = local_ids >= 0
        index = is_local.nonzero().squeeze(1)
        ids = local_ids[index]
        offsets = torch.nn.functional.pad(is_local.cumsum(0), (1, 0))[entries.offsets]
        order = ids.argsort(stable=True)
        return Entries(ids, entries.tokens[index], offsets, entries.target_places, order), index

    def gather_entries(self, z: Tensor, index: slice | Tensor, count: int) -> Tensor:
        """The logits of all `count` entries, from this rank's logits at `index`."""
        full = z.new_zeros(count)
        full[index] = z
        return self.sum(full)

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
    """Gathers each rank's columns of the vocabulary, and checks that all ranks compute the same.

    `agreed`: further numbers that have to be the same on all ranks.

    Raises:
        ValueError: on all ranks, if their columns do not make up one vocabulary, or if settings
            differ.
    """
    head, spec, ranks = call.head, call.spec, call.head.ranks
    assert ranks is not None
    if ranks.group is None:
        raise ValueError("ranks.group: expected a process group, as weight is no DTensor; got None")
    ours = _settings(call, agreed)
    numbers = [float(ranks.start or 0), float(len(head.weight)), *(x.number for x in ours)]
    # As bits, so that one gather also sends the checksum of the ids.
    packed = torch.tensor(numbers, dtype=torch.float64, device=head.weight.device)
    ids = packed.new_zeros(1, dtype=torch.int64)
    if spec.targets is not None:
        ids = _checksum(spec.targets)[None]
    gathered = _gathered(torch.cat([packed.view(torch.int64), ids]), ranks.group).cpu()
    begins, counts, *settings = gathered[:, :-1].view(torch.float64).T.tolist()
    for setting, values in zip(ours, settings, strict=True):
        setting.check(values)
    if len(set(gathered[:, -1].tolist())) > 1:
        raise ValueError(
            "targets: expected the same on all ranks that share the vocabulary, as each has other "
            "columns for the same tokens; got others: gather those of all ranks first. A weight "
            "that FSDP shards is whole inside the wrapped module's forward: call this there"
        )
    starts, counts = [int(x) for x in begins], [int(x) for x in counts]
    start = _starts(starts, counts, ranks.start is not None)[ranks.group.rank()]
    return VocabShards(ranks.group, start, counts, ranks.hidden, spec.has_bias)


class _Setting(NamedTuple):
    """A value that has to be the same on all ranks."""

    name: str  # in the error
    number: float  # the value, exact in float64, or an index into `values`
    values: Sequence[object] | None = None

    def check(self, numbers: list[float]) -> None:
        """Raises unless all ranks have the same number."""
        if len(set(numbers)) == 1:
            return
        if self.values is _ON_OR_OFF:
            having = [rank for rank, number in enumerate(numbers) if number]
            raise ValueError(
                f"{self.name}: expected on all ranks or on none; got it on ranks {having}"
            )
        got: list[object] = [int(x) if x.is_integer() else x for x in numbers]
        if self.values is not None:
            got = [self.values[int(x)] for x in numbers]
        raise ValueError(f"{self.name}: expected the same on all ranks; got {got}")


_ON_OR_OFF = (False, True)


def _settings(call: HeadCall, agreed: Mapping[str, float]) -> list[_Setting]:
    head, spec, needs_grad = call.head, call.spec, call.needs_grad()
    per_token, dtypes = isinstance(head.temperature, Tensor), [dtype_name(x) for x in HEAD_DTYPES]
    flags = {
        "ranks.start": head.ranks is not None and head.ranks.start is not None,
        "bias": head.bias is not None,
        "low_rank": head.low_rank is not None,
        "gradient of hidden": needs_grad[0],
        "gradient of low_rank[0]": head.low_rank is not None and needs_grad[2],
        "gradient": any(needs_grad),
        "temperature per token": per_token,
        "logits_dtype='model'": spec.transform.rounding is not None,
        "batch_invariant": spec.execution.batch_invariant,
    }
    numbers = {
        "H": head.weight.shape[1],
        "rank of low_rank": 0 if head.low_rank is None else head.low_rank[1].shape[1],
        "tokens": spec.layout.num_tokens,
        "temperature": 1.0 if per_token else head.temperature,
        "logit_scale": head.logit_scale,
        "softcap (0: none)": head.softcap or 0.0,
        **agreed,
    }
    assert head.ranks is not None
    return [
        *(_Setting(name, float(x), _ON_OR_OFF) for name, x in flags.items()),
        _Setting("weight's dtype", HEAD_DTYPES.index(head.weight.dtype), dtypes),
        _Setting("dtype of the GEMMs", HEAD_DTYPES.index(spec.dtype), dtypes),
        _Setting("ranks.hidden", HIDDEN_LAYOUTS.index(head.ranks.hidden), HIDDEN_LAYOUTS),
        *(_Setting(name, float(x)) for name, x in numbers.items()),
    ]


def _starts(starts: list[int], counts: list[int], known: bool) -> list[int]:
    """The first column of each rank: as the ranks say, or in their order."""
    if min(counts) < 1:
        raise ValueError(f"weight: expected a row or more on every rank; got {counts} rows")
    if not known:
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
    spans = sorted(zip(starts, counts, strict=True))
    if [start for start, _ in spans] != [0, *(start + count for start, count in spans)][:-1]:
        columns = (f"{a} to {a + n - 1}" for a, n in zip(starts, counts, strict=True))
        raise ValueError(
            f"ranks.start: expected every column on one rank; got columns {', '.join(columns)}"
        )
    return starts


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

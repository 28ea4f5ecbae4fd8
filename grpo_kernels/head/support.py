"""The head over the sets of ids that a sampler kept, entry by entry.

With top-k, top-p or min-p sampling the policy that acted is the softmax over the kept set S_t of
each token. It comes as CSR (`Support`); an *entry* is one pair of a token and an id of its
set. `chunked_head.py` scores a token without a set over the full vocabulary.

    z_tj = logits of token t at the ids j of its set S_t, and of no others
    l, E = of their softmax (`base/segments.py`)
    D_tj = their gradient, as of any softmax
    dh_t = sum over j in S_t of D_tj W_j,    dW_j = sum over t with j in S_t of D_tj h_t

so that no row of logits is made: the head costs |S_t| rows of W instead of V. One program sums each
row of dh and of dW, in float32 and in one order, and rounds it once; for dW the entries are sorted
by id. Entries of masked tokens are ignored. The number of entries is read together with the checks,
in the call's one transfer.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from ..base.autograd import refuse_double_backward
from ..base.checks import ValueChecks, check_tensor, flatten
from ..base.layout import to_device
from ..base.segments import RowsLogSoftmax
from ..base.sequences import masked_quantile
from ..kernels import Entries, round_
from .call import HeadCall, HeadSpec
from .execution import Execution
from .lm_head import Support

# Sets with more than this share of the vocabulary, on average, warn: rows of logits are faster.
_WIDE = 1 / 20


def batch_support(
    supports: Sequence[tuple[Tensor, Tensor] | None],
    length: int,
    device: torch.device | str | None = None,
    *,
    targets: Tensor | Sequence[Sequence[int]] | None = None,
) -> Support:
    """Joins the supports of completions into one for a batch padded on the right.

    Args:
        supports: a `Support` on the CPU per completion, `token_ids [K]` and `offsets [tokens + 1]`;
            None for a completion sampled from the full vocabulary.
        length: T, the number of tokens of a padded completion; padding gets empty sets.
        device: device of the result, without waiting for it; None: the CPU.
        targets: `[B, T]` on the CPU, or the ids of each completion. Sets without their target are
            then emptied, and such tokens are scored over the full vocabulary. None: a call raises
            an error for such sets.

    Returns:
        The support for a call on `[B, T]`.

    Raises:
        ValueError: a completion with more than `length` tokens.
    """
    counts = torch.zeros(len(supports), length, dtype=torch.int64, device="cpu")
    parts = [counts.new_zeros(0, dtype=torch.int32)]
    for i, (row, support) in enumerate(zip(counts, supports, strict=True)):
        if support is None:
            continue
        token_ids, offsets = support
        size = len(offsets) - 1
        if size > length:
            raise ValueError(
                f"length: expected as many as the longest completion has tokens, {size}; got "
                f"{length}"
            )
        sizes = offsets.diff().long()
        if targets is not None:
            tokens = torch.arange(size, device="cpu").repeat_interleave(sizes)
            ids = torch.as_tensor(targets[i], dtype=torch.int64, device="cpu")[:size]
            has_target = row.new_zeros(size, dtype=torch.bool)
            has_target[tokens[token_ids == ids[tokens]]] = True
            token_ids, sizes = token_ids[has_target[tokens]], torch.where(has_target, sizes, 0)
        row[:size] = sizes
        parts.append(token_ids)
    offsets = _from_zero(counts.flatten().cumsum(0))
    return Support(to_device(torch.cat(parts), device), to_device(offsets, device))


class KeptSets:
    """The kept sets of a call's tokens, checked as far as possible without reading the device.

    A set of one entry has log-prob 0 and no gradient: it is skipped unless the call returns a
    `logsumexp`. `every`: every token needs a set, whose first id is the target.
    """

    def __init__(
        self, spec: HeadSpec, support: Any, ranks: Any, *, every: bool, logsumexp: bool
    ) -> None:
        refuse_with(spec.execution)
        V, self.ranks, targets = ranks.columns, ranks, spec.targets
        checks, N, device = spec.checks, spec.layout.num_tokens, spec.layout.device
        ids, offsets = check_support(support, N, device)
        ids = ids if N else ids[:0]
        active = spec.mask
        if active is None:
            active = torch.ones(N, dtype=torch.bool, device=device)
        begins, ends, reach = _intervals(offsets, active, len(ids), checks)
        counts = ends - begins
        if every:
            checks.add(
                active & (counts == 0),
                "support: expected a set of every token with entries=True; got tokens without one",
            )
            targets = ids[begins.clamp(max=len(ids) - 1)] if len(ids) else begins
        assert targets is not None
        index = torch.arange(len(ids), device=device)
        tokens = torch.searchsorted(reach, index, right=True).clamp(max=max(N - 1, 0))
        begin, end, target = torch.stack([begins, ends, targets])[:, tokens]
        is_member = (index >= begin) & (index < end)
        is_target = is_member & (ids == target)
        in_range = (ids >= 0) & (ids < V)
        checks.add(
            is_member & ~in_range, f"support.token_ids: expected ids in [0, {V}); got ids outside"
        )
        target_counts, target_offsets = _target_offsets(is_target, index, begins, ends)
        checks.add(
            (counts > 0) & (target_counts == 0),
            "support: expected the target of every token in its set; got sets without it: pass "
            "targets to batch_support, which scores these tokens over the whole vocabulary",
        )
        order = _id_order(torch.where(is_member & in_range, ids, V), tokens, V, checks)
        self._unfiltered: tuple[Tensor, ...] = (ids, tokens, is_member, order, target_offsets)
        self.tokens, self.counts, self.V, self.size = counts > 0, counts, V, len(ids)
        self._is_computed = counts >= (1 if logsumexp else 2)
        self._sizes = checks.ask(torch.where(self._is_computed, counts, 0).sum(), self.tokens.sum())
        if not ranks.alone:
            ranks.check_same_support(support, checks)

    @property
    def count(self) -> int:
        """The number of tokens that have a set."""
        return self._sizes.numbers[1]

    @cached_property
    def entries(self) -> Entries:
        """The entries that are computed, by token and by id."""
        size, counts = self._sizes.numbers[0], self.counts
        # Frees the unfiltered entries, which are as large as the result.
        (ids, tokens, is_member, order, target_offsets), self._unfiltered = self._unfiltered, ()
        self.entry_index: slice | Tensor = slice(0, size)  # among the support's ids
        if size == 0:
            none, zeros = ids[:0], torch.zeros_like(counts)
            return Entries(none, none, _from_zero(zeros), zeros, none)
        if size > _WIDE * self.V * self.count:
            _warn_of_wide_sets()
        offsets = _from_zero(torch.where(self._is_computed, counts, 0).cumsum(0))
        if size == len(ids):
            return Entries(ids, tokens, offsets, target_offsets, order)
        keep = is_member & self._is_computed[tokens]
        index = self.entry_index = indices(keep, size)
        new_index = keep.cumsum(0) - 1
        order = new_index[order[indices(keep[order], size)]]
        return Entries(ids[index], tokens[index], offsets, target_offsets, order)

    def metrics(self, num_tokens: Tensor | None) -> dict[str, Tensor]:
        """Sizes of the sets, and shares; `num_tokens`, 0-d: the unmasked tokens, None: all."""
        has_set, counts = self.tokens.float(), self.counts.float()
        with_set = has_set.sum()
        return {
            "support/mean": counts.sum() / with_set.clamp(min=1),
            "support/p99": masked_quantile(counts, has_set, 0.99),
            "support/singletons": (self.counts == 1).sum() / with_set.clamp(min=1),
            "support/gathered": (
                has_set.mean() if num_tokens is None else with_set / num_tokens.clamp(min=1)
            ),
        }

    @cached_property
    def local_entries(self) -> tuple[Entries, slice | Tensor]:
        """The entries whose rows of the head are on this rank, and their index in `entries`."""
        if self.ranks.alone:
            return self.entries, slice(None)
        return self.ranks.local_entries(self.entries)

    def log_softmax(self, call: HeadCall) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs `[E]` of the entries, entropy and logsumexp `[N]`, differentiable."""
        with torch.autocast(call.spec.layout.device.type, enabled=False):
            z = _EntryLogits.apply(*call.tensors, self, call.spec)
            entries = self.entries
            return RowsLogSoftmax.apply(z, entries.tokens, entries.offsets)

    def logps(self, log_p: Tensor) -> Tensor:
        """Log-probs of the targets `[N]`, 0 where there is no set."""
        if not len(self.entries):
            return log_p.new_zeros(len(self.tokens))
        index = self.entries.offsets[:-1] + self.entries.target_places
        logps = log_p[index.clamp(0, len(log_p) - 1)]
        return torch.where(self.entries.offsets.diff() > 0, logps, 0.0)


class _EntryLogits(torch.autograd.Function):
    """The logits `[E]` of the entries, from the tensors of the call's terms."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, sets, spec = args
        (local, index), backend = sets.local_entries, spec.backend
        # Float32 whatever the operands are.
        z = tensors[0].new_zeros(len(local), dtype=torch.float32)
        for terms in spec.sums if len(local) else ():
            for k in terms:
                x, y = map(_by_rows, tensors[2 * k : 2 * k + 2])
                if k == 1 and spec.adapter_rounding is not None:
                    product = torch.zeros_like(z)
                    backend.entry_dots(x, y, local, product)
                    z += round_(product, spec.adapter_rounding)
                else:
                    backend.entry_dots(x, y, local, z)
            round_(z, spec.transform.rounding)
        if not sets.ranks.alone:
            z = sets.ranks.gather_entries(z, index, len(sets.entries))
        raw = z[:, None]
        transform = spec.transform.at(sets.entries.tokens)
        ctx.save_for_backward(*tensors, raw)
        ctx.sets, ctx.backend, ctx.transform = sets, backend, transform
        return transform.apply(raw).squeeze(1).clone()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_logprobs, fused_grpo_loss")
        *tensors, raw = ctx.saved_tensors
        sets, (local, index), sums = ctx.sets, ctx.sets.local_entries, ctx.backend.segment_sums
        # By `where`: a token without a gradient may have states of any values, NaN included.
        d = torch.where(d != 0, (d[:, None] * ctx.transform.slope(raw)).squeeze(1), 0.0)[index]
        grads: list[Tensor | None] = [None] * len(tensors)
        by_id_args = None
        for k, (x, y) in enumerate(zip(tensors[::2], tensors[1::2], strict=True)):
            x, y = _by_rows(x), _by_rows(y)
            if ctx.needs_input_grad[2 * k]:
                d_x = sums(d, local.ids, local.offsets, y, torch.float32)
                d_x = d_x if sets.ranks.alone else sets.ranks.sum_rows(d_x)
                grads[2 * k] = d_x.to(x.dtype)
            if ctx.needs_input_grad[2 * k + 1]:
                if by_id_args is None:
                    begins = local.begins_of(torch.arange(len(y) + 1, device=y.device))
                    by_id_args = (d[local.order], local.tokens_by_id, begins)
                grads[2 * k + 1] = sums(*by_id_args, x, y.dtype)
        return (*grads, None, None)


def refuse_with(execution: Execution) -> None:
    """Refuses options that do not work with a support."""
    if execution.batch_invariant:
        raise ValueError("support does not work with batch_invariant=True: pass one of the two")


def check_support(
    support: object, num_tokens: int, device: torch.device, name: str = "support"
) -> tuple[Tensor, Tensor]:
    """The ids and offsets of a support, of the right shapes and dtypes, as int64."""
    if not isinstance(support, (tuple, list)) or len(support) != 2:
        raise TypeError(
            f"{name}: expected a Support of token_ids and offsets, or None; got "
            f"{type(support).__name__}"
        )
    integers = (torch.int64, torch.int32)
    ids = check_tensor(f"{name}.token_ids", support[0], dtypes=integers, device=device)
    if ids.ndim != 1:
        raise ValueError(f"{name}.token_ids: expected shape [K]; got {list(ids.shape)}")
    offsets = check_tensor(
        f"{name}.offsets", support[1], shape=(num_tokens + 1,), dtypes=integers, device=device
    )
    return flatten(ids.detach()).long(), flatten(offsets.detach()).long()


@cache
def _warn_of_wide_sets() -> None:
    warnings.warn(
        "support: kept sets have more than 1/20 of the vocabulary on average: without a support "
        "the call is faster, and its result nearly the same",
        stacklevel=2,
    )


def _by_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 and x.stride(0) else x.contiguous()


def _intervals(
    offsets: Tensor, active: Tensor, K: int, checks: ValueChecks
) -> tuple[Tensor, Tensor, Tensor]:
    """Begin and end of each token's entries, equal where it is masked or wrong; largest end so far.

    The largest end so far never falls, whatever the offsets of masked tokens are.
    """
    begins, ends = offsets[:-1], offsets[1:]
    reach = torch.where(active, ends, 0).cummax(0).values if len(ends) else ends
    wrong = (begins < _from_zero(reach)[:-1]) | (ends < begins) | (ends > K)
    # Masked tokens may lie at either end.
    wrong[:1] |= begins[:1] != 0
    wrong[-1:] |= ends[-1:] != K
    checks.add(
        wrong & active,
        "support.offsets: expected offsets that start at 0, never decrease, and end at the "
        f"{K} ids; got offsets that do not",
    )
    begins = begins.clamp(0, K)
    return begins, torch.where(active & ~wrong, ends, begins), reach


def _target_offsets(
    is_target: Tensor, index: Tensor, begins: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """The number of targets among each token's entries; a single one's place from its begin."""
    sums = _from_zero(torch.stack([is_target.long(), torch.where(is_target, index, 0)]).cumsum(1))
    counts, place = sums[:, ends] - sums[:, begins]
    return counts, place - begins


def _id_order(ids: Tensor, tokens: Tensor, V: int, checks: ValueChecks) -> Tensor:
    """The permutation that sorts `ids` (V: no id); checks that no token repeats one."""
    sorted_ids, order = ids.sort(stable=True)
    sorted_tokens = tokens[order]
    same_id, same_token = (x[1:] == x[:-1] for x in (sorted_ids, sorted_tokens))
    repeated = same_id & same_token & (sorted_ids[1:] < V)
    checks.add(repeated, "support.token_ids: expected each id once per token; got repeated ones")
    return order


def indices(keep: Tensor, count: int) -> Tensor:
    """The indices of the `count` entries of `keep` that are True, without reading the device."""
    everything = torch.arange(len(keep), device=keep.device)
    if count == len(keep):
        return everything
    # Entries that are False go to one place past the end.
    place = torch.where(keep, keep.cumsum(0) - 1, count)
    return everything.new_empty(count + 1).scatter_(0, place, everything)[:count]


def _from_zero(sums: Tensor) -> Tensor:
    """A 0 before the last dimension's first entry."""
    return torch.nn.functional.pad(sums, (1, 0))

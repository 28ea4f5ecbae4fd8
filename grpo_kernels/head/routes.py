"""Who makes rows of logits in a call, and which rows; the one file that knows all of them.

That is `Dense`, or `ManyTargets` where a token has several. Tokens that have a kept set are no rows
(`support.py`). Ranks are an object in the place of `OneRank`. Each is imported where it is asked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.checks import ValueChecks
from ..base.layout import check_target_ids, selected
from .call import HeadCall
from .dense import Dense, OneRank
from .lm_head import LMHead
from .plan import Buffers, RowPlan, every_row, plan_rows
from .products import INVARIANT_ROWS

if TYPE_CHECKING:
    from .ranks import VocabShard
    from .support import KeptSets


@dataclass(frozen=True)
class Routes:
    """The routes of a call, planned, before they are given tensors.

    Args:
        call: without its tensors, and with the tokens that have a kept set out of its mask.
        plan: the rows that take part over the whole vocabulary.
        tokens: bool `[N]`, all that take part; None: every one.
        sets: the kept sets of the others.
        shard: this rank's part of the vocabulary.
    """

    call: HeadCall
    plan: RowPlan
    tokens: Tensor | None
    sets: KeptSets | None = None
    shard: VocabShard | None = None

    def of(self, tensors: Sequence[Tensor], plan: RowPlan, *, entropy: bool, keeps: bool) -> Dense:
        """The route over `tensors`, those of the call's terms; see `Dense` for the rest."""
        call, dense, ranks = self.call.of(tensors), Dense, OneRank()
        if self.shard is not None:
            from .ranks import ManyRanks

            ranks = ManyRanks(self.shard)
        if call.targets.ndim == 2:
            from .many_targets import ManyTargets

            dense = ManyTargets
        return dense(call, plan, ranks, entropy=entropy, keeps=keeps)

    def again(self, needed: Tensor, weight: Tensor) -> RowPlan:
        """The plan of a second pass, over the rows that are `needed`, bool `[N]`."""
        call = replace(self.call, checks=ValueChecks())
        return _plan(call, self.shard, weight, needed, None, _buffers(call, weight, True, True))

    def limits(self) -> dict[str, Any]:
        """The options of `with_fewer_rows`."""
        execution = self.call.execution
        fixed = execution.chunk_bytes is not None or execution.capturable
        return {
            "fixed": fixed or self.shard is not None,
            "multiple": INVARIANT_ROWS if execution.batch_invariant else 1,
        }

    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the kept sets."""
        if self.sets is None:
            return {}
        return self.sets.metrics(None if self.tokens is None else self.tokens.sum())


def local_head(head: Tensor | LMHead) -> LMHead:
    """The head, of plain tensors: of DTensors this rank's parts."""
    head = LMHead.of(head)
    tensors = (head.weight, head.bias, head.low_rank and head.low_rank[1])
    if not any(hasattr(x, "full_tensor") for x in tensors):
        return head
    from .ranks import local_parts

    return local_parts(head)


def with_targets(call: HeadCall, targets: Tensor, support: object) -> HeadCall:
    """The call with several targets per token, `[..., K]`, in place of the first of them."""
    if support is not None:
        raise ValueError(
            "support: expected None with several targets per token; got a support, of which "
            "entries=True scores every id"
        )
    flat = targets.detach().reshape(-1, targets.shape[-1]).long().contiguous()
    if call.execution.capturable and call.mask is not None:
        flat = selected(call.mask, flat, 0)
    return replace(call, targets=flat)


def keeps_gradients(call: HeadCall) -> bool:
    """True if the forward keeps the gradient of each log-prob by the states."""
    execution, wanted = call.execution, call.wants_grad()
    return (
        execution.keep_gradients
        and any(wanted[::2])
        and not any(wanted[1::2])
        and call.targets.ndim == 1
    )


def routes_of(
    call: HeadCall,
    support: object,
    tokens_with_grad: Callable[[], Tensor | None] | None,
    *,
    gradients: bool,
    keeps: bool,
    logsumexp: bool = False,
    entries: bool = False,
    agreed: Mapping[str, float],
) -> Routes:
    """Finds the routes of a call; reads its checks and row counts, in one transfer.

    Args:
        call: checked.
        support: the kept sets, or None.
        tokens_with_grad: finds bool `[N]`, the tokens that may have a gradient; None: all.
        gradients: whether the first pass makes gradients.
        keeps: whether one sweep is enough for them.
        logsumexp: whether the logsumexp is a result.
        entries: whether every id of a set is a target.
        agreed: numbers that all ranks have to have alike.
    """
    weight, tokens, shard, sets = call.terms[0].y, call.mask, None, None
    V = len(weight)
    if call.head.ranks is not None:
        from .ranks import shard_of

        shard = shard_of(call, agreed)
        V = shard.size
    check_target_ids(call.targets, call.mask, V, call.checks)
    if support is not None:
        targets = None if entries else call.targets
        if shard is not None:
            from .ranks import kept_sets_of_ranks

            sets = kept_sets_of_ranks(shard, call, support, targets, logsumexp=logsumexp)
        else:
            from .support import KeptSets

            sets = KeptSets(call, support, targets, V, logsumexp=logsumexp)
        others = ~sets.tokens
        call = replace(call, mask=others if call.mask is None else call.mask & others)
    buffers = _buffers(call, weight, gradients, keeps)
    with_grad = None
    if tokens_with_grad is not None and not call.execution.capturable:
        with_grad = tokens_with_grad()
    plan = _plan(call, shard, weight, call.mask, with_grad, buffers)
    return Routes(call.without_tensors(), plan, tokens, sets, shard)


def _buffers(call: HeadCall, weight: Tensor, gradients: bool, strips: bool) -> Buffers:
    if not gradients or call.dtype == torch.float32:
        return Buffers(len(weight))
    return Buffers(len(weight), call.dtype.itemsize, strips)


def _plan(
    call: HeadCall, shard: VocabShard | None, weight: Tensor, active: Tensor | None,
    with_grad: Tensor | None, buffers: Buffers,
) -> RowPlan:  # fmt: skip
    N, chunk_bytes = call.layout.num_tokens, call.execution.chunk_bytes
    if shard is not None:
        from .ranks import plan_of_ranks

        return plan_of_ranks(shard, call, weight, active, with_grad, buffers)
    if call.execution.capturable:
        return every_row(call.checks, weight, N, buffers, chunk_bytes)
    return plan_rows(active, with_grad, call.checks, weight, N, buffers, chunk_bytes)

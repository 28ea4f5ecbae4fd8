"""The passes of a call over its rows: which rows, what is read from them, and when their gradient.

The one file that knows all capabilities: several targets per token are a readout in the place of
`OneTarget`, ranks an object in the place of `OneRank`; tokens that have a kept set are no rows
(`support.py`). Each is imported where it is asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..base.checks import ValueChecks
from ..base.layout import check_target_ids, selected
from ..kernels import TokenStats
from .call import HeadCall, named_reference, reference_call
from .dense import Dense, OneRank, OneTarget
from .lm_head import LMHead, Reference
from .plan import Buffers, RowPlan, buffer_rows, gpu, ran_out_of_memory
from .products import INVARIANT_ROWS, Gradients

if TYPE_CHECKING:
    from ..kernels.pair_stats import PairStats
    from .support import KeptSets

_T = TypeVar("_T")
# Fewer rows than these at a time are not tried.
_LEAST_ROWS = 16


class Gradient(IntEnum):
    """When a call makes the gradient of its logits."""

    LATER = 0  # in a second pass, which makes the logits again; or never
    ONE_SWEEP = 1  # in the first pass: a factor per row times the exponentials that a sweep leaves
    TWO_SWEEPS = 2  # in the first pass, by a second sweep over the logits

    @staticmethod
    def of(call: HeadCall, *, one_pass: bool, by_others: bool = False) -> Gradient:
        """The gradient of a call, in one pass or in two.

        `by_others`: of a loss that has one by more than the log-probs.

        In two passes it is made at first where the head is frozen, which leaves that of each
        log-prob by the states to be kept (`Execution.keep_gradients`).
        """
        wanted = call.wants_grad()
        if one_pass:
            at_once = any(wanted)
        else:
            several = call.targets.ndim > 1
            at_once = not by_others and keeps_gradients(
                call.execution.keep_gradients, wanted[::2], wanted[1::2], several
            )
        if not at_once:
            return Gradient.LATER
        # A factor per row may be beyond float16.
        two = by_others or call.dtype == torch.float16
        return Gradient.TWO_SWEEPS if two else Gradient.ONE_SWEEP


def keeps_gradients(
    asked: bool, of_states: Sequence[bool], of_head: Sequence[bool], several: bool
) -> bool:
    """True if two passes keep each log-prob's gradient by the states, which alone want one."""
    return asked and any(of_states) and not any(of_head) and not several


@dataclass(frozen=True)
class Passes:
    """The passes of a call, planned, before they are given tensors.

    Args:
        call: without its tensors, and with the tokens that have a kept set out of its mask.
        plan: the rows that take part over the whole vocabulary.
        ranks: who has which columns of it.
        tokens: bool `[N]`, all that take part; None: every one.
        sets: the kept sets of the others.
        wanted: of which of the terms' tensors gradients are.
        entropy: whether it is a result.
        gradient: when that of the logits is made.
        in_gemm: whether the logits' GEMM leaves what is read of them.
    """

    call: HeadCall
    plan: RowPlan
    ranks: OneRank
    tokens: Tensor | None
    sets: KeptSets | None
    wanted: Sequence[bool]
    entropy: bool
    gradient: Gradient
    in_gemm: bool = False

    def dense(self, tensors: Sequence[Tensor], plan: RowPlan) -> Dense:
        """The rows of `plan`, over `tensors`, those of the call's terms."""
        call = self.call.of(tensors)
        readout = self._readout(call, plan)
        exponentials = self.gradient == Gradient.ONE_SWEEP
        return Dense(call, plan, readout, exponentials=exponentials, in_gemm=self.in_gemm)

    def _readout(self, call: HeadCall, plan: RowPlan) -> OneTarget:
        if call.reference is not None:
            from .two_heads import TwoHeads

            return TwoHeads(call, self.ranks, plan, at_once=self.gradient != Gradient.LATER)
        if call.targets.ndim == 2:
            from .many_targets import ManyTargets

            return ManyTargets(call, self.ranks, entropy=self.entropy)
        return OneTarget(call, self.ranks, entropy=self.entropy)

    def gradients(
        self, tensors: Sequence[Tensor], plan: RowPlan, *, once: bool = False
    ) -> Gradients:
        """The gradients of the terms, over the rows of `plan`; `once`: added to once."""
        every_row, dtype = plan.num_grad_rows == len(tensors[0]), self.call.dtype
        rounded = dtype if once else None
        return Gradients(tensors, self.wanted, every_row=every_row, rounded=rounded)

    def makes_gradients_later(self, plan: RowPlan) -> bool:
        """True where what the sweep leaves is kept, whose products are the backward's.

        So if it is one chunk's, on one rank. The gradient of the head is then one product, which
        has the loss's gradient in it: no sum in float32, and no pass that scales it.
        """
        one_chunk = 0 < plan.num_grad_rows == plan.largest_of(needs_grad=True)
        alone = self.ranks.alone and not self.call.execution.batch_invariant
        # In float32 it lies where the logits of other rows would come next.
        last = plan.num_rows == plan.num_grad_rows or self.call.dtype != torch.float32
        one_sweep = self.gradient == Gradient.ONE_SWEEP and any(self.wanted[1::2])
        return one_chunk and alone and last and one_sweep

    @property
    def stats(self) -> type[TokenStats | PairStats]:
        """The statistics that are read of a row."""
        if self.call.reference is None:
            return TokenStats
        from ..kernels.pair_stats import PairStats

        return PairStats

    def again(self, needed: Tensor, weight: Tensor) -> RowPlan:
        """The plan of a second pass, over the rows that are `needed`, bool `[N]`."""
        call = replace(self.call, checks=ValueChecks())
        # Whose logits are made again a strip at a time.
        buffers = _buffers(call, weight, Gradient.ONE_SWEEP)
        return self.ranks.plan(call, weight, needed, None, buffers)

    def run(self, run: Callable[[RowPlan], _T], plan: RowPlan | None = None) -> _T:
        """Runs a pass of `plan`; where memory runs out again, with half as many rows at a time.

        Not so with a budget of the caller's own, where other ranks wait, or in a graph's capture.
        """
        execution = self.call.execution
        fixed = execution.chunk_bytes is not None or execution.capturable or not self.ranks.alone
        least = INVARIANT_ROWS if execution.batch_invariant else _LEAST_ROWS
        first = plan = self.plan if plan is None else plan
        while True:
            try:
                found = run(plan)
                break
            except Exception as error:
                if fixed or plan.logit_rows <= least or not ran_out_of_memory(error):
                    raise
            # When the error no longer holds what it had. Not all that asks is torch's allocator.
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            plan = plan.halved(least)
        if plan is not first:
            warnings.warn(
                f"memory ran out over the head, which took {plan.logit_rows} rows of logits at a "
                f"time instead; the result is the same. With chunk_bytes={plan.bytes_taken} it "
                "begins so, and keeps to that",
                stacklevel=2,
            )
        return found

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


def call_of_reference(call: HeadCall, reference: object, support: object = None) -> HeadCall:
    """The reference's call on the same tokens, checked, its head of plain tensors."""
    if support is not None:
        raise ValueError(
            "reference: expected None with a support, whose softmax is over its sets: pass the "
            "reference's log-probs of the same sets as ref_logps; got one"
        )
    if not isinstance(reference, (tuple, list)) or len(reference) != 2:
        raise TypeError(
            f"reference: expected a Reference(hidden, head); got {type(reference).__name__}"
        )
    with named_reference(call.checks):
        head = local_head(reference[1])
    other = reference_call(call, Reference(reference[0], head))
    if call.head.ranks is not None:
        from .ranks import ranks_of

        ranks_of(other, {})
    return other


def reference_logps(reference: HeadCall, passes: Passes, plan: RowPlan) -> Tensor:
    """The reference's log-probs of the targets, `[N]`, over the rows of `plan`."""
    found = reference.targets.new_zeros(len(reference.targets), dtype=torch.float32)
    readout = OneTarget(reference, passes.ranks, entropy=False)
    if passes.in_gemm:  # the policy has no logits, but the reference does
        weight = reference.terms[0].y
        fit, _ = buffer_rows(weight, Buffers(len(weight)), passes.call.execution.chunk_bytes)
        plan = replace(plan, max_logit_rows=min(plan.max_logit_rows, fit))
    with torch.no_grad(), torch.autocast(found.device.type, enabled=False):
        dense = Dense(reference, plan, readout, exponentials=False)
        for rows in plan.chunks():
            found[rows.index] = dense.sweep(rows).logps
    return found


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


def passes_of(
    call: HeadCall,
    support: object,
    gradient: Gradient,
    *,
    entropy: bool,
    logsumexp: bool = False,
    entries: bool = False,
    tokens_with_grad: Callable[[], Tensor | None] | None = None,
    reference: HeadCall | None = None,
    of_loss: Mapping[str, float] | None = None,
) -> Passes:
    """Plans the passes of a call; reads its checks and row counts, in one transfer.

    Args:
        call: checked.
        support: the kept sets, or None.
        gradient: when that of the logits is made.
        entropy: whether it is a result.
        logsumexp: likewise.
        entries: whether every id of a set is a target.
        tokens_with_grad: finds bool `[N]`, the tokens that may have a gradient; None: all.
        reference: the other model's call, whose log-probs of the targets are read.
        of_loss: what else all ranks have to have alike.
    """
    weight, tokens, sets = call.terms[0].y, call.mask, None
    ranks = OneRank(len(weight))
    if call.head.ranks is not None:
        from .ranks import ranks_of

        several = 1 if call.targets.ndim == 1 else call.targets.shape[1]
        asked = {"entropy": entropy, "entries": entries, "targets per token": several}
        ranks = ranks_of(call, {**(of_loss or {}), **asked, "gradient made at once": gradient})
    check_target_ids(call.targets, call.mask, ranks.columns, call.checks)
    if call.sampled:
        _check_bans("", call, ranks)
        if reference is not None:
            _check_bans("reference.head.", reference, ranks)
    if support is not None:
        from .support import KeptSets

        sets = KeptSets(call, support, ranks, every=entries, logsumexp=logsumexp)
        others = ~sets.tokens
        call = replace(call, mask=others if call.mask is None else call.mask & others)
    with_grad = None
    if tokens_with_grad is not None and not call.execution.capturable:
        with_grad = tokens_with_grad()
    in_gemm = _in_gemm(call, gradient)
    buffers = _buffers(call, weight, gradient, in_gemm=in_gemm)
    plan = ranks.plan(call, weight, call.mask, with_grad, buffers)
    return Passes(
        call.without_tensors(), plan, ranks, tokens, sets, call.wants_grad(), entropy, gradient,
        in_gemm,
    )  # fmt: skip


def _check_bans(prefix: str, call: HeadCall, ranks: OneRank) -> None:
    """Asks whether the bias bans a target: its log-prob of -inf has no loss."""
    bias = call.head.bias
    if bias is None:
        return
    places = ranks.place(call.targets)
    columns = places.clamp(0, len(bias) - 1)
    banned = bias.detach()[columns] == -torch.inf
    banned = banned if call.mask is None else banned & call.mask
    if not ranks.alone:
        banned = ranks.sum((banned & (places == columns)).sum())
    call.checks.add(
        banned,
        f"{prefix}bias: expected no unmasked target to be banned; got targets whose bias is -inf: "
        "mask these tokens, or lift the ban",
    )


def _in_gemm(call: HeadCall, gradient: Gradient) -> bool:
    """Whether the logits' GEMM leaves their exponentials and statistics in their place."""
    asked = call.execution.exp_gemm
    if asked is False:
        return False
    why_not = why_no_exp_gemm(call, gradient)
    if asked and why_not:
        raise ValueError(f"exp_gemm: expected False or None {why_not}; got True")
    weight = call.terms[0].y
    measured = weight.device.type == "cuda" and call.dtype != torch.float32
    if asked or why_not or not measured:
        return bool(asked)
    from ..kernels.triton_exp_gemm import largest_size

    return weight.shape[1] <= (largest_size(weight.device) or 0)


def why_no_exp_gemm(call: HeadCall, gradient: Gradient) -> str | None:
    """Why a call needs its logits, to stand after "exp_gemm: expected False"; None: it does not."""
    execution, weight = call.execution, call.terms[0].y
    reasons = {
        "where torch computes": call.backend.exp_gemm is None,
        "on this device": not _has_tiles(weight.device),
        "in float32 on a GPU": call.dtype == torch.float32 and weight.device.type == "cuda",
        "with operands of two dtypes": call.dtype == torch.float32 != weight.dtype,
        "with a softcap": call.transform.softcap is not None,
        "with a bias or a LoRA": len(call.terms) > 1,
        'with logits_dtype="model"': call.rounding is not None,
        "where ranks share the vocabulary": call.head.ranks is not None,
        "with several targets per token": call.targets.ndim == 2,
        "with a reference whose KL is exact": call.reference is not None,
        "with batch_invariant": execution.batch_invariant,
        "with a matmul": execution.matmul is not None,
        "where the gradient takes a second sweep": gradient == Gradient.TWO_SWEEPS,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _has_tiles(device: torch.device) -> bool:
    """Whether there is a tile for it: NVIDIA's GPUs from sm_80 on, and the interpreter."""
    if device.type == "cuda" and torch.version.hip is None:
        return bool(gpu(device).major >= 8)
    return device.type == "cpu"


def _buffers(
    call: HeadCall, weight: Tensor, gradient: Gradient, *, in_gemm: bool = False
) -> Buffers:
    models = 1 if call.reference is None else 2
    if in_gemm and call.dtype != torch.float32:
        grad_bytes = call.dtype.itemsize if gradient == Gradient.ONE_SWEEP else 0
        return Buffers(len(weight), grad_bytes, models=0)
    if gradient == Gradient.LATER or call.dtype == torch.float32:
        return Buffers(len(weight), models=models)
    strips = gradient == Gradient.ONE_SWEEP
    return Buffers(len(weight), call.dtype.itemsize, strips=strips, models=models)

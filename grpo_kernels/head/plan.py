"""The plan of a call: its rows of logits, their statistics, and the source of their gradient.

The only file that knows all capabilities. Several targets per token and a reference are readouts in
place of `TargetReadout`; ranks are an object in place of `SingleRank`; tokens with a kept set have
no row of logits (`support.py`). Only calls that use a capability import it.
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
from ..base.memory import ran_out_of_memory, reclaim
from ..kernels import TokenStats
from .budget import RowBytes
from .call import HeadCall, HeadSpec, check_ids, named_reference, reference_call
from .chunked_head import ChunkedHead, SingleRank, TargetReadout
from .lm_head import LMHead, Reference
from .products import INVARIANT_ROWS, Gradients
from .row_plan import RowPlan

if TYPE_CHECKING:
    from ..kernels.pair_stats import PairStats
    from .support import KeptSets

_T = TypeVar("_T")
# A call that runs out of memory with so few rows at a time gives up.
_LEAST_ROWS = 16


class GradMode(IntEnum):
    """Source of the gradient of a call's logits."""

    RECOMPUTE = 0  # logits that a second pass makes again; or no gradient is needed
    FROM_EXPS = 1  # exponentials that the forward stores: a factor per row
    FROM_LOGITS = 2  # the forward's logits, by a second sweep over them
    SAVED_EXPS = 3  # exponentials of all rows, one chunk, which the first of two passes keeps

    @staticmethod
    def of(
        call: HeadCall, *, one_pass: bool, other_grads: bool = False, shows_entropy: bool = False
    ) -> GradMode:
        """Chooses the mode of a call.

        With a frozen head, the first of two passes stores d logp / d hidden; the second multiplies
        it by the loss's gradient. With a trained head, it keeps the exponentials of rows that are
        one chunk (`plan_head`).

        `one_pass`: the loss is known in the forward. `other_grads`: it has a gradient by other
        statistics than log-probs. `shows_entropy`: the caller's loss may have one by the entropy.
        """
        spec, needs_grad = call.spec, call.needs_grad()
        # A factor per row may be too large or too small for float16.
        has_factors = not other_grads and spec.dtype != torch.float16
        if not any(needs_grad):
            return GradMode.RECOMPUTE
        if not one_pass and (other_grads or spec.targets_per_token > 1):
            return GradMode.RECOMPUTE
        if one_pass or not any(needs_grad[1::2]):
            return GradMode.FROM_EXPS if has_factors else GradMode.FROM_LOGITS
        # A batch-invariant call's bits would depend on whether the rows are one chunk; ranks would
        # have to agree on whose memory is still lent.
        may_keep = has_factors and not spec.execution.batch_invariant and call.head.ranks is None
        return GradMode.SAVED_EXPS if may_keep and not shows_entropy else GradMode.RECOMPUTE


@dataclass(frozen=True)
class HeadPlan:
    """Plan of a call over a head: everything but the tensors that have gradients."""

    spec: HeadSpec  # its mask excludes tokens with a kept set
    rows: RowPlan
    ranks: SingleRank
    tokens: Tensor | None  # bool [N], the call's mask; None: every token counts
    sets: KeptSets | None
    needs_grad: Sequence[bool]  # for each of the terms' tensors
    entropy: bool  # whether the call returns it
    grad_mode: GradMode

    def chunked_head(self, tensors: Sequence[Tensor]) -> ChunkedHead:
        """The head over the rows of the plan, with the call's `tensors`."""
        keep_exps = self.grad_mode in (GradMode.FROM_EXPS, GradMode.SAVED_EXPS)
        count = 2 * self.spec.num_terms
        readout = self._readout(tensors[count:])
        return ChunkedHead(tensors[:count], self.spec, self.rows, readout, keep_exps=keep_exps)

    def _readout(self, reference_tensors: Sequence[Tensor]) -> TargetReadout:
        spec = self.spec
        if spec.reference is not None:
            from .two_heads import DivergenceReadout

            return DivergenceReadout(spec, reference_tensors, self.ranks, self.rows)
        if spec.targets_per_token > 1:
            from .many_targets import MultiTargetReadout

            return MultiTargetReadout(spec, self.ranks, entropy=self.entropy)
        return TargetReadout(spec, self.ranks, entropy=self.entropy)

    def gradients(self, tensors: Sequence[Tensor]) -> Gradients:
        """Buffers of the terms' gradients; to be made after the head."""
        return Gradients(tensors, self.needs_grad, self.rows, self.spec.dtype)

    @property
    def stats(self) -> type[TokenStats | PairStats]:
        """The class of a row's statistics."""
        if self.spec.reference is None:
            return TokenStats
        from ..kernels.pair_stats import PairStats

        return PairStats

    def second_pass(self, needed: Tensor, weight: Tensor, checks: ValueChecks) -> HeadPlan:
        """The plan of a second pass over the rows `needed`, bool `[N]`; reads `checks`."""
        spec = replace(self.spec, checks=checks)
        # The second pass makes logits a strip at a time.
        row_bytes = _row_bytes(spec, weight, GradMode.FROM_EXPS)
        rows = self.ranks.plan(spec, weight, needed, None, row_bytes)
        return replace(self, rows=rows, grad_mode=GradMode.RECOMPUTE)

    def run_with_retry(self, work: Callable[[HeadPlan], _T]) -> _T:
        """Calls `work` with this plan; when memory runs out, with half as many rows at a time.

        Does not retry if the caller set `chunk_bytes`, nor with ranks. First frees the memory that
        an earlier call has lent.
        """
        reclaim(self.spec.layout.device)
        execution = self.spec.execution
        fixed = execution.chunk_bytes is not None or not self.ranks.alone
        least = INVARIANT_ROWS if execution.batch_invariant else _LEAST_ROWS
        plan = self
        while True:
            try:
                result = work(plan)
                break
            except Exception as error:
                if fixed or plan.rows.logit_rows <= least or not ran_out_of_memory(error):
                    raise
            # After the `except` block, whose error keeps tensors alive. cuBLAS and Triton allocate
            # outside of torch's cache.
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            rows, mode = plan.rows.halved(least), plan.grad_mode
            if mode == GradMode.SAVED_EXPS:
                # Rows in several chunks keep no exponentials and need no memory for them.
                rows, mode = replace(rows, row_bytes=(rows.row_bytes[0], 0)), GradMode.RECOMPUTE
            plan = replace(plan, rows=rows, grad_mode=mode)
        if plan is not self:
            rows = plan.rows
            warnings.warn(
                f"memory ran out in the LM head, which continues with {rows.logit_rows} rows of "
                "logits at a time; the result is the same up to rounding. To start with as many, "
                f"without further tries, pass Execution(chunk_bytes={rows.bytes_taken})",
                stacklevel=2,
            )
        return result

    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the kept sets."""
        if self.sets is None:
            return {}
        return self.sets.metrics(None if self.tokens is None else self.tokens.sum())


def local_head(head: Tensor | LMHead) -> LMHead:
    """The head with plain tensors: this rank's part of each DTensor."""
    head = LMHead.of(head)
    tensors = (head.weight, head.bias, head.low_rank and head.low_rank[1])
    if not any(hasattr(x, "full_tensor") for x in tensors):
        return head
    from .shards import local_parts

    return local_parts(head)


def call_of_reference(call: HeadCall, reference: object, support: object = None) -> HeadCall:
    """The reference's call on the same tokens, checked, its head of plain tensors."""
    if support is not None:
        raise ValueError(
            "reference does not work with a support: pass the reference's log-probs with the same "
            "support as ref_logps"
        )
    if not isinstance(reference, (tuple, list)) or len(reference) != 2:
        raise TypeError(
            f"reference: expected a Reference(hidden, head); got {type(reference).__name__}"
        )
    with named_reference(call.spec.checks):
        head = local_head(reference[1])
    other = reference_call(call, Reference(reference[0], head))
    if call.head.ranks is not None:
        from .shards import ranks_of

        ranks_of(other, {})
    return other


def reference_logps(reference: HeadCall, plan: HeadPlan) -> Tensor:
    """The reference's log-probs of the targets, `[N]`, over the rows of the policy's plan."""
    spec = replace(reference.spec, targets=plan.spec.targets)
    rows = replace(plan.rows, num_grad_rows=0)
    logps = reference.tensors[0].new_zeros(spec.layout.num_tokens, dtype=torch.float32)
    readout = TargetReadout(spec, plan.ranks, entropy=False)
    with torch.no_grad(), torch.autocast(logps.device.type, enabled=False):
        head = ChunkedHead(reference.tensors, spec, rows, readout, keep_exps=False)
        for chunk in rows.chunks():
            logps[chunk.index] = head.forward(chunk).logps
    return logps


def with_targets(call: HeadCall, targets: Tensor, support: object) -> HeadCall:
    """The call with several targets per token, `[..., K]`, in place of the first of them."""
    if support is not None:
        raise ValueError(
            "support does not work with several targets per token: to score every id of the "
            "support, pass entries=True without targets"
        )
    flat = targets.detach().reshape(-1, targets.shape[-1]).long().contiguous()
    return call._replace(spec=replace(call.spec, targets=flat))


def plan_head(
    call: HeadCall,
    support: object,
    grad_mode: GradMode,
    *,
    entropy: bool,
    logsumexp: bool = False,
    entries: bool = False,
    with_grad: Tensor | None = None,
    reference: HeadCall | None = None,
    loss_settings: Mapping[str, float] | None = None,
) -> HeadPlan:
    """Plans a call. Reads value checks and row counts: the call's one transfer.

    `entropy`, `logsumexp`: whether the call returns them. `entries`: every id of a set is a target.
    `with_grad`: bool `[N]`, the tokens that may have a gradient; None: all. `reference` must ban no
    target. `loss_settings` must be the same on all ranks.
    """
    spec, weight = call.spec, call.tensors[1]
    tokens, sets, ranks = spec.mask, None, SingleRank(len(weight))
    if call.head.ranks is not None:
        from .shards import ranks_of

        agreed = {
            **(loss_settings or {}),
            "entropy": entropy,
            "entries": entries,
            "targets per token": spec.targets_per_token,
            "gradient mode": grad_mode,
        }
        ranks = ranks_of(call, agreed)
    local_ids = _local_ids(spec, ranks)
    check_ids(call, reference, ranks.columns, local_ids, ranks.sum)
    if support is not None:
        from .support import KeptSets

        sets = KeptSets(spec, support, ranks, every=entries, logsumexp=logsumexp)
        without_set = ~sets.tokens
        spec = replace(spec, mask=without_set if spec.mask is None else spec.mask & without_set)
    if local_ids is not spec.targets:
        spec = replace(spec, targets=local_ids)
    row_bytes = _row_bytes(spec, weight, grad_mode)
    rows = ranks.plan(spec, weight, spec.mask, with_grad, row_bytes)
    if grad_mode == GradMode.SAVED_EXPS and not rows.is_one_chunk_with_grad:
        grad_mode = GradMode.RECOMPUTE
        rows = rows.resized(weight, _row_bytes(spec, weight, grad_mode), spec.execution.chunk_bytes)
    needs_grad = call.needs_grad()
    return HeadPlan(spec, rows, ranks, tokens, sets, needs_grad, entropy, grad_mode)


def _local_ids(spec: HeadSpec, ranks: SingleRank) -> Tensor:
    """The columns of the targets on this rank; -1 where there is none."""
    if spec.targets is not None:
        return ranks.local_ids(spec.targets)
    N, device = spec.layout.num_tokens, spec.layout.device
    return torch.full((N,), -1, dtype=torch.int64, device=device)


def _row_bytes(spec: HeadSpec, weight: Tensor, grad_mode: GradMode) -> RowBytes:
    """The bytes of a row; float32 gradients overwrite the logits."""
    models = 1 if spec.reference is None else 2
    if grad_mode == GradMode.RECOMPUTE or spec.dtype == torch.float32:
        return RowBytes(len(weight), models=models)
    strips = grad_mode != GradMode.FROM_LOGITS
    return RowBytes(len(weight), spec.dtype.itemsize, strips=strips, models=models)

"""Per-token log-probs and entropy of a linear head, differentiable, for any loss.

Two passes over the same rows, three or four GEMMs. The forward computes each chunk of logits once
and keeps three numbers per row; the backward, when the gradient of every log-prob is known,
computes the logits again for the rows that have one:

    forward    Z = h W^T;  lse, l, E = token_stats(Z)
    backward   Z = h W^T;  dZ = logit_grads_(Z);  dh = dZ W;  dW += dZ^T h

Rows that are one chunk need three. The forward keeps their exponentials X; X times a factor per row
is the gradient of the logits (`chunked_head.py`). If another call on the device takes their memory,
the backward computes the logits again.

    forward    Z = h W^T;  l, S, X = token_stats(Z)
    backward   dh = r o (X W);  dW = X^T (r o h),  r = -g / (T S) for each row

A frozen head needs only dh, whose row is a number times the gradient of its log-prob: two GEMMs.

    forward    Z = h W^T;  lse, l, E = token_stats(Z);  u = (dl / dZ) W
    backward   dh = g u
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..base.autograd import (
    SplitSum,
    dtypes_of,
    eager_under_compile,
    float16_scale,
    graph_is_retained,
    refuse_double_backward,
    scaled,
    scaled_gradient,
)
from ..base.checks import ValueChecks, check_bool, check_tensor, suggests_names
from ..base.layout import selected
from ..base.memory import borrowed, lend, ran_out_of_memory
from ..base.outputs import LogprobOutput
from ..kernels import StatGrads, TokenStats
from .call import HeadCall, head_call
from .execution import Execution
from .lm_head import LMHead, Support
from .plan import GradMode, HeadPlan, local_head, plan_head, with_targets

if TYPE_CHECKING:
    from ..kernels.pair_stats import PairStats


@eager_under_compile
@suggests_names
def linear_logprobs(
    hidden: Tensor,
    head: Tensor | LMHead,
    targets: Tensor | None,
    mask: Tensor | None = None,
    *,
    entropy: bool = False,
    support: Support | None = None,
    entries: bool = False,
    execution: Execution = Execution(),  # noqa: B008 - frozen
) -> LogprobOutput:
    """Computes log-probs of the targets under a linear head, without storing the logits.

    Equivalent PyTorch:

        logits = (hidden @ weight.T + bias).float() / temperature
        logps = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    Args:
        hidden: `[B, T, H]` or packed `[N, H]`, float32, bfloat16 or float16. `hidden[..., t, :]`
            is the state that predicts `targets[..., t]`: the caller shifts.
        head: the LM head's weight `[V, H]`, or an `LMHead`.
        targets: `[B, T]` or `[N]`, integer token ids in [0, V) where the mask is 1, not banned by
            the bias. Or `[..., K]`: K ids per token, which may repeat or be banned; `logps` is
            then `[..., K]`, for the GEMMs of one target. K ids do not work with a support.
        mask: `[B, T]` or `[N]`, bool or 0/1; None computes every token. Masked positions may hold
            anything, cost nothing, and get 0.
        entropy: also computes the entropy.
        support: the token ids that the sampler kept for each token. Log-probs and entropy are then
            of the softmax over these ids (`docs/support.md`).
        entries: scores every id of the support: `logps` is `[E]`, in the order of
            `support.token_ids`, from these rows of the head only. Needs a set for every token, and
            `targets=None`.
        execution: backend, memory and reproducibility.

    Returns:
        `logps`, `entropy` (in nats) and `logsumexp` (of the logits after temperature), each with
        gradients for `hidden` and the tensors of `head`. Rows whose gradient is 0 cost nothing, if
        they are more than a third. If `head` is frozen, the backward needs no logits, unless
        `entropy` or `logsumexp` have a gradient.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. Values on the
            device (target ids, a mask other than 0/1) are read together with the row count, in
            the forward's one device-to-host transfer; the backward has one, for its row count.
        RuntimeError: on double backward.

    Under autocast on a GPU the GEMMs run in its dtype, as in `fused_grpo_loss`.

    Reference: `grpo_kernels.reference.linear_logprobs`, in any dtype up to float64.
    """
    _check_options(targets, entropy, support, entries)
    hidden = check_tensor("hidden", hidden)
    several, first = None, targets
    if isinstance(targets, Tensor) and targets.ndim == hidden.ndim > 1:
        several, first = targets, _first_target(targets)
    sampled = several is None and not entries
    call = head_call(hidden, local_head(head), first, mask, None, execution, sampled=sampled)
    if several is not None and several.shape[-1] > 1:
        call = with_targets(call, several, support)
    mode = GradMode.of(call, one_pass=False, shows_entropy=entropy)
    plan = plan_head(call, support, mode, entropy=entropy, logsumexp=True, entries=entries)
    logps, flat_entropy, lse, _ = compute_logprobs(call, plan, entries=entries)
    if targets is not None:
        logps = logps.reshape(targets.shape)
    shape = call.spec.layout.shape
    entropy_out = None if flat_entropy is None else flat_entropy.reshape(shape)
    return LogprobOutput(logps, entropy_out, lse.reshape(shape))


def _check_options(targets: object, entropy: object, support: object, entries: object) -> None:
    """Checks the options that do not depend on the head."""
    check_bool("entropy", entropy)
    check_bool("entries", entries)
    if entries and support is None:
        raise ValueError("entries=True needs a set for every token: pass support")
    if entries and targets is not None:
        raise ValueError(
            "targets does not work with entries=True, which scores every id of the support: pass "
            "targets=None"
        )


def compute_logprobs(
    call: HeadCall, plan: HeadPlan, *, entries: bool = False
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Log-probs, entropy, logsumexp and divergence of each token, flat.

    The softmax is over a token's kept set, or over its row of logits if it has none. With
    `entries`, log-probs are of all entries of the support.
    """
    sets, rows_forward = plan.sets, partial(_TwoPasses.apply, *call.tensors)
    if sets is None:
        return plan.run_with_retry(rows_forward)
    entry_logps, set_entropy, lse = sets.log_softmax(call)
    entropy = set_entropy.clone() if plan.entropy else None  # the caller may change it in place
    if entries:
        logps = entry_logps.new_zeros(sets.size)
        logps[sets.entry_index] = entry_logps
        return logps, entropy, lse, None
    logps = sets.logps(entry_logps)
    if plan.rows.num_rows:
        row_logps, row_entropy, row_lse, _ = plan.run_with_retry(rows_forward)
        has_set = sets.tokens
        logps = torch.where(has_set, logps, row_logps)
        lse = torch.where(has_set, lse, row_lse)
        if entropy is not None:
            entropy = torch.where(has_set, entropy, row_entropy)
    return logps, entropy, lse, None


def _first_target(targets: Tensor) -> Tensor:
    """The first of each token's targets `[..., K]`."""
    if targets.shape[-1] == 0:
        raise ValueError(
            f"targets: expected at least one id per token; got shape {list(targets.shape)}"
        )
    return targets[..., 0]


class _TwoPasses(torch.autograd.Function):
    """Log-probs, entropy, logsumexp and divergence `[N]`, from the tensors of the call's terms."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor | None, ...]:
        *tensors, plan = args
        per_token, stored = _first_pass(tensors, plan)
        # Not among the saved tensors, which hooks may copy to another device, slower than a GEMM.
        ctx.saved = None
        if plan.grad_mode == GradMode.SAVED_EXPS:
            ctx.saved, stored = stored, []
            lend(ctx.saved[0])
        ctx.save_for_backward(*tensors, *(x.clone() for x in per_token), *stored)
        ctx.plan, ctx.count = plan, len(tensors)
        ctx.set_materialize_grads(False)
        logps, logsumexp, entropy, *_ = per_token
        divergence = plan.stats.of(per_token, entropy=plan.entropy).divergence
        return logps, entropy if plan.entropy else None, logsumexp, divergence

    @staticmethod
    def backward(ctx: Any, *d_stats: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_logprobs")
        saved, needs_grad = ctx.saved_tensors, ctx.needs_input_grad[: ctx.count]
        tensors, forward_values = saved[: ctx.count], saved[ctx.count :]
        saved, ctx.saved = ctx.saved, ctx.saved if graph_is_retained() else None
        gradients = _second_pass(
            tensors, ctx.plan, forward_values, saved, StatGrads(*d_stats), needs_grad
        )
        return *gradients, None


def _first_pass(tensors: Sequence[Tensor], plan: HeadPlan) -> tuple[list[Tensor], list[Any]]:
    """Computes the statistics of all rows `[N]`, and further tensors for the second pass.

    Statistics are in the order of `plan.stats`, 0 for masked rows. The further tensors are
    exponentials `[C, V]` of all rows and their sums `[C]` (`GradMode.SAVED_EXPS`); or gradients of
    the sum of the log-probs, one per tensor of the terms that needs one; or none.
    """
    N, K, like = len(tensors[0]), plan.spec.targets_per_token, tensors[0]
    # No views of one tensor, as the caller may change them in place.
    per_token = [
        like.new_zeros(shape, dtype=torch.float32)
        for shape in ((N, K) if K > 1 else (N,), *[(N,)] * (plan.stats.size() - 1))
    ]
    stores_grads = plan.grad_mode in (GradMode.FROM_EXPS, GradMode.FROM_LOGITS)
    with torch.autocast(like.device.type, enabled=False):
        head = plan.chunked_head(tensors)
        grads = plan.gradients(tensors) if stores_grads else None
        for chunk in plan.rows.chunks():
            stats = head.forward(chunk)
            for x, values in zip(per_token, stats):  # noqa: B905 - `total` is not stored
                if values is not None:
                    x[chunk.index] = values
            if grads is not None:
                head.backward(chunk, grads, StatGrads(torch.ones_like(stats.logps)))
    if plan.grad_mode == GradMode.SAVED_EXPS:
        return per_token, [head.readout.exps, head.readout.stats.total]
    return per_token, [] if grads is None else grads.finalize()


def _second_pass(
    tensors: Sequence[Tensor],
    plan: HeadPlan,
    forward_values: Sequence[Any],
    saved: Sequence[Tensor] | None,
    d_stats: StatGrads,
    needs_grad: Sequence[bool],
) -> Sequence[Tensor | None]:
    """Computes the gradients of the terms' tensors from the statistics' gradients.

    `forward_values`, and `saved` exponentials with their sums, are results of `_first_pass`.
    """
    size = plan.stats.size()
    stats = plan.stats.of(forward_values[:size], entropy=plan.entropy)
    stored = forward_values[size:]
    only_logps = all(x is None for x in d_stats[1:])
    d_logps = torch.zeros_like(stats.logps) if d_stats.logps is None else d_stats.logps
    d_stats = d_stats._replace(logps=d_logps).each(lambda x: x.float().contiguous())
    each = [x != 0 for x in d_stats if x is not None]
    needed = torch.stack([x if x.ndim == 1 else x.any(1) for x in each]).any(0)
    if plan.tokens is not None:
        # Masked rows were returned as the constant 0 and have no gradient.
        needed &= plan.tokens
    if stored and only_logps:
        assert d_stats.logps is not None
        return [_scaled_rows(u, d_stats.logps, needed) for u in stored]
    dtypes = plan.spec.dtype, *(x.dtype for x in tensors)
    scale = float16_scale(dtypes, partial(_largest, d_stats, needed))
    d_stats = d_stats.each(partial(scaled, scale=scale))
    checks, not_finite = ValueChecks(), None
    gradients: list[Tensor | SplitSum | None] | None = None
    if saved is not None and only_logps:
        # Kept rows without a gradient are multiplied, too: NaN would reach the weight's gradient.
        not_finite = checks.ask((~(needed | stats.logsumexp.isfinite())).sum())
    second_plan = plan.second_pass(needed, tensors[1], checks)
    # Either two GEMMs over all rows, or three over those with a gradient.
    is_less = 2 * plan.rows.num_rows <= 3 * second_plan.rows.num_rows
    with torch.autocast(needed.device.type, enabled=False):
        if saved is not None and not_finite is not None and is_less and not_finite.numbers == [0]:
            gradients = _from_saved_exps(tensors, saved, stats, d_stats, needs_grad, plan)
        if gradients is None:
            gradients = second_plan.run_with_retry(
                partial(_gradients, tensors, stats, d_stats, needs_grad)
            )
    unscale = None if scale is None else 1 / scale
    return [
        scaled_gradient(gradient, unscale, dtype, fresh=True)
        for gradient, dtype in zip(gradients, dtypes_of(*tensors), strict=True)
    ]


def _gradients(
    tensors: Sequence[Tensor],
    stats: TokenStats | PairStats,
    d_stats: StatGrads,
    needs_grad: Sequence[bool],
    plan: HeadPlan,
) -> list[Tensor | SplitSum | None]:
    """The gradients of the terms' tensors, from the gradients of all rows' statistics `[N]`."""
    head = plan.chunked_head(tensors)
    grads = replace(plan, needs_grad=needs_grad).gradients(tensors)
    for chunk in plan.rows.chunks():
        head.restore(chunk, stats.at(chunk.index))
        head.backward(chunk, grads, d_stats.each(itemgetter(chunk.index)))
    return grads.finalize()


def _from_saved_exps(
    tensors: Sequence[Tensor],
    saved: Sequence[Tensor],
    stats: TokenStats | PairStats,
    d_stats: StatGrads,
    needs_grad: Sequence[bool],
    plan: HeadPlan,
) -> list[Tensor | SplitSum | None] | None:
    """The gradients of the terms' tensors, from the exponentials of the plan's one chunk.

    None if another call has taken their memory, or if too little other memory is free.
    """
    exps, total = saved
    (chunk,) = plan.rows.chunks()
    stats = cast(TokenStats, stats).at(chunk.index)._replace(total=total)
    # Without rows it makes no buffers.
    no_rows = replace(plan.rows, num_rows=0, num_grad_rows=0)
    with borrowed(exps) as are_there:
        if not are_there:
            return None
        try:
            head = replace(plan, rows=no_rows).chunked_head(tensors)
            grads = replace(plan, needs_grad=needs_grad).gradients(tensors)
            head.restore(chunk, stats, exps)
            head.backward(chunk, grads, d_stats.each(itemgetter(chunk.index)))
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return None
    return grads.finalize()


def _scaled_rows(stored: Tensor | None, factors: Tensor, needed: Tensor) -> Tensor | None:
    """Multiplies each row that is needed by its factor, rounding once; the others are 0."""
    if stored is None:
        return None
    grad = torch.mul(stored, factors[:, None], out=torch.empty_like(stored))
    return grad.masked_fill_(~needed[:, None], 0.0)


def _largest(gradients: Sequence[Tensor | None], needed: Tensor) -> Tensor:
    """The largest size among the gradients of rows that are needed, 0-d."""
    # Rows that are not needed may hold anything, NaN included.
    peaks = [selected(needed, x, 0.0).abs().amax() for x in gradients if x is not None and len(x)]
    none = torch.zeros((), dtype=torch.float32, device=needed.device)
    return torch.stack(peaks).amax() if peaks else none

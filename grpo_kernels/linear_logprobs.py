"""Per-token log-probs and entropy of a linear head, differentiable, for any loss of the caller's.

Two passes over the same routes, four GEMMs. The forward computes each chunk of logits once and
keeps three numbers per row; the backward, which only then knows the gradient of every log-prob,
computes the logits again for the rows that have one:

    forward    Z = h W^T;  lse, l, E = token_stats(Z)
    backward   Z = h W^T;  dZ = logit_grads_(Z);  dh = dZ W;  dW += dZ^T h
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .arguments import head_call
from .autograd import (
    dtypes_of,
    eager_only,
    power_of_two_scale,
    refuse_double_backward,
    scaled_gradient,
)
from .backends import TokenStats
from .checks import check_bool
from .dense import Gradients
from .execution import Execution
from .head import LMHead, Support
from .outputs import LogprobOutput
from .retry import with_fewer_rows
from .routes import Routes, local_head, routes_of
from .row_plan import RowPlan


@eager_only
def linear_logprobs(
    hidden: Tensor,
    head: Tensor | LMHead,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    entropy: bool = False,
    support: Support | None = None,
    execution: Execution = Execution(),  # noqa: B008 - frozen
) -> LogprobOutput:
    """Computes log-probs of the targets under a linear head, without ever holding the logits.

    Equivalent PyTorch:

        logits = (hidden @ weight.T + bias).float() / temperature
        logps = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    Args:
        hidden: `[B, T, H]` or packed `[N, H]`, float32, bfloat16 or float16. `hidden[..., t, :]`
            is the state that predicts `targets[..., t]`: the caller shifts.
        head: the LM head's weight `[V, H]`, or an `LMHead`.
        targets: `[B, T]` or `[N]`, integer token ids in [0, V) wherever the mask is 1.
        mask: of the shape of `targets`, bool or 0/1; None computes every token. Masked positions
            may hold anything, cost nothing, and come back as 0.
        entropy: computes the entropy, too.
        support: the sets that the sampler kept for each token: results are of the softmax over
            these ids (`docs/support.md`).
        execution: how it is computed.

    Returns:
        `logps`, `entropy` (in nats) and `logsumexp` (of the logits after temperature), each with
        gradients for `hidden` and the tensors of `head`. The backward skips rows whose gradient
        turns out to be 0.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. Values on the
            device (target ids, a mask other than 0/1) are read together with the row count, in
            the forward's one device-to-host transfer; the backward has one, for its row count.
        RuntimeError: on double backward.

    Under autocast on a GPU the GEMMs run in its dtype, as in `fused_grpo_loss`.

    Reference: `grpo_kernels.reference.linear_logprobs`, in any dtype up to float64.
    """
    check_bool("entropy", entropy)
    call = head_call(hidden, local_head(head), targets, mask, None, execution)
    routes = routes_of(
        call, support, None, gradients=False, keeps=False, logsumexp=True,
        agreed={"entropy": entropy},
    )  # fmt: skip
    found = flat_logprobs(call.tensors, routes, entropy=entropy)
    return LogprobOutput(*(None if x is None else x.reshape(call.layout.shape) for x in found))  # type: ignore[arg-type]


def flat_logprobs(
    tensors: Sequence[Tensor], routes: Routes, *, entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probs, entropy and logsumexp, each `[N]`, from the tensors of the call's terms."""
    run = partial(_TwoPasses.apply, *tensors, routes, entropy)
    return with_fewer_rows(run, routes.plan, **routes.limits())


class _TwoPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        *tensors, routes, wants_entropy, plan = args
        # Not views of one tensor: the caller may change them in place.
        per_token = [tensors[0].new_zeros(len(tensors[0]), dtype=torch.float32) for _ in range(3)]
        logps, logsumexp, entropy = per_token
        with torch.autocast(logps.device.type, enabled=False):
            for route in routes.of(tensors, plan, entropy=wants_entropy, keeps=False, draws=False):
                for rows in route.chunks():
                    stats = route.sweep(rows)
                    logps[rows.index], logsumexp[rows.index] = stats.logps, stats.logsumexp
                    if wants_entropy:
                        entropy[rows.index] = stats.entropy
        ctx.save_for_backward(*tensors, *torch.stack(per_token))
        if plan.has_masked and routes.tokens is not None:
            for x in per_token:
                x.masked_fill_(~routes.tokens, 0.0)
        ctx.routes, ctx.wants_entropy = routes, wants_entropy
        ctx.set_materialize_grads(False)
        return logps, entropy if wants_entropy else None, logsumexp

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor | None, d_entropy: Tensor | None, d_logsumexp: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_logprobs")
        *tensors, logps, logsumexp, entropy = ctx.saved_tensors
        routes, wanted = ctx.routes, ctx.needs_input_grad[: len(tensors)]
        given = [d_logps, d_entropy, d_logsumexp]
        given = [None if x is None else x.float().contiguous() for x in given]
        if given[0] is None:
            given[0] = torch.zeros_like(logps)
        needed = torch.stack([x != 0 for x in given if x is not None]).any(0)
        if routes.tokens is not None:
            # Masked rows came back as the constant 0, whatever gradient their value is given.
            needed &= routes.tokens
        if routes.plan.has_masked:
            given = [None if x is None else torch.where(needed, x, 0.0) for x in given]
        scale, plan = None, routes.plan
        if routes.makes_logits:
            scale = routes.agreed(_power_of_two_scale_of(given, needed))
            given = [None if x is None else scale * x for x in given]
            plan = routes.again(needed, tensors[1])
        stats = TokenStats(logps, logsumexp, entropy if ctx.wants_entropy else None)
        run = partial(_gradients, tensors, routes, stats, given, wanted)
        with torch.autocast(logps.device.type, enabled=False):
            gradients = with_fewer_rows(run, plan, **routes.limits())
        if scale is not None:
            factors = routes.shares(1 / scale, len(gradients))
            gradients = [
                scaled_gradient(gradient, factor, dtype, fresh=True)
                for gradient, factor, dtype in zip(
                    gradients, factors, dtypes_of(*tensors), strict=True
                )
            ]
        return (*gradients, None, None, None)


def _gradients(
    tensors: Sequence[Tensor],
    routes: Routes,
    stats: TokenStats,
    given: Sequence[Tensor | None],
    wanted: Sequence[bool],
    plan: RowPlan,
) -> list[Tensor | None]:
    """The gradients of the terms' tensors, from those of the statistics of all rows `[N]`."""
    grads = Gradients(tensors, wanted, every_row=plan.num_rows == len(tensors[0]))
    entropy = stats.entropy is not None
    for route in routes.of(tensors, plan, entropy=entropy, keeps=False, draws=True):
        for rows in route.chunks():
            of_rows = [None if x is None else x[rows.index] for x in given]
            route.resume(rows, stats.at(rows.index))
            route.add(rows, grads, *of_rows)  # type: ignore[arg-type]
        route.finish(grads)
    return grads.all()


def _power_of_two_scale_of(gradients: Sequence[Tensor | None], needed: Tensor) -> Tensor:
    # Rows that are not needed may be given anything, NaN included.
    peaks = [torch.where(needed, x, 0.0).abs() for x in gradients if x is not None and x.numel()]
    none = torch.zeros((), device=needed.device)
    return power_of_two_scale(torch.stack(peaks).amax() if peaks else none)

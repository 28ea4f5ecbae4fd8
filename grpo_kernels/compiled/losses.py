"""The two losses as operators: `fused_grpo_loss` and `grpo_loss`.

Each computes the loss with its gradients, as the eager call; the backward multiplies these by the
loss's.

    -> loss, metrics [M], log-probs and entropy where they are computed, gradients that are wanted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.autograd import refuse_double_backward
from ..base.checks import ValueChecks
from ..base.layout import Layout
from ..base.outputs import GRPOLossOutput
from ..fused_grpo_loss import fused_grpo_loss as eager_fused
from ..loss.config import GRPOLossConfig
from ..loss.grpo_loss import grpo_loss as eager_grpo
from ..loss.inputs import loss_inputs
from ..loss.metrics import loss_metrics
from .eagerly import eagerly, why_eager
from .leaves import LEAVES, NAMESPACE, TAGS, Leaves, config_of, leaves_of

_CONSTANTS = ("old_logps", "ref_logps", "sampling_logps", "ce_weights")


def _operator(eager: Callable[..., GRPOLossOutput], of_tokens: int) -> Any:
    """The operator of a call that computes so many values `of_tokens`, besides its loss."""
    name = eager.__name__

    @torch.library.custom_op(
        f"{NAMESPACE}::{name}",
        mutates_args=(),
        tags=TAGS,
        schema=f"({LEAVES}, int metrics) -> Tensor[]",
    )
    def operator(*args: Any) -> list[Tensor]:
        *leaves, _ = args
        given = Leaves(*leaves)
        with given.as_called() as (ends, arguments):
            out = eager(**arguments)
            gradients = _gradients(out, ends, given.chosen(given.wanted))
        metrics = torch.stack([x.detach().float() for x in out.metrics.values()])
        values = [x.clone() for x in (out.logps, out.entropy)[:of_tokens] if x is not None]
        return [out.loss.detach().clone(), metrics, *values, *gradients]

    @operator.register_fake
    def _(*args: Any) -> list[Tensor]:
        *leaves, metrics = args
        given = Leaves(*leaves)
        tokens = given.place("targets" if of_tokens else "logps").shape
        shapes: list[Sequence[int]] = [(), (metrics,), *[tokens] * of_tokens]
        values = [given.tensors[0].new_empty(shape, dtype=torch.float32) for shape in shapes]
        return [*values, *given.like_wanted()]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.save_for_backward(*output[2 + of_tokens :])
        given = Leaves(*inputs[:-1])
        ctx.given = given._replace(tensors=[])
        ctx.tokens = given.place("targets" if of_tokens else "logps").numel()
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, given: Sequence[Tensor | None]) -> tuple[Any, ...]:
        refuse_double_backward(name)
        d_loss, gradients = given[0], []
        for x, wanted in zip(ctx.saved_tensors, ctx.given.chosen(ctx.given.wanted), strict=True):
            if d_loss is None:
                gradients.append(torch.zeros_like(x))
            else:
                factor = d_loss / _row_scale(x, wanted, ctx.tokens)
                gradients.append((x.float() * factor).to(x.dtype))
        return ctx.given.placed(gradients), *[None] * 4

    operator.register_autograd(backward, setup_context=keep)
    return operator


def _gradients(out: GRPOLossOutput, ends: list[Tensor], wanted: list[int]) -> list[Tensor]:
    """The gradients of the loss, those of single tokens times `_row_scale`."""
    factors = [_row_scale(x, w, out.logps.numel()) for x, w in zip(ends, wanted, strict=True)]
    found: list[Tensor | None] = [None] * len(ends)
    for factor in sorted(set(factors)):
        places = [i for i, x in enumerate(factors) if x == factor]
        of_factor = torch.autograd.grad(
            out.loss,
            [ends[i] for i in places],
            torch.full_like(out.loss.detach(), factor),
            retain_graph=factor != max(factors),
            materialize_grads=True,  # by an entropy that the loss has no use for
        )
        for i, x in zip(places, of_factor, strict=True):
            found[i] = x.contiguous()
    return [x for x in found if x is not None]


def _row_scale(x: Tensor, wanted: int, tokens: int) -> float:
    """A row's gradient is a mean's share, and would be nothing in float16; a sum over rows not."""
    return 2.0 ** tokens.bit_length() if wanted == 2 and x.dtype == torch.float16 else 1.0


_fused_operator, _grpo_operator = _operator(eager_fused, 2), _operator(eager_grpo, 0)
_FUSED_EAGERLY, _GRPO_EAGERLY = eagerly(eager_fused), eagerly(eager_grpo)


@torch.compiler.assume_constant_result
def _metrics_of(text: str, ndim: int, *given: bool) -> tuple[str, ...]:
    """The names of a call's metrics, in their order, from those of a loss of two tokens."""
    x, checks = torch.zeros((1, 2)[2 - ndim :]), ValueChecks()
    wants_grad, has_entropy, has_offsets, *constants = given
    layout = Layout.of("targets", x, torch.tensor([0, 2]) if has_offsets else None, checks)
    by_name: dict[str, Any] = {
        name: x if there else None for name, there in zip(_CONSTANTS, constants, strict=True)
    }
    inputs = loss_inputs(config_of(text), layout, checks, x, None, num_items=None, **by_name)
    flat = x.flatten()
    d_logps, entropy = flat if wants_grad else None, flat if has_entropy else None
    return tuple(loss_metrics(config_of(text), inputs, flat, entropy, d_logps, None))


def _computed(
    operator: Any, given: dict[str, Any], like: Tensor, has_entropy: bool
) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """Loss, metrics, and what else the operator has."""
    leaves = leaves_of(given, like)
    config: GRPOLossConfig = given["config"]
    names = _metrics_of(
        config.text, like.ndim, any(leaves.wanted), has_entropy,
        given["cu_seqlens"] is not None, *(given[name] is not None for name in _CONSTANTS),
    )  # fmt: skip
    loss, metrics, *others = operator(*leaves, len(names))
    return loss, dict(zip(names, metrics.detach().unbind(), strict=True)), others


def fused_grpo_loss(**given: Any) -> GRPOLossOutput:
    """`grpo_kernels.fused_grpo_loss` as one operator."""
    why = why_eager(given)
    if why is not None:
        return _FUSED_EAGERLY[why](**given)
    del given["support"]
    loss, metrics, others = _computed(_fused_operator, given, given["targets"], True)
    return GRPOLossOutput(loss, metrics, others[0].detach(), others[1].detach())


def grpo_loss(**given: Any) -> GRPOLossOutput:
    """`grpo_kernels.grpo_loss` as one operator."""
    why = why_eager(given)
    if why is not None:
        return _GRPO_EAGERLY[why](**given)
    logps, entropy = given["logps"], given["entropy"]
    loss, metrics, _ = _computed(_grpo_operator, given, logps, entropy is not None)
    shown = None if entropy is None else entropy.detach().float()
    return GRPOLossOutput(loss, metrics, logps.detach().float(), shown)

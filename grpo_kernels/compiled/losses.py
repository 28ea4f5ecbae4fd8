"""The losses as operators: `fused_grpo_loss`, `fused_distillation_loss` and `grpo_loss`.

Each computes the loss with its gradients, as the eager call; the backward multiplies these by the
loss's.

    -> loss, metrics [M], what is computed of each token, gradients that are wanted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base.autograd import refuse_double_backward
from ..base.checks import ValueChecks
from ..base.layout import Layout
from ..base.outputs import DistillationOutput, GRPOLossOutput
from ..fused_distillation import METRICS
from ..fused_distillation import fused_distillation_loss as eager_distillation
from ..fused_grpo_loss import fused_grpo_loss as eager_fused
from ..loss.config import GRPOLossConfig
from ..loss.grpo_loss import grpo_loss as eager_grpo
from ..loss.inputs import loss_inputs
from ..loss.metrics import loss_metrics
from .eagerly import eagerly, why_eager
from .leaves import LEAVES, NAMESPACE, TAGS, Leaves, config_of, leaves_of

_CONSTANTS = ("old_logps", "ref_logps", "sampling_logps", "ce_weights")


def _operator(
    eager: Callable[..., GRPOLossOutput | DistillationOutput], like: str, of_tokens: int
) -> Any:
    """The operator of a call that computes so many values `of_tokens`, besides its loss.

    `like`: the argument whose shape tells that of the tokens: but for its last dimension, if that
    is `hidden`.
    """
    name = eager.__name__

    def of_tokens_like(given: Leaves) -> Tensor:
        x = given.place(like)
        return x[..., 0] if like == "hidden" else x

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
        of_each: Sequence[Any] = out[2 : 2 + of_tokens]
        values = [x.clone() for x in of_each]
        return [out.loss.detach().clone(), metrics, *values, *gradients]

    @operator.register_fake
    def _(*args: Any) -> list[Tensor]:
        *leaves, metrics = args
        given = Leaves(*leaves)
        shapes: list[Sequence[int]] = [(), (metrics,), *[of_tokens_like(given).shape] * of_tokens]
        values = [given.tensors[0].new_empty(shape, dtype=torch.float32) for shape in shapes]
        return [*values, *given.like_wanted()]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.save_for_backward(*output[2 + of_tokens :])
        given = Leaves(*inputs[:-1])
        ctx.given = given._replace(tensors=[])
        ctx.tokens = of_tokens_like(given).numel()
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


def _gradients(
    out: GRPOLossOutput | DistillationOutput, ends: list[Tensor], wanted: list[int]
) -> list[Tensor]:
    """The gradients of the loss, those of single tokens times `_row_scale`."""
    factors = [_row_scale(x, w, out[2].numel()) for x, w in zip(ends, wanted, strict=True)]
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


_fused_operator = _operator(eager_fused, "targets", 2)
_distillation_operator = _operator(eager_distillation, "hidden", 1)
_grpo_operator = _operator(eager_grpo, "logps", 0)
_FUSED_EAGERLY, _GRPO_EAGERLY = eagerly(eager_fused), eagerly(eager_grpo)
_DISTILLATION_EAGERLY = eagerly(eager_distillation)


@torch.compiler.assume_constant_result
def _metrics_of(text: str, ndim: int, *given: bool) -> tuple[str, ...]:
    """The names of a call's metrics, in their order, from those of a loss of two tokens."""
    x, checks = torch.zeros((1, 2)[2 - ndim :], dtype=torch.float32), ValueChecks()
    wants_grad, has_entropy, has_offsets, has_reference, *constants = given
    config = config_of(text)
    offsets = torch.tensor([0, 2], dtype=torch.int64) if has_offsets else None
    layout = Layout.of("targets", x, offsets, checks)
    by_name: dict[str, Any] = {
        name: x if there else None for name, there in zip(_CONSTANTS, constants, strict=True)
    }
    inputs = loss_inputs(
        config, layout, checks, x, None, num_items=None, has_reference=has_reference, **by_name
    )
    flat = x.flatten()
    if has_reference:
        known = {"kl": flat} if config.exact_kl else {"ref_logps": flat}
        inputs = replace(inputs, **known)  # type: ignore[arg-type]
    d_logps, entropy = flat if wants_grad else None, flat if has_entropy else None
    return tuple(loss_metrics(config, inputs, flat, entropy, d_logps, None))


def _computed(
    operator: Any, given: dict[str, Any], like: Tensor, has_entropy: bool
) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """Loss, metrics, and what else the operator has."""
    leaves = leaves_of(given, like)
    config: GRPOLossConfig = given["config"]
    names = _metrics_of(
        config.text, like.ndim, any(leaves.wanted), has_entropy,
        given["cu_seqlens"] is not None, given.get("reference") is not None,
        *(given[name] is not None for name in _CONSTANTS),
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


def fused_distillation_loss(**given: Any) -> DistillationOutput:
    """`grpo_kernels.fused_distillation_loss` as one operator."""
    why = why_eager(given)
    if why is not None:
        return _DISTILLATION_EAGERLY[why](**given)
    leaves = leaves_of(given, given["hidden"])
    loss, metrics, divergence, *_ = _distillation_operator(*leaves, len(METRICS))
    named = dict(zip(METRICS, metrics.detach().unbind(), strict=True))
    return DistillationOutput(loss, named, divergence.detach())


def grpo_loss(**given: Any) -> GRPOLossOutput:
    """`grpo_kernels.grpo_loss` as one operator."""
    why = why_eager(given)
    if why is not None:
        return _GRPO_EAGERLY[why](**given)
    logps, entropy = given["logps"], given["entropy"]
    loss, metrics, _ = _computed(_grpo_operator, given, logps, entropy is not None)
    shown = None if entropy is None else entropy.detach().float()
    return GRPOLossOutput(loss, metrics, logps.detach().float(), shown)

"""The calls on log-probs and logits as operators, and what `calls.py` shares with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from ..base.autograd import refuse_double_backward
from ..base.checks import ValueChecks, check_number
from ..base.layout import Layout
from ..base.outputs import GRPOLossOutput
from ..head.selective_log_softmax import checked, gradient, sweep
from ..loss.config import GRPOLossConfig
from ..loss.grpo_loss import grpo_loss as eager_grpo_loss
from ..loss.inputs import loss_inputs
from ..loss.metrics import loss_metrics

# Of this copy: an installed package and one of a hub are two.
NAMESPACE = __package__.rpartition(".")[0].replace(".", "_")  # a vendored one has dots
# Rows are counted by reading from the device, which no CUDA graph can hold.
TAGS = [x for x in (getattr(torch.Tag, "cudagraph_unsafe", None),) if x is not None]
WHY_EAGER = {
    "ranks": "ranks: a process group is no part of a graph",
    "support": "support: the sizes of kept sets follow from the data",
    "matmul": "execution.matmul: a function is no part of a graph",
    "loss_type": "config.loss_type: a loss of one's own is no part of a graph",
    "dtensor": "head: a DTensor's parts are taken eagerly",
}


def eagerly(call: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {name: torch.compiler.disable(call, reason=why) for name, why in WHY_EAGER.items()}


@contextmanager
def as_called(like: Tensor, autocast: torch.dtype | None) -> Iterator[None]:
    """The caller's autocast, which a graph does not keep, and autograd, which operators lack."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    keys = [x for x in _AUTOGRAD if excluded(x)]
    for key in keys:
        exclude(key, False)
    try:
        with (
            torch.autocast(like.device.type, dtype=autocast, enabled=autocast is not None),
            torch.enable_grad(),
        ):
            yield
    finally:
        for key in keys:
            exclude(key, True)


_AUTOGRAD = (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther)


def of_wanted(wanted: Sequence[bool], found: Sequence[Tensor]) -> list[Tensor | None]:
    given = iter(found)
    return [next(given) if x else None for x in wanted]


# What is constant in a graph


@cache
def _config_of(text: str) -> GRPOLossConfig:
    return GRPOLossConfig(**json.loads(text))


@torch.compiler.assume_constant_result
def _metrics_of(text: str, ndim: int, *given: bool) -> tuple[str, ...]:
    """The names of a call's metrics, in their order, from those of a loss of two tokens."""
    config = _config_of(text)
    x, checks = torch.zeros((1, 2)[2 - ndim :]), ValueChecks()
    names = ("old_logps", "ref_logps", "sampling_logps", "ce_weights")
    wants_grad, has_entropy, *constants, has_offsets = given
    offsets = torch.tensor([0, 2]) if has_offsets else None
    by_name: dict[str, Any] = {
        name: x if there else None for name, there in zip(names, constants, strict=True)
    }
    layout = Layout.of("targets", x, offsets, checks)
    inputs = loss_inputs(config, layout, checks, x, None, num_items=None, **by_name)
    flat = x.flatten()
    d_logps = flat if wants_grad else None
    entropy = flat if has_entropy else None
    return tuple(loss_metrics(config, inputs, flat, entropy, d_logps, None))


# A loss


# The arguments of a loss: `GRPOLossConfig` as text, and the number of its metrics.
LOSS = (
    "Tensor advantages, Tensor? old_logps, Tensor? ref_logps, Tensor? sampling_logps, "
    "Tensor? ce_weights, Tensor? cu_seqlens, Tensor? items, float? item, str config, int metrics"
)
CONSTANTS = ("old_logps", "ref_logps", "sampling_logps", "ce_weights", "cu_seqlens")


def flat_loss_arguments(
    config: GRPOLossConfig,
    ndim: int,
    wants_grad: bool,
    has_entropy: bool,
    advantages: Tensor,
    num_items: float | Tensor | None,
    constants: dict[str, Tensor | None],
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """The arguments of `LOSS`, and the names of the metrics."""
    others = [constants[name] for name in CONSTANTS]
    there = (x is not None for x in others)
    text = config.text
    names = _metrics_of(text, ndim, wants_grad, has_entropy, *there)
    number = not isinstance(num_items, Tensor) and num_items is not None
    if number:
        check_number("num_items", num_items)
    item = float(num_items) if number else None  # type: ignore[arg-type]
    items = None if number else num_items
    return (advantages, *others, items, item, text, len(names)), names


def options_of_loss(given: tuple[Any, ...]) -> dict[str, Any]:
    _, *others, items, item, config, _ = given
    return {
        **dict(zip(CONSTANTS, others, strict=True)),
        "num_items": item if items is None else items,
        "config": _config_of(config),
    }


def results_of(
    out: GRPOLossOutput,
    rows: Sequence[Tensor | None],
    head: Sequence[Tensor | None],
    count: int,
) -> list[Tensor]:
    """The loss, its metrics `[M]`, and gradients by the leaves of rows and of the head.

    Those of rows times `_row_scale`.
    """
    assert len(out.metrics) == count
    metrics = torch.stack([x.float() for x in out.metrics.values()])
    of_rows, of_head = (
        [x for x in leaves if x is not None and x.requires_grad] for leaves in (rows, head)
    )
    one = torch.ones_like(out.loss.detach())
    gradients: list[Tensor] = []
    scales = {_row_scale(x, out.logps.numel()) for x in of_rows} - {1.0}
    if not scales:
        ends = [*of_rows, *of_head]
        gradients = _gradients(out.loss, ends, one) if ends else []
    else:
        (scale,) = scales
        gradients = _gradients(out.loss, of_rows, scale * one, retain_graph=True)
        gradients += _gradients(out.loss, of_head, one) if of_head else []
    return [out.loss.detach().clone(), metrics.detach(), *(x.contiguous() for x in gradients)]


def _gradients(
    loss: Tensor, ends: list[Tensor], factor: Tensor, retain_graph: bool = False
) -> list[Tensor]:
    # A loss that has no use for an entropy has the gradient 0 by it.
    return list(
        torch.autograd.grad(loss, ends, factor, retain_graph=retain_graph, materialize_grads=True)
    )


def _row_scale(x: Tensor, tokens: int) -> float:
    """A row's gradient is a mean's share, and would be nothing in float16; a sum over rows not."""
    return 2.0 ** tokens.bit_length() if x.dtype == torch.float16 else 1.0


def scaled(saved: Sequence[Tensor], d_loss: Tensor | None, rows: int, tokens: int) -> list[Tensor]:
    """Gradients times that of the loss, the first `rows` of them without their scale."""
    if d_loss is None:
        return [torch.zeros_like(x) for x in saved]
    factors = [d_loss / _row_scale(x, tokens) if i < rows else d_loss for i, x in enumerate(saved)]
    return [(x.float() * factor).to(x.dtype) for x, factor in zip(saved, factors, strict=True)]


def like(x: Tensor) -> Tensor:
    """What an operator's gradient of `x` is: without the strides that it came with."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    f"{NAMESPACE}::grpo_loss",
    mutates_args=(),
    tags=TAGS,
    schema="(Tensor logps, Tensor? entropy, Tensor? mask, str backend, bool[] wanted, "
    f"{LOSS}) -> Tensor[]",
)
def _grpo_loss(*args: Any) -> list[Tensor]:
    logps, entropy, mask, backend, wanted, *given = args
    with as_called(logps, None):
        x = logps.detach().requires_grad_(wanted[0])
        of_entropy = None if entropy is None else entropy.detach().requires_grad_(wanted[1])
        options = options_of_loss(tuple(given))
        out = eager_grpo_loss(x, given[0], mask, entropy=of_entropy, backend=backend, **options)
        return results_of(out, (x, of_entropy), (), given[-1])


@_grpo_loss.register_fake
def _(*args: Any) -> list[Tensor]:
    logps, entropy, _, _, wanted, *_ = args
    shapes: tuple[Any, ...] = ((), (args[-1],))
    ends = [x for x, wants in zip((logps, entropy), wanted, strict=True) if wants]
    return [
        *(logps.new_empty(shape, dtype=torch.float32) for shape in shapes),
        *(like(x) for x in ends),
    ]


def _keep_of_loss(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*output[2:])
    ctx.wanted, ctx.count, ctx.tokens = inputs[4], len(inputs), math.prod(inputs[0].shape)
    ctx.set_materialize_grads(False)


def _backward_of_loss(ctx: Any, given: Sequence[Tensor | None]) -> tuple[Any, ...]:
    refuse_double_backward("grpo_loss")
    gradients = scaled(ctx.saved_tensors, given[0], sum(ctx.wanted), ctx.tokens)
    return (*of_wanted(ctx.wanted, gradients), *[None] * (ctx.count - len(ctx.wanted)))


_grpo_loss.register_autograd(_backward_of_loss, setup_context=_keep_of_loss)


def grpo_loss(
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    *,
    entropy: Tensor | None,
    config: GRPOLossConfig,
    num_items: float | Tensor | None,
    backend: str,
    **constants: Tensor | None,
) -> GRPOLossOutput:
    """`grpo_kernels.grpo_loss` as one operator."""
    if not isinstance(config.loss_type, str):
        return _EAGER_GRPO["loss_type"](
            logps, advantages, mask, entropy=entropy, config=config, num_items=num_items,
            backend=backend, **constants,
        )  # fmt: skip
    enabled = torch.is_grad_enabled()
    wanted = [enabled and x is not None and x.requires_grad for x in (logps, entropy)]
    of_loss, names = flat_loss_arguments(
        config, logps.ndim, any(wanted), entropy is not None, advantages, num_items, constants
    )
    loss, metrics, *_ = _grpo_loss(logps, entropy, mask, backend, wanted, *of_loss)
    by_name = dict(zip(names, metrics.detach().unbind(), strict=True))
    shown = None if entropy is None else entropy.detach().float()
    return GRPOLossOutput(loss, by_name, logps.detach().float(), shown)


_EAGER_GRPO = eagerly(eager_grpo_loss)


# Log-probs of logits


@torch.library.custom_op(
    f"{NAMESPACE}::selective_log_softmax",
    mutates_args=(),
    tags=TAGS,
    schema="(Tensor logits, Tensor targets, Tensor? temperatures, float temperature, str backend) "
    "-> Tensor[]",
)
def _selective_log_softmax(*args: Any) -> list[Tensor]:
    """Log-probs and logsumexp, `[N]`."""
    logits, targets, temperatures, temperature, backend = args
    t = temperature if temperatures is None else temperatures
    return list(sweep(logits, *checked(logits, targets, t, backend)))


@_selective_log_softmax.register_fake
def _(*args: Any) -> list[Tensor]:
    logits, targets, *_ = args
    return [logits.new_empty(targets.numel(), dtype=torch.float32) for _ in range(2)]


@torch.library.custom_op(
    f"{NAMESPACE}::selective_log_softmax_backward",
    mutates_args=(),
    tags=TAGS,
    schema="(Tensor logits, Tensor targets, Tensor? temperatures, float temperature, str backend, "
    "Tensor[] stats, Tensor d_logps) -> Tensor",
)
def _selective_log_softmax_backward(*args: Any) -> Tensor:
    logits, targets, temperatures, temperature, backend, stats, d_logps = args
    t = temperature if temperatures is None else temperatures
    return gradient(logits, *checked(logits, targets, t, backend), stats, d_logps)


@_selective_log_softmax_backward.register_fake
def _(*args: Any) -> Tensor:
    return torch.empty_like(args[0], memory_format=torch.contiguous_format)


def _keep_of_logits(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.rest = inputs[3:]


def _backward_of_logits(ctx: Any, given: Sequence[Tensor | None]) -> tuple[Any, ...]:
    refuse_double_backward("selective_log_softmax")
    *tensors, logps, logsumexp = ctx.saved_tensors
    d_logps = torch.zeros_like(logps) if given[0] is None else given[0]
    found = _selective_log_softmax_backward(*tensors, *ctx.rest, [logps, logsumexp], d_logps)
    return found, None, None, None, None


_selective_log_softmax.register_autograd(_backward_of_logits, setup_context=_keep_of_logits)


def selective_log_softmax(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, backend: str
) -> Tensor:
    """`grpo_kernels.selective_log_softmax` as one operator."""
    per_token = isinstance(temperature, Tensor)
    number = 1.0 if per_token else float(temperature)
    logps, _ = _selective_log_softmax(
        logits, targets, temperature if per_token else None, number, backend
    )
    return logps.reshape(targets.shape)

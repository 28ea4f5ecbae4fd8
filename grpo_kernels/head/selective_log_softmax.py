"""Log-probs of the targets from logits that the caller already has.

    forward    l = -log(1 + sum_(j != y) e^(z_j - z_y)),  z = logits / T
    backward   dlogits_j = dl * (1[j = y] - p_j) / T

Runs the fused calls' backend functions on the caller's logits, and never makes log_softmax, a
second tensor of their size. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.autograd import eager_under_compile, refuse_double_backward
from ..base.checks import (
    HEAD_DTYPES,
    ValueChecks,
    check_number,
    check_tensor,
    flatten,
    suggests_names,
)
from ..base.layout import Layout, check_target_ids, check_targets
from ..kernels import (
    Backend,
    LogitTransform,
    RowGrads,
    StatGrads,
    TokenStats,
    select_backend,
)


@eager_under_compile
@suggests_names
def selective_log_softmax(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    backend: str = "auto",
) -> Tensor:
    """Computes log-probs of the targets from logits, float32, with a gradient for the logits.

    Equivalent PyTorch:

        (logits.float() / temperature).log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    Args:
        logits: `[B, T, V]` or `[N, V]`, float32, bfloat16 or float16. May hold -inf.
        targets: `[B, T]` or `[N]`, integer ids in [0, V).
        temperature: a number, or one value per token in the shape of `targets`; a constant.
        backend: `"auto"`, `"triton"` or `"torch"`.

    Returns:
        Float32 log-probs in the shape of `targets`.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. No value is
            read from a GPU, where an id outside [0, V) ends in a device-side assertion.
        RuntimeError: on double backward.

    Reference: `grpo_kernels.reference.selective_log_softmax`, in any dtype up to float64.
    """
    flat_targets, transform, kernels = checked(logits, targets, temperature, backend)
    return _SelectiveLogSoftmax.apply(logits, flat_targets, transform, kernels).reshape(
        targets.shape
    )


def checked(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, backend: str
) -> tuple[Tensor, LogitTransform, Backend]:
    """Flat targets, the transform of logits, and the backend; raises for wrong arguments."""
    check_tensor("logits", logits, dtypes=HEAD_DTYPES)
    if logits.ndim not in (2, 3) or logits.shape[-1] < 1:
        raise ValueError(f"logits: expected shape [B, T, V] or [N, V]; got {list(logits.shape)}")
    if logits.device.type == "meta":
        raise ValueError("logits: expected a tensor with values; got one on the meta device")
    kernels = select_backend(backend, logits.device)
    V = logits.shape[-1]
    flat_targets = check_targets(targets, logits.shape[:-1], logits.device, "logits")
    checks = ValueChecks()
    layout = Layout.of("targets", targets, None, checks)
    check_target_ids(flat_targets, None, V, checks)
    temperature = _check_temperature(temperature)
    transform = LogitTransform(temperature=layout.flat_temperature(temperature, None, checks))
    checks.check_without_sync()
    return flat_targets, transform, kernels


def _check_temperature(temperature: object) -> float | Tensor:
    if not isinstance(temperature, Tensor):
        return check_number("temperature", temperature, "> 0")
    if temperature.requires_grad:
        raise ValueError("temperature: expected a constant; got a tensor requiring grad")
    return temperature


def _chunks_of(logits: Tensor) -> list[tuple[slice, Tensor]]:
    """`[B, T, V]` as one chunk of rows or, for a slice such as `[:, :-1]`, as B chunks."""
    V = logits.shape[-1]
    rows = logits.numel() // V
    try:
        return [(slice(0, rows), logits.view(-1, V))]
    except RuntimeError:
        T = logits.shape[1]
        return [(slice(b * T, (b + 1) * T), chunk) for b, chunk in enumerate(logits)]


class _SelectiveLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, transform: LogitTransform, backend: Backend
    ) -> Tensor:
        stats = sweep(logits, targets, transform, backend)
        # A copy, as the caller may change the output in place.
        ctx.save_for_backward(logits, targets, *stats)
        ctx.transform, ctx.backend = transform, backend
        return stats[0].clone()

    @staticmethod
    def backward(ctx: Any, d_logps: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("selective_log_softmax")
        logits, targets, *stats = ctx.saved_tensors
        out = gradient(logits, targets, ctx.transform, ctx.backend, stats, d_logps)
        return out, None, None, None


def sweep(
    logits: Tensor, targets: Tensor, transform: LogitTransform, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Log-probs and logsumexp, float32 `[N]`."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    logps, logsumexp = (logits.new_empty(len(targets), dtype=torch.float32) for _ in range(2))
    with torch.autocast(logits.device.type, enabled=False):
        for rows, chunk in _chunks_of(logits):
            out = TokenStats(logps[rows], logsumexp[rows])
            backend.token_stats(chunk, targets[rows], transform.at(rows), entropy=False, out=out)
    return logps, logsumexp


def gradient(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    backend: Backend,
    stats: Sequence[Tensor],
    d_logps: Tensor,
) -> Tensor:
    """The gradient of logits, in their dtype, from `d_logps` and the result of `sweep`."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    flat_out = out.view(-1, out.shape[-1])
    all_grads = RowGrads.of(TokenStats(*stats), StatGrads(flatten(d_logps).float()))
    with torch.autocast(logits.device.type, enabled=False):
        for rows, chunk in _chunks_of(logits):
            grads = all_grads.at(rows)
            backend.logit_grads_(chunk, targets[rows], transform.at(rows), grads, flat_out[rows])
    return out

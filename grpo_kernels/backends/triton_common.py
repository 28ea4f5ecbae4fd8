"""What several files of Triton kernels share: their launches' arguments, and e^x - 1."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LogitTransform, RowGrads


class Launch(NamedTuple):
    """Elements that a program takes at a time, and its warps."""

    block: int
    num_warps: int


# Row counts, and pointers to one value per row, are not specialized: otherwise each new count and
# each new first row would compile the kernel again, in the middle of training.
per_row = triton.jit(
    do_not_specialize=["N", "rows_per_block"],
    do_not_specialize_on_alignment=[
        f"{name}_ptr"
        for name in ("targets", "temperature", "logps", "logsumexp", "entropy", "total",
                     "at_target", "d_softmax", "d_entropy", "offsets")
    ],
)  # fmt: skip


@triton.jit
def expm1_minus(x):
    """e^x - 1 - x, by its series where the difference would cancel."""
    series = 0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040)))))
    return tl.where(tl.abs(x) < 0.25, x * x * series, tl.exp(x) - 1.0 - x)


@triton.jit
def expm1(x):
    """e^x - 1, without cancellation."""
    return tl.where(tl.abs(x) < 0.25, expm1_minus(x) + x, tl.exp(x) - 1.0)


def device_of(x: Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.xpu.device_of(x) if x.device.type == "xpu" else torch.cuda.device_of(x)


def build(num_warps: int, *, fused: bool = True) -> dict[str, Any]:
    """How a kernel is built: its warps, and whether a product and a sum are one instruction.

    If they are not, the default from Triton 3.10 on, a sweep takes up to a fifth more instructions.
    If they are, a result's last bits depend on what else a variant of the kernel computes.
    """
    return {"num_warps": num_warps, "enable_fp_fusion": fused}


def block_of(launch: Launch, V: int) -> dict[str, Any]:
    """Columns that a program takes at a time, and how its kernel is built.

    No more threads than columns, with warps of 64 as on AMD: a column that several threads hold
    would be read by one of them while another one overwrites it.
    """
    block_v = min(launch.block, max(128, triton.next_power_of_2(V)))
    return {"BLOCK_V": block_v, **build(min(launch.num_warps, block_v // 64))}


def temperature_pointer(transform: LogitTransform, unused: Tensor) -> Tensor:
    """The temperatures of the rows; `unused` where there is one for all."""
    return transform.temperature if isinstance(transform.temperature, Tensor) else unused


def transform_scalars(transform: LogitTransform) -> tuple[float, float, float]:
    """Scale, softcap and temperature, in the kernels' order."""
    temperature = transform.temperature
    return (
        float(transform.logit_scale),
        float(transform.softcap or 1.0),
        1.0 if isinstance(temperature, Tensor) else float(temperature),
    )


def transform_flags(transform: LogitTransform) -> dict[str, bool]:
    """The flags that kernels are compiled with for a transform."""
    return {
        "HAS_SOFTCAP": transform.softcap is not None,
        "HAS_TEMPERATURE": isinstance(transform.temperature, Tensor),
    }


def gradient_pointers(grads: RowGrads, unused: Tensor) -> tuple[Tensor, ...]:
    """Per-row pointers in the kernels' order; the entropy's only where it has a gradient."""
    entropies = (grads.entropy, grads.d_entropy) if grads.d_entropy is not None else (None, None)
    per_row = (grads.logsumexp, grads.d_softmax, grads.at_target, *entropies)
    return tuple(unused if x is None else x for x in per_row)

"""Helpers of several files of Triton kernels: arguments of launches, e^x - 1, log-sigmoid."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Launch(NamedTuple):
    """Elements that a program takes at a time, and its warps."""

    block: int
    num_warps: int


# Functions, as each launch checks a kernel's global constants for changes: 3 us per constant.


@triton.constexpr_function
def log2_e():
    """Factor by which e^x is 2^(x log2_e)."""
    return 1.4426950408889634


@triton.constexpr_function
def ln_2():
    """A logarithm to base 2 times this is a natural one."""
    return 0.6931471805599453


@triton.constexpr_function
def reach():
    """The largest logit minus anchor, to base 2: e^60, summed over V, is far from overflow."""
    return 60.0 * 1.4426950408889634


@triton.jit
def expm1_minus(x):
    """e^x - 1 - x, by its series where the difference would cancel."""
    series = 0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040)))))
    return tl.where(tl.abs(x) < 0.25, x * x * series, tl.exp(x) - 1.0 - x)


@triton.jit
def expm1(x):
    """e^x - 1, without cancellation."""
    return tl.where(tl.abs(x) < 0.25, expm1_minus(x) + x, tl.exp(x) - 1.0)


@triton.jit
def log_sigmoid(x):
    """-log(1 + e^-x), exact to rounding also where it is small."""
    t = tl.exp(-tl.abs(x))
    # log(1 + t) = 2 artanh(t / (2 + t)): near 1 the hardware's logarithm has no digits.
    s = t / (2.0 + t)
    y = s * s
    series = 1 / 3 + y * (1 / 5 + y * (1 / 7 + y * (1 / 9 + y * (1 / 11 + y * (1 / 13)))))
    return tl.minimum(x, 0.0) - 2.0 * (s + s * y * series)


def device_of(x: Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.xpu.device_of(x) if x.device.type == "xpu" else torch.cuda.device_of(x)


def at_most(registers: int, like: Tensor) -> dict[str, int]:
    """Options that limit a kernel's registers on NVIDIA GPUs, so that more programs fit."""
    other = like.device.type == "xpu" or torch.version.hip is not None
    return {} if other else {"maxnreg": registers}


def build(num_warps: int, *, fused: bool = True) -> dict[str, Any]:
    """Options that build a kernel: its warps, and whether a product and a sum are one instruction.

    Not `fused`, the default from Triton 3.10 on, a sweep takes up to a fifth more instructions.
    Fused, a result's last bits depend on the other results of a variant of the kernel.
    """
    return {"num_warps": num_warps, "enable_fp_fusion": fused}

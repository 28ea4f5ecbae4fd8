"""The product of small matrices that a warp holds in its registers: `mma.sync` of sm_80.

Which thread has which element is the manual's (PTX ISA 8.7, "Matrix Fragments for mma.m16n8k16 with
floating point type"). With `g, t = lane // 4, lane % 4` and the halves `2 t` and `2 t + 1` in one
register, the low half first:

- A `[16, 16]`: rows `g` and `g + 8` in registers 0 and 1; columns from 8 on in registers 2 and 3
- B `[16, 8]`: column `g`; rows `2 t, 2 t + 1` in register 0, from 8 on in register 1
- C and D `[16, 8]`: row `g` in registers 0 and 1, row `g + 8` in 2 and 3; columns `2 t, 2 t + 1`

The manual leaves the order and the precision of the sum open. Products of halves are exact. Here
the 16 products and C are added in float64, by rising k and C last, and rounded once to the nearest
float32. With `error` they are added in a way like that which tests of GPUs found (Fasi et al. 2021,
"Numerical behavior of NVIDIA tensor cores"): eight products at a time, each addend cut towards 0
where the largest has its 25th bit, and the sum cut to float32. How many bits and products is
assumed. Subnormal numbers count; NaN has one pattern of bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .operations import bf16_to_float

# Registers per thread of A, B, and C or D.
REGISTERS = {"A": 4, "B": 2, "C": 4}
MMA = {f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32": kind for kind in ("bf16", "f16")}
_K, _AT_ONCE = 16, 8
_NAN = np.array([0x7FFFFFFF], np.uint32).view(np.float32)


def _halves(registers: np.ndarray, kind: str) -> np.ndarray:
    """The two numbers in each register, in a last axis of their own."""
    pairs = np.ascontiguousarray(registers).view(np.uint16).reshape(*registers.shape, 2)
    wide = bf16_to_float(pairs) if kind == "bf16" else pairs.view(np.float16)
    return wide.astype(np.float64)


def matrices_of_a(registers: np.ndarray, kind: str) -> np.ndarray:
    """A `[warps, 16, 16]`, from registers `[warps, 32, 4]`."""
    x = _halves(registers, kind).reshape(-1, 8, 4, 2, 2, 2)  # g, t, half of k, half of m, pair
    return x.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16)


def matrices_of_b(registers: np.ndarray, kind: str) -> np.ndarray:
    """B `[warps, 16, 8]`, from registers `[warps, 32, 2]`."""
    x = _halves(registers, kind).reshape(-1, 8, 4, 2, 2)  # g, t, half of k, pair
    return x.transpose(0, 3, 2, 4, 1).reshape(-1, 16, 8)


def matrices_of_c(registers: np.ndarray) -> np.ndarray:
    """C or D `[warps, 16, 8]`, from registers `[warps, 32, 4]` of float32."""
    x = registers.reshape(-1, 8, 4, 2, 2)  # g, t, half of m, pair
    return x.transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)


def registers_of_d(d: np.ndarray) -> np.ndarray:
    """Registers `[warps, 32, 4]`, from D `[warps, 16, 8]`."""
    x = d.reshape(-1, 2, 8, 4, 2)  # half of m, g, t, pair
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1, 4)).reshape(-1, 32, 4)


def product(a: np.ndarray, b: np.ndarray, c: np.ndarray, error: float = 0.0) -> np.ndarray:
    """`a @ b + c` in float32, of `[warps, 16, 16]`, `[warps, 16, 8]` and `[warps, 16, 8]`."""
    if not error:
        # Every element is summed in the same order, whatever its row or warp; a BLAS would vary it.
        total = np.zeros(c.shape, np.float64)
        for k in range(_K):
            total += a[:, :, k, None] * b[:, None, k, :]
        result = (total + c).astype(np.float32)
    else:
        result = c
        for k in range(0, _K, _AT_ONCE):
            left, right = a[:, :, k : k + _AT_ONCE, None], b[:, None, k : k + _AT_ONCE, :]
            result = _cut_sum(np.concatenate([left * right, result[:, :, None, :]], 2))
    return np.where(np.isnan(result), _NAN, result)


def _cut_sum(addends: np.ndarray) -> np.ndarray:
    """Sums over axis 2 in float32, cutting bits that are far below the largest addend's."""
    plain = addends.astype(np.float64).sum(2)
    largest = np.abs(addends).max(2)
    _, exponent = np.frexp(np.where(np.isfinite(largest), largest, 1.0))
    unit = np.ldexp(1.0, np.maximum(exponent - 25, -149))
    total = (np.trunc(addends / unit[:, :, None]) * unit[:, :, None]).sum(2)
    near = total.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(total)
    near = np.where(beyond, np.nextafter(near, np.float32(0)), near)
    return np.where(np.isfinite(plain), near, plain.astype(np.float32))


Multiply = Callable[[list[np.ndarray], list[np.ndarray], list[np.ndarray]], list[np.ndarray]]


def multiply(opcode: str, error: float) -> Multiply:
    """A function of the registers of A, B and C, each an array over threads, to those of D."""
    kind = MMA[opcode]

    def run(
        a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]
    ) -> list[np.ndarray]:  # fmt: skip
        # [warps, 32, registers]
        left, right, start = (np.stack(x, 1).reshape(-1, 32, len(x)) for x in (a, b, c))
        made = product(
            matrices_of_a(left, kind), matrices_of_b(right, kind),
            matrices_of_c(start.view(np.float32)), error,
        )  # fmt: skip
        columns = registers_of_d(made).view(np.uint32).reshape(-1, REGISTERS["C"])
        return [np.ascontiguousarray(column) for column in columns.T]

    return run

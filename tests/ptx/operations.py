"""Arithmetic instructions on numpy arrays with one element per thread.

`FORMS` is all that is understood; anything else is refused by name. Floating point is as IEEE 754
has it, subnormal numbers included but for `.ftz`; a product and a sum that PTX leaves apart are
rounded apart, although `ptxas` may fuse them. Approximations are rounded correctly, or are off by
as much as the manual allows (PTX ISA 8.7, "Floating Point Instructions").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# Modifiers and types per family of instructions.
FORMS = {
    "abs": "f16 f32 ftz.f32 f64 s32 s64",
    "add": "s16 s32 s64 u32 u64 f32 rn.f32 f64 f32x2 rn.f32x2 rn.f32.bf16 rn.f32.f16",
    "and": "b16 b32 b64 pred",
    "bfe": "s32 s64 u32 u64",
    "cvt": "f32.bf16 f32.f16 rn.f32.f64 f64.f32 rn.f32.s32 rn.f32.u32 rn.f32.s64 rn.f32.u64 "
    "rn.f32.s16 rn.f32.s8 rn.f32.u16 rn.f32.u8 rn.f64.s32 rn.f64.s64 rn.f16.f32 "
    "rn.bf16.f32 rn.f16x2.f32 rn.bf16x2.f32 rzi.s32.f32 rzi.s64.f32 rzi.u32.f32 "
    "rzi.ftz.s32.f32 rni.s32.f32 rzi.f32.f32 rmi.f32.f32 rpi.f32.f32 rni.f32.f32 "
    "rmi.ftz.f32.f32 rpi.ftz.f32.f32 s16.s32 s32.s8 s32.s16 s64.s32 s64.s16 s64.s8 u16.u8 "
    "u16.u32 u16.u64 u32.u8 u32.u16 u32.u64 u64.u8 u64.u16 u64.u32 u8.u32 s16.s8",
    "div": "full.f32 full.ftz.f32 approx.f32 approx.ftz.f32 rn.f32 rn.f64 s32 s64 u32 u64",
    "ex2": "approx.f32 approx.ftz.f32",
    "fma": "rn.f32 rn.ftz.f32 rn.f64 rn.f32x2 rn.f32.bf16 rn.f32.f16",
    "lg2": "approx.f32 approx.ftz.f32",
    "mad": "lo.s32 lo.u32 lo.s64 lo.u64 wide.s16 wide.u16 wide.s32 wide.u32 hi.s32 hi.u32",
    "max": "s16 s32 s64 u16 u32 u64 f32 NaN.f32 f64",
    "min": "s16 s32 s64 u16 u32 u64 f32 NaN.f32 f64",
    "mov": "b16 b32 b64 f32 f64 pred u16 u32 u64 s32 s64",
    "mul": "f32 rn.f32 f64 rn.f64 f32x2 rn.f32x2 lo.s16 lo.s32 lo.u32 lo.s64 lo.u64 hi.s32 "
    "hi.u32 hi.s64 hi.u64 wide.s16 wide.u16 wide.s32 wide.u32",
    "neg": "f32 f64 s32 s64",
    "not": "b16 b32 b64 pred",
    "or": "b16 b32 b64 pred",
    "prmt": "b32",
    "rcp": "approx.f32 approx.ftz.f32 rn.f32 rn.f64",
    "rem": "s32 s64 u32 u64",
    "rsqrt": "approx.f32 approx.ftz.f32",
    "selp": "b16 b32 b64 f32 f64",
    "shl": "b16 b32 b64",
    "shr": "b32 s16 s32 s64 u16 u32 u64",
    "sqrt": "approx.f32 approx.ftz.f32 rn.f32 rn.f64",
    "sub": "s16 s32 s64 u32 u64 f32 rn.f32 f64 f32x2 rn.f32x2 rn.f32.bf16 rn.f32.f16",
    "tanh": "approx.f32",
    "xor": "b16 b32 b64 pred",
}
OPCODES = {f"{base}.{form}" for base, forms in FORMS.items() for form in forms.split()}
_ORDERED = "eq ne lt le gt ge"
COMPARISONS = {
    f"setp.{name}.{kind}"
    for names, kinds in (
        (_ORDERED, "s16 s32 s64 u16 u32 u64 f32 f64 f16 bf16"),
        ("eq ne", "b16 b32 b64"),
        ("equ neu ltu leu gtu geu num nan", "f32 f64"),
    )
    for name in names.split()
    for kind in kinds.split()
}
# Largest errors of approximations, relative: of one ulp 2^-23, of two 2^-22; tanh has 2^-11.
ERRORS = {"div": 2.0**-22, "ex2": 2.0**-22, "lg2": 2.0**-22, "rcp": 2.0**-23, "rsqrt": 2.0**-22.9,
          "sqrt": 2.0**-23, "tanh": 2.0**-11}  # fmt: skip

_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}
_SMALLEST = np.float32(2.0**-126)
Compute = Callable[..., Any]


def bits_of(kind: str) -> int:
    """Bits of a PTX type; of a pair those of both."""
    if kind.endswith("x2"):
        return 2 * bits_of(kind[:-2])
    return int(kind.lstrip("bfsu")) if not kind.startswith("bf") else int(kind[2:])


def dtype_of(kind: str) -> Any:
    """Numpy's type of a PTX type: bf16 and pairs as their bits, predicates as bool."""
    if kind == "pred":
        return np.bool_
    bits = bits_of(kind)
    if kind[0] == "s":
        return _SIGNED[bits]
    return _FLOATS[bits] if kind[0] == "f" and not kind.endswith("x2") else _UNSIGNED[bits]


def unsigned(bits: int) -> Any:
    return _UNSIGNED[bits]


def bf16_to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounds to the nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < _SMALLEST, np.copysign(np.float32(0), x), x)


def _flushing(compute: Compute) -> Compute:
    """The function with subnormal numbers as 0, before and after."""

    def flushed(*xs: np.ndarray) -> np.ndarray:
        result = compute(*map(_flushed, xs))
        return _flushed(result) if result.dtype == np.float32 else result

    return flushed


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """A * b + c, rounded once (but for one in 2^29, which float64 rounds to a tie)."""
    if a.dtype == np.float64:
        return (a.astype(np.longdouble) * b + c).astype(np.float64)
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _through_float64(function: Compute) -> Compute:
    return lambda *xs: function(*[x.astype(np.float64) for x in xs]).astype(xs[0].dtype)


def _shift(a: np.ndarray, by: np.ndarray, *, left: bool) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    near = np.minimum(by, np.uint32(bits - 1)).astype(a.dtype)
    if a.dtype.kind == "i" and not left:
        return a >> near
    return np.where(by < bits, a << near if left else a >> near, a.dtype.type(0))


def _field(a: np.ndarray, at: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`count` bits from bit `at` on; above them zeros, or copies of a signed field's sign."""
    size = 8 * a.dtype.itemsize
    bits, one = a.view(_UNSIGNED[size]), _UNSIGNED[size](1)
    at, count = (x.astype(np.int64) & 255 for x in (at, count))
    there = np.minimum(count, np.maximum(size - at, 0))
    low = np.where(there >= size, ~(one - one),
                    (one << np.minimum(there, size - 1).astype(bits.dtype)) - one)  # fmt: skip
    field = np.where(at < size, bits >> np.minimum(at, size - 1).astype(bits.dtype), 0 * one) & low
    if a.dtype.kind == "i":
        last = np.minimum(np.maximum(at + count - 1, 0), size - 1).astype(bits.dtype)
        field = np.where((bits >> last & one == one) & (count > 0), field | ~low, field)
    return field.astype(bits.dtype).view(a.dtype)


def _permuted(a: np.ndarray, b: np.ndarray, how: np.ndarray) -> np.ndarray:
    """Four of the eight bytes of both; with bit 3 of a place copies of the byte's sign."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    out = np.zeros(1, np.uint32)
    for k in range(4):
        place = how >> np.uint32(4 * k)
        byte = both >> (place & np.uint32(7)).astype(np.uint64) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte > 127, np.uint64(255), np.uint64(0))
        byte = np.where(place & np.uint32(8), sign, byte)
        out = out | byte.astype(np.uint32) << np.uint32(8 * k)
    return out


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded towards 0; of no use where b is 0."""
    b = np.where(b == 0, b.dtype.type(1), b)
    down = a // b
    return down + ((a - down * b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


def _high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    if bits == 64:  # numbers of Python, which have any number of bits
        return (a.astype(object) * b.astype(object) >> 64).astype(a.dtype)
    wide = (_SIGNED if a.dtype.kind == "i" else _UNSIGNED)[2 * bits]
    return (a.astype(wide) * b.astype(wide) >> wide(bits)).astype(a.dtype)


_PLAIN: dict[str, Compute] = {
    "abs": np.abs, "add": np.add, "and": np.bitwise_and, "bfe": _field,
    "ex2": _through_float64(np.exp2), "fma": _fused,
    "lg2": _through_float64(np.log2), "mov": lambda a: a, "neg": np.negative, "not": np.invert,
    "or": np.bitwise_or, "prmt": _permuted, "rcp": lambda a: 1 / a,
    "rem": lambda a, b: a - _quotient(a, b) * b,
    "rsqrt": _through_float64(lambda a: 1 / np.sqrt(a)), "selp": lambda a, b, p: np.where(p, a, b),
    "shl": functools.partial(_shift, left=True), "shr": functools.partial(_shift, left=False),
    "sqrt": np.sqrt, "sub": np.subtract, "tanh": _through_float64(np.tanh), "xor": np.bitwise_xor,
}  # fmt: skip
_ONE = "abs cvt ex2 lg2 mov neg not rcp rsqrt sqrt tanh"
_COUNTS = dict.fromkeys(_ONE.split(), 1) | dict.fromkeys(("bfe", "fma", "mad", "prmt", "selp"), 3)


class Operation(NamedTuple):
    """The types of an instruction's result and operands, and the function from these to it."""

    result: str
    operands: tuple[str, ...]
    compute: Compute
    overflows: bool = False  # whether its result is a number of 32 bits that may be too large


def operation(opcode: str, count: int, error: float = 0.0) -> Operation:
    """Returns the operation of an opcode.

    Args:
        opcode: with all its modifiers.
        count: operands that are read.
        error: share of the largest allowed error that approximations have, with a sign that depends
            on the last operand; 0: rounded correctly.

    Raises:
        NotImplementedError: for unknown opcodes.
    """
    base, *mods = opcode.replace(".ftz", "").split(".")
    counts = (2, 3) if base in ("min", "max") else (_COUNTS.get(base, 2),)
    if base == "cvt" and mods[-2].endswith("x2"):
        counts = (2,)
    if opcode not in OPCODES or count not in counts:
        raise NotImplementedError(f"{opcode} of {count} operands")
    kind = mods[-1]
    if base == "cvt":
        compute = _conversion(mods)
        flushes = ".ftz" in opcode
        return Operation(mods[-2], (kind,) * count, _flushing(compute) if flushes else compute)
    operands = [kind] * count
    if mods[-2:-1] == ["f32"]:  # A sum in float32, of halves.
        operands = [kind] * (count - 1) + ["f32"]
        raised = bf16_to_float if kind == "bf16" else np.float32
        inner = _PLAIN[base]
        return Operation("f32", tuple(operands), lambda *x: inner(*map(raised, x[:-1]), x[-1]))
    if kind == "f32x2":
        return Operation(kind, tuple(operands), _on_pairs(_compute(base, mods, "f32")))
    result = f"{kind[0]}{2 * bits_of(kind)}" if "wide" in mods else kind
    if base in ("shl", "shr"):
        operands[1] = "u32"
    elif base == "selp":
        operands[2] = "pred"
    elif base == "bfe":
        operands[1:] = ["u32", "u32"]
    elif base == "mad" and "wide" in mods:
        operands[2] = result
    compute = _compute(base, mods, kind)
    if error and {"approx", "full"} & set(mods):
        compute = _off(base, compute, error)
    if ".ftz" in opcode:
        compute = _flushing(compute)
    overflows = kind == "s32" and (base in ("add", "sub") or mods[0] == "lo")
    return Operation(result, tuple(operands), compute, overflows)


def _compute(base: str, mods: list[str], kind: str) -> Compute:
    is_float = kind[0] == "f"
    if base in ("min", "max"):
        pair = {"min": np.minimum, "max": np.maximum}[base]
        if is_float and "NaN" not in mods:
            pair = {"min": np.fmin, "max": np.fmax}[base]
        if is_float:
            pair = _ordering_zeros(pair, base)
        # Two operands, or three on newer GPUs.
        return lambda a, *rest: functools.reduce(pair, rest, a)
    if base == "div":
        return np.divide if is_float else _quotient
    if base not in ("mul", "mad"):
        return _PLAIN[base]
    product: Compute = np.multiply
    if "wide" in mods:
        wide = dtype_of(f"{kind[0]}{2 * bits_of(kind)}")
        product = lambda a, b: a.astype(wide) * b.astype(wide)  # noqa: E731
    elif "hi" in mods:
        product = _high
    return product if base == "mul" else lambda a, b, c: product(a, b) + c


def _ordering_zeros(pair: Compute, base: str) -> Compute:
    """A minimum or maximum to which -0 is less than 0."""

    def ordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        zeros = (a == 0) & (b == 0)
        return np.where(zeros, a + b if base == "max" else -(-a - b), pair(a, b))

    return ordered


def _on_pairs(compute: Compute) -> Compute:
    """A function of floats, of two at a time in registers of 64 bits."""

    def on_pairs(*xs: np.ndarray) -> np.ndarray:
        parts = [np.ascontiguousarray(x).view(np.float32).reshape(-1, 2) for x in xs]
        return np.ascontiguousarray(compute(*parts), np.float32).view(np.uint64).ravel()

    return on_pairs


def _off(base: str, exact: Compute, error: float) -> Compute:
    """Moves results as far off as the bound allows; cases that the manual lists stay exact."""

    def approximate(*xs: np.ndarray) -> np.ndarray:
        x = exact(*xs)
        # Between 1/2 and 2 the bound of a logarithm is absolute.
        size = np.where((abs(x) < 1) & (x != 0), 1, x) if base == "lg2" else x.astype(np.float64)
        sign = xs[-1].view(np.uint32) * np.uint32(2654435761) >> np.uint32(31)
        off = (x + np.where(sign == 1, bound, -bound) * size).astype(x.dtype)
        return np.where(np.isfinite(x) & (xs[0] != 0), off, x)

    bound = error * ERRORS[base]
    return approximate


def _conversion(mods: list[str]) -> Compute:
    rounding = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}
    target, source = mods[-2:]
    rounded = rounding.get(mods[0])
    to = dtype_of(target.removesuffix("x2"))

    def one(x: np.ndarray) -> np.ndarray:
        if source == "bf16":
            x = bf16_to_float(x)
        if target.startswith("bf16"):
            return float_to_bf16(x)
        x = x if rounded is None else rounded(x)
        if x.dtype.kind == "f" and np.dtype(to).kind != "f":
            return _saturated(x, to)
        return x.astype(to)

    def two(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        high, low = (one(x).view(np.uint16).astype(np.uint32) for x in (high, low))
        return high << np.uint32(16) | low

    return two if target.endswith("x2") else one


def _saturated(x: np.ndarray, to: Any) -> np.ndarray:
    """Integral numbers as integers, the nearest there is; NaN as 0."""
    low, high = np.iinfo(to).min, np.iinfo(to).max
    inside = (x >= float(low)) & (x < float(high))
    result = np.where(inside, x, 0).astype(to)
    result = np.where(x < float(low), to(low), result)
    return np.where(x >= float(high), to(high), result)


def comparison(opcode: str) -> tuple[str, Compute]:
    """Returns operand type and function of a `setp`; `NotImplementedError` for others."""
    if opcode not in COMPARISONS:
        raise NotImplementedError(opcode)
    _, name, kind = opcode.split(".")
    compare = _compared(name, kind[0] == "f" or kind == "bf16")
    if kind == "bf16":
        return kind, lambda a, b: compare(bf16_to_float(a), bf16_to_float(b))
    return kind, compare


def _compared(name: str, is_float: bool) -> Compute:
    ordered: dict[str, Compute] = {
        "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
        "ge": np.greater_equal, "num": lambda a, b: (a == a) & (b == b),
        # Not equal is False for a NaN in PTX; numpy says True.
        "ne": (lambda a, b: (a < b) | (a > b)) if is_float else np.not_equal,
        "nan": lambda a, b: (a != a) | (b != b),
    }  # fmt: skip
    if name in ordered:
        return ordered[name]
    plain = ordered[name[:-1]]
    return lambda a, b: plain(a, b) | (a != a) | (b != b)

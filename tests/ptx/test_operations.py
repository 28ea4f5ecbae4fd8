"""Every opcode that is understood, one by one, against numbers of Python; and what is refused."""

import math
import operator
import re
from fractions import Fraction

import numpy as np
import pytest

from tests.ptx.counters import Counts
from tests.ptx.decode import OTHERS
from tests.ptx.machine import Machine
from tests.ptx.operations import (
    COMPARISONS,
    ERRORS,
    OPCODES,
    bf16_to_float,
    bits_of,
    comparison,
    dtype_of,
    operation,
    unsigned,
)
from tests.ptx.parse import parse

N = 128
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
COUNTS = {"fma": 3, "mad": 3, "selp": 3, "bfe": 3, "prmt": 3}
ONE = {"abs", "cvt", "ex2", "lg2", "mov", "neg", "not", "rcp", "rsqrt", "sqrt", "tanh"}
PREFIX = {16: "rs", 32: "r", 64: "rd"}


def register(kind, number):
    return f"%p{number}" if kind == "pred" else f"%{PREFIX[max(16, bits_of(kind))]}{number}"


def executed(opcode, kinds, inputs, result, *, guard="", body=None, error=0.0):
    """The results of an instruction in each of `N` threads, and the machine."""
    lines = ["mov.u32 %r90, %tid.x;", "mov.u32 %r91, %ctaid.x;", "mad.lo.s32 %r92, %r91, 32, %r90;"]
    for k, kind in enumerate(kinds):
        size = 1 if kind == "pred" else bits_of(kind) // 8
        lines += [f"ld.param.b64 %rd8{k}, [p{k}];", f"mad.wide.u32 %rd8{k}, %r92, {size}, %rd8{k};"]
        if kind == "pred":
            lines += [f"ld.global.b8 %rs8{k}, [%rd8{k}];", f"setp.ne.b16 %p{k}, %rs8{k}, 0;"]
        else:
            lines.append(f"ld.global.b{8 * size} {register(kind, k)}, [%rd8{k}];")
    operands = ", ".join(register(kind, k) for k, kind in enumerate(kinds))
    to, size = register(result, 9), 1 if result == "pred" else bits_of(result) // 8
    lines += body or [f"{guard} {opcode} {to}, {operands};"]
    if result == "pred":
        lines += ["selp.b32 %r99, 1, 0, %p9;", "cvt.u16.u32 %rs9, %r99;"]
        to = "%rs9"
    lines += ["ld.param.b64 %rd89, [p9];", f"mad.wide.u32 %rd89, %r92, {size}, %rd89;",
              f"st.global.b{8 * size} [%rd89], {to};", "ret;"]  # fmt: skip
    params = ",\n".join(f"\t.param .u64 p{k}" for k in (*range(len(kinds)), 9))
    text = (f".visible .entry k(\n{params}\n)\n.reqntid 32\n{{\n\t.reg .pred %p<9>;"
            "\n\t.reg .b16 %rs<99>;\n\t.reg .b32 %r<99>;\n\t.reg .b64 %rd<99>;\n\t"
            + "\n\t".join(lines)
            + "\n}\n// -- End function\n")  # fmt: skip
    out = np.zeros(N, np.bool_ if result == "pred" else unsigned(8 * size))
    arguments = {}
    machine = Machine(parse(text), 1024, arguments, (N // 32, 1, 1), error=error, counted=Counts())
    for k, x in enumerate([*inputs, out]):
        region = machine.memory.add(f"x{k}", x.view(np.uint8), 0, x.itemsize)
        arguments[f"p{9 if k == len(inputs) else k}"] = region.base
    machine.run(np.stack([np.arange(N // 32), np.zeros(N // 32, int), np.zeros(N // 32, int)], 1))
    return out.view(dtype_of(result)), machine


def values(kind, seed=0):
    """Drawn numbers of a type, and those at its edges."""
    g = np.random.default_rng(seed)
    if kind == "pred":
        return g.random(N) < 0.5
    bits = bits_of(kind)
    if kind[0] == "f" and not kind.endswith("x2"):
        x = (g.standard_normal(N) * np.exp(g.normal(0, 3, N))).astype(FLOATS[kind])
        special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]
        special += [1e-40, -1e-40, 2.5, 3.5, 1 + 3 * 2**-8]
        x[: 4 * len(special) : 4] = g.permutation(special)
        return x
    if kind in ("bf16", "f32x2"):
        x = values("f32", seed) if kind == "bf16" else np.repeat(values("f32", seed), 2)
        return (x.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else x.view(np.uint64)
    x = g.integers(0, 2**bits, N, dtype=np.uint64, endpoint=False) if bits < 64 else g.integers(
        0, 2**64 - 1, N, dtype=np.uint64)  # fmt: skip
    x[:8] = [0, 1, 2, 3, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 2**bits - 1, 7]
    return g.permutation(x).astype(unsigned(bits)).view(dtype_of(kind))


def as_fraction(x):
    return Fraction(float(x))


def rounded(x, dtype):
    """The nearest number of a type, ties to even; `x` is a Fraction."""
    near = dtype(float(x))
    around = [near, np.nextafter(near, dtype(np.inf)), np.nextafter(near, dtype(-np.inf))]
    around = [c for c in around if np.isfinite(c)]
    if not around or abs(x) > Fraction(float(np.finfo(dtype).max)) * (1 + Fraction(1, 2**30)):
        return near
    mantissa = {2: np.uint16, 4: np.uint32, 8: np.uint64}[near.itemsize]
    return min(around, key=lambda c: (abs(as_fraction(c) - x), int(c.view(mantissa)) & 1))


def wrapped(x, kind):
    bits = bits_of(kind)
    x &= (1 << bits) - 1
    return x - (1 << bits) if kind[0] == "s" and x >> (bits - 1) else x


def exact_float(base, xs):
    """Returns the exact result of a float operation; None where no finite number is rounded."""
    if not all(math.isfinite(x) for x in xs):
        return None
    a, *rest = map(as_fraction, xs)
    if base == "div":
        return None if rest[0] == 0 else a / rest[0]
    return {"add": lambda b: a + b, "sub": lambda b: a - b, "mul": lambda b: a * b,
            "fma": lambda b, c: a * b + c}[base](*rest)  # fmt: skip


def exact_integer(base, mods, kind, xs):
    a, *rest = xs
    b = rest[0] if rest else 0
    bits = bits_of(kind)
    if base in ("mul", "mad"):
        product = (a * b) >> bits if "hi" in mods else a * b
        return product + (rest[1] if base == "mad" else 0)
    if base == "bfe":
        at, count = b & 255, rest[1] & 255
        raw = a & ((1 << bits) - 1)
        sign = raw >> min(at + count - 1, bits - 1) & 1 if kind[0] == "s" and count else 0
        picked = [raw >> (at + i) & 1 if i < count and at + i < bits else sign for i in range(bits)]
        return sum(bit << i for i, bit in enumerate(picked))
    if base == "prmt":
        every = (b << 32 | a).to_bytes(8, "little")
        places = [rest[1] >> 4 * k & 15 for k in range(4)]
        picked = [every[p & 7] if p < 8 else 255 * (every[p & 7] > 127) for p in places]
        return int.from_bytes(bytes(picked), "little")
    if base in ("div", "rem"):
        if b == 0:
            return None
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if base == "div" else a - quotient * b
    return {
        "abs": lambda: abs(a), "add": lambda: a + b, "and": lambda: a & b, "max": lambda: max(xs),
        "min": lambda: min(xs), "mov": lambda: a, "neg": lambda: -a, "not": lambda: ~a,
        "or": lambda: a | b, "shl": lambda: a << min(b, 99), "shr": lambda: a >> min(b, 99),
        "sub": lambda: a - b, "xor": lambda: a ^ b, "selp": lambda: a if rest[1] else b,
    }[base]()  # fmt: skip


def exact(base, x, y=None):
    x = np.longdouble(x)
    return {"ex2": lambda: np.exp2(x), "lg2": lambda: np.log2(x), "rcp": lambda: 1 / x,
            "rsqrt": lambda: 1 / np.sqrt(x), "sqrt": lambda: np.sqrt(x), "tanh": lambda: np.tanh(x),
            "div": lambda: x / np.longdouble(y)}[base]()  # fmt: skip


@pytest.mark.parametrize("opcode", sorted(OPCODES))
def test_arithmetic(opcode):
    base, *mods = opcode.split(".")
    count = COUNTS.get(base, 1 if base in ONE else 2) + (base == "cvt" and "x2." in opcode)
    result, kinds, *_ = operation(opcode, count)
    inputs = [values(kind, seed) for seed, kind in enumerate(kinds)]
    if base in ("shl", "shr", "bfe"):
        inputs[1:] = [np.arange(N, dtype=np.uint32)[::s] % 70 for s in (1, -1)][: count - 1]
    if base == "mad" or (base in ("add", "sub", "mul") and kinds[0] == "s32"):
        inputs[0] = inputs[0] % 30_000  # overflow is a finding
        inputs[1:] = [x % 30_000 for x in inputs[1:]]
    out, machine = executed(opcode, kinds, inputs, result)
    assert not machine.findings or "overflow" in str(machine.findings), machine.findings
    if kinds[-1] == "f32x2":
        out, *inputs = (x.view(np.float32) for x in (out, *inputs))
        kinds, result, mods = ["f32"] * count, "f32", [*mods[:-1], "f32"]
    if "bf16" in kinds:
        inputs = [
            bf16_to_float(x) if k == "bf16" else x for x, k in zip(inputs, kinds, strict=True)
        ]
    for actual, *xs in zip(out, *inputs, strict=True):
        expected = oracle(base, mods, result, kinds, xs)
        if expected is None:
            continue
        same = actual == expected or (actual != actual and expected != expected)
        if base in ("min", "max") and result[0] == "f" and actual == 0:
            same &= bool(np.signbit(actual) == np.signbit(expected))
        if ({"approx", "full"} & set(mods) and base != "div") or (base == "div" and "full" in mods):
            ulp = abs(np.spacing(np.float32(expected)))
            near = np.isfinite(expected) and abs(float(expected)) > 1e-37
            same = abs(float(actual) - float(expected)) <= 1.2 * ulp if near else same
        assert same, (opcode, xs, actual, expected)


def oracle(base, mods, result, kinds, xs):
    """Returns the expected result of an instruction; None where the manual leaves it open."""
    kind, ftz = kinds[-1], "ftz" in mods
    is_float = kinds[0][0] == "f" or kinds[0] == "bf16"
    if ftz:
        xs = [x * 0 if isinstance(x, np.floating) and abs(x) < 2.0**-126 else x for x in xs]
    with np.errstate(all="ignore"):
        if base == "cvt":
            return converted(mods, result, xs)
        if base in ("selp", "mov") or (not is_float and base != "cvt"):
            if kind == "pred" and base not in ("selp", "mov"):
                of = {"and": all, "or": any, "xor": lambda x: x[0] != x[1]}
                return not xs[0] if base == "not" else of[base](xs)
            if base in ("selp", "mov"):
                return xs[0] if base == "mov" or xs[2] else xs[1]
            value = exact_integer(base, mods, kinds[0], [int(x) for x in xs])
            return None if value is None else wrapped(value, result)
        to = FLOATS[result]
        if base in ("abs", "neg"):
            return abs(xs[0]) if base == "abs" else -xs[0]
        if base in ("min", "max"):
            numbers = [x for x in xs if x == x]
            if not numbers or ("NaN" in mods and len(numbers) < len(xs)):
                return to(np.nan)
            # -0 is less than 0.
            return {"min": min, "max": max}[base](numbers, key=lambda x: (x, math.copysign(1, x)))
        if base in ("add", "sub", "mul", "fma") or (base == "div" and "rn" in mods):
            value = exact_float(base, xs)
            if value is not None:
                if ftz and abs(value) < Fraction(2) ** -126:
                    return to(0)
                return rounded(value, to)
            wide = [np.longdouble(x) for x in xs]
            a, b = wide[:2]
            return to({"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b,
                       "div": lambda: a / b, "fma": lambda: a * b + wide[2]}[base]())  # fmt: skip
        value = to(exact(base, *xs))
        return to(0) if ftz and abs(value) < 2.0**-126 else value


def converted(mods, result, xs):
    target, x = mods[-2], xs[0]
    if target.endswith("x2"):
        high, low = (converted([target[:-2], "f32"], target[:-2], [y]) for y in xs)
        return int(high if target[0] == "b" else high.view(np.uint16)) << 16 | int(
            low if target[0] == "b" else low.view(np.uint16))  # fmt: skip
    if target == "bf16":
        if x != x:
            return 0x7FFF
        if not np.isfinite(x):
            return int(x.view(np.uint32)) >> 16
        low, high = (int(x.view(np.uint32)) >> 16) + 0, (int(x.view(np.uint32)) >> 16) + 1
        near = [np.array([c << 16], np.uint32).view(np.float32)[0] for c in (low, high)]
        off = [abs(as_fraction(n) - as_fraction(x)) if np.isfinite(n) else math.inf for n in near]
        return low if off[0] < off[1] or (off[0] == off[1] and low % 2 == 0) else high
    mode = next((m for m in mods if m in ("rni", "rmi", "rpi", "rzi")), None)
    if mode and isinstance(x, np.floating):
        x = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}[mode](x)
    if result in FLOATS:
        return FLOATS[result](x) if isinstance(x, np.floating) else rounded(
            Fraction(int(x)), FLOATS[result])  # fmt: skip
    if isinstance(x, np.floating):
        bounds = np.iinfo(dtype_of(result))
        return 0 if x != x else int(min(max(float(x), bounds.min), bounds.max)) if np.isinf(
            x) else min(max(int(x), bounds.min), bounds.max)  # fmt: skip
    return wrapped(int(x), result)


@pytest.mark.parametrize("opcode", sorted(o for o in OPCODES if re.search("approx|full", o)))
def test_approximations_are_off_by_the_bound(opcode):
    base = opcode.split(".")[0]
    count = 2 if base == "div" else 1
    inputs = [np.linspace(0.51, 1.9, N).astype(np.float32)] * count
    plain, _ = executed(opcode, ["f32"] * count, inputs, "f32")
    off, _ = executed(opcode, ["f32"] * count, inputs, "f32", error=1.0)
    size = 1 if base == "lg2" else np.abs(plain)  # of a logarithm between 1/2 and 2
    error = np.abs(off.astype(float) - plain) / size
    assert 0.3 * ERRORS[base] < error.max() <= ERRORS[base] + 2.0**-23
    assert (off > plain).any() and (off < plain).any()


def test_what_the_manual_lists_is_exact():
    inf = np.float32("inf")
    for opcode, operands, exact in (
        ("ex2.approx.f32", [0, inf, -inf], [1, inf, 0]), ("rcp.approx.f32", [0, inf], [inf, 0]),
        ("lg2.approx.f32", [0, inf], [-inf, inf]), ("rsqrt.approx.f32", [0, inf], [inf, 0]),
    ):  # fmt: skip
        inputs = [np.resize(np.array(operands, np.float32), N)]
        off, _ = executed(opcode, ["f32"], inputs, "f32", error=1.0)
        assert np.array_equal(off, np.resize(np.array(exact, np.float32), N))


@pytest.mark.parametrize("opcode", sorted(COMPARISONS))
def test_comparisons(opcode):
    _, name, kind = opcode.split(".")
    assert comparison(opcode)[0] == kind
    a, b = values(kind, 0), values(kind, 1)
    b[::3] = a[::3]
    out, _ = executed(opcode, [kind] * 2, [a, b], "pred")
    if kind == "bf16":
        a, b = bf16_to_float(a), bf16_to_float(b)
    for actual, x, y in zip(out, a.tolist(), b.tolist(), strict=True):
        unordered = x != x or y != y
        if name in ("num", "nan"):
            expected = unordered == (name == "nan")
        else:
            plain = name.removesuffix("u")
            holds = getattr(operator, plain)(x, y)
            expected = (holds and not unordered) or (unordered and name.endswith("u"))
        assert actual == expected, (opcode, x, y)


LANES = np.tile(np.arange(32), N // 32)


@pytest.mark.parametrize(
    ("mode", "by", "bound", "source"),
    [
        ("bfly", 5, 31, LANES ^ 5),
        ("idx", 3, 31, 0 * LANES + 3),
        ("up", 2, 0, np.where(LANES >= 2, LANES - 2, LANES)),
        ("down", 4, 31, np.where(LANES <= 27, LANES + 4, LANES)),
    ],
)
def test_shuffles(mode, by, bound, source):
    x = values("b32")
    body = [f"shfl.sync.{mode}.b32 %r9|%p3, %r0, {by}, {bound}, -1;"]
    out, _ = executed("", ["b32"], [x], "b32", body=body)
    assert (out == x.reshape(-1, 32)[np.arange(N) // 32, source]).all()


@pytest.mark.parametrize("opcode", sorted(o for o in OTHERS if o.startswith("redux")))
def test_reductions(opcode):
    name, kind = opcode.split(".")[2], opcode.split(".")[-1]
    x = values(kind)
    out, _ = executed("", [kind], [x], kind, body=[f"{opcode} %r9, %r0, -1;"])
    for actual, warp in zip(out.reshape(-1, 32), x.reshape(-1, 32), strict=True):
        numbers = [v for v in warp.tolist() if v == v]
        if name == "add":
            expected = wrapped(sum(numbers), kind)
        elif "NaN" in opcode and len(numbers) < 32:
            expected = math.nan
        else:
            expected = {"min": min, "max": max}[name](numbers)
        assert (actual == expected).all() or (expected != expected and np.isnan(actual).all())


@pytest.mark.parametrize("trans", ("", ".trans"))
@pytest.mark.parametrize("count", (1, 2, 4))
def test_matrices(count, trans):
    """Rows of 16 bytes are stored as threads hold them, and loaded again as a matrix."""
    x = values("b32", 3)
    registers = [f"%r{50 + k}" for k in range(4)]
    body = ["shl.b32 %r60, %r90, 4;", "cvt.u64.u32 %rd60, %r60;"]
    # Thread t writes its number's four words to row t, and gets words of rows 8 k ... of matrix k.
    body += [f"add.s32 {r}, %r0, {k};" for k, r in enumerate(registers)]
    body += [f"st.shared.v4.b32 [%rd60], {{{', '.join(registers)}}};", "bar.sync 0;"]
    sources = ", ".join(registers[:count])
    body += [f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{sources}}}, [%rd60];",
             f"mov.b32 %r9, {registers[count - 1]};"]  # fmt: skip
    out, _ = executed("", ["b32"], [x % 2**31], "b32", body=body)
    for actual, warp in zip(out.reshape(-1, 32), (x % 2**31).reshape(-1, 32), strict=True):
        rows = np.stack([warp + np.uint32(k) for k in range(4)], 1).view(np.uint16)  # [32, 8]
        matrix = rows[8 * (count - 1) : 8 * count]
        matrix = matrix.T if trans else matrix
        expected = np.ascontiguousarray(matrix).view(np.uint32).ravel()
        assert (actual == expected).all()


@pytest.mark.parametrize("count", (1, 2, 4))
def test_stored_matrices(count):
    x = values("b32", 3) % 2**30
    registers = ", ".join(f"%r{50 + k}" for k in range(count))
    body = [f"add.s32 %r{50 + k}, %r0, {k};" for k in range(count)]
    body += ["shl.b32 %r60, %r90, 4;", "cvt.u64.u32 %rd60, %r60;", "shl.b32 %r61, %r90, 2;",
             "cvt.u64.u32 %rd61, %r61;",
             f"stmatrix.sync.aligned.m8n8.x{count}.shared.b16 [%rd60], {{{registers}}};",
             "bar.sync 0;", f"ld.shared.b32 %r9, [%rd61+{128 * (count - 1)}];"]  # fmt: skip
    out, _ = executed("", ["b32"], [x], "b32", body=body)
    assert (out == x + np.uint32(count - 1)).all()


@pytest.mark.parametrize("kind", ("u8", "u16", "s8", "s16", "s32", "b32"))
def test_loads_fill_with_zeros_or_signs(kind):
    x = values(kind)
    out, _ = executed("", [kind], [x], "s64", body=[f"ld.global.{kind} %rd9, [%rd80];"])
    assert (out == x.astype(np.int64)).all()


@pytest.mark.parametrize("space", ("global", "shared", "global.L1::evict_last"))
@pytest.mark.parametrize("width", (2, 4))
def test_vectors(width, space):
    x = values("b64", 4)
    body = ["and.b32 %r60, %r90, 31;", "shl.b32 %r60, %r60, 4;", "cvt.u64.u32 %rd60, %r60;"]
    parts = [f"%r{50 + k}" for k in range(width)]
    if space == "shared":
        body += ["mov.b64 {%r50, %r51}, %rd0;", "mov.b32 %r52, %r51;", "mov.b32 %r53, %r50;"]
        body += [f"st.shared.v{width}.b32 [%rd60], {{{', '.join(parts)}}};", "bar.sync 0;",
                 f"ld.shared.v{width}.b32 {{{', '.join(parts)}}}, [%rd60];"]  # fmt: skip
    else:
        body += [f"and.b64 %rd80, %rd80, {-4 * width};",
                 f"ld.{space}.v{width}.b32 {{{', '.join(parts)}}}, [%rd80];"]  # fmt: skip
    body += [f"mov.b64 %rd9, {{{parts[0]}, {parts[1]}}};"]
    out, machine = executed("", ["b64"], [x], "b64", body=body)
    expected = x if space == "shared" or width == 2 else np.repeat(x[::2], 2)
    assert (out == expected).all() and not machine.findings


def test_guards_leave_the_others_as_they_were():
    a, b, p = values("b32"), values("b32", 1), values("pred")
    body = ["mov.b32 %r9, %r1;", "@%p2 mov.b32 %r9, %r0;"]
    out, _ = executed("", ["b32", "b32", "pred"], [a, b, p], "b32", body=body)
    assert (out == np.where(p, a, b)).all()


def test_threads_part_and_meet():
    p, a = values("pred"), values("b32") % 2**20
    body = ["@%p0 bra $A;", "add.s32 %r9, %r1, 1;", "bra.uni $B;", "$A:", "add.s32 %r9, %r1, 2;",
            "$B:", "shl.b32 %r9, %r9, 1;"]  # fmt: skip
    out, machine = executed("", ["pred", "b32"], [p, a], "b32", body=body)
    assert (out == 2 * (a + np.where(p, 2, 1))).all()
    assert machine.counted.divergent_branches == 4


def test_guarded_threads_leave_or_stop():
    p, a = values("pred"), values("b32")
    body = ["mov.b32 %r9, %r1;", "@%p0 trap;", "mov.b32 %r9, 7;"]
    out, machine = executed("", ["pred", "b32"], [p, a], "b32", body=body)
    assert (out == np.where(p, 0, 7)).all()
    (finding,) = machine.findings.values()
    assert finding.kind == "trap" and finding.count == p.sum()


def test_a_barrier_that_some_threads_do_not_reach_is_reported():
    body = ["@%p0 bra $A;", "bar.sync 0;", "$A:", "mov.b32 %r9, %r1;"]
    _, machine = executed("", ["pred", "b32"], [values("pred"), values("b32")], "b32", body=body)
    assert [finding.kind for finding in machine.findings.values()] == ["divergent barrier"]


WAITS = {"all": "cp.async.wait_all;", "none left": "cp.async.wait_group 0;",
         "one left": "cp.async.wait_group 1;", "no wait": "mov.b32 %r70, 0;"}  # fmt: skip


@pytest.mark.parametrize("wait", WAITS)
def test_copies_are_there_when_they_were_waited_for(wait):
    """Two groups of copies, the second of them of threads with an even number, of 0 or 4 bytes."""
    x = values("b32")
    body = ["shl.b32 %r60, %r90, 3;", "cvt.u64.u32 %rd60, %r60;", "and.b32 %r61, %r90, 1;",
            "setp.eq.s32 %p0, %r61, 0;", "and.b32 %r62, %r90, 4;",
            "cp.async.ca.shared.global [%rd60], [%rd80], 0x4, 0x4;", "cp.async.commit_group;",
            "@%p0 cp.async.ca.shared.global [%rd60+4], [%rd80], 0x4, %r62;",
            "cp.async.commit_group;", WAITS[wait], "ld.shared.b32 %r63, [%rd60];",
            "@%p0 ld.shared.b32 %r64, [%rd60+4];", "@!%p0 mov.b32 %r64, 0;",
            "add.u32 %r9, %r63, %r64;"]  # fmt: skip
    out, machine = executed("", ["b32"], [x], "b32", body=body)
    findings = {finding.kind: finding.count for finding in machine.findings.values()}
    if wait in ("one left", "no wait"):
        assert findings["read of a copy that was not waited for"] == N // 2
    else:
        lane = np.arange(N) % 32
        assert not findings and np.array_equal(out, x + x * ((lane % 2 == 0) & (lane & 4 > 0)))


def test_an_overflow_is_reported():
    a = values("s32")
    _, machine = executed("mul.lo.s32", ["s32", "s32"], [a, a], "s32")
    (finding,) = machine.findings.values()
    assert finding.kind == "overflow of int32" and finding.count > N // 2


@pytest.mark.parametrize(
    "line",
    ("vadd.u32 %r9, %r0, %r0;", "add.sat.s32 %r9, %r0, %r0;", "add.s32 %r9, %r0;", "bar.sync 1;",
     "atom.global.add.f32 %r9, [%rd80], %r0;", "ld.global.v2.b32 %r9, [%rd80];",
     "mma.sync.aligned.m16n8k8.row.col.f32 %r9, %r0, %r0;", "mov.b32 %q9, %r0;",
     "@%p0 bar.sync 0;"),
)  # fmt: skip
def test_what_is_not_known_is_refused(line):
    with pytest.raises(NotImplementedError, match=r"add|bar|atom|v2|mma|%q9"):
        executed("", ["b32"], [values("b32")], "b32", body=[line])

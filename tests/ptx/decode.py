"""Translates instructions of PTX to Python functions of a `Machine`, on arrays of threads.

Arithmetic is looked up in `operations`; here are operands, memory, what moves between the threads
of a warp, barriers and branches. Unknown opcodes are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .operations import COMPARISONS, OPCODES, bits_of, comparison, dtype_of, operation, unsigned
from .parse import Instruction, Program
from .tensor_cores import MMA, REGISTERS, multiply

if TYPE_CHECKING:
    from .machine import Machine

END = 1 << 30  # where threads are that have returned
# Supported opcodes other than arithmetic; those of `ld` and `st` are patterns.
_WIDTHS = "b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64"
_CACHED = r"(\.(ca|cg|cs|wt|wb|nc|L1::evict_(first|last|normal|unchanged)|L1::no_allocate))*"
MEMORY = re.compile(rf"(ld|st)\.(global{_CACHED}|shared(::cta)?)(\.v[248])?\.({_WIDTHS})")
PARAMETER = re.compile(rf"(ld|st)\.param\.({_WIDTHS})")
OTHERS = {
    *(f"shfl.sync.{mode}.b32" for mode in ("bfly", "idx", "up", "down")),
    *(f"redux.sync.{name}.{kind}" for name in ("min", "max", "add") for kind in ("s32", "u32")),
    *(f"redux.sync.{name}.f32" for name in ("min", "max", "min.NaN", "max.NaN")),
    *(f"ldmatrix.sync.aligned.m8n8.{x}.shared.b16" for x in ("x1", "x2", "x4", "x1.trans",
                                                             "x2.trans", "x4.trans")),
    *(f"stmatrix.sync.aligned.m8n8.{x}.shared.b16" for x in ("x1", "x2", "x4")),
    *(f"cp.async.{x}" for x in ("ca.shared.global", "cg.shared.global", "commit_group",
                                "wait_group", "wait_all")),
    *MMA,
    "bar.sync", "barrier.sync", "bar.warp.sync", "bra", "bra.uni", "ret", "exit", "trap",
    "call.uni", "call", "cvta.global.u64", "cvta.to.global.u64",
}  # fmt: skip
# A guard may leave no thread of a warp out of these.
_WHOLE_WARP = ("bar", "barrier", "redux", "ldmatrix", "stmatrix", "mma")
_U64 = np.uint64
_SPECIAL = re.compile(r"%(n?tid|n?ctaid)\.[xyz]|%laneid")

Read = Callable[["Machine"], np.ndarray]
Write = Callable[["Machine", np.ndarray, Any], None]
Mask = Callable[["Machine"], Any]
Step = Callable[["Machine"], Any]


def is_known(opcode: str) -> bool:
    patterns = (MEMORY, PARAMETER)
    known = opcode in OPCODES or opcode in COMPARISONS or opcode in OTHERS
    return known or any(p.fullmatch(opcode) for p in patterns)


class Decoder:
    """Makes a function of each instruction: it returns None, or where to jump and which threads.

    Args:
        error: see `operations.operation`.
    """

    def __init__(self, program: Program, error: float = 0.0) -> None:
        self.program, self.error = program, error
        self.code = [self._decode(i) for i in program.instructions]
        # Shared memory is looked at in the smallest pieces that the kernel moves.
        ops = [i.op for i in program.instructions if ".shared" in i.op]
        widths = [
            4 if "matrix" in op or op[:2] == "cp" else bits_of(op.split(".")[-1]) // 8 for op in ops
        ]
        self.shared_unit = min(widths, default=4)

    # Operands

    def _read(self, text: str, kind: str) -> Read:
        """A function that reads an operand as an array of a type."""
        to = dtype_of(kind)
        if _SPECIAL.fullmatch(text):
            return lambda m: m.special[text].view(to) if to == np.int32 else m.special[text]
        if text.startswith("%"):
            self._prefix(text)
            size = np.dtype(to).itemsize

            def read(m: Machine) -> np.ndarray:
                x = m.registers.get(text)
                if x is None:
                    x = m.junk(text)
                if x.dtype == to:
                    return x
                if x.itemsize == size:
                    return x.view(to)
                return x.astype(unsigned(8 * size)).view(to)

            return read
        value = self._constant(text, to)
        return lambda m: value

    def _constant(self, text: str, to: Any) -> np.ndarray:
        if text in self.program.symbols:
            return np.zeros(1, to)
        if to == np.bool_:
            return np.array([int(text, 0) != 0])
        bits = 8 * np.dtype(to).itemsize
        if text[:2].lower() in ("0f", "0d"):
            held = {"f": 32, "d": 64}[text[1].lower()]
            return np.array([int(text[2:], 16)], unsigned(held)).view(to)
        number = int(text.rstrip("U"), 0)
        return np.array([number & ((1 << bits) - 1)], unsigned(bits)).view(to)

    def _prefix(self, register: str) -> str:
        prefix = re.match(r"%[a-zA-Z_]+", register)
        if prefix is None or prefix[0] not in self.program.registers:
            raise NotImplementedError(f"register {register}")
        return prefix[0]

    def _write(self, text: str, kind: str) -> Write:
        """A function that writes an operand where the mask is set, with zeros or signs to fill."""
        register = self.program.registers[self._prefix(text)]
        to = np.bool_ if register == "pred" else unsigned(bits_of(register))
        size = np.dtype(to).itemsize

        def write(m: Machine, value: np.ndarray, mask: np.ndarray | None) -> None:
            if value.dtype != to:
                if value.itemsize != size:
                    is_signed = value.dtype.kind == "i"
                    value = value.astype(dtype_of(f"s{8 * size}") if is_signed else to)
                value = value.view(to)
            if mask is not None:
                old = m.registers.get(text)
                value = np.where(mask, value, m.junk(text) if old is None else old)
            m.registers[text] = value

        return write

    def _mask(self, i: Instruction) -> Mask:
        """A function that returns which threads execute the instruction, None for all."""
        if i.guard is None:
            return lambda m: m.mask
        guard, negated = self._read(i.guard, "pred"), i.negated

        def mask(m: Machine) -> np.ndarray | None:
            on = guard(m)
            on = ~on if negated else on
            if m.mask is not None:
                return on & m.mask
            if len(on) == 1:
                return None if on[0] else np.zeros(len(m.lanes), bool)
            return None if on.all() else on

        return mask

    # Instructions

    def _decode(self, i: Instruction) -> Step:
        base, *mods = i.op.split(".")
        if not is_known(i.op) or (i.guard and base in _WHOLE_WARP):
            raise NotImplementedError(f"{i.op}, in {i} at {i.place}")
        if base == "mov" and any(text.startswith("{") for text in i.operands):
            return self._packed(i, mods[-1])
        if i.op in OPCODES:
            return self._arithmetic(i)
        return getattr(self, f"_{base}")(i, mods)

    def _arithmetic(self, i: Instruction) -> Step:
        to, *sources = i.operands
        result, kinds, compute, overflows = operation(i.op, len(sources), self.error)
        readers = [self._read(s, k) for s, k in zip(sources, kinds, strict=True)]
        write, mask = self._write(to, result), self._mask(i)
        if overflows:

            def checked(m: Machine) -> None:
                values, on = [read(m) for read in readers], mask(m)
                x = compute(*values)
                lost = compute(*[v.astype(np.int64) for v in values]) != x
                if lost.any():
                    operands = np.broadcast_arrays(m.lanes, *values)[1:]
                    lost = np.broadcast_to(lost, m.lanes.shape) & (True if on is None else on)
                    of = [str(operand[lost][:1]) for operand in operands]
                    m.fault("overflow of int32", i, lost, " and ".join(of))
                write(m, x, on)

            return checked

        def run(m: Machine) -> None:
            write(m, compute(*[read(m) for read in readers]), mask(m))

        return run

    def _packed(self, i: Instruction, kind: str) -> Step:
        """Mov between a register and the parts of it; a part may be `_`, for no one."""
        mask, (to, source) = self._mask(i), i.operands
        unpacks = to.startswith("{")
        parts = [p.strip() for p in (to if unpacks else source).strip("{} ").split(",")]
        bits, whole_type = bits_of(kind) // len(parts), unsigned(bits_of(kind))
        half = f"b{bits}"
        if unpacks:
            read = self._read(source, kind)
            writers = {k: self._write(p, half) for k, p in enumerate(parts) if p != "_"}

            def unpack(m: Machine) -> None:
                value, on = read(m), mask(m)
                for k, write in writers.items():
                    write(m, (value >> whole_type(k * bits)).astype(unsigned(bits)), on)

            return unpack
        readers, write = [self._read(p, half) for p in parts], self._write(to, kind)

        def pack(m: Machine) -> None:
            whole = whole_type(0)
            for k, read_part in enumerate(readers):
                whole = whole | read_part(m).astype(whole_type) << whole_type(k * bits)
            write(m, whole, mask(m))

        return pack

    def _setp(self, i: Instruction, mods: list[str]) -> Step:
        kind, compare = comparison(i.op)
        to, *sources = i.operands
        write, mask = self._write(to, "pred"), self._mask(i)
        a, b = (self._read(o, kind) for o in sources)
        return lambda m: write(m, compare(a(m), b(m)), mask(m))

    # Memory

    def _ld(self, i: Instruction, mods: list[str]) -> Step:
        mask, (to, source) = self._mask(i), i.operands
        kind = mods[-1]
        bits = bits_of(kind)
        if mods[0] == "param":
            name, write = source.strip("[]"), self._write(to, kind)

            def parameter(m: Machine) -> None:
                held = m.arguments[name] & ((1 << bits) - 1)
                write(m, np.array([held], unsigned(bits)).view(dtype_of(kind)), mask(m))

            return parameter
        kind = kind if kind[0] == "s" else f"b{bits}"
        registers = re.findall(r"%\w+", to)
        if len(registers) != _vector(mods):
            raise NotImplementedError(str(i))
        writers, address = [self._write(r, kind) for r in registers], self._address(source)
        is_shared, as_signed = "shared" in mods[0], dtype_of(kind)

        def load(m: Machine) -> None:
            on = mask(m)
            lanes = m.lanes if on is None else np.flatnonzero(on)
            values = m.access(i, address(m), lanes, bits // 8, len(writers), None, is_shared)
            if on is not None and i.undefined:
                # The others' registers are whatever they are.
                for register, write in zip(registers, writers, strict=True):
                    write(m, m.junk(register).astype(unsigned(bits)), m.mask)
            for k, write in enumerate(writers):
                write(m, m.spread(values[:, k].view(as_signed), lanes), on)

        return load

    def _st(self, i: Instruction, mods: list[str]) -> Step:
        if mods[0] == "param":  # of an assertion's message
            return lambda m: None
        mask, (to, source) = self._mask(i), i.operands
        bits = bits_of(mods[-1])
        texts = [text.strip() for text in source.strip("{} ").split(",")]
        if len(texts) != _vector(mods):
            raise NotImplementedError(str(i))
        readers = [self._read(text, f"b{bits}") for text in texts]
        address, is_shared = self._address(to), "shared" in mods[0]

        def store(m: Machine) -> None:
            on = mask(m)
            lanes = m.lanes if on is None else np.flatnonzero(on)
            columns = [np.broadcast_to(read(m), m.lanes.shape)[lanes] for read in readers]
            m.access(i, address(m), lanes, bits // 8, len(readers), np.stack(columns, 1), is_shared)

        return store

    def _address(self, text: str) -> Read:
        match = re.fullmatch(r"\[\s*([\w$%.]+)\s*(?:([+-])\s*(-?\d+))?\s*\]", text)
        if match is None:
            raise NotImplementedError(f"address {text}")
        base = self._read(match[1], "b64")
        offset = int(match[3] or 0) * (-1 if match[2] == "-" else 1)
        shift = np.uint64(offset & ((1 << 64) - 1))
        return lambda m: base(m) + shift

    def _cvta(self, i: Instruction, mods: list[str]) -> Step:
        write, read = self._write(i.operands[0], "b64"), self._read(i.operands[1], "b64")
        mask = self._mask(i)
        return lambda m: write(m, read(m), mask(m))

    def _cp(self, i: Instruction, mods: list[str]) -> Step:
        """Copies to shared memory, see `copies`."""
        mask = self._mask(i)
        if mods[1] == "commit_group":
            return lambda m: m.copies.commit(mask(m))
        if mods[1].startswith("wait"):
            pending = int(i.operands[0], 0) if i.operands else -1
            return lambda m: m.copies.wait(pending, mask(m))
        target, source = (self._address(text) for text in i.operands[:2])
        size = self._read(i.operands[-1], "b32")  # of the source; zeros for the rest
        written = int(i.operands[2], 0)
        if written not in ((16,) if mods[1] == "cg" else (4, 8, 16)) or len(i.operands) > 4:
            raise NotImplementedError(str(i))

        def copy(m: Machine) -> None:
            on = mask(m)
            lanes = m.lanes if on is None else np.flatnonzero(on)
            sizes, to = (np.broadcast_to(read(m), m.lanes.shape) for read in (size, target))
            m.copies.begin(i, to, source(m), sizes[lanes], written // 4, lanes)

        return copy

    # Between the threads of a warp

    def _shfl(self, i: Instruction, mods: list[str]) -> Step:
        to, *sources = i.operands
        names = to.split("|")
        write = self._write(names[0], "b32")
        inside = self._write(names[1], "pred") if len(names) > 1 else None
        a, b, c = (self._read(s, "b32") for s in sources[:3])
        mode, mask = mods[1], self._mask(i)

        def shuffle(m: Machine) -> None:
            shape, on = m.lanes.shape, mask(m)
            value, by, bound = (np.broadcast_to(r(m), shape).astype(np.int64) for r in (a, b, c))
            lane = m.lanes & 31
            segment, clamp = bound >> 8 & 31, bound & 31
            most, least = (lane & segment) | (clamp & ~segment), lane & segment
            source = {"bfly": lane ^ by, "up": lane - by, "down": lane + by,
                      "idx": least | (by & ~segment & 31)}[mode]  # fmt: skip
            good = source >= most if mode == "up" else source <= most
            source = np.where(good, source, lane) + (m.lanes & ~31)
            if on is not None and not on[source[on]].all():
                m.fault("shuffle from an inactive thread", i, on, "a thread that is not there")
            write(m, value[source].astype(np.uint32), on)
            if inside is not None:
                inside(m, good, on)

        return shuffle

    def _redux(self, i: Instruction, mods: list[str]) -> Step:
        to, source, _ = i.operands
        kind, propagates = mods[-1], "NaN" in mods
        read, write = self._read(source, kind), self._write(to, kind)
        reduce = {
            "add": np.add, "min": np.minimum if propagates or kind != "f32" else np.fmin,
            "max": np.maximum if propagates or kind != "f32" else np.fmax,
        }[mods[1]]  # fmt: skip

        def reduction(m: Machine) -> None:
            m.whole_warps(i)
            value = np.broadcast_to(read(m), m.lanes.shape).reshape(-1, 32)
            reduced = reduce.reduce(value, 1, dtype=value.dtype)
            write(m, np.repeat(reduced, 32), m.mask)

        return reduction

    def _ldmatrix(self, i: Instruction, mods: list[str]) -> Step:
        to, source = i.operands
        writers = [self._write(r, "b32") for r in re.findall(r"%\w+", to)]
        address, transposed = self._address(source), "trans" in mods

        def load(m: Machine) -> None:
            lanes, (row, column) = m.whole_warps(i), _place()
            rows = _rows(address(m), m, i, len(writers))
            for k, write in enumerate(writers):
                # A thread gets two elements, of the rows whose addresses threads 8 k ... have.
                if transposed:
                    value = np.zeros(len(m.lanes), np.uint32)
                    for half in (0, 1):
                        at = (rows[:, 8 * k + 2 * column + half] + _U64(2 * row)).ravel()
                        part = m.access(i, at, lanes, 2, 1, None, True)[:, 0].astype(np.uint32)
                        value |= m.spread(part, lanes) << np.uint32(16 * half)
                else:
                    at = (rows[:, 8 * k + row] + _U64(4 * column)).ravel()
                    value = m.spread(m.access(i, at, lanes, 4, 1, None, True)[:, 0], lanes)
                write(m, value, m.mask)

        return load

    def _stmatrix(self, i: Instruction, mods: list[str]) -> Step:
        to, source = i.operands
        readers = [self._read(r, "b32") for r in re.findall(r"%\w+", source)]
        address = self._address(to)

        def store(m: Machine) -> None:
            lanes, (row, column) = m.whole_warps(i), _place()
            rows = _rows(address(m), m, i, len(readers))
            for k, read in enumerate(readers):
                at = (rows[:, 8 * k + row] + _U64(4 * column)).ravel()
                value = np.broadcast_to(read(m), m.lanes.shape)[lanes, None]
                m.access(i, at, lanes, 4, 1, value, True)

        return store

    def _mma(self, i: Instruction, mods: list[str]) -> Step:
        to, *sources = ([r.strip() for r in o.strip("{} ").split(",")] for o in i.operands)
        if [len(x) for x in (*sources, to)] != [REGISTERS[x] for x in "ABCC"]:
            raise NotImplementedError(str(i))
        writers = [self._write(r, "b32") for r in to]
        readers = [[self._read(r, "b32") for r in source] for source in sources]
        compute = multiply(i.op, self.error)

        def product(m: Machine) -> None:
            m.whole_warps(i)
            warps = m.active().reshape(-1, 32).any(1)  # where warps run in turn: one
            lanes = m.lanes.reshape(-1, 32)[warps].ravel()
            a, b, c = ([np.broadcast_to(r(m), m.lanes.shape)[lanes] for r in x] for x in readers)
            for write, value in zip(writers, compute(a, b, c), strict=True):
                write(m, m.spread(value, lanes), m.mask)

        return product

    # Order

    def _bar(self, i: Instruction, mods: list[str]) -> Step:
        if mods[0] == "warp":
            return (lambda m: m.barrier(i)) if self.program.threads <= 32 else (lambda m: None)
        # Barrier 0, of all threads.
        if i.operands not in (["0"], ["0", str(self.program.threads)]):
            raise NotImplementedError(str(i))
        return lambda m: m.barrier(i)

    _barrier = _bar

    def _bra(self, i: Instruction, mods: list[str]) -> Step:
        target = self.program.labels[i.operands[0]]
        if i.guard is None:
            return lambda m: (target, None)
        guard, negated = self._read(i.guard, "pred"), i.negated

        def branch(m: Machine) -> Any:
            on = guard(m) ^ negated
            active = on if m.mask is None or len(on) == 1 else on[m.mask]
            if active.all():
                return target, None
            return (target, on) if active.any() else None

        return branch

    def _ret(self, i: Instruction, mods: list[str], fault: tuple[str, str] | None = None) -> Step:
        mask = self._mask(i)

        def leave(m: Machine) -> Any:
            on = mask(m)
            if fault is not None:
                kind, text = fault
                m.fault(kind, i, on, text)
            m.exited[... if on is None else on] = True
            return END, None if i.guard is None or on is None else on

        return leave

    _exit = _ret

    def _trap(self, i: Instruction, mods: list[str]) -> Step:
        return self._ret(i, mods, ("trap", "the kernel stops here"))

    def _call(self, i: Instruction, mods: list[str]) -> Step:
        if "__assertfail" not in ", ".join(i.operands):
            raise NotImplementedError(str(i))
        return self._ret(i, mods, ("assertion", "an assertion fails"))


def _vector(mods: list[str]) -> int:
    return int(mods[-2][1:]) if re.fullmatch(r"v[248]", mods[-2]) else 1


def _place() -> tuple[np.ndarray, np.ndarray]:
    """Row and pair of columns that a thread has of a matrix of 8 x 8 halves."""
    return np.arange(32) // 4, np.arange(32) % 4


def _rows(address: np.ndarray, m: Machine, i: Instruction, count: int) -> np.ndarray:
    """Addresses of rows `[warps, 32]`, of which `count` matrices have the first 8 each."""
    rows = np.broadcast_to(address, m.lanes.shape).reshape(-1, 32)
    crooked = (rows % _U64(16) != 0) & (np.arange(32) < 8 * count)
    crooked &= m.active().reshape(-1, 32)
    if crooked.any():
        m.fault("misaligned", i, crooked.ravel(), "address of a row % 16 != 0")
    return rows

"""Executes the instructions of a kernel for many blocks at once, one array element per thread.

A register is an array over the threads, or one element where all threads have the same value.
Threads that branch apart run in turn, those that are furthest behind first. Blocks run in batches;
what they may see of each other is left to the checks of `memory`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .copies import Copies
from .counters import Counts, kind_of, traffic_of
from .decode import END, Decoder
from .memory import POISON, Finding, Memory, Region
from .operations import unsigned
from .parse import Instruction, Program

# Values of an undefined 32-bit register, which vary by thread: no single value shows all bugs.
_JUNK = np.array([0x7FC0DEAD, 0x7E967699, 0xFE967699, 0x7F800000], np.uint32)


@cache
def _decoded(program: Program, error: float) -> Decoder:
    return Decoder(program, error)


class Machine:
    """Runs a kernel; faults are collected in `findings`.

    Args:
        shared: bytes of shared memory of a block.
        arguments: the bits of each parameter, by name.
        races, strict_warps: see `Memory`.
        error: see `operations.operation`.
        lanes: threads that run at a time.
        order: `"together"`; or `"rising"`, `"falling"`, or a seed: warp by warp from barrier to
            barrier, by their numbers or as drawn, which shows what a race may come to. A seed
            draws the order of blocks, too.
        counted: where to add what launches do.
    """

    def __init__(
        self, program: Program, shared: int, arguments: dict[str, int],
        grid: tuple[int, int, int], *, races: bool = True, strict_warps: bool = False,
        error: float = 0.0, lanes: int = 16_384, order: str | int = "together",
        counted: Counts | None = None,
    ) -> None:  # fmt: skip
        self.program, self.shared_bytes, self.arguments = program, shared, arguments
        self.grid, self.order, self.counted = grid, order, counted
        self.memory = Memory(program.threads, self.report, races=races, strict_warps=strict_warps)
        self.decoder = _decoded(program, error)
        self.findings: dict[tuple[str, int], Finding] = {}
        self.batch = max(1, lanes // program.threads)
        self.executed = 0  # instructions times threads
        self.draw = np.random.default_rng(order) if isinstance(order, int) else None

    def run(self, blocks: np.ndarray) -> None:
        """Runs the blocks `[n, 3]` of the grid."""
        if self.draw is not None:
            blocks = self.draw.permutation(blocks)
        for begin in range(0, len(blocks), self.batch):
            with np.errstate(all="ignore"):
                self._start(blocks[begin : begin + self.batch])
                self._run_batch()
            if self.counted is not None:
                self.counted.programs += len(self.epochs)
                several_warps = self.program.threads > 32  # else those of one warp
                self.counted.barriers += int(self.epochs.sum()) * several_warps

    def _start(self, blocks: np.ndarray) -> None:
        threads, n = self.program.threads, len(blocks)
        self.lanes = np.arange(n * threads)
        gx, gy, _ = self.grid
        number = blocks[:, 0] + gx * (blocks[:, 1] + gy * blocks[:, 2])
        # Threads by their number in the grid.
        self.ids = np.repeat(number * threads, threads) + np.tile(np.arange(threads), n)
        self.block = np.repeat(np.arange(n), threads)
        self.epochs = np.zeros(n, np.int32)
        tid = np.tile(np.arange(threads, dtype=np.uint32), n)
        self.special = {"%tid.x": tid, "%laneid": tid & np.uint32(31)}
        for axis, name in enumerate("xyz"):
            at = np.repeat(blocks[:, axis].astype(np.uint32), threads)
            self.special[f"%ctaid.{name}"] = at
            self.special[f"%nctaid.{name}"] = np.full(1, self.grid[axis], np.uint32)
            if name != "x":
                self.special[f"%tid.{name}"] = np.zeros(1, np.uint32)
            self.special[f"%ntid.{name}"] = np.full(1, threads if name == "x" else 1, np.uint32)
        data = np.full(max(1, n * self.shared_bytes), POISON[1], np.uint8)
        self.shared = Region("shared memory", 0, data, self.decoder.shared_unit)
        self.registers: dict[str, np.ndarray] = {}
        self.mask: np.ndarray | None = None  # threads that execute; None: all
        self.exited = np.zeros(len(self.lanes), bool)
        self.barriers = np.zeros(len(self.lanes), np.int64)  # where threads wait
        self.blocked = np.zeros(len(self.lanes), bool)  # those that do
        self.pcs = np.zeros(len(self.lanes), np.int64)  # of the threads that do not execute now
        self.copies = Copies(self)
        many = np.resize(_JUNK, len(self.lanes))
        self._junk = {
            "pred": many == _JUNK[0],
            "b64": many.astype(np.uint64) << np.uint64(32) | many,
        }
        for bits in (8, 16, 32):
            self._junk[f"b{bits}"] = (many >> np.uint32(32 - bits)).astype(unsigned(bits))

    def _run_batch(self) -> None:
        code = self.decoder.code
        self._pick()
        while self.pc < END:
            index = self.pc
            self.pc += 1
            jump = code[index](self)
            self.executed += self.count
            if self.counted is not None:
                self._count(self.program.instructions[index], jump)
            if jump is not None:
                target, taken = jump
                if taken is not None:
                    # Some threads jump, the others go on.
                    active = self.active()
                    self.pcs[active & taken], self.pcs[active & ~taken] = target, self.pc
                    self._pick()
                    continue
                self.pc = target
            if self.pc >= self.waiting:
                self.pcs[... if self.mask is None else self.mask] = self.pc
                self._pick()

    def active(self) -> np.ndarray:
        return np.ones(len(self.lanes), bool) if self.mask is None else self.mask

    def _pick(self) -> None:
        """Picks the threads that run next: of those whose turn it is, the furthest behind."""
        ready = (self.pcs < END) & ~self.blocked
        while not ready.any():
            self.pc = END
            if not self.blocked.any():
                return
            self._release()
            ready = (self.pcs < END) & ~self.blocked
        turn = ready
        if self.order != "together":
            warps = self.special["%tid.x"] // np.uint32(32)
            if self.draw is not None:
                chosen = self.draw.choice(np.unique(warps[ready]))
            else:
                chosen = warps[ready].min() if self.order == "rising" else warps[ready].max()
            turn = ready & (warps == chosen)
        self.pc = int(self.pcs[turn].min())
        now = turn & (self.pcs == self.pc)
        self.count = int(now.sum())
        self.mask = None if self.count == len(now) else now
        behind = turn & ~now
        self.waiting = int(self.pcs[behind].min()) if behind.any() else END

    def barrier(self, i: Instruction) -> tuple[int, np.ndarray] | None:
        """The threads wait for the others of their blocks."""
        if self.mask is None:
            self.epochs += 1
            return None
        missing = ~self.exited & ~self.blocked & ~self.mask
        arrived = np.bincount(self.block[self.mask], minlength=len(self.epochs)) > 0
        if not (self.blocked.any() or (missing & arrived[self.block]).any()):
            self.epochs[arrived] += 1
            return None
        self.barriers[self.mask] = self.pc
        self.blocked |= self.mask
        self.at_barrier = i
        # Back to where they are, and another turn.
        return self.pc, self.mask

    def _release(self) -> None:
        """All that can run wait: each block goes on if all its threads wait at one barrier."""
        for block in np.unique(self.block[self.blocked]):
            members = self.block == block
            there = self.barriers[members & self.blocked]
            if (there != there[0]).any() or (members & self.exited).any():
                text = "others are elsewhere"
                self.fault("divergent barrier", self.at_barrier, members & self.blocked, text)
                self.pcs[members] = END  # a GPU may wait for ever
            self.epochs[block] += 1
        self.blocked[:] = False

    # Faults

    def report(self, kind: str, where: Instruction, ids: np.ndarray, text: str) -> None:
        """Notes a fault of the threads with these numbers in the grid."""
        key = (kind, where.line)
        if not len(ids):
            return
        if key in self.findings:
            self.findings[key].count += len(ids)
            return
        block, thread = divmod(int(ids[0]), self.program.threads)
        who = f"thread {thread} of block {block}: {text}"
        self.findings[key] = Finding(
            kind, self.program.name, where.place, str(where), len(ids), who
        )

    def fault(self, kind: str, where: Instruction, threads: np.ndarray | None, text: str) -> None:
        """Notes a fault of the threads where an array over all is True, None for all."""
        self.report(kind, where, self.ids if threads is None else self.ids[threads], text)

    # For instructions

    def junk(self, register: str) -> np.ndarray:
        """Returns the content of a register that nothing was written to."""
        return self._junk[self.program.registers[register.rstrip("0123456789")]]

    def spread(self, values: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Values of some threads, as an array over all."""
        if len(values) == len(self.lanes):
            return values
        full = np.zeros(len(self.lanes), values.dtype)
        full[lanes] = values
        return full

    def whole_warps(self, i: Instruction) -> np.ndarray:
        """The threads that execute an instruction which all of a warp must execute."""
        if self.mask is None:
            return self.lanes
        warps = self.mask.reshape(-1, 32)
        parted = warps.any(1) & ~warps.all(1)
        if parted.any():
            self.fault("divergent warp", i, np.repeat(parted, 32), "some threads are elsewhere")
        return np.flatnonzero(self.mask)

    def access(
        self, i: Instruction, address: np.ndarray, lanes: np.ndarray, width: int, count: int,
        values: np.ndarray | None, is_shared: bool,
    ) -> Any:  # fmt: skip
        """Loads from, or stores `values [n, count]` to, the addresses of some threads."""
        where = np.broadcast_to(address, self.lanes.shape)[lanes]
        ids, epochs = self.ids[lanes], self.epochs[self.block[lanes]]
        if self.counted is not None and len(lanes):
            name = "shared" if is_shared else "load" if values is None else "store"
            size = width * count
            traffic = traffic_of(lanes, where, size, shared=is_shared)
            self.counted.add_traffic(name, i.place, i.op, traffic)
        if not is_shared:
            if values is None:
                return self.memory.load(i, where, ids, epochs, width, count)
            return self.memory.store(i, where, ids, epochs, width, values)
        offsets, _ = self.shared_offsets(i, where, lanes, width * count)
        self.note_shared(i, offsets, lanes, width * count, values, is_store=values is not None)
        at = (offsets // width)[:, None] + np.arange(count)
        if values is None:
            return self.shared.cells(width)[at]
        self.shared.cells(width)[at] = values
        return None

    def shared_offsets(
        self, i: Instruction, where: np.ndarray, lanes: np.ndarray, size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns offsets into all blocks' shared memory, and which accesses are invalid."""
        held = self.shared_bytes
        bad = (where + np.uint64(size) > held) | (where % np.uint64(size) != 0)
        if bad.any():
            text = f"byte {int(where[bad][0])} of {held}"
            kind = "shared memory: out of bounds or misaligned"
            self.report(kind, i, self.ids[lanes][bad], text)
            where = np.where(bad, np.uint64(0), where)
        return where.astype(np.int64) + self.block[lanes] * held, bad

    def note_shared(
        self, i: Instruction, offsets: np.ndarray, lanes: np.ndarray, size: int,
        values: np.ndarray | None, *, is_store: bool,
    ) -> None:  # fmt: skip
        """Notes accesses to shared memory; `values` are those stored, if they are known."""
        ids, epochs = self.ids[lanes], self.epochs[self.block[lanes]]
        unit = self.shared.unit
        units = (offsets // unit)[:, None] + np.arange(max(1, size // unit))
        self.copies.check(i, units, ids, is_store=is_store)
        if not self.memory.races:
            return
        if self.shared.history is None:
            self.shared.history = self.memory.history(self.shared)
        if not is_store:
            fresh = ~self.shared.history.was_written(units).all(1)
            if fresh.any():
                text = f"byte {int(offsets[fresh][0]) % self.shared_bytes}"
                self.report("uninitialised shared memory", i, ids[fresh], text)
        self.memory.note(i, self.shared, offsets, ids, epochs, size, values, is_store=is_store)

    def _count(self, i: Instruction, jump: Any) -> None:
        counted, kind = self.counted, kind_of(i.op)
        assert counted is not None
        active = self.active().reshape(-1, 32).any(1)
        warps = int(active.sum())
        counted.instructions[kind] += warps
        counted.lines[i.place, i.op] += warps
        if kind == "branch" and jump is not None and jump[1] is not None:
            on = np.broadcast_to(jump[1], self.lanes.shape).reshape(-1, 32)
            on_warps = self.active().reshape(-1, 32)
            parted = (on & on_warps).any(1) & (~on & on_warps).any(1)
            counted.divergent_branches += int(parted.sum())

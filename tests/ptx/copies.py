"""Copies to shared memory that a thread begins and waits for later: `cp.async`.

Global memory is read where a copy begins. What it writes appears at the last moment, where its
thread waits for its group, and is the thread's alone until a barrier, as any other store. From its
begin until then the bytes are no one's: reads of them and writes over them are faults, the thread's
own included. Towards others' earlier reads and writes the copy is a store where it begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .parse import Instruction

if TYPE_CHECKING:
    from .machine import Machine

WORD = 4  # bytes


class _Copy(NamedTuple):
    """Pending copies of one instruction, one per thread."""

    instruction: Instruction
    address: np.ndarray  # of all threads
    lanes: np.ndarray
    groups: np.ndarray
    offsets: np.ndarray  # of the first byte, in the shared memory of all blocks
    values: np.ndarray  # [n, words]

    def of(self, some: np.ndarray) -> _Copy:
        """Returns the copies of some of the threads."""
        parts = (x[some] for x in (self.lanes, self.groups, self.offsets, self.values))
        return _Copy(self.instruction, self.address, *parts)


class Copies:
    """The copies of a batch of blocks, and which bytes of shared memory they have to fill."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.groups = np.zeros(len(machine.lanes), np.int64)  # that a thread has closed
        self.begun: list[_Copy] = []
        self.pending: np.ndarray | None = None  # per unit of shared memory

    def begin(
        self, i: Instruction, target: np.ndarray, source: np.ndarray, sizes: np.ndarray,
        words: int, lanes: np.ndarray,
    ) -> None:  # fmt: skip
        """Copies `sizes` bytes each, and zeros for the rest of the words.

        Args:
            i: the instruction, for findings.
            target: addresses in shared memory, of all threads.
            source: those in global memory.
            sizes: bytes that are read, one number per thread of `lanes`.
            words: that are written.
            lanes: the threads.
        """
        m, size = self.machine, WORD * words
        if (sizes % WORD != 0).any():
            raise NotImplementedError(f"{i}: {sizes[sizes % WORD != 0][0]} bytes")
        long = sizes > size
        if long.any():
            m.report("copy of more than it writes", i, m.ids[lanes[long]], f"of {size} bytes")
        values = np.zeros((len(lanes), words), np.uint32)
        full = sizes >= size
        values[full] = m.access(i, source, lanes[full], WORD, words, None, False)
        for word in range(words - 1):
            part = ~full & (sizes > WORD * word)
            if part.any():
                at = source + np.uint64(WORD * word)
                values[part, word] = m.access(i, at, lanes[part], WORD, 1, None, False)[:, 0]
        offsets, bad = m.shared_offsets(i, target[lanes], lanes, size)
        lanes, offsets, values = lanes[~bad], offsets[~bad], values[~bad]
        # Once begun, it may be written at any time.
        m.note_shared(i, offsets, lanes, size, None, is_store=True)
        if self.pending is None:
            self.pending = np.zeros(len(m.shared.data) // m.shared.unit + 1, bool)
        self.pending[self._units(offsets, size)] = True
        self.begun.append(_Copy(i, target, lanes, self.groups[lanes], offsets, values))

    def check(self, i: Instruction, units: np.ndarray, ids: np.ndarray, *, is_store: bool) -> None:
        """Reports accesses `[n, units]` to what a copy still has to fill."""
        if self.pending is None or not self.begun:
            return
        early = self.pending[units].any(1)
        if early.any():
            what = "write over" if is_store else "read of"
            unit = self.machine.shared.unit
            byte = int(units[early][0, 0]) * unit % self.machine.shared_bytes
            kind = f"{what} a copy that was not waited for"
            self.machine.report(kind, i, ids[early], f"byte {byte}")

    def _units(self, offsets: np.ndarray, size: int) -> np.ndarray:
        unit = self.machine.shared.unit
        return (offsets // unit)[:, None] + np.arange(size // unit)

    def commit(self, on: np.ndarray | None) -> None:
        """The copies that threads have begun are a group."""
        self.groups[... if on is None else on] += 1

    def wait(self, pending: int, on: np.ndarray | None) -> None:
        """Writes what threads have copied, except their last `pending` groups; -1: all."""
        begun, self.begun = self.begun, []
        for copy in begun:
            ends = self.groups[copy.lanes] - copy.groups > pending
            if on is not None:
                ends &= on[copy.lanes]
            if ends.any():
                self._write(copy.of(ends))
            rest = ~ends
            if rest.any():
                self.begun.append(copy.of(rest))

    def _write(self, copy: _Copy) -> None:
        words = copy.values.shape[1]
        assert self.pending is not None
        self.pending[self._units(copy.offsets, WORD * words)] = False
        self.machine.access(
            copy.instruction, copy.address, copy.lanes, WORD, words, copy.values, True
        )

"""Race detection: last writer and reader of each element, and accesses that nothing orders.

Two accesses race if one of them writes and nothing orders their threads: those of different blocks
are never ordered, warps of a block by a barrier between the two, threads of a warp by the order of
the program (with `strict_warps` by barriers alone). Races are found whatever order was run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# In place of a warp or block, which are counted from 1.
NOBODY, MANY = 0, -1


class Accesses(NamedTuple):
    """Accesses of one instruction, one per element."""

    units: np.ndarray  # which element
    threads: np.ndarray  # numbers in the grid
    epochs: np.ndarray  # barriers that the thread's block has passed
    written: np.ndarray | None  # the bits stored, where each store has whole elements
    is_store: bool


class History:
    """Last writer and reader of each of `units` elements."""

    def __init__(self, units: int, threads_per_block: int, *, strict_warps: bool) -> None:
        self.width = 1 if strict_warps else 32
        self.actors = threads_per_block // self.width  # per block
        # Zeros cost memory only where they are touched.
        self.writer, self.written_at, self.reader, self.read_at, self.reading_block, self.last = (
            np.zeros(units, np.int32) for _ in range(6)
        )

    def was_written(self, units: np.ndarray) -> np.ndarray:
        return self.writer[units] != NOBODY

    def note(
        self, new: Accesses, held: np.ndarray | None
    ) -> Iterator[tuple[str, np.ndarray]]:  # fmt: skip
        """Adds accesses; yields the kinds of race among them and which of them are concerned.

        Args:
            new: the accesses.
            held: the bits of the elements before a store.
        """
        units, epoch = new.units, new.epochs
        actor = (new.threads // self.width + 1).astype(np.int32)
        block = (actor - 1) // self.actors + 1
        writer, reader = self.writer[units], self.reader[units]
        unordered = (writer != NOBODY) & (writer != actor)
        same_block = (writer - 1) // self.actors + 1 == block
        unordered &= ~same_block | (self.written_at[units] == epoch)
        in_epoch = (self.read_at[units] == epoch) & (reader != NOBODY) & (reader != actor)
        if not new.is_store:
            yield "race: read after write", unordered
            # The reader since the last barrier, or that there are several.
            several = in_epoch & ((reader == MANY) | ((reader - 1) // self.actors + 1 == block))
            _leave(self.reader, units, np.where(several, MANY, actor))
            self.read_at[units] = epoch
            reading = self.reading_block[units]
            alone = (reading == NOBODY) | (reading == block)
            _leave(self.reading_block, units, np.where(alone, block, MANY))
            return
        # Writes of one value do not race, whichever remains: the threads that share an element of
        # a layout do so.
        raw = new.written
        yield (
            "race: write after write",
            unordered if raw is None or held is None else unordered & (held != raw),
        )
        reading = self.reading_block[units]
        elsewhere = (reading != NOBODY) & (reading != block)
        yield "race: write after read", elsewhere | in_epoch
        self.writer[units], self.written_at[units] = actor, epoch
        number = np.arange(len(units), dtype=np.int32)
        self.last[units] = number
        last = self.last[units]
        clash = last != number
        yield "race: written at once", clash if raw is None else clash & (raw[last] != raw)

    def describe(self, unit: int) -> str:
        """Describes the last writer and reader of an element."""
        return f"writer {self._name(self.writer[unit])}, reader {self._name(self.reader[unit])}"

    def _name(self, actor: int) -> str:
        if actor <= 0:
            return "several" if actor == MANY else "nobody"
        block, place = divmod(int(actor) - 1, self.actors)
        return f"{'warp' if self.width == 32 else 'thread'} {place} of block {block}"


def _leave(who: np.ndarray, units: np.ndarray, new: np.ndarray) -> None:
    """Sets who it was; elements that several have at once get `MANY`."""
    who[units] = new
    who[units[who[units] != new]] = MANY

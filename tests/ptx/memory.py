"""The memory of a launch: tensors at addresses of their own, and what may be done with elements.

Every storage lies alone in 2^40 bytes of addresses, so that no stray offset falls into another one.
An access must be to elements that a tensor which was handed to the kernel has (the end of a padded
row is no one's), be aligned to its size, not race (`races`), and read what somebody wrote: memory
that nobody wrote holds `POISON`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .operations import unsigned
from .races import Accesses, History

_SHIFT = 40
# The bits of uninitialised elements, by their size in bytes: NaN in every floating-point type.
POISON = {1: 0xA5, 2: 0x7FD5, 4: 0x7FD5_A5D5, 8: 0x7FFD_A5D5_7FD5_A5D5}
_JUNK = 0xDBDB_DBDB_DBDB_DBDB  # what a load returns that faults


@dataclass
class Finding:
    """Fault of one kind at one instruction."""

    kind: str
    kernel: str
    place: str
    instruction: str
    count: int
    example: str

    def __str__(self) -> str:
        return (
            f"{self.kind} in {self.kernel} at {self.place}: {self.count} accesses, for example "
            f"{self.example} ({self.instruction})"
        )


@dataclass
class View:
    """The elements of a tensor, in units of its storage."""

    offset: int
    dims: list[tuple[int, int]]  # stride and size, largest stride first

    def has(self, units: np.ndarray) -> np.ndarray:
        rest = units - self.offset
        inside = rest >= 0
        for stride, size in self.dims:
            index = rest // stride
            inside &= index < size
            rest = rest - index * stride
        return inside & (rest == 0)


@dataclass
class Region:
    """A storage, or the shared memory of all blocks, in units of `unit` bytes."""

    name: str
    base: int
    data: np.ndarray  # uint8
    unit: int
    views: list[View] = field(default_factory=list)  # none: all is of some tensor
    # Reads before the first write, which do not race with each other.
    log: list[Accesses] = field(default_factory=list)
    history: History | None = None

    def cells(self, width: int) -> np.ndarray:
        return self.data[: len(self.data) // width * width].view(unsigned(8 * width))


Report = Callable[[str, Any, np.ndarray, str], None]


class Memory:
    """All global memory of a launch.

    Args:
        threads: per block.
        report: gets the faults: their kind, the instruction, the threads, and where.
        races: looks for them.
        strict_warps: see `races`.
    """

    def __init__(
        self, threads: int, report: Report, *, races: bool = True, strict_warps: bool = False
    ) -> None:
        self.regions: list[Region] = []
        self.threads, self.report = threads, report
        self.races, self.strict_warps = races, strict_warps

    def add(self, name: str, data: np.ndarray, address: int, unit: int) -> Region:
        # Addresses keep their alignment.
        base = ((len(self.regions) + 1) << _SHIFT) + (address & 0x1FF)
        region = Region(name, base, data, unit)
        self.regions.append(region)
        return region

    def load(
        self, i: Any, addresses: np.ndarray, ids: np.ndarray, epochs: np.ndarray, width: int,
        count: int,
    ) -> np.ndarray:  # fmt: skip
        """`count` values of `width` bytes from each address, `[n, count]`."""
        out = np.full((len(addresses), count), _JUNK & ((1 << 8 * width) - 1), unsigned(8 * width))
        for region, offsets, at in self._resolve(i, addresses, ids, width * count):
            taken = region.cells(width)[(offsets // width)[:, None] + np.arange(count)]
            out[at] = taken
            if 1 < region.unit <= width:
                poison = taken.view(unsigned(8 * region.unit)) == POISON[region.unit]
                # All of a value: half of a float32 may have these bits, in a buffer of halves.
                parts = len(taken), count, width // region.unit
                fresh = poison.reshape(parts).all(2).any(1)
                if fresh.any():
                    text = f"{region.name}, element {int(offsets[fresh][0]) // region.unit}"
                    self.report("uninitialised", i, ids[at][fresh], text)
            self.note(i, region, offsets, ids[at], epochs[at], width * count, None, is_store=False)
        return out

    def store(
        self, i: Any, addresses: np.ndarray, ids: np.ndarray, epochs: np.ndarray, width: int,
        values: np.ndarray,
    ) -> None:  # fmt: skip
        """Stores `values [n, count]` of `width` bytes each."""
        count = values.shape[1]
        for region, offsets, at in self._resolve(i, addresses, ids, width * count):
            new = values[at]
            self.note(i, region, offsets, ids[at], epochs[at], width * count, new, is_store=True)
            region.cells(width)[(offsets // width)[:, None] + np.arange(count)] = new

    def _resolve(
        self, i: Any, addresses: np.ndarray, ids: np.ndarray, size: int
    ) -> list[tuple[Region, np.ndarray, np.ndarray]]:
        """Per storage: the offsets in it and which of the accesses they are; reports the rest."""
        crooked = addresses & np.uint64(size - 1) != 0
        if crooked.any():
            self.report("misaligned", i, ids[crooked], f"address % {size} != 0")
        places = (addresses >> np.uint64(_SHIFT)).astype(np.int64) - 1
        accesses, unresolved = [], np.ones(len(addresses), bool)
        for place in np.unique(places) if len(places) else ():
            if not 0 <= place < len(self.regions):
                continue
            region = self.regions[place]
            offsets = (addresses - np.uint64(region.base)).astype(np.int64)
            inside = (places == place) & (offsets >= 0) & (offsets + size <= len(region.data))
            unresolved &= ~inside
            at = np.flatnonzero(inside & ~crooked)
            offsets = offsets[at]
            if region.views:
                units = (offsets // region.unit)[:, None] + np.arange(max(1, size // region.unit))
                owned = np.logical_or.reduce([view.has(units) for view in region.views])
                stray = ~owned.all(1)
                if stray.any():
                    text = f"{region.name}, element {units[stray][0, 0]}, which no tensor has"
                    self.report("outside the view", i, ids[at][stray], text)
            accesses.append((region, offsets, at))
        if unresolved.any():
            text = self._nearest(int(addresses[unresolved][0]))
            self.report("out of bounds", i, ids[unresolved], text)
        return accesses

    def _nearest(self, address: int) -> str:
        """An address, relative to the storage that it is closest to."""

        def distance(region: Region) -> int:
            offset = signed - region.base
            return max(0, -offset, offset - len(region.data))

        signed = address - (1 << 64) if address >> 63 else address
        region = min(self.regions, key=distance)
        return f"{region.name}, byte {signed - region.base:,} of {len(region.data):,}"

    def note(
        self, i: Any, region: Region, offsets: np.ndarray, ids: np.ndarray, epochs: np.ndarray,
        size: int, values: np.ndarray | None, *, is_store: bool,
    ) -> None:  # fmt: skip
        """Notes accesses of `size` bytes; `values` are those stored, if they are known."""
        if not self.races:
            return
        count = max(1, size // region.unit)
        units = ((offsets // region.unit)[:, None] + np.arange(count)).ravel()
        raw = None
        if values is not None and values.itemsize >= region.unit:
            raw = np.ascontiguousarray(values).view(unsigned(8 * region.unit)).ravel()
        new = Accesses(units, np.repeat(ids, count), np.repeat(epochs, count), raw, is_store)
        if region.history is None:
            if not is_store:
                region.log.append(new)
                return
            region.history = self.history(region)
        for access in [*region.log, new]:
            held = region.cells(region.unit)[access.units] if access.written is not None else None
            for kind, raced in region.history.note(access, held):
                if raced.any():
                    unit = int(access.units[raced][0])
                    text = f"{region.name}, element {unit}, {region.history.describe(unit)}"
                    self.report(kind, i, access.threads[raced], text)
        region.log.clear()

    def history(self, region: Region) -> History:
        units = len(region.data) // region.unit
        return History(units, self.threads, strict_warps=self.strict_warps)

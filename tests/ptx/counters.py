"""Counters of a profiler, per launch: instructions, sectors, bank conflicts, divergence.

Units are warps, as on a GPU: an instruction counts once per warp that executes it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

SECTOR = 32  # bytes that memory moves at least
_BANKS, _BANK_BYTES = 32, 4
# Kind by prefix of the opcode; the first that matches counts.
KINDS = (
    ("global load", r"ld\.global"), ("global store", r"st\.global"),
    ("asynchronous copy", r"cp\.async"), ("tensor core", r"mma"),
    ("shared memory", r"(ld|st)\.shared|(ld|st)matrix"), ("parameter", r"(ld|st)\.param"),
    ("shuffle", r"shfl|redux"), ("barrier", r"bar"), ("branch", r"bra|ret|exit"),
    ("special function", r"ex2|lg2|div|rcp|rsqrt|sqrt|tanh"), ("conversion", r"cvt"),
    ("comparison", r"setp|selp"), ("float", r".*\.(f16|f32|f64|f32x2|bf16)$"), ("move", r"mov"),
    ("integer", r""),
)  # fmt: skip


def kind_of(opcode: str) -> str:
    return next(kind for kind, pattern in KINDS if re.match(pattern, opcode))


@dataclass
class Traffic:
    """Traffic of the loads, or of the stores, of one memory."""

    requests: int = 0  # of warps
    requested: int = 0  # bytes, each once per request
    sectors: int = 0
    conflicts: int = 0  # of banks: turns beyond those that the bytes need

    @property
    def efficiency(self) -> float:
        """Returns the share of the moved bytes that were requested."""
        return self.requested / (SECTOR * self.sectors) if self.sectors else 1.0

    def add(self, other: Traffic) -> None:
        self.requests += other.requests
        self.requested += other.requested
        self.sectors += other.sectors
        self.conflicts += other.conflicts


@dataclass
class Counts:
    """Counters of some launches."""

    programs: int = 0
    instructions: Counter[str] = field(default_factory=Counter)  # by kind
    lines: Counter[tuple[str, str]] = field(default_factory=Counter)  # by place and opcode
    traffic: dict[str, Traffic] = field(
        default_factory=lambda: {k: Traffic() for k in ("load", "store", "shared")}
    )
    traffic_of_lines: dict[tuple[str, str], Traffic] = field(
        default_factory=lambda: defaultdict(Traffic)
    )
    barriers: int = 0  # of blocks; a block of one warp has none
    divergent_branches: int = 0  # of warps

    def add(self, other: Counts) -> None:
        self.programs += other.programs
        self.instructions += other.instructions
        self.lines += other.lines
        for name, traffic in other.traffic.items():
            self.traffic[name].add(traffic)
        for line, traffic in other.traffic_of_lines.items():
            self.traffic_of_lines[line].add(traffic)
        self.barriers += other.barriers
        self.divergent_branches += other.divergent_branches

    def add_traffic(self, name: str, place: str, opcode: str, traffic: Traffic) -> None:
        self.traffic[name].add(traffic)
        self.traffic_of_lines[place, opcode].add(traffic)


def traffic_of(lanes: np.ndarray, addresses: np.ndarray, size: int, *, shared: bool) -> Traffic:
    """The traffic of one instruction: `size` bytes at each address, of the threads `lanes`.

    Addresses that `size` divides: of any other one a load or store is a fault.
    """
    at = _by_warp(lanes, addresses)
    requests, requested = len(at), _distinct(at) * size
    if shared:
        return Traffic(requests, requested, 0, _conflicts(at, size))
    return Traffic(requests, requested, _distinct(at // np.uint64(SECTOR)))


def _by_warp(lanes: np.ndarray, addresses: np.ndarray) -> np.ndarray:
    """Addresses `[warps, 32]`; of the threads that take no part, that of one that does."""
    _, first, warp = np.unique(lanes // 32, return_index=True, return_inverse=True)
    at = np.repeat(addresses[first, None], 32, axis=1)
    at[warp, lanes % 32] = addresses
    return at


def _distinct(x: np.ndarray) -> int:
    """Returns the number of distinct values per row, summed over the rows."""
    x = np.sort(x, axis=1)
    return len(x) + int((x[:, 1:] != x[:, :-1]).sum())


def _conflicts(at: np.ndarray, size: int) -> int:
    """Turns of shared memory beyond one per 128 bytes; of wide accesses, warps come in parts."""
    words = max(1, size // _BANK_BYTES)
    # Half a warp for 8 bytes, a quarter for 16.
    word = (at.astype(np.int64) // _BANK_BYTES)[:, :, None] + np.arange(words)
    word = np.sort(word.reshape(-1, _BANKS), axis=1)
    # A word that several threads request counts once.
    new = np.ones(word.shape, bool)
    new[:, 1:] = word[:, 1:] != word[:, :-1]
    bank = word % _BANKS + _BANKS * np.arange(len(word))[:, None]
    turns = np.bincount(bank[new], minlength=word.size).reshape(-1, _BANKS)
    return int(turns.max(axis=1).sum()) - len(turns)

"""Which process is gone, where the others wait for it."""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
import time
from types import TracebackType

import torch.distributed as dist
from accelerate import Accelerator

# Seconds between two beats; without one until a process counts as gone; and, besides, for the store
# to answer.
_BEAT_S, _SILENT_S, _STORE_S = 0.5, 5.0, 10.0
_OF_A_COLLECTIVE = re.compile("gloo|NCCL|process group|ProcessGroup", re.IGNORECASE)
_blocks = itertools.count()


class RankError(RuntimeError):
    """A collective failed, as another process is gone; says which, and what is known of it."""


class Heartbeats:
    """Tells the other processes, inside a `with` block, that this one is there, and why it ends.

    A thread counts up a number in the store of the process group. The first process that ends with
    an error leaves a sentence there about who is gone: itself, or, where a collective has failed,
    the one whose number stands still. The others end with this sentence.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.world, self.rank = accelerator.num_processes, accelerator.process_index
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = ""  # the sentence, once it is known
        self._first = "rank 0"  # which holds the store, if no launcher does

    def __enter__(self) -> Heartbeats:
        if self.world > 1:
            # A connection of its own: the group's is locked while something is waited for.
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._store = dist.PrefixStore(f"grpo_kernels-{next(_blocks)}", store)
            self._store.set(f"name-{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
            self._thread = threading.Thread(target=self._beat, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if error is not None:
            # In a thread, as a store that is gone may never answer.
            last = threading.Thread(target=self._end_with, args=(error,), daemon=True)
            last.start()
            last.join(_SILENT_S + _STORE_S)
        self._ended.set()
        self._thread.join(_BEAT_S)
        if error is not None and _is_of_a_collective(error):
            told = self._told or (
                "the store of the process group does not answer: whoever holds it is gone, the "
                f"launcher or {self._first}"
            )
            raise RankError(
                f"{told}. Rank {self.rank} waited, and ends; what was saved is whole: go on with "
                "--resume"
            ) from error

    def _beat(self) -> None:
        try:
            for count in itertools.count():
                self._store.set(f"beat-{self.rank}", str(count))
                if "process" not in self._first:
                    self._first = self._name(0)
                self._listen()
                if self._ended.wait(_BEAT_S):
                    return
        except RuntimeError:  # the store is gone
            return

    def _listen(self) -> str:
        """The sentence, if another process has left one."""
        if not self._told and self._store.check(["told"]):
            self._told = self._store.get("told").decode()
        return self._told

    def _end_with(self, error: BaseException) -> None:
        """Sees to it that there is a sentence."""
        text = f"{type(error).__name__}: {error}"[:500]
        try:
            if _is_of_a_collective(error):
                told = self._who_is_gone(text)
            else:
                told = f"{self._name(self.rank)} has ended: {text}"
            self._told = self._store.compare_set("told", "", told).decode()
            if self.rank == 0:  # it may hold the store, which the others still have to read
                time.sleep(4 * _BEAT_S)
        except RuntimeError:
            return

    def _who_is_gone(self, failed: str) -> str:
        others = [rank for rank in range(self.world) if rank != self.rank]
        before, end = [self._count(rank) for rank in others], time.monotonic() + _SILENT_S
        while time.monotonic() < end:
            if told := self._listen():
                return told
            time.sleep(_BEAT_S)
        pairs = zip(others, before, strict=True)
        if silent := [rank for rank, count in pairs if self._count(rank) == count]:
            return (
                f"{self._names(silent)} has not answered for {_SILENT_S:g} seconds: it was killed "
                "or stopped, its machine or network is gone, or it is in code that lets no other "
                "thread run; its own output may say why"
            )
        return (
            f"a collective of {self._name(self.rank)} has failed: {failed}. "
            f"{self._names(others)} is there, and did not come to it, or it failed here alone"
        )

    def _count(self, rank: int) -> bytes:
        key = f"beat-{rank}"
        return self._store.get(key) if self._store.check([key]) else b""

    def _name(self, rank: int) -> str:
        key = f"name-{rank}"
        where = self._store.get(key).decode() if self._store.check([key]) else "not here yet"
        return f"rank {rank} of {self.world} ({where})"

    def _names(self, ranks: list[int]) -> str:
        more = f", and {len(ranks) - 3} more," if len(ranks) > 3 else ""
        return ", ".join(map(self._name, ranks[:3])) + more


def _is_of_a_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_OF_A_COLLECTIVE.search(str(error)))

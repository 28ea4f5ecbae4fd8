"""Which process is gone, where the others wait for it."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from types import TracebackType

import torch.distributed as dist
from accelerate import Accelerator

# Seconds between two beats, and without one until a process counts as gone.
_BEAT_S, _SILENT_S = 0.5, 5.0
_OF_A_COLLECTIVE = re.compile("gloo|NCCL|process group|ProcessGroup", re.IGNORECASE)


class RankError(RuntimeError):
    """A collective failed, as another process is gone; says which, and what is known of it."""


class Heartbeats:
    """Tells the other processes, inside a `with` block, that this one is there, and why it ends.

    A thread counts up a number in the store of the process group. Where a collective fails, the
    process whose number stands still is named, or the one that has left with an error of its own.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.world, self.rank = accelerator.num_processes, accelerator.process_index
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Heartbeats:
        if self.world > 1:
            # A connection of its own: the group's is locked while something is waited for.
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._store = dist.PrefixStore("grpo_kernels", store)
            self._store.set(f"name-{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
            self._thread = threading.Thread(target=self._beat, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        try:
            failed = error is not None and _is_of_a_collective(error)
            why = "" if failed or error is None else f"{type(error).__name__}: {error}"[:500]
            self._store.set(f"left-{self.rank}", why)
            told = self._who_is_gone() if failed else None
        except RuntimeError:  # who holds the store is rank 0, or the launcher
            told = "the store of the process group is gone, and with it rank 0 or the launcher"
        finally:
            self._ended.set()
            self._thread.join()
        if error is not None and told is not None:
            raise RankError(
                f"{told}. Rank {self.rank} waited for it, and ends; what was saved is whole: go on "
                "with --resume"
            ) from error

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            try:
                self._store.add(f"beat-{self.rank}", 1)
            except RuntimeError:
                return

    def _who_is_gone(self) -> str | None:
        """A sentence about the first process of which something is known; None: all go on."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        before, end = self._beats(others), time.monotonic() + _SILENT_S
        while time.monotonic() < end:
            for rank in others:
                if why := self._left(rank):
                    return f"{self._name(rank)} has ended: {why}"
            time.sleep(_BEAT_S)
        after = self._beats(others)
        elsewhere = [rank for rank in others if self._left(rank) is None]
        for rank in elsewhere:
            if after[rank] == before[rank]:
                return (
                    f"{self._name(rank)} has not answered for {_SILENT_S:g} seconds: it was "
                    "killed, or its machine or network is gone; its own output may say why"
                )
        if len(elsewhere) == 1:
            return f"{self._name(elsewhere[0])} is there, but did not come: it works elsewhere"
        return None

    def _beats(self, ranks: list[int]) -> dict[int, int]:
        return {rank: self._store.add(f"beat-{rank}", 0) for rank in ranks}

    def _left(self, rank: int) -> str | None:
        """Why a process has left the block, "" for no reason of its own; None: it has not."""
        key = f"left-{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _name(self, rank: int) -> str:
        key = f"name-{rank}"
        where = self._store.get(key).decode() if self._store.check([key]) else "not yet started"
        return f"rank {rank} of {self.world} ({where})"


def _is_of_a_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_OF_A_COLLECTIVE.search(str(error)))

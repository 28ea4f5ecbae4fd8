"""Peak memory of a piece of work, beyond what was held when it began."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")
_PAGE = 4096


class PeakMemory:
    """Measures within a `with` block; afterwards `extra_bytes` is the peak beyond the start.

    On CUDA the caching allocator's own peak. On a CPU the resident set, sampled every millisecond
    by a thread: what was allocated and freed before may be reused unseen, so that a number to be
    published comes from a fresh process. 0 where the system does not tell (no /proc).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.extra_bytes = 0

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        elif _STATM.exists():
            self._start = self._peak = _resident_bytes()
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.extra_bytes = torch.cuda.max_memory_allocated(self.device) - self._start
        elif _STATM.exists():
            self._stop.set()
            self._thread.join()
            self.extra_bytes = max(self._peak, _resident_bytes()) - self._start

    def _sample(self) -> None:
        while not self._stop.is_set():
            self._peak = max(self._peak, _resident_bytes())
            time.sleep(1e-3)


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * _PAGE

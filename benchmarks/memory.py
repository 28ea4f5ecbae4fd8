"""Peak memory of a piece of work, beyond what was held when it began."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures within a `with` block; afterwards `extra_bytes` is the peak beyond the start.

    On CUDA the caching allocator's own peak. On a CPU the kernel's high-water mark of the resident
    set, reset at the start (Linux; elsewhere `extra_bytes` is None). Memory that was freed before
    but kept by the allocator is used again unseen, so a number to be published comes from a fresh
    process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.extra_bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        self._start: int | None = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        elif _CLEAR_REFS.exists():
            try:
                _CLEAR_REFS.write_text("5")
                self._start = _peak_resident_bytes()
            except OSError:  # a sandbox that does not let a process reset its own mark
                pass
        return self

    def __exit__(self, *_: object) -> None:
        if self._start is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = _peak_resident_bytes()
        self.extra_bytes = peak - self._start


def _peak_resident_bytes() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    if match is None:
        raise OSError(f"no VmHWM in {_STATUS}")
    return int(match[1]) * 1024

"""Memory that runs out, on any device."""

from __future__ import annotations

import re

import torch

# What says so that is no OutOfMemoryError: torch on a CPU (Windows' too), oneDNN within it, CUDA's
# own calls (Triton's as well), cuBLAS, and Metal.
_NO_MEMORY = re.compile(
    "can't allocate memory|not enough memory|std::bad_alloc|could not create a memory"
    "|CUDA[^:]*: out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
    "|MPS backend out of memory"
)


def ran_out_of_memory(error: BaseException) -> bool:
    """True if `error` means out of memory, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))

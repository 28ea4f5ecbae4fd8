"""Out-of-memory errors on any device, and memory that a call lends to the next one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

# Messages of errors other than OutOfMemoryError: torch on a CPU (also on Windows), oneDNN, CUDA's
# calls (Triton's too), cuBLAS, and Metal.
_NO_MEMORY = re.compile(
    "can't allocate memory|not enough memory|std::bad_alloc|could not create a memory"
    "|CUDA[^:]*: out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
    "|MPS backend out of memory"
)


def ran_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


# The tensor that was lent last, by device.
_LENT: dict[torch.device, TensorWeakRef] = {}
_LOCK = Lock()


def lend(x: Tensor) -> None:
    """Lends the memory of `x` to the next call on its device, which frees it by `reclaim`."""
    with _LOCK:
        _free(_LENT.pop(x.device, None))
        _LENT[x.device] = TensorWeakRef(x)


def reclaim(device: torch.device) -> None:
    """Frees the memory that was lent last on a device, if it is still lent."""
    with _LOCK:
        _free(_LENT.pop(device, None))


@contextmanager
def borrowed(x: Tensor) -> Iterator[bool]:
    """True if `x` still has its memory; no other thread takes it within the block."""
    with _LOCK:
        lent, is_there = _LENT.pop(x.device, None), x.untyped_storage().size() > 0
    try:
        yield is_there
    finally:
        with _LOCK:
            if lent is not None:
                _LENT.setdefault(x.device, lent)


def _free(lent: TensorWeakRef | None) -> None:
    x = None if lent is None else lent()
    # Memory that is not the allocator's cannot be given back to it.
    if x is not None and x.untyped_storage().resizable():
        x.untyped_storage().resize_(0)

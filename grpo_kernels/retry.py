"""A pass made again, with fewer rows at a time, where memory runs out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from .row_plan import RowPlan

_T = TypeVar("_T")
# Fewer rows than these at a time are not tried.
_LEAST_ROWS = 16
# What says so that is no OutOfMemoryError: torch on a CPU (Windows' too), oneDNN within it, CUDA's
# own calls (Triton's as well), cuBLAS, and Metal.
_NO_MEMORY = re.compile(
    "can't allocate memory|not enough memory|std::bad_alloc|could not create a memory"
    "|CUDA[^:]*: out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
    "|MPS backend out of memory"
)


def with_fewer_rows(
    run: Callable[[RowPlan], _T],
    plan: RowPlan,
    *,
    fixed: bool,
    multiple: int,
) -> _T:
    """Runs `run(plan)`; on out-of-memory halves the rows per chunk and tries again.

    `fixed`: not so, with a budget of the caller's own, where other ranks wait, or in the capture of
    a graph. `multiple`: of rows, of which no fewer are tried.
    """
    first, least = plan, max(multiple, _LEAST_ROWS)
    while True:
        try:
            found = run(plan)
            break
        except Exception as error:
            if fixed or plan.logit_rows <= least or not ran_out_of_memory(error):
                raise
        # When the error no longer holds what the run had. Not all that asks is torch's allocator.
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        plan = plan.halved(least)
    if plan is not first:
        rows, of_logits, of_gradients = plan.logit_rows, *plan.row_bytes
        taken = rows * of_logits + min(plan.max_chunk_rows, plan.largest_chunk) * of_gradients
        warnings.warn(
            f"memory ran out over the head, which took {rows} rows of logits at a time instead; "
            f"the result is the same. With chunk_bytes={taken} it begins so, and keeps to that",
            stacklevel=2,
        )
    return found


def ran_out_of_memory(error: BaseException) -> bool:
    """True if `error` means out of memory, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))

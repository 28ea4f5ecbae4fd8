"""The plan of rows: which take part in a call, in what order, and how many at a time.

Rows are put in order once: those that have a gradient, then those that only need a log-prob;
masked rows take no part. They are then worked through in chunks whose logits fit a byte budget,
so that the workspace depends on the vocabulary and the budget, never on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import ValueChecks

_CPU_CHUNK_BYTES = (16 << 20, 160 << 20)
_GPU_CHUNK_BYTES = 1536 << 20
# GEMMs on a GPU take rows in tiles of this many.
ROW_MULTIPLE = 128


@dataclass(frozen=True)
class Chunk:
    """Some rows of the caller's tensors: a slice where they lie together, else their ids."""

    index: slice | Tensor
    size: int
    needs_grad: bool


@dataclass(frozen=True)
class RowPlan:
    """The rows of one call, those with a gradient first. `order` None: all rows as they lie."""

    order: Tensor | None
    num_grad_rows: int
    num_rows: int
    max_chunk_rows: int

    def chunks(self) -> Iterator[Chunk]:
        """The rows, chunk by chunk; no chunk mixes rows with and without a gradient."""
        yield from self._split(0, self.num_grad_rows, True)
        yield from self._split(self.num_grad_rows, self.num_rows, False)

    def _split(self, begin: int, end: int, needs_grad: bool) -> Iterator[Chunk]:
        count = end - begin
        if count <= 0:
            return
        # As many rows in each chunk: a short last one would waste its pass over the weight.
        num_chunks = -(-count // self.max_chunk_rows)
        step = -(-count // num_chunks)
        if self.max_chunk_rows % ROW_MULTIPLE == 0:
            step = -(-step // ROW_MULTIPLE) * ROW_MULTIPLE
        for start in range(begin, end, step):
            rows = slice(start, min(start + step, end))
            size = rows.stop - rows.start
            yield Chunk(rows if self.order is None else self.order[rows], size, needs_grad)

    @property
    def largest_chunk(self) -> int:
        """The rows of the largest chunk."""
        return max((chunk.size for chunk in self.chunks()), default=0)


def plan_rows(
    active: Tensor | None,
    with_grad: Tensor | None,
    checks: ValueChecks | None,
    *,
    num_tokens: int,
    weight: Tensor,
    chunk_bytes: int | None,
) -> RowPlan:
    """Plans the rows that are `active`, those `with_grad` first; bool `[N]`, None for all.

    Reads the row counts and the value checks in one transfer: the one time that a call waits for
    the device. Raises ValueError for the checks.
    """
    max_rows = _max_chunk_rows(weight, chunk_bytes)
    checks = checks or ValueChecks()
    if active is not None and with_grad is not None:
        with_grad = with_grad & active
    sums = [group.sum() for group in (active, with_grad) if group is not None]
    questions = checks.counts + sums
    answers = torch.stack(questions).tolist() if questions else []
    checks.raise_for(answers[: len(checks.counts)])
    sizes = iter(answers[len(checks.counts) :])
    num_rows = num_tokens if active is None else next(sizes)
    num_grad_rows = num_rows if with_grad is None else next(sizes)
    if num_rows == num_tokens and num_grad_rows in (0, num_tokens):
        return RowPlan(None, num_grad_rows, num_rows, max_rows)
    rank = torch.zeros(num_tokens, dtype=torch.uint8, device=weight.device)
    for group in (active, with_grad):
        if group is not None:
            rank += ~group
    return RowPlan(rank.argsort(stable=True)[:num_rows], num_grad_rows, num_rows, max_rows)


def default_chunk_bytes(weight: int, device_type: str, memory: int | None = None) -> int:
    """The byte budget for a head of so many elements, on a GPU of so many bytes of memory."""
    if device_type == "cuda":
        return _GPU_CHUNK_BYTES if memory is None else min(_GPU_CHUNK_BYTES, memory // 16)
    if device_type == "cpu":
        # A quarter of the weight's float32 gradient: H / 4 rows.
        least, most = _CPU_CHUNK_BYTES
        return max(least, min(most, weight))
    return _GPU_CHUNK_BYTES // 4


def _max_chunk_rows(weight: Tensor, chunk_bytes: int | None) -> int:
    device, memory = weight.device, None
    if chunk_bytes is None:
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        chunk_bytes = default_chunk_bytes(weight.numel(), device.type, memory)
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    if device.type == "cpu" or rows < ROW_MULTIPLE:
        return rows
    return rows // ROW_MULTIPLE * ROW_MULTIPLE

"""The plan of rows: which rows a call computes, in what order, and how many at a time.

Rows with a gradient come first, then rows that only need a log-prob; masked rows are skipped.
Chunks of rows fit a byte budget (`budget.py`): the workspace depends on the vocabulary and the
budget, not on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..base.checks import ValueChecks
from .budget import ROW_MULTIPLE, RowBytes, budget_of, buffer_rows


@dataclass(frozen=True)
class Chunk:
    """Some rows of the caller's tensors: a slice where they are contiguous, else their ids."""

    index: slice | Tensor
    size: int
    needs_grad: bool


@dataclass(frozen=True)
class RowPlan:
    """The rows of one call, with a gradient first.

    Buffers are sized by `num_tokens`: sizes that change with the mask fragment a GPU's memory.
    """

    order: Tensor | None  # the rows' ids; None: all rows in their order
    num_grad_rows: int
    num_rows: int
    max_chunk_rows: int  # rows whose gradients are multiplied at a time
    max_logit_rows: int  # rows whose logits are held at a time: a chunk, or a strip of one
    num_tokens: int  # all rows of the call, masked or not
    row_bytes: tuple[int, int] = (0, 0)  # logits, and their gradient unless it overwrites them
    budget: int = 0  # bytes of one model's buffers at their full size; 0: two models share them

    def chunks(self) -> Iterator[Chunk]:
        """The rows, chunk by chunk; no chunk mixes rows with and without a gradient."""
        for rows, needs_grad in self.chunk_slices():
            index = rows if self.order is None else self.order[rows]
            yield Chunk(index, rows.stop - rows.start, needs_grad)

    def chunk_slices(self) -> Iterator[tuple[slice, bool]]:
        """The chunks as slices of `order`, and whether they need a gradient."""
        for rows in even_slices(0, self.num_grad_rows, self.max_chunk_rows):
            yield rows, True
        for rows in even_slices(self.num_grad_rows, self.num_rows, self.max_chunk_rows):
            yield rows, False

    @property
    def largest_chunk(self) -> int:
        """The rows of the largest chunk."""
        return max(self.largest_of(needs_grad=x) for x in (False, True))

    def largest_of(self, *, needs_grad: bool) -> int:
        """The rows of the largest chunk of rows with a gradient, or without."""
        sizes = (rows.stop - rows.start for rows, x in self.chunk_slices() if x == needs_grad)
        return max(sizes, default=0)

    @property
    def is_one_chunk_with_grad(self) -> bool:
        return 0 < self.num_rows == self.num_grad_rows <= self.max_chunk_rows

    @property
    def logit_rows(self) -> int:
        """The rows of the buffer of logits."""
        return min(self.max_logit_rows, self.num_tokens) if self.num_rows else 0

    @property
    def gradient_buffer_rows(self) -> int:
        """The rows of the buffer of gradients; 0 where they overwrite the logits."""
        needed = self.num_grad_rows and self.row_bytes[1]
        return min(self.max_chunk_rows, self.num_tokens) if needed else 0

    @property
    def bytes_taken(self) -> int:
        logit_bytes, grad_bytes = self.row_bytes
        return self.logit_rows * logit_bytes + self.gradient_buffer_rows * grad_bytes

    def resized(self, weight: Tensor, row_bytes: RowBytes, chunk_bytes: int | None) -> RowPlan:
        """The same rows in chunks of another size."""
        chunk_rows, logit_rows = buffer_rows(weight, row_bytes, chunk_bytes)
        return replace(
            self, max_chunk_rows=chunk_rows, max_logit_rows=logit_rows, row_bytes=row_bytes.parts,
            budget=budget_of(weight, row_bytes, chunk_bytes),
        )  # fmt: skip

    def halved(self, min_rows: int = 1) -> RowPlan:
        """Half as many rows at a time, but not fewer than `min_rows`."""
        most, logit_rows = (
            max(min_rows, min(rows, self.largest_chunk) // 2)
            for rows in (self.max_chunk_rows, self.max_logit_rows)
        )
        budget = self.budget // 2
        return replace(self, max_chunk_rows=most, max_logit_rows=logit_rows, budget=budget)


def slices(begin: int, end: int, step: int) -> Iterator[slice]:
    """Splits a range into slices of `step`; the last may be shorter."""
    for start in range(begin, end, step):
        yield slice(start, min(start + step, end))


def even_slices(begin: int, end: int, most: int) -> Iterator[slice]:
    """Splits a range into slices of about equal size, at most `most`, as a short last slice would
    waste a pass over the weight. Sizes are multiples of 128 if `most` is.
    """
    return slices(begin, end, _even_step(end - begin, most))


def _even_step(count: int, most: int) -> int:
    step = -(-count // max(1, -(-count // most)))
    return max(1, -(-step // ROW_MULTIPLE) * ROW_MULTIPLE if most % ROW_MULTIPLE == 0 else step)


def plan_rows(
    active: Tensor | None,
    with_grad: Tensor | None,
    checks: ValueChecks,
    weight: Tensor,
    num_tokens: int,
    row_bytes: RowBytes,
    chunk_bytes: int | None,
) -> RowPlan:
    """Plans the rows that are `active`, rows `with_grad` first; bool `[N]`, None for all.

    Reads the row counts and the value checks in the call's one transfer. Raises ValueError for the
    checks.
    """
    active_grad = with_grad if active is None or with_grad is None else with_grad & active
    counts = iter(checks.read(*(x.sum() for x in (active, active_grad) if x is not None)))
    num_rows = num_tokens if active is None else next(counts)
    num_grad_rows = num_rows if active_grad is None else next(counts)
    order = order_of(active, active_grad, num_tokens, num_rows, num_grad_rows, weight.device)
    return RowPlan(
        order, num_grad_rows, num_rows, *buffer_rows(weight, row_bytes, chunk_bytes), num_tokens,
        row_bytes=row_bytes.parts,
        budget=budget_of(weight, row_bytes, chunk_bytes) if row_bytes.models == 1 else 0,
    )  # fmt: skip


def order_of(
    active: Tensor | None, with_grad: Tensor | None, num_tokens: int, num_rows: int,
    num_grad_rows: int, device: torch.device,
) -> Tensor | None:  # fmt: skip
    """The ids of the active rows, with a gradient first; None: all rows in their order."""
    if num_rows == num_tokens and num_grad_rows in (0, num_tokens):
        return None
    rank = torch.zeros(num_tokens, dtype=torch.uint8, device=device)
    for group in (active, with_grad):
        if group is not None:
            rank += ~group
    return rank.argsort(stable=True)[:num_rows]

"""The byte budget of a call for logits and their gradients, and the rows that fit it.

On a GPU, and where gradients are in half precision, a chunk's logits are made a strip at a time.
Most of the budget then holds gradients: the more rows a GEMM multiplies, the less often the
weight's gradient is read and written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# 512 rows of logits keep a CPU's GEMMs at their speed, and the traffic of dW small.
_CPU_CHUNK_ROWS, _CPU_CHUNK_BYTES = 512, 320 << 20
# More buys little time. On a card of 24 GB a share of 1/32 holds a step to what TRL's head takes.
_GPU_CHUNK_BYTES, _GPU_SHARE = 1792 << 20, 32
# GEMMs on a GPU take rows in tiles of this many.
ROW_MULTIPLE = 128
# Strips of logits: beyond, a GPU is full of the tiles of a vocabulary.
_MOST_STRIP_BYTES = 640 << 20
# Rows that a multiprocessor sweeps at a time: programs of 256 threads with 48 registers each.
SWEPT_ROWS_PER_SM = 5


class RowBytes(NamedTuple):
    """The bytes that a row takes of the budget."""

    columns: int  # of a row of logits
    grad_bytes: int = 0  # per entry of the logits' gradient; 0 where it overwrites the logits
    strips: bool = False  # a chunk's logits are made and used a few rows at a time
    models: int = 1  # whose logits are held at a time

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of a row's logits, and of their gradient."""
        return 4 * self.models * self.columns, self.grad_bytes * self.columns


def default_chunk_bytes(V: int, device_type: str, memory: int | None = None) -> int:
    """The byte budget for a vocabulary, on a GPU of so many bytes of memory."""
    if device_type == "cuda":
        return _GPU_CHUNK_BYTES if memory is None else min(_GPU_CHUNK_BYTES, memory // _GPU_SHARE)
    if device_type == "cpu":
        return min(_CPU_CHUNK_BYTES, _CPU_CHUNK_ROWS * 4 * V)
    return _GPU_CHUNK_BYTES // 4


def gpu(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def budget_of(weight: Tensor, row_bytes: RowBytes, chunk_bytes: int | None) -> int:
    """The bytes for all buffers of a call, `chunk_bytes` or the device's default."""
    if chunk_bytes is not None:
        return chunk_bytes
    device = weight.device
    memory = gpu(device).total_memory if device.type == "cuda" else None
    return row_bytes.models * default_chunk_bytes(row_bytes.columns, device.type, memory)


def block_bytes(taken: int, budget: int) -> int:
    """The size of the block of memory for buffers of `taken` bytes.

    A GPU's allocator reuses a block for a request of its size; from a larger one it cuts a piece,
    and the tensors that it puts into the rest outlive the call. So a call takes the budget, a
    quarter of it, or a quarter of that, whatever its tokens are.
    """
    if not 0 < taken <= budget:
        return taken
    while 4 * taken <= budget:
        budget //= 4
    return budget


def buffer_rows(weight: Tensor, row_bytes: RowBytes, chunk_bytes: int | None) -> tuple[int, int]:
    """The rows whose gradients, and those whose logits, fit the budget together.

    `chunk_bytes` None: the device's budget.
    """
    logit_bytes, grad_bytes = row_bytes.parts
    chunk_bytes = budget_of(weight, row_bytes, chunk_bytes)
    bytes_per_row = logit_bytes + grad_bytes
    least = 1 if weight.device.type == "cpu" else ROW_MULTIPLE
    if row_bytes.strips and grad_bytes and chunk_bytes >= least * bytes_per_row:
        cuda = weight.device.type == "cuda"
        sms = gpu(weight.device).multi_processor_count if cuda else 1
        strip = strip_rows(chunk_bytes, logit_bytes, least, sms)
        rows = (chunk_bytes - logit_bytes * strip) // grad_bytes
        return rows // least * least, strip
    rows = max(1, chunk_bytes // bytes_per_row)
    if rows >= least:
        rows = rows // least * least
    return rows, rows


def strip_rows(chunk_bytes: int, row_bytes: int, least: int, sms: int) -> int:
    """The rows of a strip of logits, a multiple of `least`, on so many multiprocessors."""
    # A quarter of the budget at most: the rest is worth more as gradients.
    rows = min(chunk_bytes // 4, _MOST_STRIP_BYTES) // row_bytes
    # Whole waves of the sweep's programs: a part of one would leave most of the GPU idle.
    wave = SWEPT_ROWS_PER_SM * sms
    # A GEMM of 128 rows takes as long to read the weight as to multiply.
    fewest = 2 * least if 5 * least * row_bytes < chunk_bytes else least
    return max((rows // wave * wave or rows) // least * least, fewest)

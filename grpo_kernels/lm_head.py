"""Planning and the heavy products: which rows, how many at a time, and three GEMMs in fp32.

Rows are put in order once: those that have a gradient, then those that only need a log-prob;
masked rows take no part. They are then worked through in chunks whose logits fit a byte budget,
so that the workspace depends on the vocabulary and the budget, never on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import ValueChecks

_CPU_CHUNK_BYTES = (16 << 20, 160 << 20)
_GPU_CHUNK_BYTES = 1536 << 20
_ROW_MULTIPLE = 128
_ROWS_OF_MEAN = 4096
# How many logits of a row a CPU's GEMM makes at a time, for each thread: over the whole vocabulary
# it takes up to a fifth longer.
_CPU_COLUMNS_PER_THREAD = 768
# How much of W is upcast at a time where the GEMM cannot take its own dtype.
_CPU_UPCAST_BYTES = 16 << 20
_GPU_UPCAST_BYTES = 256 << 20
# How much of W is gathered at a time, row by row.
_CPU_GATHER_BYTES = 2 << 20
_GPU_GATHER_BYTES = 128 << 20


# `inner [N, r]` and `outer [V, r]`: the logits are `hidden @ weight.T + inner @ outer.T`.
LowRank = tuple[Tensor, Tensor]


class Chunk(NamedTuple):
    """Some rows of the caller's tensors: a slice when they lie together, else their ids."""

    rows: slice | Tensor
    size: int
    needs_grad: bool

    def part(self, rows: slice) -> Chunk:
        """Some of them, counted from the first."""
        if isinstance(self.rows, slice):
            first = self.rows.start
            return Chunk(slice(first + rows.start, first + rows.stop), rows.stop - rows.start, True)
        return Chunk(self.rows[rows], rows.stop - rows.start, True)


@dataclass(frozen=True)
class RowPlan:
    """The rows of one call, those with a gradient first. `order` None: all rows as they lie."""

    order: Tensor | None
    num_grad_rows: int
    num_rows: int
    max_chunk_rows: int

    def chunks(self) -> Iterator[Chunk]:
        yield from self._split(0, self.num_grad_rows, True)
        yield from self._split(self.num_grad_rows, self.num_rows, False)

    def _split(self, begin: int, end: int, needs_grad: bool) -> Iterator[Chunk]:
        count = end - begin
        if count <= 0:
            return
        # As many rows in each chunk: a short last one would waste its pass over the weight.
        num_chunks = -(-count // self.max_chunk_rows)
        step = -(-count // num_chunks)
        if self.max_chunk_rows % _ROW_MULTIPLE == 0:
            # What the tiles of a GPU's GEMMs divide.
            step = -(-step // _ROW_MULTIPLE) * _ROW_MULTIPLE
        for start in range(begin, end, step):
            rows = slice(start, min(start + step, end))
            size = rows.stop - rows.start
            yield Chunk(rows if self.order is None else self.order[rows], size, needs_grad)

    def mean_of(self, hidden: Tensor) -> Tensor:
        """The mean of some rows that have a gradient, `[H]`, float32."""
        some = slice(0, min(self.num_grad_rows, _ROWS_OF_MEAN))
        rows = hidden[some if self.order is None else self.order[some]]
        return rows.sum(0, dtype=torch.float32) / max(1, len(rows))

    @property
    def largest_chunk(self) -> int:
        return max((chunk.size for chunk in self.chunks()), default=0)


def plan_rows(
    wanted: Tensor | None,
    with_grad: Tensor | None,
    checks: ValueChecks,
    *,
    num_tokens: int,
    weight: Tensor,
    chunk_bytes: int | None,
) -> RowPlan:
    """Plans for the rows `wanted` (bool `[N]`; None: all), of them first those `with_grad`.

    Reads the row counts and the value checks in one transfer: the one time that a call waits for
    the device. Raises ValueError for the checks.
    """
    max_rows = _max_chunk_rows(weight, chunk_bytes)
    if wanted is not None and with_grad is not None:
        with_grad = with_grad & wanted
    sums = [group.sum() for group in (wanted, with_grad) if group is not None]
    questions = checks.counts + sums
    answers = torch.stack(questions).tolist() if questions else []
    checks.raise_for(answers[: len(checks.counts)])
    sizes = iter(answers[len(checks.counts) :])
    num_rows = num_tokens if wanted is None else next(sizes)
    num_grad_rows = num_rows if with_grad is None else next(sizes)
    if num_rows == num_tokens and num_grad_rows in (0, num_tokens):
        return RowPlan(None, num_grad_rows, num_rows, max_rows)
    rank = torch.zeros(num_tokens, dtype=torch.uint8, device=weight.device)
    for group in (wanted, with_grad):
        if group is not None:
            rank += ~group
    return RowPlan(rank.argsort(stable=True)[:num_rows], num_grad_rows, num_rows, max_rows)


def default_chunk_bytes(weight: int, device_type: str, memory: int | None = None) -> int:
    """For a head of so many elements, and a GPU of so many bytes of memory."""
    if device_type == "cuda":
        return _GPU_CHUNK_BYTES if memory is None else min(_GPU_CHUNK_BYTES, memory // 16)
    if device_type == "cpu":
        # A quarter of what the gradient of the weight takes anyway: H / 4 rows.
        least, most = _CPU_CHUNK_BYTES
        return max(least, min(most, weight))
    return _GPU_CHUNK_BYTES // 4


def _max_chunk_rows(weight: Tensor, chunk_bytes: int | None) -> int:
    device, memory = weight.device, None
    if chunk_bytes is None:
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        chunk_bytes = default_chunk_bytes(weight.numel(), device.type, memory)
    elif isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise ValueError(f"chunk_bytes: expected a positive int, or None; got {chunk_bytes!r}")
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    if device.type == "cpu" or rows < _ROW_MULTIPLE:
        return rows
    return rows // _ROW_MULTIPLE * _ROW_MULTIPLE


def gemm_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the GEMMs' operands; they accumulate in, and return, float32 in any case.

    CUDA tensor cores take bf16 and fp16 operands and give float32. Elsewhere the result would be
    rounded to the operands' dtype, so they are upcast, a slice of the vocabulary at a time.
    Autocast asks for its dtype on CUDA; on a CPU it is ignored, to the result's benefit.
    """
    if hidden.device.type != "cuda" or torch.version.hip is not None:
        return torch.float32
    if torch.is_autocast_enabled("cuda"):
        autocast = torch.get_autocast_dtype("cuda")
        if autocast in (torch.bfloat16, torch.float16):
            return autocast
    return hidden.dtype if hidden.dtype == weight.dtype else torch.float32


class HeadRows(NamedTuple):
    """Some rows of what enters the head."""

    hidden: Tensor  # [C, H], in the dtype of the GEMMs' operands
    inner: Tensor | None  # [C, r], float32

    def at(self, rows: slice) -> HeadRows:
        return HeadRows(self.hidden[rows], None if self.inner is None else self.inner[rows])


class HeadChunks:
    """The linear head in chunks of rows: logits, and the gradients of what made them.

    Args:
        hidden: `[N, H]`; weight: `[V, H]`; both of any head dtype.
        dtype: of the GEMMs' operands, from `gemm_dtype`.
        max_rows: the most rows a chunk will have; sizes the one buffer of logits.
        low_rank: `inner [N, r]` and `outer [V, r]`, whose product is added to that of the others.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        dtype: torch.dtype,
        max_rows: int,
        low_rank: LowRank | None = None,
    ) -> None:
        self.hidden, self.dtype = hidden, dtype
        self.inner: Tensor | None = None
        self.outer: Tensor | None = None
        if low_rank is not None:
            self.inner, self.outer = low_rank
        self.V, self.H = weight.shape
        # Autocast narrows the weight once; the other way, float32 from bf16, goes by slices.
        narrows = dtype.itemsize < weight.dtype.itemsize
        self.weight = weight.to(dtype) if narrows else weight
        if 1 not in self.weight.stride():
            # No BLAS takes it: copied once here instead of in every GEMM.
            self.weight = self.weight.contiguous()
        row_length = -(-self.V // 64) * 64
        self._buffer = hidden.new_empty((max_rows, row_length), dtype=torch.float32)
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None
        self.d_inner: Tensor | None = None
        self.d_outer: Tensor | None = None
        self.sampled = False
        self._weight_written = False

    def want_gradients(
        self, wants: Sequence[bool], *, partial: bool, sampled: bool = False
    ) -> None:
        """Makes room for the gradients of hidden, weight, bias, inner, outer, as asked for.

        `partial`: not every row will be added; `sampled`: nor every column.
        """
        self.sampled = sampled
        hidden, weight, bias, inner, outer = wants
        empty, zeros = self.hidden.new_empty, self.hidden.new_zeros
        if hidden:
            self.d_hidden = (zeros if partial else empty)(self.hidden.shape)
        if weight:
            self.d_weight = (zeros if sampled else empty)((self.V, self.H), dtype=torch.float32)
            self._weight_written = sampled
        if bias:
            self.d_bias = zeros(self.V, dtype=torch.float32)
        if inner and self.inner is not None:
            self.d_inner = torch.zeros_like(self.inner)
        if outer and self.outer is not None:
            self.d_outer = zeros(self.outer.shape, dtype=torch.float32)

    def rows(self, chunk: Chunk) -> HeadRows:
        inner = None if self.inner is None else self.inner[chunk.rows].float()
        return HeadRows(self.hidden[chunk.rows].to(self.dtype), inner)

    def logits(self, rows: HeadRows) -> Tensor:
        """The rows' logits in float32 `[C, V]`; overwrites the logits of the last call."""
        out = self._buffer[: len(rows.hidden), : self.V]
        at_once = self.V
        if self.hidden.device.type == "cpu":
            at_once = _CPU_COLUMNS_PER_THREAD * torch.get_num_threads()
        for columns, weight in self._weight_slices(at_once):
            mm(rows.hidden, weight.t(), out=out[:, columns])
        if rows.inner is not None and self.outer is not None:
            # In float32: it costs little, and an adapter's steps are smaller than bf16's.
            addmm(out, rows.inner, self.outer.float().t())
        return out

    def logits_of(self, rows: HeadRows, ids: Tensor) -> Tensor:
        """The logits of some columns alone, float32 `[R, K]`, in memory of their own."""
        out = rows.hidden.new_empty((len(rows.hidden), len(ids)), dtype=torch.float32)
        for part in self.gathers(len(ids)):
            mm(rows.hidden, self.weight[ids[part]].to(self.dtype).t(), out=out[:, part])
        if rows.inner is not None and self.outer is not None:
            addmm(out, rows.inner, self.outer[ids].float().t())
        return out

    def d_logits_like(self, logits: Tensor) -> Tensor:
        """Room for the gradient of `logits`, on the same memory, in the operands' dtype.

        `logits`: some rows of what the method of that name returned.
        """
        first = (logits.storage_offset() - self._buffer.storage_offset()) // logits.stride(0)
        rows = slice(first, first + logits.shape[0])
        return self._buffer[rows].view(self.dtype)[:, : self.V]

    def add_gradients(self, chunk: Chunk, rows: HeadRows, d_logits: Tensor) -> None:
        """Adds the chunk's share of every gradient asked for."""
        if self.d_hidden is not None:
            d_rows = self.hidden.new_empty(rows.hidden.shape, dtype=torch.float32)
            for index, (columns, weight) in enumerate(self._weight_slices(self.V)):
                addmm(d_rows, d_logits[:, columns], weight, beta=float(index > 0))
            self.d_hidden[chunk.rows] = d_rows.to(self.d_hidden.dtype)
        if self.d_weight is not None:
            addmm(self.d_weight, d_logits.t(), rows.hidden, beta=float(self._weight_written))
            self._weight_written = True
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0, dtype=torch.float32)
        self.add_low_rank(chunk, rows, d_logits, None)

    def add_low_rank(
        self, chunk: Chunk, rows: HeadRows, d_logits: Tensor, ids: Tensor | None
    ) -> Tensor | None:
        """The share of inner and outer, from the gradient of all logits or of the columns `ids`.

        Of the latter it returns what is added to outer, `[K, r]`.
        """
        share = None
        if self.d_inner is not None and self.outer is not None:
            outer = (self.outer if ids is None else self.outer[ids]).to(self.dtype)
            d_rows = self.hidden.new_empty((len(d_logits), outer.shape[1]), dtype=torch.float32)
            mm(d_logits, outer, out=d_rows)
            self.d_inner[chunk.rows] = d_rows.to(self.d_inner.dtype)
        if self.d_outer is not None and rows.inner is not None:
            inner = rows.inner.to(self.dtype)
            if ids is None:
                addmm(self.d_outer, d_logits.t(), inner)
            else:
                share = self.d_outer.new_empty((len(ids), inner.shape[1]))
                mm(d_logits.t(), inner, out=share)
                self.d_outer.index_add_(0, ids, share)
        return share

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of hidden, weight, bias, inner and outer; None where not asked for.

        Those of hidden and inner in their dtype, the others in float32.
        """
        if self.d_weight is not None and not self._weight_written:
            self.d_weight.zero_()
        return self.d_hidden, self.d_weight, self.d_bias, self.d_inner, self.d_outer

    def gathers(self, count: int) -> Iterator[slice]:
        """As many rows of W as are gathered at a time, of `count`."""
        gather_bytes = _CPU_GATHER_BYTES if self.hidden.device.type == "cpu" else _GPU_GATHER_BYTES
        step = max(_ROW_MULTIPLE, gather_bytes // (4 * self.H) // _ROW_MULTIPLE * _ROW_MULTIPLE)
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))

    def mean_row(self) -> Tensor:
        """The mean row of W, float32 `[H]`, from enough of them, evenly spread."""
        rows = self.weight[:: max(1, self.V // _ROWS_OF_MEAN)]
        return rows.to(torch.float32).mean(0)

    def row_squares(self, centre: Tensor | None) -> Tensor:
        """The squared distance of each row of W from `centre [H]`, or from 0, float32 `[V]`."""
        squares = self.weight.new_empty((self.V, 1), dtype=torch.float32)
        at_once = self.V
        if self.weight.device.type == "cpu":
            at_once = max(1, _CPU_GATHER_BYTES // (4 * self.H))
        for rows, weight in self._weight_slices(at_once):
            part = squares[rows]
            part[:, 0] = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square_()
            if centre is not None:
                # |w - c|^2 = |w|^2 - 2 w.c + |c|^2, without a copy.
                rounded = centre.to(self.dtype)
                products = torch.empty_like(part)
                mm(weight, rounded[:, None], out=products)
                part += rounded.float().square().sum() - 2 * products
        return squares.clamp_(min=0.0).squeeze(1)

    def _weight_slices(self, at_once: int) -> Iterator[tuple[slice, Tensor]]:
        """W in the operands' dtype, at most so many rows at a time."""
        if self.weight.dtype != self.dtype:
            on_cpu = self.weight.device.type == "cpu"
            upcast_bytes = _CPU_UPCAST_BYTES if on_cpu else _GPU_UPCAST_BYTES
            at_once = min(at_once, max(1, upcast_bytes // (self.dtype.itemsize * self.H)))
        for start in range(0, self.V, at_once):
            columns = slice(start, min(start + at_once, self.V))
            yield columns, self.weight[columns].to(self.dtype)


def mm(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def addmm(acc: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0) -> None:
    """Acc <- beta * acc + a @ b, in the dtype of `acc`, which beta = 0 does not read."""
    if a.dtype == acc.dtype:
        torch.addmm(acc, a, b, beta=beta, out=acc)
    else:
        torch.addmm(acc, a, b, out_dtype=acc.dtype, beta=beta, out=acc)

"""The LM head, read-only: logits of rows and of columns, and GEMMs that accumulate in float32.

The operands of every GEMM share one dtype, `HeadCall.dtype`; results are float32 in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .backends import LogitTransform, TokenStats
from .head_call import HeadCall, HeadOperands
from .row_plan import ROW_MULTIPLE, even_slices, gpu, slices

# Columns of logits per thread in one GEMM on a CPU: over the whole vocabulary it takes up to a
# fifth longer.
_CPU_COLUMNS_PER_THREAD = 768
# Bytes of W upcast at a time where the GEMM cannot take W's own dtype.
_CPU_UPCAST_BYTES = 16 << 20
_GPU_UPCAST_BYTES = 256 << 20
# Bytes of W gathered at a time, row by row.
_CPU_GATHER_BYTES = 2 << 20
_GPU_GATHER_BYTES = 128 << 20
# Bytes of logits rounded at a time.
_ROUNDED_BYTES = 32 << 20


@dataclass(frozen=True)
class Rows:
    """Some rows of a head call."""

    index: slice | Tensor  # where they lie in the call's tensors
    hidden: Tensor  # [C, H], in the GEMMs' dtype
    lora_a_out: Tensor | None  # [C, r], float32
    targets: Tensor  # int64 [C]
    transform: LogitTransform
    here: Tensor | None = None  # bool [C], the targets among this rank's columns; None: all
    # Where C are the rows of all ranks: how many each has, and begin and end of this one's.
    of_ranks: tuple[int, ...] | None = None
    own: tuple[int, int | None] = (0, None)

    @property
    def mine(self) -> slice:
        """The rows of this rank."""
        return slice(*self.own)

    def at(self, part: slice) -> Rows:
        """Some of them, counted from the first."""
        index = self.index
        if self.of_ranks is not None:
            pass  # those of this rank alone, wherever the part lies
        elif isinstance(index, slice):
            index = slice(index.start + part.start, index.start + part.stop)
        else:
            index = index[part]
        a_out = None if self.lora_a_out is None else self.lora_a_out[part]
        here = None if self.here is None else self.here[part]
        return Rows(
            index, self.hidden[part], a_out, self.targets[part], self.transform.at(part), here
        )


class LMHead:
    """A linear head and the rows that enter it.

    Args:
        operands: of any head dtype.
        call: the rows' targets, the logits' transform and the dtype of the GEMMs' operands.
        max_rows: most rows whose logits are asked for at a time; sizes the one buffer of logits.
    """

    def __init__(self, operands: HeadOperands, call: HeadCall, max_rows: int) -> None:
        self.V, self.H = call.columns, operands.weight.shape[1]
        self.dtype, self.operands, self.call = call.dtype, operands, call
        # A GEMM that rounds its result is enough where nothing is added to that.
        in_gemm = call.rounding == call.dtype and operands.bias is None and self.lora_b is None
        self.buffer = self.new_rows(self.padded(max_rows), call.dtype if in_gemm else torch.float32)

    @cached_property
    def weight(self) -> Tensor:
        """W as the GEMMs take it."""
        weight = self.operands.weight[: self.V]
        # Autocast changes the weight's dtype once; float32 from bf16 goes by slices.
        if self.dtype.itemsize <= weight.dtype.itemsize:
            weight = weight.to(self.dtype)
        # No BLAS takes other strides: copied once here instead of in every GEMM.
        return weight if 1 in weight.stride() else weight.contiguous()

    @property
    def lora_b(self) -> Tensor | None:
        """The rows of `lora_b` that are words of the vocabulary."""
        lora_b = self.operands.lora_b
        return None if lora_b is None else lora_b[: self.V]

    def new_rows(self, count: int, dtype: torch.dtype) -> Tensor:
        """An empty buffer `[count, V]`; on a GPU rows begin where vectors do, whatever V is."""
        weight = self.operands.weight
        length = self.V if weight.device.type == "cpu" else -(-self.V // 64) * 64
        return weight.new_empty((count, length), dtype=dtype)[:, : self.V]

    def padded(self, count: int) -> int:
        """`count`, or what whole tiles of rows there are for it."""
        tile = self.call.tile
        return count if tile is None else -(-count // tile) * tile

    def tiles(self, count: int) -> Iterator[slice]:
        """Cuts `count` rows, padding included, into those of one GEMM each."""
        return slices(0, count, self.call.tile or max(count, 1))

    def strips(self, count: int) -> Iterator[slice]:
        """Cuts `count` rows into as many as have their logits in the buffer at a time."""
        return even_slices(0, count, len(self.buffer))

    def rows(self, index: slice | Tensor, of_ranks: tuple[int, ...] | None = None) -> Rows:
        """The rows `index` of the call, ready for the GEMMs.

        `of_ranks`: together with those of other ranks, which have so many.
        """
        a_out = self.operands.lora_a_out
        rows = Rows(
            index,
            self.operands.hidden[index],
            None if a_out is None else a_out[index].float(),
            self.call.targets[index],
            self.call.transform.at(index),
            None if self.call.here is None else self.call.here[index],
        )
        shard = self.call.shard
        if of_ranks is None or shard is None:
            return replace(rows, hidden=rows.hidden.to(self.dtype))
        begin, transform, a_out = sum(of_ranks[: shard.group.rank()]), rows.transform, None
        if isinstance(transform.temperature, Tensor):
            temperature = shard.gather_rows(transform.temperature, of_ranks)
            transform = replace(transform, temperature=temperature)
        if rows.lora_a_out is not None:
            a_out = shard.gather_rows(rows.lora_a_out, of_ranks)
        targets, here = shard.place(shard.gather_rows(rows.targets, of_ranks), self.V)
        return Rows(
            index, shard.gather_rows(rows.hidden, of_ranks).to(self.dtype), a_out, targets,
            transform, here,
            of_ranks, (begin, begin + len(rows.targets)),
        )  # fmt: skip

    def of_all(self, rows: Rows, x: Tensor) -> Tensor:
        """Values `[C]` of all of `rows`, from those of this rank's."""
        if rows.of_ranks is None or self.call.shard is None:
            return x
        return self.call.shard.gather_rows(x, rows.of_ranks)

    def whole(self, rows: Rows, stats: TokenStats) -> tuple[TokenStats, TokenStats]:
        """The statistics of whole rows, twice; where ranks share the vocabulary see `merge`."""
        if self.call.shard is None or rows.here is None:
            return stats, stats
        return self.call.shard.merge(stats, rows.here)

    def stats(self, rows: Rows, logits: Tensor, *, entropy: bool) -> tuple[TokenStats, TokenStats]:
        """The statistics of `rows`, from their raw logits `[C, V]`, as `whole` has them."""
        found = self.call.backend.token_stats(
            logits, rows.targets, rows.transform, entropy=entropy, invariant=bool(self.call.tile)
        )
        return self.whole(rows, found)

    def logits(self, rows: Rows) -> Tensor:
        """Raw logits `[C, V]`, in the buffer: valid until the next call.

        Rounded, and with their bias, where the call asks for rounded ones; else float32.
        """
        count = len(rows.hidden)
        out = self.buffer[: self.padded(count)]
        hidden = pad_rows(rows.hidden, len(out))
        at_once = self.V
        if out.device.type == "cpu":
            at_once = _CPU_COLUMNS_PER_THREAD * torch.get_num_threads()
        for columns, weight in self.weight_slices(at_once):
            for tile in self.tiles(len(out)):
                self._mm(hidden[tile], weight.t(), out=out[tile, columns])
        lora_b = self.lora_b
        if rows.lora_a_out is not None and lora_b is not None:
            a_out, lora_b = pad_rows(rows.lora_a_out, len(out)), lora_b.float()
            for tile in self.tiles(len(out)):
                # In float32: it costs little, and an adapter's steps are smaller than bf16's.
                addmm(out[tile], a_out[tile], lora_b.t())
        bias = self.operands.bias
        return self._rounded(out[:count], None if bias is None else bias[: self.V])

    def _rounded(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """Adds the bias and rounds, in place, where the call asks for rounded logits."""
        dtype = self.call.rounding
        if dtype is None or logits.dtype == dtype:
            return logits
        for rows in slices(0, len(logits), max(1, _ROUNDED_BYTES // (4 * self.V))):
            part = logits[rows]
            if bias is not None:
                part += bias
            round_(part, dtype)
        return logits

    def times_weight(self, d_logits: Tensor) -> Tensor:
        """`d_logits @ weight`, float32 `[C, H]`, from `[C, V]`; C rows are whole tiles."""
        out = d_logits.new_empty((len(d_logits), self.H), dtype=torch.float32)
        for index, (columns, weight) in enumerate(self.weight_slices(self.V)):
            for tile in self.tiles(len(out)):
                part = d_logits[tile, columns]
                self._addmm(out[tile], part, weight, beta=float(index > 0))
        return out

    def times_lora_b(self, d_logits: Tensor, lora_b: Tensor) -> Tensor:
        """`d_logits @ lora_b`, float32 `[C, r]`, from `[C, K]`."""
        out = d_logits.new_empty((len(d_logits), lora_b.shape[1]), dtype=torch.float32)
        lora_b = lora_b.to(d_logits.dtype)
        for tile in self.tiles(len(out)):
            mm(d_logits[tile], lora_b, out=out[tile])
        return out

    def _mm(self, a: Tensor, b: Tensor, *, out: Tensor) -> None:
        if self.call.matmul is None:
            mm(a, b, out=out)
        else:
            out.copy_(self.call.matmul(a, b))

    def _addmm(self, acc: Tensor, a: Tensor, b: Tensor, *, beta: float) -> None:
        if self.call.matmul is None:
            addmm(acc, a, b, beta=beta)
        elif beta:
            acc.add_(self.call.matmul(a, b))
        else:
            acc.copy_(self.call.matmul(a, b))

    def weight_slices(self, at_once: int) -> Iterator[tuple[slice, Tensor]]:
        """W in the GEMMs' dtype, at most so many rows at a time."""
        if self.weight.dtype != self.dtype:
            on_cpu = self.weight.device.type == "cpu"
            upcast_bytes = _CPU_UPCAST_BYTES if on_cpu else _GPU_UPCAST_BYTES
            at_once = min(at_once, max(1, upcast_bytes // (self.dtype.itemsize * self.H)))
        for columns in self.column_slices(at_once):
            yield columns, self.weight[columns].to(self.dtype)

    def column_slices(self, at_once: int | None = None) -> Iterator[slice]:
        """Cuts the vocabulary into slices that GEMMs take well, at most `at_once` long."""
        tail = _unaligned_columns(self.weight)
        aligned = self.V - tail
        for start in range(0, aligned, at_once or self.V):
            yield slice(start, min(start + (at_once or self.V), aligned))
        if tail:
            yield slice(aligned, self.V)

    def gathers(self, count: int) -> Iterator[slice]:
        """Cuts `count` rows of W into as many as are gathered at a time."""
        on_cpu = self.weight.device.type == "cpu"
        gather_bytes = _CPU_GATHER_BYTES if on_cpu else _GPU_GATHER_BYTES
        step = max(ROW_MULTIPLE, gather_bytes // (4 * self.H) // ROW_MULTIPLE * ROW_MULTIPLE)
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))


def _unaligned_columns(weight: Tensor) -> int:
    """The last columns of the logits that GEMMs take apart, for V is also a GEMM's inner size.

    Before Hopper tensor cores want inner sizes of which 8 is a factor, or take a slow kernel.
    """
    V = len(weight)
    if V % 8 == 0 or weight.device.type != "cuda" or weight.dtype == torch.float32:
        return 0
    return V % 64 if gpu(weight.device).major < 9 else 0


def pad_rows(x: Tensor, count: int) -> Tensor:
    """Adds rows of zeros to x, up to `count` in all."""
    missing = count - len(x)
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def round_(x: Tensor, dtype: torch.dtype) -> None:
    """Rounds float32 values to those of another dtype, in place."""
    x.copy_(x.to(dtype))


def mm(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """`out <- a @ b`, accumulated and stored in the dtype of `out`."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def addmm(acc: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0) -> None:
    """`acc <- beta * acc + a @ b`, in the dtype of `acc`, which beta = 0 does not read."""
    if a.dtype == acc.dtype:
        torch.addmm(acc, a, b, beta=beta, out=acc)
    else:
        torch.addmm(acc, a, b, out_dtype=acc.dtype, beta=beta, out=acc)

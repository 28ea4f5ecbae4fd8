"""GEMMs with rows of logits, operands of one dtype, results in float32; and sums of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.autograd import SplitSum
from .budget import ROW_MULTIPLE, block_bytes, gpu
from .row_plan import RowPlan, slices

# Rows of every GEMM of a batch-invariant call: little padding in the last one, and few reads of the
# weight.
INVARIANT_ROWS = 256
# Columns of logits per thread in one GEMM on a CPU: a GEMM of all takes up to a fifth longer.
_CPU_COLUMNS_PER_THREAD = 768
# Bytes of a matrix upcast at a time where the GEMM cannot take its own dtype.
_CPU_UPCAST_BYTES = 16 << 20
_GPU_UPCAST_BYTES = 256 << 20


def add_product(out: Tensor, a: Tensor, b: Tensor, *, beta: float, multiple: int) -> None:
    """`out <- beta out + a @ b`, each GEMM of `multiple` rows; 1: one GEMM of all.

    `a [C, J]`, `b [J, K]`, `out [C, K]`, C a multiple of `multiple`.
    """
    step = len(out) if multiple == 1 else multiple
    for part in slices(0, len(out), max(step, 1)):
        if len(b) == 1 and beta == 1.0:
            out[part].addr_(a[part, 0], b[0])  # exactly, where a GEMM may be TF32
        else:
            addmm(out[part], a[part], b, beta=beta)


def addmm(out: Tensor, a: Tensor, b: Tensor, *, beta: float) -> None:
    """`out <- beta out + a @ b`, in the dtype of `out`, which beta = 0 does not read."""
    if beta == 0.0:
        if a.dtype == out.dtype:
            torch.mm(a, b, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)


def as_operand(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as a GEMM takes it: cast once, except bf16 to float32, which goes by slices."""
    if dtype.itemsize <= weight.dtype.itemsize:
        weight = weight.to(dtype)
    # BLAS takes no other strides and would copy in every GEMM.
    return weight if 1 in weight.stride() else weight.contiguous()


def columns_at_once(y: Tensor) -> int:
    """The columns of logits that one GEMM makes, from rows of `y [V, K]`."""
    if y.device.type != "cpu":
        return len(y)
    return _CPU_COLUMNS_PER_THREAD * torch.get_num_threads()


def slices_of(y: Tensor, dtype: torch.dtype, at_once: int) -> Iterator[tuple[slice, Tensor]]:
    """`y [V, K]` in `dtype`, at most so many rows at a time."""
    if y.dtype != dtype:
        upcast_bytes = _CPU_UPCAST_BYTES if y.device.type == "cpu" else _GPU_UPCAST_BYTES
        at_once = min(at_once, max(1, upcast_bytes // (dtype.itemsize * max(1, y.shape[1]))))
    for columns in column_slices(y, at_once):
        yield columns, y[columns].to(dtype)


def column_slices(y: Tensor, at_once: int | None = None) -> Iterator[slice]:
    """Splits the vocabulary into slices that suit GEMMs, at most `at_once` long."""
    V, tail = len(y), _unaligned_columns(y)
    yield from slices(0, V - tail, at_once or max(V, 1))
    if tail:
        yield slice(V - tail, V)


def _unaligned_columns(y: Tensor) -> int:
    """The number of last columns that GEMMs take apart, as V is also a GEMM's inner size.

    Before Hopper, tensor cores need inner sizes that are multiples of 8, or take a slow kernel.
    """
    V = len(y)
    if V % 8 == 0 or y.device.type != "cuda" or y.dtype == torch.float32:
        return 0
    return V % 64 if gpu(y.device).major < 9 else 0


def pad_rows(x: Tensor, count: int) -> Tensor:
    """Adds rows of zeros to x, up to `count` in all."""
    missing = count - len(x)
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def new_buffers(
    like: Tensor, V: int, sizes: Sequence[tuple[int, torch.dtype]], budget: int = 0
) -> list[Tensor]:
    """Empty buffers `[rows, V]` of these dtypes in one block of memory, which lives as long as any.

    On a GPU rows are aligned for vector loads, whatever V is, and calls of the same budget share
    the block's size.
    """
    on_cpu = like.device.type == "cpu"
    length = V if on_cpu else -(-V // 64) * 64
    parts = [rows * length * dtype.itemsize for rows, dtype in sizes]
    taken = sum(parts)
    narrow = min((dtype for _, dtype in sizes), key=lambda x: x.itemsize)
    count = -(-(taken if on_cpu else block_bytes(taken, budget)) // narrow.itemsize)
    block = like.new_empty(count, dtype=narrow).view(torch.uint8)
    return [
        x.view(dtype).view(rows, length)[:, :V]
        for x, (rows, dtype) in zip(block[:taken].split(parts), sizes, strict=True)
    ]


class Gradients:
    """The gradients of a call's terms: x and y of each in turns.

    To be made after the chunks' buffers, a call's largest; otherwise a GPU's allocator would cut
    the gradients out of the buffers' memory. The ys' are made here, the xs', which are smaller,
    when first set.

    `rows` have a gradient; an x's other rows are 0. `dtype`: of the GEMMs' operands.
    """

    def __init__(
        self, tensors: Sequence[Tensor], needs_grad: Sequence[bool], rows: RowPlan,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.tensors, self.needs_grad = tensors, list(needs_grad)
        count = rows.num_grad_rows
        self.every_row = count == len(tensors[0])
        one_product = count == rows.largest_of(needs_grad=True)
        self.d_xs: dict[int, Tensor] = {}
        self.d_ys = {
            place: WeightGrad(y, one_product=one_product and y.dtype == dtype)
            for place, y in enumerate(tensors)
            if place % 2 and self.needs_grad[place] and count
        }

    def d_x(self, place: int) -> Tensor:
        """The gradient of an x, in its dtype."""
        if place not in self.d_xs:
            x = self.tensors[place]
            make = x.new_empty if self.every_row else x.new_zeros
            self.d_xs[place] = make(x.shape)
        return self.d_xs[place]

    def finalize(self) -> list[Tensor | SplitSum | None]:
        """All gradients: 0 where nothing was added, None where none is needed."""
        grads: dict[int, Any] = {place: x.finalize() for place, x in self.d_ys.items()}
        grads |= self.d_xs
        return [
            grads[place] if place in grads else torch.zeros_like(x) if needs_grad else None
            for place, (x, needs_grad) in enumerate(zip(self.tensors, self.needs_grad, strict=True))
        ]


class WeightGrad:
    """The gradient of a y `[V, K]`: products that are added up in float32, and rounded at the end.

    The sum for a bf16 y has two parts, each as large as y (`SplitSum`). All large tensors of a call
    except its buffers then have the weight's size, and a GPU's allocator can reuse their memory.
    `one_product`: one product of operands of y's dtype, which its GEMM rounds.
    """

    def __init__(self, y: Tensor, *, one_product: bool) -> None:
        V, K = y.shape
        self.beta = 0.0  # the factor of the sum so far
        self.rows = V  # of each part
        dtype = y.dtype if one_product else torch.float32
        if y.dtype != torch.bfloat16 or V < ROW_MULTIPLE:
            self.parts = [y.new_empty((V, K), dtype=dtype)]
            return
        half = -(-V // ROW_MULTIPLE) * ROW_MULTIPLE // 2  # where GEMMs begin well
        if one_product:
            self.parts = [y.new_empty((2 * half, K))[:V]]
        else:
            self.rows = half
            first, second = (y.new_empty((half, K), dtype=dtype) for _ in range(2))
            self.parts = [first, second[: V - half]]

    def __getitem__(self, columns: slice) -> Tensor:
        """The rows of some columns of logits, all in one part."""
        part, begin = divmod(columns.start, self.rows)
        return self.parts[part][begin : begin + columns.stop - columns.start]

    def finalize(self) -> Tensor | SplitSum:
        """The gradient; nothing may be added afterwards."""
        return self.parts[0] if len(self.parts) == 1 else SplitSum(*self.parts)


def put_rows(
    grad: Tensor, index: slice | Tensor, share: Tensor, factors: Tensor | None = None
) -> None:
    """Stores the gradient of some rows, times a factor per row, in the dtype of `grad`."""
    if isinstance(index, slice):
        if factors is None:
            grad[index].copy_(share)
        else:
            torch.mul(share, factors[:, None], out=grad[index])
    else:
        if factors is not None:
            share.mul_(factors[:, None])
        grad[index] = share.to(grad.dtype)

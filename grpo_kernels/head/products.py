"""GEMMs with rows of logits: operands of one dtype, results in float32; and the sums of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .budget import gpu
from .row_plan import slices

# Rows of every GEMM of a batch-invariant call: few lost in a call's last ones, and enough that the
# weight is not read, or packed, too often.
INVARIANT_ROWS = 256
# Columns of logits per thread in one GEMM on a CPU: over the whole vocabulary it takes up to a
# fifth longer.
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
    """The weight as products take it.

    Autocast changes its dtype once; float32 from bf16 goes by slices.
    """
    if dtype.itemsize <= weight.dtype.itemsize:
        weight = weight.to(dtype)
    # No BLAS takes other strides: copied once here instead of in every GEMM.
    return weight if 1 in weight.stride() else weight.contiguous()


def columns_at_once(y: Tensor) -> int:
    """The columns of logits that a product makes at a time, from rows of `y [V, K]`."""
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
    """Cuts the vocabulary into slices that GEMMs take well, at most `at_once` long."""
    V, tail = len(y), _unaligned_columns(y)
    yield from slices(0, V - tail, at_once or max(V, 1))
    if tail:
        yield slice(V - tail, V)


def _unaligned_columns(y: Tensor) -> int:
    """The last columns of the logits that GEMMs take apart, for V is also a GEMM's inner size.

    Before Hopper tensor cores want inner sizes of which 8 is a factor, or take a slow kernel.
    """
    V = len(y)
    if V % 8 == 0 or y.device.type != "cuda" or y.dtype == torch.float32:
        return 0
    return V % 64 if gpu(y.device).major < 9 else 0


def pad_rows(x: Tensor, count: int) -> Tensor:
    """Adds rows of zeros to x, up to `count` in all."""
    missing = count - len(x)
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def new_rows(like: Tensor, count: int, V: int, dtype: torch.dtype) -> Tensor:
    """An empty buffer `[count, V]`; on a GPU rows begin where vectors do, whatever V is."""
    length = V if like.device.type == "cpu" else -(-V // 64) * 64
    return like.new_empty((count, length), dtype=dtype)[:, :V]


class Gradients:
    """The gradients of a call's terms: x and y of each in turns, made when first added to.

    Args:
        tensors: x and y of each term.
        needs_grad: True for each tensor whose gradient is made.
        every_row: True if all rows of every x will be set; others are left 0.
        rounded: the dtype of operands whose one product is the whole gradient of a y: of the same
            dtype, it is rounded by its GEMM. None: products are added up in float32.
    """

    def __init__(
        self, tensors: Sequence[Tensor], needs_grad: Sequence[bool], *, every_row: bool,
        rounded: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.tensors, self.needs_grad = tensors, list(needs_grad)
        self.every_row, self.rounded = every_row, rounded
        self.grads: list[Tensor | None] = [None] * len(self.tensors)

    def d_x(self, place: int) -> Tensor:
        """The gradient of an x, in its dtype."""
        grad = self.grads[place]
        if grad is None:
            x = self.tensors[place]
            make = x.new_empty if self.every_row else x.new_zeros
            grad = self.grads[place] = make(x.shape)
        return grad

    def d_y(self, place: int) -> tuple[Tensor, float]:
        """The gradient of a y, mostly a float32 sum, and its factor: 0.0 at first."""
        grad = self.grads[place]
        if grad is not None:
            return grad, 1.0
        y = self.tensors[place]
        dtype = y.dtype if y.dtype == self.rounded else torch.float32
        grad = self.grads[place] = y.new_empty(y.shape, dtype=dtype)
        return grad, 0.0

    def finalize(self) -> list[Tensor | None]:
        """All of them, 0 where nothing was added and None where none is made."""
        return [
            x if x is not None or not needs_grad else torch.zeros_like(like)
            for x, needs_grad, like in zip(self.grads, self.needs_grad, self.tensors, strict=True)
        ]


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

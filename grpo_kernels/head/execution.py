"""`Execution`: how a call over a head is computed, apart from what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..base.checks import check_bool, check_choice
from ..kernels import BACKENDS


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The way a call is computed: results are the same up to rounding.

    Args:
        backend: `"auto"` (Triton on a GPU, torch on a CPU), `"triton"` or `"torch"`.
        chunk_bytes: budget of the buffers of logits and of their gradient, in bytes, which is kept
            to. None: on a CPU 512 rows of logits, at most 320 MiB; on a GPU 1.75 GiB, or 1/16 of
            its memory if that is less; and where memory runs out, the call is made again with half
            of it, down to 16 rows (256 if `batch_invariant`), and warns. Not so across ranks, with
            `capturable`, nor for tokens of a support.
        batch_invariant: log-prob, entropy and gradient of `hidden` of each token are the same bits
            whatever else is in the call, in whatever order and chunks: GEMMs over rows are of one
            shape, 256 rows, padded where there are fewer. The gradient of `weight` is a sum over
            tokens, which is as reproducible, and not invariant. Without a support.
        matmul: `matmul(a, b)`, a product of two matrices that takes the place of torch's where
            logits and the gradient of `hidden` are computed: that of a batch-invariant sampler,
            say. Its rounding is kept. LoRA and bias use torch's own. Without a support. None:
            `torch.mm`.
        capturable: reads nothing back from the device, as a CUDA graph needs: every row takes part,
            masked ones and those of advantage 0 too, at their cost, and values are checked by
            assertions on the device. Without a support.
        keep_gradients: in two passes over a frozen head, the forward keeps the gradient of each
            log-prob by `hidden`, `[N, H]` in its dtype, so that the backward has no GEMM. False:
            the backward makes the logits again, of rows that have a gradient: one GEMM more, and
            less work where most rows turn out to have none.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    backend: str = "auto"
    chunk_bytes: int | None = None
    batch_invariant: bool = False
    matmul: Callable[[Tensor, Tensor], Tensor] | None = None
    capturable: bool = False
    keep_gradients: bool = True

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKENDS)
        size = self.chunk_bytes
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"chunk_bytes: expected a positive int, or None; got {size!r}")
        check_bool("batch_invariant", self.batch_invariant)
        check_bool("capturable", self.capturable)
        check_bool("keep_gradients", self.keep_gradients)
        if self.matmul is not None and not callable(self.matmul):
            raise TypeError(
                f"matmul: expected a function of two tensors, or None; got {self.matmul!r}"
            )


def check_execution(execution: object) -> Execution:
    """Returns `execution`, or raises where it is none."""
    if not isinstance(execution, Execution):
        raise TypeError(f"execution: expected an Execution; got {execution!r}")
    return execution

"""`Execution`: how a call over a head is computed, apart from what it computes."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.checks import check_bool, check_choice, convert_numbers, suggests_names
from ..kernels import BACKENDS


@suggests_names
@dataclass(frozen=True, kw_only=True)
class Execution:
    """Backend, memory limit and reproducibility of a call; results agree up to rounding.

    Args:
        backend: `"auto"` (Triton on a GPU, torch on a CPU), `"triton"` or `"torch"`.
        chunk_bytes: memory limit of the buffers of logits and their gradient, in bytes. None: on a
            CPU 512 rows of logits, at most 320 MiB; on a GPU 1/32 of its memory, at most 1.75 GiB.
            A GPU call takes all of it, or a quarter of it if that is enough, and so on: blocks of
            few sizes, which PyTorch's allocator reuses. With None, a call that runs out of memory
            warns and retries with half, down to 16 rows (256 if `batch_invariant`); it does not
            retry on several ranks or with a support.
        batch_invariant: each token's log-prob, entropy and gradient of `hidden` have the same bits
            whatever the other tokens of the call, their order and the chunks: every GEMM has 256
            rows, padded if there are fewer. The gradient of `weight` is reproducible but not
            invariant. Does not work with a support.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    backend: str = "auto"
    chunk_bytes: int | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        convert_numbers(self)
        check_choice("backend", self.backend, BACKENDS)
        size = self.chunk_bytes
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"chunk_bytes: expected a positive int, or None; got {size!r}")
        check_bool("batch_invariant", self.batch_invariant)


def check_execution(execution: object) -> Execution:
    if not isinstance(execution, Execution):
        raise TypeError(f"execution: expected an Execution; got {execution!r}")
    return execution

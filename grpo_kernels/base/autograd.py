"""Helpers that the public calls and their autograd Functions share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

_Call = TypeVar("_Call", bound=Callable[..., Any])
_ROWS_AT_A_TIME = 4096


def eager_under_compile(call: _Call) -> _Call:
    """Has `torch.compile` break its graph at a public call, and trace nothing inside of it.

    A call is a loop of kernels and GEMMs whose lengths follow from the data: a compiler has nothing
    to add. This is `torch.compiler.disable` without its import, which takes a second.
    """
    untraced = torch._disable_dynamo(call)

    @functools.wraps(call)
    def public(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return untraced(*args, **kwargs)
        return call(*args, **kwargs)

    return cast(_Call, public)


def graph_is_retained() -> bool:
    """True in a backward under `retain_graph=True`, and where torch cannot tell."""
    keep_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keep_graph is None or bool(keep_graph())


def refuse_double_backward(call: str) -> None:
    """Raises in a backward under create_graph=True: only there is grad mode on. Call it first."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{call}: double backward is not supported (create_graph=True reached its backward): "
            "use grpo_kernels.reference, which is differentiable any number of times"
        )


def float16_scale(dtypes: Iterable[torch.dtype], largest: Callable[[], Tensor]) -> Tensor | None:
    """The power of two, 0-d, that brings `largest()` to between 1 and 2; None without a float16.

    A token's share of a mean is about 1 / N, soon too small for float16. A power of two is divided
    out again without losing digits.
    """
    if torch.float16 not in dtypes:
        return None
    # By the exponent's bits: torch.exp2 on CUDA is compiled in the first call of a process.
    exponent = largest().float().clamp(1e-30, 1e38).view(torch.int32) >> 23
    return ((254 - exponent) << 23).view(torch.float32)


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """`x * scale`; `x` where there is no scale."""
    return x if scale is None else x * scale


class SplitSum(NamedTuple):
    """A float32 sum in two parts, one row after the other, whose bf16 fits the first one's memory.

    A third tensor, made while both parts exist, would be cut out of the memory of the head's
    buffers, which then is too small for the next call's.
    """

    first: Tensor  # [R, K]
    second: Tensor  # [V - R, K], at most R rows

    def rounded(self, scale: Tensor | None, *, in_place: bool) -> Tensor:
        """`scale` times the sum, `[V, K]` in bf16, rounded once."""
        (rows, K), V = self.first.shape, len(self.first) + len(self.second)
        if not in_place:
            out = self.first.new_empty((V, K), dtype=torch.bfloat16)
            _scaled_into(out[:rows], self.first, scale)
        else:
            out = self.first.view(-1).view(torch.bfloat16)[: V * K].view(V, K)
            # Overwrites only sums that have been read: a few rows first, then more each time.
            done = -(-rows // 32)
            _scaled_into(out[:done], self.first[:done].clone(), scale)
            while done < rows:
                part = slice(done, min(2 * done, rows))
                _scaled_into(out[part], self.first[part], scale)
                done = part.stop
        _scaled_into(out[rows:], self.second, scale)
        return out


def scaled_gradient(
    stored: Tensor | SplitSum | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    *,
    fresh: bool = False,
) -> Tensor | None:
    """`scale * stored` in `dtype`, for a gradient that was computed in the forward.

    Scales `stored` in place, unless the caller retains the graph: a full card has no room for a
    second tensor of the head's size. `fresh`: `stored` was computed in this backward and is used
    once; only then may `scale` be None.
    """
    if stored is None:
        return None
    is_needed_again = not fresh and graph_is_retained()
    if isinstance(stored, SplitSum):
        return stored.rounded(scale, in_place=not is_needed_again)
    if scale is None:
        return stored.to(dtype)
    # On a CPU, reading the scale is cheaper than multiplying.
    if scale.device.type == "cpu" and scale == 1:
        return stored.to(dtype, copy=is_needed_again)
    if is_needed_again or (stored.dtype == torch.float32 != dtype):
        return _scaled_into(torch.empty_like(stored, dtype=dtype), stored, scale)
    return _scaled_into(stored, stored, scale).to(dtype)


def _scaled_into(out: Tensor, x: Tensor, scale: Tensor | None) -> Tensor:
    """Writes `x * scale`, computed in float32, to `out`."""
    if scale is None:
        return out.copy_(x)
    # A 0-d scale would be rounded to half precision first, an AMP scale of 65,536 to infinity.
    scale = scale.reshape(1)
    # A CPU copies to float32 before it multiplies.
    at_once = len(x) if x.is_cuda or x.dtype == torch.float32 else _ROWS_AT_A_TIME
    if at_once >= len(x):
        return torch.mul(x, scale, out=out)
    for part, source in zip(out.split(max(1, at_once)), x.split(max(1, at_once)), strict=True):
        torch.mul(source, scale, out=part)
    return out


def save_gradients(
    ctx: Any,
    tensors: Sequence[Tensor],
    scale: Tensor | None,
    gradients: Sequence[Tensor | SplitSum | None],
) -> None:
    """Saves a scalar loss's gradients by `tensors`, computed `scale` times as large."""
    parts = [x if isinstance(x, SplitSum) else (x,) for x in gradients]
    ctx.save_for_backward(scale, *chain(*parts))
    ctx.dtypes, ctx.num_parts = dtypes_of(*tensors), [len(x) for x in parts]


def saved_gradients(ctx: Any, d_loss: Tensor, call: str) -> Iterator[Tensor | None]:
    """The saved gradients times the loss's gradient; refuses a double backward."""
    refuse_double_backward(call)
    scale, *saved = ctx.saved_tensors
    factor, rest = d_loss if scale is None else d_loss / scale, iter(saved)
    for count, dtype in zip(ctx.num_parts, ctx.dtypes, strict=True):
        parts = [*islice(rest, count)]
        yield scaled_gradient(parts[0] if count == 1 else SplitSum(*parts), factor, dtype)


def dtypes_of(*tensors: Tensor | None) -> tuple[torch.dtype, ...]:
    """The dtype of each tensor; float32 stands in for None, which gets no gradient."""
    return tuple(torch.float32 if x is None else x.dtype for x in tensors)

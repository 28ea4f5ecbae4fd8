"""Sequences of tokens, where they end, sums over them, and tokens gathered from ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checks import INTEGERS, as_number, check_tensor, suggests_names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call's tokens: packed with `ids`, or padded to `length`."""

    count: int  # B
    ids: Tensor | None = None  # int64 [N], the sequence of each packed token, in [0, count)
    length: int | None = None  # T

    def sum(self, x: Tensor) -> Tensor:
        """Sums `x [..., N]` over each sequence, `[..., B]`.

        In float64 where there is one: a GPU adds packed tokens in any order, and rounding to
        float32 hides the differences.
        """
        dtype = wide_dtype(x)
        if self.ids is None:
            assert self.length is not None
            return x.unflatten(-1, (self.count, self.length)).sum(-1, dtype=dtype).to(x.dtype)
        total = x.new_zeros(*x.shape[:-1], self.count, dtype=dtype)
        return total.index_add_(-1, self.ids, x.to(dtype)).to(x.dtype)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """Gives every token its sequence's value, `[N]` from `[B]`."""
        if self.ids is None:
            assert self.length is not None
            return per_sequence.repeat_interleave(self.length)  # in memory of its own, always
        return per_sequence[self.ids]


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums over `x`: float64, or float32 on devices that have none."""
    return torch.float64 if x.device.type in ("cpu", "cuda", "meta") else torch.float32


def widened(x: Tensor) -> Tensor:
    """The tensor in the dtype of sums over it."""
    return x.to(wide_dtype(x))


@suggests_names
def completion_mask(token_ids: Tensor, end_ids: int | Iterable[int] | Tensor) -> Tensor:
    """Marks the tokens of completions up to the first end token, which counts.

    Equivalent PyTorch:

        ends = torch.isin(token_ids, end_ids).long()
        mask = (ends.cumsum(1) - ends == 0).long()

    What follows the first end token is padding, whatever its id: a tokenizer may pad with the end
    token, or have no pad token.

    Args:
        token_ids: completions without their prompts, integers `[B, T]`.
        end_ids: ids that end a completion, as `model.generation_config.eos_token_id` has them: one
            or several. A completion without any of them counts to its last token.

    Returns:
        The mask, int64 `[B, T]`, 1 or 0. No value is read from a GPU, and none is copied there.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    check_tensor("token_ids", token_ids, dtypes=INTEGERS)
    if token_ids.ndim != 2:
        raise ValueError(f"token_ids: expected shape [B, T]; got {list(token_ids.shape)}")
    if isinstance(end_ids, Tensor) and end_ids.device.type != "cpu":
        check_tensor("end_ids", end_ids, dtypes=INTEGERS, device=token_ids.device)
        ends = torch.isin(token_ids, end_ids)
    else:
        ends = torch.zeros_like(token_ids, dtype=torch.bool)
        for end in _as_ids(end_ids):
            ends |= token_ids == end
    return (ends.cumsum(1) - ends.long() == 0).long()


def _as_ids(ids: object) -> list[int]:
    """Python's integers from one or several."""
    numbers = ids.tolist() if hasattr(ids, "tolist") else ids
    values = [as_number(x) for x in (numbers if isinstance(numbers, Iterable) else [numbers])]
    if not all(type(x) is int for x in values):
        raise TypeError(f"end_ids: expected an int, or several; got {ids!r}")
    return values


def gather_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gathers the tokens of all ranks of a group, `[B, T]` from this rank's `[B, T_r]`.

    Equivalent PyTorch, if all T_r are the same:

        torch.cat(torch.distributed.nn.all_gather(x, group=group), dim=-1)

    but the gradient of `x` is this rank's slice of the result's gradient, not the sum of all
    ranks' slices. With the same loss on every rank, the ranks' gradients add up to the loss's.

    Args:
        x: `[B, T_r]` or `[N_r]`, floats, integers or bools: log-probs, ids, a mask. T_r may differ
            between ranks and may be 0; B and the dtype must not.
        group: a process group; tokens are joined in the order of its ranks. Every rank must call.
            The backward does not communicate.

    Returns:
        `[B, T]` or `[N]`, the same on all ranks; T is the sum of all T_r.

    Raises:
        TypeError: an argument that is no tensor, or no process group.
        ValueError: another number of dimensions; on all ranks, rows or dtypes that differ.
    """
    import torch.distributed as dist

    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor; got {type(x).__name__}")
    if x.ndim not in (1, 2):
        raise ValueError(f"x: expected shape [B, T] or [N]; got {list(x.shape)}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"x: expected real numbers or bools; got {x.dtype}")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: expected a torch.distributed process group that this rank is in; got {group!r}"
        )
    return _GatherTokens.apply(x, group)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        import torch.distributed as dist

        def gather(local: Tensor) -> list[Tensor]:
            # As bytes, for not every backend sends every dtype.
            sent = local.contiguous().view(torch.uint8)
            ranks = [torch.empty_like(sent) for _ in range(group.size())]
            dist.all_gather(ranks, sent, group=group)
            return [rank.view(local.dtype) for rank in ranks]

        rows, size = x.shape if x.ndim == 2 else (1, len(x))
        facts = [x.ndim, rows, _DTYPES.index(x.dtype), size]
        local = torch.tensor(facts, dtype=torch.int64, device=x.device)
        gathered = torch.stack(gather(local)).tolist()
        if any(row[:3] != gathered[0][:3] for row in gathered):
            raise ValueError(
                "x: expected the same rows, dimensions and dtype on all ranks; got "
                + ", ".join(f"{_shape(*row)} of {_DTYPES[row[2]]}" for row in gathered)
            )
        sizes = [row[3] for row in gathered]
        ctx.begin, ctx.size = sum(sizes[: group.rank()]), size
        padded = torch.nn.functional.pad(x.detach(), (0, max(sizes) - size))
        if not padded.numel():
            return x.new_empty(*x.shape[:-1], sum(sizes))
        parts = [part[..., :size] for part, size in zip(gather(padded), sizes, strict=True)]
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        return d_out.narrow(-1, ctx.begin, ctx.size), None


def _shape(ndim: int, rows: int, _: int, size: int) -> str:
    return str([rows, size] if ndim == 2 else [size])


def masked_quantile(x: Tensor, mask: Tensor, q: float) -> Tensor:
    """`torch.quantile(x[mask], q)`, 0-d, of any size and without reading the mask's count.

    0 if the mask has none.
    """
    if not x.numel():
        return x.new_zeros(())
    ordered = torch.where(mask != 0, x, torch.inf).sort().values
    count = mask.sum(dtype=wide_dtype(mask))
    position = q * (count - 1).clamp(min=0)
    below = position.floor()
    # Not ordered[below], which would read the index from the device.
    ends = ordered.index_select(0, torch.stack([below, position.ceil()]).long())
    quantile = torch.lerp(ends[0], ends[1], (position - below).to(x.dtype))
    return quantile.masked_fill(count == 0, 0.0)

"""The layout of tokens, padded `[B, T]` or packed `[N]`, and the checks of tensors and values.

Shapes, dtypes and devices are checked at once. Values (target ids, masks that are not 0 or 1,
`cu_seqlens`) live on the device, where reading them synchronizes; `ValueChecks` gathers those
questions, so that a call that reads its row counts anyway asks them in the same transfer, and a
call that reads nothing asserts them on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .config import check_number
from .sequences import Sequences

HEAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensor(
    name: str,
    x: object,
    *,
    shape: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Returns `x`, a tensor of this shape, one of these dtypes and on this device, or raises."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor; got {type(x).__name__}")
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {list(shape)}; got {list(x.shape)}")
    if dtypes is not None and x.dtype not in dtypes:
        expected = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        hint = (
            "; float64 is for grpo_kernels.reference"
            if x.dtype == torch.float64 and torch.float64 not in dtypes
            else ""
        )
        raise TypeError(
            f"{name}: expected dtype {expected}; got {str(x.dtype).removeprefix('torch.')}{hint}"
        )
    if device is not None and x.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}; got one on {x.device}")
    return x


def flatten(x: Tensor) -> Tensor:
    """Flattens to `[N]`, contiguous, as kernels address it: reshape may return a strided view."""
    return x.reshape(-1).contiguous()


@dataclass
class Sizes:
    """Whole numbers, int64 `[K]` on the device; `numbers` once they have been read."""

    on_device: Tensor
    numbers: list[int] = field(default_factory=list)


@dataclass
class ValueChecks:
    """Questions about values on the device: each a count of offenders and a message.

    And sizes that are wanted for their own sake.
    """

    counts: list[Tensor] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)

    def add(self, offenders: Tensor, message: str) -> None:
        self.counts.append(offenders.sum())
        self.messages.append(message)

    def ask(self, *sizes: Tensor) -> Sizes:
        """Sizes, 0-d or `[K]`, that are read together with the checks."""
        asked = Sizes(torch.cat([size.reshape(-1) for size in sizes]))
        self.sizes.append(asked)
        return asked

    def read(self, *further: Tensor) -> list[int]:
        """Reads all of it, and `further` 0-d counts, in one transfer; raises for offenders."""
        questions = [x.reshape(1) for x in (*self.counts, *further)]
        questions += [asked.on_device for asked in self.sizes]
        answers = iter(torch.cat(questions).tolist() if questions else ())
        for message in self.messages:
            if count := next(answers):
                raise ValueError(f"{message} ({count} of them)")
        of_further = [next(answers) for _ in further]
        for asked in self.sizes:
            asked.numbers = [next(answers) for _ in range(len(asked.on_device))]
        return of_further

    def check_without_sync(self) -> None:
        """Raises on a CPU; leaves a device-side assertion on a GPU, as torch's own gather does."""
        for count, message in zip(self.counts, self.messages, strict=True):
            if count.device.type != "cpu":
                torch._assert_async(count == 0, message)
            elif int(count):
                raise ValueError(f"{message} ({int(count)} of them)")


@dataclass(frozen=True)
class Layout:
    """The layout of the tokens: padded `[B, T]`, or packed `[N]` with or without sequences."""

    shape: torch.Size
    device: torch.device
    sequences: Sequences | None

    @property
    def num_tokens(self) -> int:
        return self.shape.numel()

    @staticmethod
    def of(name: str, x: Tensor, cu_seqlens: Tensor | None, checks: ValueChecks) -> Layout:
        """The layout of the token tensor `x`."""
        if x.ndim not in (1, 2):
            raise ValueError(
                f"{name}: expected shape [B, T] (padded) or [N] (packed); got {list(x.shape)}"
            )
        if cu_seqlens is None:
            if x.ndim == 1:
                return Layout(x.shape, x.device, None)
            B, T = x.shape
            ids = torch.arange(B, device=x.device).repeat_interleave(T, output_size=B * T)
            return Layout(x.shape, x.device, Sequences(ids, B))
        if x.ndim == 2:
            raise ValueError(
                "cu_seqlens: expected None with padded input [B, T], as it belongs to packed input "
                f"[N]; got a tensor with {name} of shape {list(x.shape)}"
            )
        check_tensor("cu_seqlens", cu_seqlens, dtypes=INTEGERS[:2], device=x.device)
        if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
            raise ValueError(f"cu_seqlens: expected shape [B + 1]; got {list(cu_seqlens.shape)}")
        N = x.shape[0]
        if N and cu_seqlens.numel() == 1:
            raise ValueError(f"cu_seqlens: expected to end at N = {N}; got no sequence at all")
        bounds = torch.stack([cu_seqlens[0], N - cu_seqlens[-1]]) != 0
        checks.add(
            torch.cat([bounds, cu_seqlens.diff() < 0]),
            f"cu_seqlens: expected to start at 0, never to decrease, and to end at N = {N}; "
            "got offsets that do not",
        )
        positions = torch.arange(N, device=x.device, dtype=cu_seqlens.dtype)
        ids = torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)
        count = cu_seqlens.numel() - 1
        return Layout(x.shape, x.device, Sequences(ids.clamp(max=max(count - 1, 0)), count))

    def flat(self, name: str, x: object, dtype: torch.dtype = torch.float32) -> Tensor:
        """Flattens a constant with one value per token to `[N]`."""
        x = check_tensor(name, x, shape=self.shape, dtypes=FLOATS, device=self.device)
        return flatten(x.detach()).to(dtype)

    def flat_mask(self, mask: Tensor | None, checks: ValueChecks) -> Tensor | None:
        """Flattens a mask to bool `[N]`; None when every token counts."""
        if mask is None:
            return None
        dtypes = (torch.bool, *INTEGERS, *FLOATS)
        mask = check_tensor("mask", mask, shape=self.shape, dtypes=dtypes, device=self.device)
        flat = flatten(mask.detach())
        if flat.dtype == torch.bool:
            return flat
        checks.add((flat != 0) & (flat != 1), "mask: expected 0 or 1; got other values")
        return flat != 0

    def flat_advantages(
        self, advantages: object, checks: ValueChecks, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Flattens `[B]`, `[B, T]` or `[N]` to `[N]`."""
        x = check_tensor("advantages", advantages, dtypes=FLOATS, device=self.device)
        x = x.detach().to(dtype)
        sequences = self.sequences
        if x.shape == self.shape:
            if len(self.shape) == 1 and sequences and sequences.count == self.num_tokens:
                checks.add(
                    sequences.ids != torch.arange(self.num_tokens, device=self.device),
                    f"advantages: expected {list(x.shape)} to be one per sequence or one per "
                    "token; got as many sequences as tokens, some of them empty, so that it may be "
                    "either: pass one per token with the empty sequences removed from cu_seqlens",
                )
            return flatten(x)
        if x.ndim == 1 and sequences and x.shape[0] == sequences.count:
            return sequences.spread(x)
        if len(self.shape) == 2:
            expected = f"[{self.shape[0]}] or {list(self.shape)}"
        elif sequences:
            expected = f"[{sequences.count}] (one per sequence) or {list(self.shape)}"
        else:
            expected = f"{list(self.shape)}, or one per sequence together with cu_seqlens"
        raise ValueError(f"advantages: expected shape {expected}; got {list(x.shape)}")

    def flat_temperature(
        self, temperature: float | Tensor, mask: Tensor | None, checks: ValueChecks
    ) -> float | Tensor:
        """Flattens the temperature to a number, or to float32 `[N]`; `mask` is flat."""
        if isinstance(temperature, Tensor):
            if temperature.requires_grad:
                raise ValueError("temperature: expected a constant; got a tensor requiring grad")
            if temperature.ndim == 0:
                temperature = temperature.expand(self.shape)
            flat = self.flat("temperature", temperature)
            invalid = ~(flat > 0)
            checks.add(
                invalid if mask is None else invalid & mask,
                "temperature: expected numbers > 0; got others",
            )
            return flat
        check_number("temperature", temperature)
        if temperature <= 0:
            raise ValueError(f"temperature: expected a number > 0; got {temperature}")
        return float(temperature)


def check_targets(targets: object, shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns the target ids as int64 `[N]`."""
    targets = check_tensor("targets", targets, shape=shape, dtypes=INTEGERS, device=device)
    return flatten(targets.detach()).long()


def check_target_ids(targets: Tensor, mask: Tensor | None, V: int, checks: ValueChecks) -> None:
    outside = targets != targets.clamp(0, V - 1)
    where = "" if mask is None else " at unmasked positions"
    checks.add(
        outside if mask is None else outside & mask,
        f"targets: expected ids in [0, {V}){where}; got ids outside",
    )


def to_device(x: Tensor, device: torch.device | str | None) -> Tensor:
    """Copies `x`, on a CPU, to `device`, without waiting for the device's work."""
    if device is None or torch.device(device).type != "cuda" or x.numel() == 0:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)

"""Layout of a call's tokens: padded or packed, and values per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import (
    FLOATS,
    INTEGERS,
    ValueChecks,
    check_tensor,
    flatten,
)
from .sequences import Sequences


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
            hint = ": of logits take selective_log_softmax(logits, targets)"
            raise ValueError(
                f"{name}: expected shape [B, T] (padded) or [N] (packed); got {list(x.shape)}"
                f"{hint if name == 'logps' and x.ndim == 3 else ''}"
            )
        if cu_seqlens is None:
            if x.ndim == 1:
                return Layout(x.shape, x.device, None)
            B, T = x.shape
            return Layout(x.shape, x.device, Sequences(B, length=T))
        if x.ndim == 2:
            raise ValueError(
                f"cu_seqlens does not work with padded input, {name} {list(x.shape)}: pass packed "
                "input [N], or no cu_seqlens"
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
        return Layout(x.shape, x.device, Sequences(count, ids.clamp(max=max(count - 1, 0))))

    def flat(self, name: str, x: object, dtype: torch.dtype = torch.float32) -> Tensor:
        """Flattens a constant with one value per token to `[N]`."""
        x = self._check_per_token(name, x, FLOATS)
        return flatten(x.detach()).to(dtype)

    def _check_per_token(self, name: str, x: object, dtypes: Sequence[torch.dtype]) -> Tensor:
        """Returns `x`, with one value per token, or says what it looks like instead."""
        x, shape = check_tensor(name, x), self.shape
        hint = ""
        if name == "mask" and len(shape) == 2 and x.shape == shape[:1]:
            hint = ": a value per sequence, as advantages are, is no mask"
        elif len(shape) == x.ndim == 2 and len(x) == shape[0] and x.shape[1] > shape[1] > 0:
            hint = f": cut it to the positions of the targets, {name}[:, -{shape[1]}:]"
        if hint:
            raise ValueError(f"{name}: expected shape {list(shape)}; got {list(x.shape)}{hint}")
        return check_tensor(name, x, shape=shape, dtypes=dtypes, device=self.device)

    def flat_mask(self, mask: Tensor | None, checks: ValueChecks) -> Tensor | None:
        """Flattens a mask to bool `[N]`; None when every token counts."""
        if mask is None:
            return None
        dtypes = (torch.bool, *INTEGERS, *FLOATS)
        mask = self._check_per_token("mask", mask, dtypes)
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
            ids = None if sequences is None else sequences.ids
            if sequences and ids is not None and len(ids) == sequences.count:
                checks.add(
                    ids != torch.arange(self.num_tokens, device=self.device),
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
        if not isinstance(temperature, Tensor):
            return float(temperature)
        if temperature.ndim == 0:
            temperature = temperature.expand(self.shape)
        flat = self.flat("temperature", temperature)
        float32 = torch.finfo(torch.float32)
        invalid = flat != flat.clamp(float32.tiny, float32.max)
        checks.add(
            invalid if mask is None else invalid & mask,
            "temperature: expected finite numbers > 0; got others",
        )
        return flat


def check_targets(
    targets: object, shape: Sequence[int], device: torch.device, states: str = "hidden"
) -> Tensor:
    """Returns the target ids as int64 `[N]`; `states` names the predicting tensor in errors."""
    if isinstance(targets, Tensor) and targets.shape[:-1] == shape[:-1] and targets.ndim:
        T, length, first = targets.shape[-1], shape[-1], ":, " * (targets.ndim - 1)
        hint = ""
        if 0 < T < length and (first or length - T == 1):
            cut = f"{states}[{first}-{T + 1}:-1]"
            hint = f": cut {states} to the positions that predict the targets, {cut}"
        elif 0 < length < T and first:
            hint = f": cut them to the ids that {states} predicts, targets[:, -{length}:]"
        if hint:
            raise ValueError(
                f"targets: expected shape {list(shape)}; got {list(targets.shape)}{hint}"
            )
    targets = check_tensor("targets", targets, shape=shape, dtypes=INTEGERS, device=device)
    return flatten(targets.detach()).long()


def check_target_ids(targets: Tensor, mask: Tensor | None, V: int, checks: ValueChecks) -> None:
    outside = targets != targets.clamp(0, V - 1)
    where = "" if mask is None else " at unmasked positions"
    checks.add(
        outside if mask is None else selected(mask, outside, False),
        f"targets: expected ids in [0, {V}){where}; got ids outside: mask these tokens",
    )


def selected(mask: Tensor, x: Tensor, otherwise: float) -> Tensor:
    """The rows of `x` in `mask`, and `otherwise` elsewhere."""
    return torch.where(mask if x.ndim == 1 else mask[:, None], x, otherwise)


def to_device(x: Tensor, device: torch.device | str | None) -> Tensor:
    """Copies `x`, on a CPU, to `device`, without waiting for the device's work."""
    if device is None or torch.device(device).type != "cuda" or x.numel() == 0:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)

"""What the caller gave, checked and flattened: padded `[B, T]` or packed `[N]` becomes `[N]`.

Shapes, dtypes and devices are checked at once. Values (target ids, masks that are not 0 or 1,
`cu_seqlens`) live on the device, where looking at them costs a synchronisation; `ValueChecks`
gathers those questions so that a call that reads its row counts anyway asks them in the same
transfer, and a call that reads nothing asserts them on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .config import GRPOLossConfig, check_number
from .objective import Sequences, TokenInputs, aggregation_weights, with_known_correction

HEAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str,
    x: object,
    *,
    shape: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """`x`, if it is a tensor of this shape, one of these dtypes, and on this device."""
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


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def flatten(x: Tensor) -> Tensor:
    """`[N]`, contiguous, as the kernels address it: reshape alone may return a strided view."""
    return x.reshape(-1).contiguous()


@dataclass
class ValueChecks:
    """Questions about values on the device: each a count of offenders and what to say of them."""

    counts: list[Tensor] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def add(self, offenders: Tensor, message: str) -> None:
        self.counts.append(offenders.sum())
        self.messages.append(message)

    def raise_for(self, counts: Sequence[int]) -> None:
        for count, message in zip(counts, self.messages, strict=True):
            if count:
                raise ValueError(f"{message} ({count} of them)")

    def check_without_sync(self) -> None:
        """On a CPU raises; on a GPU leaves a device-side assertion, as torch's own gather does."""
        for count, message in zip(self.counts, self.messages, strict=True):
            if count.device.type != "cpu":
                torch._assert_async(count == 0, message)
            elif int(count):
                raise ValueError(f"{message} ({int(count)} of them)")


@dataclass(frozen=True)
class Layout:
    """How the tokens lie: padded `[B, T]`, or packed `[N]` with or without known sequences."""

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
        check_tensor("cu_seqlens", cu_seqlens, dtypes=_INTEGERS[:2], device=x.device)
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
        """A constant of one value a token, `[N]`."""
        x = check_tensor(name, x, shape=self.shape, dtypes=_FLOATS, device=self.device)
        return flatten(x.detach()).to(dtype)

    def flat_mask(self, mask: Tensor | None, checks: ValueChecks) -> Tensor | None:
        """Bool `[N]`, or None when every token counts."""
        if mask is None:
            return None
        dtypes = (torch.bool, *_INTEGERS, *_FLOATS)
        mask = check_tensor("mask", mask, shape=self.shape, dtypes=dtypes, device=self.device)
        flat = flatten(mask.detach())
        if flat.dtype == torch.bool:
            return flat
        checks.add((flat != 0) & (flat != 1), "mask: expected 0 or 1; got other values")
        return flat != 0

    def flat_advantages(
        self, advantages: object, checks: ValueChecks, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """`[N]` from `[B]`, `[B, T]` or `[N]`."""
        x = check_tensor("advantages", advantages, dtypes=_FLOATS, device=self.device)
        x = x.detach().to(dtype)
        sequences = self.sequences
        if x.shape == self.shape:
            if len(self.shape) == 1 and sequences and sequences.count == self.num_tokens:
                checks.add(
                    sequences.ids != torch.arange(self.num_tokens, device=self.device),
                    f"advantages: expected no doubt whether {list(x.shape)} is one a sequence or "
                    "one a token; got as many sequences as tokens, some of them empty: pass one a "
                    "token with the empty sequences removed from cu_seqlens",
                )
            return flatten(x)
        if x.ndim == 1 and sequences and x.shape[0] == sequences.count:
            return sequences.spread(x)
        if len(self.shape) == 2:
            expected = f"[{self.shape[0]}] or {list(self.shape)}"
        elif sequences:
            expected = f"[{sequences.count}] (one a sequence) or {list(self.shape)}"
        else:
            expected = f"{list(self.shape)}, or one a sequence together with cu_seqlens"
        raise ValueError(f"advantages: expected shape {expected}; got {list(x.shape)}")

    def flat_temperature(
        self, temperature: float | Tensor, mask: Tensor | None, checks: ValueChecks
    ) -> float | Tensor:
        """A number, or float32 `[N]`; `mask` is flat."""
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


def flat_tokens(
    config: GRPOLossConfig,
    layout: Layout,
    checks: ValueChecks,
    advantages: object,
    mask: Tensor | None,
    *,
    num_items: float | Tensor | None,
    entropy_threshold: float | Tensor | None,
    dtype: torch.dtype = torch.float32,
    **constants: object,
) -> TokenInputs:
    """The constants of a policy loss, checked, flat, with the weight of every token.

    `constants`: `old_logps`, `ref_logps` and `sampling_logps`, None where not given.
    """
    if not isinstance(config, GRPOLossConfig):
        raise TypeError(f"config: expected a GRPOLossConfig; got {type(config).__name__}")
    if config.beta and constants["ref_logps"] is None:
        raise ValueError(
            f"ref_logps: expected the reference policy's log-probs, as config.beta = {config.beta}"
            "; got None"
        )
    if config.is_correction != "none" and constants["sampling_logps"] is None:
        raise ValueError(
            "sampling_logps: expected the sampler's log-probs, as config.is_correction = "
            f"{config.is_correction!r}; got None"
        )
    if config.needs_sequences and layout.sequences is None:
        raise ValueError(
            f"cu_seqlens: expected offsets [B + 1], as loss_type={config.loss_type!r} with these "
            "options tells sequences apart and the input is packed; got None"
        )
    num_items = _num_items(config, num_items, layout.device, checks)
    flat_mask = layout.flat_mask(mask, checks)
    if flat_mask is None:
        mask_float = torch.ones(layout.num_tokens, dtype=dtype, device=layout.device)
    else:
        mask_float = flat_mask.to(dtype)
    flat = {k: None if x is None else layout.flat(k, x, dtype) for k, x in constants.items()}
    inputs = TokenInputs(
        advantages=layout.flat_advantages(advantages, checks, dtype),
        weights=aggregation_weights(config, mask_float, layout.sequences, num_items),
        count=mask_float.sum(),
        mask=flat_mask,
        entropy_threshold=_entropy_threshold(config, entropy_threshold, mask_float, checks),
        sequences=layout.sequences,
        **flat,
    )
    return with_known_correction(config, inputs)


def _entropy_threshold(
    config: GRPOLossConfig, threshold: object, like: Tensor, checks: ValueChecks
) -> Tensor | None:
    if threshold is None:
        return None
    if config.top_entropy_quantile == 1.0:
        raise ValueError(
            "entropy_threshold: expected None, as config.top_entropy_quantile = 1.0 trains every "
            f"token; got {threshold!r}"
        )
    number = _scalar("entropy_threshold", threshold, like.device)
    if isinstance(number, Tensor):
        checks.add(number.isnan(), "entropy_threshold: expected a number; got NaN")
        return number.to(like.dtype)
    return torch.full((), number, dtype=like.dtype, device=like.device)


def _num_items(
    config: GRPOLossConfig, num_items: object, device: torch.device, checks: ValueChecks
) -> float | Tensor | None:
    if num_items is None:
        return None
    if config.average != "dapo":
        raise ValueError(
            "num_items: expected None, as only the 'dapo' average divides by it; got "
            f"{num_items!r} with loss_type={config.loss_type!r}"
        )
    number = _scalar("num_items", num_items, device)
    if isinstance(number, Tensor):
        checks.add(~(number >= 0), "num_items: expected a number >= 0; got another")
    elif number < 0:
        raise ValueError(f"num_items: expected a number >= 0; got {number}")
    return number


def _scalar(name: str, value: object, device: torch.device) -> float | Tensor:
    """A number, or a 0-d tensor on `device`; one on the CPU can be read without waiting."""
    if isinstance(value, Tensor):
        if value.ndim != 0:
            raise ValueError(f"{name}: expected a 0-d tensor; got shape {list(value.shape)}")
        if value.device == device:
            return value.detach()
        if value.device.type != "cpu":
            raise ValueError(f"{name}: expected a tensor on {device}; got one on {value.device}")
        value = value.item()
    check_number(name, value)
    assert isinstance(value, (int, float))
    return value


def check_head(
    hidden: object, weight: object, bias: object, softcap: object, logit_scale: object
) -> None:
    """A linear head: `hidden [..., H]`, `weight [V, H]`, `bias [V]`, on one device."""
    hidden = check_tensor("hidden", hidden, dtypes=HEAD_DTYPES)
    weight = check_tensor("weight", weight, dtypes=HEAD_DTYPES, device=hidden.device)
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if hasattr(x, "full_tensor"):
            raise TypeError(
                f"{name}: expected a plain tensor, whole; got a DTensor: call this inside the "
                f"wrapped module's forward, or pass {name}.full_tensor()"
            )
    if hidden.ndim not in (2, 3):
        raise ValueError(f"hidden: expected shape [B, T, H] or [N, H]; got {list(hidden.shape)}")
    if weight.ndim != 2 or weight.shape[0] < 1 or weight.shape[1] != hidden.shape[-1]:
        hint = (
            "; an empty weight is what ZeRO-3 shows outside the wrapped module's forward"
            if weight.numel() == 0
            else ""
        )
        raise ValueError(
            f"weight: expected shape [V, {hidden.shape[-1]}]; got {list(weight.shape)}{hint}"
        )
    if bias is not None:
        check_tensor("bias", bias, shape=weight.shape[:1], dtypes=HEAD_DTYPES, device=hidden.device)
    check_number("logit_scale", logit_scale)
    if softcap is not None:
        check_number("softcap", softcap)
        if softcap <= 0:  # type: ignore[operator]
            raise ValueError(f"softcap: expected a number > 0, or None; got {softcap}")


def check_low_rank(
    low_rank: object, hidden: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """`inner [N, r]` and `outer [V, r]`, or None twice."""
    if low_rank is None:
        return None, None
    if not isinstance(low_rank, (tuple, list)) or len(low_rank) != 2:
        raise TypeError(
            f"low_rank: expected a pair of tensors, inner and outer, or None; got {low_rank!r}"
        )
    inner, outer = (
        check_tensor(f"low_rank[{i}]", x, dtypes=HEAD_DTYPES, device=hidden.device)
        for i, x in enumerate(low_rank)
    )
    if outer.ndim != 2 or outer.shape[0] != weight.shape[0]:
        raise ValueError(
            f"low_rank[1]: expected shape [{weight.shape[0]}, r]; got {list(outer.shape)}"
        )
    expected = [*hidden.shape[:-1], outer.shape[1]]
    if list(inner.shape) != expected:
        raise ValueError(f"low_rank[0]: expected shape {expected}; got {list(inner.shape)}")
    return inner.reshape(-1, outer.shape[1]), outer


def check_targets(targets: object, shape: Sequence[int], device: torch.device) -> Tensor:
    """int64 `[N]`."""
    targets = check_tensor("targets", targets, shape=shape, dtypes=_INTEGERS, device=device)
    return flatten(targets.detach()).long()


def check_target_ids(targets: Tensor, mask: Tensor | None, V: int, checks: ValueChecks) -> None:
    outside = (targets < 0) | (targets >= V)
    where = "" if mask is None else " at unmasked positions"
    checks.add(
        outside if mask is None else outside & mask,
        f"targets: expected ids in [0, {V}){where}; got ids outside",
    )

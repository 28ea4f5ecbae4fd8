"""What comes into a call, checked once and flat: tokens, the head, and the constants of a loss."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from .backends import Backend, LogitTransform, select_backend
from .checks import FLOATS, HEAD_DTYPES, INTEGERS, ValueChecks, check_tensor, flatten, name_of
from .config import GRPOLossConfig, check_number
from .execution import Execution, check_execution
from .head import LMHead, Term
from .objective import LossInputs, aggregation_weights, with_known_weights
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
        if not isinstance(temperature, Tensor):
            return float(temperature)
        if temperature.ndim == 0:
            temperature = temperature.expand(self.shape)
        flat = self.flat("temperature", temperature)
        invalid = ~(flat > 0)
        checks.add(
            invalid if mask is None else invalid & mask,
            "temperature: expected numbers > 0; got others",
        )
        return flat


def check_targets(targets: object, shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns the target ids as int64 `[N]`."""
    targets = check_tensor("targets", targets, shape=shape, dtypes=INTEGERS, device=device)
    return flatten(targets.detach()).long()


def check_target_ids(targets: Tensor, mask: Tensor | None, V: int, checks: ValueChecks) -> None:
    outside = targets != targets.clamp(0, V - 1)
    where = "" if mask is None else " at unmasked positions"
    checks.add(
        outside if mask is None else selected(mask, outside, False),
        f"targets: expected ids in [0, {V}){where}; got ids outside",
    )


@dataclass(frozen=True)
class HeadCall:
    """A call over a head, checked and flat; `checks` are still to be read from the device."""

    terms: tuple[Term, ...]  # of the raw logits, the head's weight first
    targets: Tensor  # int64 [N]
    mask: Tensor | None  # bool [N], the tokens that take part; None: every token
    transform: LogitTransform
    layout: Layout
    checks: ValueChecks
    backend: Backend
    dtype: torch.dtype  # of the operands of GEMMs with the weight
    rounding: torch.dtype | None  # what raw logits are rounded to; None: they are float32
    head: LMHead
    execution: Execution

    @property
    def tensors(self) -> list[Tensor]:
        """The terms' tensors, x and y in turns."""
        return [tensor for term in self.terms for tensor in term]

    def of(self, tensors: Sequence[Tensor]) -> HeadCall:
        """The same call on `tensors`, as an autograd Function gets them."""
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return replace(self, terms=tuple(Term(x, y) for x, y in pairs))

    def without_tensors(self) -> HeadCall:
        """The same call to be kept for the backward, without what has a graph."""
        return replace(self, terms=(), head=None)  # type: ignore[arg-type]

    def wants_grad(self) -> list[bool]:
        """True for each of `tensors` whose gradient the current call is to prepare."""
        enabled = torch.is_grad_enabled()
        return [enabled and x.requires_grad for x in self.tensors]


def head_call(
    hidden: Tensor,
    head: Tensor | LMHead,
    targets: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    execution: Execution,
) -> HeadCall:
    """Checks and flattens the arguments that all calls over a head share."""
    check_execution(execution)
    head = _checked_head(hidden, head)
    backend = select_backend(execution.backend, hidden.device)
    flat_targets = check_targets(targets, hidden.shape[:-1], hidden.device)
    checks = ValueChecks()
    layout = Layout.of("targets", targets, cu_seqlens, checks)
    flat_mask = layout.flat_mask(mask, checks)
    temperature = layout.flat_temperature(head.temperature, flat_mask, checks)
    terms = head.terms(hidden)
    if execution.capturable and flat_mask is not None:
        # Masked rows take part, and may hold anything but for the ones of a bias.
        of_states = 1 + (head.low_rank is not None)
        clean = (Term(selected(flat_mask, x, 0), y) for x, y in terms[:of_states])
        terms = (*clean, *terms[of_states:])
        flat_targets = selected(flat_mask, flat_targets, 0)
        if isinstance(temperature, Tensor):
            temperature = selected(flat_mask, temperature, 1)
    return HeadCall(
        terms=terms,
        targets=flat_targets,
        mask=flat_mask,
        transform=LogitTransform(float(head.logit_scale), head.softcap, temperature),
        layout=layout,
        checks=checks,
        backend=backend,
        dtype=_gemm_dtype(hidden, head.weight),
        rounding=_rounding(hidden, head),
        head=head,
        execution=execution,
    )


def _checked_head(hidden: object, head: Tensor | LMHead) -> LMHead:
    """The head, of plain tensors, which goes with `hidden [..., H]`."""
    hidden = check_tensor("hidden", hidden, dtypes=HEAD_DTYPES)
    if hasattr(hidden, "full_tensor"):
        raise TypeError(
            "hidden: expected a plain tensor, whole; got a DTensor: call this inside the wrapped "
            "module's forward, or pass hidden.full_tensor()"
        )
    if hidden.ndim not in (2, 3):
        raise ValueError(f"hidden: expected shape [B, T, H] or [N, H]; got {list(hidden.shape)}")
    if hidden.device.type == "meta":
        raise ValueError("hidden: expected a tensor with values; got one on the meta device")
    head = LMHead.of(head)
    check_tensor("weight", head.weight, dtypes=HEAD_DTYPES, device=hidden.device)
    if head.weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight: expected shape [V, {hidden.shape[-1]}]; got {list(head.weight.shape)}"
        )
    if head.bias is not None:
        check_tensor("bias", head.bias, dtypes=HEAD_DTYPES)
    if head.low_rank is not None:
        a_out, lora_b = head.low_rank
        shape = [*hidden.shape[:-1], lora_b.shape[1]]
        check_tensor("low_rank[0]", a_out, shape=shape, dtypes=HEAD_DTYPES)
        check_tensor("low_rank[1]", lora_b, dtypes=HEAD_DTYPES)
    return head


def selected(mask: Tensor, x: Tensor, otherwise: float) -> Tensor:
    """The rows of `x` in `mask`; `otherwise` in the others."""
    return torch.where(mask if x.ndim == 1 else mask[:, None], x, otherwise)


def _gemm_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the operands of GEMMs with the weight.

    CUDA tensor cores take bf16 and fp16 operands and give float32. Elsewhere the result would be
    rounded to the operands' dtype, so they are upcast, a slice of the vocabulary at a time.
    Autocast asks for its dtype on CUDA; on a CPU it is ignored, to the result's benefit.
    """
    if hidden.device.type != "cuda" or torch.version.hip is not None:
        return torch.float32
    if torch.is_autocast_enabled("cuda"):
        autocast = torch.get_autocast_dtype("cuda")
        if autocast in (torch.bfloat16, torch.float16):
            return autocast
    if hidden.dtype != weight.dtype:
        _warn_of_float32_products(hidden.dtype, weight.dtype)
        return torch.float32
    return hidden.dtype


@cache
def _warn_of_float32_products(hidden: torch.dtype, weight: torch.dtype) -> None:
    warnings.warn(
        f"weight: {name_of(hidden)} hidden states and a {name_of(weight)} head are multiplied in "
        "float32, some 15 times slower than in half precision: call under torch.autocast, or cast "
        "one to the dtype of the other",
        stacklevel=2,
    )


def _rounding(hidden: Tensor, head: LMHead) -> torch.dtype | None:
    """The dtype that the model's own head would have its logits in, if it is asked for."""
    if head.logits_dtype == "fp32":
        return None
    device = hidden.device.type
    own = hidden.dtype if hidden.dtype == head.weight.dtype else torch.float32
    if torch.is_autocast_enabled(device):
        own = torch.get_autocast_dtype(device)
    return None if own == torch.float32 else own


def rows_of_loss(mask: Tensor | None, ce_weights: Tensor | None, targets: Tensor) -> Tensor | None:
    """The tokens in the mask or with a cross-entropy weight, in the shape of `targets`."""
    if mask is None or ce_weights is None:
        return mask
    targets = check_tensor("targets", targets)
    for name, x in (("mask", mask), ("ce_weights", ce_weights)):
        check_tensor(name, x, shape=targets.shape, device=targets.device)
    return (mask != 0) | (ce_weights != 0)


def loss_inputs(
    config: GRPOLossConfig,
    layout: Layout,
    checks: ValueChecks,
    advantages: object,
    mask: Tensor | None,
    *,
    num_items: float | Tensor | None,
    dtype: torch.dtype = torch.float32,
    **constants: object,
) -> LossInputs:
    """The constants of a policy loss, checked, flat, with the weight of every token.

    `mask` is flat. `constants` are `old_logps`, `ref_logps`, `sampling_logps` and `ce_weights`,
    None where not given.
    """
    check_config(config)
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
    sequences = layout.sequences
    num_items = _num_items(num_items, layout.device, checks)
    if mask is None:
        mask_float = torch.ones(layout.num_tokens, dtype=dtype, device=layout.device)
    else:
        mask_float = mask.to(dtype)
    count = mask_float.sum()
    flat = {k: None if x is None else layout.flat(k, x, dtype) for k, x in constants.items()}
    if (ce_weights := flat.get("ce_weights")) is not None:
        checks.add(~ce_weights.isfinite(), "ce_weights: expected finite numbers; got NaN or inf")
    inputs = LossInputs(
        advantages=layout.flat_advantages(advantages, checks, dtype),
        weights=aggregation_weights(config, mask_float, count, sequences, num_items),
        count=count,
        mask=mask,
        sequences=sequences,
        **flat,
    )
    return with_known_weights(config, inputs)


def check_config(config: object) -> None:
    if not isinstance(config, GRPOLossConfig):
        raise TypeError(f"config: expected a GRPOLossConfig; got {type(config).__name__}")


def check_entropy_given(config: GRPOLossConfig, entropy: Tensor | None) -> None:
    """Raises where the loss needs an entropy and none was given."""
    if entropy is not None:
        return
    for name, unused in (("entropy_coef", 0.0), ("top_entropy_quantile", 1.0)):
        value = getattr(config, name)
        if value != unused:
            raise ValueError(
                f"entropy: expected the entropy of every token, as config.{name} = {value}; "
                "got None"
            )


def _num_items(
    num_items: object, device: torch.device, checks: ValueChecks
) -> float | Tensor | None:
    if num_items is None:
        return None
    number = scalar("num_items", num_items, device)
    if isinstance(number, Tensor):
        checks.add(~(number >= 0), "num_items: expected a number >= 0; got another")
    elif number < 0:
        raise ValueError(f"num_items: expected a number >= 0; got {number}")
    return number


def scalar(name: str, value: object, device: torch.device) -> float | Tensor:
    """Returns a number, or a 0-d tensor on `device`; one on the CPU is read without waiting."""
    if isinstance(value, Tensor):
        if value.ndim != 0:
            raise ValueError(f"{name}: expected a 0-d tensor; got shape {list(value.shape)}")
        if value.is_complex():
            raise TypeError(f"{name}: expected a real number; got {value.dtype}")
        if value.device == device:
            return value.detach()
        if value.device.type != "cpu":
            raise ValueError(f"{name}: expected a tensor on {device}; got one on {value.device}")
        value = value.item()
    check_number(name, value)
    assert isinstance(value, (int, float))
    return value


def to_device(x: Tensor, device: torch.device | str | None) -> Tensor:
    """Copies `x`, on a CPU, to `device`, without waiting for the device's work."""
    if device is None or torch.device(device).type != "cuda" or x.numel() == 0:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)

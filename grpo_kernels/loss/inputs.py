"""The constants of a loss, checked once and flat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.checks import ValueChecks, check_number, check_tensor, scalar
from ..base.layout import Layout
from .config import GRPOLossConfig
from .objective import aggregation_weights, with_known_weights
from .tokens import Tokens


def loss_inputs(
    config: GRPOLossConfig,
    layout: Layout,
    checks: ValueChecks,
    advantages: object,
    mask: Tensor | None,
    *,
    num_items: float | Tensor | None,
    dtype: torch.dtype = torch.float32,
    has_reference: bool = False,
    **constants: object,
) -> Tokens:
    """The constants of a policy loss, checked, flat, with the weight of every token.

    `mask` is flat. `constants` are `old_logps`, `ref_logps`, `sampling_logps` and `ce_weights`, or
    None; a reference's log-probs, or the exact KL to it, come later.
    """
    check_config(config)
    if has_reference and constants["ref_logps"] is not None:
        raise ValueError(
            "ref_logps does not work with a reference, which computes them: pass one of the two"
        )
    if config.exact_kl and not has_reference:
        raise ValueError(
            "kl_estimator='exact' needs the hidden states and the head of the reference: pass "
            "reference=Reference(hidden, head) to fused_grpo_loss"
        )
    if config.beta and not has_reference and constants["ref_logps"] is None:
        raise ValueError(
            f"beta={config.beta} needs the log-probs of the reference: pass ref_logps, or set "
            "beta=0"
        )
    if config.is_correction != "none" and constants["sampling_logps"] is None:
        raise ValueError(
            f"is_correction={config.is_correction!r} needs the sampler's log-probs: pass "
            "sampling_logps, or set is_correction='none'"
        )
    if config.needs_sequences and layout.sequences is None:
        raise ValueError(
            f"loss_type={config.loss_type!r} with these options works on sequences: with packed "
            "input [N] pass cu_seqlens [B + 1]"
        )
    sequences = layout.sequences
    if mask is None:
        mask_float = torch.ones(layout.num_tokens, dtype=dtype, device=layout.device)
    else:
        mask_float = mask.to(dtype)
    count = mask_float.sum()
    num_items = number_of_items(num_items, count, checks)
    flat: dict[str, Any] = {
        k: None if x is None else layout.flat(k, x, dtype) for k, x in constants.items()
    }
    if (ce_weights := flat.get("ce_weights")) is not None:
        checks.add(~ce_weights.isfinite(), "ce_weights: expected finite numbers; got NaN or inf")
    flat_advantages = layout.flat_advantages(advantages, checks, dtype)
    unknown = flat_advantages - flat_advantages != 0  # in fewer launches than isfinite
    checks.add(
        unknown if mask is None else unknown & mask,
        "advantages: expected finite numbers at unmasked positions; got NaN or inf: mask these "
        "tokens",
    )
    tokens = Tokens(
        advantages=flat_advantages,
        weights=aggregation_weights(config, mask_float, count, sequences, num_items),
        count=count,
        unmasked=mask,
        sequences=sequences,
        **flat,
    )
    return with_known_weights(config, tokens)


def tokens_in_loss(mask: Tensor | None, ce_weights: Tensor | None, hidden: Tensor) -> Tensor | None:
    """The tokens of `hidden [..., H]` in the mask or with a cross-entropy weight."""
    if mask is None or ce_weights is None:
        return mask
    hidden = check_tensor("hidden", hidden)
    for name, x in (("mask", mask), ("ce_weights", ce_weights)):
        check_tensor(name, x, shape=hidden.shape[:-1], device=hidden.device)
    return (mask != 0) | (ce_weights != 0)


def check_config(config: object) -> None:
    if not isinstance(config, GRPOLossConfig):
        raise TypeError(f"config: expected a GRPOLossConfig; got {type(config).__name__}")


def check_has_entropy(config: GRPOLossConfig, entropy: Tensor | None) -> None:
    if entropy is not None:
        return
    for name, unused in (("entropy_coef", 0.0), ("top_entropy_quantile", 1.0)):
        value = getattr(config, name)
        if value != unused:
            raise ValueError(f"{name}={value} needs the entropy of every token: pass entropy")


def number_of_items(num_items: object, count: Tensor, checks: ValueChecks) -> float | Tensor | None:
    """The denominator of a loss, checked; None for None.

    `count`, 0-d: the unmasked tokens. A step without any may have the denominator 0.
    """
    if num_items is None:
        return None
    number = scalar("num_items", num_items, count.device)
    expected = "num_items: expected a finite number > 0, or 0 where every token is masked"
    if isinstance(number, Tensor):
        # In float32: an integer tensor would be compared in the default dtype.
        float32, x = torch.finfo(torch.float32), number.float()
        least = count.clamp(max=float32.tiny)
        checks.add(x != x.clamp(max=float32.max).maximum(least), f"{expected}; got another")
    elif number:
        check_number("num_items", number, "> 0, as a float32")
    else:
        checks.add(count > 0, f"{expected}; got 0")
    return number

"""The arguments of a loss, checked and flat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .config import GRPOLossConfig, check_number
from .head_call import OWN_ROWS, HeadCall, HeadOperands, head_call
from .layout import Layout, ValueChecks, check_tensor
from .objective import LossInputs, aggregation_weights, with_known_weights


def loss_call(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    *,
    config: GRPOLossConfig,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    sampling_logps: Tensor | None,
    ce_weights: Tensor | None,
    num_items: float | Tensor | None,
    entropy_threshold: float | Tensor | None,
    temperature: float | Tensor | None,
    **head: Any,
) -> tuple[HeadOperands, HeadCall, LossInputs]:
    """Checks and flattens the arguments of a loss over a linear head.

    `head` goes to `head_call`.
    """
    check_config(config)
    if temperature is None:
        temperature = config.temperature
    elif config.temperature != 1.0:
        raise ValueError(
            "temperature: expected None when config.temperature is set; got both "
            f"({config.temperature} in the config)"
        )
    rows = mask
    if mask is not None and ce_weights is not None:
        rows = _union(mask, ce_weights, targets)
    one_pass = config.two_pass_reason(
        has_old_logps=old_logps is not None, has_entropy_threshold=entropy_threshold is not None
    )
    # Ranks with tokens of their own may weight their entropies differently.
    own_rows = head["hidden_layout"] in OWN_ROWS
    entropy_coef = float(config.entropy_coef != 0) if own_rows else config.entropy_coef
    agreed = {"one pass": one_pass is None, "entropy_coef": entropy_coef}
    operands, call = head_call(
        hidden, weight, targets, rows, temperature=temperature, agreed=agreed, **head
    )
    inputs = loss_inputs(
        config,
        call.layout,
        call.checks,
        advantages,
        call.mask if rows is mask else call.layout.flat_mask(mask, call.checks),
        old_logps=old_logps,
        ref_logps=ref_logps,
        sampling_logps=sampling_logps,
        ce_weights=ce_weights,
        num_items=num_items,
        entropy_threshold=entropy_threshold,
    )
    return operands, call, inputs


def _union(mask: Tensor, ce_weights: Tensor, targets: Tensor) -> Tensor:
    """The tokens in the mask or with a cross-entropy weight, bool, in the shape of `targets`."""
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
    entropy_threshold: float | Tensor | None,
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
        weights=aggregation_weights(config, mask_float, count, layout.sequences, num_items),
        count=count,
        mask=mask,
        entropy_threshold=_entropy_threshold(config, entropy_threshold, mask_float, checks),
        sequences=layout.sequences,
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
    number = scalar("entropy_threshold", threshold, like.device)
    if isinstance(number, Tensor):
        checks.add(number.isnan(), "entropy_threshold: expected a number; got NaN")
        return number.to(like.dtype)
    return torch.full((), number, dtype=like.dtype, device=like.device)


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

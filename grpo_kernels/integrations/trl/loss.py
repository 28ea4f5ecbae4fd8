"""Translates the loss of TRL's trainer into an objective, and compares the values of the two."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig

from ...head.lm_head import Support
from ...loss.advantages import apply_is_weights
from ...loss.config import GRPOLossConfig
from ...loss.losses import LOSSES, Loss, flat_fields
from ..private import trl_part
from ..transformers import Objective
from .state import OwnLossType, State, options_of

# The largest difference of TRL's loss and ours, both float32 sums over the same log-probs.
_RELATIVE_TOLERANCE, _ABSOLUTE_TOLERANCE = 1e-3, 1e-4
# The first micro-batches, and then one in so many, compare their loss with TRL's.
_FIRST_CHECKS, _CHECK_EVERY = 20, 100
# Loss types that divide by the tokens of the whole optimizer step.
_STEP_WIDE = ("dapo", "cispo", "vespo")
_TOKEN_LOCAL = ("grpo", "bnpo", "dr_grpo", "luspo", "sapo", "dapo", "cispo")
_DEFAULTS = {option.name: option.default for option in fields(GRPOConfig)}
# TRL's options that the user's own loss ignores, with their defaults.
OF_TRLS_LOSS = {
    name: _DEFAULTS[name]
    for name in sorted(
        {"loss_type", "off_policy_mask_threshold", "top_entropy_quantile"}.union(
            *map(flat_fields, LOSSES)
        )
    )
    if name in _DEFAULTS
}


def check_own(trainer: Any) -> None:
    """Checks that the user's own loss does not ignore an option of TRL's loss.

    Raises:
        ValueError: an option of TRL's loss differs from its default.
    """
    for name, expected in OF_TRLS_LOSS.items():
        if (value := getattr(trainer.args, name)) != expected:
            raise ValueError(
                f"{name}={value!r} has no effect with your own loss: make it an option of that "
                f"loss, and leave TRL's at {expected!r}"
            )
    if corrects_sampler(trainer):
        raise ValueError(
            "vllm_importance_sampling_correction=True does not work with your own loss, because it "
            "scales the advantage: pass vllm_importance_sampling_correction=False"
        )


def user_loss_of(trainer: Any) -> OwnLossType | None:
    return options_of(trainer).loss


def is_token_local(trainer: Any) -> bool:
    """True if the gradient of a token's log-prob in TRL's loss follows from that token alone."""
    loss_type = trainer.loss_type
    return (
        loss_type in _TOKEN_LOCAL
        and trainer.importance_sampling_level == "token"
        and trainer.off_policy_mask_threshold is None
        and trainer.top_entropy_quantile == 1.0
    )


def corrects_sampler(trainer: Any) -> bool:
    """True if TRL weighs tokens by the ratio of the policy's probabilities to vLLM's."""
    return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


def divides_by_tokens(trainer: Any) -> bool:
    """True if the denominator is the number of tokens of the whole optimizer step."""
    user_loss = user_loss_of(trainer)
    if user_loss is None:
        return trainer.loss_type in _STEP_WIDE
    return getattr(user_loss, "aggregation", Loss.aggregation) == "dapo"


def value_of(trainer: Any, option: str) -> Any:
    """The current value of an option, from the trainer if it has the option, as TRL reads it.

    A callback may have changed it since the trainer was constructed.
    """
    name = "epsilon_low" if option == "epsilon" else option
    return getattr(trainer, name, getattr(trainer.args, option))


def config_of(trainer: Any, entropy_scale: float) -> GRPOLossConfig:
    """Translates TRL's options; multiplies the entropy coefficient by `entropy_scale`."""
    args, user_loss = trainer.args, user_loss_of(trainer)
    options: dict[str, Any] = {
        "loss_type": trainer.loss_type if user_loss is None else user_loss,
        "beta": trainer.beta,
        "use_bias_correction_kl": args.use_bias_correction_kl,
        "kl_estimator": "exact" if options_of(trainer).exact_kl else "k3",
    }
    aggregation = trainer.loss_type
    if user_loss is None:
        used = flat_fields(trainer.loss_type).keys() & OF_TRLS_LOSS.keys()
        options |= {name: value_of(trainer, name) for name in used}
    else:
        aggregation = getattr(user_loss, "aggregation", Loss.aggregation)
    if aggregation == "dr_grpo":
        options["max_completion_length"] = trainer.max_completion_length
    if trl_part(trainer, "_entropy_bonus_enabled"):
        adaptive = trainer.use_adaptive_entropy
        if not adaptive or trl_part(trainer, "_last_world_entropy") <= args.entropy_target:
            options["entropy_coef"] = trainer.entropy_coef * entropy_scale
    return GRPOLossConfig(**options)


def accumulation_steps(trainer: Any) -> int:
    """Returns the micro-batches per optimizer step; 0 in evaluation."""
    return trainer.current_gradient_accumulation_steps if trainer.model.training else 0


def objective_of(
    trainer: Any, inputs: dict[str, Any], support: Support | None, share: float = 1.0
) -> tuple[Objective, float | Tensor]:
    """Returns the objective that TRL computes from `inputs`, and the factor on its loss.

    `share`: these rows' part of the loss's denominator.
    """
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    advantages = inputs["advantages"]
    # VESPO's weight of a sequence includes them, see `explain.py`.
    if corrects_sampler(trainer) and trainer.loss_type != "vespo":
        advantages = apply_is_weights(advantages, inputs["importance_sampling_ratio"], mask)
    accumulation = accumulation_steps(trainer)
    scale = share / max(1, accumulation)
    num_items = None
    if divides_by_tokens(trainer):
        # TRL counts the tokens of a generation batch, which several optimizer steps may share.
        # Computed on the device, without reading the count.
        tokens = torch.as_tensor(
            inputs["num_items_in_batch"], dtype=torch.float32, device=mask.device
        )
        tokens = tokens.clamp(min=1.0) / trainer.accelerator.num_processes
        if accumulation:
            tokens *= accumulation / trainer.args.steps_per_generation
        num_items, scale = tokens, 1.0
    # TRL always divides the entropy bonus by the accumulation steps.
    config = config_of(trainer, 1 / max(1, accumulation) / scale)
    has_estimate = trainer.beta and not options_of(trainer).exact_kl
    objective = Objective(
        advantages.float(),
        mask=mask,
        config=config,
        num_items=num_items,
        old_logps=inputs.get("old_per_token_logps"),
        ref_logps=inputs["ref_per_token_logps"] if has_estimate else None,
        support=support,
    )
    return objective, scale


def check_is_due(state: State) -> bool:
    """True for the first micro-batches and then for some, as the CPU waits for the GPU."""
    seen, state.compared = state.compared, state.compared + 1
    return bool(seen < _FIRST_CHECKS or seen % _CHECK_EVERY == 0)


def check_agreement(trainer: Any, objective: Objective, trl_loss: float, our_loss: float) -> None:
    """Raises RuntimeError if TRL's loss and ours differ by more than rounding."""
    assert objective.advantages is not None and objective.mask is not None
    # The size of the loss's terms; if they cancel, their sum is far smaller.
    magnitude = max(1.0, float(objective.advantages.abs().amax()))
    if trainer.loss_type == "luspo":
        magnitude *= objective.mask.shape[1]
    allowed = _ABSOLUTE_TOLERANCE * magnitude + _RELATIVE_TOLERANCE * abs(trl_loss)
    if not math.isfinite(trl_loss) or abs(trl_loss - our_loss) <= allowed:
        return
    raise RuntimeError(
        f"loss: expected TRL's, {trl_loss:.6g}; got {our_loss:.6g}. This version of TRL, or a "
        "subclass of its trainer, computes a loss that grpo_kernels does not know: use "
        "GRPOTrainer, and please report it"
    )

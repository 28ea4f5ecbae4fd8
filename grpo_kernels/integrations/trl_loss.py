"""The loss of TRL's trainer in this library's words, or one of the user's own in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor
from trl import GRPOConfig

from ..base.private import of_trl
from ..loss.config import GRPOLossConfig
from ..loss.losses import LOSSES, Loss, flat_fields
from . import trl_exact_kl
from .trl_versions import DIVIDES_BY_BATCH

# What `GRPOLossConfig.loss_type` takes beside a name.
OwnLossType = Loss | Callable[[Any], Tensor]
# Loss types that divide by the tokens of the whole optimizer step.
_STEP_WIDE = ("dapo", "cispo")
_TOKEN_LOCAL = ("grpo", "bnpo", "dr_grpo", "luspo", "sapo", *_STEP_WIDE)
_DEFAULTS = {option.name: option.default for option in fields(GRPOConfig)}
# TRL's options that a loss of one's own leaves out, with their defaults.
OF_TRLS_LOSS = {
    name: _DEFAULTS[name]
    for name in sorted(
        {"loss_type", "off_policy_mask_threshold", "top_entropy_quantile"}.union(
            *map(flat_fields, LOSSES)
        )
    )
    if name in _DEFAULTS
}


def check_own(trainer: Any, loss: object) -> None:
    """Refuses a name, and options of TRL's loss that a loss of one's own leaves out, or twists.

    Raises:
        TypeError: the loss is a name.
        ValueError: an option differs from TRL's default.
    """
    if isinstance(loss, str):
        raise TypeError(
            f"loss: expected a loss or a callable, as TRL's go by loss_type; got {loss!r}"
        )
    for name, expected in OF_TRLS_LOSS.items():
        if (value := getattr(trainer.args, name)) != expected:
            raise ValueError(
                f"{name}: expected {expected!r}, TRL's default, with a loss of your own, which "
                f"leaves it out: make it an option of that loss; got {value!r}"
            )
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        raise ValueError(
            "vllm_importance_sampling_correction: expected False with a loss of your own, which "
            "need not be linear in the advantage; got True"
        )


def own_of(trainer: Any) -> OwnLossType | None:
    """The user's own loss; None without, and in a trainer made before the patch."""
    return getattr(trainer, "_own_loss", None)


def is_token_local(trainer: Any) -> bool:
    """True if the gradient of a token's log-prob in TRL's loss follows from that token alone."""
    loss_type = trainer.loss_type
    if DIVIDES_BY_BATCH and loss_type in _STEP_WIDE and of_trl(trainer, "_entropy_bonus_enabled"):
        return False
    return (
        loss_type in _TOKEN_LOCAL
        and trainer.importance_sampling_level == "token"
        and trainer.off_policy_mask_threshold is None
        and trainer.top_entropy_quantile == 1.0
    )


def divides_by_tokens(trainer: Any) -> bool:
    """True if the denominator is the number of tokens of the whole optimizer step."""
    own = own_of(trainer)
    if own is None:
        return trainer.loss_type in _STEP_WIDE
    return getattr(own, "aggregation", Loss.aggregation) == "dapo"


def config_of(trainer: Any, entropy_scale: float) -> GRPOLossConfig:
    """Translates TRL's options; multiplies the entropy coefficient by `entropy_scale`."""
    args, own = trainer.args, own_of(trainer)
    options: dict[str, Any] = {
        "loss_type": trainer.loss_type if own is None else own,
        "beta": trainer.beta,
        "use_bias_correction_kl": args.use_bias_correction_kl,
        "kl_estimator": "exact" if trl_exact_kl.uses_exact_kl(trainer) else "k3",
    }
    aggregation = trainer.loss_type
    if own is None:
        used = flat_fields(trainer.loss_type).keys() & OF_TRLS_LOSS.keys()
        options |= {name: getattr(args, name) for name in used}
        if "epsilon_high" in used:
            options["epsilon_high"] = trainer.epsilon_high  # epsilon, where there is none
    else:
        aggregation = getattr(own, "aggregation", Loss.aggregation)
    if aggregation == "dr_grpo":
        options["max_completion_length"] = trainer.max_completion_length
    if of_trl(trainer, "_entropy_bonus_enabled"):
        adaptive = trainer.use_adaptive_entropy
        if not adaptive or of_trl(trainer, "_last_world_entropy") <= args.entropy_target:
            options["entropy_coef"] = trainer.entropy_coef * entropy_scale
    return GRPOLossConfig(**options)

"""`GRPOLossConfig`: the loss and its options, validated on construction.

The formulas are in `losses.py` and `objective.py`, and in a table in `docs/objectives.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ..base.checks import (
    RANGES,
    check_bool,
    check_choice,
    check_number,
    convert_numbers,
    suggests_names,
)
from .losses import AGGREGATIONS, LOSS_TYPES, LOSSES, RATIO_LEVELS, Loss, OwnLoss, flat_fields

# Aggregations whose denominator counts tokens; the others' counts sequences.
TOKEN_MEANS = ("bnpo", "dapo")
# Estimates from the log-probs of the sampled token.
KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "k3+")
IS_CORRECTIONS = (
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask",
    "geometric_truncate", "geometric_mask",
)  # fmt: skip
IS_GATES = ("ratio", "binary_kl", "tv")
# Ranges and names of the options shared by loss types; a loss class has its options' ranges.
_EXPECTED: dict[str, str | tuple[str, ...]] = {
    "beta": ">= 0",
    "aggregation": AGGREGATIONS,
    "kl_estimator": (*KL_ESTIMATORS, "exact"),
    "kl_clamp": "> 0",
    "entropy_coef": "of any size",
    "top_entropy_quantile": "in [0, 1]",
    "entropy_threshold": "of any size",
    "is_correction": IS_CORRECTIONS,
    "is_gate": IS_GATES,
    "is_clip_max": "> 0",
    "is_clip_min": ">= 0",
    "off_policy_threshold": ">= 0",
}


@suggests_names
@dataclass(frozen=True, kw_only=True)
class GRPOLossConfig:
    """The loss to compute, validated on construction; names and defaults follow TRL's `GRPOConfig`.

    An option that the loss type does not use is refused unless it is left at its default.

    Args:
        loss_type: name of the loss: `"grpo"`, `"bnpo"`, `"dr_grpo"`, `"dapo"`, `"luspo"` (clipped
            ratio, five aggregations), `"gspo"`, `"gspo_token"`, `"gmpo"`, `"cispo"`, `"sapo"`,
            `"vespo"`, `"reinforce"`, `"dppo_tv"`, `"dppo_kl"`. Or an instance of a class of
            `grpo_kernels.loss.losses`, such as `Sapo(temperature_neg=1.1)`, which holds its own
            options. Or a callable that takes `grpo_kernels.loss.tokens.Tokens` and returns the
            loss of every token, `[N]`, before corrections, KL and aggregation
            (`docs/objectives.md`); gradients flow to log-probs and entropy, not to parameters that
            the callable holds.
        beta: weight of the KL to the reference policy, >= 0.
        epsilon: lower clip range, in [0, 1]: ratios below 1 - epsilon are clipped; in gmpo
            log-ratios below -epsilon (0.4 in its paper), in dppo_tv falls of the probability.
        epsilon_high: upper clip range, >= 0: ratios above 1 + epsilon_high are clipped; None: the
            same as epsilon; in cispo the largest weight, which must be set (5.0 in ScaleRL).
        delta: upper bound of the ratio before clipping (two-sided clipping), > 1; None: no bound.
        dual_clip: upper bound of loss / -A for tokens with A < 0, > 1 (3.0 in verl); None: no
            bound; set this or delta.
        importance_sampling_level: token (one ratio per token) or sequence (one ratio per sequence,
            the exponential of its mean log-ratio, as in gspo).
        aggregation: average of the token losses, by the name of the loss type that introduced it
            (grpo, bnpo, dr_grpo, dapo, luspo); None: the loss type's.
        max_completion_length: divisor of the dr_grpo aggregation; set it for dr_grpo only.
        kl_estimator: estimate of the KL from the sampled token (k1, abs, k2, k3; k1+ and k3+ have
            the gradient of k2), or exact: the KL over the whole vocabulary.
        kl_clamp: largest KL estimate of a token (10 in verl, for k3); beyond it the gradient is 0.
            It also limits the log-ratio to [-20, 20]. None: no bound.
        use_bias_correction_kl: multiply the KL estimate by the ratio, gradient included, as TRL
            1.16 does and tutorials do not; no effect on the exact KL.
        entropy_coef: weight of the mean entropy, which is subtracted from the loss.
        top_entropy_quantile: share of tokens to train on, in [0, 1]: those with the highest
            entropy.
        entropy_threshold: lowest entropy of tokens to train on, in nats, instead of the batch's
            quantile; needs top_entropy_quantile below 1; None: the quantile.
        is_correction: importance weights for the mismatch of sampler and trainer: token_truncate,
            sequence_truncate, geometric_truncate clip them to the bounds (TIS); token_mask,
            sequence_mask, geometric_mask set them to 0 outside the bounds (MIS); none: off. The
            weight of a sequence is the product or the geometric mean of its tokens' weights.
        is_gate: quantity that is_clip_max bounds in a mask: ratio (the weight), binary_kl or tv.
            The last two are divergences of sampler and trainer, as if each token were the sampled
            one or another: in nats, or a change of probability. sequence_mask takes their sum over
            the sequence, geometric_mask their mean.
        is_clip_max: upper bound of the quantity that is_gate names; None: no bound.
        is_clip_min: lower bound of the weight, with is_gate ratio only; None: no bound.
        off_policy_threshold: drop sequences with a negative advantage whose mean of log p_sampler -
            log p_policy exceeds this (p_old if there is no p_sampler); None: keep all.
        sapo_temperature_pos: slope of sapo's gate where A > 0.
        sapo_temperature_neg: slope of sapo's gate where A <= 0.
        vespo_k_pos: exponent of vespo's weight where A >= 0.
        vespo_lambda_pos: decay of vespo's weight where A >= 0.
        vespo_k_neg: exponent of vespo's weight where A < 0.
        vespo_lambda_neg: decay of vespo's weight where A < 0.
        dppo_ratio_max: upper bound of the importance weight in dppo_tv and dppo_kl.

    Raises:
        ValueError: an unknown name, a value outside its range, an option the loss type lacks.
        TypeError: a value of the wrong type.
    """

    loss_type: str | Callable[[Any], Tensor] = "dapo"
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    dual_clip: float | None = None
    importance_sampling_level: str = "token"
    aggregation: str | None = None
    max_completion_length: int | None = None
    kl_estimator: str = "k3"
    kl_clamp: float | None = None
    use_bias_correction_kl: bool = True
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    entropy_threshold: float | None = None
    is_correction: str = "none"
    is_gate: str = "ratio"
    is_clip_max: float | None = 3.0
    is_clip_min: float | None = None
    off_policy_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    dppo_ratio_max: float = 20.0

    def __post_init__(self) -> None:
        convert_numbers(self)
        for option_field in fields(self):
            _check_field(
                option_field.name,
                getattr(self, option_field.name),
                option_field,
                _EXPECTED.get(option_field.name),
            )
        _check_loss(self.loss)
        self._check_used()
        self._check_together()

    @cached_property
    def loss(self) -> Loss:
        """The loss in force, an instance of its class."""
        loss_type = self.loss_type
        if isinstance(loss_type, Loss):
            return loss_type
        if isinstance(loss_type, type):
            raise TypeError(
                f"loss_type: expected an instance, {loss_type.__name__}(); got the class"
            )
        if callable(loss_type):
            return OwnLoss(loss_type)
        check_choice("loss_type", loss_type, LOSS_TYPES, hint=", a loss, or a callable")
        cls, preset = LOSSES[loss_type]
        options = {}
        for name, option_field in flat_fields(loss_type).items():
            value = getattr(self, name)
            _check_field(name, value, option_field, option_field.metadata["expected"])
            if value != option_field.default:
                options[option_field.name] = value
        return cls(**(preset | options))

    @property
    def effective_aggregation(self) -> str:
        """The aggregation in force: `aggregation`, or the loss type's own."""
        return self.aggregation or self.loss.aggregation

    @property
    def ratio_level(self) -> str:
        """The level of the importance ratio, `"token"` or `"sequence"`."""
        return self.loss.ratio_level

    @property
    def scales_token_losses(self) -> bool:
        """True if a mask or an importance sampling weight multiplies the tokens' losses."""
        return (
            self.is_correction != "none"
            or self.off_policy_threshold is not None
            or self.top_entropy_quantile < 1
        )

    @property
    def corrects_sequences(self) -> bool:
        """True if the sampler's mismatch is weighed sequence by sequence."""
        return self.is_correction.startswith(("sequence", "geometric"))

    @property
    def needs_sequences(self) -> bool:
        """True if the loss tells sequences apart, so that packed input needs `cu_seqlens`."""
        return (
            self.effective_aggregation not in TOKEN_MEANS
            or self.loss.needs_sequences
            or self.corrects_sequences
            or self.off_policy_threshold is not None
        )

    @property
    def gradient_needs_advantage(self) -> bool:
        """True if tokens of advantage 0 have no gradient, so that they may be skipped.

        With `needs_sequences`, if sequences whose advantages are all 0 have none.
        """
        return self.loss.gradient_needs_advantage and not self.beta and not self.entropy_coef

    @property
    def exact_kl(self) -> bool:
        """True if the loss has the KL over the vocabulary, which needs a `reference`."""
        return bool(self.beta) and self.kl_estimator == "exact"

    @property
    def entropy_has_gradient(self) -> bool:
        """True if the loss declares a gradient by the entropy."""
        return bool(self.entropy_coef) or self.loss.entropy_gradient

    @property
    def one_pass(self) -> bool:
        """True if `fused_grpo_loss` computes the logits once (3 GEMMs) instead of twice (4).

        One pass is enough for token-local objectives: the gradient of a token's log-prob follows
        from that token and from constants known before the forward, so each chunk of logits turns
        into gradients while it is in memory. For other objectives the forward only computes
        log-probs, and the backward computes the logits again.

        Sequence-level `is_correction` takes one pass with `old_logps`, as assumed here, and two
        without.
        """
        return self.why_two_passes() is None

    def why_two_passes(self, *, has_old_logps: bool = True) -> str | None:
        """The reason why this objective is not token-local; None if it is. See `one_pass`."""
        if reason := self.loss.why_two_passes:
            return reason
        if self.off_policy_threshold is not None:
            return "off_policy_threshold looks at a sequence's mean log-prob"
        if self.corrects_sequences and not has_old_logps:
            return "without old_logps a sequence's correction takes the log-probs of its tokens"
        if self.top_entropy_quantile < 1 and self.entropy_threshold is None:
            return "top_entropy_quantile looks at the entropies of the whole batch"
        if self.top_entropy_quantile < 1 and self.entropy_coef:
            return "the entropy bonus averages over the tokens that top_entropy_quantile leaves"
        return None

    @property
    def specific_options(self) -> frozenset[str]:
        """The options that this loss uses, and not every loss."""
        names = set(flat_fields(self.loss_type)) if isinstance(self.loss_type, str) else set()
        if self.loss_type not in AGGREGATIONS and not self.loss.fixed_aggregation:
            names.add("aggregation")
        return frozenset(names)

    def _check_used(self) -> None:
        for option_field in fields(self):
            value = getattr(self, option_field.name)
            unused = option_field.name in _SPECIFIC - self.specific_options
            is_default = (
                isinstance(value, (int, float, str, type(None))) and value == option_field.default
            )
            if unused and not is_default:
                instance = isinstance(self.loss_type, Loss) and option_field.name != "aggregation"
                raise ValueError(
                    f"{option_field.name}={value!r} has no effect with loss_type="
                    f"{self.loss_type!r}: "
                    + ("set options on the instance" if instance else "remove it")
                )
        length = self.max_completion_length
        if length is not None and (type(length) is not int or length < 1):
            raise ValueError(f"max_completion_length: expected a positive int; got {length!r}")
        if self.effective_aggregation == "dr_grpo" and length is None:
            raise ValueError(
                "max_completion_length: expected a positive int, by which the 'dr_grpo' "
                "aggregation divides; got None"
            )
        if self.effective_aggregation != "dr_grpo" and length is not None:
            raise ValueError(
                f"max_completion_length={length} has no effect with loss_type={self.loss_type!r}: "
                "remove it (only the 'dr_grpo' aggregation divides by it)"
            )
        if self.top_entropy_quantile == 1 and self.entropy_threshold is not None:
            raise ValueError(
                f"entropy_threshold={self.entropy_threshold} has no effect with "
                "top_entropy_quantile=1: set top_entropy_quantile below 1"
            )
        if self.is_correction == "none" and (self.is_clip_max, self.is_clip_min) != (3.0, None):
            raise ValueError(
                f"is_clip_max={self.is_clip_max} and is_clip_min={self.is_clip_min} have no effect "
                "with is_correction='none': set is_correction, or remove them"
            )

    def _check_together(self) -> None:
        if self.loss.weighs_sampler and self.corrects_sequences:
            raise ValueError(
                f"is_correction={self.is_correction!r} does not work with loss_type="
                f"{self.loss_type!r}, which weighs sequences itself: pass 'none', "
                "'token_truncate' or 'token_mask'"
            )
        if self.kl_estimator == "exact" and not self.beta:
            raise ValueError(
                "kl_estimator='exact' has no effect with beta=0: set beta, or another kl_estimator"
            )
        if self.kl_estimator == "exact" and self.kl_clamp is not None:
            raise ValueError(
                f"kl_clamp={self.kl_clamp} does not work with kl_estimator='exact': pass one of "
                "the two"
            )
        if self.is_gate != "ratio" and not self.is_correction.endswith("mask"):
            raise ValueError(
                f"is_gate={self.is_gate!r} does not work with is_correction="
                f"{self.is_correction!r}: it needs a mask, such as 'token_mask'"
            )
        if self.is_gate != "ratio" and self.is_clip_min is not None:
            raise ValueError(
                f"is_clip_min={self.is_clip_min} does not work with is_gate={self.is_gate!r}, "
                "which has an upper bound only: set is_clip_max"
            )
        if self.is_correction != "none":
            low, high = self.is_clip_min, self.is_clip_max
            if low is None and high is None:
                raise ValueError(
                    f"is_correction={self.is_correction!r} needs a bound: set is_clip_max or "
                    "is_clip_min"
                )
            if low is not None and high is not None and low >= high:
                raise ValueError(f"is_clip_min: expected less than is_clip_max = {high}; got {low}")


_CLAIMS = (
    "fixed_aggregation", "token_local", "gradient_needs_advantage", "entropy_gradient",
    "token_gradient", "weighs_sampler", "needs_sequences",
)  # fmt: skip
_SPECIFIC = {"aggregation"}.union(*map(flat_fields, LOSS_TYPES))


def _check_loss(loss: Loss) -> None:
    loss_fields: tuple[Field[Any], ...] = fields(loss) if is_dataclass(loss) else ()
    if loss_fields:
        convert_numbers(loss)
    for option_field in loss_fields:
        expected = option_field.metadata.get("expected")
        if expected is not None and not isinstance(expected, tuple):
            owner = f"option() of {type(loss).__name__}.{option_field.name}"
            check_choice(f"loss_type: {owner}", expected, tuple(RANGES), ", or a tuple of names")
        _check_field(option_field.name, getattr(loss, option_field.name), option_field, expected)
    check_choice("loss_type.aggregation", loss.aggregation, AGGREGATIONS)
    check_choice("loss_type.ratio_level", loss.ratio_level, RATIO_LEVELS)
    for name in _CLAIMS:
        check_bool(f"loss_type.{name}", getattr(loss, name))
    if type(loss).per_token is Loss.per_token:
        raise TypeError(
            f"loss_type: expected a per_token() of {type(loss).__name__}, the loss of every "
            "token; got none"
        )


def _check_field(
    name: str, value: object, option_field: Field[Any], expected: str | tuple[str, ...] | None
) -> None:
    """Checks a value: a bool or None by the field's type, else a number or a choice."""
    if value is None and str(option_field.type).endswith("None"):
        return
    if option_field.type in (bool, "bool"):
        check_bool(name, value)
    elif isinstance(expected, tuple):
        check_choice(name, value, expected)
    elif expected is not None:
        check_number(name, value, expected)

"""`GRPOLossConfig`: the loss and its options, validated on construction.

The formulas behind the names are in `grpo_kernels.objective`, the table of them in
`docs/objectives.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# Those whose denominator counts tokens; that of the others counts sequences.
TOKEN_MEANS = ("bnpo", "dapo")
KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "k3+")
IS_CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class _Loss(NamedTuple):
    """A loss type: its formula, its default aggregation, and the options it uses."""

    surrogate: str
    aggregation: str
    options: frozenset[str]


_CLIP = frozenset({"epsilon", "epsilon_high", "delta", "dual_clip", "importance_sampling_level"})
_AGGREGATION = frozenset({"aggregation"})
_SAPO = frozenset({"sapo_temperature_pos", "sapo_temperature_neg"})
_VESPO = frozenset({"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"})
_EPSILONS = frozenset({"epsilon", "epsilon_high"})

_LOSSES = {
    **{name: _Loss("clip", name, _CLIP) for name in AGGREGATIONS},
    "cispo": _Loss("cispo", "dapo", _AGGREGATION | {"epsilon_high", "importance_sampling_level"}),
    "sapo": _Loss("sapo", "grpo", _AGGREGATION | _SAPO),
    "vespo": _Loss("vespo", "dapo", _AGGREGATION | _VESPO),
    "gspo": _Loss("clip", "grpo", _AGGREGATION | _CLIP),
    "gspo_token": _Loss("clip", "grpo", _AGGREGATION | _CLIP),
    "gmpo": _Loss("gmpo", "grpo", _EPSILONS),
    "reinforce": _Loss("reinforce", "dapo", _AGGREGATION),
    "dppo_tv": _Loss("dppo_tv", "dapo", _AGGREGATION | _EPSILONS | {"dppo_ratio_max"}),
}
_CUSTOM = _Loss("custom", "dapo", _AGGREGATION)
_SPECIFIC = frozenset().union(*(loss.options for loss in _LOSSES.values()))
LOSS_TYPES = tuple(_LOSSES)

_NAMES = {"loss_type", "importance_sampling_level", "kl_estimator", "aggregation", "is_correction"}
_FLAGS = {"use_bias_correction_kl"}
_OPTIONAL = {
    "epsilon_high",
    "delta",
    "dual_clip",
    "max_completion_length",
    "kl_clamp",
    "is_clip_max",
    "is_clip_min",
    "off_policy_threshold",
}
_POSITIVE = (
    "temperature",
    "kl_clamp",
    "is_clip_max",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "dppo_ratio_max",
)
_NOT_NEGATIVE = ("beta", "epsilon_high", "is_clip_min", "off_policy_threshold")


@dataclass(frozen=True, kw_only=True)
class GRPOLossConfig:
    """The loss to compute, validated on construction; names and defaults follow TRL's `GRPOConfig`.

    An option that the loss type does not use is refused unless it is left at its default.

    Args:
        loss_type: `"grpo"`, `"bnpo"`, `"dr_grpo"`, `"dapo"`, `"luspo"` (clipped ratio, five
            aggregations), `"gspo"`, `"gspo_token"`, `"gmpo"`, `"cispo"`, `"sapo"`, `"vespo"`,
            `"reinforce"`, `"dppo_tv"`; or an objective of your own, a callable that takes
            `grpo_kernels.objective.Tokens` and returns the loss of every token, `[N]`, before
            corrections, KL and aggregation. Gradients flow to log-probs and entropy, not to
            parameters it may hold itself.
        beta: weight of the KL to the reference policy, >= 0; needs `ref_logps` when not 0.
        epsilon: lower clip range, in [0, 1]: ratios below `1 - epsilon` are clipped. For `gmpo` a
            bound on the log-ratio (its paper has 0.4), for `dppo_tv` on the probability's change.
        epsilon_high: upper clip range, >= 0; None takes `epsilon`. For `cispo` the largest weight
            itself, which has no default (ScaleRL has 5.0).
        delta: upper bound of the unclipped ratio (two-sided clipping), > 1; None does not bound.
        dual_clip: bound, > 1, of `loss / -A` where A < 0 (verl has 3.0); None does not bound. Not
            together with `delta`, which bounds the same and the unclipped ratio of A > 0 besides.
        importance_sampling_level: `"token"`, or `"sequence"`, where one ratio, the exponential of
            the mean log-ratio, stands for all tokens of a sequence (`gspo` implies it).
        aggregation: average over the tokens' losses, named as the loss type that introduced it;
            None takes the loss type's own.
        max_completion_length: the T of the `dr_grpo` aggregation; required by it, else refused.
        temperature: divisor of the logits in sampling, > 0. Acts where log-probs are computed
            (`fused_grpo_loss`); `grpo_loss` gets log-probs and does not use it.
        kl_estimator: `"k1"`, `"abs"`, `"k2"`, `"k3"`, or `"k1+"`, `"k3+"`: their value with the
            gradient of k2.
        kl_clamp: bound of a token's KL estimate; the log-ratio in it is then kept within 20 of 0
            (verl has 10, on k3 alone). Beyond the bounds there is no gradient. None does not bound.
        use_bias_correction_kl: multiply the KL by the ratio, with its gradient: its expectation
            under the old policy is then the one under the current policy (DeepSeek-V3.2).
        entropy_coef: weight of the mean-entropy bonus, subtracted from the loss.
        top_entropy_quantile: share of tokens, those of highest entropy, that train, in [0, 1].
        is_correction: weight for the mismatch between sampler and trainer, from `sampling_logps`:
            `"none"`; `"token_truncate"`, `"sequence_truncate"`: bounded; `"token_mask"`,
            `"sequence_mask"`: 0 outside the bounds.
        is_clip_max: upper bound of that weight; None does not bound.
        is_clip_min: lower bound of that weight; None does not bound.
        off_policy_threshold: drop sequences of negative advantage whose mean log-ratio of sampler
            to policy exceeds this; None drops none. The sampler is `sampling_logps`, else
            `old_logps`, else the policy itself, which drops none.
        sapo_temperature_pos: slope of `sapo`'s gate where A > 0.
        sapo_temperature_neg: slope of `sapo`'s gate elsewhere.
        vespo_k_pos: exponent of `vespo`'s weight where A >= 0; `vespo_k_neg` elsewhere.
        vespo_lambda_pos: decay of `vespo`'s weight where A >= 0; `vespo_lambda_neg` elsewhere.
        vespo_k_neg: see `vespo_k_pos`.
        vespo_lambda_neg: see `vespo_lambda_pos`.
        dppo_ratio_max: bound of the importance weight of `dppo_tv`.

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
    temperature: float = 1.0
    kl_estimator: str = "k3"
    kl_clamp: float | None = None
    use_bias_correction_kl: bool = True
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    is_correction: str = "none"
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
        self._check_types()
        self._check_ranges()
        self._check_used()
        self._check_together()

    @property
    def surrogate(self) -> str:
        """The formula of a token's loss: `"clip"` for the loss types that clip a ratio."""
        return self._loss.surrogate

    @property
    def effective_aggregation(self) -> str:
        """The aggregation in force: `aggregation`, or the loss type's own."""
        return self.aggregation or self._loss.aggregation

    @property
    def ratio_level(self) -> str:
        """The level of the importance ratio, `"token"` or `"sequence"`."""
        if self.loss_type in ("gspo", "gspo_token"):
            return "sequence"
        return self.importance_sampling_level

    @property
    def clip_range(self) -> tuple[float, float]:
        """The interval `(1 - epsilon, 1 + epsilon_high)` the ratio is clipped to."""
        return 1.0 - self.epsilon, 1.0 + self.upper_epsilon

    @property
    def upper_epsilon(self) -> float:
        """`epsilon_high`, or `epsilon` where that is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def scales_surrogate(self) -> bool:
        """True if a mask or an importance sampling weight multiplies the tokens' losses."""
        return (
            self.is_correction != "none"
            or self.off_policy_threshold is not None
            or self.top_entropy_quantile < 1
        )

    @property
    def one_pass(self) -> bool:
        """True if `fused_grpo_loss` computes the logits once (3 GEMMs) instead of twice (4).

        One pass is enough for token-local objectives: the gradient of a token's log-prob follows
        from that token and from constants known before the forward, so each chunk of logits turns
        into gradients while it is in memory. Two passes are needed where log-probs of the whole
        sequence or batch enter, or for an objective of your own, which may look at any token: the
        forward then only takes log-probs, and the backward computes the logits again.

        Two cases depend on the arguments as well. Sequence-level `is_correction` takes one pass
        given `old_logps`, two without. `top_entropy_quantile` takes one pass given
        `entropy_threshold` and no entropy bonus (which averages over the chosen tokens), else two.
        """
        return self.two_pass_reason() is None

    def two_pass_reason(
        self, *, has_old_logps: bool = True, has_entropy_threshold: bool = False
    ) -> str | None:
        """The reason why this objective is not token-local; None if it is. See `one_pass`."""
        if callable(self.loss_type):
            return "an objective of the caller's own may look at any token"
        if self.surrogate in ("vespo", "gmpo"):
            return f"{self.loss_type} weighs a token by the log-probs of its whole sequence"
        if self.ratio_level == "sequence":
            return "a sequence's ratio takes the log-probs of all its tokens"
        if self.off_policy_threshold is not None:
            return "off_policy_threshold looks at a sequence's mean log-prob"
        if self.is_correction.startswith("sequence") and not has_old_logps:
            return "without old_logps a sequence's correction takes the log-probs of its tokens"
        if self.top_entropy_quantile < 1 and not has_entropy_threshold:
            return "top_entropy_quantile looks at the entropies of the whole batch"
        if self.top_entropy_quantile < 1 and self.entropy_coef:
            return "the entropy bonus averages over the tokens that top_entropy_quantile leaves"
        return None

    @property
    def needs_sequences(self) -> bool:
        """True if the loss tells sequences apart, so that packed input needs `cu_seqlens`."""
        return (
            self.effective_aggregation in ("grpo", "dr_grpo", "luspo")
            or self.surrogate in ("vespo", "gmpo")
            or self.ratio_level == "sequence"
            or self.is_correction.startswith("sequence")
            or self.off_policy_threshold is not None
        )

    @property
    def _loss(self) -> _Loss:
        return _CUSTOM if callable(self.loss_type) else _LOSSES[self.loss_type]

    def _check_types(self) -> None:
        if not callable(self.loss_type):
            check_choice("loss_type", self.loss_type, LOSS_TYPES, hint=" or a callable")
        check_choice(
            "importance_sampling_level", self.importance_sampling_level, ("token", "sequence")
        )
        if self.aggregation is not None:
            check_choice("aggregation", self.aggregation, AGGREGATIONS)
        check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_choice("is_correction", self.is_correction, IS_CORRECTIONS)
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in _NAMES or (value is None and option.name in _OPTIONAL):
                continue
            if option.name in _FLAGS:
                if not isinstance(value, bool):
                    raise TypeError(f"{option.name}: expected a bool; got {value!r}")
                continue
            check_number(option.name, value)

    def _check_ranges(self) -> None:
        for name in _POSITIVE:
            self._check_range(name, "> 0", lambda x: x > 0)
        for name in _NOT_NEGATIVE:
            self._check_range(name, ">= 0", lambda x: x >= 0)
        for name in ("epsilon", "top_entropy_quantile"):
            self._check_range(name, "in [0, 1]", lambda x: 0 <= x <= 1)
        for name in ("delta", "dual_clip"):
            self._check_range(name, "> 1", lambda x: x > 1)
        length = self.max_completion_length
        if length is not None and (not isinstance(length, int) or length < 1):
            raise ValueError(f"max_completion_length: expected a positive int; got {length!r}")

    def _check_range(self, name: str, expected: str, ok: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        if value is not None and not ok(value):
            raise ValueError(f"{name}: expected a number {expected}; got {value}")

    def _check_used(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            unused = option.name in _SPECIFIC and option.name not in self._loss.options
            if unused and value != option.default:
                raise ValueError(
                    f"{option.name}: expected {option.default!r}, as loss_type={self.loss_type!r} "
                    f"has no use for it; got {value!r}"
                )
        if self.effective_aggregation == "dr_grpo" and self.max_completion_length is None:
            raise ValueError(
                "max_completion_length: expected a positive int, as the 'dr_grpo' aggregation "
                "divides by it; got None"
            )
        if self.effective_aggregation != "dr_grpo" and self.max_completion_length is not None:
            raise ValueError(
                "max_completion_length: expected None, as only the 'dr_grpo' aggregation uses it; "
                f"got {self.max_completion_length} with loss_type={self.loss_type!r}"
            )
        if self.is_correction == "none" and (self.is_clip_max, self.is_clip_min) != (3.0, None):
            raise ValueError(
                "is_clip_max, is_clip_min: expected 3.0 and None, as is_correction='none' has no "
                f"use for them; got {self.is_clip_max} and {self.is_clip_min}"
            )

    def _check_together(self) -> None:
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError(
                "epsilon_high: expected a number, as loss_type='cispo' bounds the ratio by it and "
                "by nothing else (5.0, say); got None"
            )
        if self.delta is not None and self.dual_clip is not None:
            raise ValueError(
                "dual_clip: expected None when delta is set, as both bound the loss of negative "
                f"advantages; got {self.dual_clip} and delta={self.delta}"
            )
        if self.loss_type == "vespo" and self.is_correction.startswith("sequence"):
            raise ValueError(
                "is_correction: expected 'none', 'token_truncate' or 'token_mask', as "
                f"loss_type='vespo' sums it over the sequence itself; got {self.is_correction!r}"
            )
        if self.is_correction != "none":
            low, high = self.is_clip_min, self.is_clip_max
            if low is None and high is None:
                raise ValueError(
                    f"is_clip_max: expected a bound, as is_correction={self.is_correction!r} "
                    "needs one; got None for is_clip_min, too"
                )
            if low is not None and high is not None and low >= high:
                raise ValueError(f"is_clip_min: expected less than is_clip_max = {high}; got {low}")


def check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number; got {type(value).__name__} {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number; got {value}")


def check_choice(name: str, value: object, choices: tuple[str, ...], hint: str = "") -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}{hint}; got {value!r}")

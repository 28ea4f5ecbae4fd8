"""The GRPO objective: its configuration, per-token terms, normaliser and metrics, defined once.

Every path of the library computes this definition: the reference in float64, the torch tiles by
differentiating it, the Triton policy-loss kernel by a hand-written copy that tests hold to it.

With log-prob l, old log-prob l_old (l itself, detached, when absent), reference log-prob l_ref,
advantage A and mask m of a token:

    r       = exp(l - l_old)
    x       = -min(min(r, delta) * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)
    KL (k3) = exp(d) - d - 1,  d = l_ref - l
    loss    = sum_i w_i * (x_i + beta * KL_i) - entropy_coef * sum_i m_i * E_i / sum_i m_i

The loss types differ in the weight w of a token (B sequences, L the sequence's unmasked tokens):

    grpo     m / (B * max(L, 1))                     mean over sequences of the mean over tokens
    bnpo     m / max(sum m, 1)                       mean over the tokens of this batch
    dr_grpo  m / (B * max_completion_length)         constant denominator, no length bias
    dapo     m / max(num_items, 1)                   mean over the tokens of the optimizer step

References: GRPO, arXiv:2402.03300; DAPO, arXiv:2503.14476; Dr. GRPO, arXiv:2503.20783; two-sided
clipping (delta), arXiv:2505.07291; the k3 estimator, http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
IMPORTANCE_SAMPLING_LEVELS = ("token",)
KL_ESTIMATORS = ("k3",)


@dataclass(frozen=True, kw_only=True)
class GRPOLossConfig:
    """What loss to compute; names and defaults follow TRL's `GRPOConfig`. Validated when made.

    Args:
        loss_type: `"grpo"`, `"bnpo"`, `"dr_grpo"` or `"dapo"`: how tokens are averaged.
        beta: weight of the KL to the reference policy, >= 0; needs `ref_logps` when not 0.
        epsilon: lower clip range, in [0, 1]: ratios below `1 - epsilon` are clipped.
        epsilon_high: upper clip range, >= 0; None takes `epsilon`.
        delta: upper bound of the unclipped ratio (two-sided clipping), > 1; None is none.
        importance_sampling_level: `"token"`.
        temperature: what the logits were divided by when sampling, > 0. Acts where log-probs are
            made (`fused_grpo_loss`); `grpo_loss` is given log-probs and has no use for it.
        kl_estimator: `"k3"`.
        entropy_coef: weight of the mean-entropy bonus, subtracted from the loss.
        max_completion_length: the T of `dr_grpo`'s denominator; required by it, refused by others.

    Raises:
        ValueError: an unknown name, a value outside its range, an option the loss type lacks.
        TypeError: a value of the wrong type.
    """

    loss_type: str = "dapo"
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str = "token"
    temperature: float = 1.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    max_completion_length: int | None = None

    def __post_init__(self) -> None:
        _check_choice("loss_type", self.loss_type, LOSS_TYPES)
        _check_choice(
            "importance_sampling_level", self.importance_sampling_level, IMPORTANCE_SAMPLING_LEVELS
        )
        _check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        names = {"loss_type", "importance_sampling_level", "kl_estimator"}
        optional = {"epsilon_high", "delta", "max_completion_length"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in names or (value is None and field.name in optional):
                continue
            check_number(field.name, value)
        _check_range("beta", self.beta, self.beta >= 0, ">= 0")
        _check_range("epsilon", self.epsilon, 0 <= self.epsilon <= 1, "in [0, 1]")
        if self.epsilon_high is not None:
            _check_range("epsilon_high", self.epsilon_high, self.epsilon_high >= 0, ">= 0")
        if self.delta is not None:
            _check_range("delta", self.delta, self.delta > 1, "> 1")
        _check_range("temperature", self.temperature, self.temperature > 0, "> 0")
        length = self.max_completion_length
        if self.loss_type == "dr_grpo" and length is None:
            raise ValueError(
                "max_completion_length: expected a positive int, as loss_type='dr_grpo' divides "
                "by it; got None"
            )
        if self.loss_type != "dr_grpo" and length is not None:
            raise ValueError(
                "max_completion_length: expected None, as only loss_type='dr_grpo' uses it; "
                f"got {length} with loss_type={self.loss_type!r}"
            )
        if length is not None and (not isinstance(length, int) or length < 1):
            raise ValueError(f"max_completion_length: expected a positive int; got {length!r}")

    @property
    def clip_range(self) -> tuple[float, float]:
        """The interval `(1 - epsilon, 1 + epsilon_high)` the ratio is clipped to."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return 1.0 - self.epsilon, 1.0 + high

    @property
    def needs_sequences(self) -> bool:
        """Whether the normaliser counts sequences, so that packed input needs `cu_seqlens`."""
        return self.loss_type in ("grpo", "dr_grpo")


def check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number; got {type(value).__name__} {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number; got {value}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}; got {value!r}")


def _check_range(name: str, value: float, ok: bool, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name}: expected a number {expected}; got {value}")


@dataclass(frozen=True)
class TokenInputs:
    """What is known of every token before its log-prob is, flat `[N]`.

    `count` is 0-d, the number of unmasked tokens. `mask` None means that every token counts;
    values at masked tokens are never used.
    """

    advantages: Tensor
    weights: Tensor
    count: Tensor
    mask: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None

    def at(self, rows: Tensor | slice) -> TokenInputs:
        """The tokens of `rows`, all of which must be unmasked."""
        return TokenInputs(
            advantages=self.advantages[rows],
            weights=self.weights[rows],
            count=self.count,
            old_logps=None if self.old_logps is None else self.old_logps[rows],
            ref_logps=None if self.ref_logps is None else self.ref_logps[rows],
        )


class PolicySums(NamedTuple):
    """The loss and the sums its metrics are made of, additive over chunks of tokens."""

    sums: Tensor  # [len(SUM_NAMES)]
    ratio_max: Tensor  # []

    def __add__(self, other: PolicySums) -> PolicySums:  # type: ignore[override]
        return PolicySums(self.sums + other.sums, self.ratio_max.maximum(other.ratio_max))

    @staticmethod
    def zero(device: torch.device) -> PolicySums:
        return PolicySums(
            torch.zeros(len(SUM_NAMES), device=device), torch.zeros((), device=device)
        )


SUM_NAMES = ("loss", "ratio_mean", "clip_low", "clip_high", "entropy", "kl")


def policy_loss(
    config: GRPOLossConfig, tokens: TokenInputs, logps: Tensor, entropy: Tensor | None
) -> PolicySums:
    """The objective over `logps [N]` and `entropy [N]`; `sums[0]` is the differentiable loss.

    All tensors share one dtype, float32 or float64.
    """
    old_logps, ref_logps, mask = tokens.old_logps, tokens.ref_logps, tokens.mask
    if mask is not None:
        # Select before any exp: a masked token may hold anything, and inf * 0 is NaN.
        logps = _select(mask, logps)
        entropy = None if entropy is None else _select(mask, entropy)
        old_logps = None if old_logps is None else _select(mask, old_logps)
        ref_logps = None if ref_logps is None else _select(mask, ref_logps)
    advantages = tokens.advantages if mask is None else _select(mask, tokens.advantages)

    low, high = config.clip_range
    ratio = (logps - (logps.detach() if old_logps is None else old_logps)).exp()
    bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
    per_token = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    kl = None
    if ref_logps is not None:
        d = ref_logps - logps
        kl = torch.expm1(d) - d
        if config.beta:
            per_token = per_token + config.beta * kl
    loss = (tokens.weights * per_token).sum()
    if config.entropy_coef and entropy is not None:
        loss = loss - config.entropy_coef * entropy.sum() / tokens.count.clamp(min=1)

    with torch.no_grad():
        counted = ratio if mask is None else _select(mask, ratio)
        zero = loss.new_zeros(())
        sums = [
            counted.sum(),
            ((ratio < low) & (advantages < 0)).sum(),
            ((ratio > high) & (advantages > 0)).sum(),
            zero if entropy is None else entropy.sum(),
            zero if kl is None else kl.sum(),
        ]
        ratio_max = counted.max() if counted.numel() else zero
    stacked = torch.stack([loss, *(s.to(loss.dtype) for s in sums)])
    return PolicySums(stacked, ratio_max)


def _select(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, x, torch.zeros_like(x))


def aggregation_weights(
    config: GRPOLossConfig,
    mask: Tensor,
    sequence_ids: Tensor | None,
    num_sequences: int | None,
    num_items: float | Tensor | None,
) -> Tensor:
    """The weight of each token in the loss, `[N]`, from `mask [N]` of 0 and 1 in a float dtype."""
    if config.loss_type == "dapo":
        if isinstance(num_items, (int, float)):
            return mask / max(num_items, 1)
        total = mask.sum() if num_items is None else num_items.to(mask)
        return mask / total.clamp(min=1)
    if config.loss_type == "bnpo":
        return mask / mask.sum().clamp(min=1)
    assert sequence_ids is not None and num_sequences is not None
    if config.loss_type == "dr_grpo":
        assert config.max_completion_length is not None
        return mask / max(num_sequences * config.max_completion_length, 1)
    lengths = mask.new_zeros(num_sequences).index_add(0, sequence_ids, mask)
    return mask / (num_sequences * lengths.clamp(min=1)[sequence_ids])


def metrics_from_sums(
    totals: PolicySums, evaluated: int | Tensor, tokens: Tensor, *, has_entropy: bool, has_kl: bool
) -> dict[str, Tensor]:
    """Means over the `evaluated` tokens; what was not computed is absent rather than 0."""
    count = evaluated.clamp(min=1) if isinstance(evaluated, Tensor) else max(evaluated, 1)
    named = dict(zip(SUM_NAMES, (totals.sums / count).unbind(), strict=True))
    del named["loss"]
    if not has_entropy:
        del named["entropy"]
    if not has_kl:
        del named["kl"]
    return {**named, "ratio_max": totals.ratio_max, "tokens": tokens}

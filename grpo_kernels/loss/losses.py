"""The losses, one class each: options, formula, clip test, metrics, and properties.

Notation, per token: l the log-prob, l_old the old one, A the advantage, sg = detach, and r the
importance ratio exp(l - l_old), or exp of the mean of l - l_old over the sequence.

A new loss is a new class, and a line in `LOSSES` for a name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.checks import FLOATS, INTEGERS, check_tensor
from .tokens import MAX_LOG_RATIO, Tokens, binary_kl, bounded_exp

AGGREGATIONS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
RATIO_LEVELS = ("token", "sequence")
_REAL = (*FLOATS, torch.bool, *INTEGERS)
_VESPO_LOG_RANGE = (math.log(1e-8), 20.0)


class KernelOptions(NamedTuple):
    """Arguments of `kernels/triton_policy_loss.py`, which describes them."""

    surrogate: str
    low: float = 0.0
    high: float = 0.0
    ratio_max: float | None = None
    dual_clip: float | None = None


def option(default: Any, expected: str | tuple[str, ...], *, flat: str | None = None) -> Any:
    """A field that `GRPOLossConfig` checks: a number in one of `RANGES`, or one of some names.

    `flat` is the option of `GRPOLossConfig` that sets it for a loss given by name.
    """
    return field(default=default, metadata={"expected": expected, "flat": flat})


class Loss:
    """A loss of each token, before corrections, KL and aggregation.

    A subclass defines `per_token` and overrides what differs; with options it is a frozen
    dataclass. A class that overrides `per_token`, `log_ratio` or `clipped` must declare
    `token_local`, `gradient_needs_advantage` and `kernel` again: they are not inherited.

    Attributes:
        aggregation: the average over the tokens' losses where the config names none.
        fixed_aggregation: True if the config may not name another.
        token_local: True if the gradient of a token's log-prob follows from that token alone. One
            pass (three GEMMs) is then enough; otherwise there are two (three or four).
        gradient_needs_advantage: True if tokens of advantage 0 have no gradient, so that they may
            be skipped. With `needs_sequences`: if this holds for sequences of advantage 0.
        entropy_gradient: True if the loss has a gradient by the entropy. A token-local loss must
            declare it; autograd finds it out for others.
        ratio_level: the level of the importance ratio, `"token"` or `"sequence"`.
        token_gradient: True if the ratio has the sequence's value, but its gradient is that of the
            token's own log-prob.
        weighs_sampler: True if `per_token` uses the importance sampling weights itself; they do
            not multiply it again.
    """

    aggregation = "dapo"
    fixed_aggregation = False
    token_local = False
    gradient_needs_advantage = False
    entropy_gradient = False
    ratio_level = "token"
    token_gradient = False
    weighs_sampler = False

    def per_token(self, tokens: Tokens) -> Tensor:
        """The loss of each token, `[N]`; masked ones may hold anything."""
        raise NotImplementedError

    def __call__(self, tokens: Tokens) -> Tensor:
        """Calls `per_token`, as a user's own loss is a callable."""
        return self.per_token(tokens)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A base class's claims about its formula do not hold for a class that overrides it.
        claims = {"kernel", "closed_form", "token_local", "gradient_needs_advantage"}
        for base in cls.__mro__:
            claims -= vars(base).keys()
            if vars(base).keys() & {"per_token", "log_ratio", "clipped"}:
                break
        for name in claims:
            setattr(cls, name, getattr(Loss, name))

    @property
    def needs_sequences(self) -> bool:
        """True if the loss depends on sequences, and its metrics are means over sequences."""
        return self.ratio_level == "sequence"

    @property
    def why_two_passes(self) -> str | None:
        """The reason why the loss is not token-local; None if it is."""
        if self.ratio_level == "sequence":
            return "a sequence's ratio takes the log-probs of all its tokens"
        if self.needs_sequences:
            return f"{type(self).__name__} weighs a token by the log-probs of its whole sequence"
        if not self.token_local:
            return "an objective that does not say token_local may look at any token"
        return None

    def log_ratio(self, tokens: Tokens) -> Tensor:
        """`log r [N]`, with its gradient; bounded, so that r is finite."""
        log_ratio = tokens.log_ratio
        if self.ratio_level == "sequence":
            log_ratio = tokens.sequence_mean(log_ratio)
            if self.token_gradient:
                log_ratio = tokens.logps - tokens.logps.detach() + log_ratio.detach()
        return log_ratio.clamp(max=MAX_LOG_RATIO)

    def clipped(self, tokens: Tokens, ratio: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The tokens whose gradient the lower and the upper bound cut off, bool `[N]`.

        None without such a bound.
        """
        return None, None

    def metrics(self, tokens: Tokens, ratio: Tensor) -> dict[str, Tensor]:
        """The loss's own metrics by name, a value per token `[N]`; the metric is their mean.

        `loss.metrics.TAKEN` and `TAKEN_PREFIXES` are names that it may not use.
        """
        return {}

    def kernel(self) -> KernelOptions | None:
        """The arguments of the policy-loss kernel; None if it does not support this loss."""
        return None

    def closed_form(self, tokens: Tokens) -> tuple[Tensor, Tensor] | None:
        """The loss of each token and its derivative by the log-prob; None: autograd's."""
        return None

    def label_of(self, method: str) -> str:
        """The name of a method in errors about its result."""
        return f"loss_type: {type(self).__name__}.{method}"


def one_per_token(name: str, x: object, tokens: Tokens) -> Tensor:
    """Checks a value per token `[N]` that a user's own loss returned."""
    like = tokens.logps
    return check_tensor(name, x, shape=like.shape, dtypes=_REAL, device=like.device)


class OwnLoss(Loss):
    """A user's callable, whose attributes overrule those of `Loss`."""

    def __init__(self, function: Callable[[Tokens], Tensor]) -> None:
        self.function = function
        for name in ("aggregation", "token_local", "gradient_needs_advantage", "entropy_gradient"):
            setattr(self, name, getattr(function, name, getattr(Loss, name)))

    def per_token(self, tokens: Tokens) -> Tensor:
        return self.function(tokens)

    def label_of(self, method: str) -> str:
        return f"loss_type: {getattr(self.function, '__name__', type(self.function).__name__)}()"


@dataclass(frozen=True, kw_only=True)
class Clip(Loss):
    """`-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`.

    At most `dual_clip |A|` where A < 0. GRPO, arXiv:2402.03300; sequence ratios and
    `token_gradient`, GSPO, arXiv:2507.18071; `delta`, arXiv:2505.07291; `dual_clip`,
    arXiv:1912.09729. With another aggregation it has other names: DAPO, arXiv:2503.14476; Dr. GRPO,
    arXiv:2503.20783; LUSPO, arXiv:2602.05261.
    """

    epsilon: float = option(0.2, "in [0, 1]", flat="epsilon")
    epsilon_high: float | None = option(None, ">= 0", flat="epsilon_high")
    delta: float | None = option(None, "> 1", flat="delta")
    dual_clip: float | None = option(None, "> 1", flat="dual_clip")
    ratio_level: str = option("token", RATIO_LEVELS, flat="importance_sampling_level")
    token_gradient: bool = False
    aggregation: str = option("dapo", AGGREGATIONS)
    token_local = True
    gradient_needs_advantage = True

    def __post_init__(self) -> None:
        if self.delta is not None and self.dual_clip is not None:
            raise ValueError(
                f"dual_clip={self.dual_clip} does not work with delta={self.delta}, as both bound "
                "the loss where A < 0: pass one of the two"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval that the ratio is clipped to."""
        return 1.0 - self.epsilon, 1.0 + _upper(self)

    def per_token(self, tokens: Tokens) -> Tensor:
        A, ratio = tokens.advantages, self.log_ratio(tokens).exp()
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        x = -torch.minimum(bounded * A, ratio.clamp(*self.bounds) * A)
        if self.dual_clip is not None:
            cap = -self.dual_clip * A
            x = torch.where((A < 0) & (x > cap), cap, x)
        return x

    def clipped(self, tokens: Tokens, ratio: Tensor) -> tuple[Tensor, Tensor]:
        return _cut_off(ratio, *self.bounds, tokens.advantages)

    def closed_form(self, tokens: Tokens) -> tuple[Tensor, Tensor] | None:
        if self.ratio_level == "sequence":
            return None
        x, d = self.per_token(tokens), tokens.log_ratio
        # Where no bound holds, x is -r A and equals its derivative; elsewhere it is constant.
        flows = (x == -tokens.advantages * bounded_exp(d)) & (d <= MAX_LOG_RATIO)
        return x, torch.where(flows, x, 0.0)

    def kernel(self) -> KernelOptions:
        return KernelOptions("clip", *self.bounds, self.delta, self.dual_clip)


@dataclass(frozen=True, kw_only=True)
class Cispo(Loss):
    """`-sg(min(r, epsilon_high)) A l`; arXiv:2506.13585."""

    epsilon_high: float | None = option(None, ">= 0", flat="epsilon_high")
    ratio_level: str = option("token", RATIO_LEVELS, flat="importance_sampling_level")
    token_local = True
    gradient_needs_advantage = True

    def __post_init__(self) -> None:
        if self.epsilon_high is None:
            raise ValueError(
                "loss_type='cispo' needs epsilon_high, the largest weight: set it (5.0 in ScaleRL)"
            )

    def per_token(self, tokens: Tokens) -> Tensor:
        ratio = self.log_ratio(tokens).detach().exp()
        return -ratio.clamp(max=self.epsilon_high) * tokens.advantages * tokens.logps

    def clipped(self, tokens: Tokens, ratio: Tensor) -> tuple[None, Tensor]:
        assert self.epsilon_high is not None
        return None, _cut_off(ratio, 0.0, self.epsilon_high, tokens.advantages)[1]

    def metrics(self, tokens: Tokens, ratio: Tensor) -> dict[str, Tensor]:
        return {"cispo_clip_ratio": self.clipped(tokens, ratio)[1]}

    def kernel(self) -> KernelOptions:
        return KernelOptions("cispo", ratio_max=self.epsilon_high)


@dataclass(frozen=True, kw_only=True)
class Sapo(Loss):
    """`-4 / tau sigmoid(tau (r - 1)) A`, tau by the sign of A; arXiv:2511.20347."""

    temperature_pos: float = option(1.0, "> 0", flat="sapo_temperature_pos")
    temperature_neg: float = option(1.05, "> 0", flat="sapo_temperature_neg")
    aggregation = "grpo"
    token_local = True
    gradient_needs_advantage = True

    def per_token(self, tokens: Tokens) -> Tensor:
        A, ratio = tokens.advantages, self.log_ratio(tokens).exp()
        tau = _either(A > 0, self.temperature_pos, self.temperature_neg, A)
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * A


@dataclass(frozen=True, kw_only=True)
class Vespo(Loss):
    """`-sg(phi(w)) A l`, w the product of a sequence's ratios; arXiv:2602.10693.

    `phi(w) = e^lambda w^k e^(-lambda w)`, k and lambda by the sign of A.
    """

    k_pos: float = option(2.0, "> 0", flat="vespo_k_pos")
    lambda_pos: float = option(3.0, "> 0", flat="vespo_lambda_pos")
    k_neg: float = option(3.0, "> 0", flat="vespo_k_neg")
    lambda_neg: float = option(2.0, "> 0", flat="vespo_lambda_neg")
    gradient_needs_advantage = True
    needs_sequences = True
    weighs_sampler = True

    def per_token(self, tokens: Tokens) -> Tensor:
        return -self.weights(tokens) * tokens.advantages * tokens.logps

    @torch.no_grad()
    def weights(self, tokens: Tokens) -> Tensor:
        """`phi [N]`, the same for all tokens of a sequence whose advantages have one sign."""
        low, high = _VESPO_LOG_RANGE
        log_w = tokens.sequence_sum(tokens.log_ratio.clamp(-high, high))
        rho = tokens.importance_sampling_weights
        if rho is not None:
            log_w = log_w + tokens.sequence_sum(rho.log().clamp(low, high))
        log_w = log_w.clamp(low, high)
        positive = tokens.advantages >= 0
        k = _either(positive, self.k_pos, self.k_neg, log_w)
        decay = _either(positive, self.lambda_pos, self.lambda_neg, log_w)
        return (decay + k * log_w - decay * log_w.exp()).exp()

    def metrics(self, tokens: Tokens, ratio: Tensor) -> dict[str, Tensor]:
        return {"vespo/phi_seq_mean": self.weights(tokens)}


@dataclass(frozen=True, kw_only=True)
class Gmpo(Loss):
    """`-A exp(mean of s min(s d, s clip(d, -epsilon, epsilon_high)))`, s = sign A, d = l - l_old.

    The geometric mean of a sequence's clipped ratios; arXiv:2507.20673, whose epsilon is 0.4.
    """

    epsilon: float = option(0.2, "in [0, 1]", flat="epsilon")
    epsilon_high: float | None = option(None, ">= 0", flat="epsilon_high")
    aggregation = "grpo"
    fixed_aggregation = True
    gradient_needs_advantage = True
    needs_sequences = True

    def per_token(self, tokens: Tokens) -> Tensor:
        A, d, sign = tokens.advantages, tokens.log_ratio, tokens.advantages.sign()
        clipped = torch.minimum(sign * d, sign * d.clamp(-self.epsilon, _upper(self)))
        return -A * bounded_exp(tokens.sequence_mean(sign * clipped))

    def clipped(self, tokens: Tokens, ratio: Tensor) -> tuple[Tensor, Tensor]:
        return _cut_off(tokens.log_ratio, -self.epsilon, _upper(self), tokens.advantages)


@dataclass(frozen=True, kw_only=True)
class Reinforce(Loss):
    """`-A l`; GPG, arXiv:2504.02546."""

    token_local = True
    gradient_needs_advantage = True

    def per_token(self, tokens: Tokens) -> Tensor:
        return -tokens.advantages * tokens.logps


@dataclass(frozen=True, kw_only=True)
class DppoTV(Loss):
    """`-sg(min(r, ratio_max)) A l`, 0 where the probability has moved far; arXiv:2602.04879.

    Far is beyond epsilon_high upwards where A > 0, beyond epsilon downwards where A < 0.
    """

    epsilon: float = option(0.2, "in [0, 1]", flat="epsilon")
    epsilon_high: float | None = option(None, ">= 0", flat="epsilon_high")
    ratio_max: float = option(20.0, "> 0", flat="dppo_ratio_max")
    token_local = True
    gradient_needs_advantage = True

    def per_token(self, tokens: Tokens) -> Tensor:
        ratio = self.log_ratio(tokens).detach().exp()
        low, high = self.clipped(tokens, ratio)
        weight = ratio.clamp(max=self.ratio_max).masked_fill(low | high, 0.0)
        return -tokens.advantages * weight * tokens.logps

    def clipped(self, tokens: Tokens, ratio: Tensor) -> tuple[Tensor, Tensor]:
        moved = tokens.logps.detach().exp() - tokens.old_logps.exp()
        return _cut_off(moved, -self.epsilon, _upper(self), tokens.advantages)


@dataclass(frozen=True, kw_only=True)
class DppoKL(DppoTV):
    """`DppoTV` with `KL(old || new)` of two outcomes as distance: this token, or any other."""

    token_local = True
    gradient_needs_advantage = True

    def clipped(self, tokens: Tokens, ratio: Tensor) -> tuple[Tensor, Tensor]:
        logps = tokens.logps.detach()
        moved = binary_kl(tokens.old_logps, logps) * (logps - tokens.old_logps).sign()
        return _cut_off(moved, -self.epsilon, _upper(self), tokens.advantages)


# Names, each with its class and the fields that differ from the defaults.
LOSSES: dict[str, tuple[type[Loss], dict[str, Any]]] = {
    **{name: (Clip, {"aggregation": name}) for name in AGGREGATIONS},
    "cispo": (Cispo, {}),
    "sapo": (Sapo, {}),
    "vespo": (Vespo, {}),
    "gspo": (Clip, {"aggregation": "grpo", "ratio_level": "sequence"}),
    "gspo_token": (
        Clip, {"aggregation": "grpo", "ratio_level": "sequence", "token_gradient": True}
    ),
    "gmpo": (Gmpo, {}),
    "reinforce": (Reinforce, {}),
    "dppo_tv": (DppoTV, {}),
    "dppo_kl": (DppoKL, {}),
}  # fmt: skip
LOSS_TYPES = tuple(LOSSES)
_CLASSES = {cls for cls, _ in LOSSES.values()}


def is_own(loss: Loss) -> bool:
    """True for a user's own loss, whose results are checked."""
    return type(loss) not in _CLASSES


def flat_fields(name: str) -> dict[str, Field[Any]]:
    """The fields of this loss type by the option of `GRPOLossConfig` that sets them."""
    cls: Any = LOSSES[name][0]
    return {f.metadata["flat"]: f for f in fields(cls) if f.metadata.get("flat")}


def _upper(loss: Clip | Gmpo | DppoTV) -> float:
    return loss.epsilon if loss.epsilon_high is None else loss.epsilon_high


def _cut_off(moved: Tensor, low: float, high: float, advantages: Tensor) -> tuple[Tensor, Tensor]:
    return (moved < low) & (advantages < 0), (moved > high) & (advantages > 0)


def _either(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    # In the dtype of `like`: torch.where of two numbers takes the default dtype.
    return torch.where(condition, torch.full_like(like, yes), no)

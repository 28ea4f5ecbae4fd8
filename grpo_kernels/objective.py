"""The objective: per-token terms, corrections and averages, defined once.

Every path of the library computes this definition: the reference in float64, the torch backend by
differentiating it, the Triton policy-loss kernel by a hand-written copy of its token-local part
that tests hold to it.

With log-prob l, old log-prob l_old (l itself, detached, when absent), reference log-prob l_ref,
the sampler's log-prob l_roll, advantage A and mask m of a token; L the unmasked tokens of its
sequence, B sequences, sg = detach:

    r    = exp(l - l_old), or of its mean over the sequence
    x    = surrogate(r, A, l)                              below, in `_surrogate`
    s    = off-policy mask * high-entropy mask * rho       detached, `surrogate_scale`
    KL   = estimate(l_ref - l) [* r]                       `kl_estimate`, bias correction
    loss = sum_i w_i * (s_i * x_i + beta * KL_i) - entropy_coef * mean entropy

The aggregation is all in the weight w of a token, where `num_items` takes the place of sum m or B:

    grpo     m / (B * max(L, 1))                     mean over sequences of the mean over tokens
    bnpo     m / max(sum m, 1)                       mean over the tokens of this batch
    dr_grpo  m / (B * max_completion_length)         constant denominator, no length bias
    dapo     m / max(sum m, 1)                       mean over the tokens of the optimizer step
    luspo    m / B                                   mean over sequences of the sum over tokens

References: GRPO, arXiv:2402.03300; DAPO, arXiv:2503.14476; Dr. GRPO, arXiv:2503.20783; two-sided
clipping (delta), arXiv:2505.07291; dual clip, arXiv:1912.09729; the k estimators,
http://joschu.net/blog/kl-approx.html; KL bias correction and off-policy mask, arXiv:2512.02556;
entropy mask, arXiv:2506.01939; of the surrogates, beside each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .config import TOKEN_MEANS, GRPOLossConfig
from .sequences import Sequences, widened

# Largest log-ratio: e^80 is far beyond any use, and still no infinity that 0 turns into NaN.
_MAX_LOG_RATIO = 80.0
_KL_LOG_RATIO = 20.0
_VESPO_LOG_RANGE = (math.log(1e-8), 20.0)


@dataclass(frozen=True)
class LossInputs:
    """The constants of a policy loss, flat `[N]`: all that is known before the log-probs are.

    `count`, 0-d, is the number of unmasked tokens. `mask` None means that every token counts;
    values at masked tokens are never used. `importance_sampling_weights` are those of the sampler,
    None where they are not known beforehand; `entropy_threshold` is 0-d. `ce_weights` are those of
    the cross-entropy term (`cross_entropy.py`), whose tokens may be masked ones.
    """

    advantages: Tensor
    weights: Tensor
    count: Tensor
    mask: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    sampling_logps: Tensor | None = None
    importance_sampling_weights: Tensor | None = None
    entropy_threshold: Tensor | None = None
    sequences: Sequences | None = None
    ce_weights: Tensor | None = None

    def at(self, rows: Tensor | slice, *, masked: bool = False) -> LossInputs:
        """The tokens of `rows`, some of them `masked` or none; sequences are not told apart."""
        names = (
            "advantages", "weights", "old_logps", "ref_logps", "sampling_logps",
            "importance_sampling_weights", "ce_weights",
        )  # fmt: skip
        given = {name: x[rows] for name in names if (x := getattr(self, name)) is not None}
        mask = self.mask[rows] if masked and self.mask is not None else None
        return replace(self, **given, mask=mask, sequences=None)

    def within(self, tokens: Tensor) -> LossInputs:
        """The same of these `tokens` alone, bool `[N]`: the others are masked."""
        ce_weights = self.ce_weights
        if ce_weights is not None:
            ce_weights = torch.where(tokens, ce_weights, 0.0)
        mask = tokens if self.mask is None else self.mask & tokens
        return replace(self, mask=mask, ce_weights=ce_weights)


@dataclass(frozen=True)
class Tokens:
    """The tokens as an objective sees them: flat `[N]`, with zeros where the mask is 0.

    `logps` and `entropy` carry gradients, the rest are constants. `old_logps` is `logps`, detached,
    where none were given; `mask` is 0 and 1 in the dtype of `logps`; `entropy` is None where
    `grpo_loss` was given none; `importance_sampling_weights` and `entropy_threshold` (0-d) are None
    where they are not known beforehand.
    """

    logps: Tensor
    old_logps: Tensor
    advantages: Tensor
    mask: Tensor
    entropy: Tensor | None = None
    ref_logps: Tensor | None = None
    sampling_logps: Tensor | None = None
    importance_sampling_weights: Tensor | None = None
    entropy_threshold: Tensor | None = None
    sequences: Sequences | None = None

    @property
    def log_ratio(self) -> Tensor:
        """`logps - old_logps`."""
        return self.logps - self.old_logps

    @property
    def ratio(self) -> Tensor:
        """`exp(log_ratio)`, finite whatever came."""
        return _exp(self.log_ratio)

    def sequence_sum(self, x: Tensor) -> Tensor:
        """The sum of `x [N]` over the unmasked tokens of each token's sequence, `[N]`."""
        sequences = self._known_sequences()
        return sequences.spread(sequences.sum(_select(self.mask, x)))

    def sequence_mean(self, x: Tensor) -> Tensor:
        """The mean of `x [N]` over the unmasked tokens of each token's sequence, `[N]`."""
        sequences = self._known_sequences()
        return sequences.spread(sequences.sum(_select(self.mask, x)) / self._lengths)

    @cached_property
    def _lengths(self) -> Tensor:
        return self._known_sequences().sum(self.mask).clamp(min=1)

    def _known_sequences(self) -> Sequences:
        if self.sequences is None:
            raise ValueError(
                "cu_seqlens: expected offsets [B + 1], as the objective tells sequences apart and "
                "the input is packed; got None"
            )
        return self.sequences

    @staticmethod
    def of(inputs: LossInputs, logps: Tensor, entropy: Tensor | None) -> Tokens:
        """The tokens of `inputs` with their log-probs and entropy."""
        # Select before any exp: a masked token may hold anything, and inf * 0 is NaN.
        mask = inputs.mask

        def clean(x: Tensor) -> Tensor:
            return x if mask is None else torch.where(mask, x, 0.0)

        def clean_given(x: Tensor | None) -> Tensor | None:
            return None if x is None else clean(x)

        logps = clean(logps)
        return Tokens(
            logps=logps,
            old_logps=logps.detach() if inputs.old_logps is None else clean(inputs.old_logps),
            advantages=clean(inputs.advantages),
            mask=torch.ones_like(logps) if mask is None else mask.to(logps.dtype),
            entropy=clean_given(entropy),
            ref_logps=clean_given(inputs.ref_logps),
            sampling_logps=clean_given(inputs.sampling_logps),
            importance_sampling_weights=inputs.importance_sampling_weights,
            entropy_threshold=inputs.entropy_threshold,
            sequences=inputs.sequences,
        )


def policy_loss(
    config: GRPOLossConfig,
    inputs: LossInputs,
    logps: Tensor,
    entropy: Tensor | None,
    *,
    stable_kl: bool = False,
) -> Tensor:
    """The objective over `logps [N]` and `entropy [N]`, a differentiable scalar.

    All tensors share one dtype, float32 or float64. Over chunks of tokens it is additive, if the
    objective is token-local. `stable_kl` takes the derivative of the KL times the ratio in closed
    form: autograd's, in float32, cancels.
    """
    tokens = Tokens.of(inputs, logps, entropy)
    log_ratio = log_importance_ratio(config, tokens)
    scale, chosen = surrogate_scale(config, tokens)
    per_token = _surrogate(config, tokens, log_ratio.exp())
    if scale is not None:
        per_token = per_token * scale
    if config.beta:
        kl = kl_terms_in_closed_form if stable_kl else kl_terms
        per_token = per_token + config.beta * kl(config, tokens, log_ratio)
    loss = (inputs.weights * per_token).sum()
    if config.entropy_coef and tokens.entropy is not None:
        count = inputs.count
        entropy = tokens.entropy
        if chosen is not None:
            count, entropy = chosen.sum(), _select(chosen, entropy)
        loss = loss - config.entropy_coef * entropy.sum() / count.clamp(min=1)
    return loss


def token_local(config: GRPOLossConfig, inputs: LossInputs) -> bool:
    """True if a token's gradient follows from that token and these inputs alone."""
    reason = config.two_pass_reason(
        has_old_logps=inputs.old_logps is not None,
        has_entropy_threshold=inputs.entropy_threshold is not None,
    )
    return reason is None


def log_importance_ratio(config: GRPOLossConfig, tokens: Tokens) -> Tensor:
    """`log r [N]`, with its gradient; bounded, so that r is finite."""
    if config.ratio_level == "token":
        log_ratio = tokens.log_ratio
    else:
        log_ratio = tokens.sequence_mean(tokens.log_ratio)
        if config.loss_type == "gspo_token":
            # The sequence's ratio, and the gradient of the token's own.
            log_ratio = tokens.logps - tokens.logps.detach() + log_ratio.detach()
    return log_ratio.clamp(max=_MAX_LOG_RATIO)


def importance_ratio(config: GRPOLossConfig, tokens: Tokens) -> Tensor:
    """`r [N]`, with its gradient."""
    return log_importance_ratio(config, tokens).exp()


def _surrogate(config: GRPOLossConfig, tokens: Tokens, ratio: Tensor) -> Tensor:
    """The loss of each token, `[N]`, before corrections."""
    A = tokens.advantages
    low, high = config.clip_range
    match config.surrogate:
        case "clip":  # arXiv:2402.03300; sequence ratios, arXiv:2507.18071; luspo, 2602.05261
            bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
            x = -torch.minimum(bounded * A, ratio.clamp(low, high) * A)
            if config.dual_clip is not None:
                cap = -config.dual_clip * A
                x = torch.where((A < 0) & (x > cap), cap, x)
            return x
        case "cispo":  # arXiv:2506.13585
            return -ratio.detach().clamp(max=config.epsilon_high) * A * tokens.logps
        case "sapo":  # arXiv:2511.20347
            tau = _either(A > 0, config.sapo_temperature_pos, config.sapo_temperature_neg, A)
            return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * A
        case "vespo":  # arXiv:2602.10693
            return -vespo_weights(config, tokens) * A * tokens.logps
        case "gmpo":  # arXiv:2507.20673; the product of clipped ratios, its mean in log space
            d, sign = tokens.log_ratio, A.sign()
            clipped = d.clamp(-config.epsilon, config.upper_epsilon)
            return -A * _exp(tokens.sequence_mean(sign * torch.minimum(sign * d, sign * clipped)))
        case "reinforce":
            return -A * tokens.logps
        case "dppo_tv":  # arXiv:2602.04879
            low_cut, high_cut = clipped_tokens(config, tokens, ratio)
            weight = ratio.detach().clamp(max=config.dppo_ratio_max)
            return -A * weight.masked_fill(low_cut | high_cut, 0.0) * tokens.logps
        case _:
            assert callable(config.loss_type)
            return _checked(config.loss_type(tokens), tokens)


def _checked(x: object, tokens: Tokens) -> Tensor:
    expected = "loss_type: expected the callable to return the loss of every token, "
    shape = tokens.logps.shape
    if not isinstance(x, Tensor):
        raise TypeError(f"{expected}a tensor {list(shape)}; got {type(x).__name__}")
    if x.shape != shape:
        raise ValueError(f"{expected}shape {list(shape)}; got {list(x.shape)}")
    if torch.is_grad_enabled() and tokens.logps.requires_grad and not x.requires_grad:
        raise ValueError(f"{expected}with a gradient for tokens.logps or tokens.entropy; got none")
    # Masked tokens may come back as anything, NaN included.
    return _select(tokens.mask, x.to(tokens.logps.dtype))


@torch.no_grad()
def vespo_weights(config: GRPOLossConfig, tokens: Tokens) -> Tensor:
    """phi(w) = e^lambda * w^k * e^(-lambda * w), w the ratio of the whole sequence; `[N]`."""
    low, high = _VESPO_LOG_RANGE
    log_w = tokens.sequence_sum(tokens.log_ratio.clamp(-high, high))
    rho = importance_sampling_weights(config, tokens)
    if rho is not None:
        log_w = log_w + tokens.sequence_sum(rho.log().clamp(low, high))
    log_w = log_w.clamp(low, high)
    positive = tokens.advantages >= 0
    k = _either(positive, config.vespo_k_pos, config.vespo_k_neg, log_w)
    decay = _either(positive, config.vespo_lambda_pos, config.vespo_lambda_neg, log_w)
    return (decay + k * log_w - decay * log_w.exp()).exp()


@torch.no_grad()
def clipped_tokens(config: GRPOLossConfig, tokens: Tokens, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that the lower and the upper bound cut off from their gradient, bool `[N]`."""
    A = tokens.advantages
    low, high = -config.epsilon, config.upper_epsilon
    match config.surrogate:
        case "clip":
            moved, (low, high) = ratio, config.clip_range
        case "gmpo":
            moved = tokens.log_ratio
        case "dppo_tv":
            moved = tokens.logps.exp() - tokens.old_logps.exp()
        case "cispo":
            moved, low = ratio, -math.inf
        case _:
            moved, low, high = ratio, -math.inf, math.inf
    return (moved < low) & (A < 0), (moved > high) & (A > 0)


@torch.no_grad()
def surrogate_scale(config: GRPOLossConfig, tokens: Tokens) -> tuple[Tensor | None, Tensor | None]:
    """The factor of the surrogate, `[N]`, and the high-entropy mask, `[N]`.

    None where the factor is 1, and where there is no such mask. No gradient flows here.
    """
    scale, chosen = None, None
    if config.off_policy_threshold is not None:
        scale = off_policy_mask(config, tokens).to(tokens.logps.dtype)
    if config.top_entropy_quantile < 1:
        chosen = high_entropy_mask(config, tokens)
        scale = chosen if scale is None else scale * chosen
    rho = None
    if config.surrogate != "vespo":  # which takes them into its own weight
        rho = importance_sampling_weights(config, tokens)
    if rho is not None:
        scale = rho if scale is None else scale * rho
    return scale, chosen


@torch.no_grad()
def off_policy_mask(config: GRPOLossConfig, tokens: Tokens) -> Tensor:
    """The tokens to keep, bool `[N]`: advantage >= 0, or a sampler still close to the policy."""
    assert config.off_policy_threshold is not None
    sampler = tokens.old_logps if tokens.sampling_logps is None else tokens.sampling_logps
    # NaN: the sampler has no log-prob of this token.
    drift = (sampler - tokens.logps).nan_to_num(nan=0.0)
    return (tokens.advantages >= 0) | (tokens.sequence_mean(drift) <= config.off_policy_threshold)


def high_entropy_mask(config: GRPOLossConfig, tokens: Tokens) -> Tensor:
    """The unmasked tokens in the top quantile of entropy, 0 or 1, `[N]`."""
    assert tokens.entropy is not None
    entropy, threshold = tokens.entropy.detach(), tokens.entropy_threshold
    if threshold is None:
        threshold = masked_quantile(entropy, tokens.mask, 1 - config.top_entropy_quantile)
    return (entropy >= threshold).to(entropy.dtype) * tokens.mask


def masked_quantile(x: Tensor, mask: Tensor, q: float) -> Tensor:
    """`torch.quantile(x[mask], q)`, 0-d, of any size and without reading the mask's count."""
    if not x.numel():
        return x.new_zeros(())
    ordered = torch.where(mask != 0, x, torch.inf).sort().values
    position = q * (widened(mask).sum() - 1).clamp(min=0)
    below = position.floor()
    # Not ordered[below], which would read the index from the device.
    ends = ordered.index_select(0, torch.stack([below, position.ceil()]).long())
    return torch.lerp(ends[0], ends[1], (position - below).to(x.dtype))


@torch.no_grad()
def importance_sampling_weights(config: GRPOLossConfig, tokens: Tokens) -> Tensor | None:
    """The weight rho `[N]`: exp(l_old - l_roll) of the token or of its sequence's sum, bounded."""
    if config.is_correction == "none" or tokens.importance_sampling_weights is not None:
        return tokens.importance_sampling_weights
    assert tokens.sampling_logps is not None
    # NaN: the sampler has no log-prob of this token, which then keeps weight 1.
    log_w = (tokens.old_logps.detach() - tokens.sampling_logps).nan_to_num(nan=0.0)
    if config.is_correction.startswith("sequence"):
        log_w = tokens.sequence_sum(log_w)
    w, low, high = _exp(log_w), config.is_clip_min, config.is_clip_max
    if config.is_correction.endswith("truncate"):
        return w.clamp(low, high)
    outside = (w < (-math.inf if low is None else low)) | (w > (math.inf if high is None else high))
    return w.masked_fill(outside, 0.0)


def with_known_weights(config: GRPOLossConfig, inputs: LossInputs) -> LossInputs:
    """`inputs` with the importance sampling weights, where old log-probs make them constants."""
    if config.is_correction == "none" or inputs.old_logps is None:
        return inputs
    weights = importance_sampling_weights(config, Tokens.of(inputs, inputs.old_logps, None))
    return replace(inputs, importance_sampling_weights=weights)


def kl_terms(config: GRPOLossConfig, tokens: Tokens, log_ratio: Tensor) -> Tensor:
    """The KL of each token to the reference as it enters the loss, `[N]`."""
    assert tokens.ref_logps is not None
    kl = kl_estimate(config.kl_estimator, tokens.ref_logps - tokens.logps, config.kl_clamp)
    return kl * log_ratio.exp() if config.use_bias_correction_kl else kl


def kl_terms_in_closed_form(config: GRPOLossConfig, tokens: Tokens, log_ratio: Tensor) -> Tensor:
    """`kl_terms` with `d(r KL) = r (KL + KL') dlog r + r KL' (dl - dlog r)`, KL + KL' as one.

    In k3's KL + KL' the terms e^d cancel, and what is left is -d: at d = 12 the product rule has
    lost four digits. The second term is 0 where the ratio is the token's own.
    """
    if not config.use_bias_correction_kl:
        return kl_terms(config, tokens, log_ratio)
    assert tokens.ref_logps is not None
    d = (tokens.ref_logps - tokens.logps).detach().requires_grad_()
    with torch.enable_grad():
        estimate = kl_estimate(config.kl_estimator, d, config.kl_clamp)
        slope = -torch.autograd.grad(estimate.sum(), d)[0]
    kl, d, ratio = estimate.detach(), d.detach(), log_ratio.detach().exp()
    total = kl + slope
    if config.kl_estimator == "k3":
        total = torch.where(slope == 0, kl, -d)  # without a slope: clamped
    own = tokens.logps - tokens.logps.detach()
    if config.ratio_level == "token" or config.loss_type == "gspo_token":
        # Beyond its bound a ratio is a constant.
        return ratio * (kl + torch.where(log_ratio < _MAX_LOG_RATIO, total, slope) * own)
    moved = log_ratio - log_ratio.detach()
    return ratio * (kl + total * moved + slope * (own - tokens.sequence_mean(own)))


def kl_estimate(estimator: str, d: Tensor, clamp: float | None) -> Tensor:
    """An estimate of KL(policy || reference) from `d = ref_logps - logps`, elementwise."""
    if clamp is not None:
        d = d.clamp(-_KL_LOG_RATIO, _KL_LOG_RATIO)
    match estimator.rstrip("+"):
        case "k1":
            kl = -d
        case "abs":
            kl = d.abs()
        case "k2":
            kl = d.square() / 2
        case _:
            kl = torch.expm1(d) - d
    if clamp is not None:
        kl = kl.clamp(-clamp, clamp)
    if estimator.endswith("+"):
        k2 = kl_estimate("k2", d, clamp)
        kl = kl.detach() + (k2 - k2.detach())
    return kl


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()


def _either(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    # In the dtype of `like`, where torch.where of two numbers takes the default one.
    return torch.where(condition, torch.full_like(like, yes), no)


def _select(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask != 0, x, torch.zeros_like(x))


def aggregation_weights(
    config: GRPOLossConfig,
    mask: Tensor,
    count: Tensor,
    sequences: Sequences | None,
    num_items: float | Tensor | None,
) -> Tensor:
    """The weight of each token in the loss, `[N]`, from `mask [N]` of 0 and 1 in a float dtype.

    `count`: the tokens that are not masked, 0-d. A denominator of 0 belongs to no token, and is 1.
    """
    aggregation, items = config.effective_aggregation, num_items
    if items is None:
        items = count if aggregation in TOKEN_MEANS else _known(sequences).count
    if isinstance(items, Tensor):
        items = torch.where(items == 0, 1, items).to(mask.dtype)
    else:
        items = items or 1
    if aggregation == "dr_grpo":
        assert config.max_completion_length is not None
        items = items * config.max_completion_length
    if aggregation != "grpo":
        return mask / items
    sequences = _known(sequences)
    return mask / (items * sequences.spread(sequences.sum(mask).clamp(min=1)))


def _known(sequences: Sequences | None) -> Sequences:
    assert sequences is not None
    return sequences

"""The objective: losses, corrections, KL and averages, defined once.

Every path of the library computes this definition: the reference in float64; `grpo_loss` and the
torch backend by autograd or a closed form of it; the Triton policy-loss kernel by a hand-written
copy of a part.

With log-prob l, old log-prob l_old (l, detached, when absent), reference log-prob l_ref, the
sampler's log-prob l_roll, advantage A and mask m of a token; L the unmasked tokens of its sequence,
B sequences:

    x    = loss of the token                               `losses.py`, one class each
    s    = off-policy mask * high-entropy mask * rho       detached, `surrogate_scale`
    KL   = estimate(l_ref - l) [* r]                       `kl_estimate`, bias correction;
           or the KL of the two softmaxes                  `exact_kl`
    loss = sum_i w_i * (s_i * x_i + beta * KL_i) - entropy_coef * mean entropy

The weight w of a token has the aggregation; `num_items` takes the place of sum m or B:

    grpo     m / (B * max(L, 1))                     mean over sequences of the mean over tokens
    bnpo     m / max(sum m, 1)                       mean over the tokens of this batch
    dr_grpo  m / (B * max_completion_length)         constant denominator, no length bias
    dapo     m / max(sum m, 1)                       mean over the tokens of the optimizer step
    luspo    m / B                                   mean over sequences of the sum over tokens

References: the k estimators, http://joschu.net/blog/kl-approx.html; KL bias correction and
off-policy mask, arXiv:2512.02556; entropy mask, arXiv:2506.01939.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..base.layout import selected
from ..base.sequences import Sequences, masked_quantile
from .config import TOKEN_MEANS, GRPOLossConfig
from .losses import Loss, is_own, one_per_token
from .tokens import MAX_LOG_RATIO, Tokens, binary_kl, bounded_exp, total_variation

_KL_LOG_RATIO = 20.0


def policy_objective(config: GRPOLossConfig, tokens: Tokens, *, stable_kl: bool = False) -> Tensor:
    """The objective over `tokens` (`tokens_of`), a differentiable scalar.

    All tensors share one dtype, float32 or float64. A token-local objective is additive over chunks
    of tokens. `stable_kl` differentiates the KL times the ratio in closed form, as autograd's
    result cancels in float32.
    """
    scale, chosen = surrogate_scale(config, tokens)
    per_token, kl = token_losses(config, tokens, scale, stable_kl=stable_kl)
    if kl is not None:
        per_token = per_token + kl
    loss = (tokens.weights * per_token).sum()
    if config.exact_kl:
        loss = loss + exact_kl(config, tokens)
    if config.entropy_coef and tokens.entropy is not None:
        entropy, count = entropy_in_bonus(tokens, chosen)
        loss = loss - config.entropy_coef * entropy.sum() / count
    return loss


@torch.no_grad()
def objective_in_closed_form(
    config: GRPOLossConfig, tokens: Tokens
) -> tuple[Tensor, Tensor] | None:
    """The objective and its gradient by the log-probs, `[N]`, without autograd.

    None if the loss of a token has no closed form, or another term has a gradient.
    """
    if config.entropy_coef or (config.beta and not config.exact_kl):
        return None
    closed_form = config.loss.closed_form(tokens)
    if closed_form is None:
        return None
    scale, _ = surrogate_scale(config, tokens)
    weights = tokens.weights if scale is None else tokens.weights * scale
    per_token, d_logps = (weights * x for x in closed_form)
    loss = per_token.sum()
    return loss + exact_kl(config, tokens) if config.exact_kl else loss, d_logps


def token_losses(
    config: GRPOLossConfig, tokens: Tokens, scale: Tensor | None, *, stable_kl: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`s_i * x_i` and `beta * KL_i` of each token, `[N]`, before its weight.

    `scale`: s of `surrogate_scale`. The KL is None if the loss has no estimate of it.
    """
    per_token = _loss_of_tokens(config.loss, tokens)
    if tokens.unmasked is not None:
        # The loss may return anything for masked tokens, NaN included.
        per_token = torch.where(tokens.unmasked, per_token, 0.0)
    if scale is not None:
        per_token = per_token * scale
    if not config.beta or config.exact_kl:
        return per_token, None
    kl = kl_terms_in_closed_form if stable_kl else kl_terms
    return per_token, config.beta * kl(config, tokens, config.loss.log_ratio(tokens))


def entropy_in_bonus(tokens: Tokens, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
    """The entropies `[N]` that the bonus averages, 0 elsewhere, and their number, at least 1.

    `chosen`: the high-entropy mask of `surrogate_scale`; None: all tokens.
    """
    assert tokens.entropy is not None
    if chosen is None:
        return tokens.entropy, tokens.count.clamp(min=1)
    return selected(chosen != 0, tokens.entropy, 0.0), chosen.sum().clamp(min=1)


def tokens_of(
    config: GRPOLossConfig, constants: Tokens, logps: Tensor, entropy: Tensor | None
) -> Tokens:
    """The tokens with log-probs, entropy and importance sampling weights, as a loss gets them."""
    tokens = constants.with_logps(logps, entropy)
    if config.is_correction == "none" or tokens.importance_sampling_weights is not None:
        return tokens
    weights = importance_sampling_weights(config, tokens)
    return replace(tokens, importance_sampling_weights=weights)


def token_local(config: GRPOLossConfig, constants: Tokens) -> bool:
    """True if a token's gradient follows from that token and these constants alone."""
    reason = config.why_two_passes(has_old_logps=constants.old_logps is not None)
    return reason is None


def _loss_of_tokens(loss: Loss, tokens: Tokens) -> Tensor:
    """The loss of each token, `[N]`; checks a user's own loss."""
    if not is_own(loss):
        return loss.per_token(tokens)
    if loss.why_two_passes is None:
        tokens = replace(tokens, sequences=None, is_token_local=True)
    name = loss.label_of("per_token()")
    x = one_per_token(name, loss.per_token(tokens), tokens)
    if torch.is_grad_enabled() and tokens.logps.requires_grad and not x.requires_grad:
        raise ValueError(
            f"{name}: expected a gradient for tokens.logps or tokens.entropy; got none"
        )
    return x.to(tokens.logps.dtype)


@torch.no_grad()
def surrogate_scale(config: GRPOLossConfig, tokens: Tokens) -> tuple[Tensor | None, Tensor | None]:
    """The factor of the surrogate, `[N]`, and the high-entropy mask, `[N]`.

    None for a factor of 1, and without such a mask. No gradient flows here.
    """
    scale, chosen = None, None
    if config.off_policy_threshold is not None:
        scale = off_policy_mask(config, tokens).to(tokens.logps.dtype)
    if config.top_entropy_quantile < 1:
        chosen = high_entropy_mask(config, tokens)
        scale = chosen if scale is None else scale * chosen
    rho = tokens.importance_sampling_weights
    if rho is not None and not config.loss.weighs_sampler:
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
    entropy, threshold = tokens.entropy.detach(), config.entropy_threshold
    if threshold is not None:
        return (entropy >= threshold).to(entropy.dtype) * tokens.mask
    quantile = masked_quantile(entropy, tokens.mask, 1 - config.top_entropy_quantile)
    return (entropy >= quantile).to(entropy.dtype) * tokens.mask


@torch.no_grad()
def importance_sampling_weights(config: GRPOLossConfig, tokens: Tokens) -> Tensor:
    """The weight rho `[N]`: exp(l_old - l_roll) of the token or of its sequence, bounded."""
    assert tokens.sampling_logps is not None
    over_sequence = {"sequence": tokens.sequence_sum, "geometric": tokens.sequence_mean}
    reduced = over_sequence.get(config.is_correction.partition("_")[0], lambda x: x)
    old = tokens.old_logps.detach()
    # NaN: the sampler has no log-prob of this token, which then keeps weight 1.
    log_w = (old - tokens.sampling_logps).nan_to_num(nan=0.0)
    w, low, high = bounded_exp(reduced(log_w)), config.is_clip_min, config.is_clip_max
    if config.is_correction.endswith("truncate"):
        return w.clamp(low, high)
    gate = w
    if config.is_gate != "ratio":
        divergence = binary_kl if config.is_gate == "binary_kl" else total_variation
        gate = reduced(divergence(tokens.sampling_logps, old).nan_to_num(nan=0.0))
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return w.masked_fill((gate < low) | (gate > high), 0.0)


def with_known_weights(config: GRPOLossConfig, constants: Tokens) -> Tokens:
    """The constants with the importance sampling weights, if `old_logps` are given."""
    if config.is_correction == "none" or constants.old_logps is None:
        return constants
    tokens = tokens_of(config, constants, constants.old_logps, None)
    return replace(constants, importance_sampling_weights=tokens.importance_sampling_weights)


def kl_terms(config: GRPOLossConfig, tokens: Tokens, log_ratio: Tensor) -> Tensor:
    """The KL of each token to the reference as it enters the loss, `[N]`."""
    assert tokens.ref_logps is not None
    kl = kl_estimate(config.kl_estimator, tokens.ref_logps - tokens.logps, config.kl_clamp)
    return kl * log_ratio.exp() if config.use_bias_correction_kl else kl


def exact_kl(config: GRPOLossConfig, tokens: Tokens) -> Tensor:
    """Term of the exact KL in the loss; its gradient by a token's KL is `beta` times its weight."""
    assert tokens.kl is not None
    return config.beta * (tokens.weights * tokens.kl).sum()


def kl_terms_in_closed_form(config: GRPOLossConfig, tokens: Tokens, log_ratio: Tensor) -> Tensor:
    """`kl_terms`, with a gradient that does not cancel.

        d(r KL) = r (KL + KL') dlog r + r KL' (dl - dlog r)

    In k3's KL + KL' the terms e^d cancel to -d, which is computed directly: at d = 12 the product
    rule loses four digits. The second term is 0 for a token-level ratio. A loss that overrides
    `log_ratio` gets the product rule.
    """
    if not config.use_bias_correction_kl or type(config.loss).log_ratio is not Loss.log_ratio:
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
    # Zeros with the gradients dl and dlog r. A ratio at its bound is a constant.
    d_logp, bounded = tokens.logps - tokens.logps.detach(), log_ratio >= MAX_LOG_RATIO
    if config.ratio_level == "token" or config.loss.token_gradient:
        return ratio * (kl + torch.where(bounded, slope, total) * d_logp)
    d_log_ratio, mean_d_logp = log_ratio - log_ratio.detach(), tokens.sequence_mean(d_logp)
    rest = d_logp - torch.where(bounded, 0.0, mean_d_logp)
    return ratio * (kl + total * d_log_ratio + slope * rest)


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
        case "k3":
            kl = torch.expm1(d) - d
        case _:
            raise ValueError(
                f"estimator: expected k1, abs, k2 or k3, or one with a +; got {estimator!r}"
            )
    if clamp is not None:
        kl = kl.clamp(-clamp, clamp)
    if estimator.endswith("+"):
        k2 = kl_estimate("k2", d, clamp)
        kl = kl.detach() + (k2 - k2.detach())
    return kl


def aggregation_weights(
    config: GRPOLossConfig,
    mask: Tensor,
    count: Tensor,
    sequences: Sequences | None,
    num_items: float | Tensor | None,
) -> Tensor:
    """The weight of each token in the loss, `[N]`, from `mask [N]` of 0 and 1 in a float dtype.

    `count`: the unmasked tokens, 0-d. A denominator of 0 becomes 1.
    """
    aggregation, items = config.effective_aggregation, num_items
    if items is None:
        items = count.clamp(min=1) if aggregation in TOKEN_MEANS else _known(sequences).count or 1
    elif isinstance(items, Tensor):
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

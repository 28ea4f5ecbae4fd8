"""What a loss tells about itself: 0-d tensors, none of them read from the device.

Names are TRL's where TRL has one. A metric that does not apply is absent rather than 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import GRPOLossConfig
from .objective import (
    TokenInputs,
    Tokens,
    clipped_tokens,
    correction,
    high_entropy,
    importance_ratio,
    kl_terms,
    on_policy,
    vespo_weights,
)


@torch.no_grad()
def loss_metrics(
    config: GRPOLossConfig,
    inputs: TokenInputs,
    logps: Tensor,
    entropy: Tensor | None,
    d_logps: Tensor | None,
    d_entropy: Tensor | None,
) -> dict[str, Tensor]:
    """Means over the unmasked tokens; over sequences where one ratio stands for a sequence.

    `d_logps`, `d_entropy [N]`: the gradient of the loss; None where it was not computed.
    """
    tokens = Tokens.of(inputs, logps, entropy)
    over = _Over(tokens)
    ratio = importance_ratio(config, tokens)
    metrics = {
        "tokens": inputs.count,
        "ratio_mean": over.mean(ratio),
        "ratio_max": over.max(ratio),
        "ess": over.effective_sample_size(ratio),
    }
    metrics |= _clip_metrics(config, tokens, ratio, over)
    if tokens.ref_logps is not None:
        kl = kl_terms(config, tokens, ratio)
        metrics |= {"kl": over.mean(kl), "kl_max": over.max(kl)}
    if tokens.entropy is not None:
        metrics["entropy"] = over.mean(tokens.entropy)
    if d_logps is not None:
        still = d_logps == 0
        if d_entropy is not None:
            still &= d_entropy == 0
        metrics["zero_gradient"] = over.mean(still)
    if config.surrogate == "vespo":
        phi = vespo_weights(config, inputs, tokens)
        metrics["vespo/phi_seq_mean"] = over.mean_of_sequences(phi)
    if config.off_policy_threshold is not None:
        metrics["off_policy_dropped"] = over.mean(~on_policy(config, tokens))
    if config.top_entropy_quantile < 1:
        metrics["entropy_kept"] = over.mean(high_entropy(config, inputs, tokens))
    return metrics | _sampling_metrics(config, inputs, tokens, over)


def _clip_metrics(
    config: GRPOLossConfig, tokens: Tokens, ratio: Tensor, over: _Over
) -> dict[str, Tensor]:
    mean = over.mean if config.ratio_level == "token" else over.mean_of_sequences
    if config.surrogate == "cispo":
        assert config.epsilon_high is not None
        return {"cispo_clip_ratio": mean((ratio > config.epsilon_high) & (tokens.advantages > 0))}
    if config.surrogate not in ("clip", "gmpo", "dppo_tv"):
        return {}
    low, high = clipped_tokens(config, tokens, ratio)
    clip_low, clip_high = mean(low), mean(high)
    metrics = {
        "clip_low": clip_low,
        "clip_high": clip_high,
        "clip_ratio/low_mean": clip_low,
        "clip_ratio/high_mean": clip_high,
        "clip_ratio/region_mean": clip_low + clip_high,
    }
    if tokens.sequences is not None:
        metrics["clip_ratio/low_min"] = -over.max(-tokens.sequence_mean(low.to(ratio.dtype)))
        metrics["clip_ratio/high_max"] = over.max(tokens.sequence_mean(high.to(ratio.dtype)))
    return metrics


def _sampling_metrics(
    config: GRPOLossConfig, inputs: TokenInputs, tokens: Tokens, over: _Over
) -> dict[str, Tensor]:
    if tokens.sampling_logps is None:
        return {}
    gap = (tokens.old_logps - tokens.sampling_logps).abs()
    # A token the sampler has no log-prob of (NaN) is no part of the mean.
    scored = _Over(tokens, ~gap.isnan())
    name = "sampling/sampling_logp_difference"
    metrics = {f"{name}/mean": scored.mean(gap), f"{name}/max": scored.max(gap)}
    rho = correction(config, inputs, tokens)
    if rho is not None:
        by_sequence = config.is_correction.startswith("sequence")
        name = "sampling/importance_sampling_ratio"
        metrics[f"{name}/min"] = -over.max(-rho)
        metrics[f"{name}/mean"] = over.mean_of_sequences(rho) if by_sequence else over.mean(rho)
        metrics[f"{name}/max"] = over.max(rho)
    return metrics


class _Over:
    """Means and maxima over unmasked tokens, of them those `among`; 0 over none."""

    def __init__(self, tokens: Tokens, among: Tensor | None = None) -> None:
        self.tokens, self.dtype = tokens, tokens.logps.dtype
        self.mask = tokens.mask != 0
        if among is not None:
            self.mask = self.mask & among
        self.count = self.mask.sum().clamp(min=1)

    def mean(self, x: Tensor) -> Tensor:
        return torch.where(self.mask, x, 0).sum(dtype=torch.float64).to(self.dtype) / self.count

    def max(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_zeros(())
        largest = torch.where(self.mask, x, -torch.inf).amax()
        return torch.where(self.mask.any(), largest, 0.0)

    def mean_of_sequences(self, x: Tensor) -> Tensor:
        """The mean over sequences, those with a token, of the mean of `x` over their tokens."""
        sequences = self.tokens.sequences
        assert sequences is not None
        lengths = sequences.sum(self.mask.to(self.dtype))
        sums = sequences.sum(torch.where(self.mask, x, 0).to(self.dtype))
        return (sums / lengths.clamp(min=1)).sum() / (lengths > 0).sum().clamp(min=1)

    def effective_sample_size(self, w: Tensor) -> Tensor:
        """(sum w)^2 / (n sum w^2): 1 where all weights are equal, 1 / n where one is all."""
        w = torch.where(self.mask, w, 0)
        w = w / self.max(w).clamp(min=torch.finfo(w.dtype).tiny)
        squares = w.square().sum()
        return w.sum().square() / (self.count * squares.clamp(min=torch.finfo(w.dtype).tiny))

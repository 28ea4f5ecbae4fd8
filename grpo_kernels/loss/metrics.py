"""The metrics of a loss: 0-d tensors, none of them read from the device.

Names are TRL's where TRL has one. A metric that does not apply is absent rather than 0; the clip
shares, which every loss has, are 0 where nothing is clipped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .config import GRPOLossConfig
from .cross_entropy import cross_entropy_metrics
from .losses import Loss, per_token_values
from .objective import high_entropy_mask, kl_terms, off_policy_mask, tokens_of
from .tokens import LossInputs, Tokens

# Names that no loss may give a metric of its own: those of the calls and of the trainer's rows.
TAKEN = frozenset({
    "tokens", "ratio_mean", "ratio_max", "ess", "zero_gradient", "entropy", "kl", "kl_max",
    "clip_low", "clip_high", "off_policy_dropped", "entropy_kept", "ce_loss", "ce_tokens", "ce_nll",
    "step", "reward", "reward_std", "accuracy", "groups_equal", "completion_length", "truncated",
    "grad_norm", "learning_rate", "loss", "warnings", "micro_batch_size", "bad_updates", "seconds",
    "peak_memory_gib",
})  # fmt: skip
TAKEN_PREFIXES = ("clip_ratio/", "sampling/", "support/", "reward/", "accuracy/", "seconds/")
_SCORED, _RATIO, _SQUARE, _MASK = range(4)
_DIFFERENCE = "sampling/sampling_logp_difference"
_WEIGHT = "sampling/importance_sampling_ratio"


@torch.no_grad()
def loss_metrics(
    config: GRPOLossConfig,
    inputs: LossInputs,
    logps: Tensor,
    entropy: Tensor | None,
    d_logps: Tensor | None,
    d_entropy: Tensor | None,
) -> dict[str, Tensor]:
    """Means over the unmasked tokens; over sequences where one ratio stands for a sequence.

    `d_logps`, `d_entropy [N]`: the gradient of the loss; None where it was not computed.
    """
    tokens = tokens_of(config, inputs, logps, entropy)
    loss = config.loss
    log_ratio = per_token_values(loss.name_of("log_ratio()"), loss.log_ratio(tokens), tokens)
    ratio = log_ratio.exp()
    # Per token `[N]`, by name: to be averaged over tokens, over sequences, and to be maximized.
    means = {"ratio_mean": ratio}
    by_sequence: dict[str, Tensor] = {}
    maxima = {"ratio_max": ratio}
    # Likewise averaged over tokens; metrics are made of them. No loss can have such a name.
    parts: dict[Any, Tensor] = {}
    if inputs.kl is not None:
        means["kl"] = maxima["kl_max"] = inputs.kl
    elif tokens.ref_logps is not None:
        means["kl"] = maxima["kl_max"] = kl_terms(config, tokens, log_ratio)
    if tokens.entropy is not None:
        means["entropy"] = tokens.entropy
    if d_logps is not None:
        still = d_logps == 0
        means["zero_gradient"] = still if d_entropy is None else still & (d_entropy == 0)
    bounds = _bounds(loss, tokens, ratio)
    low, high = (torch.zeros_like(ratio) if cut_off is None else cut_off for cut_off in bounds)
    clips = means if config.ratio_level == "token" else by_sequence
    clips |= {"clip_low": low, "clip_high": high}
    own = by_sequence if loss.needs_sequences else means
    own |= _own_metrics(loss, tokens, ratio)
    if config.off_policy_threshold is not None:
        means["off_policy_dropped"] = ~off_policy_mask(config, tokens)
    if config.top_entropy_quantile < 1:
        means["entropy_kept"] = high_entropy_mask(config, tokens)
    if tokens.sampling_logps is not None:
        # A token the sampler has no log-prob of (NaN) is no part of the mean.
        gap = (tokens.old_logps - tokens.sampling_logps).abs()
        parts[_SCORED] = ~gap.isnan()
        means[f"{_DIFFERENCE}/mean"] = maxima[f"{_DIFFERENCE}/max"] = gap.nan_to_num(nan=0.0)
    rho = tokens.importance_sampling_weights
    if rho is not None:
        of = by_sequence if config.corrects_sequences else means
        of[f"{_WEIGHT}/mean"] = maxima[f"{_WEIGHT}/max"] = rho
        maxima[f"{_WEIGHT}/min"] = -rho

    tiny = torch.finfo(ratio.dtype).tiny
    metrics = {"tokens": inputs.count, **_maxima(maxima, tokens)}
    # Relative to the largest, so that no square overflows.
    parts[_RATIO] = ratio / metrics["ratio_max"].clamp(min=tiny)
    parts[_SQUARE] = parts[_RATIO].square()
    averages = _means(means | parts, tokens)
    metrics |= {name: averages[name] for name in means} | _means_of_sequences(by_sequence, tokens)
    metrics["ess"] = averages[_RATIO].square() / averages[_SQUARE].clamp(min=tiny)
    if _SCORED in parts:
        metrics[f"{_DIFFERENCE}/mean"] /= averages[_SCORED].clamp(min=tiny)
    if rho is not None:
        metrics[f"{_WEIGHT}/min"] = -metrics[f"{_WEIGHT}/min"]
    if inputs.ce_weights is not None:
        metrics |= cross_entropy_metrics(inputs.ce_weights, logps)
    # TRL's names, which it has where there are two bounds.
    return metrics if None in bounds else metrics | _clip_ratios(tokens, metrics, low, high)


def _bounds(loss: Loss, tokens: Tokens, ratio: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The tokens that the loss cuts off below and above, checked."""
    name, bounds = loss.name_of("clipped()"), loss.clipped(tokens, ratio)
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(
            f"{name}: expected a pair, the tokens cut off below and above, each None or a tensor; "
            f"got {type(bounds).__name__}"
        )
    low, high = (
        None if x is None else per_token_values(f"{name}[{i}]", x, tokens)
        for i, x in enumerate(bounds)
    )
    return low, high


def _own_metrics(loss: Loss, tokens: Tokens, ratio: Tensor) -> dict[str, Tensor]:
    """The loss's own metrics, checked."""
    name, own = loss.name_of("metrics()"), loss.metrics(tokens, ratio)
    if not isinstance(own, dict) or not all(isinstance(key, str) and key for key in own):
        raise TypeError(
            f"{name}: expected a dict of tensors by name, a value per token each; got {own!r}"
        )
    for key, x in own.items():
        per_token_values(f"{name}[{key!r}]", x, tokens)
        if key in TAKEN or key.startswith(TAKEN_PREFIXES):
            taken = ", ".join((*sorted(TAKEN), *(f"{prefix}..." for prefix in TAKEN_PREFIXES)))
            raise ValueError(f"{name}: expected names other than {taken}; got {key!r}")
    return own


def _clip_ratios(
    tokens: Tokens, metrics: dict[str, Tensor], low: Tensor, high: Tensor
) -> dict[str, Tensor]:
    """The clip shares under TRL's names, and their extremes over sequences."""
    clip_low, clip_high = metrics["clip_low"], metrics["clip_high"]
    named = {
        "clip_ratio/low_mean": clip_low,
        "clip_ratio/high_mean": clip_high,
        "clip_ratio/region_mean": clip_low + clip_high,
    }
    if tokens.sequences is not None:
        shares, empty = _shares_of_sequences({"low": low, "high": high}, tokens)
        shares[0].neg_()
        lowest, highest = _largest(shares.masked_fill_(empty, -torch.inf))
        named |= {"clip_ratio/low_min": -lowest, "clip_ratio/high_max": highest}
    return named


def _means(named: dict[Any, Tensor], tokens: Tokens) -> dict[Any, Tensor]:
    """The mean of each over the tokens that are not masked, 0 over none; all in one sum."""
    # With the tokens themselves, whose sum is their number.
    sums = _stack({**named, _MASK: tokens.mask}, tokens.mask == 0, 0.0).sum(1)
    return dict(zip(named, (sums[:-1] / sums[-1].clamp(min=1)).unbind(), strict=True))


def _maxima(named: dict[str, Tensor], tokens: Tokens) -> dict[str, Tensor]:
    values = _stack(named, tokens.mask == 0, -torch.inf)
    return dict(zip(named, _largest(values).unbind(), strict=True))


def _largest(x: Tensor) -> Tensor:
    """The maximum of each row of `x [K, N]`, 0 where all of it is -inf."""
    if not x.shape[1]:
        return x.new_zeros(x.shape[0])
    return x.amax(1).nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=0.0)


def _means_of_sequences(named: dict[str, Tensor], tokens: Tokens) -> dict[str, Tensor]:
    """The mean, over the sequences that have a token, of each sequence's mean."""
    if not named:
        return {}
    shares, empty = _shares_of_sequences(named, tokens)
    means = shares.sum(1) / (~empty).sum().clamp(min=1)
    return dict(zip(named, means.unbind(), strict=True))


def _shares_of_sequences(named: dict[str, Tensor], tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The mean of each over each sequence `[K, B]`, and the sequences that have no token `[B]`."""
    sequences = tokens.sequences
    assert sequences is not None
    # With the tokens themselves, whose sum is the sequence's length.
    sums = sequences.sum(_stack({**named, _MASK: tokens.mask}, tokens.mask == 0, 0.0))
    lengths = sums[-1]
    return sums[:-1] / lengths.clamp(min=1), lengths == 0


def _stack(named: dict[Any, Tensor], masked: Tensor, fill: float) -> Tensor:
    """The values of each token, `[K, N]`; `fill` where masked."""
    dtype = torch.promote_types(torch.float32, next(iter(named.values())).dtype)
    return torch.stack([x.to(dtype) for x in named.values()]).masked_fill_(masked, fill)

"""The metrics of a loss: 0-d tensors, none of them read from the device.

Names are TRL's if TRL has one. A metric that does not apply is absent; only the clip shares are
always there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.outputs import Metrics
from .config import GRPOLossConfig
from .cross_entropy import cross_entropy_metrics
from .losses import Loss, is_own, one_per_token
from .objective import high_entropy_mask, kl_terms, off_policy_mask, tokens_of
from .tokens import Tokens

# Names of the calls' metrics and of the trainer's rows, which a user's own loss may not use.
TAKEN = frozenset({
    "tokens", "ratio_mean", "ratio_max", "ess", "zero_gradient", "entropy", "kl", "kl_max",
    "clip_low", "clip_high", "off_policy_dropped", "entropy_kept", "ce_loss", "ce_tokens", "ce_nll",
    "step", "reward", "reward_std", "accuracy", "groups_equal", "completion_length", "truncated",
    "grad_norm", "learning_rate", "loss", "warnings", "explained", "micro_batch_size", "seconds",
    "bad_updates", "peak_memory_gib", "loss_scale", "sampler_gap", "sampler_gap_max",
    "answers_timed_out",
})  # fmt: skip
TAKEN_PREFIXES = ("clip_ratio/", "sampling/", "support/", "reward/", "accuracy/", "seconds/")
_DIFFERENCE = "sampling/sampling_logp_difference"
_WEIGHT = "sampling/importance_sampling_ratio"
# Values from which metrics are computed, under a prefix that no loss may use.
_SCORED, _RATIO, _SQUARE = "sampling/scored", "sampling/ratio", "sampling/squared_ratio"


@dataclass
class _TokenValues:
    """Values of every token `[N]`, by the name of their metric."""

    means: dict[str, Tensor] = field(default_factory=dict)  # averaged over the unmasked tokens
    sequence_means: set[str] = field(default_factory=set)  # of `means`, over each sequence first
    maxima: dict[str, Tensor] = field(default_factory=dict)
    two_bounds: bool = False  # whether the loss clips at both ends

    def add(self, name: str, x: Tensor, *, per_sequence: bool = False, largest: str = "") -> None:
        """Adds a mean and, under the name `largest`, the maximum of the same values."""
        self.means[name] = x
        if per_sequence:
            self.sequence_means.add(name)
        if largest:
            self.maxima[largest] = x


@torch.no_grad()
def metrics_of_call(
    config: GRPOLossConfig,
    constants: Tokens,
    logps: Tensor,
    entropy: Tensor | None,
    d_logps: Tensor | None,
    d_entropy: Tensor | None,
) -> Metrics:
    """The `loss_metrics` of a call, computed when they are read.

    The metrics of a user's own loss are computed at once, which checks its results.
    """
    # Copies, as the caller may change its tensors and the result's in place.
    new = {"logps": logps, "entropy": entropy, "d_logps": d_logps, "d_entropy": d_entropy}
    each = constants.token_constants() | {name: x for name, x in new.items() if x is not None}
    copies: dict[str, Any] = _by_name(each, torch.stack([*each.values()]))
    values = [copies.pop(name, None) for name in new]
    unmasked = constants.unmasked
    constants = replace(
        constants, **copies, unmasked=None if unmasked is None else unmasked.clone()
    )

    compute = partial(loss_metrics, config, constants, *values)
    return Metrics(compute() if is_own(config.loss) else compute)


@torch.no_grad()
def loss_metrics(
    config: GRPOLossConfig,
    constants: Tokens,
    logps: Tensor,
    entropy: Tensor | None,
    d_logps: Tensor | None,
    d_entropy: Tensor | None,
) -> dict[str, Tensor]:
    """Means over the unmasked tokens; over sequences for a sequence-level ratio.

    `d_logps`, `d_entropy [N]`: the loss's gradients, or None.
    """
    tokens = tokens_of(config, constants, logps, entropy)
    values = metric_values(config, tokens, d_logps, d_entropy)
    rows, masked = values.means, None if tokens.unmasked is None else ~tokens.unmasked
    maxima = _by_name(values.maxima, _largest(_stack(values.maxima), masked))
    # Relative to the largest, so that no square overflows.
    tiny = torch.finfo(torch.float32).tiny
    rows[_RATIO] = rows["ratio_mean"] / maxima["ratio_max"].clamp(min=tiny)
    rows[_SQUARE] = rows[_RATIO].square()

    # All rows are summed at once, over each sequence first: a GPU's launches add up.
    table, sequences = _stack(rows), tokens.sequences
    if masked is not None:
        table.masked_fill_(masked, 0.0)
    sums = table if sequences is None else sequences.sum(table)
    means = _by_name(rows, sums.sum(1) / tokens.count.clamp(min=1))
    clips: dict[str, Tensor] = {}
    if sequences is not None and (values.sequence_means or values.two_bounds):
        lengths = sequences.sum(tokens.mask)
        sequence_means, empty = sums / lengths.clamp(min=1), lengths == 0
        if values.sequence_means:
            num_sequences = (~empty).sum().clamp(min=1)
            over_sequences = _by_name(rows, sequence_means.sum(1) / num_sequences)
            means |= {name: over_sequences[name] for name in values.sequence_means}
        if values.two_bounds:
            clips = _clip_extremes(_by_name(rows, sequence_means), empty)
    if values.two_bounds:
        clips |= _clip_ratios(means)
    scored, ratio, square = (means.pop(name, None) for name in (_SCORED, _RATIO, _SQUARE))
    assert ratio is not None and square is not None
    metrics = {"tokens": tokens.count, **maxima, **means}
    metrics["ess"] = ratio.square() / square.clamp(min=tiny)
    if scored is not None:
        metrics[f"{_DIFFERENCE}/mean"] /= scored.clamp(min=tiny)
    if f"{_WEIGHT}/min" in metrics:
        metrics[f"{_WEIGHT}/min"] = -metrics[f"{_WEIGHT}/min"]
    if tokens.ce_weights is not None:
        metrics |= cross_entropy_metrics(tokens.ce_weights, logps)
    return metrics | clips


def metric_values(
    config: GRPOLossConfig, tokens: Tokens, d_logps: Tensor | None, d_entropy: Tensor | None
) -> _TokenValues:
    """The values that the metrics are means and maxima of."""
    loss, values = config.loss, _TokenValues()
    log_ratio = one_per_token(loss.label_of("log_ratio()"), loss.log_ratio(tokens), tokens)
    ratio = log_ratio.exp()
    values.add("ratio_mean", ratio, largest="ratio_max")
    if tokens.kl is not None:
        values.add("kl", tokens.kl, largest="kl_max")
    elif tokens.ref_logps is not None:
        values.add("kl", kl_terms(config, tokens, log_ratio), largest="kl_max")
    if tokens.entropy is not None:
        values.add("entropy", tokens.entropy)
    if d_logps is not None:
        is_zero = d_logps == 0
        values.add("zero_gradient", is_zero if d_entropy is None else is_zero & (d_entropy == 0))
    bounds = _bounds(loss, tokens, ratio)
    values.two_bounds = None not in bounds
    for name, cut_off in zip(("clip_low", "clip_high"), bounds, strict=True):
        share = torch.zeros_like(ratio) if cut_off is None else cut_off
        values.add(name, share, per_sequence=config.ratio_level == "sequence")
    for name, x in _own_metrics(loss, tokens, ratio).items():
        values.add(name, x, per_sequence=loss.needs_sequences)
    if config.off_policy_threshold is not None:
        values.add("off_policy_dropped", ~off_policy_mask(config, tokens))
    if config.top_entropy_quantile < 1:
        values.add("entropy_kept", high_entropy_mask(config, tokens))
    if tokens.sampling_logps is not None:
        # The mean excludes tokens without a log-prob of the sampler (NaN).
        gap = (tokens.old_logps - tokens.sampling_logps).abs()
        values.add(_SCORED, ~gap.isnan())
        values.add(f"{_DIFFERENCE}/mean", gap.nan_to_num(nan=0.0), largest=f"{_DIFFERENCE}/max")
    weights = tokens.importance_sampling_weights
    if weights is not None:
        name, per_sequence = f"{_WEIGHT}/mean", config.corrects_sequences
        values.add(name, weights, per_sequence=per_sequence, largest=f"{_WEIGHT}/max")
        values.maxima[f"{_WEIGHT}/min"] = -weights
    return values


def _bounds(loss: Loss, tokens: Tokens, ratio: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The tokens that the loss cuts off below and above, checked."""
    name, bounds = loss.label_of("clipped()"), loss.clipped(tokens, ratio)
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(
            f"{name}: expected a pair, the tokens cut off below and above, each None or a tensor; "
            f"got {type(bounds).__name__}"
        )
    low, high = (
        None if x is None else one_per_token(f"{name}[{i}]", x, tokens)
        for i, x in enumerate(bounds)
    )
    return low, high


def _own_metrics(loss: Loss, tokens: Tokens, ratio: Tensor) -> dict[str, Tensor]:
    name, own = loss.label_of("metrics()"), loss.metrics(tokens, ratio)
    if not isinstance(own, dict) or not all(isinstance(key, str) and key for key in own):
        raise TypeError(
            f"{name}: expected a dict of tensors by name, a value per token each; got {own!r}"
        )
    for key, x in own.items():
        one_per_token(f"{name}[{key!r}]", x, tokens)
        if key in TAKEN or key.startswith(TAKEN_PREFIXES):
            taken = ", ".join((*sorted(TAKEN), *(f"{prefix}..." for prefix in TAKEN_PREFIXES)))
            raise ValueError(f"{name}: expected names other than {taken}; got {key!r}")
    return own


def _clip_ratios(means: dict[str, Tensor]) -> dict[str, Tensor]:
    """The clip shares under TRL's names."""
    low, high = means["clip_low"], means["clip_high"]
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
    }


def _clip_extremes(sequence_means: dict[str, Tensor], empty: Tensor) -> dict[str, Tensor]:
    """The extremes of the clip shares over the sequences that are not empty."""
    ends = torch.stack([-sequence_means["clip_low"], sequence_means["clip_high"]])
    lowest, highest = _largest(ends, empty).unbind()
    return {"clip_ratio/low_min": -lowest, "clip_ratio/high_max": highest}


def _largest(x: Tensor, excluded: Tensor | None) -> Tensor:
    """The maximum of each row of `x [K, N]` over the columns not excluded; 0 without any."""
    if not x.shape[1]:
        return x.new_zeros(x.shape[0])
    if excluded is not None:
        x.masked_fill_(excluded, -torch.inf)
    return x.amax(1).nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=0.0)


def _stack(rows: dict[str, Tensor]) -> Tensor:
    """The values as one tensor `[K, N]`, float32 or float64."""
    dtype = torch.promote_types(torch.float32, next(iter(rows.values())).dtype)
    return torch.stack([x.to(dtype) for x in rows.values()])


def _by_name(rows: dict[str, Tensor], values: Tensor) -> dict[str, Tensor]:
    """The values `[K, ...]` under the names of their rows."""
    return dict(zip(rows, values.unbind(), strict=True))

"""The tokens of a call: the constants that came in, and what a loss sees of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..base.sequences import Sequences

# Largest log-ratio: e^80 is far beyond any use, and still no infinity that 0 turns into NaN.
MAX_LOG_RATIO = 80.0


@dataclass(frozen=True)
class LossInputs:
    """The constants of a policy loss, flat `[N]`: all that is known before the log-probs are.

    Values at masked tokens are never used.

    Attributes:
        weights: the weight w of each token in the loss (`objective.py`).
        count: the number of unmasked tokens, 0-d.
        mask: bool; None: every token counts.
        importance_sampling_weights: of `is_correction`; None if they need the log-probs.
        ce_weights: of the cross-entropy term (`cross_entropy.py`), at masked tokens too.
        kl: the exact KL of each token, which comes with the log-probs.
    """

    advantages: Tensor
    weights: Tensor
    count: Tensor
    mask: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    sampling_logps: Tensor | None = None
    importance_sampling_weights: Tensor | None = None
    sequences: Sequences | None = None
    ce_weights: Tensor | None = None
    kl: Tensor | None = None

    def at(self, rows: Tensor | slice) -> LossInputs:
        """The tokens of `rows`, masked only with a cross-entropy; sequences are not told apart."""
        names = (
            "advantages", "weights", "old_logps", "ref_logps", "sampling_logps",
            "importance_sampling_weights", "ce_weights", "kl",
        )  # fmt: skip
        values = {name: x[rows] for name in names if (x := getattr(self, name)) is not None}
        has_masked = self.ce_weights is not None
        mask = self.mask[rows] if has_masked and self.mask is not None else None
        return replace(self, **values, mask=mask, sequences=None)


@dataclass(frozen=True)
class Tokens:
    """The tokens as a loss sees them: flat `[N]`, with zeros where the mask is 0.

    `logps` and `entropy` carry gradients, the rest are constants. `old_logps` is `logps`, detached,
    where none were given; `mask` is 0 and 1 in the dtype of `logps`; `entropy` is None where
    `grpo_loss` was given none; `importance_sampling_weights` are those of `is_correction`.
    """

    logps: Tensor
    old_logps: Tensor
    advantages: Tensor
    mask: Tensor
    entropy: Tensor | None = None
    ref_logps: Tensor | None = None
    sampling_logps: Tensor | None = None
    importance_sampling_weights: Tensor | None = None
    sequences: Sequences | None = None
    is_token_local: bool = False  # seen by a loss that says so: there are no sequences

    @property
    def log_ratio(self) -> Tensor:
        """`logps - old_logps`."""
        return self.logps - self.old_logps

    @property
    def ratio(self) -> Tensor:
        """`exp(log_ratio)`, finite whatever came."""
        return bounded_exp(self.log_ratio)

    def sequence_sum(self, x: Tensor) -> Tensor:
        """The sum of `x [N]` over the unmasked tokens of each token's sequence, `[N]`."""
        sequences = self._known_sequences()
        return sequences.spread(sequences.sum(select(self.mask, x)))

    def sequence_mean(self, x: Tensor) -> Tensor:
        """The mean of `x [N]` over the unmasked tokens of each token's sequence, `[N]`."""
        sequences = self._known_sequences()
        return sequences.spread(sequences.sum(select(self.mask, x)) / self._lengths)

    @cached_property
    def _lengths(self) -> Tensor:
        return self._known_sequences().sum(self.mask).clamp(min=1)

    def _known_sequences(self) -> Sequences:
        if self.is_token_local:
            raise ValueError(
                "loss_type: a loss with token_local=True must not use other tokens, and this one "
                "uses sequences: set token_local=False"
            )
        if self.sequences is None:
            raise ValueError(
                "loss_type: this loss needs to know where sequences begin in packed input [N]: "
                "pass cu_seqlens [B + 1]"
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
            sequences=inputs.sequences,
        )


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """The exponential, finite whatever came."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def total_variation(q_logps: Tensor, p_logps: Tensor) -> Tensor:
    """|q - p| of each token's probability: the distance of it and the rest as two outcomes."""
    return (q_logps.exp() - p_logps.exp()).abs()


def binary_kl(q_logps: Tensor, p_logps: Tensor) -> Tensor:
    """KL(q || p) of each token and the rest of the vocabulary as two outcomes, in nats."""
    # A rest of 0 is one of the least probability that there is.
    least = math.log(torch.finfo(q_logps.dtype).tiny)
    q_rest, p_rest = (
        (-torch.expm1(x.clamp(max=0.0))).log().clamp(min=least) for x in (q_logps, p_logps)
    )
    own = q_logps.exp() * (q_logps - p_logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return own + q_rest.exp() * (q_rest - p_rest)


def select(mask: Tensor, x: Tensor) -> Tensor:
    """`x` where the mask is not 0, and 0 elsewhere."""
    return torch.where(mask != 0, x, torch.zeros_like(x))

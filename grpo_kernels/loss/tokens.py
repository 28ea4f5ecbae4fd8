"""The tokens of a call: its constants, and the view of them that a loss gets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..base.sequences import Sequences

# Largest log-ratio: e^80 is far beyond any use, and finite, so that its product with 0 is 0.
MAX_LOG_RATIO = 80.0
_LATER: Any = None  # comes with the log-probs


@dataclass(frozen=True)
class Tokens:
    """The tokens of a loss, flat `[N]`: constants first, then with their log-probs.

    A loss gets them with log-probs, and with zeros where the mask is 0. `logps` and `entropy` then
    have gradients; the rest are constants.

    Attributes:
        weights: the weight w of each token in the loss (`objective.py`).
        count: the number of unmasked tokens, 0-d.
        unmasked: bool; None: every token counts.
        old_logps: None if the caller passed none; a loss then gets `logps`, detached.
        importance_sampling_weights: of `is_correction`; None until their log-probs are known.
        ce_weights: of the cross-entropy term (`cross_entropy.py`), at masked tokens too.
        kl: the exact KL of each token, which comes with the log-probs.
        entropy: None if `grpo_loss` was called without.
        is_token_local: True for a loss that declares `token_local`, which gets no sequences.
    """

    advantages: Tensor
    weights: Tensor
    count: Tensor
    unmasked: Tensor | None = None
    old_logps: Tensor = _LATER
    ref_logps: Tensor | None = None
    sampling_logps: Tensor | None = None
    importance_sampling_weights: Tensor | None = None
    sequences: Sequences | None = None
    ce_weights: Tensor | None = None
    kl: Tensor | None = None
    logps: Tensor = _LATER
    entropy: Tensor | None = None
    is_token_local: bool = False

    def token_constants(self) -> dict[str, Any]:
        """The constants with a number per token, by name."""
        names = (
            "advantages", "weights", "old_logps", "ref_logps", "sampling_logps",
            "importance_sampling_weights", "ce_weights", "kl",
        )  # fmt: skip
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def at(self, rows: Tensor | slice) -> Tokens:
        """The constants of `rows`, masked only with a cross-entropy, without sequences."""
        values = {name: x[rows] for name, x in self.token_constants().items()}
        unmasked = None if self.ce_weights is None else self.unmasked
        unmasked = None if unmasked is None else unmasked[rows]
        return replace(self, **values, unmasked=unmasked, sequences=None)

    def with_logps(self, logps: Tensor, entropy: Tensor | None) -> Tokens:
        """The tokens as a loss gets them."""
        clean = self._clean
        logps = clean(logps)
        return replace(
            self,
            logps=logps,
            entropy=clean(entropy),
            old_logps=logps.detach() if self.old_logps is None else clean(self.old_logps),
            advantages=clean(self.advantages),
            ref_logps=clean(self.ref_logps),
            sampling_logps=clean(self.sampling_logps),
        )

    def _clean(self, x: Any) -> Any:
        """The values with zeros where the mask is 0; None stays."""
        # Before any exp: a masked token may hold anything, and inf * 0 is NaN.
        if x is None or self.unmasked is None:
            return x
        return torch.where(self.unmasked, x, 0.0)

    @cached_property
    def mask(self) -> Tensor:
        """The mask as 0 and 1, in the dtype of the log-probs."""
        x = self.advantages
        return torch.ones_like(x) if self.unmasked is None else self.unmasked.to(x.dtype)

    @property
    def log_ratio(self) -> Tensor:
        """`logps - old_logps`."""
        return self.logps - self.old_logps

    @property
    def ratio(self) -> Tensor:
        """`exp(log_ratio)`, always finite."""
        return bounded_exp(self.log_ratio)

    def sequence_sum(self, x: Tensor) -> Tensor:
        """The sum of `x [N]` over the unmasked tokens of each token's sequence, `[N]`."""
        sequences = self._known_sequences()
        return sequences.spread(sequences.sum(self._clean(x)))

    def sequence_mean(self, x: Tensor) -> Tensor:
        """The mean of `x [N]` over the unmasked tokens of each token's sequence, `[N]`."""
        sequences = self._known_sequences()
        return sequences.spread(sequences.sum(self._clean(x)) / self._lengths)

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


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """The exponential, always finite."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def total_variation(q_logps: Tensor, p_logps: Tensor) -> Tensor:
    """|q - p| of each token's probability: the total variation of the token and the rest."""
    return (q_logps.exp() - p_logps.exp()).abs()


def binary_kl(q_logps: Tensor, p_logps: Tensor) -> Tensor:
    """KL(q || p) of each token and the rest of the vocabulary as two outcomes, in nats."""
    # A rest of 0 counts as the smallest positive probability.
    least = math.log(torch.finfo(q_logps.dtype).tiny)
    q_rest, p_rest = (
        (-torch.expm1(x.clamp(max=0.0))).log().clamp(min=least) for x in (q_logps, p_logps)
    )
    token_part = q_logps.exp() * (q_logps - p_logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return token_part + q_rest.exp() * (q_rest - p_rest)

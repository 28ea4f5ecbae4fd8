"""Results of the public calls."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LogprobOutput(NamedTuple):
    """Per-token results in the shape of the targets: float32, differentiable, 0 where masked.

    Attributes:
        logps: log-probs of the targets.
        entropy: in nats; None without `entropy=True`.
        logsumexp: logsumexp of the logits after temperature.
    """

    logps: Tensor
    entropy: Tensor | None
    logsumexp: Tensor


class DistillationOutput(NamedTuple):
    """A loss, its metrics, and the divergence of each token.

    Attributes:
        loss: differentiable scalar, float32.
        metrics: name to 0-d tensor, on the device; reading one synchronizes.
        divergence: float32 `[B, T]` or `[N]`, in nats, detached; 0 where masked.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    divergence: Tensor


class GRPOLossOutput(NamedTuple):
    """A loss, its metrics, and the per-token values it was computed from.

    Attributes:
        loss: differentiable scalar, float32.
        metrics: name to 0-d tensor, on the device; reading one synchronizes.
        logps: float32 in the shape of the targets, detached, as are the next three.
        entropy: in nats; None if it was neither computed nor passed.
        ref_logps: log-probs under `reference`; None without one.
        kl: the exact KL to the reference, in nats; None if the loss has none.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    logps: Tensor
    entropy: Tensor | None
    ref_logps: Tensor | None = None
    kl: Tensor | None = None

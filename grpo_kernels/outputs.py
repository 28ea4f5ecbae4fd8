"""The results of the public calls."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LogprobOutput(NamedTuple):
    """Per-token results in the shape of the targets: float32, differentiable, 0 where masked.

    Attributes:
        logps: log-probs of the targets.
        entropy: in nats; None unless it was asked for.
        logsumexp: of the logits after temperature.
    """

    logps: Tensor
    entropy: Tensor | None
    logsumexp: Tensor


class BothLogprobOutput(NamedTuple):
    """The results over a support, as `LogprobOutput` has them, and those of the whole softmax."""

    logps: Tensor
    entropy: Tensor | None
    logsumexp: Tensor
    full_logps: Tensor
    full_entropy: Tensor | None
    full_logsumexp: Tensor


class GRPOLossOutput(NamedTuple):
    """A loss, its metrics, and the per-token values it was computed from.

    Attributes:
        loss: differentiable scalar, float32.
        metrics: name to 0-d tensor, on the device; reading one synchronizes.
        logps: float32 in the shape of the targets, detached.
        entropy: likewise, in nats; None where it was neither computed nor given.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    logps: Tensor
    entropy: Tensor | None


class BothGRPOLossOutput(NamedTuple):
    """The result over a support, as `GRPOLossOutput` has it, and log-probs of the whole softmax."""

    loss: Tensor
    metrics: dict[str, Tensor]
    logps: Tensor
    entropy: Tensor | None
    full_logps: Tensor
    full_entropy: Tensor

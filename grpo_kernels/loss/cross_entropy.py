"""The cross-entropy term of a call, in addition to its policy loss, on any tokens.

    loss = -sum_i c_i l_i,    dl_i = -c_i

The weights c are the caller's, 0 on other tokens. Tokens with a weight are labels, as in supervised
training: a tool's output (ECHO, arXiv:2605.24517), or a demonstration.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_terms(weights: Tensor, logps: Tensor) -> Tensor:
    """`-c l` of `weights [N]` and `logps [N]`, which may hold anything where c is 0."""
    return -torch.where(weights != 0, weights * logps, 0.0)


def cross_entropy(weights: Tensor, logps: Tensor) -> Tensor:
    """`-sum c l`, 0-d."""
    return cross_entropy_terms(weights, logps).sum()


def cross_entropy_metrics(weights: Tensor, logps: Tensor) -> dict[str, Tensor]:
    """The term, its tokens, and their plain mean negative log-likelihood, in nats."""
    chosen = weights != 0
    count = chosen.to(logps.dtype).sum()
    total = torch.where(chosen, logps, 0.0).sum()
    loss = cross_entropy(weights, logps)
    return {"ce_loss": loss, "ce_tokens": count, "ce_nll": -total / count.clamp(min=1)}

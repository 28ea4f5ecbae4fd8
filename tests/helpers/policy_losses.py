"""The formulas of the kernels in float64, which torch differentiates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import GRPOLossConfig
from grpo_kernels.kernels import LogitTransform, PolicyLossResult
from grpo_kernels.loss.losses import Cispo, Clip, Loss
from grpo_kernels.loss.objective import policy_objective, tokens_of
from grpo_kernels.loss.tokens import Tokens

TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 8.0},
    "scale_temperature": {"logit_scale": 0.6, "temperature": 1.4},
    "everything": {"softcap": 8.0, "logit_scale": 1.2, "temperature": True},
}


def exact_statistics(
    logits: Tensor, targets: Tensor, transform: LogitTransform, weights: Any
) -> tuple[Tensor, Tensor]:
    """Log-probs, logsumexp and entropy of each row, `[3, N]`, and the gradient of its raw logits.

    `weights [3, N]` are the gradients of the three.
    """
    u, banned = logits.double().requires_grad_(), logits == -math.inf
    z = transform.logit_scale * u
    if transform.softcap is not None:
        z = transform.softcap * (z / transform.softcap).tanh()
        z = z.masked_fill(banned, -math.inf)
    z = z / transform.per_row
    log_p = z.log_softmax(1)
    entropy = -(log_p.exp() * log_p.masked_fill(banned, 0.0)).sum(1)
    stats = torch.stack([log_p.gather(1, targets[:, None])[:, 0], z.logsumexp(1), entropy])
    return stats.detach(), torch.autograd.grad(stats, u, weights.double())[0]


def exact_policy_loss(
    logps: Tensor,
    entropy: Tensor | None,
    *,
    surrogate: str,
    low: float,
    high: float,
    ratio_max: float | None = None,
    dual_clip: float | None = None,
    scale: Tensor | None = None,
    kl_ratio: bool = False,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    **tensors: Tensor,
) -> PolicyLossResult:
    """The objective and its gradients; arguments are those of the kernel's function."""
    if surrogate == "cispo":
        loss: Loss = Cispo(epsilon_high=ratio_max)
    else:
        bounds = {"epsilon": 1 - low, "epsilon_high": high - 1}
        loss = Clip(**bounds, delta=ratio_max, dual_clip=dual_clip)
    cfg = GRPOLossConfig(
        loss_type=loss,
        beta=beta,
        kl_estimator=kl_estimator,
        use_bias_correction_kl=kl_ratio,
        entropy_coef=entropy_coef,
        is_correction="none" if scale is None else "token_truncate",
    )
    tensors = {k: x if x.dtype == torch.bool else x.double() for k, x in tensors.items()}
    unmasked = tensors.pop("mask", None)
    weights = None if scale is None else scale.double()
    constants = Tokens(**tensors, unmasked=unmasked, importance_sampling_weights=weights)
    leaves = [x.double().requires_grad_() for x in (logps, entropy) if x is not None]
    tokens = tokens_of(cfg, constants, leaves[0], leaves[1] if len(leaves) > 1 else None)
    total = policy_objective(cfg, tokens)
    d = torch.autograd.grad(total, leaves, materialize_grads=True)
    return PolicyLossResult(total.detach(), d[0], d[1] if len(d) > 1 and entropy_coef else None)

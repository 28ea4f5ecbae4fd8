"""The formulas of the kernels in float64, which torch differentiates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.kernels import LogitTransform, PolicyLossResult

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
    weights: Tensor,
    count: Tensor,
    mask: Tensor | None = None,
    scale: Tensor | None = None,
    beta: float = 0.0,
    kl_ratio: bool = False,
    entropy_coef: float = 0.0,
    **options: Any,
) -> PolicyLossResult:
    """The loss and its gradients; arguments are those of the kernel's function."""
    active = torch.ones_like(logps, dtype=torch.bool) if mask is None else mask
    leaves = [x.double().requires_grad_() for x in (logps, entropy) if x is not None]

    def only(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.where(active, x.double(), 0.0)

    kwargs = {k: only(x) if isinstance(x, Tensor) else x for k, x in options.items()}
    logp, old, ref = only(leaves[0]), kwargs.pop("old_logps", None), kwargs.pop("ref_logps", None)
    ratio = (logp - (logp.detach() if old is None else old)).clamp(max=80.0).exp()
    loss = _surrogate(logp, ratio, **{k: x for k, x in kwargs.items() if k != "kl_estimator"})
    loss = loss if scale is None else only(scale) * loss
    if ref is not None and beta:
        kl = _kl(ref - logp, kwargs.get("kl_estimator", "k3"))
        loss = loss + beta * (kl * ratio if kl_ratio else kl)
    total = (only(weights) * loss).sum()
    if entropy is not None:
        total = total - entropy_coef / count.double().clamp(min=1.0) * only(leaves[1]).sum()
    d = torch.autograd.grad(total, leaves, materialize_grads=True)
    return PolicyLossResult(total.detach(), d[0], d[1] if len(d) > 1 and entropy_coef else None)


def _surrogate(
    logps: Tensor,
    ratio: Tensor,
    *,
    advantages: Tensor,
    surrogate: str,
    low: float,
    high: float,
    ratio_max: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    bounded = ratio if ratio_max is None else ratio.clamp(max=ratio_max)
    if surrogate == "cispo":
        return -bounded.detach() * advantages * logps
    loss = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, loss.minimum(-dual_clip * advantages), loss)
    return loss


def _kl(d: Tensor, estimator: str) -> Tensor:
    return {"k1": -d, "k2": d * d / 2, "k3": d.expm1() - d}[estimator]

"""The formula of `triton_policy_loss.policy_loss` in float64, which torch differentiates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import PolicyLoss


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
) -> PolicyLoss:
    """The loss and its gradients; arguments are those of the kernel's function."""
    kept = torch.ones_like(logps, dtype=torch.bool) if mask is None else mask
    wanted = [x.double().requires_grad_() for x in (logps, entropy) if x is not None]

    def only(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.where(kept, x.double(), 0.0)

    given = {k: only(x) if isinstance(x, Tensor) else x for k, x in options.items()}
    own, old, ref = only(wanted[0]), given.pop("old_logps", None), given.pop("ref_logps", None)
    ratio = (own - (own.detach() if old is None else old)).clamp(max=80.0).exp()
    loss = _surrogate(own, ratio, **{k: x for k, x in given.items() if k != "kl_estimator"})
    loss = loss if scale is None else only(scale) * loss
    if ref is not None and beta:
        kl = _kl(ref - own, given.get("kl_estimator", "k3"))
        loss = loss + beta * (kl * ratio if kl_ratio else kl)
    total = (only(weights) * loss).sum()
    if entropy is not None:
        total = total - entropy_coef / count.double().clamp(min=1.0) * only(wanted[1]).sum()
    d = torch.autograd.grad(total, wanted, materialize_grads=True)
    return PolicyLoss(total.detach(), d[0], d[1] if len(d) > 1 and entropy_coef else None)


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

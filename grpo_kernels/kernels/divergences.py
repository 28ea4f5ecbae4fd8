"""Divergences of a row's two softmaxes, one class each.

With p and q the softmaxes, z the logits of p, d = log p - log q, m = beta q + (1 - beta) p:

    class      divergence L                            gradient by z
    ReverseKL  sum p d                                 p (h - sum p h),  h = d
    ForwardKL  -sum q d                                p (h - sum p h),  h = 1 - e^-d: p - q
    JSD        beta sum q log(q/m)                     (1 - beta) p (h - sum p h),
                 + (1 - beta) sum p log(p/m)                             h = log(p/m)

Each is a sum of KLs from one distribution: q, p, or m. The torch kernels use the object's terms and
`p h`; `triton_divergences.py` has both as Triton functions. `addends` is the paper's formula, for
autograd, the only one that `grpo_kernels.reference` uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class KLTerm(NamedTuple):
    """A part of a divergence, `weight * sum a log(a / b)`, with b the divergence's `base`."""

    weight: float
    a: Tensor
    log_ratio: Tensor  # log(a / b)


@dataclass(frozen=True)
class Divergence:
    """A divergence of the reference's softmax q and the policy's p.

    Methods on p and q, float32 `[C, V]`, may return a tensor in the memory of a `spare` one.
    `beta` is the reference's share of a mixture; a divergence without a mixture ignores it.

    Attributes:
        name: the name in the public calls.
    """

    name: ClassVar[str]

    beta: float = 0.5

    @property
    def scale(self) -> float:
        """The factor of `p (h - sum p h)` in the gradient."""
        return 1.0

    def addends(self, s: Tensor, t: Tensor) -> Tensor:
        """The part of each entry in L, from log-probs s of the policy and t of the reference.

        No entry is -inf in both.
        """
        raise NotImplementedError(f"{type(self).__name__}.addends")

    def terms(self, p: Tensor, q: Tensor, d: Tensor, spare: Tensor) -> list[KLTerm]:
        """The parts of L. May overwrite d, which may be NaN where p and q are 0."""
        raise NotImplementedError(f"{type(self).__name__}.terms")

    def base(self, p: Tensor, q: Tensor, spare: Tensor) -> Tensor:
        """The distribution b from which the terms are KLs."""
        raise NotImplementedError(f"{type(self).__name__}.base")

    def weighted_h(self, p: Tensor, q: Tensor, terms: list[KLTerm]) -> Tensor:
        """`p h`, with the h of the gradient `p (h - sum p h)`: dL/dp up to a constant and `scale`.

        By default h is the first term's logarithm. inf makes the gradient infinite; NaN counts as 0
        where p is 0. May overwrite q and the terms' logarithms.
        """
        return terms[0].log_ratio.mul_(p)


class ReverseKL(Divergence):
    """KL(p || q). Infinite, with its gradient, where the reference alone rules an entry out."""

    name = "reverse"

    def addends(self, s: Tensor, t: Tensor) -> Tensor:
        return _times_log(s, s - t)

    def terms(self, p: Tensor, q: Tensor, d: Tensor, spare: Tensor) -> list[KLTerm]:
        return [KLTerm(1.0, p, d)]

    def base(self, p: Tensor, q: Tensor, spare: Tensor) -> Tensor:
        return q


class ForwardKL(Divergence):
    """KL(q || p). Infinite where the policy alone rules an entry out; its gradient is not."""

    name = "forward"

    def addends(self, s: Tensor, t: Tensor) -> Tensor:
        return _times_log(t, t - s)

    def terms(self, p: Tensor, q: Tensor, d: Tensor, spare: Tensor) -> list[KLTerm]:
        return [KLTerm(1.0, q, d.neg_())]

    def base(self, p: Tensor, q: Tensor, spare: Tensor) -> Tensor:
        return p

    def weighted_h(self, p: Tensor, q: Tensor, terms: list[KLTerm]) -> Tensor:
        # p - q, which cancels between close models.
        return terms[0].log_ratio.mul_(-0.5).tanh_().mul_(torch.add(p, q, out=q))


class JSD(Divergence):
    """The generalised Jensen-Shannon divergence, beta KL(q || m) + (1 - beta) KL(p || m): finite.

    Reference: arXiv:2306.13649.
    """

    name = "jsd"

    @property
    def scale(self) -> float:
        return 1 - self.beta

    def addends(self, s: Tensor, t: Tensor) -> Tensor:
        m = log_mixture(s, t, self.beta)
        return self.beta * _times_log(t, t - m) + (1 - self.beta) * _times_log(s, s - m)

    def terms(self, p: Tensor, q: Tensor, d: Tensor, spare: Tensor) -> list[KLTerm]:
        log_pm, log_qm = to_mixture_(d, self.beta, spare)
        return [KLTerm(1 - self.beta, p, log_pm), KLTerm(self.beta, q, log_qm)]

    def base(self, p: Tensor, q: Tensor, spare: Tensor) -> Tensor:
        return torch.lerp(p, q, self.beta, out=spare)


DIVERGENCES: dict[str, type[Divergence]] = {x.name: x for x in (ReverseKL, ForwardKL, JSD)}


def to_mixture_(d: Tensor, beta: float, out: Tensor) -> tuple[Tensor, Tensor]:
    """`log(p / m)`, in `out`, and `log(q / m)`, in the memory of d."""
    # Beyond, p or q is negligible.
    d.clamp_(-80.0, 80.0)
    log_pm = torch.neg(d, out=out).expm1_().mul_(beta).log1p_().neg_()
    return log_pm, torch.sub(log_pm, d, out=d)


def log_mixture(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """`log m`, from log-probs."""
    return torch.logaddexp(t + math.log(beta), s + math.log1p(-beta))


def _times_log(log_p: Tensor, log_ratio: Tensor) -> Tensor:
    """`p * log_ratio`, 0 where p is."""
    none = log_p == -torch.inf
    return log_p.exp() * log_ratio.masked_fill(none, 0.0)

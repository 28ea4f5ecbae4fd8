"""The walk of CONTRIBUTING.md to a divergence, followed."""

import pytest
import torch
import triton
import triton.language as tl

from grpo_kernels import Execution, Reference, fused_distillation_loss
from grpo_kernels import reference as exact
from grpo_kernels.kernels import divergences, triton_divergences
from grpo_kernels.kernels.divergences import Divergence, log_mixture, to_mixture_
from grpo_kernels.kernels.triton_common import expm1
from grpo_kernels.kernels.triton_divergences import kl_addend, to_mixture
from tests.helpers.batches import relative_error


class SkewKL(Divergence):
    """KL(q || m), arXiv:2402.03898."""

    name = "skew"
    scale = property(lambda self: 1 - self.beta)

    def addends(self, s, t):
        return t.exp() * (t - log_mixture(s, t, self.beta))

    def terms(self, p, q, d, spare):
        return [divergences.KLTerm(1.0, q, to_mixture_(d, self.beta, spare)[1])]

    def base(self, p, q, spare):
        return torch.lerp(p, q, self.beta, out=spare)

    def weighted_h(self, p, q, terms):
        return terms[0].log_ratio.expm1_().mul_(p).neg_()  # h = 1 - q/m


@triton.jit
def _skew_addend(p, q, d, beta):
    _, q_log_ratio = to_mixture(d, beta)
    return kl_addend(q, p + beta * (q - p), q_log_ratio)


@triton.jit
def _skew_moment(p, q, d, mean, beta):
    _, q_log_ratio = to_mixture(d, beta)
    return tl.where(p == 0.0, 0.0, -p * (expm1(q_log_ratio) + mean))


@pytest.mark.parametrize("backend", ("torch", "triton"))
def test_a_divergence_is_two_classes(backend, monkeypatch):
    functions = triton_divergences.DivergenceFunctions(_skew_addend, _skew_moment)
    monkeypatch.setitem(divergences.DIVERGENCES, "skew", SkewKL)
    monkeypatch.setitem(triton_divergences.FUNCTIONS, SkewKL, functions)
    g = torch.Generator().manual_seed(0)
    hidden, weight, noise = (torch.randn(n, 16, generator=g) for n in (7, 1103, 1103))
    teacher = Reference(hidden, weight + 1e-2 * noise)
    kind = {"kind": "skew", "beta": 0.1}
    truth = [x.double().requires_grad_() for x in (hidden, weight)]
    teacher64 = Reference(*(x.double() for x in teacher))
    loss = exact.divergence(*truth, teacher64, **kind).mean()
    loss.backward()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    out = fused_distillation_loss(*leaves, teacher, execution=Execution(backend=backend), **kind)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss.item(), rel=3e-5)
    for x, y in zip(leaves, truth, strict=True):
        assert relative_error(x.grad, y.grad) <= 1e-4

"""The walks of CONTRIBUTING.md, followed: an option of the head, a divergence, a rollout."""

import re
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels import (
    Execution,
    LMHead,
    Reference,
    fused_distillation_loss,
    linear_logprobs,
)
from grpo_kernels import reference as exact
from grpo_kernels.head.lm_head import HeadTerm
from grpo_kernels.kernels import divergences, triton_divergences
from grpo_kernels.kernels.divergences import Divergence, log_mixture, to_mixture_
from grpo_kernels.kernels.triton_common import expm1
from grpo_kernels.kernels.triton_divergences import kl_addend, to_mixture
from grpo_kernels.training.sampling.rollout import Completion
from tests.helpers.batches import relative_error
from tests.helpers.ranks import ROOT
from tests.helpers.trainer_runs import config_of, rows_of, trainer_of

PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_what_the_page_names_is_where_it_says():
    placed = re.findall(r"`([\w.]+)`(?:\s+\(|\s+in\s+)`([\w/]+\.py)`", PAGE)
    placed += [(name, file) for file, name in re.findall(r"`([\w/]+\.py)`: (?:.*?)`(\w+)`", PAGE)]
    assert len(placed) > 10
    for name, file in placed:
        assert re.search(rf"\b{name.split('.')[-1]}\b", (ROOT / file).read_text()), (name, file)


@dataclass(frozen=True, kw_only=True)
class Shifted(LMHead):
    """A head with a sum of its own beside the raw logits."""

    shift: Tensor

    def terms(self, hidden):
        terms = super().terms(hidden)
        ones = terms[0].x.new_ones(()).expand(len(terms[0].x), 1)
        return (*terms, HeadTerm(ones, self.shift[:, None]))


def test_an_option_of_the_head_is_a_term():
    g = torch.Generator().manual_seed(0)
    hidden, weight, shift = (torch.randn(*n, generator=g) for n in ((7, 16), (61, 16), (61,)))
    targets = torch.randint(61, (7,), generator=g)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, shift)]
    head = Shifted(leaves[1], shift=leaves[2], temperature=0.7)
    linear_logprobs(leaves[0], head, targets).logps.sum().backward()
    truth = [x.double().requires_grad_() for x in (hidden, weight, shift)]
    logits = (truth[0] @ truth[1].T + truth[2]) / 0.7
    logits.log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    for x, y in zip(leaves, truth, strict=True):
        assert relative_error(x.grad, y.grad) <= 3e-5


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
@pytest.mark.parametrize("apart", (1.0, 1e-2))
def test_a_divergence_is_two_classes(apart, backend, monkeypatch):
    functions = triton_divergences.DivergenceFunctions(_skew_addend, _skew_moment)
    monkeypatch.setitem(divergences.DIVERGENCES, "skew", SkewKL)
    monkeypatch.setitem(triton_divergences.FUNCTIONS, SkewKL, functions)
    g = torch.Generator().manual_seed(0)
    hidden, weight, noise = (torch.randn(n, 16, generator=g) for n in (7, 1103, 1103))
    teacher = Reference(hidden, weight + apart * noise)
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


class Mine:
    """Answers with the prompt's last tokens, backwards."""

    def __call__(self, prompts, count, sampling):
        n = sampling.max_new_tokens
        return [Completion(list(prompt)[-n:][::-1][: n - k % 2], True)
                for prompt in prompts for k in range(count)]  # fmt: skip


@pytest.mark.usefixtures("real_memory")
def test_a_rollout_is_an_object(tiny_model, tmp_path):
    trainer = trainer_of(config_of(tiny_model, tmp_path), rollout=lambda policy: Mine())
    rows = rows_of(trainer.train())
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)

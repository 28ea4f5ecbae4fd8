"""`grpo_loss` where it is delicate; its values, metrics and gradients are in `test_pairs.py`."""

from dataclasses import replace

import pytest
import torch

from grpo_kernels import grpo_loss
from grpo_kernels.base.sequences import Sequences
from grpo_kernels.loss.config import KL_ESTIMATORS
from grpo_kernels.loss.objective import (
    objective_in_closed_form,
    policy_objective,
    tokens_of,
)
from grpo_kernels.loss.tokens import Tokens
from tests.helpers.batches import config
from tests.helpers.head_options import BACKENDS, exact_and_actual


@pytest.mark.parametrize(
    ("options", "has_one"),
    (
        ({}, True),
        ({"epsilon": 0.0}, True),
        ({"delta": 1.1}, True),
        ({"dual_clip": 3.0}, True),
        ({"is_correction": "token_mask", "top_entropy_quantile": 0.5}, True),
        ({"beta": 0.1, "kl_estimator": "exact"}, True),
        ({"beta": 0.1}, False),
        ({"entropy_coef": 0.1}, False),
        *(({"loss_type": x}, False) for x in ("gspo", "gspo_token", "cispo", "gmpo")),
    ),
    ids=str,
)
def test_the_closed_form_is_the_objective(options, has_one):
    """Value and gradient, beyond every bound, where the ratio has no more digits, and at NaN."""
    g = torch.Generator().manual_seed(0)
    d = torch.cat([torch.linspace(-3, 3, 193), torch.tensor([79.0, 81.0, torch.nan, 0.0, 0.0])])
    d = d.double().repeat_interleave(2)
    advantages = torch.tensor([1.3, -0.7], dtype=torch.float64).repeat(len(d) // 2)
    advantages[-1] = 0.0
    weights, old, sampler, entropy = torch.rand(4, len(d), dtype=torch.float64, generator=g)
    constants = Tokens(
        advantages, weights, torch.tensor(len(d)), old_logps=old, sampling_logps=sampler,
        ref_logps=sampler, kl=entropy, sequences=Sequences(2, length=len(d) // 2),
    )  # fmt: skip
    cfg, logps = config(**options), (old + d).requires_grad_()
    tokens = tokens_of(cfg, constants, logps, entropy)
    result = objective_in_closed_form(cfg, tokens)
    assert (result is not None) == has_one
    if result is not None:
        loss = policy_objective(cfg, tokens)
        (expected,) = torch.autograd.grad(loss, logps)
        assert loss.isnan() and result[0].isnan() and (expected != 0).sum() > len(d) / 4
        torch.testing.assert_close(result[1], expected, rtol=1e-12, atol=0)
        finite = replace(tokens, logps=old + d.nan_to_num(0.0).clamp(max=3.0))
        value, _ = objective_in_closed_form(cfg, finite)
        torch.testing.assert_close(value, policy_objective(cfg, finite), rtol=1e-12, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend):
    logps, entropy = (torch.zeros(3, 0, requires_grad=True) for _ in range(2))
    cfg = config(entropy_coef=0.1)
    out = grpo_loss(logps, torch.ones(3), entropy=entropy, config=cfg, backend=backend)
    out.loss.backward()
    assert out.loss == 0 and logps.grad.shape == (3, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_share_the_gradient_as_autograd_does(backend):
    """Ratios exactly at 1, at the bounds and at delta."""
    ratios = torch.tensor([[1.0, 1.0, 0.5, 0.5, 1.5, 1.5, 2.0, 2.0]])
    advantages, cfg = torch.tensor([[1.0, -1.0] * 4]), config(epsilon=0.5, delta=2.0)
    old = torch.zeros(1, 8)

    def loss(package, logps, **how):
        x = logps.float()  # of float32 bounds
        return package.grpo_loss(x, advantages, old_logps=old, config=cfg, **how).loss

    exact, actual = exact_and_actual(loss, ratios.log(), backend=backend)
    torch.testing.assert_close(actual[0].double(), exact[0])


LEVELS = {
    "token": {},
    "gspo_token": {"loss_type": "gspo_token"},
    "sequence": {"importance_sampling_level": "sequence"},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("clamp", (None, 9.9), ids=("unclamped", "clamped"))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_gradient_of_the_kl_far_from_the_reference(estimator, level, clamp, backend):
    """At d = ref - logp the terms e^d of r (KL + KL') cancel; what is left must be exact."""
    d = torch.linspace(-20, 20, 161).reshape(-1, 1)
    if level == "sequence":  # also of equal tokens, whose terms cancel as one token's do
        d = torch.cat([d.expand(-1, 3), d.roll(1) + torch.arange(3)], 1)
    cfg = config(
        beta=0.1, kl_estimator=estimator, kl_clamp=clamp, use_bias_correction_kl=True,
        **LEVELS[level],
    )  # fmt: skip
    for tokens in {d.shape[1], 1}:
        distance = d[:, :tokens].float()
        old = torch.linspace(-3, -0.1, distance.numel()).reshape(distance.shape)
        logps = old + 0.3 * torch.sin(7 * old)
        ref = logps + distance

        def loss(package, x, old=old, ref=ref, **how):
            constants = {"old_logps": old.to(x.dtype), "ref_logps": ref.to(x.dtype)}
            advantages = x.new_zeros(len(x))
            return package.grpo_loss(x, advantages, config=cfg, **constants, **how).loss

        (exact,), (actual,) = exact_and_actual(loss, logps, backend=backend)
        assert exact.abs().max() > 0
        # Relative to each gradient or, where that has a root, to its smallest term; where a
        # sequence's tokens enter, to the largest of its gradients.
        least = (ref - logps).double().abs().clamp(min=1)
        size = exact.abs().maximum(cfg.beta / exact.numel() * least)
        size = size.amax(1, keepdim=True) if level == "sequence" else size
        worst = ((actual - exact).abs() / size).max()
        assert worst <= 1e-5, f"d_logps: relative error {worst:.1e}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss_type", ("dapo", "grpo", "gspo"))
@pytest.mark.parametrize("shape", ((1, 7), (5, 1), (1, 1)))
def test_one_sequence_and_one_token(shape, loss_type, backend):
    """Advantages per sequence, `[B]`, every third of the caller's; no mask, so nothing is indexed.

    A kernel reads one value per token: a view of fewer would be read past its end.
    """
    g = torch.Generator().manual_seed(0)
    advantages = torch.randn(shape[0], 3, generator=g)[:, 0]
    logps, old = (-3 * torch.rand(shape, generator=g) for _ in range(2))
    cfg, losses = config(loss_type=loss_type, epsilon=0.9, epsilon_high=20.0), []

    def loss(package, x, **how):
        constants = {"old_logps": old.to(x.dtype), "config": cfg}
        losses.append(package.grpo_loss(x, advantages.to(x.dtype), **constants, **how).loss)
        return losses[-1]

    (exact,), (actual,) = exact_and_actual(loss, logps, backend=backend)
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-6)
    assert exact.abs().max() > 0.01


def test_an_entropy_bonus_without_a_mask():
    """Found by calls drawn at random: an expanded gradient was scaled in place."""
    logps, entropy, bonus = -torch.rand(4, 2) - 1, torch.rand(4, 2), config(entropy_coef=0.5)
    grads = []
    for mask in (None, torch.ones(4, 2, dtype=torch.bool)):
        leaf = entropy.clone().requires_grad_()
        (2 * grpo_loss(logps, torch.ones(4), mask, entropy=leaf, config=bonus).loss).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads) and (grads[0] < 0).all()

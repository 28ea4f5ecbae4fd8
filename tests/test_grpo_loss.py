"""`grpo_loss` where it is delicate; its values, metrics and gradients are in `test_pairs.py`."""

from types import SimpleNamespace

import pytest
import torch

from grpo_kernels import grpo_loss, reference
from grpo_kernels.base.sequences import Sequences
from grpo_kernels.kernels import PolicyLossResult
from grpo_kernels.loss.config import KL_ESTIMATORS
from grpo_kernels.loss.grpo_loss import policy_loss_and_grads
from grpo_kernels.loss.tokens import LossInputs
from tests.helpers.batches import config, make_batch
from tests.helpers.head_options import BACKENDS


@pytest.mark.parametrize(
    ("options", "taken"),
    (
        ({}, True),
        ({"dual_clip": 3.0, "entropy_coef": 0.1}, True),
        ({"loss_type": "cispo"}, True),
        *(({"beta": 0.1, "kl_estimator": x}, x in ("k1", "k2", "k3")) for x in KL_ESTIMATORS),
        ({"beta": 0.1, "kl_clamp": 1.0}, False),
        ({"kl_estimator": "abs", "kl_clamp": 1.0}, True),  # of no KL
        *(({"loss_type": x}, False) for x in ("sapo", "reinforce", "dppo_tv", "gspo", "gmpo")),
        ({"top_entropy_quantile": 0.5}, False),
        ({"top_entropy_quantile": 0.5, "entropy_threshold": 1.0}, True),
    ),
    ids=str,
)
def test_who_takes_the_kernel(options, taken):
    """The kernel takes clipped losses, cispo and plain estimators; PyTorch runs the others."""
    calls = []

    def kernel(logps, entropy, **kwargs):
        calls.append(kwargs)
        return PolicyLossResult(logps.sum(), logps, None)

    x, ones = torch.zeros(3), torch.ones(3)
    sequences = Sequences(1, torch.zeros(3, dtype=torch.long))
    inputs = LossInputs(ones, ones, torch.tensor(3.0), ref_logps=x, sequences=sequences)
    policy_loss_and_grads(
        config(**options), inputs, x, ones, SimpleNamespace(policy_loss=kernel), grad=True
    )
    assert len(calls) == taken
    policy_loss_and_grads(
        config(**options), inputs, x, ones, SimpleNamespace(policy_loss=None), grad=True
    )
    assert len(calls) == taken


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("entropy_coef", (None, 0.0, 0.1))
def test_empty(entropy_coef, backend):
    logps = torch.zeros(3, 0, requires_grad=True)
    entropy = None if entropy_coef is None else torch.zeros(3, 0, requires_grad=True)
    cfg = config(entropy_coef=entropy_coef or 0.0)
    out = grpo_loss(logps, torch.ones(3), entropy=entropy, config=cfg, backend=backend)
    out.loss.backward()
    assert out.loss == 0 and logps.grad.shape == (3, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_share_the_gradient_as_autograd_does(backend):
    """Ratios exactly at 1, at the bounds and at delta."""
    old = torch.zeros(1, 8)
    logps = torch.tensor([[0.0, 0.0, 0.5, 0.5, 1.5, 1.5, 2.0, 2.0]]).log()
    logps[:, :2] = 0.0
    advantages = torch.tensor([[1.0, -1.0] * 4])
    cfg = config(epsilon=0.5, delta=2.0)
    grads = []
    for call, dtype, kw in (
        (reference.grpo_loss, torch.float32, {}),
        (grpo_loss, torch.float32, {"backend": backend}),
    ):
        x = logps.to(dtype).requires_grad_()
        call(x, advantages, old_logps=old, config=cfg, **kw).loss.backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_gradient_flows_into_neither_old_nor_ref():
    batch = make_batch()
    old, ref = (x.nan_to_num(posinf=0).requires_grad_() for x in (batch.old_logps, batch.ref_logps))
    logps = torch.zeros_like(old, requires_grad=True)
    out = grpo_loss(
        logps, batch.advantages, batch.mask, old_logps=old, ref_logps=ref, config=config(beta=0.1)
    )
    out.loss.backward()
    assert logps.grad is not None and old.grad is None and ref.grad is None


LEVELS = {
    "token": {},
    "gspo_token": {"loss_type": "gspo_token"},
    "sequence": {"importance_sampling_level": "sequence"},
}


@pytest.mark.parametrize("backend", ("torch", "triton"))
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
        gradients = []
        for call, dtype, options in (
            (reference.grpo_loss, torch.float64, {}),
            (grpo_loss, torch.float32, {"backend": backend}),
        ):
            x, *constants = (x.to(dtype) for x in (logps, old, ref))
            x.requires_grad_()
            loss = call(
                x, torch.zeros(len(x)).to(dtype), old_logps=constants[0], ref_logps=constants[1],
                config=cfg, **options,
            ).loss  # fmt: skip
            loss.backward()
            gradients.append(x.grad.double())
        exact, actual = gradients
        distance = (ref - logps).double()
        assert exact.abs().max() > 0
        # Relative to each gradient or, where that has a root, to its smallest term; where a
        # sequence's tokens enter, to the largest of its gradients.
        size = exact.abs().maximum(cfg.beta / exact.numel() * distance.abs().clamp(min=1))
        size = size.amax(1, keepdim=True) if level == "sequence" else size
        worst = ((actual - exact).abs() / size).max()
        assert worst <= 1e-5, f"d_logps: relative error {worst:.1e}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", ((1, 7), (5, 1), (1, 1)))
def test_one_sequence_and_one_token(shape, backend):
    """Advantages per sequence, `[B]`, every third of the caller's; no mask, so nothing is indexed.

    A kernel reads one value per token: a view of fewer would be read past its end.
    """
    g = torch.Generator().manual_seed(0)
    advantages = torch.randn(shape[0], 3, generator=g)[:, 0]
    logps, old_logps = (-3 * torch.rand(shape, generator=g) for _ in range(2))
    for loss_type in ("dapo", "grpo", "gspo"):
        cfg, outs, grads = config(loss_type=loss_type, epsilon=0.9, epsilon_high=20.0), [], []
        for call, dtype, how in (
            (reference.grpo_loss, torch.float64, {}),
            (grpo_loss, torch.float32, {"backend": backend}),
        ):
            leaf = logps.to(dtype).requires_grad_()
            out = call(leaf, advantages.to(dtype), old_logps=old_logps.to(dtype), config=cfg, **how)
            outs.append(out.loss)
            grads.append(*torch.autograd.grad(out.loss, leaf))
        torch.testing.assert_close(outs[1].double(), outs[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads[1].double(), grads[0], rtol=1e-5, atol=1e-6)
        assert grads[0].abs().max() > 0.01

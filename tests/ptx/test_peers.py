"""Kernels of others, unchanged from their wheels: a test of the emulator, and of our baselines.

Results are compared with float64; what the checks find in them is stated as it is.
"""

import pytest
import torch

from grpo_kernels import GRPOLossConfig, grpo_loss, reference
from tests.helpers.batches import relative_error
from tests.ptx import EmulatedDriver

pytest.importorskip("liger_kernel")
pytest.importorskip("trl")
pytestmark = pytest.mark.usefixtures("real_memory", "lenient")
B, T, V = 4, 13, 1003
# The temperature is a divisor of logits, to both.
TEMPERATURE = 0.9


@pytest.fixture
def lenient(monkeypatch):
    """Findings are collected, not raised."""
    monkeypatch.setattr(EmulatedDriver.settings, "strict", False)
    EmulatedDriver.settings.findings.clear()
    yield
    EmulatedDriver.settings.findings.clear()


def found():
    return {(f.kind, f.kernel) for f in EmulatedDriver.settings.findings}


def batch():
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(B, T + 1, V, generator=g)
    ids = torch.randint(V, (B, T), generator=g)
    mask = torch.arange(T) < torch.tensor([[T], [5], [9], [1]])
    logits[:, :-1].scatter_add_(2, ids[..., None], torch.full((B, T, 1), 5.0))
    true = (logits[:, :-1].double() / TEMPERATURE).log_softmax(-1).gather(2, ids[..., None])[..., 0]
    old, ref, sampled = (true + s * torch.randn(B, T, generator=g) for s in (0.3, 0.5, 0.2))
    advantages = torch.tensor([1.3, -0.7, 0.4, -2.0])
    return logits, ids, mask, old.float(), ref.float(), sampled.float(), advantages


# id: options of Liger's call, of our config
PATHS = {
    "token": ({}, {}),
    "kl": ({"beta": 0.1}, {"beta": 0.1, "use_bias_correction_kl": False}),
    "delta": ({"delta": 1.5}, {"delta": 1.5}),
    "grpo": ({"loss_type": "grpo"}, {"loss_type": "grpo"}),
    "cispo": ({"loss_type": "cispo", "eps_high": 5.0}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "sapo": ({"loss_type": "sapo"}, {"loss_type": "sapo"}),
    "sequence": (
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    ),
    "sequence_kl": (
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.1},
        {
            "importance_sampling_level": "sequence",
            "loss_type": "grpo",
            "beta": 0.1,
            "use_bias_correction_kl": False,
        },
    ),
    "corrected_kl": (
        {"beta": 0.1, "use_bias_correction_kl": True},
        {"beta": 0.1, "use_bias_correction_kl": True},
    ),
    "vllm_ratio": ({"vllm_is_ratio": True}, {"is_correction": "token_truncate"}),
}


@pytest.mark.parametrize("inplace", (False, True), ids=("apart", "in_place"))
@pytest.mark.parametrize("path", PATHS)
def test_liger_grpo(path, inplace):
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    theirs, ours = PATHS[path]
    logits, ids, mask, old, ref, sampled, advantages = batch()
    high = {} if path == "sapo" else {"epsilon_high": 0.4}
    cfg = GRPOLossConfig(**{"loss_type": "dapo", "beta": 0.0, **high, **ours})
    given = {"old_logps": old, "config": cfg}
    if cfg.beta:
        given["ref_logps"] = ref
    theirs = {"beta": 0.0, **theirs}
    if theirs.pop("vllm_is_ratio", False):
        given["sampling_logps"] = sampled
        theirs["vllm_is_ratio"] = (old - sampled).exp().clamp(max=cfg.is_clip_max)
    results = []
    for call, dtype in ((reference.grpo_loss, torch.float64), (grpo_loss, torch.float32)):
        x = logits.clone().to(dtype).requires_grad_()
        logps = (x[:, :-1] / TEMPERATURE).log_softmax(-1).gather(2, ids[..., None])[..., 0]
        loss = call(logps, advantages, mask, **given).loss
        results.append((loss.detach(), torch.autograd.grad(loss, x)[0]))
    (truth, gradient), (own, own_gradient) = results
    x = logits.clone().requires_grad_()
    loss, *_ = triton_grpo_loss(
        x * 1, old, ref if cfg.beta else None, ids, advantages, mask.float(), TEMPERATURE,
        inplace=inplace, reduce=True, **theirs,
    )  # fmt: skip
    loss.backward()
    assert gradient.norm() > 0
    assert abs(loss.item() - truth.item()) <= 2e-6 * max(1.0, abs(truth.item()))
    assert abs(loss.item() - own.item()) <= 2e-6 * max(1.0, abs(own.item()))
    assert relative_error(x.grad, gradient) <= 3e-6
    assert relative_error(x.grad, own_gradient) <= 3e-6
    assert found() == set(), EmulatedDriver.settings.findings


def test_liger_selective_log_softmax():
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

    logits, ids, mask, *_ = batch()
    logps = fused_selective_log_softmax(logits, ids, TEMPERATURE, mask)
    true = (logits[:, :-1].double() / TEMPERATURE).log_softmax(-1).gather(2, ids[..., None])[..., 0]
    assert (logps - true)[mask].abs().max() <= 2e-6 and found() == set()


def test_liger_softmax():
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    compare(LigerSoftmaxFunction.apply, lambda x: x.softmax(-1), torch.randn(6, V))


def test_liger_rms_norm():
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def plain(x, w):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w

    def theirs(x, w):
        return LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)

    compare(theirs, plain, torch.randn(6, 200), torch.randn(200))


def test_liger_cross_entropy():
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    targets = torch.randint(V, (7,))
    targets[2] = -100

    def theirs(x):
        return LigerCrossEntropyFunction.apply(x * 1, targets, None)[0]

    # utils.py:143: what is behind the last column comes in as whatever the hardware gives.
    known = {("masked load without other", "element_mul_kernel")}
    plain = torch.nn.functional.cross_entropy
    compare(theirs, lambda x: plain(x, targets), torch.randn(7, V), known=known)


def compare(theirs, plain, *operands, known=()):
    """Values and gradients of a function of theirs against float64."""
    leaves = [x.clone().requires_grad_() for x in operands]
    exact = [x.double().requires_grad_() for x in operands]
    out, expected = theirs(*leaves), plain(*exact)
    d = torch.randn(out.shape)
    grads = torch.autograd.grad(out, leaves, d)
    for mine, true in zip(
        (out, *grads), (expected, *torch.autograd.grad(expected, exact, d.double())), strict=True
    ):
        assert true.norm() > 0 and relative_error(mine, true) <= 2e-6
    assert found() == set(known), EmulatedDriver.settings.findings


def test_trl_log_probs_and_entropy():
    from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy

    ids = torch.randint(V, (7,))

    def theirs(x):
        return torch.stack(selective_log_softmax_and_entropy(x, ids, TEMPERATURE))

    def plain(x):
        logps = (x / TEMPERATURE).log_softmax(-1)
        chosen = logps.gather(1, ids[:, None])[:, 0]
        return torch.stack([chosen, -(logps.exp() * logps).sum(1)])

    # logprob_entropy.py:122: what is behind the last column comes in as the hardware gives it.
    known = {("masked load without other", "_backward_kernel")}
    compare(theirs, plain, 2 * torch.randn(7, V), known=known)

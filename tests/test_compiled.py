"""`torch.compile` around the calls: each is eager between two graphs."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import grpo_kernels
from grpo_kernels import GRPOLossConfig, LMHead, Reference
from tests.helpers.batches import make_batch, relative_error
from tests.helpers.tiers import cases

H, V = 48, 1003
CONFIG = GRPOLossConfig(entropy_coef=0.1, beta=0.1)
MODULE = grpo_kernels.FusedGRPOLoss(CONFIG)


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch, tmp_path):
    """Without graphs of other tests, and of earlier runs."""
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    torch._dynamo.reset()


def grpo(h, weight, b):
    return grpo_kernels.fused_grpo_loss(
        h, LMHead(weight, temperature=0.7), b.targets, b.advantages, b.mask,
        ref_logps=b.ref_logps, config=CONFIG,
    ).loss  # fmt: skip


def module(h, weight, b):
    head = LMHead(weight, temperature=0.7)
    return MODULE(h, head, b.targets, b.advantages, b.mask, ref_logps=b.ref_logps).loss


def logprobs(h, weight, b):
    out = grpo_kernels.linear_logprobs(h, weight, b.targets, b.mask)
    return grpo_kernels.grpo_loss(out.logps, b.advantages, b.mask).loss


def distillation(h, weight, b):
    teacher = Reference(h.detach() + 0.1, weight.detach())
    return grpo_kernels.fused_distillation_loss(h, weight, teacher, b.mask).loss


def log_softmax(h, weight, b):
    targets = b.targets.clamp(0)
    logps = grpo_kernels.selective_log_softmax((h @ weight.T).nan_to_num(), targets)
    return (logps * b.mask).sum()


# By the first call in it: a loss of hidden states.
LOSSES = {
    "fused_grpo_loss": grpo,
    "FusedGRPOLoss": module,
    "linear_logprobs": logprobs,
    "fused_distillation_loss": distillation,
    "selective_log_softmax": log_softmax,
}


def step(loss, body, head, batch):
    """A body, then a loss of its states with the head."""
    hidden = torch.tanh(batch.hidden.nan_to_num() @ body) * 1.5
    return loss(hidden, head, batch) * 2.0


def run(call, loss, batch):
    """The loss and its gradients."""
    g = torch.Generator().manual_seed(0)
    leaves = torch.randn(H, H, generator=g) / 7, torch.randn(V, H, generator=g)
    value = call(loss, *(x.requires_grad_() for x in leaves), batch)
    value.backward()
    return value.detach(), *(x.grad for x in leaves)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("backend", cases(("aot_eager", "inductor"), fast="aot_eager".__eq__))
def test_values_and_gradients_are_those_of_eager(name, backend):
    loss, batch, graphs = LOSSES[name], make_batch(), []
    counter = CompileCounterWithBackend(backend)
    for _ in range(2):
        both = run(step, loss, batch), run(torch.compile(step, backend=counter), loss, batch)
        for expected, actual in zip(*both, strict=True):
            assert expected.norm() > 0 and relative_error(actual, expected) < 1e-5
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] >= 2  # the body, and what follows the call

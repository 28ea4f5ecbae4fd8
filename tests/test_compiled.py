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
    "linear_logprobs": logprobs,
    "fused_distillation_loss": distillation,
    "selective_log_softmax": log_softmax,
}


class Model(torch.nn.Module):
    """A body, then a loss of its states with the head."""

    def __init__(self, loss):
        super().__init__()
        self.loss, g = loss, torch.Generator().manual_seed(0)
        self.body = torch.nn.Linear(H, H)
        self.head = torch.nn.Parameter(torch.randn(V, H, generator=g))
        with torch.no_grad():
            self.body.weight.copy_(torch.randn(H, H, generator=g) / 7)

    def forward(self, batch):
        hidden = torch.tanh(self.body(batch.hidden.nan_to_num())) * 1.5
        return self.loss(hidden, self.head, batch) * 2.0


def gradients(model, run, batch):
    model.zero_grad()
    loss = run(batch)
    loss.backward()
    return loss.detach(), *(x.grad.clone() for x in model.parameters())


def expect_equal(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        assert y.norm() > 0 and relative_error(x, y) < 1e-5


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("backend", cases(("aot_eager", "inductor"), fast="aot_eager".__eq__))
def test_values_and_gradients_are_those_of_eager(name, backend):
    model, batch, graphs = Model(LOSSES[name]), make_batch(), []
    counter = CompileCounterWithBackend(backend)
    expected = gradients(model, model, batch)
    for _ in range(2):
        expect_equal(gradients(model, torch.compile(model, backend=counter), batch), expected)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] >= 2  # the body, and what follows the call

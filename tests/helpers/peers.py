"""Kernels of others under the emulator: their inputs, and the comparison with float64."""

import pytest
import torch

from tests.helpers.batches import relative_error
from tests.ptx import EmulatedDriver

B, T, V = 4, 13, 1003
# The temperature is a divisor of logits, to all.
TEMPERATURE = 0.9
WITHOUT_OTHER = "masked load without other"


@pytest.fixture
def lenient(monkeypatch):
    """Findings are collected, not raised."""
    torch.manual_seed(0)
    monkeypatch.setattr(EmulatedDriver.settings, "strict", False)
    EmulatedDriver.settings.findings.clear()
    yield
    EmulatedDriver.settings.findings.clear()


def finding_kinds():
    return {(f.kind, f.kernel) for f in EmulatedDriver.settings.findings}


def logps_of(logits, ids, temperature=TEMPERATURE):
    return (logits[:, :-1] / temperature).log_softmax(-1).gather(2, ids[..., None])[..., 0]


def batch():
    """Logits, ids, mask, old and reference log-probs, advantages of both signs."""
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(B, T + 1, V, generator=g)
    ids = torch.randint(V, (B, T), generator=g)
    mask = torch.arange(T) < torch.tensor([[T], [5], [9], [1]])
    logits[:, :-1].scatter_add_(2, ids[..., None], torch.full((B, T, 1), 5.0))
    true = logps_of(logits.double(), ids)
    old, ref = ((true + s * torch.randn(B, T, generator=g)).float() for s in (0.3, 0.5))
    return logits, ids, mask, old, ref, torch.tensor([1.3, -0.7, 0.4, -2.0])


def compare(theirs, plain, *operands, known=(), tolerance=2e-6):
    """Values and gradients of a function of theirs against float64; returns theirs."""
    leaves = [x.clone().requires_grad_() for x in operands]
    exact = [x.double().requires_grad_() for x in operands]
    out, expected = theirs(*leaves), plain(*exact)
    tolerance *= 10 if EmulatedDriver.settings.error else 1  # of `--ptx-error`
    d = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    grads = torch.autograd.grad(out, leaves, d)
    truth = (expected, *torch.autograd.grad(expected, exact, d.double()))
    for result, true in zip((out, *grads), truth, strict=True):
        assert true.norm() > 0 and relative_error(result.detach(), true.detach()) <= tolerance
    assert finding_kinds() == set(known), EmulatedDriver.settings.findings
    return (out.detach(), *grads)

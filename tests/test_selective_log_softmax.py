"""`selective_log_softmax` against float64, on both backends."""

import pytest
import torch

from grpo_kernels import reference, selective_log_softmax
from tests.helpers.batches import relative_error
from tests.helpers.head_options import BACKENDS
from tests.helpers.tiers import INTERPRETED


def logits_like_a_model(shape, V, offset=0.0):
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(*shape, V, generator=g) + offset
    targets = torch.randint(0, V, shape, generator=g)
    certain = torch.full((*shape, 1), 9.0)
    return logits.scatter_add(-1, targets[..., None], certain), targets


def run(call, logits, targets, **options):
    leaf = logits.detach().clone().requires_grad_()
    logps = call(leaf, targets, **options)
    g = torch.Generator().manual_seed(2)
    (logps * torch.randn(logps.shape, generator=g).to(logps.device)).sum().backward()
    assert torch.equal(leaf, logits)
    return logps.detach(), leaf.grad


def expect_equal(logits, targets, tolerance, backend, *, temperature=1.0):
    exact = temperature.double() if isinstance(temperature, torch.Tensor) else temperature
    args = logits.double(), targets
    expected = run(reference.selective_log_softmax, *args, temperature=exact)
    options = {"backend": backend, "temperature": temperature}
    logps, grad = run(selective_log_softmax, logits, targets, **options)
    assert logps.dtype == torch.float32 and grad.dtype == logits.dtype
    assert (logps.double() - expected[0]).abs().max() <= 1e-4
    assert relative_error(grad, expected[1]) <= tolerance


def allowed_at_random():
    """Logits of which top-k or a grammar bans most, and all from 5000 on."""
    logits, targets = logits_like_a_model((4,), 6000)
    allowed, targets = torch.rand(4, 6000) < 0.01, targets.clamp(max=4999)
    allowed[:, 5000:] = False
    allowed.scatter_(1, targets[:, None], True)
    return logits.masked_fill(~allowed, -float("inf")), targets


LOGITS, TARGETS = logits_like_a_model((2, 7), 300)
CASES = {
    **{f"{V} ids": (*logits_like_a_model((2, 3), V), 2e-5) for V in (1, 2, 1003, 9000)},
    # All-negative logits would underflow from a maximum started at 0.
    "151,936 logits around -300": (*logits_like_a_model((3,), 151_936, -300.0), 2e-4),
    "minus infinity": (*allowed_at_random(), 2e-5),
    "vocabulary first": (LOGITS.movedim(-1, 0).contiguous().movedim(0, -1), TARGETS, 2e-5),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, backend):
    expect_equal(*CASES[case], backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ("scalar", "per_token", "zero_dim"))
def test_temperature(kind, backend):
    kinds = {"scalar": 0.6, "per_token": 0.5 + torch.rand(2, 5), "zero_dim": torch.tensor(1.7)}
    expect_equal(*logits_like_a_model((2, 5), 501), 2e-5, backend, temperature=kinds[kind])


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_half_precision(dtype):
    logits, targets = logits_like_a_model((2, 5), 1003)
    garbled = INTERPRETED and dtype == torch.bfloat16
    for backend in ("torch",) if garbled else BACKENDS:
        expect_equal(logits.to(dtype), targets, 2.5e-3, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("V", (2, 1003, 32_000, 151_936))
def test_cuda(V, backend, dtype):
    logits, targets = logits_like_a_model((3, 50), V)
    tolerance = 2e-4 if dtype == torch.float32 else 2.5e-3
    expect_equal(logits.to("cuda", dtype), targets.cuda(), tolerance, backend)

"""One sweep and two with GEMMs in half precision, as a GPU has them, imitated on a CPU."""

import math

import pytest
import torch

from benchmarks.workloads import make
from grpo_kernels.backends import torch_backend
from tests.helpers.batches import config, make_batch, relative_error
from tests.helpers.flat_calls import fused_grpo_loss, reference
from tests.helpers.half_gemms import imitate
from tests.helpers.head_options import OPTIONS, TOLERANCE, expect_equal


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("option", OPTIONS)
def test_half_precision_products(option, dtype, monkeypatch):
    """As a GPU works: two buffers, logits in strips of 5 rows, gradients of up to 50."""
    imitate(monkeypatch, dtype)
    config_options, options = OPTIONS[option]
    options = {**options, "config": config(**config_options), "chunk_bytes": 24 * 1003 * 5}
    batch = make_batch(B=8, T=16).to("cpu", dtype)
    # So few tokens that the roundings of E, of r h and of the result do not average out.
    tolerance = 5e-3 if dtype == torch.bfloat16 else TOLERANCE[dtype]
    expect_equal(batch, {**options, "scale": 4.0}, tolerance=tolerance)


@pytest.mark.parametrize("anchor", (0.0, -40.0))
def test_errors_of_half_precision_products(anchor, monkeypatch):
    """On realistic samples: the limits that the design states, wherever the anchor lies."""
    w = make("dense", (1024, 8009, 256)).to(torch.bfloat16)
    exact = [x.double().requires_grad_() for x in (w.hidden, w.weight)]
    rest = (w.targets, w.advantages)
    reference.fused_grpo_loss(*exact, *rest, old_logps=w.old_logps.double()).loss.backward()
    sweep = torch_backend.token_stats

    def anchored_below(*args, exps=None, **options):
        """As a sweep whose anchor lies elsewhere would leave it."""
        stats = sweep(*args, exps=(wide := torch.empty(exps.shape)), **options)
        stats.total.mul_(math.exp(-anchor))
        exps.copy_(wide * math.exp(-anchor))
        return stats

    imitate(monkeypatch, torch.bfloat16)
    monkeypatch.setattr(torch_backend, "token_stats", anchored_below)
    head = [x.clone().requires_grad_() for x in (w.hidden, w.weight)]
    out = fused_grpo_loss(*head, *rest, old_logps=w.old_logps)
    out.loss.backward()
    for name, mine, truth in zip(("hidden", "weight"), head, exact, strict=True):
        error = relative_error(mine.grad.double(), truth.grad)
        print(f"d_{name} error: {error:.2e}")
        assert 1e-3 < error <= 3e-3, name

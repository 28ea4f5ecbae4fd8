"""Where sampling is predicted to pay, and what becomes of a call where it is not."""

import pytest
import torch

from grpo_kernels import fused_grpo_loss, linear_logprobs, sampling_cost
from tests.support.batches import config, make_batch

V = 151_936


def test_blocks_on_a_cpu_break_even_where_measured():
    assert sampling_cost.dense_share("cpu") == pytest.approx(1 / 3, rel=0.02)
    assert 0.05 < sampling_cost.dense_share("cuda") < 0.15


def test_a_cpu_leaves_it_to_the_blocks():
    assert sampling_cost.pays("cpu", 16, 100, 8, 1e-3)


@pytest.mark.parametrize("H", (896, 1536, 3584, 5120))
def test_on_a_gpu(H):
    """Never at the default tolerance; at a larger one where there are tokens enough."""
    assert not any(sampling_cost.pays("cuda", N, V, H, 5e-3) for N in (2048, 16_384, 65_536))
    assert sampling_cost.pays("cuda", 65_536, V, H, 5e-2)
    assert not sampling_cost.pays("cuda", 512, V, H, 5e-2)


def test_more_noise_and_more_tokens_never_lose():
    pays = [sampling_cost.pays("cuda", 16_384, V, 3584, t) for t in (1e-3, 5e-3, 1e-2, 5e-2, 0.2)]
    assert pays == sorted(pays) and pays[-1] and not pays[0]
    pays = [sampling_cost.pays("cuda", 2**n, V, 3584, 2e-2) for n in range(6, 18)]
    assert pays == sorted(pays) and pays[-1] and not pays[0]


@pytest.mark.parametrize("loss_type", ("dapo", "gspo"))
def test_a_call_that_would_lose_is_exact_and_says_so(loss_type, monkeypatch):
    monkeypatch.setattr(sampling_cost, "pays", lambda *_: False)
    batch = make_batch()
    results = []
    for options in ({}, {"backward": "sampled", "tolerance": 0.3, "seed": 0}):
        hidden, weight = (x.clone().requires_grad_() for x in (batch.hidden, batch.weight))
        out = fused_grpo_loss(
            hidden, weight, batch.targets, batch.advantages, batch.mask,
            config=config(loss_type=loss_type), **options,
        )  # fmt: skip
        out.loss.backward()
        logps = linear_logprobs(hidden, weight, batch.targets, mask=batch.mask, **options).logps
        logps.sum().backward()
        results.append((out, hidden.grad, weight.grad))
    (exact, *expected), (sampled, *actual) = results
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    told = {name: float(sampled.metrics[name]) for name in sampled.metrics.keys() - exact.metrics}
    assert told == {"columns_kept": 1.0, "dense_blocks": 1.0, "gradient_noise": 0.0}
    with torch.no_grad():
        out = fused_grpo_loss(
            batch.hidden, batch.weight, batch.targets, batch.advantages, batch.mask,
            backward="sampled",
        )  # fmt: skip
    assert "columns_kept" not in out.metrics

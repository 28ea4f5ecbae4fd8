"""Weights of another sampler's tokens, and advantages, equal those of TRL's own lines.

Its losses and metrics are in `test_trl.py`, Liger's in `test_liger.py`.
"""

import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels import group_advantages, grpo_loss
from tests.helpers.batches import clean, config, make_batch

pytest.importorskip("trl", reason="needs the extra 'test'")
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer


def trl_lines(begin, end, trainer, **names):
    """Runs lines of TRL's generation step, which make inputs of the loss, on names."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start = source.rindex("\n", 0, source.index(begin)) + 1
    stop = source.rindex("\n", 0, source.index(end, start))
    scope = {**vars(grpo_trainer), "self": SimpleNamespace(**trainer), **names}
    exec(textwrap.dedent(source[start:stop]), scope)
    return scope


@pytest.mark.parametrize(
    ("mode", "low", "high"),
    (
        ("token_truncate", 0.8, 1.1),
        ("token_mask", None, 1.1),
        ("sequence_truncate", None, 1.2),
        ("sequence_mask", 0.9, 3.0),
    ),
)
def test_weights_of_another_sampler(mode, low, high):
    batch, g = make_batch(B=16, T=13, seed=5), torch.Generator().manual_seed(5)
    # Whole sequences have moved, too.
    noise = 0.3 * torch.randn(16, 13, generator=g) + 0.25 * torch.randn(16, 1, generator=g)
    old, sampling = (clean(x, batch.mask) for x in (batch.old_logps, batch.sampling_logps + noise))
    names = {"mode": mode, "clip_min": low, "clip_max": high}
    theirs = trl_lines(
        "per_token_logps_diff = ", "# Compute the per-token log probabilities for the ref",
        {f"vllm_importance_sampling_{name}": x for name, x in names.items()},
        old_per_token_logps=old, sampling_per_token_logps=sampling, mask=batch.mask,
    )["vllm_importance_sampling_ratio"]  # fmt: skip
    # A gradient of -log p is the weight.
    logps = old.float().requires_grad_()
    cfg = config(loss_type="reinforce", is_correction=mode, is_clip_min=low, is_clip_max=high)
    kwargs = {"old_logps": old.float(), "sampling_logps": sampling.float(), "config": cfg}
    grpo_loss(logps, torch.ones(16), batch.mask, **kwargs).loss.backward()
    ours, theirs = -logps.grad * batch.mask.sum(), theirs.expand(batch.mask.shape) * batch.mask
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    assert len(theirs.unique()) > 2


@pytest.mark.parametrize("missing", (False, True))
@pytest.mark.parametrize("group_size", (1, 2, 4))
@pytest.mark.parametrize("scale", ("group", "batch", "none", "normalize_then_sum"))
def test_trl_advantages(scale, group_size, missing):
    g = torch.Generator().manual_seed(group_size)
    rewards = torch.rand(16, 3, generator=g, dtype=torch.float64)
    rewards[8:12] = 0.5  # a group of equal rewards, but for group_size 1
    if missing:
        rewards[torch.rand(16, 3, generator=g) < 0.3] = float("nan")
        rewards[2] = float("nan")
    weights, aggregation = [1.0, 0.5, 2.0], "sum_then_normalize"
    if scale == "normalize_then_sum":
        scale, aggregation = "group", scale
    theirs = trl_lines(
        "unscorable_mask = ", "# Slice to keep only the local part",
        {"multi_objective_aggregation": aggregation, "scale_rewards": scale,
         "reward_weights": torch.tensor(weights, dtype=rewards.dtype), "reward_funcs": weights},
        rewards_per_func=rewards, device="cpu", num_generations=group_size,
    )["advantages"]  # fmt: skip
    ours = group_advantages(
        rewards, group_size, scale=scale, weights=weights, aggregation=aggregation
    )
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-6)
    assert group_size == 1 or ours.abs().sum() > 1

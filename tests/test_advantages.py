"""`group_advantages` against statistics by hand; `per_token_kl` for the reward."""

import math
from statistics import fmean, stdev

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from grpo_kernels import group_advantages, per_token_kl, reference
from grpo_kernels.loss.advantages import SCALES
from grpo_kernels.loss.config import KL_ESTIMATORS, GRPOLossConfig
from tests.helpers.fake_cuda import EmulatedMPS

NAN = float("nan")


def spread(values):
    return stdev(values) if len(values) > 1 else NAN


def by_hand(rewards, ids, scale, weights, aggregation):
    """Lists of rows of R rewards in, a list of advantages out."""
    weights = weights or [1.0] * len(rewards[0])
    scorable = [any(not math.isnan(x) for x in row) for row in rewards]

    def total(row):
        return sum(w * x for w, x in zip(weights, row, strict=True) if not math.isnan(x))

    def normalised(i, k):
        column = [r[k] for r, g in zip(rewards, ids, strict=True) if g == ids[i]]
        column = [x for x in column if not math.isnan(x)]
        if len(column) < 2 or math.isnan(rewards[i][k]):
            return NAN
        return (rewards[i][k] - fmean(column)) / (spread(column) + 1e-4)

    if aggregation == "normalize_then_sum":
        rewards = [[normalised(i, k) for k in range(len(weights))] for i in range(len(rewards))]
    totals = [total(row) for row in rewards]
    every = [t for t, ok in zip(totals, scorable, strict=True) if ok]
    result = []
    for i, ok in enumerate(scorable):
        peers = [totals[j] for j, g in enumerate(ids) if g == ids[i] and scorable[j]]
        if aggregation == "normalize_then_sum":
            usable, ahead, divisor = len(every) > 1, totals[i] - fmean(every or [0]), spread(every)
        else:
            usable = len(peers) > 1 and min(peers) != max(peers)
            ahead = totals[i] - fmean(peers or [0])
            divisor = {"group": spread(peers), "batch": spread(every), "none": 1 - 1e-4}[scale]
        result.append(ahead / (divisor + 1e-4) if ok and usable else 0.0)
    return result


rewards = st.sampled_from((0.0, 0.1, 0.5, 1.0, 2.0, -1.0, NAN))
several = st.lists(st.tuples(st.integers(0, 3), rewards, rewards), min_size=1, max_size=14)
WAYS = [("sum_then_normalize", scale) for scale in SCALES] + [("normalize_then_sum", "group")]


@pytest.mark.parametrize(("aggregation", "scale"), WAYS)
@given(rows=several, weights=st.sampled_from((None, [0.3, 2.0])))
def test_groups_of_any_size_in_any_order(aggregation, scale, rows, weights):
    """A function that did not apply to a completion, or to a group, has NaN."""
    ids, *columns = zip(*rows, strict=True)
    values = [list(row) for row in zip(*columns, strict=True)]
    options = {"scale": scale, "weights": weights, "aggregation": aggregation}
    expected = by_hand(values, ids, **options)
    actual = group_advantages(torch.tensor(values), torch.tensor(ids), **options)
    assert actual.dtype == torch.float32
    # Where the expected value is rounding error divided by 1e-4, the result is exactly 0.
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reward", (1 / 3, 1e6))
def test_equal_rewards_are_exactly_zero(reward):
    """Also of several functions, one of which did not apply to the group."""
    rewards = torch.tensor([reward] * 7 + [1.0, 2.0, 0.0, 5.0, 0.3, 0.7, 1.1])
    other = torch.cat([torch.full((7,), NAN), torch.rand(7)])
    several = torch.stack([rewards, other], 1), {"aggregation": "normalize_then_sum"}
    for some, options in (several, *((rewards, {"scale": scale}) for scale in SCALES)):
        advantages = group_advantages(some, 7, **options)
        assert (advantages[:7] == 0).all() and (advantages[7:] != 0).all(), options


@pytest.mark.parametrize("clamp", (None, 0.5))
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_per_token_kl_is_the_kl_of_the_loss(estimator, clamp):
    g = torch.Generator().manual_seed(0)
    logps, ref = torch.randn(2, 4, 6, generator=g, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=g) < 0.7
    ref = ref.masked_fill(~mask, NAN)
    kl = per_token_kl(logps, ref, mask, estimator=estimator, clamp=clamp)
    cfg = GRPOLossConfig(
        beta=1.0, kl_estimator=estimator, kl_clamp=clamp, use_bias_correction_kl=False
    )
    loss = reference.grpo_loss(logps, torch.zeros(4), mask, ref_logps=ref, config=cfg).loss
    assert (kl[~mask] == 0).all()
    torch.testing.assert_close(kl.sum() / mask.sum(), loss)
    assert loss != 0


def test_a_gpu_without_float64_takes_float32(real_memory):
    rewards = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    with EmulatedMPS():
        advantages = group_advantages(rewards.to("mps"), 4)
        assert advantages.device.type == "mps"
        there = advantages.cpu()
    assert (there - group_advantages(rewards, 4)).abs().max() < 1e-5 < there.abs().max()

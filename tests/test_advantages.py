"""`group_advantages` against statistics by hand; `per_token_kl` for the reward."""

import math
from statistics import fmean, stdev

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from grpo_kernels import group_advantages, per_token_kl, reference
from grpo_kernels.loss.config import KL_ESTIMATORS, GRPOLossConfig

NAN = float("nan")


def spread(values):
    return stdev(values) if len(values) > 1 else NAN


def by_hand(
    rewards, ids, scale="group", weights=None, aggregation="sum_then_normalize", baseline="mean",
    lengths=None,
):  # fmt: skip
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
        every = [x for x, ok in zip(totals, scorable, strict=True) if ok]
        return [
            (x - fmean(every)) / (spread(every) + 1e-4) if ok and len(every) > 1 else 0.0
            for x, ok in zip(totals, scorable, strict=True)
        ]
    totals = [total(row) for row in rewards]
    result = []
    for i, ok in enumerate(scorable):
        peers = [t for t, g, s in zip(totals, ids, scorable, strict=True) if s and g == ids[i]]
        every = [t for t, s in zip(totals, scorable, strict=True) if s]
        if not ok or len(peers) < 2 or min(peers) == max(peers):
            result.append(0.0)
            continue
        divisor = {"group": spread(peers) + 1e-4, "batch": spread(every) + 1e-4, "none": 1.0,
                   "mean": fmean(peers) + 1e-4}  # fmt: skip
        ahead = totals[i] - fmean(peers)
        if baseline == "length":
            of = [(n, t) for n, t, g, s in zip(lengths, totals, ids, scorable, strict=True)
                  if s and g == ids[i]]  # fmt: skip
            ahead = totals[i] - sum(n * t for n, t in of) / sum(n for n, _ in of)
        if baseline == "runner_up":
            best, second = sorted(peers)[:-3:-1]
            ahead = best - second if totals[i] == best else 0.0
        result.append(ahead / divisor[scale])
    return result


@pytest.mark.parametrize("scale", ("group", "batch", "none", "mean"))
@pytest.mark.parametrize("baseline", ("mean", "length", "runner_up"))
def test_baselines(baseline, scale):
    g = torch.Generator().manual_seed(2)
    rewards = torch.randint(0, 3, (24, 2), generator=g).double()
    rewards[5], rewards[7, 0] = NAN, NAN
    ids, lengths = torch.randint(0, 5, (24,), generator=g), torch.randint(1, 90, (24,), generator=g)
    options = {"scale": scale, "baseline": baseline}
    if baseline == "length":
        options["lengths"] = lengths
    actual = group_advantages(rewards, ids, **options)
    given = options | ({"lengths": lengths.tolist()} if baseline == "length" else {})
    assert actual.tolist() == pytest.approx(
        by_hand(rewards.tolist(), ids.tolist(), **given), abs=1e-5
    )
    assert actual.abs().max() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"baseline": "median"}, "baseline: expected one of mean, length, runner_up; got"),
        ({"baseline": "length"}, r"lengths: expected \[B\] numbers with baseline='length'"),
        ({"lengths": torch.ones(4)}, "lengths: expected None with baseline='mean'; got a tensor"),
        ({"baseline": "length", "lengths": torch.ones(3)}, r"lengths: expected shape"),
        ({"baseline": "runner_up", "aggregation": "normalize_then_sum"},
         "baseline: expected 'mean', as aggregation"),
    ),
)  # fmt: skip
def test_wrong_baselines_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.rand(4), 4, **options)


@pytest.mark.parametrize("aggregation", ("sum_then_normalize", "normalize_then_sum"))
@pytest.mark.parametrize("scale", ("group", "batch", "none"))
@pytest.mark.parametrize("weights", (None, [0.3, 2.0, 1.0]))
def test_several_reward_functions(scale, weights, aggregation):
    if aggregation == "normalize_then_sum" and scale != "group":
        pytest.skip("refused")
    rewards = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rewards[0, 1] = rewards[5, 0] = NAN  # two that did not apply
    rewards[7] = NAN  # nothing applied
    rewards[8:12, 2] = NAN  # a function for some groups only
    ids = [i // 4 for i in range(12)]
    expected = by_hand(rewards.tolist(), ids, scale, weights, aggregation)
    actual = group_advantages(rewards, 4, scale=scale, weights=weights, aggregation=aggregation)
    assert actual.dtype == torch.float32 and actual[7] == 0
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert actual.abs().sum() > 1


@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from((0.0, 0.1, 0.5, 1.0, 2.0, NAN)),
            st.sampled_from((0.0, 0.3, -1.0, NAN)),
        ),
        min_size=1,
        max_size=14,
    ),
    scale=st.sampled_from(("group", "batch", "none")),
    aggregation=st.sampled_from(("sum_then_normalize", "normalize_then_sum")),
)
def test_groups_of_any_size_in_any_order(rows, scale, aggregation):
    scale = "group" if aggregation == "normalize_then_sum" else scale
    ids, rewards = [r[0] for r in rows], [list(r[1:]) for r in rows]
    expected = by_hand(rewards, ids, scale, None, aggregation)
    actual = group_advantages(
        torch.tensor(rewards), torch.tensor(ids), scale=scale, aggregation=aggregation
    )
    # What by hand is rounding over 1e-4 is exactly 0 here.
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", ("group", "batch", "none"))
@pytest.mark.parametrize("reward", (0.1, 1 / 3, 1e6, 0.0))
def test_equal_rewards_are_exactly_zero(reward, scale):
    rewards = torch.tensor([reward] * 7 + [1.0, 2.0, 0.0, 5.0, 0.3, 0.7, 1.1])
    advantages = group_advantages(rewards, 7, scale=scale)
    assert (advantages[:7] == 0).all() and (advantages[7:] != 0).all()
    one = group_advantages(rewards[:, None].expand(14, 2), 7, aggregation="normalize_then_sum")
    assert (one[:7] == 0).all() and (one[7:] != 0).all()
    # Also where another function did not apply to the group.
    two = torch.stack([rewards, torch.cat([torch.full((7,), NAN), torch.rand(7)])], 1)
    one = group_advantages(two, 7, aggregation="normalize_then_sum")
    assert (one[:7] == 0).all() and (one[7:] != 0).all()


def test_group_of_one_and_batch_of_one():
    assert group_advantages(torch.tensor([3.0, 5.0, 1.0]), 1).tolist() == [0, 0, 0]
    for scale in ("group", "batch", "none"):
        assert group_advantages(torch.tensor([3.0]), 1, scale=scale).tolist() == [0]
    three = group_advantages(torch.tensor([3.0, 5.0, 9.0]), torch.tensor([7, -2, 7]))
    assert three[1] == 0 and three[0] == -three[2] != 0


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    (
        (([1.0], 1), {}, TypeError, "rewards: expected a tensor; got list"),
        ((torch.zeros(2, 2, 2), 1), {}, ValueError, r"rewards: expected shape \[B\] or \[B, R\]"),
        ((torch.zeros(7), 3), {}, ValueError, "groups: expected a divisor of .*, 7; got 3"),
        ((torch.zeros(7), 0), {}, ValueError, "groups: expected a divisor"),
        ((torch.zeros(7), 7.0), {}, TypeError, "groups: expected the size of a group.*got float"),
        ((torch.zeros(7), torch.zeros(6, dtype=int)), {}, ValueError, r"groups: .* \[7\]; got \[6"),
        ((torch.zeros(7), torch.zeros(7)), {}, TypeError, "groups: expected dtype int64.*float32"),
        ((torch.zeros(4), 2), {"scale": "std"}, ValueError, "scale: expected one of group, batch"),
        ((torch.zeros(4), 2), {"weights": [1.0, 2.0]}, ValueError, "weights: expected one for eac"),
        ((torch.zeros(4), 2), {"weights": [NAN]}, ValueError, "weights: expected finite"),
        ((torch.zeros(4), 2), {"eps": 0.0}, ValueError, "eps: expected a number > 0; got 0.0"),
        (
            (torch.zeros(4), 2),
            {"aggregation": "normalize_then_sum", "scale": "none"},
            ValueError,
            "scale: expected 'group', as aggregation='normalize_then_sum'",
        ),
    ),
)  # fmt: skip
def test_refuses(args, options, error, message):
    with pytest.raises(error, match=message):
        group_advantages(*args, **options)


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


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"estimator": "k4"}, "estimator: expected one of k1, abs"),
        ({"clamp": -1.0}, "clamp: expected a number > 0; got -1.0"),
        ({"mask": torch.ones(3)}, r"mask: expected shape \[2\]; got \[3\]"),
    ),
)
def test_per_token_kl_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        per_token_kl(torch.zeros(2), torch.zeros(2), **options)

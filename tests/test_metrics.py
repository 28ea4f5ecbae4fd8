"""Metrics by hand; against TRL's they are in test_peers, between the calls everywhere."""

import math

import pytest
import torch

from grpo_kernels import grpo_loss
from tests.helpers.batches import OBJECTIVES, config, make_batch, run_fused


def metrics_of(logps, advantages, mask=None, **kwargs):
    tensors = {k: torch.tensor(kwargs.pop(k)) for k in [*kwargs]
             if k.endswith("logps") or k == "entropy"}  # fmt: skip
    logps = torch.tensor(logps, requires_grad=True)
    mask = None if mask is None else torch.tensor(mask)
    out = grpo_loss(logps, torch.tensor(advantages), mask, config=config(**kwargs), **tensors)
    return {k: v.item() for k, v in out.metrics.items()}


def test_clip_ratios():
    m = metrics_of(
        [[0.5, -0.5, 0.5, -0.5, 0.0, 9.0], [0.5, 0.5, 0.0, 0.0, 9.0, 9.0]],
        [[1.0, 1.0, -1.0, -1.0, 1.0, 1.0], [1.0] * 6],
        [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]],
        old_logps=[[0.0] * 6] * 2,
    )
    assert m["clip_high"] == m["clip_ratio/high_mean"] == pytest.approx(3 / 9)
    assert m["clip_low"] == m["clip_ratio/low_mean"] == pytest.approx(1 / 9)
    assert m["clip_ratio/region_mean"] == pytest.approx(4 / 9)
    assert m["clip_ratio/high_max"] == pytest.approx(2 / 4)
    assert m["clip_ratio/low_min"] == 0
    assert m["ratio_max"] == pytest.approx(math.exp(0.5)) and m["tokens"] == 9


@pytest.mark.parametrize(
    ("options", "names"),
    (
        ({"loss_type": "gspo"}, ("clip_high", "clip_ratio/high_mean", "clip_ratio/region_mean")),
        ({"loss_type": "cispo", "epsilon_high": 1.1, "importance_sampling_level": "sequence"},
         ("clip_high", "cispo_clip_ratio")),
    ),
    ids=("gspo", "cispo"),
)  # fmt: skip
def test_a_sequence_counts_once_where_it_has_one_ratio(options, names):
    """However long it is: one of three tokens is cut off, one of one token is not."""
    m = metrics_of(
        [[0.5, 0.5, 0.5], [0.0, 9.0, 9.0]], [1.0, 1.0], [[1, 1, 1], [1, 0, 0]],
        old_logps=[[0.0] * 3] * 2, **options,
    )  # fmt: skip
    for name in names:
        assert m[name] == pytest.approx(1 / 2), name
    assert m["ratio_mean"] == pytest.approx((3 * math.exp(0.5) + 1) / 4)


def test_spikes_have_a_cause():
    logps, old = [[0.0, 0.0, 3.0, 0.0]], [[0.0] * 4]
    m = metrics_of(
        logps, [1.0], old_logps=old, ref_logps=[[0.0, 5.0, 3.0, 0.0]], use_bias_correction_kl=False
    )
    r = math.exp(3)
    assert m["ratio_max"] == pytest.approx(r)
    assert m["ess"] == pytest.approx((3 + r) ** 2 / (4 * (3 + r * r)))
    assert m["kl_max"] == pytest.approx(math.exp(5) - 6)
    assert m["kl"] == pytest.approx((math.exp(5) - 6) / 4)
    assert m["zero_gradient"] == 0.25  # the clipped token


@pytest.mark.parametrize("shift", (60.0, -60.0))
def test_effective_sample_size_of_any_ratio(shift):
    """Neither overflows nor underflows."""
    m = metrics_of([[shift, shift + 1.0]], [1.0], old_logps=[[0.0, 0.0]])
    e = math.e
    assert m["ess"] == pytest.approx((1 + e) ** 2 / (2 * (1 + e * e)), rel=1e-5)


def test_zero_gradient_counts_what_trains():
    advantages = [1.0, 0.0]
    assert metrics_of([[0.0, 0.0], [0.0, 0.0]], advantages)["zero_gradient"] == 0.5
    m = metrics_of([[0.0] * 2] * 2, advantages, entropy=[[1.0] * 2] * 2, entropy_coef=0.1)
    assert m["zero_gradient"] == 0  # the entropy's
    with torch.no_grad():
        assert "zero_gradient" not in grpo_loss(torch.zeros(2, 2), torch.ones(2)).metrics


def metrics_of_sampler(**kwargs):
    """Two sequences of three tokens and of one; one token the sampler did not score."""
    return metrics_of(
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [1.0, 1.0], [[1, 1, 1], [1, 0, 0]],
        old_logps=[[0.0, 0.0, 0.0], [-1.0, 7.0, 7.0]],
        sampling_logps=[[0.1, -0.3, math.nan], [0.0, 7.0, 7.0]],
        **kwargs,
    )  # fmt: skip


def test_sampler():
    m = metrics_of_sampler(is_correction="token_truncate", is_clip_max=1.2)
    name = "sampling/sampling_logp_difference"
    assert m[f"{name}/mean"] == pytest.approx((0.1 + 0.3 + 1.0) / 3)
    assert m[f"{name}/max"] == pytest.approx(1.0)
    name = "sampling/importance_sampling_ratio"
    actual = [m[f"{name}/{part}"] for part in ("mean", "min", "max")]
    weights = [math.exp(-0.1), 1.2, 1.0, math.exp(-1)]
    assert actual == pytest.approx([sum(weights) / 4, weights[3], 1.2])
    # A sequence counts once, however long it is.
    m = metrics_of_sampler(is_correction="sequence_mask", is_clip_min=0.5)
    actual = [m[f"{name}/{part}"] for part in ("mean", "min", "max")]
    assert actual == pytest.approx([math.exp(0.2) / 2, 0, math.exp(0.2)])


def test_masks_are_counted():
    options = {"old_logps": [[0.0, 0.0], [0.0, 0.0]], "sampling_logps": [[0.0] * 2, [0.5] * 2]}
    m = metrics_of([[0.0] * 2] * 2, [-1.0, -1.0], off_policy_threshold=0.2, **options)
    assert m["off_policy_dropped"] == 0.5
    m = metrics_of([[0.0] * 2] * 2, [1.0, 1.0], entropy=[[1.0, 2.0], [3.0, 4.0]],
                   top_entropy_quantile=0.25)  # fmt: skip
    assert m["entropy_kept"] == 0.25


def test_absent_where_it_does_not_apply():
    out = grpo_loss(torch.zeros(2, 3), torch.ones(2))
    absent = {"kl", "kl_max", "entropy", "zero_gradient", "off_policy_dropped", "entropy_kept"}
    assert not absent & set(out.metrics)
    m = metrics_of([[0.0]], [1.0], loss_type="reinforce")
    assert m["clip_low"] == m["clip_high"] == 0 and not any("clip_ratio" in name for name in m)
    m = metrics_of([[1.0]], [1.0], loss_type="cispo", epsilon_high=2.0, old_logps=[[0.0]])
    assert m["cispo_clip_ratio"] == m["clip_high"] == 1 and m["clip_low"] == 0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nothing_counted_is_zero_not_nan(objective):
    options, names = OBJECTIVES[objective]
    batch = make_batch()
    batch.mask = torch.zeros_like(batch.mask)
    out = run_fused(batch, exact=False, config=config(**options), **dict.fromkeys(names, True))
    assert out.loss == 0
    assert all(v.isfinite() for v in out.metrics.values())
    assert all(v.ndim == 0 and v.dtype == torch.float32 for v in out.metrics.values())

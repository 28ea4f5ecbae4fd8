"""The objective against its formulas written out token by token in plain Python."""

import math

import pytest
import torch
from batches import config, make_batch, packed

from grpo_kernels import GRPOLossConfig, grpo_loss, reference


def by_hand(cfg, logps, old, ref, advantages, mask, entropy, num_items):
    """Nested loops over padded lists; the loss and the metrics, with nothing from the library."""
    rows = []
    for i, row in enumerate(mask):
        terms = []
        for t, m in enumerate(row):
            if not m:
                continue
            A = advantages[i]
            r = math.exp(logps[i][t] - old[i][t])
            high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
            first = (min(r, cfg.delta) if cfg.delta is not None else r) * A
            second = min(max(r, 1 - cfg.epsilon), 1 + high) * A
            d = ref[i][t] - logps[i][t]
            kl = math.exp(d) - d - 1
            terms.append((-min(first, second) + cfg.beta * kl, r, kl, entropy[i][t]))
        rows.append(terms)
    B, count = len(rows), sum(len(row) for row in rows)
    if cfg.loss_type == "grpo":
        loss = sum(sum(x for x, *_ in row) / max(len(row), 1) for row in rows) / B
    else:
        denominator = {
            "bnpo": max(count, 1),
            "dr_grpo": B * (cfg.max_completion_length or 0),
            "dapo": max(num_items if num_items is not None else count, 1),
        }[cfg.loss_type]
        loss = sum(x for row in rows for x, *_ in row) / denominator
    flat = [terms for row in rows for terms in row]
    mean = {
        k: sum(f[j] for f in flat) / count
        for j, k in ((1, "ratio_mean"), (2, "kl"), (3, "entropy"))
    }
    loss -= cfg.entropy_coef * mean["entropy"]
    return loss, {**mean, "ratio_max": max(f[1] for f in flat), "tokens": count}


@pytest.mark.parametrize("num_items", (None, 31))
@pytest.mark.parametrize(
    "options",
    (
        {},
        {"beta": 0.1},
        {"epsilon": 0.05, "epsilon_high": 0.4},
        {"delta": 1.3, "epsilon": 0.6},
        {"entropy_coef": 0.1, "beta": 0.02},
    ),
    ids=str,
)
@pytest.mark.parametrize("loss_type", ("grpo", "bnpo", "dr_grpo", "dapo"))
def test_by_hand(loss_type, options, num_items):
    if num_items and loss_type != "dapo":
        pytest.skip("num_items belongs to dapo")
    cfg = config(loss_type=loss_type, **options)
    batch = make_batch(B=5, T=12, seed=3)
    logps = (batch.old_logps + 0.2 * torch.randn(5, 12)).double()
    entropy = torch.rand(5, 12).double()
    columns = [x.double().tolist() for x in (logps, batch.old_logps, batch.ref_logps)]
    expected, metrics = by_hand(
        cfg, *columns, batch.advantages.double().tolist(), batch.mask.tolist(), entropy.tolist(),
        num_items,
    )  # fmt: skip
    kwargs = {
        "old_logps": batch.old_logps,
        "ref_logps": batch.ref_logps,
        "entropy": entropy,
        "config": cfg,
        "num_items": num_items,
    }
    out = reference.grpo_loss(logps, batch.advantages, batch.mask, **kwargs)
    assert out.loss.item() == pytest.approx(expected, rel=1e-9)
    for name, value in metrics.items():
        assert out.metrics[name].item() == pytest.approx(value, rel=1e-9), name


def test_clip_metrics_count_only_where_the_clip_bites():
    logps = torch.tensor([[0.5, -0.5, 0.5, -0.5, 0.0, 9.0]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    out = grpo_loss(logps, advantages, mask, old_logps=torch.zeros(1, 6))
    assert out.metrics["clip_high"].item() == pytest.approx(1 / 5)
    assert out.metrics["clip_low"].item() == pytest.approx(1 / 5)
    assert out.metrics["ratio_max"].item() == pytest.approx(math.exp(0.5))
    assert out.metrics["tokens"].item() == 5


def test_metrics_that_were_not_computed_are_absent():
    out = grpo_loss(torch.zeros(2, 3), torch.ones(2))
    assert set(out.metrics) == {"ratio_mean", "ratio_max", "clip_low", "clip_high", "tokens"}


def test_packed_weights_equal_padded():
    padded, flat = make_batch(), packed(make_batch())
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        cfg = config(loss_type=loss_type)
        a, b = (
            grpo_loss(
                x.old_logps * 0.9, x.advantages, x.mask, old_logps=x.old_logps, config=cfg,
                cu_seqlens=x.cu_seqlens,
            ).loss
            for x in (padded, flat)
        )  # fmt: skip
        assert a.item() == pytest.approx(b.item(), rel=1e-6)


def test_kl_near_zero_keeps_its_digits():
    """e^d - d - 1 in float32 has none left at d = 1e-4."""
    d = torch.tensor([[1e-4, -3e-3, 0.2, -0.24, 0.26, 3.0]])
    expected = torch.expm1(d.double()) - d.double()
    for backend in ("torch", "triton"):
        cfg = GRPOLossConfig(beta=1.0)
        for t in range(d.shape[1]):
            out = grpo_loss(
                torch.zeros(1, 1),
                torch.zeros(1),
                ref_logps=d[:, t : t + 1],
                config=cfg,
                backend=backend,
            )
            assert out.metrics["kl"].item() == pytest.approx(
                expected[0, t].item(), rel=1e-3 if abs(d[0, t]) < 1e-2 else 1e-5
            )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        ({"loss_type": "ppo"}, ValueError, "loss_type: expected one of grpo, bnpo, .*got 'ppo'"),
        ({"kl_estimator": "k9"}, ValueError, "kl_estimator: expected one of k3; got 'k9'"),
        (
            {"importance_sampling_level": "word"},
            ValueError,
            "importance_sampling_level: expected one of token; got 'word'",
        ),
        ({"beta": -0.1}, ValueError, r"beta: expected a number >= 0; got -0.1"),
        ({"epsilon": 1.5}, ValueError, r"epsilon: expected a number in \[0, 1\]; got 1.5"),
        ({"epsilon_high": -1.0}, ValueError, "epsilon_high: expected a number >= 0; got -1.0"),
        ({"delta": 0.9}, ValueError, "delta: expected a number > 1; got 0.9"),
        ({"temperature": 0.0}, ValueError, "temperature: expected a number > 0; got 0.0"),
        ({"beta": float("nan")}, ValueError, "beta: expected a finite number; got nan"),
        ({"beta": "0.1"}, TypeError, "beta: expected a number; got str '0.1'"),
        ({"epsilon": None}, TypeError, "epsilon: expected a number; got NoneType None"),
        ({"entropy_coef": True}, TypeError, "entropy_coef: expected a number; got bool True"),
        (
            {"loss_type": "dr_grpo"},
            ValueError,
            "max_completion_length: expected a positive int, .*'dr_grpo'.*got None",
        ),
        (
            {"loss_type": "grpo", "max_completion_length": 64},
            ValueError,
            "max_completion_length: expected None, .*got 64 with loss_type='grpo'",
        ),
        (
            {"loss_type": "dr_grpo", "max_completion_length": 0},
            ValueError,
            "max_completion_length: expected a positive int; got 0",
        ),
    ),
    ids=str,
)
def test_config_refuses(options, error, message):
    with pytest.raises(error, match=message):
        GRPOLossConfig(**options)


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        GRPOLossConfig().beta = 1.0

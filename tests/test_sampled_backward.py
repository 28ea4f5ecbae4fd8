"""The sampled backward: unbiased, as noisy as it says, and exact where all columns are kept."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.workloads import make
from grpo_kernels.backends import torch_backend
from grpo_kernels.experimental import Sampled, column_draw, torch_column_scores
from tests.helpers.batches import (
    OBJECTIVES,
    assert_matches,
    config,
    make_batch,
    relative_error,
    run_fused,
)
from tests.helpers.flat_calls import fused_grpo_loss, linear_logprobs
from tests.helpers.half_gemms import imitate
from tests.helpers.head_options import BACKENDS, OPTIONS, objective_options
from tests.helpers.tiers import cases

TOLERANCE = 0.25
SAMPLED = {"backward": Sampled(TOLERANCE)}
FEW, MANY = 64, 256  # draws
SAMPLER_METRICS = {"columns_kept", "dense_blocks", "gradient_noise"}

# id: (objective's options, the call's)
UNBIASED = {
    "plain": ({}, {}),
    "bias_softcap": ({}, {"bias": True, "softcap": 6.0}),
    "entropy": ({"entropy_coef": 0.05, "beta": 0.05}, {"ref_logps": True, "bias": True}),
    "temperature_scale": ({}, {"old_logps": True, "temperature": True, "logit_scale": 1.2}),
    "sequence_level": ({"loss_type": "gspo", "epsilon": 0.05}, {"old_logps": True, "bias": True}),
    "frozen_head": ({}, {"old_logps": True, "frozen": ("weight", "bias")}),
    "frozen_body": ({}, {"old_logps": True, "frozen": ("hidden",)}),
}


@pytest.fixture(autouse=True)
def every_chunk_is_scored(monkeypatch):
    """The small vocabularies of these tests have flat rows, too."""
    monkeypatch.setattr(column_draw, "_FLAT_SHARE", 2.0)


def blocks_of(rows, monkeypatch):
    """Has blocks of so many rows share a draw."""
    monkeypatch.setattr(column_draw, "_CPU_BLOCK_ROWS", rows)


@pytest.fixture(scope="module")
def batch():
    return make_batch(B=8, T=16)


def draws(batch, count, tolerance=TOLERANCE, **options):
    return [
        run_fused(batch, exact=False, backward=Sampled(tolerance, seed), **options)
        for seed in range(count)
    ]


@pytest.fixture(params=(FEW, pytest.param(MANY, marks=pytest.mark.slow)))
def count(request):
    """The number of draws; a bias that few cannot tell from chance shows with many."""
    return request.param


def expect_unbiased(batch, count, tolerance=TOLERANCE, **options):
    """The mean of n draws nears the exact gradient as 1 / sqrt(n), for every gradient.

    Over disjoint groups of n draws; a root mean square of m relative errors is off by some
    1 / sqrt(2 m), of which there are as few as one.
    """
    exact = run_fused(batch, exact=True, **options)
    drawn = draws(batch, count, tolerance, **options)
    looked_at = 0
    for name, expected in exact.gradients.items():
        if expected is None or drawn[0].gradients[name] is None:
            continue
        stacked = torch.stack([r.gradients[name] for r in drawn]).flatten(1)
        errors = {}
        for n in (1, 4, 16, 64, 256)[: 4 if count == FEW else 5]:
            means = stacked.view(count // n, n, -1).mean(1)
            rms = (means - expected.flatten()).norm(dim=1).square().mean().sqrt()
            errors[n] = float(rms / expected.norm())
        if errors[1] < 1e-4:  # exact: the bias, in one pass
            continue
        looked_at += 1
        # Along the exact gradient, where the spread is least: 4 standard errors are 6e-5 of chance.
        flat = expected.flatten()
        along = stacked @ flat / flat.square().sum() - 1
        allowed = 4 * along.std() / math.sqrt(count) + 1e-4
        assert abs(along.mean()) < allowed, f"d_{name}: biased: {along.mean():.4f} > {allowed:.4f}"
        assert 0.03 < errors[1] < 1, f"d_{name}: nothing to see at {errors[1]:.3f}"
        for n, error in errors.items():
            assert error * math.sqrt(n) < 1.5 * errors[1], f"d_{name}: biased: {errors}"
            assert error * math.sqrt(n) > errors[1] / 1.5, f"d_{name}: too good: {errors}"
    assert looked_at


@pytest.mark.parametrize("option", UNBIASED)
def test_unbiased(option, batch, count):
    objective, options = UNBIASED[option]
    expect_unbiased(batch, count, config=config(**objective), **options)


@pytest.mark.parametrize(("objective", "dense_share"), (("dapo", 0.12), ("gspo", 0.23)))
def test_unbiased_with_blocks_of_both_kinds(objective, dense_share, batch, count, monkeypatch):
    """Several blocks per chunk, some dense: those of the states that favor no word."""
    blocks_of(5, monkeypatch)
    monkeypatch.setattr(column_draw, "dense_share", lambda _: dense_share)
    mixed = replace(batch, hidden=batch.hidden.clone())
    mixed.hidden[4:] *= 0.3
    options = {"config": config(loss_type=objective), "chunk_bytes": 4 * 1003 * 40}
    if objective == "dapo":
        share = draws(mixed, 1, 0.1, **options)[0].metrics["dense_blocks"].item()
        assert 0.05 < share < 0.95
    expect_unbiased(mixed, count, 0.1, **options)


@pytest.mark.parametrize("damage", ("unweighted", "half_weighted", "small_ones_dropped"))
@pytest.mark.parametrize("option", ("plain", "sequence_level"))
def test_a_biased_estimator_is_seen(damage, option, batch, monkeypatch):
    logit_grads, probabilities = torch_backend.logit_grads_, column_draw.keep_probabilities
    power = {"unweighted": 0.0, "half_weighted": 0.5}.get(damage)

    def misweighted(*args, out, column_weights=None):
        weights = None if column_weights is None else column_weights**power
        logit_grads(*args, out=out, column_weights=weights)

    def dropping(*args):
        kept = probabilities(*args)
        return kept.masked_fill(kept < 0.1, 0.0)

    if power is not None:
        monkeypatch.setattr(torch_backend, "logit_grads_", misweighted)
    else:
        monkeypatch.setattr(column_draw, "keep_probabilities", dropping)
    objective, options = UNBIASED[option]
    with pytest.raises(AssertionError, match=": biased: "):
        expect_unbiased(batch, FEW, config=config(**objective), **options)


@pytest.fixture
def all_kept(monkeypatch):
    """Every column that matters is kept for certain, by the way that columns are kept."""
    monkeypatch.setattr(column_draw, "dense_share", lambda _: 2.0)
    return {"backward": Sampled(2e-5, seed=0)}


def expect_exact(batch, sampled, options, backend):
    expected = run_fused(batch, exact=True, **options)
    actual = run_fused(
        batch, exact=False, backend=backend, chunk_bytes=4 * 1003 * 40, **options, **sampled
    )
    if options.get("config", config()).one_pass and actual.metrics.keys() >= SAMPLER_METRICS:
        assert actual.metrics["dense_blocks"] == 0 and actual.metrics["columns_kept"] > 0.3
    actual.metrics = {k: v for k, v in actual.metrics.items() if k in expected.metrics}
    assert_matches(actual, expected, 1e-4, logps=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_head_options(option, backend, all_kept):
    config_options, options = OPTIONS[option]
    expect_exact(make_batch(), all_kept, {**options, "config": config(**config_options)}, backend)


@pytest.mark.parametrize(
    "objective", cases(OBJECTIVES, fast=lambda name: name in ("kl", "entropy", "gspo", "vespo"))
)
def test_objectives(objective, all_kept):
    expect_exact(make_batch(B=6, T=11), all_kept, objective_options(objective), "torch")


@pytest.mark.parametrize(
    ("dtype", "gpu"),
    ((torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)),
    ids=("bf16", "fp16", "bf16_as_on_a_gpu"),
)
def test_half_precision(dtype, gpu, all_kept, monkeypatch):
    """On a GPU all logits of a chunk are at hand, where the exact one makes strips of 5."""
    # A power of two as the scale, which does not round once more.
    batch, options = make_batch(), {"scale": 4.0, "old_logps": True, "bias": True}
    if gpu:
        imitate(monkeypatch, dtype)
        batch, options["chunk_bytes"] = make_batch(B=8, T=16), 24 * 1003 * 5
    batch = batch.to("cpu", dtype)
    expected = run_fused(batch, exact=True, **options)
    actual = run_fused(batch, exact=False, **options, **all_kept)
    for name, value in expected.gradients.items():
        rounding = relative_error(value.to(dtype), value)
        error = relative_error(actual.gradients[name], value)
        assert error < (5e-3 if gpu else max(1e-4, 1.05 * rounding)), name


def test_numbers_of_numpy_are_numbers(batch):
    given = Sampled(np.float32(TOLERANCE), np.int64(3))
    run = run_fused(batch, exact=False, backward=given)
    same = run_fused(batch, exact=False, backward=Sampled(TOLERANCE, 3))
    assert torch.equal(run.gradients["weight"], same.gradients["weight"])


@pytest.mark.parametrize("loss_type", ("dapo", "gspo"))
def test_seeds(batch, loss_type):
    def gradient(seed):
        options = {"config": config(loss_type=loss_type), "backward": Sampled(TOLERANCE, seed)}
        return run_fused(batch, exact=False, **options).gradients["weight"]

    assert torch.equal(gradient(3), gradient(3)) and not torch.equal(gradient(3), gradient(4))
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    first, second = (gradient(g) for g in generators)
    assert torch.equal(first, second)
    # It goes on from where it was.
    assert not torch.equal(gradient(generators[0]), first)
    torch.manual_seed(8)
    first, other = gradient(None), gradient(None)
    torch.manual_seed(8)
    assert torch.equal(gradient(None), first) and not torch.equal(other, first)


def test_ranks_draw_differently(batch, monkeypatch):
    alone = run_fused(batch, exact=False, backward=Sampled(TOLERANCE, 3)).gradients["weight"]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    by_rank = []
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        by_rank.append(
            run_fused(batch, exact=False, backward=Sampled(TOLERANCE, 3)).gradients["weight"]
        )
    assert torch.equal(by_rank[0], alone) and not torch.equal(by_rank[1], alone)


@pytest.mark.parametrize("reentrant", (True, False))
@pytest.mark.parametrize("loss_type", ("dapo", "gspo"))
def test_recomputation_draws_the_same(loss_type, reentrant, batch):
    cfg = config(loss_type=loss_type)

    def loss(hidden, weight):
        return fused_grpo_loss(
            hidden, weight, batch.targets, batch.advantages, batch.mask,
            old_logps=batch.old_logps, config=cfg, **SAMPLED,
        ).loss  # fmt: skip

    gradients = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        head = [x.clone().requires_grad_() for x in (batch.hidden, batch.weight)]
        out = checkpoint(loss, *head, use_reentrant=reentrant) if wrapped else loss(*head)
        out.backward()
        gradients.append([x.grad for x in head])
    for plain, again in zip(*gradients, strict=True):
        assert plain.nan_to_num().norm() > 0 and torch.equal(plain, again)


def test_evaluation_draws_nothing(batch):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.no_grad():
        run = fused_grpo_loss(
            batch.hidden, batch.weight, batch.targets, batch.advantages, batch.mask, **SAMPLED
        )
    assert torch.equal(torch.get_rng_state(), before)
    assert not SAMPLER_METRICS & run.metrics.keys()


def test_two_passes_skip_blocks_without_gradient(batch, monkeypatch):
    blocks_of(4, monkeypatch)
    hidden = batch.hidden.nan_to_num().requires_grad_()
    weight = batch.weight.clone().requires_grad_()
    targets = batch.targets.clamp(min=0)
    logps = linear_logprobs(hidden, weight, targets, backward=Sampled(TOLERANCE, 0)).logps
    made = []
    original = torch_backend.logit_grads_
    monkeypatch.setattr(
        torch_backend,
        "logit_grads_",
        lambda x, *a, **k: (made.append(len(x)), original(x, *a, **k)),
    )
    logps[0].sum().backward()
    assert sum(made) == 16 and hidden.grad[1:].abs().max() == 0 and hidden.grad[0].norm() > 0


def test_rows_of_nan_that_need_no_gradient_stay_out(batch, monkeypatch):
    """A padded row that attention made NaN, left out by the loss: nobody else's business."""
    blocks_of(4, monkeypatch)
    targets = batch.targets.clamp(min=0)
    gradients = []
    for options in ({}, {"backward": Sampled(0.1, seed=0)}):
        hidden = batch.hidden.nan_to_num()
        hidden[0, 3] = math.nan
        hidden.requires_grad_()
        weight = batch.weight.clone().requires_grad_()
        logps = linear_logprobs(hidden, weight, targets, **options).logps
        used = torch.ones_like(batch.mask)
        used[0, 3] = False
        used[2] = False
        torch.where(used, logps * batch.advantages[:, None], 0.0).sum().backward()
        gradients.append((hidden.grad, weight.grad))
    for exact, sampled in zip(*gradients, strict=True):
        assert relative_error(sampled, exact) < 0.2
        assert sampled[2].abs().max() == 0 or sampled.dim() == 2


def test_another_default_dtype(batch):
    expected = run_fused(batch, exact=False, backward=Sampled(TOLERANCE, 0))
    torch.set_default_dtype(torch.bfloat16)
    try:
        actual = run_fused(batch, exact=False, backward=Sampled(TOLERANCE, 0))
    finally:
        torch.set_default_dtype(torch.float32)
    assert actual.logps.dtype == torch.float32 and torch.equal(actual.logps, expected.logps)
    assert relative_error(actual.gradients["weight"], expected.gradients["weight"]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type", ("dapo", "gspo"))
def test_on_a_gpu(loss_type, option, dtype, all_kept):
    config_options, options = OPTIONS[option]
    objective = config(
        loss_type=loss_type, **{k: v for k, v in config_options.items() if k != "delta"}
    )
    batch = make_batch(B=40, T=16).to("cuda", dtype)
    options = {**options, "config": objective}
    expected = run_fused(batch, exact=True, scale=4.0, **options)
    actual = run_fused(batch, exact=False, scale=4.0, **options, **all_kept)
    for name, value in expected.gradients.items():
        if value is not None:
            assert relative_error(actual.gradients[name], value) < (
                1e-4 if dtype.itemsize == 4 else 4e-3
            )


@pytest.mark.gpu
@pytest.mark.real_gpu
def test_unbiased_on_a_gpu():
    expect_unbiased(
        make_batch(B=8, T=16).to("cuda", torch.float32), MANY, old_logps=True, bias=True
    )


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.parametrize(("backward", "waits"), (("exact", 1), ("sampled", 2)))
def test_waits_for_a_gpu(backward, waits):
    """Waits once for the row counts, and once per chunk for the count of kept columns."""
    w = make("dense", (1024, 5003, 64), "cuda")
    w.hidden.requires_grad_()
    w.weight.requires_grad_()
    options = {} if backward == "exact" else {"backward": Sampled(seed=0)}

    def step():
        fused_grpo_loss(
            w.hidden, w.weight, w.targets, w.advantages, old_logps=w.old_logps, **options
        ).loss.backward()

    step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0 < sum("synchronizing" in str(x.message) for x in told) <= waits


def test_two_passes_draw_for_trained_sequences_alone(batch, monkeypatch):
    seen = []
    original = torch_column_scores.column_scores
    monkeypatch.setattr(
        torch_column_scores,
        "column_scores",
        lambda x, *a: (seen.append(len(x)), original(x, *a))[1],
    )
    idle = batch.advantages.clone()
    idle[[0, 4]] = 0.0
    options = {"config": config(loss_type="gspo"), "old_logps": True, "advantages": idle}
    run = run_fused(batch, exact=False, **options, **SAMPLED)
    trained = batch.mask[idle != 0].sum()
    assert sum(seen) == trained < batch.mask.sum()
    exact = run_fused(batch, exact=True, **options)
    assert relative_error(run.gradients["hidden"], exact.gradients["hidden"]) < 0.6
    assert run.gradients["hidden"][[0, 4]].abs().max() == 0


def test_two_passes_backward_twice(batch):
    hidden = batch.hidden.nan_to_num().requires_grad_()
    options = {"backward": Sampled(TOLERANCE, seed=0)}
    targets = batch.targets.clamp(min=0)
    logps = linear_logprobs(hidden, batch.weight, targets, **options).logps
    logps.sum().backward(retain_graph=True)
    first = hidden.grad.clone()
    hidden.grad = None
    logps.sum().backward()
    assert torch.equal(hidden.grad, first)


def test_no_rows():
    batch = make_batch()
    batch.mask.zero_()
    for loss_type in ("dapo", "gspo"):
        run = run_fused(batch, exact=False, config=config(loss_type=loss_type), **SAMPLED)
        assert run.loss == 0 and run.gradients["weight"].abs().max() == 0
        assert run.metrics.get("gradient_noise", 0) == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        ({"tolerance": 0.0}, ValueError, "tolerance: expected a number between 0 and 1"),
        ({"tolerance": "5e-3"}, ValueError, "tolerance: expected a number between"),
        ({"seed": 1.5}, TypeError, "seed: expected an int, a torch.Generator or None"),
    ),
)
def test_arguments(options, error, message):
    with pytest.raises(error, match=message):
        Sampled(**options)

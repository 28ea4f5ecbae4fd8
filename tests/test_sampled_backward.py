"""The sampled backward: unbiased, as noisy as it says, and exact where all columns are kept."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.workloads import make
from grpo_kernels import (
    column_sampling,
    fused_grpo_loss,
    linear_logprobs,
    sampling_cost,
)
from grpo_kernels.backends import torch_backend
from tests.support.batches import (
    OBJECTIVES,
    assert_matches,
    config,
    make_batch,
    packed,
    relative_error,
    run_fused,
    with_cross_entropy,
)
from tests.support.head_options import BACKENDS, OPTIONS, objective_options
from tests.support.tiers import cases

SAMPLED = {"backward": "sampled", "tolerance": 0.25}
FEW, MANY = 64, 256  # draws
SAMPLER_METRICS = {"columns_kept", "dense_blocks", "gradient_noise"}

# id: (objective's options, the call's)
UNBIASED = {
    "plain": ({}, {}),
    "bias_softcap": ({}, {"bias": True, "softcap": 6.0}),
    "entropy": ({"entropy_coef": 0.05, "beta": 0.05}, {"ref_logps": True, "bias": True}),
    "temperature_scale": ({}, {"old_logps": True, "temperature": True, "logit_scale": 1.2}),
    "frozen_head": ({}, {"old_logps": True, "frozen": ("weight", "bias")}),
    "frozen_body": ({}, {"old_logps": True, "frozen": ("hidden",)}),
}


def takes_one_pass(name):
    options, tensors = OBJECTIVES[name]
    return config(**options).two_pass_reason(has_old_logps="old_logps" in tensors) is None


ONE_PASS = [name for name in OBJECTIVES if takes_one_pass(name)]


@pytest.fixture(autouse=True)
def every_chunk_is_scored(monkeypatch):
    """The small vocabularies of these tests have flat rows, too."""
    monkeypatch.setattr(column_sampling, "_FLAT_SHARE", 2.0)


def blocks_of(rows, monkeypatch):
    """Has blocks of so many rows share a sample."""
    cpu = sampling_cost.COSTS["cpu"]._replace(block_rows=rows)
    monkeypatch.setitem(sampling_cost.COSTS, "cpu", cpu)


@pytest.fixture(scope="module")
def batch():
    return make_batch(B=8, T=16)


def draws(batch, count, **options):
    options = SAMPLED | options
    return [run_fused(batch, exact=False, seed=s, **options) for s in range(count)]


@pytest.fixture(params=(FEW, pytest.param(MANY, marks=pytest.mark.slow)))
def count(request):
    """The number of draws; a bias that few cannot tell from chance shows with many."""
    return request.param


def expect_unbiased(batch, count, **options):
    """The mean of n draws nears the exact gradient as 1 / sqrt(n), for every gradient.

    Over disjoint groups of n draws; a root mean square of m relative errors is off by some
    1 / sqrt(2 m), of which there are as few as one.
    """
    exact = run_fused(batch, exact=True, **options)
    drawn = draws(batch, count, **options)
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


@pytest.mark.slow
def test_unbiased_beside_a_cross_entropy(count):
    batch = with_cross_entropy(make_batch(B=8, T=16))
    expect_unbiased(batch, count, old_logps=True, ce_weights=True)


def test_unbiased_packed(batch, count):
    expect_unbiased(packed(batch), count, old_logps=True)


def test_unbiased_with_blocks_of_both_kinds(batch, count, monkeypatch):
    """Several blocks per chunk, some dense: those of the states that favor no word."""
    blocks_of(5, monkeypatch)
    monkeypatch.setattr(column_sampling, "dense_share", lambda _: 0.12)
    mixed = replace(batch, hidden=batch.hidden.clone())
    mixed.hidden[4:] *= 0.3
    options = {"chunk_bytes": 4 * 1003 * 40, "tolerance": 0.1}
    share = draws(mixed, 1, **options)[0].metrics["dense_blocks"].item()
    assert 0.05 < share < 0.95
    expect_unbiased(mixed, count, **options)


@pytest.mark.parametrize("damage", ("unweighted", "half_weighted", "small_ones_dropped"))
def test_a_biased_estimator_is_seen(damage, batch, monkeypatch):
    logit_grads, probabilities = torch_backend.logit_grads_, column_sampling.keep_probabilities
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
        monkeypatch.setattr(column_sampling, "keep_probabilities", dropping)
    with pytest.raises(AssertionError, match=": biased: "):
        expect_unbiased(batch, FEW, config=config())


@pytest.fixture
def all_kept(monkeypatch):
    """Every column that matters is kept for certain, by the way that columns are kept."""
    monkeypatch.setattr(column_sampling, "dense_share", lambda _: 2.0)
    return {"backward": "sampled", "tolerance": 2e-5, "seed": 0}


def expect_exact(batch, sampled, options, backend):
    expected = run_fused(batch, exact=True, **options)
    actual = run_fused(
        batch, exact=False, backend=backend, chunk_bytes=4 * 1003 * 40, **options, **sampled
    )
    assert actual.metrics.keys() >= SAMPLER_METRICS
    assert actual.metrics["dense_blocks"] == 0 and actual.metrics["columns_kept"] > 0.3
    actual.metrics = {k: v for k, v in actual.metrics.items() if k in expected.metrics}
    assert_matches(actual, expected, 1e-4, logps=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_head_options(option, backend, all_kept):
    config_options, options = OPTIONS[option]
    expect_exact(make_batch(), all_kept, {**options, "config": config(**config_options)}, backend)


@pytest.mark.parametrize(
    "objective", cases(ONE_PASS, fast=lambda name: name in ("kl", "entropy", "sapo"))
)
def test_objectives(objective, all_kept):
    expect_exact(make_batch(B=6, T=11), all_kept, objective_options(objective), "torch")


def test_cross_entropy(all_kept):
    options = {"config": config(), "old_logps": True, "ce_weights": True}
    expect_exact(with_cross_entropy(make_batch()), all_kept, options, "torch")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
def test_half_precision(dtype, all_kept):
    batch = make_batch().to("cpu", dtype)
    options = {"old_logps": True, "bias": True}
    # A power of two as the scale, which does not round once more.
    expected = run_fused(batch, exact=True, scale=4.0, **options)
    actual = run_fused(batch, exact=False, scale=4.0, **options, **all_kept)
    for name, value in expected.gradients.items():
        allowed = max(1e-4, 1.05 * relative_error(value.to(dtype), value))
        assert relative_error(actual.gradients[name], value) < allowed


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in ONE_PASS])
def test_losses_of_two_passes_are_refused(name, batch):
    with pytest.raises(ValueError, match="backward: expected 'exact', as this loss takes two pass"):
        run_fused(batch, exact=False, **objective_options(name), **SAMPLED)


def test_log_probs_with_a_gradient_are_refused(batch):
    args = (batch.hidden, batch.weight.clone().requires_grad_(), batch.targets)
    with pytest.raises(ValueError, match="backward: expected 'exact', as the gradients of the log"):
        linear_logprobs(*args, mask=batch.mask, **SAMPLED)
    with torch.no_grad():
        logps = linear_logprobs(*args, mask=batch.mask, **SAMPLED).logps
    assert torch.equal(logps, linear_logprobs(*args, mask=batch.mask).logps)


def test_numbers_of_numpy_are_numbers(batch):
    given = {"seed": np.int64(3), "tolerance": np.float32(0.25), "backward": "sampled"}
    run = run_fused(batch, exact=False, **given)
    same = run_fused(batch, exact=False, seed=3, **SAMPLED)
    assert torch.equal(run.gradients["weight"], same.gradients["weight"])


def test_seeds(batch):
    def gradient(seed):
        return run_fused(batch, exact=False, seed=seed, **SAMPLED).gradients["weight"]

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
    alone = run_fused(batch, exact=False, seed=3, **SAMPLED).gradients["weight"]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    by_rank = []
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        by_rank.append(run_fused(batch, exact=False, seed=3, **SAMPLED).gradients["weight"])
    assert torch.equal(by_rank[0], alone) and not torch.equal(by_rank[1], alone)


@pytest.mark.parametrize("reentrant", (True, False))
def test_recomputation_draws_the_same(reentrant, batch):
    def loss(hidden, weight):
        return fused_grpo_loss(
            hidden, weight, batch.targets, batch.advantages, batch.mask,
            old_logps=batch.old_logps, **SAMPLED,
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


def test_another_default_dtype(batch):
    expected = run_fused(batch, exact=False, seed=0, **SAMPLED)
    torch.set_default_dtype(torch.bfloat16)
    try:
        actual = run_fused(batch, exact=False, seed=0, **SAMPLED)
    finally:
        torch.set_default_dtype(torch.float32)
    assert actual.logps.dtype == torch.float32 and torch.equal(actual.logps, expected.logps)
    assert relative_error(actual.gradients["weight"], expected.gradients["weight"]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("option", OPTIONS)
def test_on_a_gpu(option, dtype, all_kept):
    config_options, options = OPTIONS[option]
    objective = config(**config_options)
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
    options = {} if backward == "exact" else {"backward": "sampled", "seed": 0}

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


def test_no_rows():
    batch = make_batch()
    batch.mask.zero_()
    run = run_fused(batch, exact=False, **SAMPLED)
    assert run.loss == 0 and run.gradients["weight"].abs().max() == 0
    assert run.metrics["gradient_noise"] == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        ({"backward": "rough"}, ValueError, "backward: expected 'exact' or 'sampled'; got 'rough'"),
        ({"tolerance": 0.1}, ValueError, "tolerance: expected None unless backward='sampled'"),
        ({"seed": 1}, ValueError, "seed: expected None unless backward='sampled'"),
        ({**SAMPLED, "tolerance": 0.0}, ValueError, "tolerance: expected a number between 0 and 1"),
        ({**SAMPLED, "tolerance": "5e-3"}, ValueError, "tolerance: expected a number between"),
        ({**SAMPLED, "seed": 1.5}, TypeError, "seed: expected an int, a torch.Generator or None"),
    ),
)
@pytest.mark.parametrize("call", ("fused_grpo_loss", "linear_logprobs"))
def test_arguments(call, options, error, message, batch):
    with pytest.raises(error, match=message):
        if call == "linear_logprobs":
            linear_logprobs(batch.hidden, batch.weight, batch.targets, mask=batch.mask, **options)
        else:
            run_fused(batch, exact=False, **options)

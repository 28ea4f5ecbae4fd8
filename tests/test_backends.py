"""The Triton kernels and the torch backend against each other, and float64, where it bites."""

import math

import pytest
import torch

from grpo_kernels.head.chunked_head import row_factors
from grpo_kernels.kernels import LogitTransform, RowGrads, StatGrads, torch_backend, triton_backend
from tests.helpers.batches import relative_error
from tests.helpers.fake_cuda import EmulatedCUDA
from tests.helpers.policy_losses import TRANSFORMS, exact_policy_loss, exact_statistics
from tests.helpers.tiers import INTERPRETED, cases

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
BOTH = torch_backend, triton_backend
BACKENDS = pytest.mark.parametrize("backend", BOTH, ids=("torch", "triton"))


def tile(C, V, device, *, offset=0.0, pad=0, options=()):
    g = torch.Generator().manual_seed(V)
    buffer = torch.full((C, V + pad), float("nan"))
    buffer[:, :V] = 2 * torch.randn(C, V, generator=g) + offset
    targets = torch.randint(0, V, (C,), generator=g)
    targets[0] = V - 1
    buffer.scatter_add_(1, targets[:, None], torch.full((C, 1), 10.0))
    options = dict(options)
    if options.get("temperature") is True:
        options["temperature"] = (0.5 + torch.rand(C, generator=g)).to(device)
    return buffer.to(device)[:, :V], targets.to(device), LogitTransform(**options)


def ban_entries(logits, targets):
    """Few, many, all but the target, all of the first block, the target, and nothing."""
    g, V = torch.Generator().manual_seed(1), logits.shape[1]
    banned = torch.rand(6, V, generator=g) < torch.tensor([0.3, 0.9, 1.0, 0.0, 0.5, 0.0])[:, None]
    banned[3, : min(V - 2, 2100)] = True
    banned = banned.to(logits.device).scatter_(1, targets[:, None], False)
    other_ids = (targets[:, None] + 1) % V  # something to be uncertain of
    banned.scatter_(1, other_ids, False)
    banned[2, other_ids[2]] = banned[4, targets[4]] = True
    logits.masked_fill_(banned, -math.inf)


def without_gradient(logits, targets, transform):
    """Returns where a logit of -inf has no gradient; without a softcap a target has one."""
    banned = logits == -math.inf
    if transform.softcap is None:
        banned.scatter_(1, targets[:, None], False)
    return banned


def assert_exact(logits, targets, transform, lse_grad=1.0, entropy_grad=1.0, backends=BOTH):
    """Statistics and gradients of both backends."""
    (count, V), device = logits.shape, logits.device
    g = torch.Generator().manual_seed(0)
    weights = torch.randn(3, count, generator=g)
    weights[0, ::3] = 0.0
    weights = (weights * torch.tensor([1.0, lse_grad, entropy_grad])[:, None]).to(device)
    truth, expected = exact_statistics(logits, targets, transform, weights)
    at_zero = without_gradient(logits, targets, transform)
    of = weights[0], weights[2] if entropy_grad else None, weights[1] if lse_grad else None
    for backend in backends:
        stats = backend.token_stats(logits, targets, transform, entropy=True)
        for actual, true in zip(stats[:3], truth, strict=True):
            torch.testing.assert_close(actual.double(), true, rtol=2e-6, atol=2e-5)
        grads, out = RowGrads.of(stats, StatGrads(*of)), torch.empty(count, V, device=device)
        backend.logit_grads_(logits, targets, transform, grads, out)
        assert (out[at_zero] == 0).all() and relative_error(out, expected) <= 2e-5
        torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-6)
        half = torch.empty_like(out, dtype=torch.float16)
        backend.logit_grads_(logits, targets, transform, grads, half)
        assert relative_error(half, expected) <= 1e-3
        # On the logits' memory, between which there may be more.
        in_place = torch.empty_strided(logits.shape, logits.stride(), device=device).copy_(logits)
        backend.logit_grads_(in_place, targets, transform, grads, in_place)
        assert in_place.equal(out)


def assert_exps_are_the_gradient(logits, targets, transform, backends=BOTH):
    """Times a factor per row, what one sweep leaves behind is the gradient."""
    d_logps = torch.linspace(-1.0, 2.0, len(logits), device=logits.device)
    weights = torch.stack([d_logps, 0 * d_logps, 0 * d_logps])
    truth, expected = exact_statistics(logits, targets, transform, weights)
    at_zero = without_gradient(logits, targets, transform)
    for backend in backends:
        for dtype in (None, torch.float32, torch.float64 if INTERPRETED else torch.bfloat16):
            source = exps = logits.clone()
            if dtype != torch.float32:
                exps = None if dtype is None else torch.full_like(source, math.nan, dtype=dtype)
            stats = backend.token_stats(source, targets, transform, entropy=True, exps=exps)
            for value, true in zip(stats[:3], truth, strict=True):
                torch.testing.assert_close(value.double(), true, rtol=2e-6, atol=2e-5)
            if exps is None:
                continue
            assert (exps[at_zero] == 0).all() and stats.total.isfinite().all()
            actual = row_factors(stats, d_logps, transform)[:, None].double() * exps.double()
            half = dtype == torch.bfloat16
            assert relative_error(actual, expected) <= (2**-8 if half else 2e-5)
            at_target = [x.gather(1, targets[:, None]) for x in (actual, expected)]
            torch.testing.assert_close(*at_target, rtol=2**-8 if half else 1e-4, atol=4e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("V", "option"),
    # Less than a block, a block, several, the last one short.
    cases(
        (5, 128, 1003, 4097, 8193), TRANSFORMS,
        fast=lambda V, option: V == 1003 or (V, option) in ((5, "plain"), (4097, "everything")),
    ),
)  # fmt: skip
def test_transforms(V, option, device):
    """A raw logit of -inf has probability 0 and gradient 0; what pads a row is not read."""
    logits, targets, transform = tile(6, V, device, pad=8, options=TRANSFORMS[option])
    ban_entries(logits, targets)
    for lse_grad, entropy_grad in ((1.0, 0.0), (0.0, 1.0)):
        assert_exact(logits, targets, transform, lse_grad, entropy_grad)
    assert_exps_are_the_gradient(logits, targets, transform)


@pytest.mark.parametrize("device", DEVICES)
def test_no_logit_near_zero(device):
    """A maximum started at 0, or a column past V read as 0, shows where all logits are negative."""
    logits, targets, transform = tile(4, 5003, device, offset=-1000.0)
    expected = logits.double().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    for backend in BOTH:
        stats = backend.token_stats(logits, targets, transform, entropy=True)
        assert (stats.logps - expected).abs().max() <= 1e-4
        assert (stats.entropy > 0).all() and stats.entropy.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", (0, 2, "target"))
@pytest.mark.parametrize("far", cases((70.0, 3e3), fast=lambda far: far == 70))
def test_an_anchor_that_is_far_below(far, place, device):
    """The maximum in one block or another, out of the reach of what was known before the sweep."""
    V = 3 * 2048 + 900
    logits, targets, transform = tile(6, V, device)
    at = targets if place == "target" else torch.full((6,), place * 2048 + 7, device=device)
    logits[:5].scatter_add_(1, at[:5, None], torch.full((5, 1), far, device=device))
    assert_exps_are_the_gradient(logits, targets, transform)
    # A second peak that far above the first.
    logits[:5, V - 1] += 2 * far
    assert_exps_are_the_gradient(logits, targets, transform)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sweeps", ("one", "two", "in_place"))
def test_logits_as_large_as_float32_has_them(sweeps, device):
    """Finite, though in units of ln 2 they are not."""
    V = 2 * 2048 + 900
    logits, targets, _ = tile(4, V, device)
    at = 3 if sweeps == "one" else 3000
    logits[0, at], logits[1, at], logits[2, at] = 3.3e38, -3.3e38, 2.5e38
    logits[2, 9] = -2.5e38
    transform = LogitTransform()
    expected = logits.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    exps = logits.clone() if sweeps == "in_place" else None
    source = exps if exps is not None else logits
    stats = triton_backend.token_stats(source, targets, transform, entropy=True, exps=exps)
    assert expected[:3].min() < -1e38 and expected[3] > -30
    torch.testing.assert_close(stats.logps.double(), expected, rtol=1e-6, atol=1e-4)
    assert (stats.entropy >= 0).all()


@pytest.mark.parametrize("device", DEVICES)
@BACKENDS
def test_one_sweep_over_infinite_logits(backend, device):
    """Entries at -inf have no part; a row without a distribution is NaN, and no other is."""
    V, inf = 2 * 2048 + 5, float("inf")
    logits, targets, transform = tile(5, V, device)
    logits[0, : V - 3] = -inf  # also the first block and, in row 1, the target
    logits[1, targets[1]] = -inf
    logits[2] = -inf
    logits[3, 7], logits[4, 3000] = float("nan"), inf
    exps = torch.empty_like(logits)
    stats = backend.token_stats(logits, targets, transform, entropy=True, exps=exps)
    expected = logits.double().log_softmax(1)
    # Nothing to take an anchor from, neither in the first block nor at the target.
    far = torch.full_like(logits, -inf)
    far[:, 3000:] = -1000.0 - torch.arange(V - 3000, device=device) % 7
    alone = backend.token_stats(far, torch.zeros_like(targets), transform, entropy=True)
    assert (alone.logps == -inf).all() and (alone.entropy > 1).all()
    assert (alone.logsumexp - far.double().logsumexp(1)).abs().max() <= 1e-3
    assert stats.logps[1] == -inf and stats.logps[2:].isnan().all()
    p = expected[:2].exp()
    entropy = -torch.where(p > 0, p * expected[:2], 0.0).sum(1)
    assert (stats.entropy[:2] - entropy).abs().max() <= 1e-5
    assert abs(stats.logps[0] - expected[0, targets[0]]) <= 1e-5
    actual = exps[:2] / stats.total[:2, None]
    assert (actual - (p - torch.eye(V, device=device)[targets[:2]])).abs().max() <= 1e-6
    assert exps[2:].isnan().any(1).all()


@BACKENDS
@pytest.mark.parametrize("option", ("plain", "everything"))
def test_a_target_of_minus_one_is_none_of_the_columns(option, backend):
    """A target of -1 equals a target in an additional column of -inf."""
    options = TRANSFORMS[option]
    logits, targets, transform = tile(5, 2500, "cpu", offset=-300.0, options=options)
    targets[:3] = -1
    logits[2, 0] = -math.inf  # no column stands for it
    wide = torch.cat([logits, torch.full((5, 1), -math.inf)], 1)
    placed = torch.where(targets < 0, 2500, targets)
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    results = []
    for x, ids in ((logits, targets), (wide, placed)):
        exps, d = torch.empty_like(x), torch.empty_like(x)
        stats = backend.token_stats(x, ids, transform, entropy=True, exps=exps)
        assert torch.equal(stats.logps[:3], torch.full((3,), -math.inf))
        rows = RowGrads.of(stats._replace(logps=stats.logps.clamp(min=-9.0)), StatGrads(*weights))
        backend.logit_grads_(x, ids, transform, rows, out=d)
        results.append((*stats, exps[:, :2500], d[:, :2500]))
        in_place = x.clone()
        again = backend.token_stats(in_place, ids, transform, entropy=True, exps=in_place)
        factors = (exps / in_place).nan_to_num(1.0)[:, :2500]  # another anchor, perhaps
        torch.testing.assert_close(factors.amin(1), factors.amax(1), rtol=1e-4, atol=0)
        torch.testing.assert_close(again.logps, stats.logps)
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        assert actual.abs().sum() > 0


def policy_inputs(tokens, device):
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(8, tokens, generator=g)
    # Log-probs are negative; some have moved so far that a ratio is at its bound.
    logps = (0.2 * x[5] - 0.5).index_fill(0, torch.arange(0, tokens, 97), 3.0)
    inputs = {
        "advantages": x[0].masked_fill(x[0].abs() < 0.1, 0.0), "weights": x[1].abs(),
        "count": torch.tensor(float(tokens)), "mask": x[2] > -1, "old_logps": logps - 0.3 * x[3],
        "ref_logps": logps + 0.5 * x[4], "scale": x[6].exp(),
    }  # fmt: skip
    inputs["old_logps"][::97] = -0.5
    return {k: v.to(device) for k, v in inputs.items()}, logps.to(device), x[7].abs().to(device)


CLIP = {"surrogate": "clip", "low": 0.8, "high": 1.3}
DELTA, DUAL = CLIP | {"ratio_max": 1.7}, CLIP | {"dual_clip": 1.5}
CISPO = {"surrogate": "cispo", "low": 0.8, "high": 1.2, "ratio_max": 1.4}


# A block has 256 tokens. `test_pairs.py` has every objective.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tokens", "surrogate", "kl", "left_out"),
    (
        (1000, DELTA, {"kl_estimator": "k1"}, ""),
        (257, DUAL, {"kl_estimator": "k1", "kl_ratio": True}, ""),
        (257, CISPO, {"kl_estimator": "k2"}, "scale"),
        (256, CLIP, {"kl_estimator": "k2", "kl_ratio": True}, "mask"),
        (256, DELTA, {"kl_estimator": "k3"}, "entropy"),
        (255, DUAL, {"kl_estimator": "k3", "kl_ratio": True}, "old_logps"),
        (1, CISPO, {}, ""),
    ),
)
def test_policy_loss(tokens, surrogate, kl, left_out, device):
    inputs, logps, entropy = policy_inputs(tokens, device)
    options = {**surrogate, **kl, "beta": 0.2 if kl else 0.0, "entropy_coef": 0.3}
    inputs.pop(left_out, None)
    entropy = None if left_out == "entropy" else entropy
    truth = exact_policy_loss(logps, entropy, **inputs, **options)
    result = triton_backend.policy_loss(logps, entropy, grad=True, **inputs, **options)
    for actual, true in zip(result, truth, strict=True):
        assert (actual is None) == (true is None)
        if true is not None:
            atol = 1e-6 * max(1.0, float(true.abs().amax()))
            torch.testing.assert_close(actual.double(), true, rtol=2e-5, atol=atol)
    value = triton_backend.policy_loss(logps, entropy, grad=False, **inputs, **options)
    assert value.loss.equal(result.loss) and value.d_logps is value.d_entropy is None
    if left_out:
        return
    # Masked tokens are not read.
    for x in (logps, entropy, *(inputs[k] for k in ("advantages", "weights", "ref_logps"))):
        x[~inputs["mask"]] = math.nan
    again = triton_backend.policy_loss(logps, entropy, grad=True, **inputs, **options)
    assert all(a.equal(b) for a, b in zip(again, result, strict=True))


def test_torch_ops_on_another_device(real_memory):
    """Operations that a CPU has a faster way for, on tensors that say that they are on CUDA."""
    with EmulatedCUDA():
        logits, targets, transform = tile(6, 1003, "cuda", options=TRANSFORMS["everything"])
        ban_entries(logits, targets)
        assert_exact(logits, targets, transform, backends=(torch_backend,))
        assert_exps_are_the_gradient(logits, targets, transform, backends=(torch_backend,))


CHUNK = pytest.param("cuda", 2560, 151_936, marks=(pytest.mark.gpu, pytest.mark.real_gpu))
SIZES = (("cpu", 6, 5003), CHUNK)


@pytest.mark.parametrize(("device", "C", "V"), SIZES)
@pytest.mark.parametrize(
    ("dtype", "limit"), (
        (torch.float32, 2e-5), (torch.float16, 1e-3),
        pytest.param(torch.bfloat16, 2.5e-3, marks=pytest.mark.compiled),
    ),
    ids=("float32", "float16", "bfloat16"),
)  # fmt: skip
def test_a_whole_chunk_against_float64(dtype, limit, device, C, V):
    """On a GPU a chunk as large as in training; the offsets of its rows in bytes pass 2^30."""
    g = torch.Generator(device).manual_seed(0)
    logits = torch.randn(C, V, generator=g, device=device).mul_(2)
    targets = torch.randint(0, V, (C,), generator=g, device=device)
    logits.scatter_(1, targets[:, None], 10.0)
    exps = None if dtype == torch.float16 else torch.empty(C, V, dtype=dtype, device=device)
    plain = LogitTransform()
    stats = triton_backend.token_stats(logits, targets, plain, entropy=True, exps=exps)
    d_logps, d_entropy = torch.randn(2, C, generator=g, device=device)
    d_logits = torch.empty(C, V, dtype=dtype, device=device)
    grads = RowGrads.of(stats, StatGrads(d_logps, d_entropy))
    triton_backend.logit_grads_(logits, targets, plain, grads, d_logits)
    weights = torch.stack([d_logps, 0 * d_logps, d_entropy])
    for first in range(0, C, 128):
        rows = slice(first, first + 128)
        of = logits[rows], targets[rows], plain
        truth, expected = exact_statistics(*of, weights[:, rows])
        for actual, true in zip(stats, truth, strict=False):
            assert (actual[rows] - true).abs().max() <= 1e-4
        gradients = [(d_logits[rows].double(), expected)]
        if exps is not None:  # one sweep, without the entropy's gradient
            swept = row_factors(stats.at(rows), d_logps[rows], plain)[:, None] * exps[rows].double()
            without = torch.stack([d_logps, 0 * d_logps, 0 * d_logps])[:, rows]
            gradients.append((swept, exact_statistics(*of, without)[1]))
        for pair in gradients:
            assert relative_error(*pair) <= limit
            # Beside the target's entry the others are small.
            off_target = (x.scatter(1, targets[rows, None], 0.0) for x in pair)
            assert relative_error(*off_target) <= limit

"""The Triton kernels against the torch backend, at the sizes that bite."""

import math

import pytest
import torch

from grpo_kernels.backends import LogitTransform, RowGrads, torch_backend, triton_backend
from grpo_kernels.grpo_loss import policy_loss
from grpo_kernels.head_gradients import row_factors
from grpo_kernels.objective import LossInputs, with_known_weights
from grpo_kernels.sequences import Sequences
from tests.support.batches import OBJECTIVES, config, relative_error
from tests.support.tiers import INTERPRETED, compiled_alone

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
TRANSFORMS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 8.0},
    "scale_temperature": {"logit_scale": 0.6, "temperature": 1.4},
    "everything": {"bias": True, "softcap": 8.0, "logit_scale": 1.2, "temperature": True},
}


def tile(C, V, device, *, offset=0.0, pad=0, options=()):
    g = torch.Generator().manual_seed(V)
    buffer = torch.full((C, V + pad), float("nan"))
    buffer[:, :V] = 2 * torch.randn(C, V, generator=g) + offset
    targets = torch.randint(0, V, (C,), generator=g)
    targets[0] = V - 1
    buffer.scatter_add_(1, targets[:, None], torch.full((C, 1), 10.0))
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = torch.randn(V, generator=g).to(device)
    if options.get("temperature") is True:
        options["temperature"] = (0.5 + torch.rand(C, generator=g)).to(device)
    return buffer.to(device)[:, :V], targets.to(device), LogitTransform(**options)


def assert_backends_agree(logits, targets, transform, *, entropy):
    stats = [
        backend.token_stats(logits, targets, transform, entropy=True)
        for backend in (torch_backend, triton_backend)
    ]
    truth = torch_backend.token_stats(logits.clone(), targets, transform, entropy=True)
    for a, b in zip(*(x[:3] for x in stats), strict=True):
        assert (a - b).abs().max() <= 2e-5 * max(1.0, float(a.abs().max()))
    g = torch.Generator().manual_seed(0)
    d_logps, d_entropy = torch.randn(2, logits.shape[0], generator=g).to(logits.device)
    d_logps[::3] = 0.0
    grads = RowGrads.of(truth, d_logps, d_logps - 0.1, d_entropy if entropy else None)
    outs = []
    for backend in (torch_backend, triton_backend):
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        backend.logit_grads_(logits, targets, transform, grads, out)
        outs.append(out)
    assert outs[0].norm() > 0 and relative_error(outs[1], outs[0]) <= 2e-5
    assert_sampling_agrees(logits, targets, transform, grads, outs[0])
    assert_exps_are_the_gradient(logits, targets, transform)
    return grads, outs[0]


def assert_exps_are_the_gradient(logits, targets, transform):
    """Times a factor per row, what one sweep leaves behind is what a second one would compute."""
    d_logps = torch.linspace(-1.0, 2.0, len(logits), device=logits.device)
    expected = torch.empty_like(logits, memory_format=torch.contiguous_format)
    plain = torch_backend.token_stats(logits, targets, transform, entropy=True)
    torch_backend.logit_grads_(
        logits, targets, transform, RowGrads.of(plain, d_logps), out=expected
    )
    for backend in (torch_backend, triton_backend):
        for dtype in (None, torch.float32, torch.float64 if INTERPRETED else torch.bfloat16):
            given = exps = logits.clone()
            if dtype != torch.float32:
                exps = None if dtype is None else torch.full_like(given, float("nan"), dtype=dtype)
            stats = backend.token_stats(given, targets, transform, entropy=True, exps=exps)
            for a, b in zip(stats[:3], plain[:3], strict=True):
                assert (a - b).abs().max() <= 2e-5 * max(1.0, float(b.abs().max()))
            if exps is None:
                continue
            actual = (row_factors(stats, d_logps, transform)[:, None] * exps).float()
            half = dtype == torch.bfloat16
            assert relative_error(actual, expected) <= (2**-8 if half else 2e-5)
            at_target = [x.gather(1, targets[:, None]) for x in (actual, expected)]
            torch.testing.assert_close(*at_target, rtol=2**-8 if half else 1e-4, atol=4e-7)


def assert_sampling_agrees(logits, targets, transform, grads, d_logits):
    """The column scores, computed from the whole gradient."""
    count, V = logits.shape
    blocks = [slice(0, 2), slice(2, count)] if count in (3, 4) else [slice(0, count)]
    expected = [torch.stack([x[b].sum(0) for b in blocks]) for x in (d_logits.square(), d_logits)]
    weights = 0.5 + torch.rand(V, generator=torch.Generator().manual_seed(1)).to(logits.device)
    for backend in (torch_backend, triton_backend):
        scores = backend.column_scores(logits, targets, transform, grads, blocks)
        for actual, wanted in zip(scores, expected, strict=True):
            assert actual.shape == (len(blocks), V) and relative_error(actual, wanted) <= 2e-5
        out = torch.empty_like(d_logits)
        backend.logit_grads_(logits, targets, transform, grads, out, column_weights=weights)
        assert relative_error(out, d_logits * weights) <= 2e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entropy", (False, True), ids=("plain", "entropy"))
@pytest.mark.parametrize("option", TRANSFORMS)
@pytest.mark.parametrize("V", (5, 128, 1003, 4096, 8193))
def test_transforms(V, option, entropy, device):
    assert_backends_agree(*tile(6, V, device, options=TRANSFORMS[option]), entropy=entropy)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("option", (pytest.param("plain", marks=pytest.mark.slow), "everything"))
def test_full_vocabulary(option, device):
    """V = 151,936 is no multiple of the block: 3,712 columns past its end must not count."""
    logits, targets, transform = tile(2, 151_936, device, options=TRANSFORMS[option])
    assert_backends_agree(logits, targets, transform, entropy=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", (-80.0, -1000.0, 80.0))
def test_no_logit_near_zero(offset, device):
    """A maximum started at 0, or a column past V read as 0, shows where all logits are negative."""
    logits, targets, transform = tile(4, 5003, device, offset=offset)
    expected = logits.double().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    for backend in (torch_backend, triton_backend):
        stats = backend.token_stats(logits, targets, transform, entropy=True)
        assert (stats.logps - expected).abs().max() <= 1e-4
        assert (stats.entropy > 0).all() and stats.entropy.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("backend", (torch_backend, triton_backend), ids=("torch", "triton"))
def test_where_the_gradient_goes(backend, dtype, device):
    """On the logits' memory, or to a narrower dtype beside it; with NaN in the rows' padding."""
    logits, targets, transform = tile(5, 9001, device, pad=8)
    grads, expected = assert_backends_agree(logits, targets, transform, entropy=False)
    out = logits if dtype == torch.float32 else torch.empty_like(logits, dtype=dtype)
    backend.logit_grads_(logits, targets, transform, grads, out)
    assert relative_error(out, expected) <= (2e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", (0, 1, 2, 3, "target"))
@pytest.mark.parametrize("far", (50.0, 70.0, 500.0, 3000.0))
def test_an_anchor_that_is_far_below(far, place, device):
    """The maximum in every block in turn, out of the reach of what was known before the sweep."""
    V = 3 * 2048 + 900
    logits, targets, transform = tile(6, V, device)
    at = targets if place == "target" else torch.full((6,), place * 2048 + 7, device=device)
    logits[:5].scatter_add_(1, at[:5, None], torch.full((5, 1), far, device=device))
    assert_exps_are_the_gradient(logits, targets, transform)
    # A second peak that far above the first.
    logits[:5, V - 1] += 2 * far
    assert_exps_are_the_gradient(logits, targets, transform)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", (1.0, -1.0))
@pytest.mark.parametrize("sweeps", ("one", "two", "in_place"))
def test_logits_as_large_as_float32_has_them(sweeps, scale, device):
    """Finite, though in units of ln 2 they are not; scores of a negative scale, too."""
    V = 2 * 2048 + 900
    logits, targets, _ = tile(4, V, device)
    at = 3 if sweeps == "one" else 3000
    logits[0, at], logits[1, at], logits[2, at] = 3.3e38, -3.3e38, 2.5e38
    logits[2, 9] = -2.5e38
    transform = LogitTransform(logit_scale=scale)
    expected = (scale * logits.double()).log_softmax(1).gather(1, targets[:, None])[:, 0]
    exps = logits.clone() if sweeps == "in_place" else None
    given = exps if exps is not None else logits
    stats = triton_backend.token_stats(given, targets, transform, entropy=True, exps=exps)
    assert expected[:3].min() < -1e38 and expected[3] > -30
    torch.testing.assert_close(stats.logps.double(), expected, rtol=1e-6, atol=1e-4)
    assert (stats.entropy >= 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", (torch_backend, triton_backend), ids=("torch", "triton"))
def test_one_sweep_over_infinite_logits(backend, device):
    """Words at -inf have no part; a row without a distribution is NaN, and no other is."""
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
    mine = exps[:2] / stats.total[:2, None]
    assert (mine - (p - torch.eye(V, device=device)[targets[:2]])).abs().max() <= 1e-6
    assert exps[2:].isnan().any(1).all()


CHUNK = pytest.param("cuda", 2560, 151_936, marks=(pytest.mark.gpu, pytest.mark.real_gpu))
SIZES = (("cpu", 6, 5003), CHUNK)


@pytest.mark.parametrize(("device", "C", "V"), SIZES)
@pytest.mark.parametrize(
    ("dtype", "limit"), (
        (torch.float32, 2e-5), (torch.float16, 1e-3),
        pytest.param(torch.bfloat16, 2.5e-3, marks=compiled_alone),
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
    grads = RowGrads.of(stats, d_logps, d_entropy=d_entropy)
    triton_backend.logit_grads_(logits, targets, plain, grads, d_logits)
    for first in range(0, C, 128):
        rows = slice(first, first + 128)
        log_p = logits[rows].double().log_softmax(-1)
        p, of = log_p.exp(), targets[rows, None]
        entropy = -(p * log_p).sum(1)
        assert (stats.logps[rows] - log_p.gather(1, of).squeeze(1)).abs().max() <= 1e-4
        assert (stats.entropy[rows] - entropy).abs().max() <= 1e-4
        assert (stats.logsumexp[rows] - logits[rows].double().logsumexp(1)).abs().max() <= 1e-4
        d_p = d_logps[rows, None] + d_entropy[rows, None] * (log_p + entropy[:, None])
        expected = (-p * d_p).scatter_add_(1, of, d_logps[rows, None].double())
        actual = d_logits[rows].double()
        assert expected.norm() > 0 and relative_error(actual, expected) <= limit
        # Beside the target's entry the others are small.
        others = (x.scatter(1, of, 0.0) for x in (actual, expected))
        assert relative_error(*others) <= limit
        if exps is not None:  # one sweep, without the entropy's gradient
            one_hot = torch.zeros_like(p).scatter_(1, of, 1.0)
            swept = row_factors(stats.at(rows), d_logps[rows], plain)[:, None] * exps[rows].double()
            assert relative_error(swept, (one_hot - p) * d_logps[rows, None]) <= limit


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("option", ({"logit_scale": 0.0}, {"temperature": math.inf}), ids=str)
def test_logits_that_are_all_the_same(option, device):
    """A scale of 0, or an infinite temperature: uniform, with gradients of 0 but for the target."""
    logits, targets, _ = tile(4, 2 * 2048 + 5, device)
    given = {k: torch.full((4,), v, device=device) if k == "temperature" else v
             for k, v in option.items()}  # fmt: skip
    for exps in (None, torch.empty_like(logits)):
        stats = triton_backend.token_stats(
            logits, targets, LogitTransform(**given), entropy=True, exps=exps
        )
        assert (stats.logps + math.log(logits.shape[1])).abs().max() <= 1e-5
        assert (stats.entropy - math.log(logits.shape[1])).abs().max() <= 1e-5


def policy_inputs(tokens, device, names=("old_logps", "ref_logps", "sampling_logps")):
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(7, tokens, generator=g).to(device)
    constants = {"old_logps": 0.3 * x[3], "ref_logps": x[4], "sampling_logps": 0.3 * x[6]}
    inputs = LossInputs(
        advantages=x[0].masked_fill(x[0].abs() < 0.1, 0.0), weights=x[1].abs(),
        count=torch.tensor(float(tokens)).to(device), mask=x[2] > -1,
        sequences=Sequences(torch.arange(tokens, device=device) // 50, tokens // 50 + 1),
        **{name: constants[name] for name in names},
    )  # fmt: skip
    # Log-probs are negative; a few tokens have moved so far that their ratio overflows.
    logps = (0.2 * x[5] - 0.5).index_fill(0, torch.arange(0, tokens, 97, device=device), 150.0)
    return inputs, logps, x[5].abs()


def assert_policies_agree(cfg, inputs, logps, entropy):
    inputs = with_known_weights(cfg, inputs)
    results = [
        policy_loss(cfg, inputs, logps, entropy, backend, grad=True)
        for backend in (torch_backend, triton_backend)
    ]
    for a, b in zip(*results, strict=True):
        if a is None:
            assert b is None
        else:
            torch.testing.assert_close(b, a, rtol=2e-5, atol=1e-6 * float(a.abs().amax()))
    return results[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", (0, 1, 255, 256, 257, 1000))
def test_policy_loss(tokens, device):
    cfg = config(beta=0.1, delta=1.7, entropy_coef=0.3, epsilon_high=0.4)
    inputs, logps, entropy = policy_inputs(tokens, device)
    if not tokens:
        for backend in (torch_backend, triton_backend):
            result = policy_loss(cfg, inputs, logps, entropy, backend, grad=True)
            assert result.loss == 0 and result.d_logps.shape == result.d_entropy.shape == (0,)
        return
    assert_policies_agree(cfg, inputs, logps.clamp(max=3.0), entropy)


TOKEN_LOCAL = [name for name, (options, _) in OBJECTIVES.items() if config(**options).one_pass]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("objective", TOKEN_LOCAL)
def test_token_local_objectives(objective, device):
    options, names = OBJECTIVES[objective]
    if objective == "is_sequence_on_policy":
        pytest.skip("takes old_logps to be token-local")
    inputs, logps, entropy = policy_inputs(1000, device, names)
    cfg = config(**options)
    if cfg.beta and cfg.kl_clamp is None:
        logps = logps.clamp(max=3.0)  # beyond, KL and ratio overflow, here as there
    result = assert_policies_agree(cfg, inputs, logps, entropy)
    assert result.loss.isfinite() and result.d_logps.isfinite().all() and result.d_logps.any()

"""Supports: loss, log-probs and gradients over the sets that a sampler kept."""

import pytest
import torch

import grpo_kernels
from grpo_kernels import batch_support
from grpo_kernels.experimental import Sampled
from grpo_kernels.support import _warn_of_wide_sets
from tests.helpers.batches import OBJECTIVES, assert_matches, config, make_batch, packed, run_fused
from tests.helpers.flat_calls import fused_grpo_loss, linear_logprobs, reference
from tests.helpers.half_gemms import imitate
from tests.helpers.head_options import BACKENDS, CHUNK, OPTIONS, TOLERANCE, objective_options
from tests.helpers.supports import csr, everything, make_support, with_logps_of, with_logps_of_call

SMALL = {"B": 4, "T": 5, "H": 24, "V": 61}


@pytest.fixture
def batch():
    return make_batch()


def expect_equal(batch, kept, options, *, tolerance=2e-5, **kwargs):
    options = {"support": kept, **options, **kwargs}
    batch = with_logps_of_call(batch, kept, options)
    expected = run_fused(batch, exact=True, **options)
    actual = run_fused(batch, exact=False, **options)
    metrics = actual.metrics
    actual.metrics = {k: v for k, v in metrics.items() if not k.startswith("support/")}
    assert_matches(actual, expected, tolerance, logps=1e-4, rounded_to=batch.hidden.dtype)
    return metrics


@pytest.mark.parametrize("without", [0.0, 0.3], ids=["all", "mixed"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives(batch, objective, without):
    expect_equal(batch, make_support(batch, without=without), objective_options(objective))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_head_options(option, dtype):
    batch = make_batch().to("cpu", dtype)
    settings_, call = OPTIONS[option]
    options = {"config": config(**settings_), **call}
    kept = make_support(batch, without=0.2)
    tolerance = max(TOLERANCE[dtype], 3e-3 if dtype == torch.bfloat16 else 0.0)
    expect_equal(batch, kept, options, chunk_bytes=CHUNK, tolerance=tolerance)


@pytest.mark.parametrize("option", ["old_logps", "entropy", "everything"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_triton(option, dtype):
    batch = make_batch(**SMALL).to("cpu", dtype)
    settings_, call = OPTIONS[option]
    options = {"config": config(**settings_), **call}
    kept = make_support(batch, without=0.2, most=30)
    expect_equal(batch, kept, options, backend="triton", tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("objective", ["gspo", "vespo", "everything"])
def test_triton_in_two_passes(objective):
    batch = make_batch(**SMALL)
    kept = make_support(batch, without=0.0, most=30)
    expect_equal(batch, kept, objective_options(objective), backend="triton")


@pytest.mark.parametrize("objective", ["kl_old_delta", "gspo"])
def test_a_sampled_backward_leaves_entries_exact(batch, objective):
    """With tokens that have no support beside them; at this size the others' noise is small."""
    kept = make_support(batch, without=0.4)
    options = objective_options(objective)
    batch = with_logps_of(batch, kept, bias=True)
    exact = run_fused(batch, exact=True, support=kept, **options)
    sampled = run_fused(batch, exact=False, support=kept, backward=Sampled(1e-3, seed=1), **options)
    for name, gradient in exact.gradients.items():
        error = (sampled.gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-2, name


@pytest.mark.parametrize("layout", [packed, lambda b: b], ids=["packed", "padded"])
@pytest.mark.parametrize("objective", ["sequence", "old_logps"])
def test_layouts(batch, objective, layout):
    batch = layout(batch)
    expect_equal(batch, make_support(batch), objective_options(objective))


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_kept_is_no_support(backend):
    batch = make_batch(**SMALL)
    options = {"config": config(beta=0.1, entropy_coef=0.02), "backend": backend}
    options |= {"old_logps": True, "ref_logps": True}
    whole = run_fused(batch, exact=False, **options)
    kept = run_fused(batch, exact=False, support=everything(batch), **options)
    kept.metrics = {k: v for k, v in kept.metrics.items() if not k.startswith("support/")}
    assert_matches(kept, whole, 1e-5, logps=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_single_entries_read_nothing(backend):
    """Log-prob 0 and no gradient, whatever the states and the row of W are."""
    batch = make_batch(**SMALL)
    mask = torch.ones_like(batch.mask)
    targets = torch.randint(0, 30, mask.shape)
    kept = csr([[t] for t in targets.flatten().tolist()])
    hidden = torch.full_like(batch.hidden, torch.nan).requires_grad_()
    weight = torch.full_like(batch.weight, torch.nan).requires_grad_()
    old_logps = torch.full(mask.shape, 0.1)
    out = fused_grpo_loss(
        hidden, weight, targets, batch.advantages, old_logps=old_logps, support=kept,
        backend=backend,
    )  # fmt: skip
    out.loss.backward()
    plain = grpo_kernels.grpo_loss(torch.zeros(mask.shape), batch.advantages, old_logps=old_logps)
    torch.testing.assert_close(out.loss, plain.loss)
    assert not out.logps.any() and not hidden.grad.any() and not weight.grad.any()
    assert out.metrics["support/singletons"] == out.metrics["support/gathered"] == 1


def test_rows_that_no_token_kept_are_not_read(batch):
    kept = make_support(batch, without=0.0)
    used = torch.zeros(len(batch.weight), dtype=torch.bool)
    for i, counts in enumerate(batch.mask.flatten().tolist()):
        entries = kept[0][kept[1][i] : kept[1][i + 1]]
        used[entries.long() if counts and len(entries) > 1 else []] = True
    weight = batch.weight.masked_fill(~used[:, None], torch.nan).requires_grad_()
    out = fused_grpo_loss(
        batch.hidden, weight, batch.targets, batch.advantages, batch.mask, support=kept
    )
    out.loss.backward()
    assert out.loss.isfinite() and weight.grad.isfinite().all()
    assert not weight.grad[~used].any() and weight.grad[used].any(1).float().mean() > 0.5


def test_the_formulas_of_trainers(batch):
    """The log softmax over all of V, less the log of the mass kept; or logits of -inf elsewhere."""
    kept = make_support(batch, without=0.0)
    mine = linear_logprobs(
        batch.hidden, batch.weight, batch.targets, mask=batch.mask, support=kept
    ).logps
    hidden = batch.hidden.nan_to_num().double()
    logits = (hidden @ batch.weight.T.double()).flatten(0, 1)
    for i, (target, counts) in enumerate(
        zip(batch.targets.flatten().tolist(), batch.mask.flatten().tolist(), strict=True)
    ):
        if not counts:
            continue
        entries = kept[0][kept[1][i] : kept[1][i + 1]].long()
        log_p = logits[i].log_softmax(-1)
        renormalized = log_p[target] - log_p[entries].logsumexp(0)
        masked = torch.full_like(logits[i], -torch.inf)
        masked[entries] = logits[i, entries]
        for expected in (renormalized, masked.log_softmax(-1)[target]):
            assert abs(mine.flatten()[i] - expected) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_logprobs(backend):
    """Log-probs, entropy and logsumexp with gradients of their own; a LoRA; T per token."""
    batch = make_batch(**SMALL)
    mask, V = batch.mask, len(batch.weight)
    kept = make_support(batch, without=0.2, most=30)
    g = torch.Generator().manual_seed(1)
    a_out, lora_b = torch.randn(*mask.shape, 3, generator=g), torch.randn(V, 3, generator=g)
    factors = torch.randn(3, *mask.shape, generator=g)

    def run(call, dtype, **options):
        tensors = [batch.hidden.nan_to_num(), batch.weight, batch.bias, a_out, lora_b]
        hidden, weight, bias, *pair = (x.to(dtype, copy=True).requires_grad_() for x in tensors)
        temperature = batch.temperature.to(dtype)
        out = call(
            hidden, weight, batch.targets, bias=bias, low_rank=tuple(pair), mask=mask,
            temperature=temperature, support=kept, softcap=7.0, **options,
        )  # fmt: skip
        sum((f * x).sum() for f, x in zip(factors.to(dtype), out[:3], strict=True)).backward()
        return [*out[:3], *(x.grad for x in (hidden, weight, bias, *pair))]

    mine = run(linear_logprobs, torch.float32, entropy=True, backend=backend)
    for actual, expected in zip(mine, run(reference.linear_logprobs, torch.float64), strict=True):
        assert expected.any()
        assert (actual - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("loss_type", ["dapo", "sapo"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_states_without_gradient_stay_out(backend, loss_type):
    """NaN and inf in the states of tokens of advantage 0."""
    batch = make_batch(**SMALL)
    mask = torch.ones_like(batch.mask)
    batch.mask, batch.targets = mask, batch.targets.clamp(min=0)
    kept = make_support(batch, without=0.3, most=30)
    advantages = torch.tensor([1.0, 0.0, -0.5, 0.0])
    hidden = torch.randn(4, 5, 24)
    gradients = []
    for poison in (0.0, torch.nan, torch.inf):
        states = hidden.clone()
        states[1], states[3] = states[1] + poison, states[3] + poison
        states, weight = states.requires_grad_(), batch.weight.clone().requires_grad_()
        out = fused_grpo_loss(
            states, weight, batch.targets, advantages, mask, support=kept, backend=backend,
            old_logps=torch.full(mask.shape, -0.5), config=config(loss_type=loss_type),
        )  # fmt: skip
        out.loss.backward()
        gradients.append((states.grad, weight.grad))
    for poisoned in gradients[1:]:
        for actual, expected in zip(poisoned, gradients[0], strict=True):
            assert expected.any() and torch.equal(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_strided_lora(backend):
    batch = make_batch(**SMALL)
    kept = make_support(batch, without=0.3, most=30)
    lora_b = torch.randn(61, 3)
    gradients = []
    for strided in (False, True):
        a_out = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).t()
        a_out = (a_out if strided else a_out.contiguous()).requires_grad_()
        assert a_out.is_contiguous() != strided
        out = fused_grpo_loss(
            batch.hidden.flatten(0, 1), batch.weight, batch.targets.flatten(), torch.ones(20),
            batch.mask.flatten(), low_rank=(a_out, lora_b), support=kept, backend=backend,
        )  # fmt: skip
        out.loss.backward()
        gradients.append(a_out.grad)
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("backward", [None, Sampled(1e-3, seed=0)], ids=["exact", "sampled"])
def test_half_precision_products(batch, backward, monkeypatch):
    """As on a GPU: rows of logits and their gradients in two buffers."""
    imitate(monkeypatch, torch.bfloat16)
    kept = make_support(batch.to("cpu", torch.bfloat16), without=0.1)
    options = {"config": config(), "old_logps": True, "backward": backward}
    batch = with_logps_of(batch.to("cpu", torch.bfloat16), kept)
    exact = run_fused(batch, exact=True, support=kept, **options)
    actual = run_fused(batch, exact=False, support=kept, **options)
    for name, gradient in exact.gradients.items():
        if gradient is not None:
            error = (actual.gradients[name] - gradient).norm() / gradient.norm()
            assert error < 8e-3, name


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_frozen(batch, frozen):
    kept = make_support(batch)
    expect_equal(batch, kept, {"config": config(), "old_logps": True, "frozen": (frozen,)})


def test_transposed_weight(batch):
    batch.weight = batch.weight.T.contiguous().T
    expect_equal(batch, make_support(batch), {"config": config(), "old_logps": True})


def test_same_bits_twice(batch):
    kept = make_support(batch)
    one, two = (run_fused(batch, exact=False, support=kept, old_logps=True) for _ in range(2))
    assert torch.equal(one.loss, two.loss)
    for name, gradient in one.gradients.items():
        assert gradient is None or torch.equal(gradient, two.gradients[name])


def test_no_gradients_wanted(batch):
    kept = make_support(batch)
    with torch.no_grad():
        out = fused_grpo_loss(
            batch.hidden, batch.weight, batch.targets, batch.advantages, batch.mask, support=kept
        )
    assert not out.loss.requires_grad
    expected = run_fused(batch, exact=True, support=kept)
    assert (out.logps - expected.logps).abs().max() < 1e-4


def test_sets_of_a_large_part_of_the_vocabulary_warn_once(batch):
    """Rows of logits are faster then."""
    _warn_of_wide_sets.cache_clear()
    args = (batch.hidden, batch.weight, batch.targets, batch.advantages, batch.mask)
    few = csr([[int(t), 900, 901] if t >= 0 else [] for t in batch.targets.flatten()])
    fused_grpo_loss(*args, support=few)
    with pytest.warns(UserWarning, match="support: kept sets have more than 1/20") as caught:
        for _ in range(2):
            fused_grpo_loss(*args, support=everything(batch))
    assert len(caught) == 1


def test_metrics(batch):
    sets = [[int(t), *range(900, 900 + i % 5)] for i, t in enumerate(batch.targets.flatten())]
    sets[0] = []
    mask, kept = batch.mask.flatten(), csr(sets)
    metrics = expect_equal(batch, kept, {"config": config(), "old_logps": True})
    counts = kept[1].diff()[mask].double()
    has = counts > 0
    for name, expected in {
        "mean": counts[has].mean(),
        "p99": counts[has].quantile(0.99),
        "singletons": (counts == 1).sum() / has.sum(),
        "gathered": has.double().mean(),
    }.items():
        assert abs(metrics[f"support/{name}"] - expected) < 1e-5, name


def test_sets_that_lack_their_target_may_be_emptied(batch):
    """Their tokens are then scored over the whole vocabulary."""
    ids, offsets = make_support(batch, without=0.1)
    targets, B, T = batch.targets.flatten().tolist(), *batch.mask.shape
    sets = [
        [w for w in kept.tolist() if i % 3 == 0 or w != t]
        for i, (kept, t) in enumerate(zip(ids.split(offsets.diff().tolist()), targets, strict=True))
    ]
    rows = [csr(sets[i * T : (i + 1) * T]) for i in range(B)]
    emptied = batch_support(rows, T, targets=batch.targets)
    expected = [s if t in s else [] for s, t in zip(sets, targets, strict=True)]
    assert sum(map(bool, sets)) > sum(map(bool, expected)) > 0
    assert [x.tolist() for x in emptied] == [x.tolist() for x in csr(expected)]
    assert emptied[0].tolist() == batch_support(rows, T, targets=batch.targets.tolist())[0].tolist()
    some = [csr(s) if s else None for s in ([[5]], [])]
    assert batch_support(some, 2, targets=[[5], []]).offsets.tolist() == [0, 1, 1, 1, 1]
    expect_equal(batch, emptied, {"config": config(), "old_logps": True})
    with pytest.raises(ValueError, match=r"support: expected the target .*batch_support"):
        run_fused(batch, exact=False, support=batch_support(rows, T))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "without"), [(name, 0.3 * (i % 2)) for i, name in enumerate(OBJECTIVES)]
)
def test_triton_objectives(objective, without):
    batch = make_batch(**SMALL)
    kept = make_support(batch, without=without, most=30)
    expect_equal(batch, kept, objective_options(objective), backend="triton")

"""Supports: loss, log-probs and gradients over the words that a sampler kept."""

import pytest
import torch

import grpo_kernels
from grpo_kernels import fused_grpo_loss, linear_logprobs, reference, selective_log_softmax, support
from grpo_kernels.lm_head import LMHead
from tests.support.batches import OBJECTIVES, assert_matches, config, make_batch, packed, run_fused
from tests.support.half_gemms import imitate
from tests.support.head_options import BACKENDS, CHUNK, OPTIONS, TOLERANCE, objective_options
from tests.support.supports import csr, everything, make_support, with_logps_of, with_logps_of_call

SMALL = {"B": 4, "T": 5, "H": 24, "V": 61}


@pytest.fixture
def batch():
    return make_batch()


@pytest.fixture(autouse=True)
def gathered(monkeypatch):
    """At these sizes rows of logits would pay."""
    monkeypatch.setattr(support, "words_per_row", lambda *_: 1e9)


@pytest.fixture(params=["gathered", "through_logits"])
def route(request, monkeypatch, gathered):
    if request.param == "through_logits":
        through_logits(monkeypatch)
    return request.param


def through_logits(monkeypatch, words=4):
    """Makes rows of logits pay from so many words on."""
    monkeypatch.setattr(support, "words_per_row", lambda *_: words)
    monkeypatch.setattr(support, "WORDS_PER_WEIGHT", 0.0)


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
def test_head_options(option, dtype, route):
    batch = make_batch().to("cpu", dtype)
    settings_, call = OPTIONS[option]
    options = {"config": config(**settings_), **call}
    kept = make_support(batch, without=0.2)
    tolerance = max(TOLERANCE[dtype], 3e-3 if dtype == torch.bfloat16 else 0.0)
    expect_equal(batch, kept, options, chunk_bytes=CHUNK, tolerance=tolerance)


@pytest.mark.parametrize("option", ["old_logps", "entropy", "everything"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_triton(option, dtype, route):
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
def test_sampled_backward_leaves_words_exact(batch, objective):
    """With tokens that have no support beside them; at this size the others' noise is small."""
    kept = make_support(batch, without=0.4)
    options = objective_options(objective)
    batch = with_logps_of(batch, kept, bias=True)
    exact = run_fused(batch, exact=True, support=kept, **options)
    sampled = run_fused(
        batch, exact=False, support=kept, backward="sampled", tolerance=1e-3, seed=1, **options
    )
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
def test_single_words_read_nothing(backend):
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
        words = kept[0][kept[1][i] : kept[1][i + 1]]
        used[words.long() if counts and len(words) > 1 else []] = True
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
        words = kept[0][kept[1][i] : kept[1][i + 1]].long()
        log_p = logits[i].log_softmax(-1)
        renormalized = log_p[target] - log_p[words].logsumexp(0)
        masked = torch.full_like(logits[i], -torch.inf)
        masked[words] = logits[i, words]
        for expected in (renormalized, masked.log_softmax(-1)[target]):
            assert abs(mine.flatten()[i] - expected) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_logprobs(backend, route):
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
def test_states_without_gradient_stay_out(backend, loss_type, route):
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


@pytest.mark.parametrize("backward", ["exact", "sampled"])
def test_half_precision_products(batch, route, backward, monkeypatch):
    """As on a GPU: rows of logits and their gradients in two buffers."""
    imitate(monkeypatch, torch.bfloat16)
    kept = make_support(batch.to("cpu", torch.bfloat16), without=0.1)
    options = {"config": config(), "old_logps": True, "backward": backward}
    if backward == "sampled":
        options |= {"tolerance": 1e-3, "seed": 0}
    batch = with_logps_of(batch.to("cpu", torch.bfloat16), kept)
    exact = run_fused(batch, exact=True, support=kept, **options)
    actual = run_fused(batch, exact=False, support=kept, **options)
    for name, gradient in exact.gradients.items():
        if gradient is not None:
            error = (actual.gradients[name] - gradient).norm() / gradient.norm()
            assert error < 8e-3, name


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_frozen(batch, frozen, route):
    kept = make_support(batch)
    expect_equal(batch, kept, {"config": config(), "old_logps": True, "frozen": (frozen,)})


def test_transposed_weight(batch):
    batch.weight = batch.weight.T.contiguous().T
    expect_equal(batch, make_support(batch), {"config": config(), "old_logps": True})


def test_skip_untrained(batch):
    """Tokens of advantage 0 are left out; the gradients are the same."""
    kept = make_support(batch)
    some = [
        run_fused(batch, exact=False, support=kept, old_logps=True, skip_untrained=skip)
        for skip in (False, True)
    ]
    for name, gradient in some[0].gradients.items():
        if gradient is not None:
            torch.testing.assert_close(some[1].gradients[name], gradient)
    assert some[1].logps.count_nonzero() < some[0].logps.count_nonzero()


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


def test_rows_of_logits_pay_for_large_sets(batch, monkeypatch):
    """By their words beyond the limit, if these are more than V."""
    monkeypatch.undo()
    limit = support.words_per_row("cpu", 1003, 4)
    assert 60 < limit < 90
    batch.mask, batch.targets = torch.ones_like(batch.mask), batch.targets.clamp(min=0)
    for count, large, share in ((60, 500, 1.0), (120, 500, 0.0), (60, 1003, 30 / 36)):
        sets = [
            [t, *(w for w in range(count if i < 30 else large) if w != t)]
            for i, t in enumerate(batch.targets.flatten().tolist())
        ]
        few = sets if large > 500 or count > 100 else [words[:60] for words in sets]
        metrics = run_fused(batch, exact=False, support=csr(few)).metrics
        assert metrics["support/gathered"] == pytest.approx(share)


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
        "fallback": torch.tensor(0.0),
    }.items():
        assert abs(metrics[f"support/{name}"] - expected) < 1e-5, name


def test_targets_outside_fall_back(batch):
    sets = [
        words[words != t].tolist() if i % 3 else words.tolist()
        for i, (words, t) in enumerate(
            zip(make_sets(batch), batch.targets.flatten().tolist(), strict=True)
        )
    ]
    options = {"config": config(), "old_logps": True, "support_fallback": "dense"}
    metrics = expect_equal(batch, csr(sets), options)
    outside = [
        bool(s) and t not in s for s, t in zip(sets, batch.targets.flatten().tolist(), strict=True)
    ]
    expected = (torch.tensor(outside) & batch.mask.flatten()).sum()
    assert metrics["support/fallback"] == expected > 2


def make_sets(batch):
    ids, offsets = make_support(batch, without=0.1)
    return [words for words in ids.split(offsets.diff().tolist())]


# Both scores


@pytest.mark.parametrize("without", [0.0, 0.3], ids=["all", "mixed"])
@pytest.mark.parametrize("objective", ["on_policy", "kl", "kl_old_delta", "gspo", "everything"])
def test_both_scores(batch, objective, without):
    kept = make_support(batch, without=without)
    metrics = expect_equal(batch, kept, objective_options(objective) | {"score": "both"})
    assert "full/entropy" in metrics and "kl" not in metrics
    beta = OBJECTIVES[objective][0].get("beta", 0.0)
    assert ("zero_gradient" in metrics) == (beta == 0)
    assert ("full/kl" in metrics) == ("ref_logps" in OBJECTIVES[objective][1])


def test_the_kl_is_of_the_whole_softmax(batch):
    kept, mask = make_support(batch, without=0.0), batch.mask
    hidden = batch.hidden.nan_to_num().double().requires_grad_()
    weight = batch.weight.double()
    full = reference.linear_logprobs(hidden, weight, batch.targets, mask=mask).logps
    d = torch.where(mask, batch.ref_logps.double() - full, 0.0)
    loss = 0.1 * ((d.exp() - d - 1) * mask).sum() / mask.sum()
    loss.backward()
    mine = batch.hidden.nan_to_num().requires_grad_()
    out = fused_grpo_loss(
        mine, batch.weight, batch.targets, torch.zeros_like(batch.advantages), mask,
        ref_logps=batch.ref_logps, support=kept, score="both",
        config=config(beta=0.1, use_bias_correction_kl=False),
    )  # fmt: skip
    out.loss.backward()
    torch.testing.assert_close(out.loss.double(), loss, rtol=1e-5, atol=1e-6)
    assert (mine.grad - hidden.grad).norm() <= 1e-5 * hidden.grad.norm()
    torch.testing.assert_close(out.full_logps.double(), full, rtol=1e-5, atol=1e-5)


def test_both_scores_make_rows_of_logits_once(batch, route, monkeypatch):
    made = []
    logits = LMHead.logits
    monkeypatch.setattr(
        LMHead, "logits", lambda head, rows: (made.append(rows), logits(head, rows))[1]
    )
    linear_logprobs(
        batch.hidden, batch.weight, batch.targets, mask=batch.mask, score="both",
        support=make_support(batch, without=0.2),
    )  # fmt: skip
    assert sum(len(rows.targets) for rows in made) == int(batch.mask.sum())


def test_both_scores_of_linear_logprobs(batch, route):
    kept, mask = make_support(batch, without=0.2), batch.mask
    results = []
    for call, dtype in (
        (linear_logprobs, torch.float32),
        (reference.linear_logprobs, torch.float64),
    ):
        hidden, weight = (
            x.to(dtype, copy=True).requires_grad_()
            for x in (batch.hidden.nan_to_num(), batch.weight)
        )
        extra = {"entropy": True} if call is linear_logprobs else {}
        out = call(hidden, weight, batch.targets, mask=mask, support=kept, score="both", **extra)
        g = torch.Generator().manual_seed(0)
        sum((torch.randn(mask.shape, generator=g) * x).sum() for x in out).backward()
        results.append([*out, hidden.grad, weight.grad])
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() <= 2e-5 * expected.norm()


# Row-sparse gradients


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_weight_grad(backend):
    batch = make_batch(**SMALL)
    kept = make_support(batch, without=0.0, most=12)
    gradients = []
    for sparse in (False, True):
        weight = batch.weight.clone().requires_grad_()
        out = fused_grpo_loss(
            batch.hidden, weight, batch.targets, batch.advantages, batch.mask, support=kept,
            sparse_weight_grad=sparse, backend=backend,
        )  # fmt: skip
        (2 * out.loss).backward()
        gradients.append(weight.grad)
    dense, sparse = gradients
    assert sparse.layout == torch.sparse_coo and dense.any()
    assert torch.equal(sparse.to_dense(), dense)
    rows = sparse.coalesce().indices()[0]
    assert len(rows) < len(dense) and not dense[~torch.isin(torch.arange(61), rows)].any()
    weight = torch.nn.Parameter(batch.weight.clone())
    weight.grad = sparse
    torch.optim.SparseAdam([weight], lr=0.1).step()
    assert (weight != batch.weight).any()


# Logits that the caller holds


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("without", [0.0, 0.3], ids=["all", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_selective_log_softmax(backend, without, dtype):
    batch = make_batch(**SMALL)
    batch.mask = torch.ones_like(batch.mask)
    batch.targets = batch.targets.clamp(min=0)
    kept = make_support(batch, without=without, most=30)
    # A slice that no view makes flat.
    logits = torch.randn(4, 6, 61, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    temperature = 0.5 + torch.rand(batch.targets.shape)
    results = []
    for call, x in (
        (selective_log_softmax, logits),
        (reference.selective_log_softmax, logits.double()),
    ):
        x = x.clone().requires_grad_()
        extra = {"backend": backend} if call is selective_log_softmax else {}
        out = call(x[:, :-1], batch.targets, temperature=temperature, support=kept, **extra)
        (out * torch.arange(20).view(4, 5)).sum().backward()
        results.append((out, x.grad))
    (mine, grad), (expected, expected_grad) = results
    assert (mine - expected).abs().max() < 1e-5
    tolerance = TOLERANCE[dtype]
    assert (grad.double() - expected_grad).norm() <= tolerance * expected_grad.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "without"), [(name, 0.3 * (i % 2)) for i, name in enumerate(OBJECTIVES)]
)
def test_triton_objectives(objective, without):
    batch = make_batch(**SMALL)
    kept = make_support(batch, without=without, most=30)
    expect_equal(batch, kept, objective_options(objective), backend="triton")

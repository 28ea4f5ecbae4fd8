"""Supports: loss, log-probs and gradients over the sets that a sampler kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import grpo_kernels
from grpo_kernels import (
    Execution,
    LMHead,
    batch_support,
    fused_grpo_loss,
    linear_logprobs,
    reference,
)
from grpo_kernels.head.support import _warn_of_wide_sets
from tests.helpers.batches import assert_matches, config, make_batch, run_fused
from tests.helpers.half_gemms import imitate
from tests.helpers.head_options import BACKENDS, objective_options
from tests.helpers.supports import csr, everything, make_support, with_logps_of, with_logps_of_call

SMALL = {"B": 4, "T": 5, "H": 24, "V": 61}


@pytest.fixture
def batch():
    return make_batch()


def expect_equal(batch, support, options, *, tolerance=2e-5, **kwargs):
    options = {"support": support, **options, **kwargs}
    batch = with_logps_of_call(batch, support, options)
    expected = run_fused(batch, exact=True, **options)
    actual = run_fused(batch, exact=False, **options)
    metrics = actual.metrics
    actual.metrics = {k: v for k, v in metrics.items() if not k.startswith("support/")}
    assert_matches(actual, expected, tolerance, logps=1e-4, rounded_to=batch.hidden.dtype)
    return metrics


def test_half_products(batch, monkeypatch):
    """Logits and gradients have separate buffers, as on a GPU; some tokens have no support."""
    imitate(monkeypatch, torch.bfloat16)
    batch = batch.to("cpu", torch.bfloat16)
    support = make_support(batch, without=0.1)
    options = objective_options("kl_old_delta") | {"support": support}
    batch = with_logps_of(batch, support, bias=True)
    exact = run_fused(batch, exact=True, **options)
    actual = run_fused(batch, exact=False, **options)
    for name, gradient in exact.gradients.items():
        if gradient is not None:
            error = (actual.gradients[name] - gradient).norm() / gradient.norm()
            assert error < 8e-3, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_single_entries_read_nothing(backend):
    """Log-prob 0 and no gradient, whatever the states and the row of W are."""
    batch = make_batch(**SMALL)
    mask = torch.ones_like(batch.mask)
    targets = torch.randint(0, 30, mask.shape)
    support = csr([[t] for t in targets.flatten().tolist()])
    hidden = torch.full_like(batch.hidden, torch.nan).requires_grad_()
    weight = torch.full_like(batch.weight, torch.nan).requires_grad_()
    old_logps = torch.full(mask.shape, 0.1)
    out = fused_grpo_loss(
        hidden, weight, targets, batch.advantages, old_logps=old_logps, support=support,
        execution=Execution(backend=backend),
    )  # fmt: skip
    out.loss.backward()
    plain = grpo_kernels.grpo_loss(torch.zeros(mask.shape), batch.advantages, old_logps=old_logps)
    torch.testing.assert_close(out.loss, plain.loss)
    assert not out.logps.any() and not hidden.grad.any() and not weight.grad.any()
    assert out.metrics["support/singletons"] == out.metrics["support/gathered"] == 1


def test_rows_that_no_token_kept_are_not_read(batch):
    support = make_support(batch, without=0.0)
    used = torch.zeros(len(batch.weight), dtype=torch.bool)
    for i, counts in enumerate(batch.mask.flatten().tolist()):
        entries = support[0][support[1][i] : support[1][i + 1]]
        used[entries.long() if counts and len(entries) > 1 else []] = True
    weight = batch.weight.masked_fill(~used[:, None], torch.nan).requires_grad_()
    out = fused_grpo_loss(
        batch.hidden, weight, batch.targets, batch.advantages, batch.mask, support=support
    )
    out.loss.backward()
    assert out.loss.isfinite() and weight.grad.isfinite().all()
    assert not weight.grad[~used].any() and weight.grad[used].any(1).float().mean() > 0.5


@pytest.mark.parametrize("softcap", (None, 9.0), ids=("plain", "softcap"))
@pytest.mark.parametrize(("backend", "loss_type"), [("torch", "sapo"), ("triton", "dapo")])
def test_states_without_gradient_stay_out(backend, loss_type, softcap):
    """NaN and inf in the states of tokens of advantage 0."""
    batch = make_batch(**SMALL)
    mask = torch.ones_like(batch.mask)
    batch.mask, batch.targets = mask, batch.targets.clamp(min=0)
    support = make_support(batch, without=0.3, most=30)
    advantages = torch.tensor([1.0, 0.0, -0.5, 0.0])
    hidden = torch.randn(4, 5, 24)
    gradients = []
    for poison in (0.0, torch.nan, torch.inf):
        states = hidden.clone()
        states[1], states[3] = states[1] + poison, states[3] + poison
        states, weight = states.requires_grad_(), batch.weight.clone().requires_grad_()
        out = fused_grpo_loss(
            states, LMHead(weight, softcap=softcap), batch.targets, advantages, mask,
            support=support, old_logps=torch.full(mask.shape, -0.5),
            config=config(loss_type=loss_type), execution=Execution(backend=backend),
        )  # fmt: skip
        out.loss.backward()
        gradients.append((states.grad, weight.grad))
    for poisoned in gradients[1:]:
        for actual, expected in zip(poisoned, gradients[0], strict=True):
            assert expected.any() and torch.equal(actual, expected)


def test_a_token_with_a_set_has_no_row_of_logits(batch):
    with_sets = make_support(batch, without=0.0)
    args = (batch.hidden, batch.weight, batch.targets, batch.mask)
    rows = []
    for support in (with_sets, None):
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            linear_logprobs(*args, support=support)
        rows.append(counted.get_total_flops() / (2 * batch.weight.numel()))
    assert rows == [0, int(batch.mask.sum())]


def test_same_bits_twice(batch):
    support = make_support(batch)
    one, two = (run_fused(batch, exact=False, support=support, old_logps=True) for _ in range(2))
    assert torch.equal(one.loss, two.loss)
    for name, gradient in one.gradients.items():
        assert gradient is None or torch.equal(gradient, two.gradients[name])


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
    mask, support = batch.mask.flatten(), csr(sets)
    metrics = expect_equal(batch, support, {"config": config(), "old_logps": True})
    counts = support[1].diff()[mask].double()
    has = counts > 0
    for name, expected in {
        "mean": counts[has].mean(),
        "p99": counts[has].quantile(0.99),
        "singletons": (counts == 1).sum() / has.sum(),
        "gathered": has.double().mean(),
    }.items():
        assert abs(metrics[f"support/{name}"] - expected) < 1e-5, name


def test_sets_that_lack_their_target_may_be_emptied(batch):
    """Tokens whose sets are emptied are scored over the full vocabulary."""
    ids, offsets = make_support(batch, without=0.1)
    targets, B, T = batch.targets.flatten().tolist(), *batch.mask.shape
    sets = [
        [w for w in row.tolist() if i % 3 == 0 or w != t]
        for i, (row, t) in enumerate(zip(ids.split(offsets.diff().tolist()), targets, strict=True))
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
    with pytest.raises(ValueError, match=f"length: expected as many as .* tokens, {T}; got 2"):
        batch_support(rows, 2)
    with pytest.raises(ValueError, match=r"support: expected the target .*batch_support"):
        run_fused(batch, exact=False, support=batch_support(rows, T))


# Inputs: refused by name, masked, empty, ragged

IDS, OFFSETS = [5, 7, 7, 9, 2], [0, 2, 4, 5]
TARGETS = [7, 9, 2]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": [5, 7, 99, 9, 2]}, ValueError, r"support.token_ids: expected ids in \[0, 20\)"),
        ({"ids": [-1, 7, 7, 9, 2]}, ValueError, r"support.token_ids: expected ids in \[0, 20\)"),
        ({"ids": [7, 7, 7, 9, 2]}, ValueError, r"support.token_ids: expected each id once"),
        ({"ids": [5, 7, 7, 8, 2]}, ValueError, r"support: expected the target .* \(1 of them\)"),
        ({"offsets": [0, 3, 2, 5]}, ValueError, r"support.offsets: expected offsets that start"),
        ({"offsets": [1, 2, 4, 5]}, ValueError, r"support.offsets: .* \(1 of them\)"),
        ({"offsets": [0, 2, 4, 4]}, ValueError, r"support.offsets: .* end at the 5 ids"),
        ({"offsets": [0, 2, 4, 6]}, ValueError, r"support.offsets: .* end at the 5 ids"),
        ({"offsets": [0, 2, 5]}, ValueError, r"support.offsets: expected shape \[4\]"),
        ({"ids": [[5, 7, 7, 9, 2]]}, ValueError, r"token_ids: expected shape \[K\]"),
        ({"ids": [5.0, 7, 7, 9, 2]}, TypeError, r"support.token_ids: expected dtype int64, int32"),
        # Sets that overlap behind a masked token.
        ({"offsets": [0, 3, 2, 5], "mask": torch.tensor([True, False, True])}, ValueError,
         r"support.offsets: expected offsets .* \(1 of them\)"),
        ({"support": 3}, TypeError, "support: expected a Support of token_ids"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["fused", "linear"])
def test_bad_supports_are_refused_by_name(change, error, message, call):
    change = dict(change)
    ids, offsets = change.pop("ids", IDS), change.pop("offsets", OFFSETS)
    options = {"support": (torch.tensor(ids), torch.tensor(offsets)), **change}
    arguments = [torch.randn(3, 4), torch.randn(20, 4), torch.tensor(TARGETS)]
    with pytest.raises(error, match=message):
        if call == "fused":
            fused_grpo_loss(*arguments, torch.ones(3), **options)
        else:
            linear_logprobs(*arguments, **options)


def test_masked_tokens_may_have_anything():
    """Offsets and ids that mean nothing, in the middle and at both ends."""
    mask = torch.tensor([0, 1, 0, 0, 1, 0]).bool()
    ids = torch.tensor([-3, 99, 7, 5, 50, 9, 2, 2])
    offsets = torch.tensor([44, 2, 4, -9, 5, 7, -5])
    hidden, weight = torch.randn(6, 4), torch.randn(20, 4)
    targets = torch.tensor([-1, 5, 77, -1, 2, 3])
    out = linear_logprobs(hidden, weight, targets, mask=mask, support=(ids, offsets))
    clean = csr([[], [7, 5], [], [], [9, 2], []])
    expected = linear_logprobs(hidden, weight, targets, mask=mask, support=clean)
    torch.testing.assert_close(out, expected)
    assert out.logps[1] < 0 and out.logps[4] < 0


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0,)])
def test_no_tokens(shape):
    support = (torch.zeros(0, dtype=torch.int32), torch.zeros(torch.Size(shape).numel() + 1).int())
    hidden, weight = torch.randn(*shape, 4).requires_grad_(), torch.randn(9, 4).requires_grad_()
    targets = torch.zeros(shape, dtype=torch.long)
    out = fused_grpo_loss(hidden, weight, targets, torch.zeros(shape), support=support)
    out.loss.backward()
    assert out.loss == 0 and not weight.grad.any()


@st.composite
def ragged(draw):
    """Sets with their targets, masks, and rubbish where tokens are masked."""
    V, N = 13, draw(st.integers(1, 6))
    tokens = []
    for _ in range(N):
        entries = draw(st.lists(st.integers(0, V - 1), unique=True, max_size=V))
        target = draw(st.sampled_from(entries)) if entries else draw(st.integers(0, V - 1))
        active = draw(st.booleans())
        if not active:
            entries = draw(st.lists(st.integers(-5, V + 5), max_size=4))
        tokens.append((entries, target, active))
    return V, tokens


@settings(deadline=None, max_examples=60)
@given(ragged(), st.sampled_from(["dapo", "gspo"]), st.integers(0, 99), st.sampled_from([0, 3]))
def test_any_ragged_support(case, loss_type, seed, rows):
    V, tokens = case
    g = torch.Generator().manual_seed(seed)
    N = len(tokens)
    hidden, weight = torch.randn(1, N, 5, generator=g), torch.randn(V, 5, generator=g)
    support = csr([entries for entries, _, _ in tokens])
    targets = torch.tensor([[t for _, t, _ in tokens]])
    mask = torch.tensor([[a for _, _, a in tokens]])
    results = []
    for call, dtype in (
        (fused_grpo_loss, torch.float32),
        (reference.fused_grpo_loss, torch.float64),
    ):
        h, w = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
        call(
            h, w, targets, torch.tensor([1.5], dtype=dtype), mask,
            old_logps=torch.full((1, N), -0.7, dtype=dtype), support=support,
            config=config(loss_type=loss_type, entropy_coef=0.1),
        ).loss.backward()  # fmt: skip
        results.append((h.grad, w.grad))
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() <= 1e-5 * expected.norm() + 1e-7


def test_double_backward_is_refused():
    weight = torch.randn(20, 4, requires_grad=True)
    support = (torch.tensor(IDS), torch.tensor(OFFSETS))
    out = linear_logprobs(torch.randn(3, 4), weight, torch.tensor(TARGETS), support=support)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(out.logps.sum(), weight, create_graph=True)

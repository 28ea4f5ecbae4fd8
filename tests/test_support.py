"""Supports: loss, log-probs and gradients over the sets that a sampler kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels import (
    Execution,
    LMHead,
    Support,
    batch_support,
    fused_grpo_loss,
    linear_logprobs,
)
from grpo_kernels.head.support import _warn_of_wide_sets
from tests.helpers.batches import config, make_batch
from tests.helpers.half_gemms import imitate
from tests.helpers.head_options import exact_and_actual, objective_options
from tests.helpers.head_options import expect_equal as expect_equal_without
from tests.helpers.supports import csr, make_support, with_logps_of

SMALL = {"B": 4, "T": 5, "H": 24, "V": 61}


@pytest.fixture
def batch():
    return make_batch()


def expect_equal(batch, support, options, **kwargs):
    batch = with_logps_of(batch, support, **options.get("head", {}))
    return expect_equal_without(batch, {"support": support, **options}, **kwargs)


def test_half_products(batch, monkeypatch):
    """Logits and gradients have separate buffers, as on a GPU; some tokens have no support."""
    imitate(monkeypatch, torch.bfloat16)
    batch = batch.to("cpu", torch.bfloat16)
    support = make_support(batch, without=0.1)
    expect_equal(batch, support, objective_options("kl_old_delta"), tolerance=8e-3)


def test_rows_that_no_token_kept_are_not_read(batch):
    ids, offsets = support = make_support(batch, without=0.0)
    used = torch.zeros(len(batch.weight), dtype=torch.bool)
    sets = ids.split(offsets.diff().tolist())
    for entries, counts in zip(sets, batch.mask.flatten(), strict=True):
        used[entries.long() if counts and len(entries) > 1 else []] = True
    weight = batch.weight.masked_fill(~used[:, None], torch.nan).requires_grad_()
    args = batch.targets, batch.advantages, batch.mask
    out = fused_grpo_loss(batch.hidden, weight, *args, support=support)
    out.loss.backward()
    assert out.loss.isfinite() and weight.grad.isfinite().all()
    assert not weight.grad[~used].any() and weight.grad[used].any(1).float().mean() > 0.5


@pytest.mark.parametrize(
    ("backend", "loss_type", "softcap"), [("torch", "sapo", None), ("triton", "dapo", 9.0)]
)
def test_states_without_gradient_stay_out(backend, loss_type, softcap):
    """NaN and inf in the states of tokens of advantage 0."""
    batch = make_batch(**SMALL)
    batch.mask, targets = torch.ones_like(batch.mask), batch.targets.clamp(min=0)
    batch.targets = targets
    support = make_support(batch, without=0.3, most=30)
    hidden, old_logps = torch.randn(4, 5, 24), torch.full(targets.shape, -0.5)
    gradients = []
    for poison in (0.0, torch.nan, torch.inf):
        states, weight = hidden.clone(), batch.weight.clone().requires_grad_()
        states[[1, 3]] += poison
        out = fused_grpo_loss(
            states.requires_grad_(), LMHead(weight, softcap=softcap), targets,
            torch.tensor([1.0, 0.0, -0.5, 0.0]), support=support, old_logps=old_logps,
            config=config(loss_type=loss_type), execution=Execution(backend=backend),
        )  # fmt: skip
        out.loss.backward()
        gradients.append((states.grad, weight.grad))
    for poisoned in gradients[1:]:
        for actual, expected in zip(poisoned, gradients[0], strict=True):
            assert expected.any() and torch.equal(actual, expected)


def test_a_token_with_a_set_has_no_row_of_logits(batch):
    for support, rows in ((make_support(batch, without=0.0), 0), (None, batch.mask.sum())):
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            linear_logprobs(batch.hidden, batch.weight, batch.targets, batch.mask, support=support)
        assert counted.get_total_flops() == 2 * batch.weight.numel() * rows


def test_sets_of_a_large_part_of_the_vocabulary_warn_once(batch):
    """Rows of logits are faster then."""
    _warn_of_wide_sets.cache_clear()
    V, N = len(batch.weight), batch.targets.numel()
    every_id = Support(torch.arange(V).repeat(N), torch.arange(N + 1) * V)
    with pytest.warns(UserWarning, match="support: kept sets have more than 1/20") as caught:
        for support in (make_support(batch, without=0.0), every_id, every_id):
            linear_logprobs(batch.hidden, batch.weight, batch.targets, batch.mask, support=support)
    assert len(caught) == 1


def test_metrics(batch):
    sets = [[int(t), *range(900, 900 + i % 5)] for i, t in enumerate(batch.targets.flatten())]
    sets[0] = []
    support = csr(sets)
    metrics = expect_equal(batch, support, {"config": config(), "old_logps": True}).metrics
    counts = support.offsets.diff()[batch.mask.flatten()].double()
    has = counts > 0
    single = (counts == 1).sum() / has.sum()
    values = counts[has].mean(), counts[has].quantile(0.99), single, has.double().mean()
    for name, x in zip(("mean", "p99", "singletons", "gathered"), values, strict=True):
        assert metrics[f"support/{name}"].item() == pytest.approx(x.item(), abs=1e-5), name


def test_sets_that_lack_their_target_may_be_emptied(batch):
    """Tokens whose sets are emptied are scored over the full vocabulary."""
    ids, offsets = make_support(batch, without=0.1)
    targets, (B, T) = batch.targets.flatten().tolist(), batch.mask.shape
    sets = [
        [w for w in row.tolist() if i % 3 == 0 or w != t]
        for i, (row, t) in enumerate(zip(ids.split(offsets.diff().tolist()), targets, strict=True))
    ]
    rows = [csr(sets[i * T : (i + 1) * T]) for i in range(B)]
    expected = [s if t in s else [] for s, t in zip(sets, targets, strict=True)]
    assert sum(map(bool, sets)) > sum(map(bool, expected)) > 0
    for form in (batch.targets, batch.targets.tolist()):
        emptied = batch_support(rows, T, targets=form)
        assert [x.tolist() for x in emptied] == [x.tolist() for x in csr(expected)]
        assert emptied.token_ids.dtype == torch.int32
    some = [csr(s) if s else None for s in ([[5]], [])]
    assert batch_support(some, 2, targets=[[5], []]).offsets.tolist() == [0, 1, 1, 1, 1]


# Inputs: masked, empty, ragged


def test_masked_tokens_may_have_anything():
    """Offsets and ids that mean nothing, in the middle and at both ends."""
    mask = torch.tensor([0, 1, 0, 0, 1, 0]).bool()
    ids = torch.tensor([-3, 99, 7, 5, 50, 9, 2, 2])
    offsets = torch.tensor([44, 2, 4, 99, 5, 7, -5])
    args = torch.randn(6, 4), torch.randn(20, 4), torch.tensor([-1, 5, 77, -1, 2, 3]), mask
    out = linear_logprobs(*args, support=(ids, offsets))
    expected = linear_logprobs(*args, support=csr([[], [7, 5], [], [], [9, 2], []]))
    torch.testing.assert_close(out, expected)
    assert out.logps[1] < 0 and out.logps[4] < 0


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0,), (2, 3)])
def test_no_tokens(shape):
    """Loss, gradients and metrics are 0, also where all are masked."""
    support = (torch.zeros(0, dtype=torch.int32), torch.zeros(torch.Size(shape).numel() + 1).int())
    hidden, weight = torch.randn(*shape, 4).requires_grad_(), torch.randn(9, 4).requires_grad_()
    targets = torch.zeros(shape, dtype=torch.long)
    args = hidden, weight, targets, torch.zeros(shape), torch.zeros(shape)
    out = fused_grpo_loss(*args, support=support)
    out.loss.backward()
    assert out.loss == 0 and not weight.grad.any()
    assert {x.item() for name, x in out.metrics.items() if name.startswith("support/")} == {0.0}


@st.composite
def ragged(draw):
    """Sets with their targets, masks, and rubbish where tokens are masked."""
    V, tokens = 13, []
    for _ in range(draw(st.integers(1, 6))):
        entries = draw(st.lists(st.integers(0, V - 1), unique=True, max_size=V))
        target = draw(st.sampled_from(entries)) if entries else draw(st.integers(0, V - 1))
        active = draw(st.booleans())
        if not active:
            entries = draw(st.lists(st.integers(-5, V + 5), max_size=4))
        tokens.append((entries, target, active))
    return V, tokens


@settings(deadline=None, max_examples=60)
@given(ragged(), st.sampled_from(["dapo", "gspo"]), st.integers(0, 99))
def test_any_ragged_support(case, loss_type, seed):
    V, tokens = case
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(1, len(tokens), 5, generator=g), torch.randn(V, 5, generator=g)
    sets, targets, mask = zip(*tokens, strict=True)
    cfg = config(loss_type=loss_type, entropy_coef=0.1)

    def loss(package, hidden, weight):
        old_logps = hidden.new_full((1, len(tokens)), -0.7)
        return package.fused_grpo_loss(
            hidden, weight, torch.tensor([targets]), hidden.new_tensor([1.5]),
            torch.tensor([mask]), old_logps=old_logps, support=csr(sets), config=cfg,
        ).loss  # fmt: skip

    for truth, x in zip(*exact_and_actual(loss, hidden, weight), strict=True):
        assert (x - truth).norm() <= 1e-5 * truth.norm() + 1e-7

"""The columns that the sampled backward keeps: how many, where, and the noise that is left."""

import math

import pytest
import torch

from benchmarks.workloads import make
from grpo_kernels.backends import torch_backend
from grpo_kernels.experimental import (
    Sampled,
    column_draw,
    torch_column_scores,
    triton_column_scores,
)
from tests.helpers.batches import config, relative_error
from tests.helpers.flat_calls import fused_grpo_loss


@pytest.fixture(scope="module", params=("dense", "rollout"))
def workload(request):
    w = make(request.param, (1024, 20_011, 64))
    return w, head_gradients(w)[0]


def head_gradients(w, **options):
    hidden, weight = w.hidden.clone().requires_grad_(), w.weight.clone().requires_grad_()
    out = fused_grpo_loss(
        hidden, weight, w.targets, w.advantages, w.mask, old_logps=w.old_logps, **options
    )
    out.loss.backward()
    return {"hidden": hidden.grad, "weight": weight.grad}, out.metrics


@pytest.mark.parametrize("tolerance", (0.02, 0.04, 0.07))
def test_noise_is_what_was_predicted_and_asked_for(tolerance, workload):
    w, exact = workload
    observed, predicted = [], []
    for seed in range(6):
        drawn, metrics = head_gradients(w, backward=Sampled(tolerance, seed))
        errors = [relative_error(drawn[name], exact[name]) for name in exact]
        observed.append(max(errors))
        predicted.append(metrics["gradient_noise"].item())
        assert metrics["dense_blocks"] == 0 and 0.005 < metrics["columns_kept"] < 1 / 3
    observed, predicted = (sum(x) / len(x) for x in (observed, predicted))
    assert observed == pytest.approx(predicted, rel=0.2)
    assert tolerance / 2 < observed < 1.5 * tolerance


@pytest.mark.parametrize("loss_type", ("dapo", "gspo"))
def test_dense_chunks_stop_being_scored(loss_type, monkeypatch):
    """Four of 12 flat chunks are scored: after the first, one is skipped, then two, then four."""
    monkeypatch.setattr(column_draw, "_FLAT_SHARE", 2.0)
    scored = []
    real = torch_column_scores.column_scores

    def counted(logits, *args):
        scored.append(len(logits))
        return real(logits, *args)

    monkeypatch.setattr(torch_column_scores, "column_scores", counted)
    w = make("flat", (12 * 16, 5003, 64))
    options = {"config": config(loss_type=loss_type), "chunk_bytes": 16 * 5003 * 4}
    drawn, metrics = head_gradients(w, backward=Sampled(), **options)
    assert scored == [16] * 4
    if loss_type == "dapo":
        assert metrics["dense_blocks"] == metrics["columns_kept"] == 1
    for name, expected in head_gradients(w, **options)[0].items():
        assert relative_error(drawn[name], expected) < 1e-6


def test_a_flat_softmax_is_not_even_scored(monkeypatch):
    """The entropy of its rows says enough; from the second chunk on one sweep does all."""
    scored, swept = [], []
    scores, stats = torch_column_scores.column_scores, torch_backend.token_stats

    def counted(logits, *args, exps=None, **options):
        swept.append(exps is not None)
        return stats(logits, *args, exps=exps, **options)

    monkeypatch.setattr(
        torch_column_scores, "column_scores", lambda *a: scored.append(a) or scores(*a)
    )
    monkeypatch.setattr(torch_backend, "token_stats", counted)
    for name, flat in (("flat", True), ("dense", False)):
        w = make(name, (64 * 5, 5003, 64))
        swept.clear()
        head_gradients(w, backward=Sampled(0.1), chunk_bytes=64 * 5003 * 4)
        assert swept == ([False, True, False, True, True] if flat else [False] * 5)
        assert bool(scored) is not flat


def test_chunks_are_sampled_again_after_dense_ones():
    sampler = column_draw.ColumnDraw(
        0.5, 0, 100, torch.device("cpu"), torch_column_scores.column_level
    )
    blocks, targets = [slice(0, 4)], torch.zeros(4, dtype=torch.int64)
    flat, peaked = torch.ones(1, 100), torch.full((1, 100), 1e-9)
    peaked[0, :3] = 1.0
    seen = []
    for squares in (flat, flat, flat, flat, flat, peaked, peaked, flat, peaked, peaked):
        if sampler.should_skip_scoring(blocks):
            seen.append("skipped")
        else:
            samples, _ = sampler.sample(squares, targets, blocks, 1e-4)
            seen.append("dense" if samples[0] is None else "sampled")
    expected = ["dense", "skipped", "dense", "skipped", "skipped", "sampled", "sampled", "dense"]
    assert seen == [*expected, "skipped", "sampled"]
    assert sampler.metrics(torch.zeros(()))["dense_blocks"] == pytest.approx(0.7)


def test_a_block_of_infinite_gradients_leaves_the_others_alone():
    squares = torch.rand(3, 50, generator=torch.Generator().manual_seed(0))
    squares[1, 7] = math.inf
    blocks = [slice(0, 2), slice(2, 4), slice(4, 6)]
    targets = torch.tensor([1, 2, 3, 4, 5, 6])

    def sampled(*args):
        sampler = column_draw.ColumnDraw(
            0.5, 0, 50, torch.device("cpu"), torch_column_scores.column_level
        )
        sampler.dense_share = 2.0
        return sampler.sample(*args, 1.0)

    samples, variance = sampled(squares, targets, blocks)
    others = [0, 2]
    _, alone = sampled(squares[others], targets[[0, 1, 4, 5]], blocks[:2])
    assert [kept is None for kept in samples] == [False, True, False]
    torch.testing.assert_close(variance[others], alone, rtol=1e-4, atol=1e-5)
    assert (variance[1] == 0).all() and alone.any()


@pytest.mark.parametrize(
    "functions", (torch_column_scores, triton_column_scores), ids=("torch", "triton")
)
@pytest.mark.parametrize("share", (1e-9, 1e-5, 1e-2, 10.0))
@pytest.mark.parametrize("K", (1, 50, 1003, 32_768))
def test_level(K, share, functions):
    norms = torch.randn(2 * K, generator=torch.Generator().manual_seed(K)).mul_(3).exp_()[::2]
    norms[: K // 3] = 0.0
    allowed = share * norms.square().sum()
    level = functions.column_level(norms, allowed, 3)
    below = norms[norms < level].double()
    if K > 1:
        assert 3 * ((level - below) * below).sum() == pytest.approx(float(allowed), rel=1e-2)
    for nothing in (
        (torch.zeros(K), torch.zeros(())),
        (torch.zeros(K), allowed),
        (norms, 0 * allowed),
    ):
        assert functions.column_level(*nothing, 1) > 0


@pytest.mark.parametrize("V", (1000, 32_769, 65_535, 151_936))
def test_the_level_is_found_from_as_many_columns_as_a_kernel_takes(V):
    seen = []

    def column_level(norms, allowed, copies):
        seen.append((len(norms), copies))
        return torch_column_scores.column_level(norms, allowed, copies)

    squares, targets = torch.rand(1, V), torch.zeros(4, dtype=torch.int64)
    column_draw.keep_probabilities(squares, targets, [slice(0, 4)], 0.1, column_level)
    ((count, copies),) = seen
    assert min(V, 16_384) <= count <= 32_768 and count == -(-V // copies)


@pytest.mark.parametrize("frozen", (("weight",), ("hidden",)))
def test_what_is_frozen_does_not_change_the_budget(frozen, workload):
    """Samples several chunks, each corrected for the noise that those before have shown."""
    w, _ = workload
    kept = {}
    for parts in ((), frozen):
        hidden = w.hidden.clone().requires_grad_("hidden" not in parts)
        weight = w.weight.clone().requires_grad_("weight" not in parts)
        out = fused_grpo_loss(
            hidden, weight, w.targets, w.advantages, w.mask, old_logps=w.old_logps,
            backward=Sampled(0.1, 0), chunk_bytes=4 * 20_011 * 130,
        )  # fmt: skip
        kept[parts] = out.metrics["columns_kept"].item()
    assert kept[frozen] == pytest.approx(kept[()], rel=0.5)


@pytest.mark.parametrize("softcap", (None, 30.0))
def test_noise_with_rows_of_the_weight_alike(softcap):
    """A common part, which the row sums take care of; not with a softcap, and then it counts."""
    w = make("dense", (512, 5003, 64))
    w.weight += (
        2 * w.weight.norm(dim=1).mean() * torch.nn.functional.normalize(torch.ones(64), dim=0)
    )
    exact, _ = head_gradients(w, softcap=softcap)
    found = [head_gradients(w, softcap=softcap, backward=Sampled(0.1, seed)) for seed in range(8)]
    errors = [max(relative_error(d[name], exact[name]) for name in d) for d, _ in found]
    predicted = [metrics["gradient_noise"].item() for _, metrics in found]
    assert sum(errors) == pytest.approx(sum(predicted), rel=0.25)

"""The checks used throughout must object to code that is wrong; here it is made wrong."""

import sys

import pytest
import torch

from grpo_kernels.head import products
from grpo_kernels.head.dense import Gradients
from grpo_kernels.kernels import torch_backend, triton_backend
from grpo_kernels.loss import objective
from tests.helpers.batches import config, make_batch, relative_error, run_fused
from tests.helpers.head_options import CHUNK, expect_equal, objective_options

OPTIONS = {"config": config(beta=0.1), "old_logps": True, "ref_logps": True, "bias": True}


def check(backend="torch"):
    expect_equal(make_batch(), OPTIONS, backend=backend, chunk_bytes=CHUNK)


def test_the_check_passes_on_the_code_as_it_is():
    check("torch")
    check("triton")


@pytest.mark.parametrize("backend", (torch_backend, triton_backend), ids=("torch", "triton"))
@pytest.mark.parametrize("damage", ("zero", "flip", "two_percent_less"))
def test_damaged_logit_gradient(backend, damage, monkeypatch):
    original = backend.token_stats

    def damaged(*args, exps=None, **options):
        stats = original(*args, exps=exps, **options)
        if exps is not None:
            exps.mul_({"zero": 0.0, "flip": -1.0, "two_percent_less": 0.98}[damage])
        return stats

    monkeypatch.setattr(backend, "token_stats", damaged)
    with pytest.raises(AssertionError, match="relative error"):
        check(backend.__name__.rsplit(".", 1)[1].split("_")[0])


@pytest.mark.parametrize(("place", "name"), ((0, "hidden"), (1, "weight"), (3, "bias")))
def test_each_gradient_is_looked_at(place, name, monkeypatch):
    original = Gradients.all

    def damaged(self):
        self.found[place].zero_()
        return original(self)

    monkeypatch.setattr(Gradients, "all", damaged)
    with pytest.raises(AssertionError, match=f"d_{name}: relative error 1.0"):
        check()


@pytest.mark.parametrize("backend", (torch_backend, triton_backend), ids=("torch", "triton"))
def test_vocabulary_tail_as_zero_logits(backend, monkeypatch):
    original = backend.token_stats

    def with_tail(logits, targets, transform, *, exps=None, **options):
        padded = torch.nn.functional.pad(logits, (0, 640))
        stats = original(padded, targets, transform, exps=padded, **options)
        exps.copy_(padded[:, :-640])
        return stats

    monkeypatch.setattr(backend, "token_stats", with_tail)
    with pytest.raises(AssertionError, match="log-probs off"):
        check(backend.__name__.rsplit(".", 1)[1].split("_")[0])


@pytest.mark.parametrize("field", ("weights", "advantages", "old_logps", "ref_logps"))
def test_ignored_constants(field, monkeypatch):
    original = objective.policy_loss

    def damaged(config, inputs, logps, entropy, **options):
        changed = type(inputs)(**{**vars(inputs), field: getattr(inputs, field) * 0.9})
        return original(config, changed, logps, entropy, **options)

    monkeypatch.setattr(objective, "policy_loss", damaged)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("backend", (torch_backend, triton_backend), ids=("torch", "triton"))
@pytest.mark.parametrize("damage", (0.0, -1.0, 0.98), ids=("zero", "flip", "two_percent_less"))
@pytest.mark.parametrize("objective", ("gspo", "vespo", "cispo", "is_sequence_mask", "top_entropy"))
def test_damaged_objective(objective, damage, backend, monkeypatch):
    """Damages the loss's gradient, in one pass and in two."""
    options = objective_options(objective)
    if backend is triton_backend and options["config"].one_pass:
        used, name = backend, "policy_loss"
    else:
        used, name = sys.modules["grpo_kernels.loss.grpo_loss"], "_differentiated"
    original = getattr(used, name)

    def damaged(*args, **kwargs):
        policy = original(*args, **kwargs)
        d_logps = policy.d_logps
        return policy._replace(d_logps=None if d_logps is None else damage * d_logps)

    monkeypatch.setattr(used, name, damaged)
    backend = backend.__name__.rsplit(".", 1)[1].split("_")[0]
    with pytest.raises(AssertionError):
        expect_equal(make_batch(B=6, T=11), options, backend=backend)


def test_unwritten_memory(monkeypatch):
    """Logits that nobody writes are NaN here, not the zeros they often happen to be."""
    monkeypatch.setattr(products.torch, "mm", lambda a, b, *, out: None)
    result = run_fused(make_batch(), exact=False)
    assert not result.logps.isfinite().all()


def test_relative_error_of_nothing_and_of_the_opposite():
    x = torch.randn(10)
    assert relative_error(torch.zeros(10), x) == pytest.approx(1)
    assert relative_error(-x, x) == pytest.approx(2)

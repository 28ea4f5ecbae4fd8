"""Memory that runs out over the head: the same result, from fewer rows of logits at a time."""

import re
import subprocess
import sys
import weakref
from warnings import catch_warnings, simplefilter

import pytest
import torch

import grpo_kernels
from grpo_kernels import reference
from grpo_kernels.lm_head import LMHead
from grpo_kernels.row_plan import RowPlan, ran_out_of_memory
from tests.support.batches import assert_matches, config, make_batch, run_fused
from tests.support.supports import make_support

ROWS = 30  # what there is memory for
SAID = "memory ran out over the head, which took (1[6-9]|2[0-9]|30) rows of logits at a time"


@pytest.fixture(scope="module")
def batch():
    return make_batch(B=4, T=48)


@pytest.fixture
def little_memory(monkeypatch):
    """Memory for the logits of `ROWS` rows at a time; returns the numbers that were asked for."""
    asked, buffers, new_rows = [], [], LMHead.new_rows

    def limited(self, count, dtype):
        assert not any(buffer() is not None for buffer in buffers), "what failed is still held"
        asked.append(count)
        if count > ROWS:
            buffers.append(weakref.ref(self))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return new_rows(self, count, dtype)

    monkeypatch.setattr(LMHead, "new_rows", limited)
    return asked


@pytest.mark.parametrize(
    "options",
    (
        {"config": config()},
        {"config": config(entropy_coef=0.05)},
        {"config": config(loss_type="gspo"), "bias": True},
        {"config": config(importance_sampling_level="sequence", beta=0.1), "ref_logps": True},
    ),
    ids=("one_pass", "entropy", "two_passes", "sequence_kl"),
)
def test_the_loss_is_that_of_the_reference(options, batch, little_memory):
    options = {"old_logps": True, **options}
    expected = run_fused(batch, exact=True, **options)
    with pytest.warns(UserWarning, match=SAID):
        actual = run_fused(batch, exact=False, **options)
    assert_matches(actual, expected, 2e-5, logps=2e-5)
    assert max(little_memory) > ROWS


def test_a_sampled_backward_is_unbiased_still(batch, little_memory):
    options = {"config": config(), "old_logps": True}
    expected = run_fused(batch, exact=True, **options)
    with pytest.warns(UserWarning, match=SAID) as caught:
        actual = run_fused(
            batch, exact=False, **options, backward="sampled", tolerance=1e-3, seed=3
        )
    assert "other columns are drawn" in str(caught[0].message)
    for name in ("hidden", "weight"):
        want, got = expected.gradients[name], actual.gradients[name]
        assert (got - want).norm() <= 2e-2 * want.norm() > 0


def test_log_probs_in_both_directions(batch, little_memory):
    hidden, targets = torch.nan_to_num(batch.hidden), torch.where(batch.mask, batch.targets, 0)
    found = []
    for module, dtype in ((reference, torch.float64), (grpo_kernels, torch.float32)):
        h, w = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, batch.weight))
        with catch_warnings(record=True) as caught:
            simplefilter("always")
            logps = module.linear_logprobs(h, w, targets).logps
            (logps * torch.linspace(-1, 1, logps.numel()).view_as(logps)).sum().backward()
        found.append([logps.detach(), h.grad, w.grad])
    assert [bool(re.match(SAID, str(x.message))) for x in caught] == [True, True]
    for want, got in zip(*found, strict=True):
        assert (got - want).norm() <= 2e-5 * want.norm() > 0


def test_the_warning_says_where_to_begin(batch, little_memory):
    with pytest.warns(UserWarning) as caught:
        run_fused(batch, exact=False, config=config(), old_logps=True)
    begin = int(re.search(r"With chunk_bytes=(\d+) it begins so", str(caught[0].message))[1])
    little_memory.clear()
    run_fused(batch, exact=False, config=config(), old_logps=True, chunk_bytes=begin)
    assert max(little_memory) <= ROWS


def test_a_budget_is_kept_to(batch, little_memory):
    with pytest.raises(torch.OutOfMemoryError):
        run_fused(batch, exact=False, config=config(), chunk_bytes=1 << 30)
    assert len(little_memory) == 1


def test_whole_tiles_are_the_least(batch, little_memory):
    with pytest.raises(torch.OutOfMemoryError):
        run_fused(batch, exact=False, config=config(), batch_invariant=True)


@pytest.mark.parametrize(
    ("options", "attempts"),
    (
        ({"mask": False}, [144, 72, 36, 18, 16]),
        ({"mask": False, "batch_invariant": True}, [256]),  # a tile
    ),
)
def test_memory_that_never_suffices_is_the_devices_error(options, attempts, monkeypatch):
    asked, batch = [], make_batch(B=4, T=48)
    batch.hidden, batch.targets = batch.hidden.nan_to_num(), batch.targets.clamp(min=0)

    def nothing(self, count, dtype):
        asked.append(count)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    monkeypatch.setattr(LMHead, "new_rows", nothing)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        run_fused(batch, exact=False, config=config(), **options)
    assert asked == attempts


def test_rows_beside_a_support(batch, little_memory):
    """Those of tokens that have none; the sets take no row."""
    options = {"config": config(), "support": make_support(batch, without=0.5)}
    expected = run_fused(batch, exact=True, **options)
    with pytest.warns(UserWarning, match=SAID):
        actual = run_fused(batch, exact=False, **options)
    actual.metrics = {k: v for k, v in actual.metrics.items() if k in expected.metrics}
    assert_matches(actual, expected, 2e-5, logps=2e-5)
    assert max(little_memory) > ROWS


def test_other_errors_are_raised_at_once(batch, monkeypatch):
    calls = []

    def broken(self, count, dtype):
        calls.append(count)
        raise RuntimeError("something else")

    monkeypatch.setattr(LMHead, "new_rows", broken)
    with pytest.raises(RuntimeError, match="something else"):
        run_fused(batch, exact=False, config=config())
    assert len(calls) == 1


def test_half_of_what_was_taken():
    plan = RowPlan(None, 1000, 1000, 4096, 640)
    assert [plan.halved().largest_chunk, plan.halved().logit_rows] == [500, 320]
    assert RowPlan(None, 1, 1, 1, 1).halved().logit_rows == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    (
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("can't allocate memory"), False),
    ),
)
def test_what_says_so(error, expected):
    assert ran_out_of_memory(error) == expected


REAL = """
import resource, sys, warnings
import torch
from grpo_kernels import fused_grpo_loss, reference

V, H, B, T = 100_000, 16, 4, 128
torch.manual_seed(0)
h, w = torch.randn(B, T, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
targets, advantages = torch.randint(V, (B, T)), torch.randn(B)
fused_grpo_loss(h, w, targets, advantages).loss.backward()  # what a first call sets up
expected, h.grad, w.grad = (h.grad, w.grad), None, None
held = next(int(x.split()[1]) for x in open("/proc/self/status") if "VmData" in x) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + (100 << 20), -1))  # a chunk takes 195 MiB
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fused_grpo_loss(h, w, targets, advantages).loss.backward()
print(*(str(x.message) for x in caught), sep=chr(10))
for x, grad in zip((h, w), expected):
    assert (x.grad - grad).norm() <= 1e-5 * grad.norm() > 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_a_real_limit():
    run = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "took 128 rows" in run.stdout or "took 256 rows" in run.stdout, run.stdout

"""Memory that runs out over the head: the same result, from fewer rows of logits at a time."""

import gc
import re
import subprocess
import sys
from warnings import catch_warnings, simplefilter

import pytest
import torch

from grpo_kernels import Execution, linear_logprobs, reference
from grpo_kernels.base.memory import ran_out_of_memory
from grpo_kernels.head.chunked_head import ChunkLogits
from tests.helpers.batches import assert_matches, config, make_batch, run_fused

ROWS = 30  # what there is memory for
SAID = "memory ran out in the LM head, which continues with (1[6-9]|2[0-9]|30) rows of logits"


@pytest.fixture(scope="module")
def batch():
    return make_batch(B=4, T=48)


class LittleMemory:
    """A product for which there is memory up to `ROWS` rows; notes how many it was asked for."""

    def __init__(self, rows=ROWS):
        self.rows, self.requested, self.failed = rows, [], False

    def __call__(self, a, b):
        if self.failed:  # and tried again
            alive = sum(isinstance(x, ChunkLogits) for x in gc.get_objects())
            assert alive == 1, "what failed is still held"
        self.requested.append(len(a))
        self.failed = len(a) > self.rows
        if self.failed:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return a @ b


@pytest.mark.parametrize(
    "options",
    (
        {"config": config()},
        {"config": config(entropy_coef=0.05)},
        {"config": config(loss_type="gspo"), "head": {"bias": True}},
        {"config": config(importance_sampling_level="sequence", beta=0.1), "ref_logps": True},
    ),
    ids=("one_pass", "entropy", "two_passes", "sequence_kl"),
)
def test_the_loss_is_that_of_the_reference(options, batch):
    little_memory, options = LittleMemory(), {"old_logps": True, **options}
    expected = run_fused(batch, exact=True, **options)
    with pytest.warns(UserWarning, match=SAID):
        actual = run_fused(batch, exact=False, execution=Execution(matmul=little_memory), **options)
    assert_matches(actual, expected, 2e-5, logps=2e-5)
    assert max(little_memory.requested) > ROWS


def test_log_probs_in_both_directions(batch):
    hidden, targets = torch.nan_to_num(batch.hidden), torch.where(batch.mask, batch.targets, 0)
    results = []
    for call, dtype, how in (
        (reference.linear_logprobs, torch.float64, {}),
        (linear_logprobs, torch.float32, {"execution": Execution(matmul=LittleMemory())}),
    ):
        h, w = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, batch.weight))
        with catch_warnings(record=True) as caught:
            simplefilter("always")
            logps = call(h, w, targets, **how).logps
            (logps * torch.linspace(-1, 1, logps.numel()).view_as(logps)).sum().backward()
        results.append([logps.detach(), h.grad, w.grad])
    assert [bool(re.match(SAID, str(x.message))) for x in caught] == [True, True]
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() <= 2e-5 * want.norm() > 0


def test_the_warning_says_where_to_begin(batch):
    with pytest.warns(UserWarning) as caught:
        execution = Execution(matmul=LittleMemory())
        run_fused(batch, exact=False, config=config(), old_logps=True, execution=execution)
    begin = int(re.search(r"chunk_bytes=(\d+)\)", str(caught[0].message))[1])
    again = LittleMemory()
    execution = Execution(chunk_bytes=begin, matmul=again)
    run_fused(batch, exact=False, config=config(), old_logps=True, execution=execution)
    assert max(again.requested) <= ROWS


@pytest.mark.parametrize("options", ({"chunk_bytes": 1 << 30}, {"batch_invariant": True}), ids=str)
def test_a_budget_is_kept_to(options, batch):
    """And whole products are the least."""
    memory = LittleMemory()
    with pytest.raises(torch.OutOfMemoryError):
        run_fused(batch, exact=False, execution=Execution(matmul=memory, **options))
    assert len(memory.requested) == 1


@pytest.mark.parametrize(
    ("options", "attempts"),
    (
        ({}, [144, 72, 36, 18, 16]),
        ({"batch_invariant": True}, [256]),  # the rows of a product
    ),
)
def test_memory_that_never_suffices_is_the_devices_error(options, attempts):
    memory, batch = LittleMemory(0), make_batch(B=4, T=48)
    batch.hidden, batch.targets = batch.hidden.nan_to_num(), batch.targets.clamp(min=0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        execution = Execution(matmul=memory, **options)
        run_fused(batch, exact=False, mask=False, execution=execution)
    assert memory.requested == attempts


def test_other_errors_are_raised_at_once(batch):
    calls = []

    def broken(a, b):
        calls.append(len(a))
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        run_fused(batch, exact=False, execution=Execution(matmul=broken))
    assert len(calls) == 1


NO_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
)
OTHERS = (
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("can't allocate memory"),
)


def test_what_says_so():
    assert all(ran_out_of_memory(error) for error in NO_MEMORY)
    assert not any(ran_out_of_memory(error) for error in OTHERS)


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
    assert re.search("continues with (128|256) rows", run.stdout), run.stdout

"""Memory that runs out over the head: the same result, from fewer rows of logits at a time."""

import gc
import re
from dataclasses import replace
from warnings import catch_warnings, simplefilter

import pytest
import torch

from grpo_kernels import (
    Execution,
    Reference,
    fused_distillation_loss,
    fused_grpo_loss,
    linear_logprobs,
)
from grpo_kernels.base.memory import ran_out_of_memory
from grpo_kernels.head import call as head_call
from grpo_kernels.head import chunked_head
from grpo_kernels.head.chunked_head import ChunkLogits
from tests.helpers.batches import config, make_batch, run_fused
from tests.helpers.head_options import watch_products

ROWS = 30  # what there is memory for
SAID = "memory ran out in the LM head, which continues with (1[6-9]|2[0-9]|30) rows of logits"


@pytest.fixture(scope="module")
def batch():
    return make_batch(B=4, T=48)


class LittleMemory:
    """A product for which there is memory up to `ROWS` rows; notes how many it was asked for."""

    def __init__(self, rows=ROWS, heads=1):
        self.rows, self.heads, self.requested, self.failed = rows, heads, [], False

    def __call__(self, a, b):
        if self.failed:  # and tried again
            alive = sum(type(x) is ChunkLogits for x in gc.get_objects())
            assert alive == self.heads, "what failed is still held"
        self.requested.append(len(a))
        self.failed = len(a) > self.rows
        if self.failed:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return a @ b


LOSSES = {
    "one_pass": {}, "two_passes": {"loss_type": "gspo"},
}  # fmt: skip
CALLS = {
    **{name: lambda h, w, b, how, cfg=cfg: fused_grpo_loss(
        h, w, b.targets, b.advantages, b.mask, old_logps=b.old_logps, ref_logps=b.ref_logps,
        config=config(**cfg), execution=how,
    ).loss for name, cfg in LOSSES.items()},
    "log_probs": lambda h, w, b, how: linear_logprobs(h, w, b.targets, b.mask, execution=how).logps,
    "distillation": lambda h, w, b, how: fused_distillation_loss(
        h, w, Reference(b.hidden.flip(-1), b.weight), b.mask, execution=how
    ).loss,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_result_is_that_with_memory(name, batch, monkeypatch):
    """Log-probs run out of it in both directions."""
    results, memory = [], LittleMemory(heads=2 if name == "distillation" else 1)
    for little in (False, True):
        if little:
            watch_products(monkeypatch, memory)
        leaves = [x.clone().requires_grad_() for x in (batch.hidden, batch.weight)]
        with catch_warnings(record=True) as caught:
            simplefilter("always")
            result = CALLS[name](*leaves, batch, Execution())
            (result * torch.linspace(-1, 2, result.numel()).view_as(result)).sum().backward()
        results.append([result.detach(), *(x.grad for x in leaves)])
    assert max(memory.requested) > ROWS and len(caught) >= 1 + (name == "log_probs")
    assert all(re.match(SAID, str(x.message)) for x in caught)
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).norm() <= 2e-5 * expected.norm() > 0


def test_fewer_rows_than_all_need_no_memory_to_keep(batch, monkeypatch):
    """A retry keeps no exponentials for the backward, and has no buffer for them."""
    monkeypatch.setattr(head_call, "_gemm_dtype", lambda *_: torch.bfloat16)
    watch_products(monkeypatch, LittleMemory())
    make, buffers = chunked_head.new_buffers, []
    monkeypatch.setattr(
        chunked_head, "new_buffers", lambda *args: buffers.append(args[2]) or make(*args)
    )
    leaves = [x.clone().requires_grad_() for x in (batch.hidden.nan_to_num(), batch.weight)]
    with pytest.warns(UserWarning, match="memory ran out in the LM head"):
        linear_logprobs(*leaves, batch.targets, batch.mask)
    (_, (first, _)), (_, (last, _)) = buffers[0], buffers[-1]
    assert first > 0 == last


def test_the_warning_says_where_to_begin(batch, monkeypatch):
    watch_products(monkeypatch, LittleMemory())
    with pytest.warns(UserWarning) as caught:
        run_fused(batch, exact=False, config=config(), old_logps=True)
    begin = int(re.search(r"chunk_bytes=(\d+)\)", str(caught[0].message))[1])
    watch_products(monkeypatch, again := LittleMemory())
    execution = Execution(chunk_bytes=begin)
    run_fused(batch, exact=False, config=config(), old_logps=True, execution=execution)
    assert max(again.requested) <= ROWS


@pytest.mark.parametrize(
    ("options", "memory", "attempts"),
    (
        ({}, 0, [144, 72, 36, 18, 16]),
        # A budget is kept to, and the rows of an invariant product are the least.
        ({"chunk_bytes": 1 << 30}, ROWS, [144]),
        ({"batch_invariant": True}, ROWS, [256]),
    ),
    ids=("default", "budget", "invariant"),
)
def test_memory_that_never_suffices_is_the_devices_error(
    options, memory, attempts, batch, monkeypatch
):
    watch_products(monkeypatch, memory := LittleMemory(memory))
    batch = replace(batch, hidden=batch.hidden.nan_to_num(), targets=batch.targets.clamp(min=0))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        run_fused(batch, exact=False, mask=False, execution=Execution(**options))
    assert memory.requested == attempts


@pytest.mark.parametrize(
    ("error", "expected"),
    (
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `x`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("can't allocate memory"), False),
    ),
    ids=str,
)
def test_what_says_so(error, expected):
    assert ran_out_of_memory(error) == expected

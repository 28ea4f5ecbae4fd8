"""The plan of rows: which are worked on, in which order, and how many at a time."""

import pytest
import torch

from grpo_kernels.base.checks import ValueChecks
from grpo_kernels.head.budget import (
    SWEPT_ROWS_PER_SM,
    RowBytes,
    block_bytes,
    buffer_rows,
    default_chunk_bytes,
    gpu,
)
from grpo_kernels.head.row_plan import RowPlan, plan_rows
from grpo_kernels.kernels.triton_logits import REGISTERS, ROW_LAUNCH
from tests.helpers.fake_cuda import CountedCUDA

QWEN = 151_936


def plan(needed, with_grad, *, rows=4, num_tokens=10, V=100):
    def as_mask(ids):
        return None if ids is None else torch.tensor([i in ids for i in range(num_tokens)]).bool()

    return plan_rows(
        as_mask(needed), as_mask(with_grad), ValueChecks(), torch.empty(V, 1),
        num_tokens, RowBytes(V), int(4 * V * rows),
    )  # fmt: skip


def plan_of_all(num_tokens, weight, buffers=None, budget=None):
    buffers = buffers or RowBytes(len(weight))
    return plan_rows(None, None, ValueChecks(), weight, num_tokens, buffers, budget)


@pytest.fixture
def on_a_gpu(real_memory):
    """The weight of an H200 that is not there."""
    with CountedCUDA():
        yield torch.empty(QWEN, 64, device="cuda")


def rows_of(plan):
    ids = torch.arange(10)
    return [(ids[c.index].tolist(), c.needs_grad) for c in plan.chunks()]


EVERY = set(range(10))


@pytest.mark.parametrize(
    ("needed", "with_grad", "expected"),
    (
        (None, None, [([0, 1, 2, 3], True), ([4, 5, 6, 7], True), ([8, 9], True)]),
        # Rows with a gradient come first, and in order.
        ({1, 2, 5, 7, 9}, {0, 2, 7}, [([2, 7], True), ([1, 5, 9], False)]),
        ({3, 8}, None, [([3, 8], True)]),
        (None, {9}, [([9], True), *((list(x), False) for x in ((0, 1, 2), (3, 4, 5), (6, 7, 8)))]),
        (set(), None, []),
        (EVERY, set(), [([0, 1, 2, 3], False), ([4, 5, 6, 7], False), ([8, 9], False)]),
    ),
)
def test_rows_and_their_order(needed, with_grad, expected):
    assert rows_of(plan(needed, with_grad)) == expected


def test_no_rows_and_all_as_they_lie():
    assert plan(set(), None).largest_chunk == 0
    assert rows_of(plan(None, None, num_tokens=0)) == []
    assert plan(None, None).order is plan(EVERY, EVERY).order is None
    assert plan(None, None, V=10_000_000, rows=0.001).largest_chunk == 1  # over the budget


@pytest.mark.parametrize(
    ("sizes", "expected"),
    (
        # Rows, those with a gradient, in a chunk, in a strip.
        ((1000, 1000, 300, 300), [(250, True)] * 4),
        # Large ones in multiples of 128, which GEMM tiles divide.
        ((5000, 5000, 2048, 2048), [(1792, True), (1792, True), (1416, True)]),
        # Rows without a gradient in chunks as large, of which a strip of logits is enough.
        ((1720, 8192, 4864, 640), [(1720, True), (3328, False), (3144, False)]),
    ),
)
def test_chunks_are_of_even_size(sizes, expected):
    plan = RowPlan(None, *sizes, sizes[1])
    assert [(chunk.size, chunk.needs_grad) for chunk in plan.chunks()] == expected


def test_default_budget():
    """512 rows of logits, unless the vocabulary is enormous; on a GPU 1/32 of its memory."""
    for V, H, expected in ((49_152, 576, 512), (1000, 8, 512), (262_144, 4096, 320)):
        assert plan_of_all(10**6, torch.empty(1).expand(V, H)).max_chunk_rows == expected
    for gib, mib in ((8, 256), (23.5, 752), (48, 1536), (79, 1792), (180, 1792)):
        assert default_chunk_bytes(QWEN, "cuda", int(gib * 2**30)) == mib << 20
    assert default_chunk_bytes(QWEN, "mps") == 448 << 20


@pytest.mark.parametrize(
    ("budget", "sizes"),
    (
        (None, (4864, 640)),  # 1.75 GiB: 389 MB of logits, 1.48 GB of gradients
        (1 << 30, (2688, 384)),
        # Strips of 256 rows, where they take less than two fifths.
        (640 << 20, (1664, 256)),
        (360 << 20, (896, 128)),
        (100 << 20, (115, 115)),  # too little for strips of 128 rows
        (10 << 30, (34048, 640)),
    ),
)
def test_strips_of_logits_beside_gradients(budget, sizes, on_a_gpu):
    made = buffer_rows(on_a_gpu, RowBytes(QWEN, 2, strips=True), budget)
    assert made == sizes
    chunk, strip = made
    assert QWEN * (2 * chunk + 4 * strip) <= (budget or 1792 << 20)


def test_a_strip_is_one_wave_of_the_sweep(on_a_gpu):
    """A strip has one wave of programs: 5 x 132 rows in tiles of 128."""
    registers_of_a_multiprocessor, threads = 65_536, 32 * ROW_LAUNCH.num_warps
    assert registers_of_a_multiprocessor // (REGISTERS * threads) == SWEPT_ROWS_PER_SM
    assert gpu(on_a_gpu.device).multi_processor_count == 132
    plan = plan_of_all(16_384, on_a_gpu, RowBytes(QWEN, 2, strips=True))
    assert (plan.largest_chunk, plan.logit_rows) == (4096, 640)
    # With a small vocabulary, or on a small GPU, several full waves, as many as are worth a GEMM.
    assert plan_of_all(16_384, on_a_gpu, RowBytes(32_000, 2, strips=True)).logit_rows == 3200
    on_a_gpu.gpu.properties.multi_processor_count = 58
    assert plan_of_all(16_384, on_a_gpu, RowBytes(QWEN, 2, strips=True)).logit_rows == 512


def test_blocks_have_few_sizes():
    """The budget, a quarter of it, and so on; what takes more than the budget has its own."""
    sizes = {block_bytes(taken, 1000) for taken in range(1, 1001)}
    assert sizes == {1000, 250, 62, 15, 3}
    assert [block_bytes(x, 1000) for x in (0, 250, 251, 1001)] == [0, 250, 1000, 1001]
    assert block_bytes(300, 0) == 300

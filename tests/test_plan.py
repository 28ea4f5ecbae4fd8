"""The plan of rows: which are worked on, in which order, and how many at a time."""

from types import SimpleNamespace

import pytest
import torch

from grpo_kernels.base.checks import ValueChecks
from grpo_kernels.head import plan as plan_module
from grpo_kernels.head.plan import Buffers, RowPlan, buffer_rows, plan_rows


def plan(wanted, with_grad, *, rows=4, num_tokens=10, V=100, checks=None):
    def as_mask(ids):
        return None if ids is None else torch.tensor([i in ids for i in range(num_tokens)]).bool()

    return plan_rows(
        as_mask(wanted), as_mask(with_grad), checks or ValueChecks(), torch.empty(V, 1),
        num_tokens, Buffers(V), int(4 * V * rows),
    )  # fmt: skip


H200 = {"total_memory": 140 << 30, "multi_processor_count": 132, "major": 9}


def on_a_gpu(weight):
    """What the plan asks of a weight, as if it lay on a GPU."""

    class Weight:
        device, shape = torch.device("cuda"), weight.shape

        def __len__(self):
            return len(weight)

    return Weight()


def rows_of(plan):
    ids = torch.arange(10)
    return [(ids[c.index].tolist(), c.needs_grad) for c in plan.chunks()]


def test_every_row_as_it_lies():
    assert rows_of(plan(None, None)) == [([0, 1, 2, 3], True), ([4, 5, 6, 7], True), ([8, 9], True)]
    assert plan(None, None).order is None
    assert plan(set(range(10)), set(range(10))).order is None


def test_gradient_rows_come_first_and_in_order():
    assert rows_of(plan({1, 2, 5, 7, 9}, {0, 2, 7})) == [([2, 7], True), ([1, 5, 9], False)]


def test_only_wanted_rows():
    assert rows_of(plan({3, 8}, None)) == [([3, 8], True)]
    assert rows_of(plan(None, {9})) == [([9], True), *rows_of(plan(set(range(9)), set()))]


def test_no_rows():
    assert rows_of(plan(set(), None)) == [] and plan(set(), None).largest_chunk == 0
    assert all(not grad for _, grad in rows_of(plan(None, set())))
    assert rows_of(plan(None, None, num_tokens=0)) == []


def test_chunks_are_of_even_size():
    sizes = [c.size for c in RowPlan(None, 1000, 1000, 300, 300).chunks()]
    assert sizes == [250] * 4
    # Large ones in multiples of 128, which GEMM tiles divide.
    sizes = [c.size for c in RowPlan(None, 5000, 5000, 2048, 2048).chunks()]
    assert sizes == [1792, 1792, 1416]


def test_workspace_depends_on_the_budget_alone():
    for num_tokens in (1000, 100_000):
        made = plan_rows(
            None, None, ValueChecks(), torch.empty(151_936, 1), num_tokens, Buffers(151_936),
            64 << 20,
        )  # fmt: skip
        assert made.largest_chunk <= (64 << 20) // (4 * 151_936)


def test_default_budget_on_a_cpu():
    """512 rows of logits, unless the vocabulary is enormous."""
    for V, H, expected in ((49_152, 576, 512), (1000, 8, 512), (262_144, 4096, 320)):
        weight = torch.empty(1).expand(V, H)
        made = plan_rows(None, None, ValueChecks(), weight, 10**6, Buffers(V), None)
        assert made.max_chunk_rows == expected


@pytest.mark.parametrize(
    ("budget", "sizes"),
    (
        (None, (5120, 512)),  # 1.75 GiB: 311 MB of logits, 1.56 GB of gradients
        (1 << 30, (2944, 256)),
        (200 << 20, (384, 128)),
        (100 << 20, (115, 115)),  # too little for strips of 128 rows
        (10 << 30, (33280, 1024)),
    ),
)
def test_strips_of_logits_beside_gradients(budget, sizes, monkeypatch):
    monkeypatch.setattr(plan_module, "gpu", lambda _: SimpleNamespace(**H200))
    weight = torch.empty(1).expand(151_936, 64)
    made = buffer_rows(on_a_gpu(weight), Buffers(len(weight), 2, strips=True), budget)
    assert made == sizes
    chunk, strip = made
    assert 151_936 * (2 * chunk + 4 * strip) <= (budget or 1792 << 20)


@pytest.mark.parametrize(("num_tokens", "rows"), [(16384, (4096, 768)), (20480, (5120, 512))])
def test_strips_take_what_chunks_leave(num_tokens, rows, monkeypatch):
    """Of 1.75 GiB; the buffer of gradients has one of eight sizes, whatever the mask is."""
    monkeypatch.setattr(plan_module, "gpu", lambda _: SimpleNamespace(**H200))
    weight = on_a_gpu(torch.empty(1).expand(151_936, 64))
    buffers = Buffers(len(weight), 2, strips=True)

    def made(count):
        return plan_rows(None, None, ValueChecks(), weight, count, buffers, None)

    plan = made(num_tokens)
    assert (plan.largest_chunk, plan.logit_rows) == rows
    sizes = {made(count).gradient_rows for count in range(100, num_tokens, 300)}
    assert len(sizes) <= 8 and max(sizes) == 5120
    for count in range(100, num_tokens, 1000):
        assert made(count).bytes_taken <= 1792 << 20


def test_rows_per_chunk_fill_a_gpu():
    """At H = 1,536 dH has 6 tiles per 128 rows, of which an H200 computes 132 at a time."""
    even = RowPlan(None, 16384, 16384, 5120, 512)
    assert [c.size for c in even.chunks()] == [4096] * 4  # 8 waves
    plan = RowPlan(None, 16384, 16384, 5120, 512, tiles=(6, 132))
    assert [c.size for c in plan.chunks()] == [4608] * 3 + [2560]  # 7
    assert [c.size for c in RowPlan(None, 3000, 3000, 5120, 512, tiles=(6, 132)).chunks()] == [3000]


def test_a_vocabulary_over_the_budget_goes_row_by_row():
    assert plan(None, None, V=10_000_000, rows=0.001).largest_chunk == 1


def test_counts_and_checks_come_in_one_transfer(monkeypatch):
    transfers = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: transfers.append(x) or original(x))
    checks = ValueChecks()
    checks.add(torch.tensor([False, False]), "fine")
    plan({1, 2}, {2}, checks=checks)
    assert len(transfers) == 1
    checks.add(torch.tensor([True, True]), "broken")
    with pytest.raises(ValueError, match=r"broken \(2 of them\)"):
        plan({1, 2}, {2}, checks=checks)

"""The functions on entries against float64, at the sizes that bite."""

import functools
import math

import pytest
import torch

from grpo_kernels.kernels import Entries, torch_backend, triton_backend, triton_entries
from tests.helpers.tiers import INTERPRETED, cases

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
DTYPES = (torch.float32, torch.bfloat16)
# Ranks of a LoRA and a bias; one more than two blocks of a sum; unaligned rows.
WIDTHS = (1, 50, 4097)


@functools.cache
def some_entries(V=40, N=23):
    """Tokens of none, one, some and 200 entries; id 3 is common, others have none at all."""
    g = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 9, (N,), generator=g)
    counts[:3] = torch.tensor([0, 200, 1])
    tokens = torch.arange(N).repeat_interleave(counts)
    ids = torch.randint(0, V // 2, (len(tokens),), generator=g)
    ids[::2] = 3
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    positions = torch.div(counts, 2, rounding_mode="floor")
    return Entries(ids, tokens, offsets, positions, ids.argsort(stable=True))


def on(device, entries):
    return Entries(*(getattr(entries, name).to(device) for name in entries.__dataclass_fields__))


def operands(K, device, dtype, V=40, N=23):
    g = torch.Generator().manual_seed(K)
    # Rows of a wider tensor.
    x, rows = (torch.randn(n, K + 3, generator=g).to(device, dtype)[:, :K] for n in (N, V))
    return x, rows


@pytest.mark.parametrize(
    ("K", "dtype"), cases(WIDTHS, DTYPES, fast=lambda K, dtype: K < 100 or dtype == torch.float32)
)
@pytest.mark.parametrize("device", DEVICES)
def test_dots(device, K, dtype):
    """A bias of -inf is a term of the sum: -inf, and no other entry sees it."""
    entries, (x, rows) = on(device, some_entries()), operands(K, device, dtype)
    if K == 1:
        rows[3] = -math.inf
    begin = torch.randn(len(entries), device=device)
    expected = begin.double() + (x[entries.tokens].double() * rows[entries.ids].double()).sum(1)
    for backend in (torch_backend, triton_backend):
        out = begin.clone()
        backend.entry_dots(x, rows, entries, out)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


# A long segment is one of more than 2 * PART entries. Some begin or end at a multiple of PART,
# others one before or behind it.
PART = triton_entries.PART
SIZES = (0, 1, 2 * PART - 1, 2 * PART, 2 * PART + 1, 1000)
ORDERS = {
    "rising": SIZES,
    "falling": SIZES[::-1],
    "neighbours": (3 * PART, 0, 3 * PART - 1, 2, 2 * PART + 1, 0, 2 * PART + 1, 0),
    "one": (5 * PART + 3,),
    "around_nothing": (0, 0, 8 * PART, 0, 0),
    "wide": (3, 3 * PART),
    "short": (0, 200, 1, 0, 7, 3, 3, 0, 8),
}


def long_segments(sizes, device, dtype, K):
    g = torch.Generator().manual_seed(sum(sizes))
    factors = torch.randn(sum(sizes), generator=g)
    index = torch.randint(9, factors.shape, generator=g)
    factors[::7] = 0.0
    rows = torch.randn(9, K + 3, generator=g).to(device, dtype)[:, :K]  # of a wider tensor
    offsets = torch.tensor((0, *sizes)).cumsum(0)
    return factors.to(device), index.to(device), offsets.to(device), rows


def is_fast(order, K, dtype):
    return (order, K) in (("short", 1), ("short", 16)) or (
        (order, K) in (("neighbours", 50), ("wide", 50)) and dtype == torch.float32
    )


@pytest.mark.parametrize(
    ("order", "K", "dtype"), cases(ORDERS, (50, 1, 16), DTYPES, fast=is_fast), ids=str
)
@pytest.mark.parametrize("device", DEVICES)
def test_sums_of_segments(device, order, K, dtype):
    # Once more columns than a block of entries or of parts has, and more parts than one.
    wide = order == "wide" and dtype == torch.float32
    sizes, K = ORDERS[order], 2050 if wide else K
    factors, index, offsets, rows = long_segments(sizes, device, dtype, K)
    segments = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device)
    expected = torch.zeros(len(sizes), K, dtype=torch.float64, device=device)
    expected.index_add_(0, segments, factors[:, None].double() * rows[index].double())
    for out_dtype in {torch.float32, dtype}:
        results = [
            backend.segment_sums(factors, index, offsets, rows, out_dtype)
            for backend in (triton_backend, triton_backend, torch_backend)
        ]
        assert results[0].equal(results[1]) and results[0].dtype == out_dtype
        unit = 1e-6 if out_dtype == torch.float32 else 2**-7 if INTERPRETED else 2**-8
        for result in results:
            torch.testing.assert_close(result.double(), expected, rtol=unit, atol=1e-4)


@pytest.mark.parametrize("sizes", ((), *ORDERS.values()), ids=("none", *ORDERS))
def test_torch_sums_some_entries_at_a_time(sizes):
    """A slice ends with the segment that has its hundredth entry."""
    offsets = torch.tensor((0, *sizes)).cumsum(0)
    parts = list(torch_backend._segment_slices(offsets, 100))
    assert [i for part in parts for i in range(part.start, part.stop)] == [*range(len(sizes))]
    for part in parts:
        assert sum(sizes[part]) <= 100 + max(sizes[part])

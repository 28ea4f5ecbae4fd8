"""Chunks of big models, of which a few programs run: memory is taken by their rows alone."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from grpo_kernels.kernels import (
    Entries,
    LogitTransform,
    RowGrads,
    torch_backend,
    triton_backend,
    triton_entries,
)
from grpo_kernels.kernels.triton_common import build
from tests.helpers.batches import relative_error
from tests.ptx import EmulatedDriver, SanitizerError

pytestmark = pytest.mark.usefixtures("real_memory")
N, V = 16_384, 151_936
ROWS = torch.tensor([0, 1, 7000, 14_133, 14_134, N - 1])
untouched = torch.empty


@pytest.fixture
def blocks(monkeypatch):
    """Sets which programs of a grid run."""

    def choose(*pairs):
        chosen = np.array([(*pair, 0, 0)[:3] for pair in pairs])
        monkeypatch.setattr(EmulatedDriver.settings, "blocks", lambda grid: chosen)

    return choose


@pytest.fixture
def chunk():
    torch.manual_seed(0)
    x = untouched(N, V, dtype=torch.bfloat16)
    x[ROWS] = (3 * torch.randn(len(ROWS), V)).bfloat16()
    some = torch.randn(5, N)
    grads = RowGrads(5 + some[0].abs(), some[1], some[2], some[3].abs(), some[4])
    return x, torch.randint(V, (N,)), grads


def test_statistics(chunk, blocks):
    x, y, _ = chunk
    assert x.numel() > 2**31
    blocks(*[(row,) for row in ROWS.tolist()])
    truth = torch_backend.token_stats(x[ROWS], y[ROWS], LogitTransform(), entropy=True)
    stats = triton_backend.token_stats(x, y, LogitTransform(), entropy=True)
    for actual, true in zip(stats[:3], truth[:3], strict=True):
        assert relative_error(actual[ROWS], true) <= 1e-6


def test_gradients(chunk, blocks):
    x, y, grads = chunk
    blocks(*[(row,) for row in ROWS.tolist()])
    out, expected = untouched(N, V, dtype=torch.bfloat16), torch.empty(len(ROWS), V)
    triton_backend.logit_grads_(x, y, LogitTransform(), grads, out)
    torch_backend.logit_grads_(x[ROWS].float(), y[ROWS], LogitTransform(), grads.at(ROWS), expected)
    assert relative_error(out[ROWS], expected) <= 2.5e-3


def test_entries_of_a_large_head(blocks):
    count, K, E = 300_000, 8192, 40
    torch.manual_seed(0)
    W, x = (untouched(count, K, dtype=torch.bfloat16) for _ in range(2))
    assert W.numel() > 2**31
    ids, tokens = torch.randint(count, (E,)), torch.randint(count, (E,)).sort().values
    ids[0], tokens[-1] = count - 1, count - 1
    offsets = torch.zeros(count + 1, dtype=torch.int64)
    offsets[1:] = torch.bincount(tokens, minlength=count).cumsum(0)
    W[ids], x[tokens] = torch.randn(E, K).bfloat16(), torch.randn(E, K).bfloat16()
    entries = Entries(ids, tokens, offsets, torch.zeros(count, dtype=torch.int64), ids.argsort())
    out = torch.zeros(E)
    triton_backend.entry_dots(x, W, entries, out)
    assert relative_error(out, (x[tokens].double() * W[ids].double()).sum(1)) <= 1e-6
    segments, factors = tokens.unique(), torch.randn(E)
    blocks(*[(s, c) for s in segments.tolist() for c in range(K // 1024)])
    sums = untouched(count, K, dtype=torch.bfloat16)
    sums[segments] = 0.0
    block_e, block_k, warps = triton_entries._sums_tile(triton_entries.SUMS_LAUNCH, K, 1024)
    triton_entries.segment_sums_kernel[(count, K // 1024)](
        factors, ids, offsets, W, sums, K, K, K,
        PART=triton_entries.PART, BLOCK_E=block_e, BLOCK_K=block_k, **build(warps),
    )  # fmt: skip
    expected = torch.zeros(len(segments), K, dtype=torch.float64)
    places = torch.searchsorted(segments, tokens)
    expected.index_add_(0, places, factors[:, None].double() * W[ids].double())
    assert relative_error(sums[segments], expected) <= 2.5e-3


@triton.jit
def first_of_row(x_ptr, out_ptr, stride):
    row = tl.program_id(0)
    tl.store(out_ptr + row, tl.load(x_ptr + row * stride))


def test_rows_counted_in_32_bits_are_seen(chunk, blocks):
    blocks((N - 1,))
    with pytest.raises(
        SanitizerError, match=r"(overflow of int32|assertion) .*test_real_sizes\.py:\d+"
    ):
        first_of_row[(N,)](chunk[0], torch.zeros(N), V)
    EmulatedDriver.settings.findings.clear()

"""The emulator itself: loops and layouts, and each check against a kernel that is wrong."""

import pytest
import torch
import triton
import triton.language as tl

from tests.ptx import EmulatedDriver, SanitizerError, Settings, mark

BLOCK = 256


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Settings of its own for each test, on the GPU that was asked for."""
    monkeypatch.setattr(EmulatedDriver, "settings", Settings())
    return EmulatedDriver.settings


@triton.jit
def ragged_sums(x_ptr, counts_ptr, out_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    count = tl.load(counts_ptr + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * 1000 + offs, mask=offs < count, other=0.0)
    tl.store(out_ptr + row, tl.sum(total, axis=0))


@pytest.mark.parametrize("order", ("together", "rising", "falling"))
@pytest.mark.parametrize("num_warps", (1, 4, 8))
def test_programs_part_in_loops(num_warps, order, settings):
    settings.order = order
    x, counts = torch.randn(20, 1000), torch.randint(0, 1000, (20,))
    out = torch.zeros(20)
    ragged_sums[(20,)](x, counts, out, BLOCK=128, num_warps=num_warps)
    expected = torch.stack([row[:count].sum() for row, count in zip(x, counts, strict=True)])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@triton.jit
def transpose(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    tl.store(out_ptr + n[:, None] * M + m[None, :], tl.trans(x))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64))
@pytest.mark.parametrize("shape", ((32, 64), (128, 16), (16, 16)))
def test_layouts_are_converted(shape, dtype):
    x = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
    out = torch.zeros(shape[::-1], dtype=dtype)
    transpose[(1,)](x, out, *shape)
    assert torch.equal(out, x.T)


# Kernels that are wrong


@triton.jit
def copy(x_ptr, out_ptr, N, stride, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (offs < N) if MASKED else (offs >= 0)
    tl.store(
        out_ptr + offs * stride, tl.load(x_ptr + offs * stride, mask=mask, other=0.0), mask=mask
    )


def test_memory_of_others_is_not_touched():
    x, out = torch.randn(300), torch.zeros(300)
    copy[(2,)](x, out, 300, 1, BLOCK=BLOCK, MASKED=True)
    assert torch.equal(x, out)
    with pytest.raises(SanitizerError, match=r"out of bounds .*x_ptr, byte 1,200 of 1,200"):
        copy[(2,)](x, out, 300, 1, BLOCK=BLOCK, MASKED=False)


def test_rows_end_where_their_view_does():
    wide = torch.randn(2, 300)
    with pytest.raises(SanitizerError, match="outside the view"):
        copy[(1,)](wide[:, :200], torch.zeros(600)[:256], 256, 1, BLOCK=BLOCK, MASKED=True)


def test_an_offset_that_overflows():
    x = torch.zeros(600)[::2]
    with pytest.raises(SanitizerError, match=r"out of bounds|assertion"):  # of TRITON_DEBUG
        copy[(2,)](x, x, 300, 1 << 23, BLOCK=BLOCK, MASKED=True)


def test_memory_that_nobody_wrote():
    with pytest.raises(SanitizerError, match=r"uninitialised .*x_ptr, element 0"):
        copy[(1,)](mark(torch.empty(256)), torch.zeros(256), 256, 1, BLOCK=BLOCK, MASKED=True)


@triton.jit
def shift(x_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs + 1)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + offs, x)


def test_threads_of_a_block_race():
    x = torch.arange(257.0)
    shift[(1,)](x, BLOCK=BLOCK, BARRIER=True, num_warps=4)
    assert torch.equal(x[:256], torch.arange(1.0, 257))
    with pytest.raises(SanitizerError, match="race: write after read"):
        shift[(1,)](x, BLOCK=BLOCK, BARRIER=False, num_warps=4)


@triton.jit
def add_up(x_ptr, total_ptr, BLOCK: tl.constexpr):
    x = tl.sum(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), axis=0)
    tl.store(total_ptr, tl.load(total_ptr) + x)


def test_blocks_race():
    with pytest.raises(SanitizerError, match="race"):
        add_up[(4,)](torch.randn(1024), torch.zeros(1), BLOCK=BLOCK)


def test_addresses_that_vectors_can_not_have(settings):
    x = torch.zeros(1 + 1024)

    @triton.jit
    def lies(x_ptr, out_ptr, BLOCK: tl.constexpr):
        offs = tl.multiple_of(tl.arange(0, BLOCK) + 1, 16)
        tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + offs))

    with pytest.raises(SanitizerError, match="misaligned"):
        lies[(1,)](x, torch.zeros(1024), BLOCK=1024)


@triton.jit
def without_other(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < N))


def test_masked_elements_are_given_a_value():
    with pytest.raises(SanitizerError, match=r"masked load without other .*test_checks.py:\d+"):
        without_other[(1,)](torch.zeros(100), torch.zeros(256), 100, BLOCK=BLOCK)

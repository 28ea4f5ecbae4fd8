"""Counters of kernels whose sectors, conflicts, barriers and divergence are known."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.ptx import EmulatedDriver, Settings
from tests.ptx.counters import kind_of, traffic_of

LANES = np.arange(64)  # two warps


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Settings of its own for each test, on the GPU that was asked for."""
    monkeypatch.setattr(EmulatedDriver, "settings", Settings(counts=True))
    return EmulatedDriver.settings


@triton.jit
def copy(x_ptr, out_ptr, shift, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + shift + offs * STRIDE))


# Elements between the threads' own, and before the first; sectors and bytes of a warp's request.
@pytest.mark.parametrize(
    ("stride", "shift", "sectors", "moved"),
    [(1, 0, 4, 128), (2, 0, 8, 128), (32, 0, 32, 128), (1, 1, 5, 128), (0, 0, 1, 4)],
    ids=("consecutive", "stride 2", "stride 32", "misaligned by 4 bytes", "one address"),
)
def test_sectors(settings, stride, shift, sectors, moved):
    x, out = torch.zeros(64 * 32 + 1), torch.zeros(64)
    x = x[-(x.data_ptr() % 32) // 4 % 8 :]  # from a sector's begin
    copy[(2,)](x, out, shift, STRIDE=stride, BLOCK=32, num_warps=1)
    counts = settings.counted["copy"]
    load, store = counts.traffic["load"], counts.traffic["store"]
    assert (load.requests, load.sectors, load.requested) == (2, 2 * sectors, 2 * moved)
    assert load.efficiency == moved / (32 * sectors)
    assert (store.requests, store.sectors, store.requested) == (2, 8, 256)
    assert (counts.programs, counts.barriers, counts.divergent_branches) == (2, 0, 0)
    assert (counts.instructions["global load"], counts.instructions["global store"]) == (2, 2)
    (line,) = (t for (_, op), t in counts.traffic_of_lines.items() if op == "ld.global.b32")
    assert (line.sectors, line.requested) == (load.sectors, load.requested)


# Bytes between threads, and of each; turns beyond those that the bytes need, of each warp.
@pytest.mark.parametrize(
    ("stride", "size", "conflicts"),
    [(4, 4, 0), (8, 4, 1), (16, 4, 3), (128, 4, 31), (132, 4, 0), (0, 4, 0), (2, 2, 0),
     (8, 8, 0), (16, 8, 2), (16, 16, 0), (32, 16, 4), (256, 16, 28)],
)  # fmt: skip
def test_banks(stride, size, conflicts):
    addresses = (LANES * stride).astype(np.uint64)
    assert traffic_of(LANES, addresses, size, shared=True).conflicts == 2 * conflicts


def test_threads_that_take_no_part():
    lanes = LANES[[3, 7, 40]]
    traffic = traffic_of(lanes, np.array([0, 128, 128], np.uint64), 4, shared=True)
    assert (traffic.requests, traffic.requested, traffic.conflicts) == (2, 12, 1)


@triton.jit
def branches(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0))
    for _ in range(x):
        tl.debug_barrier()
    tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), x)


def test_barriers_of_programs(settings):
    """Programs part in the loop, which no warp does."""
    branches[(3,)](torch.tensor([1, 2, 5]), torch.zeros(3 * 128), BLOCK=128, num_warps=4)
    counts = settings.counted["branches"]
    assert (counts.programs, counts.barriers, counts.divergent_branches) == (3, 8, 0)


def test_threads_that_part(settings):
    """A branch on a thread's number, which Triton has none of."""
    settings.edit = lambda ptx: ptx.replace(
        "ret;", "mov.u32 %r1, %tid.x;\nsetp.lt.s32 %p1, %r1, 40;\n@%p1 bra $L__x;\n$L__x:\nret;"
    ).replace(".reg .b32", ".reg .pred %p<9>;\n.reg .b32")
    copy[(2,)](torch.zeros(128), torch.zeros(128), 0, STRIDE=1, BLOCK=64, num_warps=2)
    assert settings.counted["copy"].divergent_branches == 2  # threads 32 to 39 of each program


def test_kinds():
    kinds = {
        "ld.global.v4.b32": "global load", "st.shared.b32": "shared memory", "bar.sync": "barrier",
        "fma.rn.f32": "float", "mad.lo.s32": "integer", "setp.lt.f32": "comparison",
        "bra.uni": "branch", "ex2.approx.f32": "special function",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "tensor core",
        "cp.async.cg.shared.global": "asynchronous copy",
    }  # fmt: skip
    assert {op: kind_of(op) for op in kinds} == kinds

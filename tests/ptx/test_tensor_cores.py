"""Products of halves by `mma.sync` of sm_80, pipelined by `cp.async`: results, and what is seen."""

import math
import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.ptx import EmulatedDriver, Settings
from tests.ptx.operations import bf16_to_float
from tests.ptx.test_damages import WRITTEN_FOR
from tests.ptx.test_operations import N, executed

HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


@triton.jit
def gemm_kernel(
    a_ptr, b_ptr, c_ptr,
    M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m0, n0 = tl.program_id(0) * BM, tl.program_id(1) * BN
    offs_m, offs_n, offs_k = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), tl.arange(0, BK)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        inside = offs_k < K - k
        a = tl.load(a_ptrs, mask=(offs_m < M)[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None] & (offs_n < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BK * stride_ak
        b_ptrs += BK * stride_bk
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc, mask=mask)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """The GPU is an A100, with settings of its own for each test."""
    # A loop with assertions in it is not pipelined.
    monkeypatch.setitem(triton.knobs.runtime.__dict__, "debug", False)
    before = triton.runtime.driver.active
    triton.runtime.driver.set_active(EmulatedDriver(80))
    monkeypatch.setattr(EmulatedDriver, "settings", Settings())
    yield EmulatedDriver.settings
    triton.runtime.driver.set_active(before)


def product(a, b, tile=(32, 32, 32), *, num_warps=4, num_stages=3, kernel=gemm_kernel):
    (M, K), N = a.shape, b.shape[1]
    out = torch.full((M, N), float("nan"))
    BM, BN, BK = tile
    kernel[(triton.cdiv(M, BM), triton.cdiv(N, BN))](
        a, b, out, M, N, K, *a.stride(), *b.stride(), BM=BM, BN=BN, BK=BK, STAGES=num_stages,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def operands(M, N, K, dtype=torch.bfloat16, *, pad=0, a_is_transposed=False, b_is_transposed=True):
    """Drawn `[M, K]` and `[K, N]`; rows in memory are `pad` longer than what belongs to them."""
    torch.manual_seed(0)

    def drawn(rows, columns, transposed):
        if transposed:
            return drawn(columns, rows, False).T
        return torch.randn(rows, columns + pad).to(dtype)[:, :columns]

    return drawn(M, K, a_is_transposed), drawn(K, N, b_is_transposed)


def assert_near(out, a, b):
    """Up to float32's rounding of sums of exact products."""
    a, b = a.double(), b.double()
    assert ((out - a @ b).abs() <= 2.0**-21 * (a.abs() @ b.abs())).all()


def fragments(kind, registers):
    """Halves `[N, 2 registers]`, as float64."""
    bits = np.stack(registers, 1).view(np.uint16)
    wide = bf16_to_float(bits) if kind == "bf16" else bits.view(np.float16)
    return wide.astype(np.float64)


def place(operand, lane, i):
    """Row and column of a thread's i-th element, as the manual has them."""
    group, thread = lane // 4, lane % 4
    if operand == "A":
        return group + 8 * (i % 4 > 1), 2 * thread + i % 2 + 8 * (i > 3)
    if operand == "B":
        return 2 * thread + i % 2 + 8 * (i > 1), group
    return group + 8 * (i > 1), 2 * thread + i % 2


MMA = ("mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 {{%r50, %r51, %r52, %r53}}, "
       "{{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{%r6, %r7, %r8, %r6}};")  # fmt: skip


def multiplied(kind, numbers, starts):
    """D `[warps, 16, 8]` of six registers of halves and three of float32 per thread."""
    inputs = [*(x.view(np.uint32) for x in (*numbers, *starts))]
    columns = []
    for k in range(4):
        body = [MMA.format(kind), f"mov.b32 %r9, %r{50 + k};"]
        out, machine = executed("", ["b32"] * 9, inputs, "b32", body=body)
        assert not machine.findings
        columns.append(out.view(np.float32))
    d = np.zeros((N // 32, 16, 8), np.float32)
    for n in range(N):
        for k in range(4):
            row, column = place("C", n % 32, k)
            d[n // 32, row, column] = columns[k][n]
    return d


@pytest.mark.parametrize("kind", HALVES)
def test_a_product_of_fragments(kind):
    """Against sums without any rounding; subnormal halves are among them."""
    g = np.random.default_rng(0)
    pairs = g.standard_normal((6, N, 2)) * np.exp2(g.integers(-9, 4, (6, N, 2)))
    pairs[:, ::5] *= 1e-6 if kind == "f16" else 1e-39
    pairs = torch.tensor(pairs).to(HALVES[kind]).view(torch.int16).numpy()
    numbers = [np.ascontiguousarray(x).view(np.uint32).ravel() for x in pairs]
    starts = [g.standard_normal(N).astype(np.float32) for _ in range(3)]
    a, b = fragments(kind, numbers[:4]), fragments(kind, numbers[4:])
    matrices = {"A": np.zeros((4, 16, 16)), "B": np.zeros((4, 16, 8)), "C": np.zeros((4, 16, 8))}
    c = np.stack([*starts, starts[0]], 1)
    for name, held in (("A", a), ("B", b), ("C", c)):
        for n in range(N):
            for i, x in enumerate(held[n]):
                row, column = place(name, n % 32, i)
                matrices[name][n // 32, row, column] = x
    d = multiplied(kind, numbers, starts)
    for warp, row, column in np.ndindex(d.shape):
        products = matrices["A"][warp, row] * matrices["B"][warp, :, column]
        expected = math.fsum([*products, matrices["C"][warp, row, column]])
        assert d[warp, row, column] == np.float32(expected)


def test_infinity_and_nan_go_through():
    """An infinite element of A, in row 0, times zeros and ones; NaN in C, in row 9."""
    one, inf = 0x3F80, 0x7F80
    numbers = [np.full(N, one << 16 | one, np.uint32) for _ in range(6)]
    lanes = np.arange(N) % 32
    numbers[0][lanes == 0] = one << 16 | inf  # row 0, column 0
    numbers[4][lanes == 4] = one << 16  # row 0, column 1
    starts = [np.zeros(N, np.float32) for _ in range(3)]
    starts[2][lanes == 5] = np.nan  # row 9, column 2
    d = multiplied("bf16", numbers, starts)
    assert np.isnan(d[:, 0, 1]).all() and np.isnan(d[:, 9, 2]).all()
    assert (d[:, 0, [0, 2, 3, 4, 5, 6, 7]] == np.inf).all()
    assert (d[:, 1:, 1] == 15).all() and np.isnan(d).sum() == 2 * len(d)


def test_other_products_are_refused():
    for line in (
        MMA.format("f16").replace("f32 {", "f16 {"), MMA.format("tf32"),
        MMA.format("bf16").replace("m16n8k16", "m16n8k8"), MMA.format("bf16").replace(", %r5", ""),
        "@%p0 " + MMA.format("bf16"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=r"mma\.sync"):
            executed("", ["b32"], [np.zeros(N, np.uint32)], "b32", body=[line])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("b_is_transposed", (True, False), ids=("W.T", "W"))
@pytest.mark.parametrize("a_is_transposed", (False, True), ids=("h", "h.T"))
def test_products(dtype, a_is_transposed, b_is_transposed, settings):
    a, b = operands(80, 112, 112, HALVES[dtype], a_is_transposed=a_is_transposed,
                    b_is_transposed=b_is_transposed)  # fmt: skip
    assert_near(product(a, b, (64, 32, 32)), a, b)
    used = settings.opcodes
    for name in (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32", "cp.async.cg.shared.global",
        "cp.async.commit_group", "cp.async.wait_group",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
    ):  # fmt: skip
        # Both may be transposed.
        needed = name[:8] != "ldmatrix" or not a_is_transposed or b_is_transposed
        assert used[name] or not needed, name
    transposes = used["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"] > 0
    assert transposes == (a_is_transposed or not b_is_transposed)


@pytest.mark.parametrize(
    ("shape", "tile", "num_warps", "num_stages", "pad"),
    [
        ((64, 320, 96), (64, 64, 32), 4, 3, 0),
        ((64, 320, 96), (128, 128, 64), 8, 3, 0),
        ((33, 70, 56), (16, 16, 16), 1, 2, 0),
        ((33, 70, 56), (16, 16, 16), 4, 4, 0),  # more warps than fragments
        ((50, 70, 61), (32, 64, 64), 4, 3, 3),  # rows that end within a vector
        ((50, 70, 61), (32, 64, 64), 4, 3, 0),  # nothing is aligned, nor copied in the background
        ((5, 3, 8), (32, 32, 32), 4, 3, 0),  # one step, of two that are loaded before the first
    ],
)
def test_shapes(shape, tile, num_warps, num_stages, pad, settings):
    a, b = operands(*shape, pad=pad)
    assert_near(product(a, b, tile, num_warps=num_warps, num_stages=num_stages), a, b)


@pytest.mark.parametrize("order", ("rising", "falling", 1))
def test_orders_of_warps_do_not_matter(order, settings):
    a, b = operands(40, 48, 96)
    expected = product(a, b)
    settings.order = order
    assert torch.equal(product(a, b), expected)


def test_sums_that_are_cut(settings):
    """Other bits, by a few units in the last place of the addends."""
    a, b = operands(40, 48, 96)
    exact, settings.error = product(a, b), 1.0
    cut, size = product(a, b), a.double().abs() @ b.double().abs()
    assert not torch.equal(cut, exact)
    assert ((cut - exact).abs() <= 2.0**-19 * size).all()


# K has 4 steps, which fill each of two buffers twice.
MATRIX = r"(ldmatrix\S+ \{[^}]*\}, \[%r\d+)(?:\+\d+)?\]"
COPY_TO = r"(cp\.async\.cg\S+ \[ %r\d+) \+ 0"
COPY_FROM = r"(cp\.async\.cg\S+ \[[^]]*\], \[ %rd\d+) \+ 0"
NOT_WAITED = "read of a copy that was not waited for"
# fault: (pattern in the PTX, replacement, index of the match, finding)
DAMAGES = {
    "a wait is dropped": (r"cp\.async\.wait_group\s+2;", "", 0, NOT_WAITED),
    "a wait is for too few": (r"(cp\.async\.wait_group\s+)2;", r"\g<1>3;", 0, NOT_WAITED),
    "a group is not closed": (r"cp\.async\.commit_group;", "", -1, NOT_WAITED),
    "nobody waits for the others' copies": (
        r"(cp\.async\.wait_group\s+2;\s*)bar\.sync\s+0;", r"\1", 0, "race: read after write"),
    "a buffer is filled while others read": (
        r"(mma(?:.*\n)(?:(?!mma|\$L).*\n)*?)\s*bar\.sync\s+0;", r"\1", -1,
        "race: write after read"),
    "a copy is dropped": (
        r"^.*cp\.async\.cg.*$", "", 0, "uninitialised shared memory"),
    "a copy goes out of its block's memory": (
        COPY_TO, r"\1 + 65536", 0, "shared memory: out of bounds or misaligned"),
    "a copy goes to where no vector can be": (
        COPY_TO, r"\1 + 8", 0, "shared memory: out of bounds or misaligned"),
    "a copy is from behind a matrix": (COPY_FROM, r"\1 + 65536", 0, "out of bounds"),
    "a copy is from before a matrix": (COPY_FROM, r"\1 + -65536", 1, "out of bounds"),
    "a copy is from where no vector can be": (COPY_FROM, r"\1 + 4", 0, "misaligned"),
    "a copy is not masked": (
        r"(cp\.async\.cg.*, 0x10), %r\d+;", r"\1, 0x10;", -1, "out of bounds"),
    "a copy reads more than it writes": (
        r"(cp\.async\.cg.*, 0x10), %r\d+;", r"\1, 0x20;", 0, "copy of more than it writes"),
    "a matrix is out of the block's memory": (
        MATRIX, r"\1+65536]", 0, "shared memory: out of bounds or misaligned"),
    "a matrix begins within a row": (MATRIX, r"\1+8]", 0, "misaligned"),
    "a matrix is transposed": (
        r"(ldmatrix\S+x4)(\.shared)", r"\1.trans\2", 0, None),
    "a product is dropped": (r"^\s*mma\.sync.*$", "", 0, None),
    "a product takes another's half": (
        r"(mma\S+ \{[^}]*\}, \{[^}]*\}, )\{ (%r\d+), (%r\d+) \}", r"\1{ \3, \2 }", 0, None),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_damages_are_seen(what, settings):
    pattern, new, at, kind = DAMAGES[what]
    settings.strict, edited = False, []

    def edit(ptx):
        places = list(re.finditer(pattern, ptx, re.M))
        if not places and triton.__version__ != WRITTEN_FOR[0]:
            pytest.skip(f"nothing like it is in the PTX of {triton.__version__}")
        place = places[at]
        edited.append(what)
        return ptx[: place.start()] + place.expand(new) + ptx[place.end() :]

    a, b = operands(40, 48, 112)
    expected = product(a, b)
    assert not settings.findings
    settings.edit = edit
    out = product(a, b)
    assert edited
    if kind is None:
        assert not torch.allclose(out, expected)
    else:
        assert kind in {finding.kind for finding in settings.findings}


def test_each_wait_and_barrier_is_needed(settings):
    """All but the first barrier, with nothing before it."""
    settings.strict, seen, count = False, [], 1

    def edit(ptx):
        waits = list(re.finditer(r"^\s*(?:bar\.sync|cp\.async\.wait_group)\b[^;]*;", ptx, re.M))
        nonlocal count
        count, place = len(waits), waits[number]
        return ptx[: place.start()] + ptx[place.end() :]

    a, b = operands(40, 48, 112)
    settings.edit, number = edit, 0
    while number < count:
        product(a, b)
        if settings.findings:
            seen.append(number)
        settings.findings.clear()
        number += 1
    if triton.__version__ == WRITTEN_FOR[0]:
        assert count == 7
    assert seen == list(range(1, count))


@pytest.mark.parametrize("capability", (90, 100))
def test_newer_tensor_cores_are_refused(capability):
    triton.runtime.driver.set_active(EmulatedDriver(capability))
    a, b = operands(128, 128, 128)
    with pytest.raises(NotImplementedError, match=r"wgmma|tcgen05|mbarrier|fence"):
        product(a, b, (128, 128, 64), kernel=triton.jit(gemm_kernel.fn))

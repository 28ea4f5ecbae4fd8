"""An experiment: the logits' GEMM stores their exponentials and sums, and no sweep follows.

With U = h @ W.T, never stored, and a the target's entry of each row, from one dot product,

    X = e^(U - a) [M, V],   S = sum_j X_j,   log p_y = u_y - a - log S,   lse = a + log S,
    E = log S - sum_j X_j (u_j - a) / S

as the library's sweep over stored logits leaves them (`triton_logits.py`), but for the anchor. The
target's entry of X becomes (p_y - 1) S, so that a gradient g by the log-probs takes two GEMMs more:

    dh = r o (X W),   dW = X^T (r o h),   r = -g / S

A tile's sums are stored per row, and added up in the order of the tiles. A row whose S passes 2^86,
whose target is that unlikely, is computed again by the library's sweep.

`python -m benchmarks.gpu_day --json day.json --parts exp_gemm gemms sweep` compares it with float64
and times it beside `torch.mm`; the other two parts time the library's GEMM and sweep. bf16
operands; float32 in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from grpo_kernels.kernels import Entries, LogitTransform, TokenStats
from grpo_kernels.kernels.triton_common import at_most, build, device_of, expm1, ln_2, log2_e
from grpo_kernels.kernels.triton_entries import entry_dots
from grpo_kernels.kernels.triton_logits import token_stats

# A sum of exponentials beyond which there may be none left in float32.
MOST = 2.0**86


class Tile(NamedTuple):
    """The rows, columns and inner elements that a program multiplies at a time, and how."""

    rows: int
    columns: int
    inner: int
    warps: int = 8
    stages: int = 3
    parts: int = 1  # of the columns, one after another, as registers hold no more
    tma: bool = False  # operands come by the tensor memory accelerator
    per_sm: int = 1  # programs of an SM: one multiplies while another one stores


# Per major compute capability: tiles that do not spill (`results/compile.md`); none is timed.
TILES = {
    8: (Tile(128, 128, 64), Tile(128, 64, 64, per_sm=2)),
    9: (
        Tile(128, 256, 64, stages=4, parts=2, tma=True),
        Tile(128, 128, 64, stages=4, tma=True),
        Tile(128, 128, 64, parts=2, tma=True, per_sm=2),
    ),
    10: (Tile(128, 128, 64, stages=4, tma=True), Tile(128, 128, 64, parts=2, tma=True, per_sm=2)),
}
SMALL = (Tile(16, 32, 16, warps=4), Tile(32, 64, 16, parts=2, warps=2))  # for the interpreter
# Tiles of rows that go over the whole vocabulary together: 8 MB of states, which stay in L2.
_GROUP = 16
_ROWS_TO_ADD = 32
# A wrong kernel is off by far more; bf16 rounds X by up to 2^-9.
LARGEST = 5e-3


@triton.jit
def _store_exps(u, n0, M, V, rows, stride_exps_n, BLOCK_V: tl.constexpr):
    """Stores the exponentials of a tile of logits; returns the sums of its rows."""
    offs_m, anchor, target, exps_ptr, target_logits_ptr = rows
    offs_v = n0 + tl.arange(0, BLOCK_V)
    in_tile = (target >= n0) & (target < n0 + BLOCK_V) & (offs_m < M)
    # Few tiles have a target at all.
    if tl.max(in_tile.to(tl.int32), axis=0) > 0:
        at_target = tl.sum(tl.where(offs_v[None, :] == target[:, None], u, 0.0), axis=1)
        tl.store(target_logits_ptr + offs_m, at_target, mask=in_tile)
    # Columns past V are so far below that x and x 2^x are 0.
    shifted = tl.where((offs_v < V)[None, :], (u - anchor[:, None]) * log2_e(), -1e4)
    exps = tl.exp2(shifted)
    total, weighted = tl.sum(exps, axis=1), tl.sum(exps * shifted, axis=1)
    exps_ptrs = exps_ptr + offs_m.to(tl.int64)[:, None] * stride_exps_n + offs_v[None, :]
    inside = (offs_m < M)[:, None] & (offs_v < V)[None, :]
    tl.store(exps_ptrs, exps.to(exps_ptr.dtype.element_ty), mask=inside)
    return total, weighted


@triton.jit
def exp_gemm_kernel(
    hidden_ptr, weight_ptr, targets_ptr, anchors_ptr,
    exps_ptr, target_logits_ptr, sums_ptr,
    M, V, H,
    stride_hidden_n, stride_weight_v, stride_exps_n,
    GROUP: tl.constexpr, PARTS: tl.constexpr, TMA: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_v = tl.cdiv(M, BLOCK_N), tl.cdiv(V, BLOCK_V)
    for tile in range(tl.program_id(0), tiles_m * tiles_v, tl.num_programs(0)):
        # Down the rows of a group first: their next columns of the weight are the same.
        group = tile // (GROUP * tiles_v)
        size = tl.minimum(tiles_m - group * GROUP, GROUP)
        within = tile - group * GROUP * tiles_v
        m0 = (group * GROUP + within % size) * BLOCK_N
        tile_v = within // size
        n0 = tile_v * BLOCK_V
        offs_m = m0 + tl.arange(0, BLOCK_N)
        u = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        if TMA:
            for k in tl.range(0, H, BLOCK_H, num_stages=STAGES):
                rows = hidden_ptr.load([m0, k])
                u = tl.dot(rows, weight_ptr.load([n0, k]).T, u)
        else:
            offs_v = n0 + tl.arange(0, BLOCK_V)
            offs_h = tl.arange(0, BLOCK_H)
            # Rows past the last one are the last one again, which nobody stores.
            row_offsets = tl.minimum(offs_m, M - 1).to(tl.int64)[:, None] * stride_hidden_n
            column_offsets = tl.minimum(offs_v, V - 1).to(tl.int64)[None, :] * stride_weight_v
            hidden_ptrs = hidden_ptr + row_offsets + offs_h[None, :]
            weight_ptrs = weight_ptr + column_offsets + offs_h[:, None]
            for k in tl.range(0, H, BLOCK_H, num_stages=STAGES):
                inside = offs_h < H - k
                rows = tl.load(hidden_ptrs + k, mask=inside[None, :], other=0.0)
                columns = tl.load(weight_ptrs + k, mask=inside[:, None], other=0.0)
                u = tl.dot(rows, columns, u, input_precision=PRECISION)
        anchor = tl.load(anchors_ptr + offs_m, mask=offs_m < M, other=0.0)
        target = tl.load(targets_ptr + offs_m, mask=offs_m < M, other=-1)
        out = offs_m, anchor, target, exps_ptr, target_logits_ptr
        if PARTS == 2:
            HALF: tl.constexpr = BLOCK_V // 2
            left, right = tl.split(tl.permute(tl.reshape(u, (BLOCK_N, 2, HALF)), (0, 2, 1)))
            total, weighted = _store_exps(left, n0, M, V, out, stride_exps_n, HALF)
            more, more_weighted = _store_exps(right, n0 + HALF, M, V, out, stride_exps_n, HALF)
            total, weighted = total + more, weighted + more_weighted
        else:
            total, weighted = _store_exps(u, n0, M, V, out, stride_exps_n, BLOCK_V)
        # [tiles, 2, M]: one owner per place.
        out_ptrs = sums_ptr + tile_v.to(tl.int64) * 2 * M + offs_m
        tl.store(out_ptrs, total, mask=offs_m < M)
        tl.store(out_ptrs + M, weighted, mask=offs_m < M)


@triton.jit
def exp_stats_kernel(
    targets_ptr, anchors_ptr, target_logits_ptr, sums_ptr,
    logps_ptr, logsumexp_ptr, entropy_ptr, total_ptr, exps_ptr,
    M, TILES_V,
    stride_exps_n,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds up the tiles of some rows, and stores statistics and the target's entry of X."""
    offs_m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < M
    total = tl.zeros((BLOCK_N,), tl.float32)
    weighted = tl.zeros((BLOCK_N,), tl.float32)
    for tile in range(0, TILES_V):
        sums_ptrs = sums_ptr + tl.cast(tile, tl.int64) * 2 * M + offs_m
        total += tl.load(sums_ptrs, mask=mask_m, other=0.0)
        weighted += tl.load(sums_ptrs + M, mask=mask_m, other=0.0)
    anchor = tl.load(anchors_ptr + offs_m, mask=mask_m, other=0.0)
    target_logit = tl.load(target_logits_ptr + offs_m, mask=mask_m, other=0.0)
    log_total = tl.log2(total)
    logp = target_logit - anchor - log_total * ln_2()
    tl.store(logps_ptr + offs_m, logp, mask=mask_m)
    tl.store(logsumexp_ptr + offs_m, anchor + log_total * ln_2(), mask=mask_m)
    tl.store(entropy_ptr + offs_m, (log_total - weighted / total) * ln_2(), mask=mask_m)
    tl.store(total_ptr + offs_m, total, mask=mask_m)
    target = tl.load(targets_ptr + offs_m, mask=mask_m, other=0)
    at_target = (total * expm1(logp)).to(exps_ptr.dtype.element_ty)
    tl.store(exps_ptr + offs_m.to(tl.int64) * stride_exps_n + target, at_target, mask=mask_m)


def exp_gemm(
    hidden: Tensor, weight: Tensor, targets: Tensor, exps: Tensor, out: TokenStats, *, tile: Tile
) -> None:
    """Writes X of `hidden [M, H]` and `weight [V, H]` to `exps [M, V]`, their statistics to `out`.

    Rows of all matrices lie together. Every target is a column.
    """
    (M, H), V = hidden.shape, len(weight)
    # Each target's logit, by a dot product.
    anchors, each = hidden.new_zeros(M, dtype=torch.float32), torch.arange(M, device=hidden.device)
    entry_dots(hidden, weight, Entries(targets, each, each, each, each), anchors)
    target_logits, tiles_v = torch.empty_like(anchors), triton.cdiv(V, tile.columns)
    sums = anchors.new_empty((tiles_v, 2, M))
    programs = triton.cdiv(M, tile.rows) * tiles_v
    if hidden.device.type == "cuda":
        sms = torch.cuda.get_device_properties(hidden.device).multi_processor_count
        programs = min(programs, tile.per_sm * sms)
    how: dict[str, Any] = build(tile.warps)
    if tile.per_sm > 1:
        how |= at_most(65_536 // (32 * tile.warps * tile.per_sm), hidden)
    operands: tuple[Any, ...] = hidden, weight
    if tma := tile.tma and all(x.stride(0) % 8 == x.data_ptr() % 16 == 0 for x in operands):
        blocks = ([tile.rows, tile.inner], [tile.columns, tile.inner])
        operands = tuple(map(TensorDescriptor.from_tensor, operands, blocks))
    strides = hidden.stride(0), weight.stride(0), exps.stride(0)
    with device_of(hidden):
        exp_gemm_kernel[(programs,)](
            *operands, targets, anchors, exps, target_logits, sums, M, V, H, *strides,
            GROUP=_GROUP, PARTS=tile.parts, TMA=tma, STAGES=tile.stages,
            PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32",
            BLOCK_N=tile.rows, BLOCK_V=tile.columns, BLOCK_H=tile.inner, **how,
        )  # fmt: skip
        exp_stats_kernel[(triton.cdiv(M, _ROWS_TO_ADD),)](
            targets, anchors, target_logits, sums, out.logps, out.logsumexp, out.entropy, out.total,
            exps, M, tiles_v, exps.stride(0), BLOCK_N=_ROWS_TO_ADD, **build(1),
        )  # fmt: skip
    total: Any = out.total
    far = total >= MOST  # not NaN, which would be NaN again
    if far.any():
        logits, x = hidden[far].float() @ weight.float().T, exps[far]
        stats = token_stats(logits, targets[far], LogitTransform(), entropy=True, exps=x)
        every: Any = zip((exps, *out), (x, *stats), strict=True)
        for rows, again in every:
            rows[far] = again


def operands(
    M: int, V: int, H: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Makes hidden states, others with peaks in the second half of the columns, weight, targets.

    Of four rows the second has a peak, the third its target there, the fourth none; in every 64th
    row from the fourth on the peak is out of the target's reach.
    """
    g = torch.Generator(device).manual_seed(0)
    like: dict[str, Any] = {"generator": g, "device": device}
    weight = (torch.randn(V, H, dtype=torch.float32, **like) / H**0.5).to(dtype)
    hidden = 2 * torch.randn(M, H, dtype=torch.float32, **like)
    targets, peaks = torch.randint(V, (M,), **like), torch.randint(V // 2, V, (M,), **like)
    rows = torch.arange(M, device=device)
    heights = 15.0 * ((rows % 4 == 1) | (rows % 4 == 2)) + 200.0 * (rows % 64 == 3)
    peaked = (hidden + heights[:, None] * weight[peaks]).to(dtype)
    return hidden.to(dtype), peaked, weight, torch.where(rows % 4 == 2, peaks, targets)


def errors(
    hidden: Tensor, weight: Tensor, targets: Tensor, exps: Tensor, out: TokenStats
) -> dict[str, float]:
    """Returns the largest errors of X and the statistics of about 64 rows, by float64."""
    rows = torch.arange(0, len(hidden), len(hidden) // 64 | 1, device=hidden.device)
    logits, at = hidden[rows].double() @ weight.double().T, targets[rows, None]
    log_p = logits.log_softmax(1)
    logps, p = log_p.gather(1, at), log_p.exp()
    total: Any = out.total
    X = exps[rows].double() / total[rows, None]
    # Each entry is right, those of rare words as well; but for what float32 has no number for.
    size = (p + 1e-30).scatter(1, at, 1.0)
    off = {
        "logps": out.logps[rows, None] - logps,
        "logsumexp": out.logsumexp[rows] - logits.logsumexp(1),
        "entropy": out.entropy[rows] + (p * log_p).sum(1),  # type: ignore[index]
        "X": (X - p.scatter(1, at, logps.expm1())) / size,
    }
    return {name: float(x.abs().max()) for name, x in off.items()}

"""A GEMM that leaves exponentials of logits, and statistics of their rows, in place of the logits.

With u = hidden @ weight.T, never stored, z = u * logit_scale / T and a the target's z,

    X = e^(z - a) [C, V],   S = sum_j X_j,   lse = a + log S,   E = log S - sum_j X_j (z_j - a) / S

as the sweep over stored logits leaves them (`triton_logits.py`), but for the anchor: the target's
logit is known beforehand, from one dot product per row, so that a tile of the GEMM needs nothing of
the others. Its sums are stored per tile and row, and added up in the order of the tiles: a row's
bits depend on no other row. A row whose S passes 2^86, whose target is that unlikely, is computed
again from its largest logit, by a program of its own.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import Entries, LogitTransform, TokenStats
from .triton_common import build, device_of, expm1, ln_2, log2_e
from .triton_entries import entry_dots
from .triton_logits import _scale, temperature_pointer, transform_scalars


@triton.constexpr_function
def most():
    """A sum of exponentials beyond which there may be none left in float32, as by `reach`."""
    return 2.0**86


class Tile(NamedTuple):
    """The rows, columns and inner elements that a program multiplies at a time, and how."""

    rows: int
    columns: int
    inner: int
    warps: int = 8
    stages: int = 3
    parts: int = 1  # of the columns, one after another, as registers hold no more
    tma: bool = False  # operands come by the tensor memory accelerator


# By compute capability, major and minor or major alone: without a spill (`benchmarks`), not timed.
TILES = {
    (8,): Tile(128, 128, 64),
    (8, 6): Tile(128, 128, 32),
    (8, 9): Tile(128, 128, 32),
    (9,): Tile(128, 256, 64, stages=4, parts=2, tma=True),
    (10,): Tile(128, 128, 64, stages=4, tma=True),
    (12,): Tile(128, 128, 64),
}
_INTERPRETED = Tile(32, 64, 32)
# Tiles of rows that go over the whole vocabulary together: 8 MB of states, which stay in L2.
_GROUP = 16
_ROWS_TO_ADD, _FAR_COLUMNS, _FAR_INNER = 32, 32, 128

_PER_ROW = [
    f"{name}_ptr"
    for name in ("targets", "temperature", "anchors", "target_logits", "sums", "logps",
                 "logsumexp", "entropy", "total")
]  # fmt: skip
per_row = triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=_PER_ROW)


@triton.jit
def _leave(
    u, offs_m, n0, M, V, anchor, target, to_log2, exps_ptr, target_logits_ptr, stride_exps_n,
    HAS_ENTROPY: tl.constexpr, KEEPS_EXPS: tl.constexpr, WHOLE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Stores the exponentials of a tile of raw logits; returns the sums of its rows."""
    offs_v = n0 + tl.arange(0, BLOCK_V)
    shifted = (u - anchor[:, None]) * to_log2
    mask_v = WHOLE | (offs_v < V)
    if not WHOLE:
        # Columns past V are no part of the vocabulary: -inf, where 0 would be a logit.
        shifted = tl.where(mask_v[None, :], shifted, float("-inf"))
    exps = tl.exp2(shifted)
    total = tl.sum(exps, axis=1)
    weighted = total
    if HAS_ENTROPY:
        # p * log p is 0 where p is, and -inf must not make it NaN.
        least = tl.maximum(shifted, -1e4, propagate_nan=tl.PropagateNan.ALL)
        weighted = tl.sum(exps * least, axis=1)
    here = (target >= n0) & (target < n0 + BLOCK_V) & (offs_m < M)
    # Few tiles have a target at all.
    if tl.max(here.to(tl.int32), axis=0) > 0:
        own = tl.sum(tl.where(offs_v[None, :] == target[:, None], u, 0.0), axis=1)
        tl.store(target_logits_ptr + offs_m, own, mask=here)
    if KEEPS_EXPS:
        exps_ptrs = exps_ptr + offs_m.to(tl.int64)[:, None] * stride_exps_n + offs_v[None, :]
        kept = exps.to(exps_ptr.dtype.element_ty)
        tl.store(exps_ptrs, kept, mask=(offs_m < M)[:, None] & mask_v[None, :])
    return total, weighted


@per_row
def exp_gemm_kernel(
    hidden_ptr, weight_ptr, targets_ptr, anchors_ptr, temperature_ptr,
    exps_ptr, target_logits_ptr, sums_ptr,
    M, V, H,
    stride_hidden_n, stride_weight_v, stride_exps_n,
    logit_scale, temperature,
    HAS_TEMPERATURE: tl.constexpr, HAS_ENTROPY: tl.constexpr, KEEPS_EXPS: tl.constexpr,
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
            of_rows = tl.minimum(offs_m, M - 1).to(tl.int64)[:, None] * stride_hidden_n
            of_columns = tl.minimum(offs_v, V - 1).to(tl.int64)[None, :] * stride_weight_v
            hidden_ptrs = hidden_ptr + of_rows + offs_h[None, :]
            weight_ptrs = weight_ptr + of_columns + offs_h[:, None]
            for k in tl.range(0, H, BLOCK_H, num_stages=STAGES):
                inside = offs_h < H - k
                rows = tl.load(hidden_ptrs + k, mask=inside[None, :], other=0.0)
                columns = tl.load(weight_ptrs + k, mask=inside[:, None], other=0.0)
                u = tl.dot(rows, columns, u, input_precision=PRECISION)
        anchor = tl.load(anchors_ptr + offs_m, mask=offs_m < M, other=0.0)
        target = tl.load(targets_ptr + offs_m, mask=offs_m < M, other=-1)
        to_log2 = _scale(logit_scale, temperature, False) * log2_e()
        if HAS_TEMPERATURE:
            T = tl.load(temperature_ptr + offs_m, mask=offs_m < M, other=1.0)
            to_log2 = (_scale(logit_scale, T, False) * log2_e())[:, None]
        if PARTS == 2:
            halves = tl.permute(tl.reshape(u, (BLOCK_N, 2, BLOCK_V // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            first, first_weighted = _leave_either(
                left, offs_m, n0, M, V, anchor, target, to_log2, exps_ptr, target_logits_ptr,
                stride_exps_n, HAS_ENTROPY, KEEPS_EXPS, BLOCK_V // 2,
            )  # fmt: skip
            second, second_weighted = _leave_either(
                right, offs_m, n0 + BLOCK_V // 2, M, V, anchor, target, to_log2, exps_ptr,
                target_logits_ptr, stride_exps_n, HAS_ENTROPY, KEEPS_EXPS, BLOCK_V // 2,
            )  # fmt: skip
            total, weighted = first + second, first_weighted + second_weighted
        else:
            total, weighted = _leave_either(
                u, offs_m, n0, M, V, anchor, target, to_log2, exps_ptr, target_logits_ptr,
                stride_exps_n, HAS_ENTROPY, KEEPS_EXPS, BLOCK_V,
            )  # fmt: skip
        # [tiles, 2, M]: one owner per place.
        out_ptrs = sums_ptr + tile_v.to(tl.int64) * 2 * M + offs_m
        tl.store(out_ptrs, total, mask=offs_m < M)
        if HAS_ENTROPY:
            tl.store(out_ptrs + M, weighted, mask=offs_m < M)


@triton.jit
def _leave_either(
    u, offs_m, n0, M, V, anchor, target, to_log2, exps_ptr, target_logits_ptr, stride_exps_n,
    HAS_ENTROPY: tl.constexpr, KEEPS_EXPS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The same, without masks where all columns are there."""
    if n0 + BLOCK_V <= V:
        total, weighted = _leave(
            u, offs_m, n0, M, V, anchor, target, to_log2, exps_ptr, target_logits_ptr,
            stride_exps_n, HAS_ENTROPY, KEEPS_EXPS, True, BLOCK_V,
        )  # fmt: skip
    else:
        total, weighted = _leave(
            u, offs_m, n0, M, V, anchor, target, to_log2, exps_ptr, target_logits_ptr,
            stride_exps_n, HAS_ENTROPY, KEEPS_EXPS, False, BLOCK_V,
        )  # fmt: skip
    return total, weighted


@per_row
def exp_stats_kernel(
    targets_ptr, anchors_ptr, temperature_ptr, target_logits_ptr, sums_ptr,
    logps_ptr, logsumexp_ptr, entropy_ptr, total_ptr, exps_ptr,
    M, TILES_V,
    stride_exps_n,
    logit_scale, temperature,
    HAS_TEMPERATURE: tl.constexpr, HAS_ENTROPY: tl.constexpr, KEEPS_EXPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds up the tiles of some rows, and sets the target's entry of their exponentials."""
    offs_m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = offs_m < M
    total = tl.zeros((BLOCK_N,), tl.float32)
    weighted = tl.zeros((BLOCK_N,), tl.float32)
    for tile in range(0, TILES_V):
        sums_ptrs = sums_ptr + tl.cast(tile, tl.int64) * 2 * M + offs_m
        total += tl.load(sums_ptrs, mask=mask_m, other=0.0)
        if HAS_ENTROPY:
            weighted += tl.load(sums_ptrs + M, mask=mask_m, other=0.0)
    anchor = tl.load(anchors_ptr + offs_m, mask=mask_m, other=0.0)
    own = tl.load(target_logits_ptr + offs_m, mask=mask_m, other=0.0)
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + offs_m, mask=mask_m, other=1.0)
    scale = _scale(logit_scale, temperature, False)
    log_total = tl.log2(total)
    logp = (own - anchor) * scale - log_total * ln_2()
    tl.store(logps_ptr + offs_m, logp, mask=mask_m)
    tl.store(logsumexp_ptr + offs_m, anchor * scale + log_total * ln_2(), mask=mask_m)
    if HAS_ENTROPY:
        tl.store(entropy_ptr + offs_m, (log_total - weighted / total) * ln_2(), mask=mask_m)
    tl.store(total_ptr + offs_m, total, mask=mask_m)
    if KEEPS_EXPS:
        target = tl.load(targets_ptr + offs_m, mask=mask_m, other=0)
        at_target = (total * expm1(logp)).to(exps_ptr.dtype.element_ty)
        tl.store(exps_ptr + offs_m.to(tl.int64) * stride_exps_n + target, at_target, mask=mask_m)


@triton.jit
def _raw_logits(hidden_row_ptr, weight_ptr, offs_v, V, H, stride_weight_v, BLOCK_H: tl.constexpr):
    """Raw logits of one row, in products of float32; 0 past V."""
    mask_v = offs_v < V
    sums = tl.zeros((offs_v.shape[0], BLOCK_H), tl.float32)
    rows_ptrs = weight_ptr + offs_v.to(tl.int64)[:, None] * stride_weight_v
    for k in range(0, H, BLOCK_H):
        offs_h = k + tl.arange(0, BLOCK_H)
        mask = mask_v[:, None] & (offs_h < H)[None, :]
        x = tl.load(hidden_row_ptr + offs_h, mask=offs_h < H, other=0.0).to(tl.float32)
        sums += x[None, :] * tl.load(rows_ptrs + offs_h[None, :], mask=mask, other=0.0)
    return tl.sum(sums, axis=1)


@per_row
def far_rows_kernel(
    hidden_ptr, weight_ptr, targets_ptr, anchors_ptr, temperature_ptr,
    logps_ptr, logsumexp_ptr, entropy_ptr, total_ptr, exps_ptr,
    V, H,
    stride_hidden_n, stride_weight_v, stride_exps_n,
    logit_scale, temperature,
    HAS_TEMPERATURE: tl.constexpr, HAS_ENTROPY: tl.constexpr, KEEPS_EXPS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Computes a row again whose sum is out of reach, from its largest logit."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(total_ptr + row)
    # NaN stays, as its logits would be NaN again.
    if total >= most():
        hidden_row_ptr = hidden_ptr + row * stride_hidden_n
        exps_row_ptr = exps_ptr + row * stride_exps_n
        if HAS_TEMPERATURE:
            temperature = tl.load(temperature_ptr + row)
        scale = _scale(logit_scale, temperature, False)
        to_log2 = scale * log2_e()
        target = tl.load(targets_ptr + row)
        own = tl.load(anchors_ptr + row)
        peaks = tl.full((BLOCK_V,), float("-inf"), tl.float32)
        for n0 in range(0, V, BLOCK_V):
            offs_v = n0 + tl.arange(0, BLOCK_V)
            u = _raw_logits(hidden_row_ptr, weight_ptr, offs_v, V, H, stride_weight_v, BLOCK_H)
            peaks = tl.maximum(peaks, tl.where(offs_v < V, u, float("-inf")))
        anchor = tl.max(peaks, axis=0)
        totals = tl.zeros((BLOCK_V,), tl.float32)
        weights = tl.zeros((BLOCK_V,), tl.float32)
        for n0 in range(0, V, BLOCK_V):
            offs_v = n0 + tl.arange(0, BLOCK_V)
            mask_v = offs_v < V
            u = _raw_logits(hidden_row_ptr, weight_ptr, offs_v, V, H, stride_weight_v, BLOCK_H)
            shifted = tl.where(mask_v, (u - anchor) * to_log2, float("-inf"))
            exps = tl.exp2(shifted)
            totals += exps
            weights += exps * tl.maximum(shifted, -1e4, propagate_nan=tl.PropagateNan.ALL)
            if KEEPS_EXPS:
                tl.store(exps_row_ptr + offs_v, exps.to(exps_ptr.dtype.element_ty), mask=mask_v)
        total = tl.sum(totals, axis=0)
        log_total = tl.log2(total)
        logp = (own - anchor) * scale - log_total * ln_2()
        tl.store(logps_ptr + row, logp)
        tl.store(logsumexp_ptr + row, anchor * scale + log_total * ln_2())
        if HAS_ENTROPY:
            weighted = tl.sum(weights, axis=0)
            tl.store(entropy_ptr + row, (log_total - weighted / total) * ln_2())
        tl.store(total_ptr + row, total)
        if KEEPS_EXPS:
            # After the block that holds it, which another thread stored.
            tl.debug_barrier()
            at_target = (total * expm1(logp)).to(exps_ptr.dtype.element_ty)
            tl.store(exps_row_ptr + target, at_target)


@cache
def _measured() -> dict[str, int]:
    """By a card's name the largest hidden size at which this beat cuBLAS and a sweep.

    `benchmarks.gpu_day --choose` writes it. Cards that nobody measured are not there.
    """
    return json.loads(Path(__file__).with_suffix(".json").read_text())


def largest_size(device: torch.device) -> int | None:
    """The largest hidden size at which this was measured to be faster; None: nobody has."""
    return _measured().get(torch.cuda.get_device_name(device))


def tile_of(device: torch.device) -> Tile:
    """The tile for a device; for the interpreter a small one."""
    if device.type != "cuda":
        return _INTERPRETED
    major, minor = torch.cuda.get_device_capability(device)
    return TILES.get((major, minor)) or TILES.get((major,)) or TILES[(8,)]


def exp_gemm(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    out: TokenStats,
    *,
    exps: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Statistics of `hidden [C, H]` times `weight [V, H]`, in `out`; their exponentials in `exps`.

    `exps [C, V]` gets what `token_stats` leaves there. Without a softcap; both operands are of one
    dtype, and every target is one of the columns.
    """
    M, H = hidden.shape
    V = len(weight)
    if not M:
        return
    hidden, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (hidden, weight))
    each = torch.arange(M, device=hidden.device)
    anchors = torch.zeros(M, dtype=torch.float32, device=hidden.device)
    entry_dots(hidden, weight, Entries(targets, each, each, each, each), anchors)
    tile = tile or tile_of(hidden.device)
    tiles_v = triton.cdiv(V, tile.columns)
    programs = triton.cdiv(M, tile.rows) * tiles_v
    if hidden.device.type == "cuda":
        of_device = torch.cuda.get_device_properties(hidden.device).multi_processor_count
        programs = min(programs, of_device)
    target_logits = torch.empty_like(anchors)
    sums = anchors.new_empty((tiles_v, 2, M))
    total = torch.empty_like(anchors) if out.total is None else out.total
    entropy = anchors if out.entropy is None else out.entropy
    kept = sums if exps is None else exps
    stride_exps = 0 if exps is None else exps.stride(0)
    scale, _, temperature = transform_scalars(transform)
    of_rows = temperature_pointer(transform, anchors)
    flags: dict[str, Any] = {
        "HAS_TEMPERATURE": isinstance(transform.temperature, Tensor),
        "HAS_ENTROPY": out.entropy is not None,
        "KEEPS_EXPS": exps is not None,
    }
    tma = tile.tma and all(x.stride(0) % 8 == x.data_ptr() % 16 == 0 for x in (hidden, weight))
    operands = _descriptors(hidden, weight, tile) if tma else (hidden, weight)
    with device_of(hidden):
        exp_gemm_kernel[(programs,)](
            *operands, targets, anchors, of_rows,
            kept, target_logits, sums,
            M, V, H,
            hidden.stride(0), weight.stride(0), stride_exps,
            scale, temperature,
            **flags,
            GROUP=_GROUP, PARTS=tile.parts, TMA=tma, STAGES=tile.stages,
            PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32",
            BLOCK_N=tile.rows, BLOCK_V=tile.columns, BLOCK_H=tile.inner, **build(tile.warps),
        )  # fmt: skip
        exp_stats_kernel[(triton.cdiv(M, _ROWS_TO_ADD),)](
            targets, anchors, of_rows, target_logits, sums,
            out.logps, out.logsumexp, entropy, total, kept,
            M, tiles_v,
            stride_exps,
            scale, temperature,
            **flags,
            BLOCK_N=_ROWS_TO_ADD, **build(1),
        )  # fmt: skip
        far_rows_kernel[(M,)](
            hidden, weight, targets, anchors, of_rows,
            out.logps, out.logsumexp, entropy, total, kept,
            V, H,
            hidden.stride(0), weight.stride(0), stride_exps,
            scale, temperature,
            **flags,
            BLOCK_V=_FAR_COLUMNS, BLOCK_H=_FAR_INNER, **build(4),
        )  # fmt: skip


def _descriptors(hidden: Tensor, weight: Tensor, tile: Tile) -> tuple[Any, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    blocks = ([tile.rows, tile.inner], [tile.columns, tile.inner])
    return tuple(
        TensorDescriptor.from_tensor(x, block)
        for x, block in zip((hidden, weight), blocks, strict=True)
    )

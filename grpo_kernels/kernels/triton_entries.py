"""Triton kernels over entries: pairs of a token and an id of its kept set, a row of W.

`entry_dots` computes their logits; `segment_sums` computes dh (segments are tokens, rows are W) and
dW (segments are ids, the entries sorted by id, rows are the states). `base/segments.py` computes
statistics and gradients of a token's logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import Entries
from .triton_common import Launch, build, device_of

# Elements of a tile of gathered rows. With long rows, a tile of dots is as wide as a warp's
# vectors, so that a warp sums an entry. A tile of sums is wider than all warps' vectors: a thread
# loads few ids and sums separate columns, and few programs meet an id without entries.
DOTS_LAUNCH = Launch(2048, 4)
SUMS_LAUNCH = Launch(4096, 4)
_DOTS_COLUMNS, _SUMS_COLUMNS = 256, 2048
# Rows of a tile where they are short.
_MOST_DOTS, _MOST_SUMMED = 64, 32
# Entries of a part of a long segment.
PART = 128


# Logits of entries, a program per some of them:
#
#     z_e += x[token_e] . rows[id_e]
#
# Numerics: products and their sum in float32, in the tile's order; a head's terms are added one
# after another.
#
# Cost per element of a row: 6 instructions and, with half operands, 4 bytes read, the state's
# mostly from a cache, as a token's entries are neighbours.
#
# The number of entries, and pointers to one value per entry or token, are not specialized:
# otherwise each new one would compile the kernel again, in the middle of training.
@triton.jit(
    do_not_specialize=["E"],
    do_not_specialize_on_alignment=["ids_ptr", "tokens_ptr", "out_ptr"],
)
def entry_dots_kernel(
    x_ptr, rows_ptr, ids_ptr, tokens_ptr, out_ptr,
    E, K,
    stride_x_n, stride_rows_v,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    ids = tl.load(ids_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
    tokens = tl.load(tokens_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
    products = tl.zeros((BLOCK_E, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask = mask_e[:, None] & (offs_k < K)[None, :]
        rows_ptrs = rows_ptr + ids[:, None] * stride_rows_v + offs_k[None, :]
        x_ptrs = x_ptr + tokens[:, None] * stride_x_n + offs_k[None, :]
        rows = tl.load(rows_ptrs, mask=mask, other=0.0).to(tl.float32)
        products += rows * tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(out_ptr + offs_e, mask=mask_e, other=0.0) + tl.sum(products, axis=1)
    tl.store(out_ptr + offs_e, z, mask=mask_e)


@triton.jit
def _sum_of_entries(
    factors_ptr, index_ptr, rows_ptr,
    begin, end, offs_k, mask_k,
    stride_rows_m,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    sums = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(begin, end, BLOCK_E):
        offs_e = first + tl.arange(0, BLOCK_E)
        mask_e = offs_e < end
        factors = tl.load(factors_ptr + offs_e, mask=mask_e, other=0.0)
        index = tl.load(index_ptr + offs_e, mask=mask_e, other=0)
        # Entries without a gradient, such as a token's of advantage 0, are not read.
        rows = tl.load(
            rows_ptr + index[:, None] * stride_rows_m + offs_k[None, :],
            mask=(factors != 0.0)[:, None] & mask_k[None, :], other=0.0,
        )  # fmt: skip
        sums += tl.sum(factors[:, None] * rows.to(tl.float32), axis=0)
    return sums


# Sums of rows over segments of entries, a program per segment and some columns:
#
#     y_s = sum_(e in s) f_e rows[index_e]
#
# Numerics: one program computes each sum, in float32 and always in the same order, and rounds it
# once: no atomics, the same bits in every run. An id that most tokens keep has thousands of
# entries, for which one program would take far longer than the others: the next two kernels sum
# segments of more than 2 PART entries.
#
# Cost per element of an entry's row: 2 bytes read with a half operand, 5 instructions; a segment's
# sum is written once. Rows whose factor is 0 are not read.
@triton.jit(do_not_specialize_on_alignment=["factors_ptr", "index_ptr", "offsets_ptr"])
def segment_sums_kernel(
    factors_ptr, index_ptr, offsets_ptr, rows_ptr, out_ptr,
    K,
    stride_rows_m, stride_out_s,
    PART: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0).to(tl.int64)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    begin = tl.load(offsets_ptr + segment)
    end = tl.load(offsets_ptr + segment + 1)
    if end - begin > 2 * PART:
        return
    sums = _sum_of_entries(
        factors_ptr, index_ptr, rows_ptr,
        begin, end, offs_k, mask_k,
        stride_rows_m,
        BLOCK_E, BLOCK_K,
    )  # fmt: skip
    out_ptrs = out_ptr + segment * stride_out_s + offs_k
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask_k)


# Sums of the parts of long segments, a program per part and some columns. Part p is the piece
# around entry p * PART of the segment that has this entry: up to the next multiple of PART, and
# from the segment's begin if the multiple before is in another segment. No long segment fits
# between two multiples, so E / PART parts cover all, and no size is read from the device.
#
# Numerics and cost: as in `segment_sums_kernel`; sums stay in float32, 4 bytes per column and part.
@triton.jit(
    do_not_specialize_on_alignment=["factors_ptr", "index_ptr", "offsets_ptr", "segments_ptr"]
)
def part_sums_kernel(
    factors_ptr, index_ptr, offsets_ptr, segments_ptr, rows_ptr, out_ptr,
    K,
    stride_rows_m, stride_out_p,
    PART: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    segment = tl.load(segments_ptr + part)
    begin = tl.load(offsets_ptr + segment)
    end = tl.load(offsets_ptr + segment + 1)
    if end - begin <= 2 * PART:
        return
    cut = part * PART
    sums = _sum_of_entries(
        factors_ptr, index_ptr, rows_ptr,
        tl.where(begin > cut - PART, begin, cut), tl.minimum(end, cut + PART), offs_k, mask_k,
        stride_rows_m,
        BLOCK_E, BLOCK_K,
    )  # fmt: skip
    tl.store(out_ptr + part * stride_out_p + offs_k, sums, mask=mask_k)


# Sums of long segments from their parts' sums, by the program of the first part. Numerics: float32,
# in the order of the parts, rounded once. Cost: 4 bytes read per column and part; the programs of
# other parts end at once.
@triton.jit(do_not_specialize_on_alignment=["offsets_ptr", "segments_ptr"])
def sum_parts_kernel(
    offsets_ptr, segments_ptr, parts_ptr, out_ptr,
    K,
    stride_parts_p, stride_out_s,
    PART: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    segment = tl.load(segments_ptr + part)
    begin = tl.load(offsets_ptr + segment)
    end = tl.load(offsets_ptr + segment + 1)
    if (end - begin <= 2 * PART) | (part != tl.cdiv(begin, PART)):
        return
    sums = tl.zeros((BLOCK_K,), tl.float32)
    end_part = tl.cdiv(end, PART)
    for first in range(part, end_part, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        parts = tl.load(
            parts_ptr + offs_p[:, None] * stride_parts_p + offs_k[None, :],
            mask=(offs_p < end_part)[:, None] & mask_k[None, :], other=0.0,
        )  # fmt: skip
        sums += tl.sum(parts, axis=0)
    out_ptrs = out_ptr + segment * stride_out_s + offs_k
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask_k)


def entry_dots(
    x: Tensor, rows: Tensor, entries: Entries, out: Tensor, *, launch: Launch = DOTS_LAUNCH
) -> None:
    E, K = len(entries), x.shape[1]
    block_k = _block_k(K, _DOTS_COLUMNS)
    block_e = min(launch.block // block_k, _MOST_DOTS)
    with device_of(x):
        entry_dots_kernel[(triton.cdiv(E, block_e),)](
            x, rows, entries.ids, entries.tokens, out,
            E, K,
            x.stride(0), rows.stride(0),
            BLOCK_E=block_e, BLOCK_K=block_k, **build(launch.num_warps),
        )  # fmt: skip


def segment_sums(
    factors: Tensor,
    index: Tensor,
    offsets: Tensor,
    rows: Tensor,
    dtype: torch.dtype,
    *,
    launch: Launch = SUMS_LAUNCH,
) -> Tensor:
    S, K = len(offsets) - 1, rows.shape[1]
    result = rows.new_empty((S, K), dtype=dtype)
    assert K == 1 or rows.stride(1) == 1
    block_e, block_k, num_warps = _sums_tile(launch, K, _SUMS_COLUMNS)
    if S:
        with device_of(rows):
            segment_sums_kernel[(S, triton.cdiv(K, block_k))](
                factors, index, offsets, rows, result,
                K,
                rows.stride(0), result.stride(0),
                PART=PART, BLOCK_E=block_e, BLOCK_K=block_k,
                **build(num_warps),
            )  # fmt: skip
            if len(factors) > 2 * PART:
                _sum_long_segments(factors, index, offsets, rows, result)
    return result


def _sum_long_segments(
    factors: Tensor,
    index: Tensor,
    offsets: Tensor,
    rows: Tensor,
    out: Tensor,
) -> None:
    """Writes the sums of segments of more than 2 * PART entries to `out`."""
    K = rows.shape[1]
    cuts = torch.arange(0, len(factors), PART, device=offsets.device)
    # The first segment that ends behind the entry has it.
    segments = torch.searchsorted(offsets[1:], cuts, right=True)
    parts = rows.new_empty((len(cuts), K), dtype=torch.float32)
    block_m, block_k, num_warps = _sums_tile(SUMS_LAUNCH, K, _SUMS_COLUMNS // 2)
    grid = (len(cuts), triton.cdiv(K, block_k))
    part_sums_kernel[grid](
        factors, index, offsets, segments, rows, parts,
        K,
        rows.stride(0), parts.stride(0),
        PART=PART, BLOCK_E=block_m, BLOCK_K=block_k, **build(num_warps),
    )  # fmt: skip
    sum_parts_kernel[grid](
        offsets, segments, parts, out,
        K,
        parts.stride(0), out.stride(0),
        PART=PART, BLOCK_P=block_m, BLOCK_K=block_k, **build(num_warps),
    )  # fmt: skip


def _sums_tile(launch: Launch, K: int, most: int) -> tuple[int, int, int]:
    """Rows and columns of a tile of a sum, and warps."""
    block_k = _block_k(K, most)
    block_m = min(launch.block // block_k, _MOST_SUMMED)
    return block_m, block_k, min(launch.num_warps, max(1, block_k // 256))


def _block_k(K: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(K)))

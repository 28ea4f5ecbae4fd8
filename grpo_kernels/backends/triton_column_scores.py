"""Triton kernel that sums the gradient of a chunk's logits, and its squares, down the columns.

The gradient is that of `triton_logits`; it is summed and forgotten.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LogitTransform, RowGrads
from .triton_logits import (
    Launch,
    _block_v,
    _device_of,
    _gradient_pointers,
    _logit_grads,
    _per_row,
    _row_grads,
    _transform_flags,
    _transform_pointers,
    _transform_scalars,
)

COLUMN_LAUNCH = Launch(1024, 4)


@triton.jit
def _store_column_sums(
    logits_ptr, targets_ptr, bias_ptr, temperature_ptr,
    logsumexp_ptr, d_softmax_ptr, at_target_ptr, entropy_ptr, d_entropy_ptr,
    squares_ptr, sums_ptr,
    first, last, V, stride_logits_n, logit_scale, softcap, temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, WHOLE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = WHOLE | (offs_v < V)
    squares = tl.zeros((BLOCK_V,), tl.float32)
    sums = tl.zeros((BLOCK_V,), tl.float32)
    for index in range(first, last):
        row = tl.cast(index, tl.int64)
        row_grads = _row_grads(
            row, targets_ptr, temperature_ptr, logsumexp_ptr, d_softmax_ptr, at_target_ptr,
            entropy_ptr, d_entropy_ptr, logit_scale, temperature,
            HAS_SOFTCAP, HAS_TEMPERATURE, HAS_ENTROPY,
        )  # fmt: skip
        d_logits = _logit_grads(
            logits_ptr + row * stride_logits_n, bias_ptr, offs_v, mask_v, row_grads,
            logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY,
        )  # fmt: skip
        squares += d_logits * d_logits
        sums += d_logits
    offs = tl.program_id(1).to(tl.int64) * V + offs_v
    tl.store(squares_ptr + offs, squares, mask=mask_v)
    tl.store(sums_ptr + offs, sums, mask=mask_v)


@_per_row
def column_scores_kernel(
    logits_ptr, targets_ptr, bias_ptr, temperature_ptr,
    logsumexp_ptr, d_softmax_ptr, at_target_ptr, entropy_ptr, d_entropy_ptr,
    squares_ptr, sums_ptr,
    N, V, rows_per_block,
    stride_logits_n,
    logit_scale, softcap, temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program sums some columns over one block of rows, in the order of the rows."""
    first = tl.program_id(1) * rows_per_block
    last = tl.minimum(first + rows_per_block, N)
    if (tl.program_id(0) + 1) * BLOCK_V <= V:
        _store_column_sums(
            logits_ptr, targets_ptr, bias_ptr, temperature_ptr, logsumexp_ptr, d_softmax_ptr,
            at_target_ptr, entropy_ptr, d_entropy_ptr, squares_ptr, sums_ptr,
            first, last, V, stride_logits_n, logit_scale, softcap, temperature,
            HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE, HAS_ENTROPY, True, BLOCK_V,
        )  # fmt: skip
    else:
        _store_column_sums(
            logits_ptr, targets_ptr, bias_ptr, temperature_ptr, logsumexp_ptr, d_softmax_ptr,
            at_target_ptr, entropy_ptr, d_entropy_ptr, squares_ptr, sums_ptr,
            first, last, V, stride_logits_n, logit_scale, softcap, temperature,
            HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE, HAS_ENTROPY, False, BLOCK_V,
        )  # fmt: skip


def column_scores(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    grads: RowGrads,
    blocks: list[slice],
    *,
    launch: Launch = COLUMN_LAUNCH,
) -> tuple[Tensor, Tensor]:
    count, V = logits.shape
    squares, sums = logits.new_empty((2, len(blocks), V), dtype=torch.float32)
    if count:
        block_v = _block_v(launch, V)
        with _device_of(logits):
            column_scores_kernel[(triton.cdiv(V, block_v), len(blocks))](
                logits, targets, *_transform_pointers(transform, logits),
                *_gradient_pointers(grads, logits),
                squares, sums,
                count, V, blocks[0].stop - blocks[0].start,
                logits.stride(0),
                *_transform_scalars(transform),
                **_transform_flags(transform),
                HAS_ENTROPY=grads.d_entropy is not None,
                BLOCK_V=block_v, num_warps=launch.num_warps,
            )  # fmt: skip
    return squares, sums

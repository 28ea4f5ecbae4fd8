"""Triton kernels of the sampled backward: scores of columns, and the level of their probabilities.

`column_scores` sums the gradient of a chunk's logits, that of `triton_logits`, and its squares down
the columns; the gradient itself is forgotten.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backends import LogitTransform, RowGrads
from ..backends.triton_common import (
    Launch,
    block_of,
    build,
    device_of,
    gradient_pointers,
    per_row,
    temperature_pointer,
    transform_flags,
    transform_scalars,
)
from ..backends.triton_logits import block_grads, load_row_grads
from .torch_column_scores import LEVEL_STEPS

COLUMN_LAUNCH = Launch(1024, 4)
LEVEL_BLOCK = 4096  # norms of a piece, in `column_level_kernel`


@triton.jit
def _store_column_sums(
    logits_ptr, targets_ptr, temperature_ptr,
    logsumexp_ptr, d_softmax_ptr, at_target_ptr, entropy_ptr, d_entropy_ptr,
    squares_ptr, sums_ptr,
    first, last, V, stride_logits_n, logit_scale, softcap, temperature,
    HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, WHOLE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = WHOLE | (offs_v < V)
    squares = tl.zeros((BLOCK_V,), tl.float32)
    sums = tl.zeros((BLOCK_V,), tl.float32)
    for index in range(first, last):
        row = tl.cast(index, tl.int64)
        row_grads = load_row_grads(
            row, targets_ptr, temperature_ptr, logsumexp_ptr, d_softmax_ptr, at_target_ptr,
            entropy_ptr, d_entropy_ptr, logit_scale, temperature,
            HAS_SOFTCAP, HAS_TEMPERATURE, HAS_ENTROPY,
        )  # fmt: skip
        d_logits = block_grads(
            logits_ptr + row * stride_logits_n, offs_v, mask_v, row_grads, logit_scale, softcap,
            HAS_SOFTCAP, HAS_ENTROPY,
        )  # fmt: skip
        squares += d_logits * d_logits
        sums += d_logits
    offs = tl.program_id(1).to(tl.int64) * V + offs_v
    tl.store(squares_ptr + offs, squares, mask=mask_v)
    tl.store(sums_ptr + offs, sums, mask=mask_v)


@per_row
def column_scores_kernel(
    logits_ptr, targets_ptr, temperature_ptr,
    logsumexp_ptr, d_softmax_ptr, at_target_ptr, entropy_ptr, d_entropy_ptr,
    squares_ptr, sums_ptr,
    N, V, rows_per_block,
    stride_logits_n,
    logit_scale, softcap, temperature,
    HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program sums some columns over one block of rows, in the order of the rows."""
    first = tl.program_id(1) * rows_per_block
    last = tl.minimum(first + rows_per_block, N)
    if (tl.program_id(0) + 1) * BLOCK_V <= V:
        _store_column_sums(
            logits_ptr, targets_ptr, temperature_ptr,
            logsumexp_ptr, d_softmax_ptr, at_target_ptr, entropy_ptr, d_entropy_ptr,
            squares_ptr, sums_ptr,
            first, last, V, stride_logits_n, logit_scale, softcap, temperature,
            HAS_SOFTCAP, HAS_TEMPERATURE, HAS_ENTROPY, True, BLOCK_V,
        )  # fmt: skip
    else:
        _store_column_sums(
            logits_ptr, targets_ptr, temperature_ptr,
            logsumexp_ptr, d_softmax_ptr, at_target_ptr, entropy_ptr, d_entropy_ptr,
            squares_ptr, sums_ptr,
            first, last, V, stride_logits_n, logit_scale, softcap, temperature,
            HAS_SOFTCAP, HAS_TEMPERATURE, HAS_ENTROPY, False, BLOCK_V,
        )  # fmt: skip


@triton.jit
def _step_to_level(pieces, level, allowed):
    """Newton's step to where the sum over norm < level of norm * (level - norm) is `allowed`."""
    # Both sums piece by piece: the compiler otherwise holds every value of `below` for the second.
    total, square = 0.0, 0.0
    for i in tl.static_range(len(pieces)):
        below = tl.where(pieces[i] < level, pieces[i], 0.0)
        total += below
        square += below * below
    # The least normal numbers keep what is 0 throughout from dividing by 0.
    square_sum = tl.maximum(allowed + tl.sum(square, axis=0), 1.1754944e-38)
    return square_sum / tl.maximum(tl.sum(total, axis=0), 1.1754944e-38)


@triton.jit(
    do_not_specialize=["K", "copies", "stride_norms_k"],
    do_not_specialize_on_alignment=["allowed_ptr"],
)
def column_level_kernel(
    norms_ptr, allowed_ptr, level_ptr,
    K, copies,
    stride_norms_k,
    STEPS: tl.constexpr, PIECES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program has all norms in its registers, in pieces of `BLOCK_K`."""
    pieces = ()
    for i in tl.static_range(PIECES):
        offs_k = i * BLOCK_K + tl.arange(0, BLOCK_K)
        norms = tl.load(norms_ptr + offs_k * stride_norms_k, mask=offs_k < K, other=0.0)
        pieces = pieces + (norms,)  # type: ignore[assignment]  # noqa: RUF005
    allowed = tl.load(allowed_ptr) / copies
    level = float("inf")
    for _ in range(STEPS + 1):
        level = _step_to_level(pieces, level, allowed)
    tl.store(level_ptr, level)


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
        block = block_of(launch, V)
        with device_of(logits):
            column_scores_kernel[(triton.cdiv(V, block["BLOCK_V"]), len(blocks))](
                logits, targets, temperature_pointer(transform, logits),
                *gradient_pointers(grads, logits),
                squares, sums,
                count, V, blocks[0].stop - blocks[0].start,
                logits.stride(0),
                *transform_scalars(transform),
                **transform_flags(transform),
                HAS_ENTROPY=grads.d_entropy is not None,
                **block,
            )  # fmt: skip
    return squares, sums


def column_level(norms: Tensor, allowed: Tensor, copies: int) -> Tensor:
    level = torch.empty_like(allowed)
    size = max(128, triton.next_power_of_2(len(norms)))
    block_k = min(size, LEVEL_BLOCK)
    # A block has at most 1,024 threads: 16 of AMD's warps.
    num_warps = min(16, max(4, size // 1024))
    with device_of(norms):
        column_level_kernel[(1,)](
            norms, allowed, level,
            len(norms), copies,
            norms.stride(0),
            STEPS=LEVEL_STEPS, PIECES=size // block_k, BLOCK_K=block_k, **build(num_warps),
        )  # fmt: skip
    return level

"""Triton kernels over a chunk of logits `[C, V]`: statistics, gradients, column scores.

One program owns one row of the chunk and sweeps it once: whole blocks without a mask, so that they
load and store vectors whatever V is divisible by, then the rest. Raw logits
u = (hidden @ weight.T)_j become z = softcap(logit_scale * (u + bias_j)) / T on the way in, so that
nothing but the chunk itself is read from memory. Forward, with m the running maximum:

    lse = m + log S,  S = sum_j e^(z_j - m);  E = log S - (sum_j e^(z_j - m) (z_j - m)) / S

Backward, given dL/dl (d_logps), its softmax part (d_softmax) and dL/dE (d_entropy):

    dL/dz_j = d_logps * 1[j = y] - p_j * (d_softmax + d_entropy * (z_j - lse + E))
    dL/du_j = dL/dz_j * (1 - tanh^2) * logit_scale / T

`column_scores` sums dL/du_j and its square down the columns instead.
The running rescale of S is that of online softmax, arXiv:1805.02867.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LogitTransform, RowGrads, TokenStats


class Launch(NamedTuple):
    """Elements that a program takes at a time, and its warps."""

    block: int
    num_warps: int


# The largest that spills in no configuration and still fills the SMs of sm_80, sm_90 and sm_100
# with warps (`benchmarks.compile_report`); `benchmarks.tune` times others.
ROW_LAUNCH = Launch(2048, 8)
COLUMN_LAUNCH = Launch(256, 4)
# Row counts, and pointers to one value per row, are not specialized: otherwise each new count and
# each new first row would compile the kernel again, in the middle of training.
_per_row = triton.jit(
    do_not_specialize=["N", "rows_per_block"],
    do_not_specialize_on_alignment=[
        f"{name}_ptr"
        for name in ("targets", "temperature", "logps", "target_logps", "logsumexp", "entropy",
                     "d_logps", "d_softmax", "d_entropy")
    ],
)  # fmt: skip


@triton.jit
def _tanh(x):
    # Written through exp, which every backend and the interpreter have; saturates at +-1.
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _expm1_minus(x):
    """e^x - 1 - x, by its series where the difference would cancel."""
    series = 0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040)))))
    return tl.where(tl.abs(x) < 0.25, x * x * series, tl.exp(x) - 1.0 - x)


@triton.jit
def _expm1(x):
    return tl.where(tl.abs(x) < 0.25, _expm1_minus(x) + x, tl.exp(x) - 1.0)


@triton.jit
def _load_logits(
    row_ptr, bias_ptr, offs_v, mask_v, logit_scale, softcap, HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """A block of one row, transformed up to the temperature."""
    u = tl.load(row_ptr + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        u += tl.load(bias_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)
    z = u * logit_scale
    if HAS_SOFTCAP:
        z = softcap * _tanh(z / softcap)
    return z


@triton.jit
def _online_softmax(
    peak, total, weighted, row_ptr, bias_ptr, start, V, logit_scale, softcap, inv_temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum of exponentials and their weighted sum, with one more block."""
    offs_v = start + tl.arange(0, BLOCK_V)
    mask_v = WHOLE | (offs_v < V)
    z = inv_temperature * _load_logits(
        row_ptr, bias_ptr, offs_v, mask_v, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP
    )
    # Columns past V are no part of the vocabulary: -inf, where 0 would be a logit.
    z = tl.where(mask_v, z, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(z, axis=0))
    # Nothing but -inf so far: shift by 0, as -inf - -inf is NaN.
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shifted = z - anchor
    exps = tl.exp(shifted)
    decay = tl.exp(peak - anchor)
    if HAS_ENTROPY:
        shift = tl.where(peak == float("-inf"), 0.0, peak - anchor)
        # p * log p is 0 where p is, and -inf must not make it NaN.
        finite = tl.where(exps > 0.0, shifted, 0.0)
        weighted = decay * (weighted + shift * total) + tl.sum(exps * finite, axis=0)
    total = decay * total + tl.sum(exps, axis=0)
    return new_peak, total, weighted


@_per_row
def token_stats_kernel(
    logits_ptr, targets_ptr, bias_ptr, temperature_ptr,
    logps_ptr, logsumexp_ptr, entropy_ptr,
    V,
    stride_logits_n,
    logit_scale, softcap, temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # A tile passes 2^31 elements: row offsets need 64 bits.
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_n
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    inv_temperature = 1.0 / temperature

    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        peak, total, weighted = _online_softmax(
            peak, total, weighted, row_ptr, bias_ptr, start, V, logit_scale, softcap,
            inv_temperature, HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY, True, BLOCK_V,
        )  # fmt: skip
    if whole < V:
        peak, total, weighted = _online_softmax(
            peak, total, weighted, row_ptr, bias_ptr, whole, V, logit_scale, softcap,
            inv_temperature, HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY, False, BLOCK_V,
        )  # fmt: skip

    target = tl.load(targets_ptr + row)
    target_logit = inv_temperature * _load_logits(
        row_ptr, bias_ptr, target, True, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP
    )
    log_total = tl.log(total)
    # Not target_logit - logsumexp, which loses what is below an ulp of the logits.
    tl.store(logps_ptr + row, (target_logit - peak) - log_total)
    tl.store(logsumexp_ptr + row, peak + log_total)
    if HAS_ENTROPY:
        tl.store(entropy_ptr + row, log_total - weighted / total)


@triton.jit
def _row_grads(
    row, targets_ptr, temperature_ptr, target_logps_ptr, logsumexp_ptr, d_logps_ptr, d_softmax_ptr,
    entropy_ptr, d_entropy_ptr, temperature,
    HAS_TEMPERATURE: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """Loads what the gradient of a row's logits is made of, in the order of `_logit_grads`."""
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    target = tl.load(targets_ptr + row)
    logsumexp = tl.load(logsumexp_ptr + row)
    target_logp = tl.load(target_logps_ptr + row)
    d_logp = tl.load(d_logps_ptr + row)
    d_softmax = tl.load(d_softmax_ptr + row)
    target_p = tl.exp(target_logp)
    at_target = (d_logp - d_softmax) * target_p - d_logp * _expm1(target_logp)
    entropy, d_entropy = 0.0, 0.0
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + row)
        d_entropy = tl.load(d_entropy_ptr + row)
        at_target -= target_p * d_entropy * (tl.maximum(target_logp, -1e4) + entropy)
    return target, at_target, logsumexp, d_softmax, entropy, d_entropy, 1.0 / temperature


@triton.jit
def _logit_grads(
    row_ptr, bias_ptr, offs_v, mask_v, row_grads, logit_scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of one row's raw logits; 0 where masked."""
    target, at_target, logsumexp, d_softmax, entropy, d_entropy, inv_temperature = row_grads
    capped = _load_logits(
        row_ptr, bias_ptr, offs_v, mask_v, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP
    )
    log_p = capped * inv_temperature - logsumexp
    p = tl.exp(log_p)
    coef = d_softmax
    if HAS_ENTROPY:
        coef = d_softmax + d_entropy * (tl.where(p > 0.0, log_p, 0.0) + entropy)
    d_logits = tl.where(offs_v == target, at_target, -p * coef)
    if HAS_SOFTCAP:
        tanh = capped / softcap
        d_logits *= 1.0 - tanh * tanh
    return d_logits * (logit_scale * inv_temperature)


@triton.jit
def _store_logit_grads(
    row_ptr, bias_ptr, weights_ptr, out_row_ptr, start, V, row_grads, logit_scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, NARROWS: tl.constexpr, WHOLE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    offs_v = start + tl.arange(0, BLOCK_V)
    mask_v = WHOLE | (offs_v < V)
    d_logits = _logit_grads(
        row_ptr, bias_ptr, offs_v, mask_v, row_grads, logit_scale, softcap,
        HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY,
    )  # fmt: skip
    if HAS_WEIGHTS:
        d_logits *= tl.load(weights_ptr + offs_v, mask=mask_v, other=0.0)
    if NARROWS:
        # A narrower result on the same memory: this block lands on earlier columns and on its
        # own first half, which every thread must have read by now.
        tl.debug_barrier()
    tl.store(out_row_ptr + offs_v, d_logits.to(out_row_ptr.dtype.element_ty), mask=mask_v)


@_per_row
def logit_grads_kernel(
    logits_ptr, targets_ptr, bias_ptr, temperature_ptr,
    target_logps_ptr, logsumexp_ptr, d_logps_ptr, d_softmax_ptr, entropy_ptr, d_entropy_ptr,
    weights_ptr, out_ptr,
    V,
    stride_logits_n, stride_out_n,
    logit_scale, softcap, temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, HAS_WEIGHTS: tl.constexpr, NARROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_n
    out_row_ptr = out_ptr + row * stride_out_n
    row_grads = _row_grads(
        row, targets_ptr, temperature_ptr, target_logps_ptr, logsumexp_ptr, d_logps_ptr,
        d_softmax_ptr, entropy_ptr, d_entropy_ptr, temperature, HAS_TEMPERATURE, HAS_ENTROPY,
    )  # fmt: skip
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        _store_logit_grads(
            row_ptr, bias_ptr, weights_ptr, out_row_ptr, start, V, row_grads,
            logit_scale, softcap,
            HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY, HAS_WEIGHTS, NARROWS, True, BLOCK_V,
        )  # fmt: skip
    if whole < V:
        _store_logit_grads(
            row_ptr, bias_ptr, weights_ptr, out_row_ptr, whole, V, row_grads,
            logit_scale, softcap,
            HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY, HAS_WEIGHTS, NARROWS, False, BLOCK_V,
        )  # fmt: skip


@triton.jit
def _store_column_sums(
    logits_ptr, targets_ptr, bias_ptr, temperature_ptr,
    target_logps_ptr, logsumexp_ptr, d_logps_ptr, d_softmax_ptr, entropy_ptr, d_entropy_ptr,
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
            row, targets_ptr, temperature_ptr, target_logps_ptr, logsumexp_ptr, d_logps_ptr,
            d_softmax_ptr, entropy_ptr, d_entropy_ptr, temperature, HAS_TEMPERATURE, HAS_ENTROPY,
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
    target_logps_ptr, logsumexp_ptr, d_logps_ptr, d_softmax_ptr, entropy_ptr, d_entropy_ptr,
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
            logits_ptr, targets_ptr, bias_ptr, temperature_ptr, target_logps_ptr, logsumexp_ptr,
            d_logps_ptr, d_softmax_ptr, entropy_ptr, d_entropy_ptr, squares_ptr, sums_ptr,
            first, last, V, stride_logits_n, logit_scale, softcap, temperature,
            HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE, HAS_ENTROPY, True, BLOCK_V,
        )  # fmt: skip
    else:
        _store_column_sums(
            logits_ptr, targets_ptr, bias_ptr, temperature_ptr, target_logps_ptr, logsumexp_ptr,
            d_logps_ptr, d_softmax_ptr, entropy_ptr, d_entropy_ptr, squares_ptr, sums_ptr,
            first, last, V, stride_logits_n, logit_scale, softcap, temperature,
            HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE, HAS_ENTROPY, False, BLOCK_V,
        )  # fmt: skip


def token_stats(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    *,
    entropy: bool,
    launch: Launch = ROW_LAUNCH,
) -> TokenStats:
    count, V = logits.shape
    logps, logsumexp, entropies = logits.new_empty((3, count), dtype=torch.float32)
    if count:
        with _device_of(logits):
            token_stats_kernel[(count,)](
                logits, targets, *_transform_pointers(transform, logits),
                logps, logsumexp, entropies,
                V,
                logits.stride(0),
                *_transform_scalars(transform),
                **_transform_flags(transform),
                HAS_ENTROPY=entropy, BLOCK_V=_block_v(launch, V), num_warps=launch.num_warps,
            )  # fmt: skip
    return TokenStats(logps, logsumexp, entropies if entropy else None)


def logit_grads_(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    grads: RowGrads,
    out: Tensor,
    *,
    column_weights: Tensor | None = None,
    launch: Launch = ROW_LAUNCH,
) -> None:
    count, V = logits.shape
    if count and V:
        with _device_of(logits):
            logit_grads_kernel[(count,)](
                logits, targets, *_transform_pointers(transform, logits),
                *_gradient_pointers(grads, logits),
                logits if column_weights is None else column_weights, out,
                V,
                logits.stride(0), out.stride(0),
                *_transform_scalars(transform),
                **_transform_flags(transform),
                HAS_ENTROPY=grads.d_entropy is not None, HAS_WEIGHTS=column_weights is not None,
                NARROWS=out.element_size() < logits.element_size(),
                BLOCK_V=_block_v(launch, V), num_warps=launch.num_warps,
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


def _device_of(x: Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.xpu.device_of(x) if x.device.type == "xpu" else torch.cuda.device_of(x)


def _block_v(launch: Launch, V: int) -> int:
    return min(launch.block, max(128, triton.next_power_of_2(V)))


def _transform_pointers(transform: LogitTransform, unused: Tensor) -> tuple[Tensor, Tensor]:
    temperature = transform.temperature
    return (
        unused if transform.bias is None else transform.bias,
        temperature if isinstance(temperature, Tensor) else unused,
    )


def _gradient_pointers(grads: RowGrads, unused: Tensor) -> tuple[Tensor, ...]:
    """Per-row pointers in the kernels' order; the entropy's only where it has a gradient."""
    entropies = (grads.entropy, grads.d_entropy) if grads.d_entropy is not None else (None, None)
    per_row = (grads.logps, grads.logsumexp, grads.d_logps, grads.d_softmax, *entropies)
    return tuple(unused if x is None else x for x in per_row)


def _transform_scalars(transform: LogitTransform) -> tuple[float, float, float]:
    temperature = transform.temperature
    return (
        float(transform.logit_scale),
        float(transform.softcap or 1.0),
        1.0 if isinstance(temperature, Tensor) else float(temperature),
    )


def _transform_flags(transform: LogitTransform) -> dict[str, bool]:
    return {
        "HAS_BIAS": transform.bias is not None,
        "HAS_SOFTCAP": transform.softcap is not None,
        "HAS_TEMPERATURE": isinstance(transform.temperature, Tensor),
    }

"""Tiles as Triton kernels: CUDA, ROCm and XPU, and any CPU under `TRITON_INTERPRET=1`.

One program owns one row of the tile and sweeps it once: whole blocks without a mask, so that they
load and store vectors whatever V is divisible by, then the rest. Raw logits
u = (hidden @ weight.T)_j become z = softcap(logit_scale * (u + bias_j)) / T on the way in, so that
nothing but the tile itself is read from memory. Forward, with m the running maximum:

    lse = m + log S,  S = sum_j e^(z_j - m);  E = log S - (sum_j e^(z_j - m) (z_j - m)) / S

Backward, given dL/dl (d_logps), its softmax part (d_prob) and dL/dE (d_entropy):

    dL/dz_j = d_logps * 1[j = y] - p_j * (d_prob + d_entropy * (z_j - lse + E))
    dL/du_j = dL/dz_j * (1 - tanh^2) * logit_scale / T

`column_scores` sums the squares of dL/du_j, and itself, down the columns instead.

The policy-loss kernel is the token-local part of `grpo_kernels.objective` and its derivative by
hand; what only scales the surrogate (corrections) is taken from there.
The running rescale of S is that of online softmax, arXiv:1805.02867.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config import GRPOLossConfig
from ..objective import TokenInputs, Tokens, surrogate_scale
from . import LogitGradInputs, LogitTransform, PolicyLoss, TokenStats


class Launch(NamedTuple):
    """How much a program takes at a time, and how many warps it has."""

    block: int
    num_warps: int


# The largest that spills in no configuration and still fills the SMs of sm_80, sm_90 and sm_100
# with warps (`benchmarks.compile_report`); `benchmarks.tune` times others.
ROW_LAUNCH = Launch(2048, 8)
COLUMN_LAUNCH = Launch(256, 4)
TOKEN_LAUNCH = Launch(256, 4)
# What is read once a row, and how many rows there are: without this, each other count of rows and
# each other first row would be compiled for anew, in the middle of training.
_per_row = triton.jit(
    do_not_specialize=["N", "rows_per_block"],
    do_not_specialize_on_alignment=[
        f"{name}_ptr"
        for name in ("targets", "temperature", "logps", "target_logps", "logsumexp", "entropy",
                     "d_logps", "d_prob", "d_entropy")
    ],
)  # fmt: skip
# Beyond any ratio, which ends at e^80, and no infinity, which times an advantage of 0 is NaN.
_FAR = 1e35


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
def _row_gradients(
    row, targets_ptr, temperature_ptr, target_logps_ptr, logsumexp_ptr, d_logps_ptr, d_prob_ptr,
    entropy_ptr, d_entropy_ptr, temperature,
    HAS_TEMPERATURE: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """What the gradient of a row's logits is made of, and itself at the target."""
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    target = tl.load(targets_ptr + row)
    logsumexp = tl.load(logsumexp_ptr + row)
    target_logp = tl.load(target_logps_ptr + row)
    d_logp = tl.load(d_logps_ptr + row)
    d_prob = tl.load(d_prob_ptr + row)
    target_p = tl.exp(target_logp)
    at_target = (d_logp - d_prob) * target_p - d_logp * _expm1(target_logp)
    entropy, d_entropy = 0.0, 0.0
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + row)
        d_entropy = tl.load(d_entropy_ptr + row)
        at_target -= target_p * d_entropy * (tl.maximum(target_logp, -1e4) + entropy)
    return target, at_target, logsumexp, d_prob, entropy, d_entropy, 1.0 / temperature


@triton.jit
def _logit_grads(
    row_ptr, bias_ptr, offs_v, mask_v, target, at_target, logsumexp, d_prob, entropy, d_entropy,
    inv_temperature, logit_scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of one row's raw logits; 0 where masked."""
    capped = _load_logits(
        row_ptr, bias_ptr, offs_v, mask_v, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP
    )
    log_p = capped * inv_temperature - logsumexp
    p = tl.exp(log_p)
    coef = d_prob
    if HAS_ENTROPY:
        coef = d_prob + d_entropy * (tl.where(p > 0.0, log_p, 0.0) + entropy)
    d_logits = tl.where(offs_v == target, at_target, -p * coef)
    if HAS_SOFTCAP:
        tanh = capped / softcap
        d_logits *= 1.0 - tanh * tanh
    return d_logits * (logit_scale * inv_temperature)


@triton.jit
def _store_logit_grads(
    row_ptr, bias_ptr, weights_ptr, out_row_ptr, start, V, target, at_target, logsumexp, d_prob,
    entropy, d_entropy, inv_temperature, logit_scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, NARROWS: tl.constexpr, WHOLE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    offs_v = start + tl.arange(0, BLOCK_V)
    mask_v = WHOLE | (offs_v < V)
    d_logits = _logit_grads(
        row_ptr, bias_ptr, offs_v, mask_v, target, at_target, logsumexp, d_prob, entropy,
        d_entropy, inv_temperature, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY,
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
    target_logps_ptr, logsumexp_ptr, d_logps_ptr, d_prob_ptr, entropy_ptr, d_entropy_ptr,
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
    target, at_target, logsumexp, d_prob, entropy, d_entropy, inv_temperature = _row_gradients(
        row, targets_ptr, temperature_ptr, target_logps_ptr, logsumexp_ptr, d_logps_ptr,
        d_prob_ptr, entropy_ptr, d_entropy_ptr, temperature, HAS_TEMPERATURE, HAS_ENTROPY,
    )  # fmt: skip
    whole = V // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):
        _store_logit_grads(
            row_ptr, bias_ptr, weights_ptr, out_row_ptr, start, V, target, at_target, logsumexp,
            d_prob, entropy, d_entropy, inv_temperature, logit_scale, softcap,
            HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY, HAS_WEIGHTS, NARROWS, True, BLOCK_V,
        )  # fmt: skip
    if whole < V:
        _store_logit_grads(
            row_ptr, bias_ptr, weights_ptr, out_row_ptr, whole, V, target, at_target, logsumexp,
            d_prob, entropy, d_entropy, inv_temperature, logit_scale, softcap,
            HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY, HAS_WEIGHTS, NARROWS, False, BLOCK_V,
        )  # fmt: skip


@triton.jit
def _store_column_sums(
    logits_ptr, targets_ptr, bias_ptr, temperature_ptr,
    target_logps_ptr, logsumexp_ptr, d_logps_ptr, d_prob_ptr, entropy_ptr, d_entropy_ptr,
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
        target, at_target, logsumexp, d_prob, entropy, d_entropy, inv_temperature = _row_gradients(
            row, targets_ptr, temperature_ptr, target_logps_ptr, logsumexp_ptr, d_logps_ptr,
            d_prob_ptr, entropy_ptr, d_entropy_ptr, temperature, HAS_TEMPERATURE, HAS_ENTROPY,
        )  # fmt: skip
        d_logits = _logit_grads(
            logits_ptr + row * stride_logits_n, bias_ptr, offs_v, mask_v, target, at_target,
            logsumexp, d_prob, entropy, d_entropy, inv_temperature, logit_scale, softcap,
            HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY,
        )  # fmt: skip
        squares += d_logits * d_logits
        sums += d_logits
    offs = tl.program_id(1).to(tl.int64) * V + offs_v
    tl.store(squares_ptr + offs, squares, mask=mask_v)
    tl.store(sums_ptr + offs, sums, mask=mask_v)


@_per_row
def column_scores_kernel(
    logits_ptr, targets_ptr, bias_ptr, temperature_ptr,
    target_logps_ptr, logsumexp_ptr, d_logps_ptr, d_prob_ptr, entropy_ptr, d_entropy_ptr,
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
            d_logps_ptr, d_prob_ptr, entropy_ptr, d_entropy_ptr, squares_ptr, sums_ptr,
            first, last, V, stride_logits_n, logit_scale, softcap, temperature,
            HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE, HAS_ENTROPY, True, BLOCK_V,
        )  # fmt: skip
    else:
        _store_column_sums(
            logits_ptr, targets_ptr, bias_ptr, temperature_ptr, target_logps_ptr, logsumexp_ptr,
            d_logps_ptr, d_prob_ptr, entropy_ptr, d_entropy_ptr, squares_ptr, sums_ptr,
            first, last, V, stride_logits_n, logit_scale, softcap, temperature,
            HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE, HAS_ENTROPY, False, BLOCK_V,
        )  # fmt: skip


@triton.jit
def _min(x, y):
    # NaN if either is, as in torch: the hardware's own minimum would hide it.
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _max(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clamp(x, low, high):
    return _min(_max(x, low), high)


@triton.jit
def _kl(d, kl_clamp, ESTIMATOR: tl.constexpr, HAS_CLAMP: tl.constexpr):
    """The estimate of a token's KL from d = ref_logps - logps, and its derivative by logps."""
    if HAS_CLAMP:
        wanders = (d < -20.0) | (d > 20.0)
        d = _clamp(d, -20.0, 20.0)
    if ESTIMATOR == "k1" or ESTIMATOR == "k1+":
        kl, slope = -d, tl.full(d.shape, 1.0, tl.float32)
    elif ESTIMATOR == "abs":
        kl = tl.abs(d)
        slope = tl.where(d > 0.0, -1.0, tl.where(d < 0.0, 1.0, 0.0))
    elif ESTIMATOR == "k2":
        kl, slope = 0.5 * d * d, -d
    else:
        kl, slope = _expm1_minus(d), -_expm1(d)
    # What the gradient is taken of: for k1+ and k3+ not what the value is.
    source = kl
    if ESTIMATOR == "k1+" or ESTIMATOR == "k3+":
        source, slope = 0.5 * d * d, -d
    if HAS_CLAMP:
        flat = wanders | (source < -kl_clamp) | (source > kl_clamp)
        slope = tl.where(flat, 0.0, slope)
        kl = _clamp(kl, -kl_clamp, kl_clamp)
    return kl, slope


@triton.jit
def _surrogate(
    logps, old_logps, ratio, flows, advantages, low, high, ratio_max, dual_clip, tau_pos, tau_neg,
    SURROGATE: tl.constexpr,
):  # fmt: skip
    """The loss of a token and its derivative by its log-prob; `flows`: dr/dl is r, not 0."""
    if SURROGATE == "clip":
        bounded = _min(ratio, ratio_max) * advantages
        clipped = _clamp(ratio, low, high) * advantages
        loss = -_min(bounded, clipped)
        # The branch the minimum takes decides which bound cuts the gradient off.
        within = (ratio >= low) & (ratio <= high)
        flows = flows & tl.where(bounded <= clipped, ratio <= ratio_max, within)
        cap = -dual_clip * advantages
        capped = (advantages < 0.0) & (loss > cap)
        loss = tl.where(capped, cap, loss)
        d_logps = tl.where(flows & ~capped, -advantages * ratio, 0.0)
    elif SURROGATE == "sapo":
        tau = tl.where(advantages > 0.0, tau_pos, tau_neg)
        gate = 1.0 / (1.0 + tl.exp(-tau * (ratio - 1.0)))
        loss = -4.0 / tau * gate * advantages
        d_logps = -4.0 * gate * (1.0 - gate) * ratio * advantages
    else:
        weight = tl.full(logps.shape, 1.0, tl.float32)
        if SURROGATE != "reinforce":
            weight = _min(ratio, ratio_max)
        if SURROGATE == "dppo_tv":
            moved = tl.exp(logps) - tl.exp(old_logps)
            cut = tl.where(advantages > 0.0, moved > high, moved < low)
            weight = tl.where(cut, 0.0, weight)
        d_logps = -weight * advantages
        loss = d_logps * logps
    return loss, d_logps


@triton.jit(do_not_specialize=["N"])
def policy_loss_kernel(
    logps_ptr, advantages_ptr, weights_ptr, mask_ptr, old_logps_ptr, ref_logps_ptr, scale_ptr,
    entropy_ptr, count_ptr, d_logps_ptr, d_entropy_ptr, partials_ptr,
    N,
    low, high, ratio_max, dual_clip, tau_pos, tau_neg, beta, kl_clamp, entropy_coef,
    SURROGATE: tl.constexpr, KL_ESTIMATOR: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_OLD: tl.constexpr, HAS_KL: tl.constexpr, HAS_KL_CLAMP: tl.constexpr,
    HAS_KL_RATIO: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_GRAD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_n < N
    mask_n = inside
    if HAS_MASK:
        mask_n = inside & (tl.load(mask_ptr + offs_n, mask=inside, other=0) != 0)
    # Masked tokens are never read: whatever they hold, NaN included, stays out.
    logps = tl.load(logps_ptr + offs_n, mask=mask_n, other=0.0)
    advantages = tl.load(advantages_ptr + offs_n, mask=mask_n, other=0.0)
    weights = tl.load(weights_ptr + offs_n, mask=mask_n, other=0.0)
    old_logps = logps
    if HAS_OLD:
        old_logps = tl.load(old_logps_ptr + offs_n, mask=mask_n, other=0.0)

    # Above e^80 a ratio is worth its bound, and finite.
    log_ratio = logps - old_logps
    flows = log_ratio <= 80.0
    ratio = tl.exp(_min(log_ratio, 80.0))
    per_token, d_logps = _surrogate(
        logps, old_logps, ratio, flows, advantages,
        low, high, ratio_max, dual_clip, tau_pos, tau_neg, SURROGATE,
    )  # fmt: skip
    if HAS_SCALE:
        scale = tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0)
        per_token *= scale
        d_logps *= scale
    if HAS_KL:
        d = tl.load(ref_logps_ptr + offs_n, mask=mask_n, other=0.0) - logps
        kl, slope = _kl(d, kl_clamp, KL_ESTIMATOR, HAS_KL_CLAMP)
        if HAS_KL_RATIO:
            slope = ratio * (slope + tl.where(flows, kl, 0.0))
            kl *= ratio
        per_token += beta * kl
        d_logps += beta * slope
    loss = weights * per_token
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + offs_n, mask=mask_n, other=0.0)
        d_entropy = -entropy_coef / _max(tl.load(count_ptr), 1.0)
        loss += tl.where(mask_n, d_entropy * entropy, 0.0)
        if HAS_GRAD:
            tl.store(d_entropy_ptr + offs_n, tl.where(mask_n, d_entropy, 0.0), mask=inside)
    if HAS_GRAD:
        tl.store(d_logps_ptr + offs_n, weights * d_logps, mask=inside)
    # One partial sum a program: summed outside, so that the result does not depend on the order
    # in which programs run.
    tl.store(partials_ptr + block, tl.sum(loss, axis=0))


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
    grads: LogitGradInputs,
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
    grads: LogitGradInputs,
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


def policy_loss(
    config: GRPOLossConfig,
    inputs: TokenInputs,
    logps: Tensor,
    entropy: Tensor | None,
    *,
    grad: bool,
    launch: Launch = TOKEN_LAUNCH,
) -> PolicyLoss:
    count = logps.shape[0]
    has_entropy = entropy is not None and config.entropy_coef != 0.0
    if count == 0:
        return PolicyLoss(logps.sum(), logps if grad else None, logps if has_entropy else None)
    scale = None
    if config.scales_surrogate:
        scale, _ = surrogate_scale(config, inputs, Tokens.of(inputs, logps, entropy))
    blocks = triton.cdiv(count, launch.block)
    partials = logps.new_empty(blocks)
    d_logps = d_entropy = logps
    if grad:
        # Both rows begin where vectors do.
        d_logps, d_entropy = logps.new_empty((2, triton.cdiv(count, 4) * 4))[:, :count]
    with _device_of(logps):
        policy_loss_kernel[(blocks,)](
            logps, inputs.advantages, inputs.weights,
            *(logps if x is None else x for x in (
                inputs.mask, inputs.old_logps, inputs.ref_logps, scale, entropy,
            )),
            inputs.count, d_logps, d_entropy, partials,
            count,
            *_policy_scalars(config),
            SURROGATE=config.surrogate, KL_ESTIMATOR=config.kl_estimator,
            HAS_MASK=inputs.mask is not None, HAS_OLD=inputs.old_logps is not None,
            HAS_KL=config.beta != 0.0, HAS_KL_CLAMP=config.kl_clamp is not None,
            HAS_KL_RATIO=config.use_bias_correction_kl, HAS_SCALE=scale is not None,
            HAS_ENTROPY=has_entropy, HAS_GRAD=grad,
            BLOCK_N=launch.block, num_warps=launch.num_warps,
        )  # fmt: skip
    return PolicyLoss(
        partials.sum(), d_logps if grad else None, d_entropy if grad and has_entropy else None
    )


def _policy_scalars(config: GRPOLossConfig) -> tuple[float, ...]:
    """From low to entropy_coef, as the kernel takes them; a bound that is not there is `_FAR`."""
    low, high = config.clip_range
    ratio_max = config.delta
    if config.surrogate == "cispo":
        ratio_max = config.epsilon_high
    elif config.surrogate == "dppo_tv":
        low, high, ratio_max = -config.epsilon, config.upper_epsilon, config.dppo_ratio_max
    return (
        float(low), float(high),
        *(_FAR if bound is None else float(bound) for bound in (ratio_max, config.dual_clip)),
        float(config.sapo_temperature_pos), float(config.sapo_temperature_neg),
        float(config.beta), float(config.kl_clamp or 0.0), float(config.entropy_coef),
    )  # fmt: skip


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


def _gradient_pointers(grads: LogitGradInputs, unused: Tensor) -> tuple[Tensor, ...]:
    """In the order of the kernels; entropy counts where it has a gradient."""
    entropies = (grads.entropy, grads.d_entropy) if grads.d_entropy is not None else (None, None)
    per_row = (grads.logps, grads.logsumexp, grads.d_logps, grads.d_prob, *entropies)
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

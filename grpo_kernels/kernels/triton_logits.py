"""Triton kernels over rows of logits `[C, V]`: statistics, exponentials, gradients.

One program sweeps one row of the chunk: full blocks without a mask, so that they load and store
vectors whatever V is divisible by, then the rest. Raw logits u_j become
z_j = softcap(logit_scale * u_j) / T in registers; differences of z are in units of ln 2, as the
hardware has exp2. Where u_j is -inf, so is z_j, also under a softcap, whose slope is 0 there: the
entry is banned. A target of -1 is in no column.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import LogitTransform, RowGrads, TokenStats
from .triton_common import Launch, at_most, build, device_of, ln_2, log2_e, log_sigmoid, reach

# The largest block that spills in no loop and still fills the SMs of NVIDIA GPUs with warps
# (`benchmarks.compile_report`); `benchmarks.gpu_day` times others.
ROW_LAUNCH = Launch(2048, 8)
REGISTERS = 48
# The flag in `STEPS` of a dtype to which steps are rounded.
_ROUNDED = {None: 0, torch.bfloat16: 2, torch.float16: 4}

# Pointers to one value per row are not specialized: otherwise each new first row would compile the
# kernel again, in the middle of training.
per_row = triton.jit(
    do_not_specialize_on_alignment=[
        f"{name}_ptr"
        for name in ("targets", "temperature", "logps", "logsumexp", "entropy", "total",
                     "d_target", "d_softmax", "d_entropy")
    ],
)  # fmt: skip


@triton.jit
def _scale(logit_scale, temperature, STEPS: tl.constexpr):
    """The factor from the values of `_load_logits` to logits."""
    factor = 1.0 / temperature
    return factor if STEPS != 0 else factor * logit_scale


@triton.jit
def _rounded(x, STEPS: tl.constexpr):
    """Float32 values rounded to the dtype of each step."""
    if STEPS // 2 == 1:
        # On integers, as the interpreter truncates; the sum would turn some NaNs into numbers.
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000
        x = tl.where(x != x, x, bits.to(tl.float32, bitcast=True))
    if STEPS // 2 == 2:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _load_logits(row_ptr, offs_v, mask_v, logit_scale, softcap, STEPS: tl.constexpr):
    """A block of one row's logits before `_scale`, and the softcap's slope.

    `STEPS`: 1 with a softcap, plus 2 or 4 if each step is rounded to bf16 or fp16.
    """
    u = tl.load(row_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)
    slope = 1.0
    if STEPS % 2:
        # From e^(-2 |x|), which every target has: 1 - tanh^2 cancels where tanh is flat.
        x = u * (logit_scale / softcap)
        e = tl.exp(-2.0 * tl.abs(x))
        part = 1.0 / (1.0 + e)
        slope = 4.0 * e * part * part
        if STEPS > 1:
            x = _rounded(_rounded(u * logit_scale, STEPS) / softcap, STEPS)
            e = tl.exp(-2.0 * tl.abs(x))
            part = 1.0 / (1.0 + e)
        tanh = _rounded((1.0 - e) * part, STEPS)
        capped = _rounded(softcap * tl.where(x < 0.0, -tanh, tanh), STEPS)
        # u + the largest float is -inf where u is, else above any softcap; `where` takes more
        # registers.
        u = tl.minimum(capped, u + 3.4028234663852886e38)
        slope = tl.where(u == float("-inf"), 0.0, slope)
    elif STEPS > 1:
        u = _rounded(u * logit_scale, STEPS)
    return u, slope


@triton.jit
def _anchor(
    row_ptr, target_logit, last, logit_scale, softcap,
    STEPS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The largest of the target's logit and the first `last` logits, before `_scale`."""
    # Not in units of ln 2, in which the largest numbers are infinite.
    peaks = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    full = last // BLOCK_V * BLOCK_V
    for start in range(0, full, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        u, _ = _load_logits(row_ptr, offs_v, True, logit_scale, softcap, STEPS)
        peaks = tl.maximum(peaks, u)
    for start in range(full, last, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        mask_v = offs_v < last
        u, _ = _load_logits(row_ptr, offs_v, mask_v, logit_scale, softcap, STEPS)
        peaks = tl.maximum(peaks, tl.where(mask_v, u, float("-inf")))
    peak = tl.maximum(target_logit, tl.max(peaks, axis=0))
    # All are -inf so far: -inf - -inf is NaN.
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _add_block(
    rest, weighted, peak, row_ptr, exps_row_ptr, start, V, target, anchor,
    logit_scale, softcap, to_log2,
    STEPS: tl.constexpr, HAS_ENTROPY: tl.constexpr, KEEPS_EXPS: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds a block to each lane's sum of exponentials, weighted sum and maximum.

    The first sum excludes the target. A `WHOLE` block has neither the target nor columns past V.
    """
    offs_v = start + tl.arange(0, BLOCK_V)
    mask_v = WHOLE | (offs_v < V)
    u, slope = _load_logits(row_ptr, offs_v, mask_v, logit_scale, softcap, STEPS)
    # The difference first: a product of large logits would round away small differences.
    shifted = (u - anchor) * to_log2
    if not WHOLE:
        # Columns past V are outside of the vocabulary: -inf, as 0 would be a logit.
        shifted = tl.where(mask_v, shifted, float("-inf"))
    exps = tl.exp2(shifted)
    rest += exps if WHOLE else tl.where(offs_v == target, 0.0, exps)
    if HAS_ENTROPY:
        # p * log p is 0 where p is 0; -inf must not make it NaN.
        weighted += exps * tl.maximum(shifted, -1e4, propagate_nan=tl.PropagateNan.ALL)
    peak = tl.maximum(peak, shifted)
    if KEEPS_EXPS:
        stored = (exps * slope).to(exps_row_ptr.dtype.element_ty)
        tl.store(exps_row_ptr + offs_v, stored, mask=mask_v)
    return rest, weighted, peak


@triton.jit
def _sum(x, INVARIANT: tl.constexpr, BLOCK_V: tl.constexpr):
    """The sum over a block; invariant: neighbours first, then neighbouring pairs, and so on.

    Otherwise the layout decides the order, which depends on the dtypes that the kernel stores.
    """
    if INVARIANT:
        # As many halvings as the largest block takes; with one element they do nothing.
        for step in tl.static_range(14):
            if BLOCK_V >> step > 1:
                x = tl.sum(tl.reshape(x, (BLOCK_V >> (step + 1), 2)), axis=1)
    return tl.sum(x, axis=0)


# Statistics of a row and, with KEEPS_EXPS, its exponentials X, for an anchor a:
#
#     S' = sum_(j != y) e^(z_j - a),   S = S' + e^(z_y - a),   lse = a + log S
#     l  = -log(1 + S' / e^(z_y - a)),   E = log S - (sum_j e^(z_j - a) (z_j - a)) / S
#     X_j = e^(z_j - a) * slope_j,   X_y = -S' * slope_y,   slope = 1 - tanh^2 of the softcap
#
# X is the gradient of l by the raw logits, up to a factor per row (`row_factors`).
#
# Numerics: with a nearly certain target, neither S nor z_y - lse has digits of the others. The sum
# without the target has: l and 1 - p = -expm1(l) are right to 2e-5 at any margin, with a GPU's
# approximations at their bound. The target's block comes last, with the rest, so that other blocks
# need not look for it. Any anchor not far below the row's maximum works: the larger of the target's
# logit and the first block's maximum. Sums are per lane and reduced once, after the loop, together
# with the maximum. If the maximum is out of the anchor's reach, the program sweeps its row again
# with the maximum as anchor. An INVARIANT launch does so at once, and sums in an order that does
# not depend on the layout.
#
# Cost per logit: 4 bytes read, once (twice if INVARIANT), and 2 or 4 stored with KEEPS_EXPS;
# 9 or 10 instructions on sm_90, 14 in the last two blocks.
@per_row
def token_stats_kernel(
    logits_ptr, targets_ptr, temperature_ptr,
    logps_ptr, logsumexp_ptr, entropy_ptr, total_ptr, exps_ptr,
    V,
    stride_logits_n, stride_exps_n,
    logit_scale, softcap, temperature,
    STEPS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    KEEPS_EXPS: tl.constexpr, INVARIANT: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # A chunk passes 2^31 elements: row offsets need 64 bits.
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_n
    exps_row_ptr = exps_ptr + row * stride_exps_n
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    scale = _scale(logit_scale, temperature, STEPS)
    to_log2 = scale * log2_e()
    target = tl.load(targets_ptr + row).to(tl.int32)
    here = target >= 0
    target_logit, target_slope = _load_logits(row_ptr, target, here, logit_scale, softcap, STEPS)
    target_logit = tl.where(here, target_logit, float("-inf"))
    anchor = _anchor(
        row_ptr, target_logit, V if INVARIANT else tl.minimum(V, BLOCK_V),
        logit_scale, softcap, STEPS, BLOCK_V,
    )  # fmt: skip

    full = V // BLOCK_V * BLOCK_V
    # The begin of the target's block if that is a full block: the last full block takes its turn.
    target_start = tl.where(here & (target < full), target // BLOCK_V * BLOCK_V, full)
    others = tl.where(target_start < full, full - BLOCK_V, full)
    rest = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    out_of_reach = True
    while out_of_reach:
        rests = tl.zeros((BLOCK_V,), tl.float32)
        weights = tl.zeros((BLOCK_V,), tl.float32)
        peaks = tl.full((BLOCK_V,), float("-inf"), tl.float32)
        for i in range(0, others, BLOCK_V):
            start = tl.where(i == target_start, others, i)
            rests, weights, peaks = _add_block(
                rests, weights, peaks, row_ptr, exps_row_ptr, start, V, target, anchor,
                logit_scale, softcap, to_log2,
                STEPS, HAS_ENTROPY, KEEPS_EXPS, True, BLOCK_V,
            )  # fmt: skip
        # A loop of at most two turns: the addresses of an `if` would take 40 registers during the
        # sweeps.
        for i in range(others, V, BLOCK_V):
            start = tl.where(i < full, target_start, i)
            rests, weights, peaks = _add_block(
                rests, weights, peaks, row_ptr, exps_row_ptr, start, V, target, anchor,
                logit_scale, softcap, to_log2,
                STEPS, HAS_ENTROPY, KEEPS_EXPS, False, BLOCK_V,
            )  # fmt: skip
        rest = _sum(rests, INVARIANT, BLOCK_V)
        weighted = _sum(weights, INVARIANT, BLOCK_V)
        above = tl.max(peaks, axis=0)
        out_of_reach = (above > reach()) | ((above < -reach()) & (above > float("-inf")))
        out_of_reach = out_of_reach & (not INVARIANT)
        if out_of_reach:
            anchor = _anchor(
                row_ptr, target_logit, V, logit_scale, softcap, STEPS, BLOCK_V,
            )  # fmt: skip

    total = rest + tl.exp2((target_logit - anchor) * to_log2)
    # Not in units of ln 2, in which the largest numbers are infinite.
    logp = log_sigmoid((target_logit - anchor) * scale - tl.log2(rest) * ln_2())
    log_total = tl.where(target_logit == anchor, -logp * log2_e(), tl.log2(total))
    tl.store(logps_ptr + row, tl.where(here, logp, float("-inf")))
    tl.store(logsumexp_ptr + row, anchor * scale + log_total * ln_2())
    if HAS_ENTROPY:
        tl.store(entropy_ptr + row, (log_total - weighted / total) * ln_2())
    if KEEPS_EXPS:
        tl.store(total_ptr + row, total)
        # A row without a distribution is NaN.
        d_target = tl.where(total > 0.0, -rest, logp) * target_slope
        # After its block, which another thread stored.
        tl.debug_barrier()
        tl.store(exps_row_ptr + target, d_target.to(exps_ptr.dtype.element_ty), mask=here)


@triton.jit
def _store_logit_grads(
    row_ptr, out_row_ptr, start, V, row_grads, logit_scale, softcap,
    STEPS: tl.constexpr, HAS_ENTROPY: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    offs_v = start + tl.arange(0, BLOCK_V)
    mask_v = WHOLE | (offs_v < V)
    target, logsumexp, d_softmax, d_target, entropy, d_entropy, scale = row_grads
    u, slope = _load_logits(row_ptr, offs_v, mask_v, logit_scale, softcap, STEPS)
    log_p = (u * scale - logsumexp) * log2_e()
    p = tl.exp2(log_p)
    coef = d_softmax
    if HAS_ENTROPY:
        coef = d_softmax + d_entropy * (tl.where(p == 0.0, 0.0, log_p) + entropy)
    d_logits = tl.where(offs_v == target, d_target, -p * coef) * slope
    tl.store(out_row_ptr + offs_v, d_logits.to(out_row_ptr.dtype.element_ty), mask=mask_v)


# Gradient of a row, from dL/dl (d_logps), its softmax part (d_softmax) and dL/dE (d_entropy):
#
#     dL/dz_j = d_logps * 1[j = y] - p_j * (d_softmax + d_entropy * (z_j - lse + E))
#     dL/du_j = dL/dz_j * (1 - tanh^2) * logit_scale / T
#
# Numerics: p = e^(z - lse) is off by an ulp of the logits. The target's entry, where 1 and p_y
# would cancel, is one number from -expm1(l): `RowGrads.of`.
#
# Cost per logit: 4 bytes read and 2 or 4 stored, once; 11 instructions on sm_90, 12 with d_entropy.
@per_row
def logit_grads_kernel(
    logits_ptr, targets_ptr, temperature_ptr,
    logsumexp_ptr, d_softmax_ptr, d_target_ptr, entropy_ptr, d_entropy_ptr,
    out_ptr,
    V,
    stride_logits_n, stride_out_n,
    logit_scale, softcap, temperature,
    STEPS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_n
    out_row_ptr = out_ptr + row * stride_out_n
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    scale = _scale(logit_scale, temperature, STEPS)
    slope = logit_scale / temperature
    target = tl.load(targets_ptr + row)
    logsumexp = tl.load(logsumexp_ptr + row)
    d_softmax = slope * tl.load(d_softmax_ptr + row)
    d_target = slope * tl.load(d_target_ptr + row)
    entropy, d_entropy = 0.0, 0.0
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + row) * log2_e()
        d_entropy = tl.load(d_entropy_ptr + row) * slope * ln_2()
    row_grads = (target, logsumexp, d_softmax, d_target, entropy, d_entropy, scale)
    full = V // BLOCK_V * BLOCK_V
    for start in range(0, full, BLOCK_V):
        _store_logit_grads(
            row_ptr, out_row_ptr, start, V, row_grads, logit_scale, softcap,
            STEPS, HAS_ENTROPY, True, BLOCK_V,
        )  # fmt: skip
    if full < V:
        _store_logit_grads(
            row_ptr, out_row_ptr, full, V, row_grads, logit_scale, softcap,
            STEPS, HAS_ENTROPY, False, BLOCK_V,
        )  # fmt: skip


@functools.cache
def block_of(launch: Launch, V: int) -> dict[str, Any]:
    """Columns that a program takes at a time, and options that build its kernel.

    No more threads than columns, with warps of 64 as on AMD: of several threads with one column,
    one would read it while another overwrites it.
    """
    block_v = min(launch.block, max(128, triton.next_power_of_2(V)))
    return {"BLOCK_V": block_v, **build(min(launch.num_warps, block_v // 64))}


def temperature_pointer(transform: LogitTransform, unused: Tensor) -> Tensor:
    """The temperatures of the rows; `unused` if all rows share one."""
    return transform.temperature if isinstance(transform.temperature, Tensor) else unused


def transform_scalars(transform: LogitTransform) -> tuple[float, float, float]:
    """Scale, softcap and temperature, in the kernels' order."""
    temperature = transform.temperature
    return (
        float(transform.logit_scale),
        float(transform.softcap or 1.0),
        1.0 if isinstance(temperature, Tensor) else float(temperature),
    )


def transform_flags(transform: LogitTransform) -> dict[str, int]:
    """The flags that kernels are compiled with for a transform."""
    has_steps = transform.softcap is not None or transform.logit_scale != 1.0
    rounded = _ROUNDED[transform.rounding] if has_steps else 0
    return {
        "STEPS": (transform.softcap is not None) + rounded,
        "HAS_TEMPERATURE": isinstance(transform.temperature, Tensor),
    }


def gradient_pointers(grads: RowGrads, unused: Tensor) -> tuple[Tensor, ...]:
    """Per-row pointers in the kernels' order; the entropy's only if it has a gradient."""
    entropies = (grads.entropy, grads.d_entropy) if grads.d_entropy is not None else (None, None)
    per_row = (grads.logsumexp, grads.d_softmax, grads.d_target, *entropies)
    return tuple(unused if x is None else x for x in per_row)


def token_stats(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    *,
    entropy: bool,
    exps: Tensor | None = None,
    out: TokenStats | None = None,
    invariant: bool = False,
    launch: Launch = ROW_LAUNCH,
) -> TokenStats:
    count, V = logits.shape
    in_place = exps is not None and exps.data_ptr() == logits.data_ptr()
    if out is None:
        out = TokenStats.empty(logits, entropy=entropy, total=exps is not None)
    if count:
        unused = out.logps
        pointers = (unused if x is None else x for x in out)
        stored = logits if exps is None else exps
        flags = transform_flags(transform)
        # Five programs per multiprocessor, not four: an A100 then sweeps a strip in one wave.
        plain = exps is not None and flags["STEPS"] == 0
        room = at_most(REGISTERS, logits) if plain else {}
        with device_of(logits):
            token_stats_kernel[(count,)](
                logits, targets, temperature_pointer(transform, logits),
                *pointers, stored,
                V,
                logits.stride(0), stored.stride(0),
                *transform_scalars(transform),
                **flags,
                HAS_ENTROPY=entropy, KEEPS_EXPS=exps is not None,
                # In place the logits are overwritten before another anchor could be used.
                INVARIANT=in_place or invariant,
                **block_of(launch, V), **room,
            )  # fmt: skip
    return out


def logit_grads_(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    grads: RowGrads,
    out: Tensor,
    *,
    launch: Launch = ROW_LAUNCH,
) -> None:
    count, V = logits.shape
    if count and V:
        with device_of(logits):
            logit_grads_kernel[(count,)](
                logits, targets, temperature_pointer(transform, logits),
                *gradient_pointers(grads, logits),
                out,
                V,
                logits.stride(0), out.stride(0),
                *transform_scalars(transform),
                **transform_flags(transform),
                HAS_ENTROPY=grads.d_entropy is not None,
                **block_of(launch, V),
            )  # fmt: skip

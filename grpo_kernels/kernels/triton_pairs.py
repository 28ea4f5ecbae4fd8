"""Triton kernels that read two models' logits of the same tokens, one program per row.

The same functions as in `pairs.py`, with the formulas of `triton_divergences.py`: statistics of
both rows, then the divergence and the mean of h, then the gradient. The last two compute d in the
same way, so that its rounding error is the same in h and in its mean: where a row has one likely
id, the gradient is the small difference of these two.

In the kernels a `model` is `(row_ptr, logit_scale, softcap, scale)`. Its `sums` are, per lane, of
e^x and of e^x x, and the largest x, with x the logits minus the row's anchor, to base 2.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import LogitTransform, RowGrads
from .divergences import Divergence
from .pair_stats import PairStats
from .triton_common import Launch, device_of, ln_2, log2_e, reach
from .triton_divergences import functions_of
from .triton_logits import (
    _anchor,
    _load_logits,
    _scale,
    _sum,
    block_of,
    gradient_pointers,
    temperature_pointer,
    transform_flags,
    transform_scalars,
)

PAIR_LAUNCH, PAIR_GRADS_LAUNCH = Launch(1024, 8), Launch(2048, 8)

per_row = triton.jit(
    do_not_specialize=["stride_stats"],
    do_not_specialize_on_alignment=[
        f"{name}_ptr"
        for name in ("targets", "temperature", "ref_temperature", "stats", "logsumexp",
                     "d_target", "d_softmax", "entropy", "d_entropy", "d_divergence")
    ],
)  # fmt: skip


@triton.jit
def _row_of(
    row, logits_ptr, stride_n, logit_scale, softcap, temperature, temperature_ptr,
    STEPS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """A model's row, as `_load` takes it."""
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    scale = _scale(logit_scale, temperature, STEPS)
    return logits_ptr + row * stride_n, logit_scale, softcap, scale


@triton.jit
def _load(model, offs_v, mask_v, STEPS: tl.constexpr):
    row_ptr, logit_scale, softcap, _ = model
    return _load_logits(row_ptr, offs_v, mask_v, logit_scale, softcap, STEPS)


@triton.jit
def _load_target(model, target, STEPS: tl.constexpr):
    """The target's logit before `_scale`, -inf for a target of -1."""
    logit, _ = _load(model, target, target >= 0, STEPS)
    return tl.where(target >= 0, logit, float("-inf"))


@triton.jit
def _anchor_of(model, target_logit, last, STEPS: tl.constexpr, BLOCK_V: tl.constexpr):
    row_ptr, logit_scale, softcap, _ = model
    return _anchor(row_ptr, target_logit, last, logit_scale, softcap, STEPS, BLOCK_V)


@triton.jit
def _log_ratio(u, t, model, ref_model, shift):
    """The d of two logits before `_scale`."""
    _, _, _, scale = model
    _, _, _, ref_scale = ref_model
    # u * scale - t * ref_scale would lose digits between close models. Equal scales are a separate
    # case, as a fused difference of equal products is their rounding error.
    gap = tl.where(scale == ref_scale, 0.0, scale - ref_scale)
    # A t of -inf makes the first term infinite already.
    return ((u - t) * scale + tl.maximum(t, -1e30) * gap) - shift


@triton.jit
def _to_log2(u, anchor, model, mask_v):
    """Logits minus the anchor, to base 2; -inf where they are masked."""
    _, _, _, scale = model
    return tl.where(mask_v, (u - anchor) * (scale * log2_e()), float("-inf"))


@triton.jit
def _no_sums(BLOCK_V: tl.constexpr):
    return (
        tl.zeros((BLOCK_V,), tl.float32),
        tl.zeros((BLOCK_V,), tl.float32),
        tl.full((BLOCK_V,), float("-inf"), tl.float32),
    )


@triton.jit
def _add_exps(sums, x, exps):
    total, weighted, peak = sums
    weighted += exps * tl.maximum(x, -1e4, propagate_nan=tl.PropagateNan.ALL)
    return total + exps, weighted, tl.maximum(peak, x)


@triton.jit
def _add_pair(
    state, start, V, model, ref_model, anchor, ref_anchor,
    STEPS: tl.constexpr, REF_STEPS: tl.constexpr, WHOLE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds a block to each lane's sums and maxima."""
    sums, ref_sums, ref_at_peak = state
    offs_v = start + tl.arange(0, BLOCK_V)
    mask_v = WHOLE | (offs_v < V)
    u, _ = _load(model, offs_v, mask_v, STEPS)
    t, _ = _load(ref_model, offs_v, mask_v, REF_STEPS)
    x = _to_log2(u, anchor, model, mask_v)
    y = _to_log2(t, ref_anchor, ref_model, mask_v)
    ref_at_peak = tl.where(x > sums[2], y, ref_at_peak)
    return _add_exps(sums, x, tl.exp2(x)), _add_exps(ref_sums, y, tl.exp2(y)), ref_at_peak


@triton.jit
def _is_far(peak):
    """True if the largest logit is out of its anchor's reach."""
    return (peak > reach()) | ((peak < -reach()) & (peak > float("-inf")))


@triton.jit
def _store_softmax(
    out_ptr, stride, model, target_logit, anchor, total, weighted,
):  # fmt: skip
    """Stores log-prob of the target, logsumexp and entropy."""
    _, _, _, scale = model
    log_total = tl.log2(total)
    logp = (target_logit - anchor) * scale - log_total * ln_2()
    tl.store(out_ptr, tl.where(target_logit == float("-inf"), float("-inf"), logp))
    tl.store(out_ptr + stride, anchor * scale + log_total * ln_2())
    tl.store(out_ptr + 2 * stride, (log_total - weighted / total) * ln_2())
    return log_total


# Statistics of both rows. For either model, with x = (u - anchor) scale / ln 2 of its logits u,
#
#     S = sum 2^x,   lse = anchor scale + log S,   E = log S - ln 2 (sum 2^x x) / S
#
# and shift = lse - lse'.
# Numerics: the anchor is subtracted before the product with the scale, which would round away small
# differences of large logits. The shift comes from anchors and sums, not from the rounded lse. A
# row whose largest logit is out of its anchor's reach is swept again with the largest as anchor.
# Cost: one sweep, 8 bytes read per pair of logits; an `INVARIANT` launch reads each row twice.
@per_row
def pair_stats_kernel(
    logits_ptr, ref_logits_ptr, targets_ptr, temperature_ptr, ref_temperature_ptr, stats_ptr,
    V,
    stride_logits_n, stride_ref_n, stride_stats,
    logit_scale, softcap, temperature, ref_logit_scale, ref_softcap, ref_temperature,
    STEPS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    REF_STEPS: tl.constexpr, REF_TEMPERATURE: tl.constexpr,
    INVARIANT: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    model = _row_of(
        row, logits_ptr, stride_logits_n, logit_scale, softcap, temperature, temperature_ptr,
        STEPS, HAS_TEMPERATURE,
    )  # fmt: skip
    ref_model = _row_of(
        row, ref_logits_ptr, stride_ref_n, ref_logit_scale, ref_softcap, ref_temperature,
        ref_temperature_ptr, REF_STEPS, REF_TEMPERATURE,
    )  # fmt: skip
    scale, ref_scale = model[3], ref_model[3]
    target = tl.load(targets_ptr + row)
    target_logit = _load_target(model, target, STEPS)
    ref_target_logit = _load_target(ref_model, target, REF_STEPS)
    last = V if INVARIANT else tl.minimum(V, BLOCK_V)
    anchor = _anchor_of(model, target_logit, last, STEPS, BLOCK_V)
    ref_anchor = _anchor_of(ref_model, ref_target_logit, last, REF_STEPS, BLOCK_V)

    full = V // BLOCK_V * BLOCK_V
    total = tl.zeros((), tl.float32)
    ref_total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    ref_weighted = tl.zeros((), tl.float32)
    peak = tl.zeros((), tl.float32)
    ref_at_peak = tl.zeros((), tl.float32)
    ref_peak = tl.zeros((), tl.float32)
    again = True
    while again:
        state = (
            _no_sums(BLOCK_V), _no_sums(BLOCK_V),
            tl.full((BLOCK_V,), float("-inf"), tl.float32),
        )  # fmt: skip
        for start in range(0, full, BLOCK_V):
            state = _add_pair(
                state, start, V, model, ref_model, anchor, ref_anchor,
                STEPS, REF_STEPS, True, BLOCK_V,
            )  # fmt: skip
        for start in range(full, V, BLOCK_V):
            state = _add_pair(
                state, start, V, model, ref_model, anchor, ref_anchor,
                STEPS, REF_STEPS, False, BLOCK_V,
            )  # fmt: skip
        sums, ref_sums, at_peaks = state
        totals, weights, peaks = sums
        ref_totals, ref_weights, ref_peaks = ref_sums
        total = _sum(totals, INVARIANT, BLOCK_V)
        ref_total = _sum(ref_totals, INVARIANT, BLOCK_V)
        weighted = _sum(weights, INVARIANT, BLOCK_V)
        ref_weighted = _sum(ref_weights, INVARIANT, BLOCK_V)
        peak = tl.max(peaks, axis=0)
        ref_peak = tl.max(ref_peaks, axis=0)
        ref_at_peak = tl.max(tl.where(peaks == peak, at_peaks, float("-inf")), axis=0)
        again = (_is_far(peak) | _is_far(ref_peak)) & (not INVARIANT)
        if again:
            anchor = _anchor_of(model, target_logit, V, STEPS, BLOCK_V)
            ref_anchor = _anchor_of(ref_model, ref_target_logit, V, REF_STEPS, BLOCK_V)

    out_ptr = stats_ptr + row
    log_total = _store_softmax(out_ptr, stride_stats, model, target_logit, anchor, total, weighted)
    ref_log_total = _store_softmax(
        out_ptr + 3 * stride_stats, stride_stats, ref_model, ref_target_logit, ref_anchor,
        ref_total, ref_weighted,
    )  # fmt: skip
    shift = (anchor * scale - ref_anchor * ref_scale) + (log_total - ref_log_total) * ln_2()
    tl.store(out_ptr + 6 * stride_stats, shift)
    tl.store(out_ptr + 9 * stride_stats, anchor * scale + peak * ln_2())
    tl.store(out_ptr + 10 * stride_stats, ref_anchor * ref_scale + ref_at_peak * ln_2())
    tl.store(out_ptr + 11 * stride_stats, ref_anchor * ref_scale + ref_peak * ln_2())
    tl.store(out_ptr + 12 * stride_stats, anchor)
    tl.store(out_ptr + 13 * stride_stats, ref_anchor)
    tl.store(out_ptr + 14 * stride_stats, log_total)


@triton.jit
def _softmaxes(
    start, V, model, ref_model, row_stats,
    STEPS: tl.constexpr, REF_STEPS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A block's p, q and d, the log of p, and the softcap's slope."""
    offs_v = start + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    anchor, ref_anchor, log_total, ref_log_total, shift = row_stats
    u, slope = _load(model, offs_v, mask_v, STEPS)
    t, _ = _load(ref_model, offs_v, mask_v, REF_STEPS)
    d = _log_ratio(u, t, model, ref_model, shift)
    log_p = _to_log2(u, anchor, model, mask_v) - log_total
    log_q = _to_log2(t, ref_anchor, ref_model, mask_v) - ref_log_total
    return tl.exp2(log_p), tl.exp2(log_q), d, log_p, slope


@triton.jit
def _row_stats(stats_ptr, stride_stats, model, ref_model):
    """Both anchors, log2 of both sums, and the shift, for p, q and d of the row."""
    shift = tl.load(stats_ptr + 6 * stride_stats)
    anchor = tl.load(stats_ptr + 12 * stride_stats)
    ref_anchor = tl.load(stats_ptr + 13 * stride_stats)
    log_total = tl.load(stats_ptr + 14 * stride_stats)
    sums_offset = shift - (anchor * model[3] - ref_anchor * ref_model[3])
    return anchor, ref_anchor, log_total, log_total - sums_offset * log2_e(), shift


# The divergence L = sum addend(p, q, d) and the mean of h, sum p h, from both rows' statistics.
# Numerics: addends are not below 0 and exact to rounding, so that close models keep digits.
# Cost: one sweep, 8 bytes read per pair of logits.
@per_row
def divergences_kernel(
    logits_ptr, ref_logits_ptr, temperature_ptr, ref_temperature_ptr, stats_ptr,
    V,
    stride_logits_n, stride_ref_n, stride_stats,
    logit_scale, softcap, temperature, ref_logit_scale, ref_softcap, ref_temperature, beta,
    STEPS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    REF_STEPS: tl.constexpr, REF_TEMPERATURE: tl.constexpr,
    ADDEND: tl.constexpr, MOMENT: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    model = _row_of(
        row, logits_ptr, stride_logits_n, logit_scale, softcap, temperature, temperature_ptr,
        STEPS, HAS_TEMPERATURE,
    )  # fmt: skip
    ref_model = _row_of(
        row, ref_logits_ptr, stride_ref_n, ref_logit_scale, ref_softcap, ref_temperature,
        ref_temperature_ptr, REF_STEPS, REF_TEMPERATURE,
    )  # fmt: skip
    row_stats = _row_stats(stats_ptr + row, stride_stats, model, ref_model)
    addends = tl.zeros((BLOCK_V,), tl.float32)
    moments = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, V, BLOCK_V):
        p, q, d, _, _ = _softmaxes(start, V, model, ref_model, row_stats, STEPS, REF_STEPS, BLOCK_V)
        addends += ADDEND(p, q, d, beta)
        moments += MOMENT(p, q, d, 0.0, beta)
    tl.store(stats_ptr + row + 7 * stride_stats, tl.sum(addends, axis=0))
    tl.store(stats_ptr + row + 8 * stride_stats, tl.sum(moments, axis=0))


# The gradient of the policy's raw logits, with c = d_divergence scale and the target y:
#
#     dL/dz_j = c p_j (h_j - mean) - p_j (d_softmax + d_entropy (log p_j + E)),   j != y
#     dL/dz_y = c p_y (h_y - mean) + d_target
#     dL/du_j = dL/dz_j softcap'(u_j) logit_scale / T
#
# Numerics: d is computed as in `divergences_kernel`, whose mean has the same rounding error.
# Cost: one sweep, per pair of logits 8 bytes read and 2 or 4 written.
@per_row
def pair_grads_kernel(
    logits_ptr, ref_logits_ptr, targets_ptr, temperature_ptr, ref_temperature_ptr, stats_ptr,
    logsumexp_ptr, d_softmax_ptr, d_target_ptr, entropy_ptr, d_entropy_ptr, d_divergence_ptr,
    out_ptr,
    V,
    stride_logits_n, stride_ref_n, stride_stats, stride_out_n,
    logit_scale, softcap, temperature, ref_logit_scale, ref_softcap, ref_temperature,
    beta, slope_scale,
    STEPS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    REF_STEPS: tl.constexpr, REF_TEMPERATURE: tl.constexpr,
    HAS_GRADS: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    MOMENT: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    out_row_ptr = out_ptr + row * stride_out_n
    model = _row_of(
        row, logits_ptr, stride_logits_n, logit_scale, softcap, temperature, temperature_ptr,
        STEPS, HAS_TEMPERATURE,
    )  # fmt: skip
    ref_model = _row_of(
        row, ref_logits_ptr, stride_ref_n, ref_logit_scale, ref_softcap, ref_temperature,
        ref_temperature_ptr, REF_STEPS, REF_TEMPERATURE,
    )  # fmt: skip
    chain = model[3] * logit_scale if STEPS != 0 else model[3]
    row_stats = _row_stats(stats_ptr + row, stride_stats, model, ref_model)
    mean = tl.load(stats_ptr + row + 8 * stride_stats)
    h_scale = chain * tl.load(d_divergence_ptr + row) * slope_scale
    target, d_softmax, d_target, entropy, d_entropy = -1, 0.0, 0.0, 0.0, 0.0
    if HAS_GRADS:
        target = tl.load(targets_ptr + row)
        d_softmax = chain * tl.load(d_softmax_ptr + row)
        d_target = chain * tl.load(d_target_ptr + row)
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + row) * log2_e()
        d_entropy = tl.load(d_entropy_ptr + row) * chain * ln_2()
    for start in range(0, V, BLOCK_V):
        p, q, d, log_p, softcap_slope = _softmaxes(
            start, V, model, ref_model, row_stats, STEPS, REF_STEPS, BLOCK_V
        )
        d_logits = h_scale * MOMENT(p, q, d, mean, beta)
        offs_v = start + tl.arange(0, BLOCK_V)
        if HAS_GRADS:
            coef = d_softmax
            if HAS_ENTROPY:
                coef = d_softmax + d_entropy * (tl.where(p == 0.0, 0.0, log_p) + entropy)
            d_logits += tl.where(offs_v == target, d_target, -p * coef)
        d_logits = d_logits * softcap_slope
        tl.store(out_row_ptr + offs_v, d_logits.to(out_row_ptr.dtype.element_ty), mask=offs_v < V)


def _scalars(transform: LogitTransform, ref_transform: LogitTransform) -> tuple[float, ...]:
    return (*transform_scalars(transform), *transform_scalars(ref_transform))


def _flags(transform: LogitTransform, ref_transform: LogitTransform) -> dict[str, Any]:
    ref_flags = transform_flags(ref_transform).items()
    names = {"STEPS": "REF_STEPS", "HAS_TEMPERATURE": "REF_TEMPERATURE"}
    return transform_flags(transform) | {names[k]: v for k, v in ref_flags}


def pair_stats(
    logits: Tensor,
    ref_logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    ref_transform: LogitTransform,
    out: PairStats,
    *,
    invariant: bool = False,
    launch: Launch = PAIR_LAUNCH,
) -> None:
    count, V = logits.shape
    if count:
        with device_of(logits):
            pair_stats_kernel[(count,)](
                logits, ref_logits, targets, temperature_pointer(transform, logits),
                temperature_pointer(ref_transform, logits), out.values,
                V,
                logits.stride(0), ref_logits.stride(0), out.values.stride(0),
                *_scalars(transform, ref_transform),
                **_flags(transform, ref_transform),
                INVARIANT=invariant,
                **block_of(launch, V),
            )  # fmt: skip


def set_anchors(stats: PairStats) -> None:
    """Sets the anchors to 0, and `log_total` relative to them, after a merge of several ranks'."""
    stats.anchor.zero_()
    stats.ref_anchor.zero_()
    stats.log_total.copy_(stats.logsumexp * (1 / math.log(2)))


def divergences(
    logits: Tensor,
    ref_logits: Tensor,
    transform: LogitTransform,
    ref_transform: LogitTransform,
    stats: PairStats,
    *,
    divergence: Divergence,
    launch: Launch = PAIR_LAUNCH,
) -> None:
    count, V = logits.shape
    functions = functions_of(divergence)
    if count:
        with device_of(logits):
            divergences_kernel[(count,)](
                logits, ref_logits, temperature_pointer(transform, logits),
                temperature_pointer(ref_transform, logits), stats.values,
                V,
                logits.stride(0), ref_logits.stride(0), stats.values.stride(0),
                *_scalars(transform, ref_transform), float(divergence.beta),
                **_flags(transform, ref_transform),
                ADDEND=functions.addend, MOMENT=functions.moment,
                **block_of(launch, V),
            )  # fmt: skip


def pair_grads_(
    logits: Tensor,
    ref_logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    ref_transform: LogitTransform,
    stats: PairStats,
    grads: RowGrads | None,
    d_divergence: Tensor,
    out: Tensor,
    *,
    divergence: Divergence,
    launch: Launch = PAIR_GRADS_LAUNCH,
) -> None:
    count, V = logits.shape
    functions = functions_of(divergence)
    if count and V:
        pointers = [logits] * 5 if grads is None else gradient_pointers(grads, logits)
        with device_of(logits):
            pair_grads_kernel[(count,)](
                logits, ref_logits, targets, temperature_pointer(transform, logits),
                temperature_pointer(ref_transform, logits), stats.values,
                *pointers, d_divergence,
                out,
                V,
                logits.stride(0), ref_logits.stride(0), stats.values.stride(0), out.stride(0),
                *_scalars(transform, ref_transform),
                float(divergence.beta), float(divergence.scale),
                **_flags(transform, ref_transform),
                HAS_GRADS=grads is not None,
                HAS_ENTROPY=grads is not None and grads.d_entropy is not None,
                MOMENT=functions.moment,
                **block_of(launch, V),
            )  # fmt: skip

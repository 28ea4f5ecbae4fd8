"""Triton kernels that read two models' logits of the same tokens, one program per row.

What they compute is in `pairs.py`. The statistics take one reading of both rows, though d is known
only when both sums are. Until then it is off by one number c of the row, which its own sum tells:

    sum p e^-(d + c) = e^-c,    sum p (d + c + e^-(d + c) - 1) = L + c + e^-c - 1

A row in which the second would cancel is swept once more, with c subtracted. Statistics and
gradient make d alike, so that its rounding is in the mean of h as it is in h: where a row has one
likely id, the gradient is what is left of these two.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import LogitTransform, RowGrads
from .pair_stats import PairStats, known_kind
from .triton_common import Launch, device_of, expm1, expm1_minus, ln_2, log2_e, reach
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


@triton.constexpr_function
def small():
    """A |log(a/b)| below which a series has the digits."""
    return 0.3


per_row = triton.jit(
    do_not_specialize=["stride_stats"],
    do_not_specialize_on_alignment=[
        f"{name}_ptr"
        for name in ("targets", "temperature", "ref_temperature", "stats", "logsumexp",
                     "at_target", "d_softmax", "entropy", "d_entropy", "d_divergence")
    ],
)  # fmt: skip


@triton.jit
def _phi(x):
    """e^-x - 1 + x near 0."""
    return x * x * (0.5 + x * (-1 / 6 + x * (1 / 24 + x * (-1 / 120 + x * (1 / 720)))))


@triton.jit
def _share(a, b, x):
    """`a log(a / b) + b - a`, x being the logarithm; b where a is 0."""
    far = tl.where(a == 0.0, 0.0, a * x) + b - a
    return tl.where(tl.abs(x) < small(), a * _phi(x), far)


@triton.jit
def _log1p(x):
    """log(1 + x) for x in (-1, 1), without cancellation."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _log_ratio(u, t, scale, ref_scale, shift):
    """The d of two logits before `_scale`."""
    # Not u * scale - t * ref_scale: of models that are close it has lost what the products have
    # rounded away. Scales are compared, as a fused difference of equal products is their rounding.
    gap = tl.where(scale == ref_scale, 0.0, scale - ref_scale)
    # A t of -inf is infinite in the first term already.
    return ((u - t) * scale + tl.maximum(t, -1e30) * gap) - shift


@triton.jit
def _to_mixture(d, beta):
    """`log p - log m` and `log q - log m`."""
    above = d >= 0.0
    # The larger of p and q first: of the other one the ratio to m may be 0.
    log_ratio = -_log1p(tl.where(above, beta, 1.0 - beta) * expm1(-tl.abs(d)))
    return tl.where(above, log_ratio, log_ratio + d), tl.where(above, log_ratio - d, log_ratio)


@triton.jit
def _moment(p, q, d, mean, beta, KIND: tl.constexpr):
    """The term p (h - mean), 0 where p is."""
    if KIND == "forward":
        return tl.where(tl.abs(d) < small(), -p * (expm1(-d) + mean), p - q - p * mean)
    if KIND == "jsd":
        d, _ = _to_mixture(d, beta)
    return tl.where(p == 0.0, 0.0, p * (d - mean))


@triton.jit
def _add_pair(
    total, ref_total, weighted, ref_weighted, shares, excess, peak, ref_at_peak, ref_peak,
    row_ptr, ref_row_ptr, start, V, anchor, ref_anchor, shift, known,
    logit_scale, softcap, scale, ref_logit_scale, ref_softcap, ref_scale,
    HAS_SOFTCAP: tl.constexpr, REF_SOFTCAP: tl.constexpr, KIND: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds a block to each lane's sums and maxima."""
    offs_v = start + tl.arange(0, BLOCK_V)
    mask_v = WHOLE | (offs_v < V)
    u, _ = _load_logits(row_ptr, offs_v, mask_v, logit_scale, softcap, HAS_SOFTCAP)
    t, _ = _load_logits(ref_row_ptr, offs_v, mask_v, ref_logit_scale, ref_softcap, REF_SOFTCAP)
    x = (u - anchor) * (scale * log2_e())
    y = (t - ref_anchor) * (ref_scale * log2_e())
    if not WHOLE:
        x = tl.where(mask_v, x, float("-inf"))
        y = tl.where(mask_v, y, float("-inf"))
    p = tl.exp2(x)
    q = tl.exp2(y)
    total += p
    ref_total += q
    weighted += p * tl.maximum(x, -1e4, propagate_nan=tl.PropagateNan.ALL)
    ref_weighted += q * tl.maximum(y, -1e4, propagate_nan=tl.PropagateNan.ALL)
    if KIND is not None:
        d = _log_ratio(u, t, scale, ref_scale, shift)
        q = tl.exp2(y + known * log2_e())
        near = tl.abs(d) < small()
        phi = _phi(d)
        above = tl.where(near, p * (phi - d), q - p)
        excess += above
        if KIND == "reverse":
            shares += tl.where(near, p * phi, tl.where(p == 0.0, 0.0, p * d) + above)
        else:  # q (e^d - 1 - d), by q = p e^-d
            of_q = p * (d * d - phi * (1.0 + d))
            shares += tl.where(near, of_q, tl.where(q == 0.0, 0.0, -q * d) - above)
    ref_at_peak = tl.where(x > peak, y, ref_at_peak)
    peak = tl.maximum(peak, x)
    ref_peak = tl.maximum(ref_peak, y)
    return total, ref_total, weighted, ref_weighted, shares, excess, peak, ref_at_peak, ref_peak


@per_row
def pair_stats_kernel(
    logits_ptr, ref_logits_ptr, targets_ptr, temperature_ptr, ref_temperature_ptr, stats_ptr,
    V,
    stride_logits_n, stride_ref_n, stride_stats,
    logit_scale, softcap, temperature, ref_logit_scale, ref_softcap, ref_temperature,
    HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    REF_SOFTCAP: tl.constexpr, REF_TEMPERATURE: tl.constexpr,
    KIND: tl.constexpr, INVARIANT: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_n
    ref_row_ptr = ref_logits_ptr + row * stride_ref_n
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    if REF_TEMPERATURE:
        ref_temperature = tl.load(ref_temperature_ptr + row)
    scale = _scale(logit_scale, temperature, HAS_SOFTCAP)
    ref_scale = _scale(ref_logit_scale, ref_temperature, REF_SOFTCAP)
    target = tl.load(targets_ptr + row)
    here = target >= 0
    target_logit, _ = _load_logits(row_ptr, target, here, logit_scale, softcap, HAS_SOFTCAP)
    ref_logit, _ = _load_logits(
        ref_row_ptr, target, here, ref_logit_scale, ref_softcap, REF_SOFTCAP
    )
    target_logit = tl.where(here, target_logit, float("-inf"))
    ref_logit = tl.where(here, ref_logit, float("-inf"))
    last = V if INVARIANT else tl.minimum(V, BLOCK_V)
    anchor = _anchor(row_ptr, target_logit, last, logit_scale, softcap, HAS_SOFTCAP, BLOCK_V)
    ref_anchor = _anchor(
        ref_row_ptr, ref_logit, last, ref_logit_scale, ref_softcap, REF_SOFTCAP, BLOCK_V
    )

    whole = V // BLOCK_V * BLOCK_V
    # d is less the difference of the anchors, and less what is known of that of the sums.
    shift = anchor * scale - ref_anchor * ref_scale
    known = tl.zeros((), tl.float32)
    total = tl.zeros((), tl.float32)
    ref_total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    ref_weighted = tl.zeros((), tl.float32)
    divergence = tl.zeros((), tl.float32)
    minus_c = tl.zeros((), tl.float32)
    above = tl.zeros((), tl.float32)
    at_peak = tl.zeros((), tl.float32)
    ref_above = tl.zeros((), tl.float32)
    shifted = False
    again = True
    while again:
        totals = tl.zeros((BLOCK_V,), tl.float32)
        ref_totals = tl.zeros((BLOCK_V,), tl.float32)
        weights = tl.zeros((BLOCK_V,), tl.float32)
        ref_weights = tl.zeros((BLOCK_V,), tl.float32)
        shares = tl.zeros((BLOCK_V,), tl.float32)
        excesses = tl.zeros((BLOCK_V,), tl.float32)
        peaks = tl.full((BLOCK_V,), float("-inf"), tl.float32)
        at_peaks = tl.full((BLOCK_V,), float("-inf"), tl.float32)
        ref_peaks = tl.full((BLOCK_V,), float("-inf"), tl.float32)
        for start in range(0, whole, BLOCK_V):
            (totals, ref_totals, weights, ref_weights, shares, excesses,
             peaks, at_peaks, ref_peaks) = _add_pair(
                totals, ref_totals, weights, ref_weights, shares, excesses,
                peaks, at_peaks, ref_peaks,
                row_ptr, ref_row_ptr, start, V, anchor, ref_anchor, shift, known,
                logit_scale, softcap, scale, ref_logit_scale, ref_softcap, ref_scale,
                HAS_SOFTCAP, REF_SOFTCAP, KIND, True, BLOCK_V,
            )  # fmt: skip
        for start in range(whole, V, BLOCK_V):
            (totals, ref_totals, weights, ref_weights, shares, excesses,
             peaks, at_peaks, ref_peaks) = _add_pair(
                totals, ref_totals, weights, ref_weights, shares, excesses,
                peaks, at_peaks, ref_peaks,
                row_ptr, ref_row_ptr, start, V, anchor, ref_anchor, shift, known,
                logit_scale, softcap, scale, ref_logit_scale, ref_softcap, ref_scale,
                HAS_SOFTCAP, REF_SOFTCAP, KIND, False, BLOCK_V,
            )  # fmt: skip
        total = _sum(totals, INVARIANT, BLOCK_V)
        ref_total = _sum(ref_totals, INVARIANT, BLOCK_V)
        weighted = _sum(weights, INVARIANT, BLOCK_V)
        ref_weighted = _sum(ref_weights, INVARIANT, BLOCK_V)
        above = tl.max(peaks, axis=0)
        ref_above = tl.max(ref_peaks, axis=0)
        at_peak = tl.max(tl.where(peaks == above, at_peaks, float("-inf")), axis=0)
        far = (above > reach()) | ((above < -reach()) & (above > float("-inf")))
        ref_far = (ref_above > reach()) | ((ref_above < -reach()) & (ref_above > float("-inf")))
        again = (far | ref_far) & (not INVARIANT)
        if again:
            anchor = _anchor(row_ptr, target_logit, V, logit_scale, softcap, HAS_SOFTCAP, BLOCK_V)
            ref_anchor = _anchor(
                ref_row_ptr, ref_logit, V, ref_logit_scale, ref_softcap, REF_SOFTCAP, BLOCK_V
            )
            shift = anchor * scale - ref_anchor * ref_scale
        if KIND is not None:
            # The log of the sum of p e^-(d + c): from e^-c - 1 where c is small.
            excess = _sum(excesses, INVARIANT, BLOCK_V) / total
            by_logs = (tl.log2(ref_total) - tl.log2(total)) * ln_2() + known
            minus_c = tl.where(tl.abs(excess) < 0.5, _log1p(excess), by_logs)
            if KIND == "reverse":
                extra = expm1_minus(minus_c)
                divergence = _sum(shares, INVARIANT, BLOCK_V) / total - extra
            else:
                extra = expm1_minus(-minus_c)
                # The shares are of q times e^known.
                scaled = tl.where(shifted, total * tl.exp(minus_c), ref_total)
                divergence = _sum(shares, INVARIANT, BLOCK_V) / scaled - extra
            # What cancels may be 8 times what is left of it. A NaN or an infinity never is.
            cancels = (not (extra <= divergence * 8.0)) & (not shifted) & (not again)
            if cancels:
                shift -= minus_c
                known -= minus_c
                shifted = True
            again = again | cancels

    log_total = tl.log2(total)
    ref_log_total = tl.log2(ref_total)
    logsumexp = anchor * scale + log_total * ln_2()
    ref_logsumexp = ref_anchor * ref_scale + ref_log_total * ln_2()
    logp = (target_logit - anchor) * scale - log_total * ln_2()
    ref_logp = (ref_logit - ref_anchor) * ref_scale - ref_log_total * ln_2()
    out_ptr = stats_ptr + row
    tl.store(out_ptr, tl.where(here, logp, float("-inf")))
    tl.store(out_ptr + stride_stats, logsumexp)
    tl.store(out_ptr + 2 * stride_stats, (log_total - weighted / total) * ln_2())
    tl.store(out_ptr + 3 * stride_stats, tl.where(here, ref_logp, float("-inf")))
    tl.store(out_ptr + 4 * stride_stats, ref_logsumexp)
    tl.store(out_ptr + 5 * stride_stats, (ref_log_total - ref_weighted / ref_total) * ln_2())
    if KIND is None:
        tl.store(out_ptr + 6 * stride_stats, shift + (log_total - ref_log_total) * ln_2())
    else:
        # h is of the shift as stored, and so is its mean: off by what the difference rounds away.
        stored = shift - minus_c
        moved = stored - shift
        error = ((stored - moved) - shift) + (moved + minus_c)
        mean = divergence - error if KIND == "reverse" else -expm1(error)
        tl.store(out_ptr + 6 * stride_stats, stored)
        tl.store(out_ptr + 7 * stride_stats, tl.where(divergence < 0.0, 0.0, divergence))
        tl.store(out_ptr + 8 * stride_stats, mean)
    tl.store(out_ptr + 9 * stride_stats, anchor * scale + above * ln_2())
    tl.store(out_ptr + 10 * stride_stats, ref_anchor * ref_scale + at_peak * ln_2())
    tl.store(out_ptr + 11 * stride_stats, ref_anchor * ref_scale + ref_above * ln_2())
    tl.store(out_ptr + 12 * stride_stats, anchor)
    tl.store(out_ptr + 13 * stride_stats, ref_anchor)
    tl.store(out_ptr + 14 * stride_stats, log_total)


@triton.jit
def _softmaxes(
    row_ptr, ref_row_ptr, start, V, row_stats,
    logit_scale, softcap, scale, ref_logit_scale, ref_softcap, ref_scale,
    HAS_SOFTCAP: tl.constexpr, REF_SOFTCAP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A block's p, q and d of whole rows, the log of p, and the softcap's slope."""
    offs_v = start + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    anchor, ref_anchor, log_total, ref_log_total, shift = row_stats
    u, slope = _load_logits(row_ptr, offs_v, mask_v, logit_scale, softcap, HAS_SOFTCAP)
    t, _ = _load_logits(ref_row_ptr, offs_v, mask_v, ref_logit_scale, ref_softcap, REF_SOFTCAP)
    d = _log_ratio(u, t, scale, ref_scale, shift)
    x = (u - anchor) * (scale * log2_e())
    y = (t - ref_anchor) * (ref_scale * log2_e())
    log_p = tl.where(mask_v, x, float("-inf")) - log_total
    log_q = tl.where(mask_v, y, float("-inf")) - ref_log_total
    return tl.exp2(log_p), tl.exp2(log_q), d, log_p, slope


@triton.jit
def _row_stats(stats_ptr, stride_stats, scale, ref_scale):
    """Both anchors, log2 of both sums, the shift: p, q and d of a row are made with these."""
    shift = tl.load(stats_ptr + 6 * stride_stats)
    anchor = tl.load(stats_ptr + 12 * stride_stats)
    ref_anchor = tl.load(stats_ptr + 13 * stride_stats)
    log_total = tl.load(stats_ptr + 14 * stride_stats)
    ref_log_total = log_total - (shift - (anchor * scale - ref_anchor * ref_scale)) * log2_e()
    return anchor, ref_anchor, log_total, ref_log_total, shift


@per_row
def divergences_kernel(
    logits_ptr, ref_logits_ptr, temperature_ptr, ref_temperature_ptr, stats_ptr,
    V,
    stride_logits_n, stride_ref_n, stride_stats,
    logit_scale, softcap, temperature, ref_logit_scale, ref_softcap, ref_temperature, beta,
    HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    REF_SOFTCAP: tl.constexpr, REF_TEMPERATURE: tl.constexpr,
    KIND: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_n
    ref_row_ptr = ref_logits_ptr + row * stride_ref_n
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    if REF_TEMPERATURE:
        ref_temperature = tl.load(ref_temperature_ptr + row)
    scale = _scale(logit_scale, temperature, HAS_SOFTCAP)
    ref_scale = _scale(ref_logit_scale, ref_temperature, REF_SOFTCAP)
    row_stats = _row_stats(stats_ptr + row, stride_stats, scale, ref_scale)
    shares = tl.zeros((BLOCK_V,), tl.float32)
    ref_shares = tl.zeros((BLOCK_V,), tl.float32)
    moments = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, V, BLOCK_V):
        p, q, d, _, _ = _softmaxes(
            row_ptr, ref_row_ptr, start, V, row_stats,
            logit_scale, softcap, scale, ref_logit_scale, ref_softcap, ref_scale,
            HAS_SOFTCAP, REF_SOFTCAP, BLOCK_V,
        )  # fmt: skip
        if KIND == "reverse":
            shares += _share(p, q, d)
        elif KIND == "forward":
            shares += _share(q, p, -d)
        else:
            of_p, of_q = _to_mixture(d, beta)
            m = p + beta * (q - p)
            shares += _share(p, m, of_p)
            ref_shares += _share(q, m, of_q)
        moments += _moment(p, q, d, 0.0, beta, KIND)
    share = tl.sum(shares, axis=0)
    if KIND == "jsd":
        share = beta * tl.sum(ref_shares, axis=0) + (1.0 - beta) * share
    tl.store(stats_ptr + row + 7 * stride_stats, share)
    tl.store(stats_ptr + row + 8 * stride_stats, tl.sum(moments, axis=0))


@per_row
def pair_grads_kernel(
    logits_ptr, ref_logits_ptr, targets_ptr, temperature_ptr, ref_temperature_ptr, stats_ptr,
    logsumexp_ptr, d_softmax_ptr, at_target_ptr, entropy_ptr, d_entropy_ptr, d_divergence_ptr,
    out_ptr,
    V,
    stride_logits_n, stride_ref_n, stride_stats, stride_out_n,
    logit_scale, softcap, temperature, ref_logit_scale, ref_softcap, ref_temperature, beta,
    HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    REF_SOFTCAP: tl.constexpr, REF_TEMPERATURE: tl.constexpr,
    HAS_GRADS: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    KIND: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_n
    ref_row_ptr = ref_logits_ptr + row * stride_ref_n
    out_row_ptr = out_ptr + row * stride_out_n
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    if REF_TEMPERATURE:
        ref_temperature = tl.load(ref_temperature_ptr + row)
    scale = _scale(logit_scale, temperature, HAS_SOFTCAP)
    ref_scale = _scale(ref_logit_scale, ref_temperature, REF_SOFTCAP)
    chain = logit_scale / temperature
    row_stats = _row_stats(stats_ptr + row, stride_stats, scale, ref_scale)
    mean = tl.load(stats_ptr + row + 8 * stride_stats)
    weight = chain * tl.load(d_divergence_ptr + row)
    if KIND == "jsd":
        weight = weight * (1.0 - beta)
    target, d_softmax, at_target, entropy, d_entropy = -1, 0.0, 0.0, 0.0, 0.0
    if HAS_GRADS:
        target = tl.load(targets_ptr + row)
        d_softmax = chain * tl.load(d_softmax_ptr + row)
        at_target = chain * tl.load(at_target_ptr + row)
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + row) * log2_e()
        d_entropy = tl.load(d_entropy_ptr + row) * chain * ln_2()
    for start in range(0, V, BLOCK_V):
        p, q, d, log_p, slope = _softmaxes(
            row_ptr, ref_row_ptr, start, V, row_stats,
            logit_scale, softcap, scale, ref_logit_scale, ref_softcap, ref_scale,
            HAS_SOFTCAP, REF_SOFTCAP, BLOCK_V,
        )  # fmt: skip
        slopes = _moment(p, q, d, mean, beta, KIND)
        if KIND == "reverse":
            # The reference has no probability where the policy has: not inf - inf.
            slopes = tl.where(d == float("inf"), d, slopes)
        d_logits = weight * slopes
        offs_v = start + tl.arange(0, BLOCK_V)
        if HAS_GRADS:
            coef = d_softmax
            if HAS_ENTROPY:
                coef = d_softmax + d_entropy * (tl.where(p == 0.0, 0.0, log_p) + entropy)
            d_logits += tl.where(offs_v == target, at_target, -p * coef)
        d_logits = d_logits * slope
        tl.store(out_row_ptr + offs_v, d_logits.to(out_row_ptr.dtype.element_ty), mask=offs_v < V)


def _scalars(transform: LogitTransform, ref_transform: LogitTransform) -> tuple[float, ...]:
    return (*transform_scalars(transform), *transform_scalars(ref_transform))


def _flags(transform: LogitTransform, ref_transform: LogitTransform) -> dict[str, Any]:
    of_reference = transform_flags(ref_transform)
    return {
        **transform_flags(transform),
        **{name.replace("HAS_", "REF_"): value for name, value in of_reference.items()},
    }


def pair_stats(
    logits: Tensor,
    ref_logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    ref_transform: LogitTransform,
    out: PairStats,
    *,
    kind: str | None,
    beta: float = 0.5,
    invariant: bool = False,
    leave: bool = False,
    launch: Launch = PAIR_LAUNCH,
) -> bool:
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
                KIND=None if kind in (None, "jsd") else known_kind(kind), INVARIANT=invariant,
                **block_of(launch, V),
            )  # fmt: skip
    if kind == "jsd":  # of whole softmaxes, whose sums are not known before
        divergences(logits, ref_logits, transform, ref_transform, out, kind=kind, beta=beta)
    return False


def divergences(
    logits: Tensor,
    ref_logits: Tensor,
    transform: LogitTransform,
    ref_transform: LogitTransform,
    stats: PairStats,
    *,
    kind: str,
    beta: float = 0.5,
    launch: Launch = PAIR_LAUNCH,
) -> None:
    count, V = logits.shape
    if count:
        with device_of(logits):
            divergences_kernel[(count,)](
                logits, ref_logits, temperature_pointer(transform, logits),
                temperature_pointer(ref_transform, logits), stats.values,
                V,
                logits.stride(0), ref_logits.stride(0), stats.values.stride(0),
                *_scalars(transform, ref_transform), float(beta),
                **_flags(transform, ref_transform),
                KIND=known_kind(kind),
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
    kind: str,
    beta: float = 0.5,
    launch: Launch = PAIR_GRADS_LAUNCH,
) -> None:
    count, V = logits.shape
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
                *_scalars(transform, ref_transform), float(beta),
                **_flags(transform, ref_transform),
                HAS_GRADS=grads is not None,
                HAS_ENTROPY=grads is not None and grads.d_entropy is not None,
                KIND=known_kind(kind),
                **block_of(launch, V),
            )  # fmt: skip

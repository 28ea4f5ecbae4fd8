"""Triton kernel for the policy loss of token-local objectives: value and gradient in one sweep.

The formulas of `loss/losses.py` and `loss/objective.py`, with derivatives by hand:

    loss = sum_i w_i (s_i x_i + beta KL_i) - entropy_coef / count * sum_i E_i
    dl_i = w_i (s_i dx_i/dl_i + beta dKL_i/dl_i),    dE_i = -entropy_coef / count

Numerics: a ratio is at most e^80; e^d - 1 - d of k3 is a series near 0; minima keep NaN; the sum
does not depend on the order in which programs run. Cost: one launch; per token 4 bytes read of each
tensor and 4 written for each gradient, per program 4 for its part of the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import PolicyLossResult
from .triton_common import Launch, build, device_of, expm1, expm1_minus

TOKEN_LAUNCH = Launch(256, 4)
# Above any ratio (at most e^80), but finite: infinity times an advantage of 0 is NaN.
_UNBOUNDED = 1e35


@triton.jit
def _min(x, y):
    # NaN if either is, as in torch: the hardware's minimum would hide it.
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _max(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clamp(x, low, high):
    return _min(_max(x, low), high)


@triton.jit
def _kl(d, flows, ESTIMATOR: tl.constexpr, HAS_RATIO: tl.constexpr):
    """The estimate of a token's KL from d = ref_logps - logps, and its derivative dKL/dl.

    With a ratio r the derivative is d(r KL)/dl / r: KL + dKL/dl where `flows`, with dr/dl = r.
    """
    if ESTIMATOR == "k1":
        kl, slope = -d, tl.full(d.shape, 1.0, tl.float32)
    elif ESTIMATOR == "k2":
        kl, slope = 0.5 * d * d, -d
    else:
        kl, slope = expm1_minus(d), -expm1(d)
    if HAS_RATIO:
        if ESTIMATOR == "k3":
            # The terms e^d of kl + slope cancel to -d; their sum would lose all digits.
            slope = tl.where(flows, -d, slope)
        else:
            slope += tl.where(flows, kl, 0.0)
    return kl, slope


@triton.jit
def _surrogate(
    logps, ratio, flows, advantages, low, high, ratio_max, dual_clip, SURROGATE: tl.constexpr
):  # fmt: skip
    """The loss of a token and its derivative by its log-prob; dr/dl is r where `flows`, else 0."""
    if SURROGATE == "clip":
        bounded = _min(ratio, ratio_max) * advantages
        clipped = _clamp(ratio, low, high) * advantages
        loss = -_min(bounded, clipped)
        # The branch of the minimum decides which bound cuts the gradient off.
        within = (ratio >= low) & (ratio <= high)
        flows = flows & tl.where(bounded <= clipped, ratio <= ratio_max, within)
        cap = -dual_clip * advantages
        capped = (advantages < 0.0) & (loss > cap)
        loss = tl.where(capped, cap, loss)
        d_logps = tl.where(flows & ~capped, -advantages * ratio, 0.0)
    else:
        d_logps = -_min(ratio, ratio_max) * advantages
        loss = d_logps * logps
    return loss, d_logps


# Every pointer has one value per token: a slice of them may begin anywhere.
@triton.jit(
    do_not_specialize=["N"],
    do_not_specialize_on_alignment=[
        f"{name}_ptr"
        for name in ("logps", "advantages", "weights", "mask", "old_logps", "ref_logps", "scale",
                     "entropy", "count", "d_logps", "d_entropy", "partials")
    ],
)  # fmt: skip
def policy_loss_kernel(
    logps_ptr, advantages_ptr, weights_ptr, mask_ptr, old_logps_ptr, ref_logps_ptr, scale_ptr,
    entropy_ptr, count_ptr, d_logps_ptr, d_entropy_ptr, partials_ptr,
    N,
    low, high, ratio_max, dual_clip, beta, entropy_coef,
    SURROGATE: tl.constexpr, KL_ESTIMATOR: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_OLD: tl.constexpr, HAS_KL: tl.constexpr, HAS_KL_RATIO: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_GRAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_n < N
    mask_n = inside
    if HAS_MASK:
        mask_n = inside & (tl.load(mask_ptr + offs_n, mask=inside, other=0) != 0)
    # Masked tokens are never read: they may hold anything, NaN included.
    logps = tl.load(logps_ptr + offs_n, mask=mask_n, other=0.0)
    advantages = tl.load(advantages_ptr + offs_n, mask=mask_n, other=0.0)
    weights = tl.load(weights_ptr + offs_n, mask=mask_n, other=0.0)
    old_logps = logps
    if HAS_OLD:
        old_logps = tl.load(old_logps_ptr + offs_n, mask=mask_n, other=0.0)

    # The ratio is at most e^80, and finite.
    log_ratio = logps - old_logps
    flows = log_ratio <= 80.0
    ratio = tl.exp(_min(log_ratio, 80.0))
    per_token, d_logps = _surrogate(
        logps, ratio, flows, advantages, low, high, ratio_max, dual_clip, SURROGATE
    )
    if HAS_SCALE:
        scale = tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0)
        per_token *= scale
        d_logps *= scale
    if HAS_KL:
        d = tl.load(ref_logps_ptr + offs_n, mask=mask_n, other=0.0) - logps
        kl, slope = _kl(d, flows, KL_ESTIMATOR, HAS_KL_RATIO)
        if HAS_KL_RATIO:
            slope *= ratio
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
    # One partial sum per program, summed by torch, independent of the order in which programs run.
    tl.store(partials_ptr + block, tl.sum(loss, axis=0))


def policy_loss(
    logps: Tensor,
    entropy: Tensor | None,
    *,
    advantages: Tensor,
    weights: Tensor,
    count: Tensor,
    mask: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    scale: Tensor | None = None,
    grad: bool,
    surrogate: str,
    low: float,
    high: float,
    ratio_max: float | None = None,
    dual_clip: float | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_ratio: bool = False,
    entropy_coef: float = 0.0,
    launch: Launch = TOKEN_LAUNCH,
) -> PolicyLossResult:
    """The loss over `logps [C]` and `entropy [C]`, with its gradients if `grad`.

    Tensors are float32 `[C]`, except `mask`, bool `[C]`, and `count`, 0-d, which divides the
    entropy bonus. Masked tokens are not read. `scale` multiplies the surrogate, `kl_ratio` the KL
    by the ratio. Surrogates of a ratio r and an advantage A (`low` and `high` are for "clip"):

        "clip"     -min(min(r, ratio_max) A, clip(r, low, high) A), at most dual_clip |A| if A < 0
        "cispo"    -min(r, ratio_max) A logp, with the bounded ratio a constant

    `kl_estimator` is `"k1"`, `"k2"` or `"k3"`. Bounds of None do not bound.
    """
    assert surrogate in ("clip", "cispo") and kl_estimator in ("k1", "k2", "k3")
    N = logps.shape[0]
    has_entropy = entropy is not None and entropy_coef != 0.0
    if N == 0:
        return PolicyLossResult(
            logps.sum(), logps if grad else None, logps if has_entropy else None
        )
    blocks = triton.cdiv(N, launch.block)
    partials = logps.new_empty(blocks)
    d_logps = d_entropy = logps
    if grad:
        # Both rows are aligned for vector stores.
        d_logps, d_entropy = logps.new_empty((2, triton.cdiv(N, 4) * 4))[:, :N]
    optional = (mask, old_logps, ref_logps, scale, entropy)
    with device_of(logps):
        policy_loss_kernel[(blocks,)](
            logps, advantages, weights, *(logps if x is None else x for x in optional),
            count, d_logps, d_entropy, partials,
            N,
            float(low), float(high), _bound(ratio_max), _bound(dual_clip), float(beta),
            float(entropy_coef),
            SURROGATE=surrogate, KL_ESTIMATOR=kl_estimator,
            HAS_MASK=mask is not None, HAS_OLD=old_logps is not None,
            HAS_KL=beta != 0.0, HAS_KL_RATIO=kl_ratio,
            HAS_SCALE=scale is not None, HAS_ENTROPY=has_entropy, HAS_GRAD=grad,
            BLOCK_N=launch.block, **build(launch.num_warps, fused=False),
        )  # fmt: skip
    return PolicyLossResult(
        partials.sum(), d_logps if grad else None, d_entropy if grad and has_entropy else None
    )


def _bound(value: float | None) -> float:
    return _UNBOUNDED if value is None else float(value)

"""The divergences of `divergences.py` as Triton functions, which kernels take as constants.

A kernel is compiled for one divergence. p, q and d are as in `divergences.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from .divergences import JSD, Divergence, ForwardKL, ReverseKL
from .triton_common import expm1


class DivergenceFunctions(NamedTuple):
    """A divergence's functions on a block of a row.

    Attributes:
        addend: `(p, q, d, beta)`: the part of each entry in the divergence; not below 0, and exact
            to rounding where p and q are close.
        moment: `(p, q, d, mean, beta)`: `p (h - mean)`.
    """

    addend: JITFunction
    moment: JITFunction


@triton.constexpr_function
def small():
    """The |log(a/b)| below which a series is exact to rounding."""
    return 0.3


@triton.jit
def phi(x):
    """e^-x - 1 + x near 0."""
    return x * x * (0.5 + x * (-1 / 6 + x * (1 / 24 + x * (-1 / 120 + x * (1 / 720)))))


@triton.jit
def log1p(x):
    """log(1 + x) for x in (-1, 1), without cancellation."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def kl_addend(a, b, x):
    """`a log(a / b) + b - a`, with x the logarithm; b where a is 0."""
    far = tl.where(a == 0.0, 0.0, a * x) + (b - a)
    return tl.where(tl.abs(x) < small(), a * phi(x), far)


@triton.jit
def to_mixture(d, beta):
    """`log(p / m)` and `log(q / m)`."""
    above = d >= 0.0
    # The larger of p and q first: the other's ratio to m may be 0.
    log_ratio = -log1p(tl.where(above, beta, 1.0 - beta) * expm1(-tl.abs(d)))
    return tl.where(above, log_ratio, log_ratio + d), tl.where(above, log_ratio - d, log_ratio)


@triton.jit
def _reverse_addend(p, q, d, beta):
    return kl_addend(p, q, d)


@triton.jit
def _reverse_moment(p, q, d, mean, beta):
    # d is inf where only the reference's probability is 0: avoids inf - inf.
    return tl.where(p == 0.0, 0.0, tl.where(d == float("inf"), d, p * (d - mean)))


@triton.jit
def _forward_addend(p, q, d, beta):
    # q (e^d - 1 - d), by q = p e^-d.
    near = p * (d * d - phi(d) * (1.0 + d))
    return tl.where(tl.abs(d) < small(), near, tl.where(q == 0.0, 0.0, -q * d) - (q - p))


@triton.jit
def _forward_moment(p, q, d, mean, beta):
    return tl.where(tl.abs(d) < small(), -p * (expm1(-d) + mean), p - q - p * mean)


@triton.jit
def _jsd_addend(p, q, d, beta):
    log_pm, log_qm = to_mixture(d, beta)
    m = p + beta * (q - p)
    return beta * kl_addend(q, m, log_qm) + (1.0 - beta) * kl_addend(p, m, log_pm)


@triton.jit
def _jsd_moment(p, q, d, mean, beta):
    log_pm, _ = to_mixture(d, beta)
    return tl.where(p == 0.0, 0.0, p * (log_pm - mean))


FUNCTIONS = {
    ReverseKL: DivergenceFunctions(_reverse_addend, _reverse_moment),
    ForwardKL: DivergenceFunctions(_forward_addend, _forward_moment),
    JSD: DivergenceFunctions(_jsd_addend, _jsd_moment),
}


def functions_of(divergence: Divergence) -> DivergenceFunctions:
    """Returns a divergence's functions; raises for a divergence without any."""
    if type(divergence) not in FUNCTIONS:
        known = ", ".join(x.__name__ for x in FUNCTIONS)
        raise TypeError(
            f"divergence: expected one with Triton functions, {known}; got "
            f"{type(divergence).__name__}: add them to {__name__}"
        )
    return FUNCTIONS[type(divergence)]

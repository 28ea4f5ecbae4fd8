"""Two models' logits of the same tokens: statistics of both, a divergence and its gradient.

With p and q the two softmaxes of a row and d = log p - log q; `divergences.py` has what of them is
computed.

Models that agree to 1e-5 keep their digits. Where they are close, each sum of `a log(a/b)` is taken
of `a log(a/b) + b - a`, which adds up to the same, and whose terms are not below 0 and do not
cancel. d is `(z - z') - shift`, of logits whose difference is exact where they are close; and what
is wrong with the shift, a difference of two logsumexps, is in h and in its mean alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.sequences import widened
from . import LogitTransform, RowGrads
from .divergences import Divergence, KLTerm
from .pair_stats import PairStats
from .torch_backend import CPU_BLOCK_BYTES, logit_grads_, row_blocks, row_sums

# Below this |log(a/b)| `a log(a/b) + b - a` is taken from an expansion, of 5 digits.
_NEAR = 0.15
# Rows whose divergence is below this are summed again, by addends that do not cancel.
_FAR = 5e-3
# The columns among which the largest logit of a row is looked for first.
_PART = 128


class _RowValues(NamedTuple):
    """Values read from each row of both models' logits, `[C]`.

    Sums are of e^x and of e^x x, x being a logit less the row's largest.
    """

    peak: Tensor
    ref_peak: Tensor
    ref_at_peak: Tensor
    target_logit: Tensor
    ref_target_logit: Tensor
    total: Tensor
    weighted: Tensor
    ref_total: Tensor
    ref_weighted: Tensor
    shift: Tensor
    divergence: Tensor | None = None
    mean: Tensor | None = None


def pair_stats(
    logits: Tensor,
    ref_logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    ref_transform: LogitTransform,
    out: PairStats,
    *,
    divergence: Divergence | None,
    invariant: bool = False,
    store_slopes: bool = False,
) -> bool:
    """Reduces two models' raw logits `[C, V]` to statistics per row, in `out`.

    Without a `divergence`, its value and its mean are left to `divergences`. A target of -1 is none
    of the columns: its log-probs are -inf. With `store_slopes` it may store p on the logits, and
    the divergence's slopes on the reference's, for `stored_grads_`; returns whether it has.
    """
    store_slopes = store_slopes and divergence is not None and transform.softcap is None
    values, buffers = [], list[Tensor]()
    for rows in _blocks(logits):
        raw, ref_raw, target = logits[rows], ref_logits[rows], targets[rows, None].clamp(min=0)
        z, t = transform.at(rows).apply(raw), ref_transform.at(rows).apply(ref_raw)
        if not buffers:
            buffers = [torch.empty_like(z, memory_format=torch.contiguous_format) for _ in range(5)]
        d, p_buffer, q_buffer, *work = (x[: len(z)] for x in buffers)
        peak, place = _largest(z)
        ref_peak = t.amax(1)
        at_places = [x.gather(1, i).squeeze(1) for x, i in ((t, place), (z, target), (t, target))]
        torch.sub(z, t, out=d)
        # The softmaxes overwrite logits that nobody needs again.
        p = z if store_slopes or not _same_memory(z, raw) else p_buffer
        q = t if store_slopes or not _same_memory(t, ref_raw) else q_buffer
        sums = (*_softmax(z, peak, p, work[0]), *_softmax(t, ref_peak, q, work[0]))
        # Of the sums of exponentials, not of their logarithms with the peaks added.
        shift = (widened(peak) - ref_peak) + (widened(sums[0]) / sums[2]).log()
        row_values = peak, ref_peak, *at_places, *sums, shift.float()
        if divergence is not None:
            d.sub_(row_values[-1][:, None])
            row_values += _divergence_and_slopes(p, q, d, divergence, work, slopes=q)
            if store_slopes:
                for stored, buffer in ((p, raw), (q, ref_raw)):
                    if not _same_memory(stored, buffer):
                        buffer.copy_(stored)
        values.append(row_values)
    if values:
        _store(out, _RowValues(*map(torch.cat, zip(*values, strict=True))), targets >= 0)
    return store_slopes


def _store(out: PairStats, values: _RowValues, has_target: Tensor) -> None:
    """Stores the statistics, from what was read of each row."""
    v = values
    for name in ("peak", "ref_peak", "ref_at_peak", "shift", "divergence", "mean"):
        if getattr(v, name) is not None:
            getattr(out, name).copy_(getattr(v, name))
    for stats, peak, target_logit, total, weighted in (
        (out.policy_stats, v.peak, v.target_logit, v.total, v.weighted),
        (out.reference_stats, v.ref_peak, v.ref_target_logit, v.ref_total, v.ref_weighted),
    ):
        assert stats.entropy is not None
        log_total = widened(total).log()
        logps = (target_logit - peak) - log_total
        stats.logps.copy_(logps.masked_fill(~has_target, -torch.inf))
        stats.logsumexp.copy_(peak + log_total)
        stats.entropy.copy_(log_total - weighted / total)
    out.set_zero_anchors()


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr()


def _largest(z: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row `[C]` and its place `[C, 1]`: the part of the row first."""
    V = z.shape[1]
    width = min(_PART, V)
    whole = V // width * width
    parts = z[:, :whole].unflatten(1, (-1, width)).amax(2)
    if whole < V:
        parts = torch.cat((parts, z[:, whole:].amax(1, keepdim=True)), 1)
    peak, part = parts.max(1, keepdim=True)
    begin = (part * width).clamp_(max=V - width)
    columns = begin + torch.arange(width, device=z.device)
    return peak.squeeze(1), begin.add_(z.gather(1, columns).argmax(1, keepdim=True))


def _softmax(z: Tensor, peak: Tensor, p: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the softmax `p`, which may overwrite `z`.

    Returns the sum of e^x over each row, x = z - peak, and that of e^x x.
    """
    x = torch.sub(z, peak[:, None], out=scratch)
    torch.exp(x, out=p)
    total = row_sums(p)
    weighted = _dot(p, x, x)
    p.mul_(total.reciprocal()[:, None])
    return total, weighted


def _dot(p: Tensor, x: Tensor, scratch: Tensor) -> Tensor:
    """The sum of `p * x` over each row, where p is not 0."""
    sums = row_sums(torch.mul(p, x, out=scratch))
    # On a CPU a look at the result is cheaper than one at every element.
    if p.device.type != "cpu" or sums.isnan().any():
        return row_sums(scratch.masked_fill_(p == 0, 0.0))
    return sums


def _divergence_and_slopes(
    p: Tensor, q: Tensor, d: Tensor, divergence: Divergence, work: list[Tensor], slopes: Tensor
) -> tuple[Tensor, Tensor]:
    """The divergence and the mean of h; stores `p (h - mean)` in `slopes`, which may be `q`."""
    on_cpu, terms = d.device.type == "cpu", divergence.terms(p, q, d)
    dots = [_dot(x.a, x.log_ratio, work[0]) for x in terms]
    value = dots[0] * terms[0].weight
    for x, dot in zip(terms[1:], dots[1:], strict=True):
        value += dot * x.weight
    # Of models that are near each other the terms cancel.
    near = (value < _FAR) | ~value.isfinite()
    if not on_cpu or near.all():
        value = torch.where(near, _value(terms, divergence.base(p, q), work), value)
    else:
        for row in near.nonzero().flatten().tolist():
            at = slice(row, row + 1)
            row_terms = [KLTerm(x.weight, x.a[at], x.log_ratio[at]) for x in terms]
            base = divergence.base(p[at], q[at])
            value[at] = _value(row_terms, base, [x[at] for x in work])
    h = divergence.h(terms)
    if h is None and on_cpu and not near.any():
        torch.sub(p, q, out=slopes)
        return value, torch.zeros_like(value)
    is_first = h is terms[0].log_ratio and terms[0].a is p
    mean = dots[0] if is_first else _mean(p, q, d, h, work[0])
    _slopes(p, q, d, h, mean, work[0], out=slopes)
    return value, mean


def divergences(
    logits: Tensor,
    ref_logits: Tensor,
    transform: LogitTransform,
    ref_transform: LogitTransform,
    stats: PairStats,
    *,
    divergence: Divergence,
) -> None:
    """Sets `divergence` and `mean` from the columns here, by the statistics of whole rows."""
    for rows in _blocks(logits):
        row_stats = stats.at(rows)
        p, q, d = _softmaxes(
            logits[rows], ref_logits[rows], transform.at(rows), ref_transform.at(rows), row_stats
        )
        terms = divergence.terms(p, q, d)
        work = [torch.empty_like(p) for _ in range(2)]
        row_stats.divergence.copy_(_value(terms, divergence.base(p, q), work))
        row_stats.mean.copy_(_mean(p, q, d, divergence.h(terms), work[0]))


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
) -> None:
    """Writes the gradient of the policy's raw logits `[C, V]` to `out [C, V]`.

    `grads` are those of its statistics, if there are any. Overwrites `logits`, which `out` may be.
    """
    d_slopes = d_divergence * divergence.scale
    for rows in _blocks(logits):
        raw, local, row_stats = logits[rows], transform.at(rows), stats.at(rows)
        p, q, d = _softmaxes(raw, ref_logits[rows], local, ref_transform.at(rows), row_stats)
        h = divergence.h(divergence.terms(p, q, d))
        slopes = _slopes(p, q, d, h, row_stats.mean, torch.empty_like(p), out=q)
        slopes.mul_(d_slopes[rows, None]).mul_(local.slope(raw))
        if grads is not None:
            logit_grads_(raw, targets[rows], local, grads.at(rows), out=raw)
            slopes.add_(raw)
        out[rows] = slopes


def slope_factors(
    transform: LogitTransform, d_divergence: Tensor, divergence: Divergence
) -> Tensor:
    """The factor per row from stored slopes to the gradient of raw logits."""
    return d_divergence * (divergence.scale * transform.logit_scale / transform.temperature)


def stored_grads_(
    p: Tensor,
    slopes: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    grads: RowGrads | None,
    d_divergence: Tensor,
    out: Tensor,
    *,
    divergence: Divergence,
) -> None:
    """Writes what `pair_grads_` does, from what `pair_stats` has stored. `out` may be `p`."""
    factors = slope_factors(transform, d_divergence, divergence)[:, None]
    for rows in _blocks(p):
        d_logits, block_slopes, factor = p[rows], slopes[rows], factors[rows]
        if grads is None:
            out[rows] = d_logits.copy_(block_slopes).mul_(factor)
            continue
        row_grads, local, target = grads.at(rows), transform.at(rows), targets[rows, None]
        scale, coef = local.logit_scale / local.per_row, -row_grads.d_softmax[:, None]
        if row_grads.d_entropy is not None and row_grads.entropy is not None:
            log_p = d_logits.log().masked_fill_(d_logits == 0, 0.0)
            coef = coef - row_grads.d_entropy[:, None] * (log_p + row_grads.entropy[:, None])
        place = target.clamp(min=0)
        at_target = block_slopes.gather(1, place) * factor + row_grads.at_target[:, None] * scale
        d_logits.mul_(coef * scale).addcmul_(block_slopes, factor)
        d_logits.scatter_(1, place, torch.where(target >= 0, at_target, d_logits.gather(1, place)))
        if not _same_memory(d_logits, out[rows]):
            out[rows] = d_logits


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Rows of which several buffers stay in a core's own cache."""
    return row_blocks(logits, CPU_BLOCK_BYTES // 4 if logits.device.type == "cpu" else None)


def _softmaxes(
    raw: Tensor, ref_raw: Tensor, transform: LogitTransform, ref_transform: LogitTransform,
    stats: PairStats,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """p, q and d of whole rows. Where both are 0, d is NaN."""
    z, t = transform.apply(raw), ref_transform.apply(ref_raw)
    d = (z - t).sub_(stats.shift[:, None])
    p = torch.sub(z, stats.logsumexp[:, None]).exp_()
    q = torch.sub(t, stats.ref_logsumexp[:, None]).exp_()
    return p, q, d


def _value(terms: list[KLTerm], base: Tensor, work: list[Tensor]) -> Tensor:
    """The sum of a divergence's terms over the columns, none of which cancel."""
    return torch.stack([x.weight * _kl(x.a, base, x.log_ratio, work) for x in terms]).sum(0)


def _kl(a: Tensor, b: Tensor, log_ratio: Tensor, work: list[Tensor]) -> Tensor:
    """The sum of `a log(a / b) + b - a` over each row, by the logarithm."""
    # On a CPU a look at the result is cheaper than one at every element.
    if a.device.type == "cpu":
        sums = _sum_of_addends(a, b, log_ratio, *work[:2])
        if not sums.isnan().any():
            return sums
    # Where a is 0 its logarithm may be anything.
    return _sum_of_addends(a, b, log_ratio.masked_fill(a == 0, 1.0), *work[:2])


def _sum_of_addends(a: Tensor, b: Tensor, x: Tensor, beyond: Tensor, y: Tensor) -> Tensor:
    """The sum of `a f(x)`, f(x) = x + e^-x - 1 and b = a e^-x, without a mask.

    With x clamped to c in [-n, n]:

        a f(x) = a (f(c) + x - c) + min(b - a e^-n, 0) + max(b - a e^n, 0)
    """
    # f(c) is c^2 / (2 (1 + c/6)^2), but for c^3/540 of it.
    c = torch.clamp(x, -_NEAR, _NEAR, out=beyond)
    torch.div(c, torch.mul(c, 1 / 6, out=y).add_(1.0), out=y)
    torch.sub(x, c, out=beyond).addcmul_(y, y, value=0.5).mul_(a)
    sums = row_sums(beyond)
    for side in (-1, 1):
        edge = torch.add(b, a, alpha=-math.exp(side * _NEAR), out=y)
        sums += row_sums(edge.clamp_(max=0.0) if side < 0 else edge.clamp_(min=0.0))
    return sums


def _difference(p: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """`p - q`, as p (1 - e^-d) where it cancels."""
    return torch.where(d.abs() < _NEAR, torch.expm1(-d).mul_(-p), p - q)


def _mean(p: Tensor, q: Tensor, d: Tensor, h: Tensor | None, scratch: Tensor) -> Tensor:
    """The mean of h over p; of None, `p h` is p - q."""
    return row_sums(_difference(p, q, d)) if h is None else _dot(p, h, scratch)


def _slopes(
    p: Tensor, q: Tensor, d: Tensor, h: Tensor | None, mean: Tensor, scratch: Tensor, out: Tensor
) -> Tensor:
    """`p (h - mean)`, in `out`, which may be `q`; of None, `p h` is p - q."""
    if h is None:
        return torch.sub(_difference(p, q, d), p * mean[:, None], out=out)
    slopes = torch.mul(torch.sub(h, mean[:, None], out=scratch), p, out=out)
    if p.device.type != "cpu" or not row_sums(slopes).isfinite().all():
        # Where h is infinite so is its mean, and the difference is neither.
        slopes.masked_fill_(h == torch.inf, torch.inf).masked_fill_(p == 0, 0.0)
    return slopes

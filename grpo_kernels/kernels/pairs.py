"""Two models' logits of the same tokens: statistics of both, divergences and their gradient.

With p and q the two softmaxes of a row, d = log p - log q, m = beta q + (1 - beta) p:

    kind     divergence L                                gradient by z, the logits of p
    reverse  sum p d                                     p (h - sum p h),  h = d
    forward  -sum q d                                                      h = 1 - e^-d, so p - q
    jsd      beta sum q log(q/m)                         (1 - beta) times that of
               + (1 - beta) sum p log(p/m)                                 h = log(p/m)

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

from . import LogitTransform, RowGrads
from .pair_stats import PairStats, known_kind
from .torch_backend import CPU_BLOCK_BYTES, logit_grads_, row_blocks, row_sums

# From |log(a/b)| on, `a log(a/b) + b - a` has the digits that an expansion has below: 5.
_NEAR = 0.15
# From this divergence on, sums of `p d` have the digits of what does not cancel.
_FAR = 5e-3
# The columns among which the largest logit of a row is looked for first.
_PART = 128


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
) -> bool:
    """Reduces two models' raw logits `[C, V]` to statistics per row, in `out`.

    `kind` None leaves `divergence` and `mean` to `divergences`. A target of -1 is none of the
    columns: its log-probs are -inf. With `leave` it may leave p on the logits, and the gradient of
    the divergence on the reference's; returns whether it has.
    """
    leave = leave and kind is not None and transform.softcap is None
    found, scratch = [], list[Tensor]()
    for rows in _blocks(logits):
        block, ref, target = logits[rows], ref_logits[rows], targets[rows, None].clamp(min=0)
        z, t = transform.at(rows).apply(block), ref_transform.at(rows).apply(ref)
        if not scratch:
            scratch = [torch.empty_like(z, memory_format=torch.contiguous_format) for _ in range(5)]
        d, *work = (x[: len(z)] for x in scratch)
        peak, place = _largest(z)
        ref_peak = t.amax(1)
        values = [peak, t.gather(1, place).squeeze(1), ref_peak]
        values += [x.gather(1, target).squeeze(1) for x in (z, t)]
        torch.sub(z, t, out=d)
        # In their own memory, where nobody needs the logits again.
        p, q = (
            mine if leave or mine.data_ptr() != given.data_ptr() else work.pop()
            for mine, given in ((z, block), (t, ref))
        )
        total, dot = _softmax(z, peak, p, work)
        ref_total, ref_dot = _softmax(t, ref_peak, q, work)
        # Of the sums of exponentials, not of their logarithms with the peaks added.
        shift = (peak.double() - ref_peak) + (total.double() / ref_total).log()
        values += [total, dot, ref_total, ref_dot, shift.float()]
        if kind is not None:
            d.sub_(values[-1][:, None])
            values += _read(p, q, d, kind, beta, work)
            if leave:
                for left, place in ((p, block), (q, ref)):
                    if left.data_ptr() != place.data_ptr():
                        place.copy_(left)
        found.append(values)
    if found:
        _set(out, [torch.cat(x) for x in zip(*found, strict=True)], targets < 0)
    return leave


def _set(out: PairStats, values: list[Tensor], elsewhere: Tensor) -> None:
    """Sets the statistics, from what was read of each row."""
    out.peak[:], out.ref_peak[:], out.ref_at_peak[:] = values[0], values[2], values[1]
    peaks, at_targets, sums, others = values[:3:2], values[3:5], values[5:9], values[9:]
    for stats, peak, z, total, dot in zip(
        (out.of_policy, out.of_reference), peaks, at_targets, sums[::2], sums[1::2], strict=True
    ):
        assert stats.entropy is not None
        log_total = total.double().log()
        stats.logps[:] = ((z - peak) - log_total).masked_fill(elsewhere, -torch.inf)
        stats.logsumexp[:] = peak + log_total
        stats.entropy[:] = log_total - dot / total
    for place, value in zip((out.shift, out.divergence, out.mean), others, strict=False):
        place.copy_(value)
    out.set_without_anchors()


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


def _softmax(z: Tensor, peak: Tensor, p: Tensor, work: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Sets the softmax `p`, which may lie on `z`.

    Returns the sum of e^x over each row, x = z - peak, and that of e^x x.
    """
    x = torch.sub(z, peak[:, None], out=work[0])
    torch.exp(x, out=p)
    total = row_sums(p)
    dot = _dot(p, x, x)
    p.mul_(total.reciprocal()[:, None])
    return total, dot


def _dot(p: Tensor, x: Tensor, scratch: Tensor) -> Tensor:
    """The sum of `p * x` over each row, where p is not 0."""
    found = row_sums(torch.mul(p, x, out=scratch))
    # On a CPU a look at the result is cheaper than one at every element.
    if p.device.type != "cpu" or found.isnan().any():
        return row_sums(scratch.masked_fill_(p == 0, 0.0))
    return found


def _read(
    p: Tensor, q: Tensor, d: Tensor, kind: str, beta: float, work: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The divergence and the mean; `q` becomes the gradient of the divergence by the logits."""
    on_cpu, terms = d.device.type == "cpu", _terms(p, q, d, kind, beta)
    dots = [_dot(x.a, x.log_ratio, work[0]) for x in terms]
    found = dots[0] * terms[0].weight
    for x, dot in zip(terms[1:], dots[1:], strict=True):
        found += dot * x.weight
    # Of models that are near each other the terms cancel.
    near = (found < _FAR) | ~found.isfinite()
    if not on_cpu or near.all():
        found = torch.where(near, _divergence(p, q, terms, kind, beta, work), found)
    else:
        for row in near.nonzero().flatten().tolist():
            at = slice(row, row + 1)
            those = [_Term(x.weight, x.a[at], x.log_ratio[at]) for x in terms]
            found[at] = _divergence(p[at], q[at], those, kind, beta, [x[at] for x in work])
    mean = dots[0]
    if kind == "forward":
        if on_cpu and not near.any():
            torch.sub(p, q, out=q)
            return found, torch.zeros_like(found)
        mean = row_sums(_forward_moments(p, q, d))
    _slopes(p, q, d, terms, mean, kind, beta, work[0], out=q)
    return found, mean


def divergences(
    logits: Tensor,
    ref_logits: Tensor,
    transform: LogitTransform,
    ref_transform: LogitTransform,
    stats: PairStats,
    *,
    kind: str,
    beta: float = 0.5,
) -> None:
    """Sets `divergence` and `mean` from the columns here, by the statistics of whole rows."""
    for rows in _blocks(logits):
        found = stats.at(rows)
        p, q, d = _softmaxes(
            logits[rows], ref_logits[rows], transform.at(rows), ref_transform.at(rows), found
        )
        terms = _terms(p, q, d, kind, beta)
        work = [torch.empty_like(p) for _ in range(2)]
        found.divergence[:] = _divergence(p, q, terms, kind, beta, work)
        if kind == "forward":
            found.mean[:] = row_sums(_forward_moments(p, q, d))
        else:
            found.mean[:] = _dot(p, terms[0].log_ratio, work[0])


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
) -> None:
    """Writes the gradient of the policy's raw logits `[C, V]` to `out [C, V]`.

    `grads` are those of its statistics, if there are any. Overwrites `logits`, which `out` may be.
    """
    for rows in _blocks(logits):
        block, local, found = logits[rows], transform.at(rows), stats.at(rows)
        p, q, d = _softmaxes(block, ref_logits[rows], local, ref_transform.at(rows), found)
        terms = _terms(p, q, d, kind, beta)
        slopes = _slopes(p, q, d, terms, found.mean, kind, beta, torch.empty_like(p), out=q)
        slopes.mul_(d_divergence[rows, None]).mul_(local.slope(block))
        if grads is not None:
            logit_grads_(block, targets[rows], local, grads.at(rows), out=block)
            slopes.add_(block)
        out[rows] = slopes


def left_factors(transform: LogitTransform, d_divergence: Tensor) -> Tensor:
    """The factor per row that makes the gradient of raw logits of the divergence's, as left."""
    return d_divergence * (transform.logit_scale / transform.temperature)


def left_grads_(
    p: Tensor,
    slopes: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    grads: RowGrads | None,
    d_divergence: Tensor,
    out: Tensor,
) -> None:
    """Writes what `pair_grads_` does, from what `pair_stats` has left. `out` may be `p`."""
    factors = left_factors(transform, d_divergence)
    for rows in _blocks(p):
        some, of_p, place = slopes[rows], p[rows], targets[rows, None].clamp(min=0)
        if grads is None:
            out[rows] = of_p.copy_(some).mul_(factors[rows, None])
            continue
        its, local, here = grads.at(rows), transform.at(rows), targets[rows, None] >= 0
        scale, coef = local.logit_scale / local.per_row, -its.d_softmax[:, None]
        if its.d_entropy is not None and its.entropy is not None:
            log_p = of_p.log().masked_fill_(of_p == 0, 0.0)
            coef = coef - its.d_entropy[:, None] * (log_p + its.entropy[:, None])
        of_target = some.gather(1, place) * factors[rows, None] + its.at_target[:, None] * scale
        made = of_p.mul_(coef * scale).addcmul_(some, factors[rows, None])
        made.scatter_(1, place, torch.where(here, of_target, made.gather(1, place)))
        if made.data_ptr() != out[rows].data_ptr():
            out[rows] = made


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


class _Term(NamedTuple):
    """A part of a divergence, `weight * sum a log(a / b)`."""

    weight: float
    a: Tensor
    log_ratio: Tensor


def _terms(p: Tensor, q: Tensor, d: Tensor, kind: str, beta: float) -> list[_Term]:
    """The parts of a divergence; for `jsd`, d is overwritten."""
    if known_kind(kind) == "reverse":
        return [_Term(1.0, p, d)]
    if kind == "forward":
        return [_Term(1.0, q, -d)]
    # Beyond, p or q is as good as 0.
    d.clamp_(-80.0, 80.0)
    of_p = torch.neg(d).expm1_().mul_(beta).log1p_().neg_()
    return [_Term(1 - beta, p, of_p), _Term(beta, q, torch.sub(of_p, d, out=d))]


def _divergence(
    p: Tensor, q: Tensor, terms: list[_Term], kind: str, beta: float, work: list[Tensor]
) -> Tensor:
    """The sum of its terms over the columns, none of which cancel."""
    b = {"reverse": q, "forward": p}.get(kind)
    b = torch.lerp(p, q, beta) if b is None else b
    return torch.stack([x.weight * _shares(x.a, b, x.log_ratio, work) for x in terms]).sum(0)


def _shares(a: Tensor, b: Tensor, log_ratio: Tensor, work: list[Tensor]) -> Tensor:
    """The sum of `a log(a / b) + b - a` over each row, with the logarithm given."""
    # On a CPU a look at the result is cheaper than one at every element.
    if a.device.type == "cpu":
        found = _sum_of_shares(a, b, log_ratio, *work[:2])
        if not found.isnan().any():
            return found
    # Where a is 0 its logarithm may be anything.
    return _sum_of_shares(a, b, log_ratio.masked_fill(a == 0, 1.0), *work[:2])


def _sum_of_shares(a: Tensor, b: Tensor, x: Tensor, beyond: Tensor, y: Tensor) -> Tensor:
    # a (x + e^-x - 1): near 0 a x^2 / (2 (1 + x/6)^2), but for x^3/540 of it. Beyond, what comes on
    # top from there on: of b = a e^-x what is below a e^-near, or above a e^near, so that no mask
    # is needed.
    c = torch.clamp(x, -_NEAR, _NEAR, out=beyond)
    torch.div(c, torch.mul(c, 1 / 6, out=y).add_(1.0), out=y)
    torch.sub(x, c, out=beyond).addcmul_(y, y, value=0.5).mul_(a)
    found = row_sums(beyond)
    for side in (-1, 1):
        edge = torch.add(b, a, alpha=-math.exp(side * _NEAR), out=y)
        found += row_sums(edge.clamp_(max=0.0) if side < 0 else edge.clamp_(min=0.0))
    return found


def _forward_moments(p: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """`p (1 - e^-d)`, which is p - q."""
    return torch.where(d.abs() < _NEAR, torch.expm1(-d).mul_(-p), p - q)


def _slopes(
    p: Tensor, q: Tensor, d: Tensor, terms: list[_Term], mean: Tensor, kind: str, beta: float,
    scratch: Tensor, out: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of the divergence by the policy's logits, in `out`, which may be `q`."""
    if kind == "forward":
        return torch.sub(_forward_moments(p, q, d), p * mean[:, None], out=out)
    h = terms[0].log_ratio
    slopes = torch.mul(torch.sub(h, mean[:, None], out=scratch), p, out=out)
    if p.device.type != "cpu" or not row_sums(slopes).isfinite().all():
        slopes.masked_fill_(p == 0, 0.0)
        if kind == "reverse":
            # The reference has no probability where the policy has: neither inf - inf nor NaN.
            slopes.masked_fill_(h == torch.inf, torch.inf)
    return slopes.mul_(1 - beta) if kind == "jsd" else slopes

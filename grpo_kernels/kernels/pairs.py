"""Two models' logits of the same tokens: statistics of both, a divergence and its gradient.

With p and q the two softmaxes of a row, d = log p - log q, and a divergence's h and scale
(`divergences.py`):

    pair_stats     both models' log-probs, logsumexps, entropies;  shift = lse - lse'
    divergences    L,  mean = sum_j p_j h_j             by the statistics
    pair_grads_    dL/dz_j = scale p_j (h_j - mean)     by the statistics and the mean

Numerics: p and q are of logits minus the row's largest, so that large logits cost no digits. d is
`(z - z') - shift`, and the difference of two close logits is exact. The rounding error of the shift
is the same in h and in its mean, and cancels. Each sum of `a log(a/b)` adds `a log(a/b) + b - a`:
the sum is the same, and no term is below 0. Where a and b are close, the term comes from an
expansion, and a - b from tanh.

Cost on a CPU: each function reads 8 bytes per pair of logits from memory, `pair_stats` twice. About
12, 24 and 14 operations per pair follow in a core's cache, a block of rows at a time, in buffers
that are reused, as allocating memory costs more than computing in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..base.sequences import widened
from . import LogitTransform, RowGrads, TokenStats
from .divergences import Divergence
from .pair_stats import PairStats
from .torch_backend import logit_grads_, row_blocks, row_sums

# Bytes of logits per core and block: larger blocks leave the cache between two operations.
_BYTES_PER_CORE = 512 << 10
# Below this |log(a/b)|, `a log(a/b) + b - a` comes from an expansion, of 5 digits.
_NEAR = 0.15
# Columns per part of a row: the search for the largest logit finds its part first.
_PART = 128


def pair_stats(
    logits: Tensor,
    ref_logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    ref_transform: LogitTransform,
    out: PairStats,
    *,
    invariant: bool = False,
) -> None:
    """Reduces two models' raw logits `[C, V]` to statistics per row, in `out`.

    `divergences` sets the divergence and the mean. A target of -1 is in no column: its log-probs
    are -inf.
    """
    place = _place_of_largest(logits)
    peak = transform.apply(logits.gather(1, place))
    ref_at_peak = ref_transform.apply(ref_logits.gather(1, place))
    ref_peak = ref_transform.apply(ref_logits.amax(1, keepdim=True))
    for stat, value in (
        (out.peak, peak), (out.ref_at_peak, ref_at_peak), (out.ref_peak, ref_peak)
    ):  # fmt: skip
        stat.copy_(value.squeeze(1))
    total = _set_softmax(out.policy_stats, logits, targets, transform, peak)
    ref_total = _set_softmax(out.reference_stats, ref_logits, targets, ref_transform, ref_peak)
    # From the sums of exponentials; the difference of logsumexps would cancel.
    out.shift.copy_((widened(out.peak) - out.ref_peak) + (total / ref_total).log())
    for stat, value in (
        (out.anchor, out.peak), (out.ref_anchor, out.ref_peak), (out.log_total, total.log2())
    ):  # fmt: skip
        stat.copy_(value)


def set_anchors(stats: PairStats) -> None:
    """Sets the anchors, and `log_total` relative to them, after a merge of several ranks'."""
    stats.anchor.copy_(stats.peak)
    stats.ref_anchor.copy_(stats.ref_peak)
    stats.log_total.copy_((widened(stats.logsumexp) - stats.peak) * (1 / math.log(2)))


def _set_softmax(
    stats: TokenStats, logits: Tensor, targets: Tensor, transform: LogitTransform, peak: Tensor
) -> Tensor:
    """Sets one model's statistics; returns the sum of e^(z - peak) over each row."""
    assert stats.entropy is not None
    total, weighted = logits.new_zeros((2, len(logits)), dtype=torch.float32)
    for rows, (x, exps) in _blocks(logits, 2):
        z = transform.at(rows).apply(logits[rows], out=x)
        torch.exp(torch.sub(z, peak[rows], out=x), out=exps)
        total[rows] = row_sums(exps)
        # x may be -inf where e^x is 0; the product is 0.
        weighted[rows] = row_sums(x.clamp_(min=-1e4).mul_(exps))
    log_total = widened(total).log()
    target_logit = transform.apply(logits.gather(1, targets[:, None].clamp(min=0)))
    logps = (target_logit - peak).squeeze(1) - log_total
    stats.logps.copy_(logps.masked_fill(targets < 0, -torch.inf))
    # A rank whose columns are all -inf has no share.
    stats.logsumexp.copy_(torch.where(peak == -torch.inf, peak, peak + log_total[:, None])[:, 0])
    stats.entropy.copy_(log_total - weighted / total)
    return widened(total)


def _place_of_largest(z: Tensor) -> Tensor:
    """The place of each row's largest logit, `[C, 1]`: its part of the row first."""
    V = z.shape[1]
    width = min(_PART, V)
    full = V // width * width
    parts = z[:, :full].unflatten(1, (-1, width)).amax(2)
    if full < V:
        parts = torch.cat((parts, z[:, full:].amax(1, keepdim=True)), 1)
    begin = (parts.argmax(1, keepdim=True) * width).clamp_(max=V - width)
    columns = begin + torch.arange(width, device=z.device)
    return begin.add_(z.gather(1, columns).argmax(1, keepdim=True))


def divergences(
    logits: Tensor,
    ref_logits: Tensor,
    transform: LogitTransform,
    ref_transform: LogitTransform,
    stats: PairStats,
    *,
    divergence: Divergence,
) -> None:
    """Sets `divergence` and `mean`, summed over these columns, from the statistics of the rows."""
    for rows, (p, q, d, *spare) in _blocks(logits, 7):
        row_stats, both = stats.at(rows), (logits[rows], ref_logits[rows])
        transforms = transform.at(rows), ref_transform.at(rows)
        _set_softmaxes(*both, *transforms, row_stats, p, q, d)
        terms, base = divergence.terms(p, q, d, spare[0]), divergence.base(p, q, spare[1])
        parts = [x.weight * _kl(x.a, base, x.log_ratio, *spare[2:]) for x in terms]
        row_stats.divergence.copy_(torch.stack(parts).sum(0))
        row_stats.mean.copy_(_sums_(divergence.weighted_h(p, q, terms), p))


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

    `grads`: from the policy's own statistics; None without. Overwrites `logits`, which `out` may
    be.
    """
    factors = (d_divergence * divergence.scale)[:, None]
    for rows, (p, q, d, spare) in _blocks(logits, 4):
        raw, local, row_stats = logits[rows], transform.at(rows), stats.at(rows)
        _set_softmaxes(raw, ref_logits[rows], local, ref_transform.at(rows), row_stats, p, q, d)
        weighted = divergence.weighted_h(p, q, divergence.terms(p, q, d, spare))
        _sums_(weighted, p)
        mean = row_stats.mean[:, None]
        slopes = torch.addcmul(weighted, p, mean, value=-1.0, out=q)
        if p.device.type != "cpu" or mean.isinf().any():
            # Where h is infinite, so is its mean, and their difference is NaN.
            slopes.masked_fill_(weighted == torch.inf, torch.inf)
            slopes.masked_fill_((p == 0) & slopes.isnan(), 0.0)
        slopes.mul_(factors[rows] * local.slope(raw))
        if grads is not None:
            logit_grads_(raw, targets[rows], local, grads.at(rows), out=raw)
            slopes.add_(raw)
        out[rows] = slopes


def _blocks(logits: Tensor, buffers: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Splits rows of logits into blocks; yields each with `buffers` float32 buffers of its size."""
    on_cpu, work = logits.device.type == "cpu", list[Tensor]()
    for rows in row_blocks(logits, _BYTES_PER_CORE * torch.get_num_threads() if on_cpu else None):
        if not work:
            shape = buffers, rows.stop - rows.start, logits.shape[1]
            work = list(logits.new_empty(shape, dtype=torch.float32))
        yield rows, [x[: rows.stop - rows.start] for x in work]


def _set_softmaxes(
    raw: Tensor, ref_raw: Tensor, transform: LogitTransform, ref_transform: LogitTransform,
    stats: PairStats, p: Tensor, q: Tensor, d: Tensor,
) -> None:  # fmt: skip
    """Sets p, q and d. Where p and q are 0, d is NaN."""
    z, t = transform.apply(raw, out=p), ref_transform.apply(ref_raw, out=q)
    torch.sub(z, t, out=d).sub_(stats.shift[:, None])
    anchor, log_total = widened(stats.anchor), widened(stats.log_total) * math.log(2)
    ref_log_total = log_total - (stats.shift - (anchor - stats.ref_anchor))
    torch.sub(z, stats.anchor[:, None], out=p).sub_(log_total.float()[:, None]).exp_()
    torch.sub(t, stats.ref_anchor[:, None], out=q).sub_(ref_log_total.float()[:, None]).exp_()


def _kl(a: Tensor, b: Tensor, x: Tensor, r: Tensor, u: Tensor) -> Tensor:
    """The sum of `a log(a / b) + b - a` over each row, with x the logarithm: a (x + e^-x - 1).

    With f(x) = x + e^-x - 1, b = a e^-x and c = x clamped to [-n, n], without `where`:

        a f(x) = a (f(c) + x - c) + min(b - a e^-n, 0) + max(b - a e^n, 0)
    """
    # f(c) is c^2 / (2 (1 + c/6)^2), up to a relative error of c^3/540.
    c = torch.clamp(x, -_NEAR, _NEAR, out=r)
    torch.div(c, torch.mul(c, 1 / 6, out=u).add_(1.0), out=u)
    sums = _sums_(torch.sub(x, c, out=r).addcmul_(u, u, value=0.5).mul_(a), a)
    for side in (-1, 1):
        edge = torch.add(b, a, alpha=-math.exp(side * _NEAR), out=u)
        sums += row_sums(edge.clamp_(max=0.0) if side < 0 else edge.clamp_(min=0.0))
    return sums


def _sums_(products: Tensor, weights: Tensor) -> Tensor:
    """The sum of each row; products are set to 0 where they are NaN and the weight is 0."""
    sums = row_sums(products)
    # On a CPU, checking the sums is cheaper than masking every element.
    if products.device.type != "cpu" or sums.isnan().any():
        sums = row_sums(products.masked_fill_((weights == 0) & products.isnan(), 0.0))
    return sums

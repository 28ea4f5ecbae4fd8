"""Torch ops: any device, and the fast path on a CPU.

A chunk of logits is many times a core's cache and every formula sweeps it several times, so the
sweeps run over blocks of rows that stay in the cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from . import Entries, LogitTransform, RowGrads, TokenStats

# No kernel: a closed form of the loss or autograd differentiates the objective.
policy_loss = None
PAIRS_MODULE = ".pairs"

CPU_BLOCK_BYTES = 8 << 20
_GPU_BLOCK_BYTES = 1 << 26


def token_stats(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    *,
    entropy: bool,
    exps: Tensor | None = None,
    out: TokenStats | None = None,
    invariant: bool = False,
) -> TokenStats:
    """Reduces raw logits `[C, V]` to statistics per row, in `out` if given.

    `exps [C, V]`, float32 or bf16, gets the gradient of the raw logits up to one factor per row
    (`row_factors`):

        X = e^(z - a), with -S' at the target y, S' = sum_(j != y) X_j; times softcap's slope

    The anchor `a` is at most 60 below the row's largest logit. `exps` may be `logits` itself; else
    `logits` do not change. `invariant`: the anchor is always the largest logit, so that statistics
    have the same bits with `exps` and without.

    A target of -1 is in no column: its log-prob is -inf, and its row of X has no such entry.
    """
    if out is None:
        out = TokenStats.empty(logits, entropy=entropy, total=exps is not None)
    scratch: list[Tensor] = []
    for rows in row_blocks(logits):
        local, block = transform.at(rows), logits[rows]
        z = local.apply(block)
        chain = local.softcap_slope(block) if exps is not None else None
        if not scratch:
            scratch = [torch.empty_like(z) for _ in range(2)]
        peak = z.amax(1, keepdim=True)
        # A row of -inf only has no distribution: NaN, as in torch.log_softmax.
        shifted = torch.sub(z, peak, out=scratch[0][: len(z)])
        # One sweep; exp and sum would be two.
        may_overwrite = z.data_ptr() != block.data_ptr() or _same_memory(exps, logits)
        in_place = may_overwrite and z.is_contiguous()
        p = torch.softmax(z, 1, out=z if in_place else scratch[1][: len(z)])
        # softmax adds up less exactly than sum: its probabilities are off by one factor per row.
        largest = p.amax(1)
        target = targets[rows, None]
        place, elsewhere = target.clamp(min=0), target < 0
        at_place, target_logit = p.gather(1, place), shifted.gather(1, place)
        weighted = _sum_of_products(p, shifted) if entropy else None
        # A sum with a nearly certain target would lose the digits of the others.
        kept = at_place * elsewhere
        rest = row_sums(p.scatter_(1, place, kept))
        target_exp = (at_place - kept).squeeze(1)
        # log S relative to the largest exponential; the difference is 0 if the target's is largest.
        log_total = (target_exp - largest).add_(rest).div_(largest).log1p_()
        target_logit = target_logit.masked_fill_(elsewhere, -torch.inf).squeeze(1)
        torch.sub(target_logit, log_total, out=out.logps[rows])
        peak = peak.squeeze(1)
        out.logsumexp[rows] = torch.where(peak == -torch.inf, peak, peak + log_total)
        if weighted is not None:
            assert out.entropy is not None
            out.entropy[rows] = log_total - weighted / (rest + target_exp)
        if exps is not None:
            assert out.total is not None
            torch.add(rest, target_exp, out=out.total[rows])
            p.scatter_(1, place, at_place.where(elsewhere, -rest[:, None]))
            if chain is not None:
                p.mul_(chain)
            if p.data_ptr() != exps[rows].data_ptr():
                exps[rows] = p
    return out


def _same_memory(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.data_ptr() == b.data_ptr() and a.dtype == b.dtype


def _sum_of_products(p: Tensor, shifted: Tensor) -> Tensor:
    """The sum of `p * shifted` over each row; overwrites `shifted`."""
    # A logit of -inf would give 0 * -inf.
    if p.device.type != "cpu":
        return (p * shifted.clamp(min=-1e4)).sum(1)
    dot = row_sums(shifted.mul_(p))
    # On a CPU, checking the sums is cheaper than masking every element, and does not synchronize.
    return dot if not dot.isnan().any() else row_sums(torch.where(p > 0, shifted, 0.0))


def row_sums(x: Tensor) -> Tensor:
    """The sum of each row, the same bits for one row as for many, as torch splits a single row."""
    return x.sum(1) if len(x) > 1 else x.expand(2, -1).sum(1)[:1]


def logit_grads_(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    grads: RowGrads,
    out: Tensor,
) -> None:
    """Writes the gradient of the raw logits `[C, V]` to `out [C, V]`.

    `out` may be `logits` itself. A target of -1 is in no column.
    """
    for rows in row_blocks(logits):
        local, block, target = transform.at(rows), logits[rows], out[rows]
        z = local.apply(block)
        # Without a transform z is the logits: overwrite them only if they are also `out`.
        if z.data_ptr() == block.data_ptr() and not _same_memory(target, block):
            z = z.clone()
        chain = local.softcap_slope(block)
        lse, d_softmax = grads.logsumexp[rows, None], grads.d_softmax[rows, None]
        if grads.d_entropy is None or grads.entropy is None:
            d_logits = z.sub_(lse).exp_().mul_(-d_softmax)
        else:
            log_p = z.sub_(lse)
            # p * log p is 0 where p is 0; a logit of -inf must not make it NaN.
            surprise = log_p.clamp(min=-1e4).add_(grads.entropy[rows, None])
            coef = surprise.mul_(grads.d_entropy[rows, None]).add_(d_softmax)
            d_logits = log_p.exp_().mul_(coef).neg_()
        place = targets[rows, None]
        d_target = torch.where(place < 0, d_logits[:, :1], grads.d_target[rows, None])
        d_logits.scatter_(1, place.clamp(min=0), d_target)
        if chain is not None:
            d_logits.mul_(chain)
        slope = local.logit_scale / local.per_row
        if isinstance(slope, Tensor) or slope != 1.0:
            d_logits.mul_(slope)
        if d_logits.data_ptr() != target.data_ptr():
            target.copy_(d_logits)


def entry_dots(x: Tensor, rows: Tensor, entries: Entries, out: Tensor) -> None:
    """Adds to `out [E]` the dot product of each entry's row of `x [N, K]` and of `rows [V, K]`.

    Always in float32.
    """
    if x.device.type == "cpu" and x.dtype == rows.dtype == torch.float32:
        shape = (len(entries.offsets) - 1, len(rows))
        with warnings.catch_warnings():
            # A warning that sparse CSR tensors are in beta.
            warnings.simplefilter("ignore")
            at = torch.sparse_csr_tensor(
                entries.offsets, entries.ids, out, shape, device=out.device, check_invariants=False
            )
            out.copy_(torch.sparse.sampled_addmm(at, x, rows.t()).values())
        return
    for part in _cache_slices(len(entries), x.shape[1]):
        factors = x[entries.tokens[part]].float()
        out[part] += factors.mul_(rows[entries.ids[part]]).sum(1)


def segment_sums(
    factors: Tensor,
    index: Tensor,
    offsets: Tensor,
    rows: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Sums `factors[e] * rows[index[e]]` over e of each segment, `[S, K]` in `dtype`.

    Segment s is `offsets[s] : offsets[s + 1]`; segments cover every e. Each sum is float32, always
    in the same order, and rounded once. Rows whose factor is 0 are not read.
    """
    stored = factors != 0
    if not bool(stored.all()):
        offsets = torch.nn.functional.pad(stored.cumsum(0), (1, 0))[offsets]
        factors, index = factors[stored], index[stored]
    if rows.dtype == torch.float32:
        return _bags(factors, index, offsets, rows).to(dtype)
    result = rows.new_empty((len(offsets) - 1, rows.shape[1]), dtype=dtype)
    # Slices whose entries, or sums, are a few megabytes at a time.
    step = max(1, CPU_BLOCK_BYTES // (4 * rows.shape[1]))
    for part in _segment_slices(offsets, step):
        bounds = offsets[part.start : part.stop + 1]
        entries = slice(int(bounds[0]), int(bounds[-1]))
        some = rows[index[entries]].float()
        each = torch.arange(len(some), device=index.device)
        result[part] = _bags(factors[entries], each, bounds - bounds[0], some).to(dtype)
    return result


def _bags(factors: Tensor, index: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    return torch.nn.functional.embedding_bag(
        index, rows, offsets, mode="sum", per_sample_weights=factors, include_last_offset=True
    )


def _segment_slices(offsets: Tensor, step: int) -> Iterator[slice]:
    """Splits the segments into slices of about `step` entries and at most `step` segments."""
    count = len(offsets) - 1
    # A slice may begin at every step-th segment, and at the first behind every step-th entry.
    marks = torch.arange(0, int(offsets[-1]) if count else 0, step, device=offsets.device)
    inside = torch.searchsorted(offsets[:-1].contiguous(), marks).tolist()
    cuts = sorted({*range(0, count, step), *(i for i in inside if i < count), count})
    for begin, end in pairwise(cuts):
        yield slice(begin, end)


def _cache_slices(count: int, width: int) -> Iterator[slice]:
    step = max(1, CPU_BLOCK_BYTES // (4 * width))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def row_blocks(logits: Tensor, block_bytes: int | None = None) -> Iterator[slice]:
    """Splits rows of logits into blocks that stay in the cache between sweeps."""
    if block_bytes is None:
        block_bytes = CPU_BLOCK_BYTES if logits.device.type == "cpu" else _GPU_BLOCK_BYTES
    count, step = len(logits), max(1, block_bytes // (4 * logits.shape[1]))
    while step > 2 and count % step == 1:
        step -= 1  # torch sums a block of one row in another order
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))

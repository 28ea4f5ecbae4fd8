"""Torch ops: any device, and the fast path on a CPU.

A chunk of logits is many times a core's cache and every formula below sweeps it several times, so
the sweeps run over blocks of rows that stay in the cache between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import LogitTransform, RowGrads, TokenStats

# Autograd differentiates the objective.
policy_loss = None

_CPU_BLOCK_BYTES = 2 << 20
_GPU_BLOCK_BYTES = 1 << 26


def token_stats(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    *,
    entropy: bool,
    block_bytes: int | None = None,
) -> TokenStats:
    count = logits.shape[0]
    shifted_targets, peaks, totals, weighted = logits.new_empty((4, count), dtype=torch.float32)
    for rows in _row_blocks(logits, block_bytes):
        z = _transformed(logits[rows], transform.at(rows))
        peak = z.amax(1, keepdim=True)
        # A row that is -inf throughout has no distribution: NaN, as torch.log_softmax has it.
        shifted = z - peak
        shifted_targets[rows] = shifted.gather(1, targets[rows, None]).squeeze(1)
        exps = shifted.exp()
        peaks[rows] = peak.squeeze(1)
        totals[rows] = exps.sum(1)
        if entropy:
            weighted[rows] = _sum_of_products(exps, shifted)
    log_totals = totals.log()
    # Not target logit - logsumexp, which loses what is below an ulp of the logits.
    logps = shifted_targets - log_totals
    entropies = log_totals - weighted / totals if entropy else None
    return TokenStats(logps, peaks + log_totals, entropies)


def _sum_of_products(exps: Tensor, shifted: Tensor) -> Tensor:
    """The sum of `exps * shifted` over each row; overwrites `shifted`."""
    # A logit of -inf would give 0 * -inf.
    if exps.device.type != "cpu":
        return (exps * shifted.clamp(min=-1e4)).sum(1)
    dot = shifted.mul_(exps).sum(1)
    # On a CPU a look at the result is cheaper than one at every element, and no synchronisation.
    return torch.xlogy(exps, exps).sum(1) if dot.isnan().any() else dot


def logit_grads_(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    grads: RowGrads,
    out: Tensor,
    *,
    column_weights: Tensor | None = None,
    block_bytes: int | None = None,
) -> None:
    p = grads.logps.exp()
    at_target = (grads.d_logps - grads.d_softmax) * p - grads.d_logps * grads.logps.expm1()
    if grads.d_entropy is not None and grads.entropy is not None:
        at_target -= p * grads.d_entropy * (grads.logps.clamp(min=-1e4) + grads.entropy)
    for rows in _row_blocks(logits, block_bytes):
        local, block, target = transform.at(rows), logits[rows], out[rows]
        z = _transformed(block, local)
        # Where nothing was transformed z is the logits themselves: work there only if they are
        # also where the result goes.
        in_place = target.data_ptr() == block.data_ptr() and target.dtype == block.dtype
        if z.data_ptr() == block.data_ptr() and not in_place:
            z = z.clone()
        chain = None
        if transform.softcap is not None:
            chain = 1 - (z * _column(local.temperature) / transform.softcap).square()
        lse, d_softmax = grads.logsumexp[rows, None], grads.d_softmax[rows, None]
        if grads.d_entropy is None or grads.entropy is None:
            d_logits = z.sub_(lse).exp_().mul_(-d_softmax)
        else:
            log_p = z.sub_(lse)
            # p * log p is 0 where p is, and a logit of -inf must not make it NaN.
            surprise = log_p.clamp(min=-1e4).add_(grads.entropy[rows, None])
            coef = surprise.mul_(grads.d_entropy[rows, None]).add_(d_softmax)
            d_logits = log_p.exp_().mul_(coef).neg_()
        d_logits.scatter_(1, targets[rows, None], at_target[rows, None])
        if chain is not None:
            d_logits.mul_(chain)
        slope = local.logit_scale / _column(local.temperature)
        if isinstance(slope, Tensor) or slope != 1.0:
            d_logits.mul_(slope)
        if column_weights is not None:
            d_logits.mul_(column_weights)
        if d_logits.data_ptr() != target.data_ptr():
            target.copy_(d_logits)


def column_scores(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    grads: RowGrads,
    blocks: list[slice],
) -> tuple[Tensor, Tensor]:
    squares, sums = logits.new_zeros((2, len(blocks), logits.shape[1]), dtype=torch.float32)
    for index, block in enumerate(blocks):
        chunk, local, given = logits[block], transform.at(block), grads.at(block)
        for rows in _row_blocks(chunk, None):
            out = chunk[rows].to(torch.float32, copy=True)
            logit_grads_(out, targets[block][rows], local.at(rows), given.at(rows), out=out)
            sums[index] += out.sum(0)
            squares[index] += out.square_().sum(0)
    return squares, sums


def _row_blocks(logits: Tensor, block_bytes: int | None) -> Iterator[slice]:
    if block_bytes is None:
        block_bytes = _CPU_BLOCK_BYTES if logits.device.type == "cpu" else _GPU_BLOCK_BYTES
    step = max(1, block_bytes // (4 * logits.shape[1]))
    for start in range(0, logits.shape[0], step):
        yield slice(start, min(start + step, logits.shape[0]))


def _transformed(raw: Tensor, transform: LogitTransform) -> Tensor:
    """Maps raw logits to logits, float32; returns `raw` itself where there is nothing to do."""
    z = raw.float()
    if transform.bias is not None:
        z = z + transform.bias
    if transform.logit_scale != 1.0:
        z = z * transform.logit_scale
    if transform.softcap is not None:
        z = (z / transform.softcap).tanh_().mul_(transform.softcap)
    if isinstance(transform.temperature, Tensor) or transform.temperature != 1.0:
        z = z / _column(transform.temperature)
    return z


def _column(temperature: float | Tensor) -> float | Tensor:
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature

"""Torch ops of the sampled backward: scores of columns, and the level of their probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import LogitTransform, RowGrads
from ..backends.torch_backend import logit_grads_, row_blocks

# Steps of Newton's method in `column_level`: 8 reach a percent at tolerances of 1e-3 and above.
LEVEL_STEPS = 20


def column_scores(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    grads: RowGrads,
    blocks: list[slice],
) -> tuple[Tensor, Tensor]:
    """Sums the gradient of the raw logits per block and column: squares and values, `[B, V]`.

    `blocks` cut the rows into pieces of equal size but for the last. Float32.
    """
    squares, sums = logits.new_zeros((2, len(blocks), logits.shape[1]), dtype=torch.float32)
    for index, block in enumerate(blocks):
        chunk, local, given = logits[block], transform.at(block), grads.at(block)
        for rows in row_blocks(chunk):
            out = chunk[rows].to(torch.float32, copy=True)
            logit_grads_(out, targets[block][rows], local.at(rows), given.at(rows), out=out)
            sums[index] += out.sum(0)
            squares[index] += out.square_().sum(0)
    return squares, sums


def column_level(norms: Tensor, allowed: Tensor, copies: int) -> Tensor:
    """The level u, 0-d, at which the sum over norm < u of norm * (u - norm) is `allowed`.

    `norms [K]`, at most 32,768, float32 and not negative, count `copies` times; `allowed` is 0-d.
    Found from above, and for any input a number above 0.
    """
    # Newton's method, from above; between one norm and the next the sum is linear.
    tiny = torch.finfo(norms.dtype).tiny
    level = norms.new_full((), torch.inf)
    for _ in range(LEVEL_STEPS + 1):
        below = norms.masked_fill(norms >= level, 0.0)
        square = (allowed / copies + below.dot(below)).clamp_(min=tiny)
        level = square / below.sum().clamp_(min=tiny)
    return level

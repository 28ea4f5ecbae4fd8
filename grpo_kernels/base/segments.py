"""The softmax of ragged rows: row i has the entries `offsets[i] : offsets[i + 1]` of `[E]`.

    l_j = z_j - lse,    E = -sum p l
    dL/dz_j = g_j (1 - p_j) - p_j (G - g_j - q + e (l_j + E)),    G = sum of g over the row

with g, e and q the gradients of l, E and lse. Plain PyTorch: the rows of W dominate, one per
entry, so a kernel here would save nothing. Sums are float64 where the device has it, so that G - g
keeps its digits if g is nearly all of G; 1 - p does, as S' is summed without the largest entry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .sequences import widened


class RowsLogSoftmax(torch.autograd.Function):
    """Log-probs `[E]`, entropy and logsumexp `[N]` of logits `[E]`; 0 of rows without entries."""

    @staticmethod
    def forward(z: Tensor, tokens: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        peak = torch.segment_reduce(z, "max", offsets=offsets, initial=-torch.inf, unsafe=True)
        peak = widened(peak.masked_fill(peak == -torch.inf, 0.0))
        shifted = widened(z) - peak[tokens]
        # log(1 + S'), S' summed without the largest entry, next to which it would lose its digits.
        is_peak = shifted == 0
        rest = row_sums(shifted.exp().masked_fill_(is_peak, 0.0), offsets)
        log_total = rest + (row_sums(widened(is_peak), offsets) - 1)
        log_total = log_total.masked_fill_(offsets.diff() == 0, 0.0).log1p()
        log_p = shifted - log_total[tokens]
        entropy = -row_sums(log_p.exp() * log_p.clamp(min=-1e4), offsets)
        return log_p.to(z.dtype), entropy.to(z.dtype), (peak + log_total).to(z.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        log_p, entropy, _ = output
        ctx.save_for_backward(log_p, entropy, *inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, g: Tensor | None, e: Tensor | None, q: Tensor | None
    ) -> tuple[Tensor, None, None]:
        log_p, entropy, tokens, offsets = ctx.saved_tensors
        dtype, log_p, entropy = log_p.dtype, widened(log_p), widened(entropy)
        g = torch.zeros_like(log_p) if g is None else widened(g)
        total = row_sums(g, offsets)
        rest = (total if q is None else total - q)[tokens] - g
        needed = row_sums(widened(g != 0), offsets) != 0
        for x in (e, q):
            needed = needed if x is None else needed | (x != 0)
        if e is not None:
            rest = rest + e[tokens] * (log_p.clamp(min=-1e4) + entropy[tokens])
        d = -log_p.expm1() * g - log_p.exp() * rest
        return torch.where(needed[tokens], d, 0.0).to(dtype), None, None


def row_sums(x: Tensor, offsets: Tensor) -> Tensor:
    """The sums `[N]` of entries `[E]` over each row; 0 of none."""
    return torch.segment_reduce(x, "sum", offsets=offsets, initial=0.0, unsafe=True)

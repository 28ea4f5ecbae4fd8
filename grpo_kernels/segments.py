"""The softmax of ragged rows: entries `[E]`, of which row i has `offsets[i] : offsets[i + 1]`.

    l_j = z_j - lse,    E = -sum p l
    dL/dz_j = g_j (1 - p_j) - p_j (G - g_j - q + e (l_j + E)),    G = sum of g over the row

with g, e and q the gradients of l, E and lse. Plain PyTorch: an entry is four bytes here and a row
of W elsewhere, so that nothing is to be gained by a kernel. Each sum is taken in one order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autograd import refuse_double_backward


class RowsLogSoftmax(torch.autograd.Function):
    """Log-probs `[E]`, entropy and logsumexp `[N]` of logits `[E]`; 0 of rows without entries."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, tokens: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        peak = torch.segment_reduce(z, "max", offsets=offsets, initial=-torch.inf, unsafe=True)
        peak = peak.masked_fill_(peak == -torch.inf, 0.0)
        shifted = z - peak[tokens]
        log_total = row_sums(shifted.exp(), offsets)
        log_total = log_total.masked_fill_(offsets.diff() == 0, 1.0).log_()
        log_p = shifted - log_total[tokens]
        entropy = -row_sums(log_p.exp() * log_p.clamp(min=-1e4), offsets)
        ctx.save_for_backward(log_p, entropy, tokens, offsets)
        ctx.set_materialize_grads(False)
        return log_p.clone(), entropy.clone(), peak + log_total

    @staticmethod
    def backward(
        ctx: Any, g: Tensor | None, e: Tensor | None, q: Tensor | None
    ) -> tuple[Tensor, None, None]:
        refuse_double_backward("linear_logprobs, fused_grpo_loss")
        log_p, entropy, tokens, offsets = ctx.saved_tensors
        g = torch.zeros_like(log_p) if g is None else g
        needed = row_sums((g != 0).float(), offsets) != 0
        rest = (row_sums(g, offsets) if q is None else row_sums(g, offsets) - q)[tokens] - g
        for x in (e, q):
            needed = needed if x is None else needed | (x != 0)
        if e is not None:
            rest = rest + e[tokens] * (log_p.clamp(min=-1e4) + entropy[tokens])
        d = -log_p.expm1() * g - log_p.exp() * rest
        # Rows without a gradient have no part in any product, whatever their states hold.
        return torch.where(needed[tokens], d, 0.0), None, None


def row_sums(x: Tensor, offsets: Tensor) -> Tensor:
    """The sums `[N]` of entries `[E]` over each row; 0 of none."""
    return torch.segment_reduce(x, "sum", offsets=offsets, initial=0.0, unsafe=True)

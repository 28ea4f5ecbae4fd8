"""The gradients of a linear head, from the gradient of its logits.

With D the gradient of some rows' raw logits `[C, V]`:

    dh = D W,    dW += D^T h,    db += sum_rows D        accumulated in float32
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .backends import Backend, RowGrads
from .lm_head import LMHead, Rows, addmm, mm


class HeadGradients:
    """Owns the gradients of a head's operands, and adds rows to them.

    Args:
        head: the head, with a buffer of logits for the rows that will be added.
        backend: computes the gradient of the logits.
        wanted: the gradients wanted, in the order of `HeadOperands`.
        every_row: True if all rows of the call will be added; others are left 0.
    """

    def __init__(
        self, head: LMHead, backend: Backend, wanted: Sequence[bool], *, every_row: bool
    ) -> None:
        self.head, self.backend = head, backend
        hidden, _, _, lora_a_out, lora_b = head.operands
        empty, zeros = hidden.new_empty, hidden.new_zeros
        of_hidden, of_weight, of_bias, of_a_out, of_b = wanted
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None
        self.d_lora_a_out: Tensor | None = None
        self.d_lora_b: Tensor | None = None
        if of_hidden:
            self.d_hidden = (empty if every_row else zeros)(hidden.shape)
        if of_weight:
            self.d_weight = empty((head.V, head.H), dtype=torch.float32)
        self._weight_written = False
        if of_bias:
            self.d_bias = zeros(head.V, dtype=torch.float32)
        if of_a_out and lora_a_out is not None:
            self.d_lora_a_out = torch.zeros_like(lora_a_out)
        if of_b and lora_b is not None:
            self.d_lora_b = zeros(lora_b.shape, dtype=torch.float32)

    def add(self, rows: Rows, logits: Tensor, grads: RowGrads) -> None:
        """Adds the share of `rows`, from their raw logits `[C, V]`, which are overwritten."""
        # On the same memory: a chunk of logits is most of the workspace.
        d_logits = logits.view(self.head.dtype)[:, : self.head.V]
        self.backend.logit_grads_(logits, rows.targets, rows.transform, grads, out=d_logits)
        if self.d_hidden is not None:
            self.d_hidden[rows.index] = self.head.times_weight(d_logits).to(self.d_hidden.dtype)
        if self.d_weight is not None:
            addmm(self.d_weight, d_logits.t(), rows.hidden, beta=float(self._weight_written))
            self._weight_written = True
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0, dtype=torch.float32)
        if self.d_lora_b is not None and rows.lora_a_out is not None:
            addmm(self.d_lora_b, d_logits.t(), rows.lora_a_out.to(d_logits.dtype))
        if self.head.operands.lora_b is not None:
            self._add_lora_a_out(rows, d_logits, self.head.operands.lora_b)

    def _add_lora_a_out(self, rows: Rows, d_logits: Tensor, lora_b: Tensor) -> None:
        if self.d_lora_a_out is not None:
            share = d_logits.new_empty((len(d_logits), lora_b.shape[1]), dtype=torch.float32)
            mm(d_logits, lora_b.to(d_logits.dtype), out=share)
            self.d_lora_a_out[rows.index] = share.to(self.d_lora_a_out.dtype)

    def finish(self) -> tuple[Tensor | None, ...]:
        """The gradients in the order of `HeadOperands`, None where not wanted.

        Those of rows are in their operand's dtype, the others in float32.
        """
        if self.d_weight is not None and not self._weight_written:
            self.d_weight.zero_()
        return self.d_hidden, self.d_weight, self.d_bias, self.d_lora_a_out, self.d_lora_b

    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the backward: none of an exact one."""
        return {}

"""The gradients of a linear head, from the gradient of its logits.

With D the gradient of some rows' raw logits `[C, V]`:

    dh = D W,    dW += D^T h,    db += sum_rows D        accumulated in float32

Where D is a factor per row times what the forward's sweep has left behind, D = r o X, it is never
made: dh = r o (X W), dW += X^T (r o h).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backends import Backend, LogitTransform, RowGrads, TokenStats
from .head_call import HeadCall
from .lm_head import LMHead, Rows, addmm, mm


class HeadGradients:
    """Owns the gradients of a head's operands, and adds rows to them.

    Args:
        head: the head, with a buffer of logits for the rows that will be added.
        backend: computes the gradient of the logits.
        wanted: the gradients wanted, in the order of `HeadOperands`.
        max_rows: most rows that are added at a time.
        every_row: True if all rows of the call will be added; others are left 0.
    """

    def __init__(
        self,
        head: LMHead,
        backend: Backend,
        wanted: Sequence[bool],
        max_rows: int,
        *,
        every_row: bool,
    ) -> None:
        self.head, self.backend, self.shard = head, backend, head.call.shard
        hidden, weight, bias, lora_a_out, lora_b = head.operands
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
            self.d_weight = empty(weight.shape, dtype=torch.float32)
        self._weight_written = False
        self._d_logits: Tensor | None = None
        self._max_rows = max_rows
        if of_bias and bias is not None:
            self.d_bias = zeros(bias.shape, dtype=torch.float32)
        if of_a_out and lora_a_out is not None:
            self.d_lora_a_out = lora_a_out.new_zeros(lora_a_out.shape)
        if of_b and lora_b is not None:
            self.d_lora_b = zeros(lora_b.shape, dtype=torch.float32)

    @property
    def sweeps_once(self) -> bool:
        """True if the next rows may take `sweep` and `add_swept`."""
        return True

    def sweep(self, rows: Rows) -> tuple[TokenStats, TokenStats]:
        """The statistics of `rows`, as `LMHead.whole` has them.

        Their exponentials stay for `add_swept`, which comes next.
        """
        exps = self._gradient_rows(len(rows.hidden))
        stats = TokenStats.empty(exps, entropy=True, total=True)
        for part in self.head.strips(len(rows.hidden)):
            strip = rows.at(part)
            self.backend.token_stats(
                self.head.logits(strip),
                strip.targets,
                strip.transform,
                entropy=True,
                exps=exps[part],
                out=stats.at(part),
                invariant=bool(self.head.call.tile),
            )
        whole, own = self.head.whole(rows, stats)
        if self.shard is not None and rows.here is not None:
            biased = self.head.operands.bias is not None
            self.shard.mend(exps, rows.targets, rows.transform, rows.here, stats, own, biased)
        return whole, own

    def add_swept(self, rows: Rows, stats: TokenStats, d_logps: Tensor) -> None:
        """Adds the share of the rows that were swept, from the gradient of their log-probs."""
        exps = self._gradient_rows(len(rows.hidden))
        self._multiply(rows, exps, row_factors(stats, d_logps, rows.transform))

    def add(self, rows: Rows, logits: Tensor, grads: RowGrads) -> None:
        """Adds the share of `rows`, from their raw logits `[C, V]`, which may be overwritten."""
        in_place = self.head.dtype == logits.dtype
        d_logits = logits if in_place else self._gradient_rows(len(logits))
        self.backend.logit_grads_(logits, rows.targets, rows.transform, grads, out=d_logits)
        self._multiply(rows, d_logits)

    def add_again(self, rows: Rows, grads: RowGrads) -> None:
        """Adds the share of `rows`, whose logits are computed again."""
        d_logits = self._gradient_rows(len(rows.hidden))
        for part in self.head.strips(len(rows.hidden)):
            strip, of_strip = rows.at(part), grads.at(part)
            logits = self.head.logits(strip)
            if rows.of_ranks is not None and self.shard is not None and strip.here is not None:
                of_strip = self.shard.stand_ins(of_strip, strip.transform, logits, strip.here)
            self.backend.logit_grads_(
                logits, strip.targets, strip.transform, of_strip, out=d_logits[part]
            )
        self._multiply(rows, d_logits)

    def _gradient_rows(self, count: int) -> Tensor:
        """Where the gradient of `count` rows goes: over their logits, if it is as wide."""
        if self.head.dtype == torch.float32:
            return self.head.buffer[:count]
        if self._d_logits is None:
            self._d_logits = self.head.new_rows(self.head.padded(self._max_rows), self.head.dtype)
        return self._d_logits[:count]

    def _whole_tiles(self, d_logits: Tensor) -> Tensor:
        """The rows, and after them rows of zeros up to whole tiles, in the buffer they lie in."""
        count, padded = len(d_logits), self.head.padded(len(d_logits))
        if padded == count:
            return d_logits
        buffers = (self.head.buffer, self._d_logits)
        (buffer,) = (x for x in buffers if x is not None and x.data_ptr() == d_logits.data_ptr())
        buffer[count:padded] = 0.0
        return buffer[:padded]

    def _multiply(self, rows: Rows, d_logits: Tensor, factors: Tensor | None = None) -> None:
        """Adds the products of `d_logits [C, V]`, times `factors [C]`, with what stands beside."""
        head, a_out = self.head, rows.lora_a_out
        sums, lora_b, count = [], head.lora_b, len(d_logits)
        tiles = self._whole_tiles(d_logits)
        if self.d_hidden is not None:
            share = head.times_weight(tiles)[:count]
            sums += self._put(self.d_hidden, rows, share, factors)
        if self.d_lora_a_out is not None and lora_b is not None:
            share = head.times_lora_b(tiles, lora_b)[:count]
            sums += self._put(self.d_lora_a_out, rows, share, factors)
        if self.d_weight is not None:
            hidden = _times(rows.hidden, factors, head.dtype)
            for columns in head.column_slices():
                share = self.d_weight[columns]
                addmm(share, d_logits[:, columns].t(), hidden, beta=float(self._weight_written))
            self._weight_written = True
        if self.d_bias is not None:
            self._add_bias(d_logits, factors)
        if self.d_lora_b is not None and a_out is not None:
            addmm(self.d_lora_b[: head.V], d_logits.t(), _times(a_out, factors, head.dtype))
        for grad, share, work in sums:
            work.wait()
            put_rows(grad, rows.index, share)

    def _put(
        self, grad: Tensor, rows: Rows, share: Tensor, factors: Tensor | None
    ) -> list[tuple[Tensor, Tensor, Any]]:
        """Sets the gradient of rows; where ranks share the vocabulary, begins to add it up.

        Returns what is under way: the gradient, its share, and what to wait for.
        """
        if self.shard is None or self.shard.layout == "partial":
            put_rows(grad, rows.index, share, factors)
            return []
        if factors is not None:
            share.mul_(factors[:, None])
        return [(grad, *self.shard.sum(share, rows.of_ranks))]

    def _add_bias(self, d_logits: Tensor, factors: Tensor | None) -> None:
        assert self.d_bias is not None
        d_bias = self.d_bias[: self.head.V]
        if factors is None:
            d_bias += d_logits.sum(0, dtype=torch.float32)
            return
        if factors.dtype == d_logits.dtype:
            d_bias.addmv_(d_logits.t(), factors)
            return
        # Two columns, the second with what the first has rounded away.
        high = factors.to(d_logits.dtype)
        both = torch.stack((high, (factors - high).to(d_logits.dtype)), dim=1)
        sums = d_bias.new_empty((len(d_bias), 2))
        mm(d_logits.t(), both, out=sums)
        d_bias += sums.sum(1)

    def so_far(self) -> tuple[Tensor | None, ...]:
        """The gradients in the order of `HeadOperands`, None where not wanted; may be added to.

        Those of rows are in their operand's dtype, the others in float32.
        """
        if self.d_weight is not None and not self._weight_written:
            self.d_weight.zero_()
            self._weight_written = True
        return self.d_hidden, self.d_weight, self.d_bias, self.d_lora_a_out, self.d_lora_b

    def finish(self) -> tuple[Tensor | None, ...]:
        """The gradients, as in `so_far`, when all rows have been added."""
        return self.so_far()

    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the backward: none of an exact one."""
        return {}


def chunk_layout(call: HeadCall, with_grad: bool, *, strips: bool) -> dict[str, Any]:
    """What `plan_rows` has to know of the logits' gradient; `strips`: no step needs all rows."""
    if not with_grad or call.dtype == torch.float32:
        return {}
    return {"grad_bytes": call.dtype.itemsize, "strips": strips and call.sampling is None}


def row_factors(stats: TokenStats, d_logps: Tensor, transform: LogitTransform) -> Tensor:
    """What each row's exponentials X have to be multiplied with to be D, float32 `[C]`."""
    assert stats.total is not None
    return d_logps * (-transform.logit_scale / transform.temperature) / stats.total


def _times(x: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x [C, K]` times a factor per row, rounded to `dtype` once."""
    if factors is None:
        return x.to(dtype)
    return torch.mul(x, factors[:, None], out=torch.empty_like(x, dtype=dtype))


def put_rows(
    grad: Tensor, index: slice | Tensor, share: Tensor, factors: Tensor | None = None
) -> None:
    """Stores the gradient of some rows, times a factor per row, in the dtype of `grad`."""
    if isinstance(index, slice):
        if factors is None:
            grad[index].copy_(share)
        else:
            torch.mul(share, factors[:, None], out=grad[index])
    else:
        if factors is not None:
            share.mul_(factors[:, None])
        grad[index] = share.to(grad.dtype)

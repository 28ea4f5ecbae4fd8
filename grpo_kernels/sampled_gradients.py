"""The gradients of a linear head from a sample of its vocabulary columns.

D, the gradient of a block's logits `[R, V]`, is reduced to K columns, divided by their
probabilities: D~ `[R, K]`. With W~ the rows of W that belong to them,

    dH  = D~ W~ + (rowsum D - rowsum D~) (x) mean row of W
    dW~ += D~^T h - colsum D~ (x) mean h        and at the end dW += colsum D (x) mean h

`column_sampling.py` says which columns, and why this is unbiased. Blocks that would keep too many
columns take the exact way, `HeadGradients.add`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .backends import Backend, RowGrads, TokenStats
from .column_sampling import (
    TYPICAL_VARIANCE_GROWTH,
    ColumnSampler,
    KeptColumns,
    dense_rows,
    relative_noise,
    row_blocks,
)
from .head_call import ColumnSampling
from .head_gradients import HeadGradients, put_rows
from .lm_head import LMHead, Rows, addmm, mm
from .row_plan import RowPlan

# Bounds of the estimated growth of the variance, and of 1 over it.
_MOST_GROWTH = 16.0
# Squares to begin with, whose quotient is 1.
_NOTHING = 1e-30
# Rows that the mean row of W, and the mean hidden state, are taken from.
_ROWS_OF_MEAN = 4096
_CPU_SQUARES_BYTES = 2 << 20


class KeptColumnGradients(HeadGradients):
    """Gradients to which blocks of rows can be added by the columns they keep.

    The row sums of D are known, and used, unless there is a softcap, whose slope differs from
    column to column.
    """

    def __init__(
        self, head: LMHead, backend: Backend, wanted: Sequence[bool], max_rows: int
    ) -> None:
        super().__init__(head, backend, wanted, max_rows, every_row=False)
        has_row_sums = head.call.transform.softcap is None
        self.mean_row = _mean_row(head.weight) if has_row_sums else None
        # Of the gradient that kept columns added, of hidden and of weight (next to a frozen one, of
        # lora_b): its square, and what of that is no noise.
        self.squares = head.weight.new_full((2, 2), _NOTHING, dtype=torch.float32)

    def add_kept(
        self,
        rows: Rows,
        logits: Tensor,
        grads: RowGrads,
        kept: KeptColumns,
        *,
        centred: Tensor,
    ) -> None:
        """Adds the columns that one block keeps, from their raw logits `[R, K]`, overwritten.

        `centred`, `[R, H]`: the hidden states less a constant along which the caller adds the
        column sums of D (and the bias's gradient).
        """
        head, ids = self.head, kept.ids.long()
        d_logits = logits
        if head.dtype != logits.dtype:
            d_logits = torch.empty_like(logits, dtype=head.dtype)
        self.backend.logit_grads_(
            logits,
            torch.searchsorted(ids, rows.targets),
            rows.transform.of_columns(ids),
            grads,
            out=d_logits,
            column_weights=kept.weights,
        )
        self.so_far()
        d_rows = self._along_mean_row(rows, d_logits, grads)
        for part in head.gathers(len(ids)):
            if self.d_hidden is not None:
                addmm(d_rows, d_logits[:, part], head.weight[ids[part]].to(head.dtype))
            if self.d_weight is not None:
                share = d_rows.new_empty((part.stop - part.start, head.H))
                mm(d_logits[:, part].t(), centred, out=share)
                self.d_weight.index_add_(0, ids[part], share)
                self._add_noise(share, kept.of(part))
        if self.d_hidden is not None:
            self.squares[0].add_(d_rows.view(-1).dot(d_rows.view(-1)))
            put_rows(self.d_hidden, rows.index, d_rows)
        if head.operands.lora_b is not None:
            self._add_kept_low_rank(rows, d_logits, kept, head.operands.lora_b)

    def _add_kept_low_rank(
        self, rows: Rows, d_logits: Tensor, kept: KeptColumns, lora_b: Tensor
    ) -> None:
        ids = kept.ids.long()
        if self.d_lora_a_out is not None:
            share = self.head.times_lora_b(d_logits, lora_b[ids])
            put_rows(self.d_lora_a_out, rows.index, share)
        if self.d_lora_b is not None and rows.lora_a_out is not None:
            share = self.d_lora_b.new_empty((len(ids), lora_b.shape[1]))
            mm(d_logits.t(), rows.lora_a_out.to(d_logits.dtype), out=share)
            self.d_lora_b.index_add_(0, ids, share)
            if self.d_weight is None:
                self._add_noise(share, kept)

    def _add_noise(self, share: Tensor, kept: KeptColumns) -> None:
        """Adds the squares of what kept columns gave weight (or lora_b)."""
        self.squares[1].add_(kept.noise(torch.linalg.vector_norm(share, dim=1).square_()))

    def _along_mean_row(self, rows: Rows, d_logits: Tensor, grads: RowGrads) -> Tensor:
        """The row sums that the kept columns miss, times W's mean row, float32 `[R, H]`."""
        if self.mean_row is None or self.d_hidden is None:
            return d_logits.new_zeros((len(d_logits), self.head.H), dtype=torch.float32)
        missed = d_logits.sum(1, dtype=torch.float32).neg_()
        if grads.d_logps is not grads.d_softmax:
            slope = rows.transform.logit_scale / rows.transform.temperature
            missed += (grads.d_logps - grads.d_softmax) * slope
        return torch.outer(missed, self.mean_row)


class SampledGradients(KeptColumnGradients):
    """Gradients of chunks whose columns are scored, drawn and added while their logits are there.

    As the whole of D is at hand, its column sums are known, too.

    Args:
        plan: of the rows that will be added.
    """

    def __init__(
        self,
        head: LMHead,
        backend: Backend,
        wanted: Sequence[bool],
        sampling: ColumnSampling,
        plan: RowPlan,
    ) -> None:
        super().__init__(head, backend, wanted, plan.largest_chunk)
        self.sampler = ColumnSampler(sampling, head.V, head.weight.device, head.call.backend)
        # Any constant near the hidden states does.
        self.mean_hidden = _mean_hidden(head.operands.hidden, plan)
        self.row_squares: Tensor | None = None
        self.column_sums: Tensor | None = None

    @property
    def sweeps_once(self) -> bool:
        """True for chunks that are known to keep all columns."""
        return self.sampler.to_skip > 0

    def sweep(self, rows: Rows) -> tuple[TokenStats, TokenStats]:
        """As in the base class; counts the chunk as dense."""
        self.sampler.should_skip_scoring(row_blocks(len(rows.hidden), rows.hidden.device))
        return super().sweep(rows)

    def add(self, rows: Rows, logits: Tensor, grads: RowGrads) -> None:
        """Adds the share of a chunk, from its raw logits `[C, V]`, which may be overwritten."""
        blocks = row_blocks(len(logits), logits.device)
        sampler = self.sampler
        if sampler.should_skip_scoring(blocks) or sampler.looks_flat(blocks, grads):
            super().add(rows, logits, grads)
            return
        squares, sums = self.backend.column_scores(
            logits, rows.targets, rows.transform, grads, blocks
        )
        samples, variance = sampler.sample(squares, rows.targets, blocks, self.shrinkage())
        if self.d_hidden is not None:
            if self.row_squares is None:
                self.row_squares = _row_squares(self.head, self.mean_row)
            self.squares[0, 1].sub_(variance.sum(0).dot(self.row_squares))
        # Once per chunk, where every gather would have to take out its part of the column sums.
        centred = torch.empty_like(rows.hidden)
        torch.sub(rows.hidden, self.mean_hidden, out=centred)
        for block, kept, block_sums in zip(blocks, samples, sums, strict=True):
            if kept is not None:
                if self.column_sums is None:
                    self.column_sums = torch.zeros_like(block_sums)
                self.column_sums += block_sums
                kept_logits = logits[block].index_select(1, kept.ids)
                self.add_kept(
                    rows.at(block), kept_logits, grads.at(block), kept, centred=centred[block]
                )
        for block in dense_rows(blocks, samples):
            super().add(rows.at(block), logits[block], grads.at(block))

    def shrinkage(self) -> Tensor:
        """The relative variance of the logits' gradient over that of the head's; the smaller one.

        Measured over the blocks so far, which leaves later draws unbiased.
        """
        of_all, exact = self.squares.unbind(1)
        # Variance over exact square of the noisier one, whose square may seem to be all noise: < 0.
        noise = (of_all / exact - 1).amax()
        planned, square, _ = self.sampler.planned
        # 0 / 0 before anything was planned.
        shrinkage = (planned / square / noise).nan_to_num_(1 / TYPICAL_VARIANCE_GROWTH)
        return shrinkage.clamp_(1 / _MOST_GROWTH, _MOST_GROWTH)

    def finish(self) -> tuple[Tensor | None, ...]:
        """The gradients, with the column sums in them."""
        if self.column_sums is not None:
            if self.d_bias is not None:
                self.d_bias[: self.head.V] += self.column_sums
            if self.d_weight is not None:
                self.d_weight[: self.head.V].addr_(self.column_sums, self.mean_hidden)
        return super().finish()

    def metrics(self) -> dict[str, Tensor]:
        """The sampler's metrics, with the larger relative noise of the finished gradients."""
        noise = [self.squares.new_zeros(())]
        second = self.d_lora_b if self.d_weight is None else self.d_weight
        variances = self.squares[:, 0] - self.squares[:, 1]
        for gradient, variance in zip((self.d_hidden, second), variances, strict=True):
            if gradient is not None and self.column_sums is not None:
                square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
                # A noisy gradient is longer than the exact one, by the variance.
                noise.append(relative_noise(variance, square - variance))
        return self.sampler.metrics(torch.stack(noise).amax())


def _mean_row(weight: Tensor) -> Tensor:
    """The mean row of W, float32 `[H]`, from enough of them, evenly spread."""
    rows = weight[:: max(1, len(weight) // _ROWS_OF_MEAN)]
    return rows.to(torch.float32).mean(0)


def _mean_hidden(hidden: Tensor, plan: RowPlan) -> Tensor:
    """The mean of some rows that have a gradient, float32 `[H]`."""
    some = slice(0, min(plan.num_grad_rows, _ROWS_OF_MEAN))
    rows = hidden[some if plan.order is None else plan.order[some]]
    return rows.sum(0, dtype=torch.float32) / max(1, len(rows))


def _row_squares(head: LMHead, centre: Tensor | None) -> Tensor:
    """The squared distance of each row of W from `centre [H]`, or from 0, float32 `[V]`."""
    squares = head.weight.new_empty((head.V, 1), dtype=torch.float32)
    at_once = head.V
    if head.weight.device.type == "cpu":
        at_once = max(1, _CPU_SQUARES_BYTES // (4 * head.H))
    for rows, weight in head.weight_slices(at_once):
        part = squares[rows]
        part[:, 0] = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square_()
        if centre is not None:
            # |w - c|^2 = |w|^2 - 2 w.c + |c|^2, without a copy.
            rounded = centre.to(head.dtype)
            dots = torch.empty_like(part)
            mm(weight, rounded[:, None], out=dots)
            part += rounded.float().square().sum() - 2 * dots
    return squares.clamp_(min=0.0).squeeze(1)

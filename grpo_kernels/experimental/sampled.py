"""The sampled backward: gradients of a head from a draw of its vocabulary columns. Unbiased.

**What it costs on GPUs first**: at the default tolerance it is predicted to be slower than the
exact backward on an H200 whatever the shape, and none has run it; on a CPU it takes 0.6 to 0.7 of
the exact one's time on a real head (`docs/sampled_backward.md`).

D, the gradient of a block's logits `[R, V]`, is reduced to K columns, divided by their
probabilities: D~ `[R, K]`. With y~ the rows of a term's y that belong to them, and c a constant,

    dx  = D~ y~ + (rowsum D - rowsum D~) (x) mean row of y          the weight's alone
    dy~ += D~^T (x - c)           and at the end dy += colsum D (x) c

`column_draw.py` says which columns, and why this is unbiased. The c of a bias is 1: its gradient is
exact. Blocks that would keep too many columns take the exact way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..arguments import HeadCall
from ..backends import RowGrads, TokenStats
from ..dense import Dense, Gradients, put_rows
from ..products import addmm, slices_of
from ..row_plan import ROW_MULTIPLE, Chunk, RowPlan, slices
from .column_draw import (
    TYPICAL_VARIANCE_GROWTH,
    ColumnDraw,
    KeptColumns,
    dense_rows,
    relative_noise,
    row_blocks,
)

# Bounds of the estimated growth of the variance, and of 1 over it.
_MOST_GROWTH = 16.0
# Squares to begin with, whose quotient is 1.
_NOTHING = 1e-30
# Rows that the mean row of W, and the mean hidden state, are taken from.
_ROWS_OF_MEAN = 4096
_CPU_SQUARES_BYTES = 2 << 20
# Bytes of W gathered at a time, row by row.
_CPU_GATHER_BYTES = 2 << 20
_GPU_GATHER_BYTES = 128 << 20


class SampledDense(Dense):
    """Chunks whose columns are scored, drawn and added while their logits are there.

    The row sums of D are known, and used, unless there is a softcap, whose slope differs from
    column to column. As the whole of D is at hand, its column sums are known, too.
    """

    def __init__(self, call: HeadCall, plan: RowPlan, *, entropy: bool, keeps: bool) -> None:
        super().__init__(call, plan, entropy=entropy, keeps=keeps)
        sampled, device = call.execution.backward, call.targets.device
        assert sampled is not None
        self._may_keep = keeps
        kind = "torch" if call.backend.policy_loss is None else "triton"
        functions: Any = import_module(f".{kind}_column_scores", __package__)
        self._scores: Callable[..., tuple[Tensor, Tensor]] = functions.column_scores
        self.draw = ColumnDraw(
            sampled.tolerance, sampled.seed, self.V, device, functions.column_level
        )
        has_row_sums = call.transform.softcap is None
        self.mean_row = _mean_row(self.ys[0]) if has_row_sums and plan.num_rows else None
        # Any constants near the states do.
        self.centres = [_mean_of_rows(term.x, plan) for term in call.terms]
        # Of the gradient that kept columns added, of the first x and of a y: its square, and what
        # of that is no noise.
        self.squares = self.ys[0].new_full((2, 2), _NOTHING, dtype=torch.float32)
        self.row_squares: Tensor | None = None
        self.column_sums: Tensor | None = None
        self.finished: Gradients | None = None

    def sweep(self, rows: Chunk) -> TokenStats:
        """As in the base class; chunks that are known to keep all columns are swept once."""
        blocks = row_blocks(rows.size, self.call.targets.device)
        self._skips = rows.needs_grad and self.draw.should_skip_scoring(blocks)
        self.keeps = self._may_keep and self._skips
        return super().sweep(rows)

    def resume(self, rows: Chunk, stats: TokenStats) -> None:
        super().resume(rows, stats)
        blocks = row_blocks(rows.size, self.call.targets.device)
        self._skips = self.draw.should_skip_scoring(blocks)

    def add(
        self,
        rows: Chunk,
        grads: Gradients,
        d_logps: Tensor,
        d_entropy: Tensor | None = None,
        d_logsumexp: Tensor | None = None,
    ) -> None:
        count = len(self.targets)
        blocks = row_blocks(count, self.targets.device)
        if self._skips:
            super().add(rows, grads, d_logps, d_entropy, d_logsumexp)
            return
        of_rows = RowGrads.of(self.stats, d_logps, d_entropy, d_logsumexp)
        if self.draw.looks_flat(blocks, of_rows):
            super().add(rows, grads, d_logps, d_entropy, d_logsumexp)
            return
        logits = self.strip[:count] if self.at_hand else self.logits(slice(0, count))
        squares, sums = self._scores(logits, self.targets, self.transform, of_rows, blocks)
        samples, variance = self.draw.sample(squares, self.targets, blocks, self.shrinkage())
        if grads.wanted[0]:
            if self.row_squares is None:
                self.row_squares = _row_squares(self.ys[0], self.call.dtype, self.mean_row)
            self.squares[0, 1].sub_(variance.sum(0).dot(self.row_squares))
        # Once per chunk, where every gather would have to take out its part of the column sums.
        centred = [
            torch.sub(x, centre, out=torch.empty_like(x))
            for x, centre in zip(self.xs, self.centres, strict=True)
        ]
        for block, kept, block_sums in zip(blocks, samples, sums, strict=True):
            if kept is not None:
                if self.column_sums is None:
                    self.column_sums = torch.zeros_like(block_sums)
                self.column_sums += block_sums
                kept_logits = logits[block].index_select(1, kept.ids)
                self._add_kept(
                    rows.at(block), block, kept_logits, of_rows.at(block), kept,
                    [x[block] for x in centred], grads,
                )  # fmt: skip
        d = self.gradient_rows(count)
        for block in dense_rows(blocks, samples):
            self.logit_grads(block, logits[block], of_rows.at(block), d[block])
            self.multiply(rows.at(block), [x[block] for x in self.xs], d[block], None, grads)

    def _add_kept(
        self, rows: Chunk, block: slice, logits: Tensor, of_rows: RowGrads, kept: KeptColumns,
        centred: list[Tensor], grads: Gradients,
    ) -> None:  # fmt: skip
        """Adds the columns that a block keeps, from their raw logits `[R, K]`, overwritten."""
        ids, transform = kept.ids.long(), self.transform.at(block)
        d = logits
        if self.call.dtype != logits.dtype:
            d = torch.empty_like(logits, dtype=self.call.dtype)
        targets = torch.searchsorted(ids, self.targets[block])
        self.backend.logit_grads_(
            logits, targets, transform, of_rows, out=d, column_weights=kept.weights
        )
        wants_weight = grads.wanted[1]
        for k, (x, y) in enumerate(zip(centred, self.ys, strict=True)):
            of_x, of_y = grads.wanted[2 * k : 2 * k + 2]
            if not (of_x or of_y):
                continue
            d_rows = self._along_mean_row(d, of_rows, transform, y) if k == 0 and of_x else None
            if d_rows is None:
                d_rows = d.new_zeros((len(d), y.shape[1]), dtype=torch.float32)
            for part in _gathers(y, len(ids)):
                if of_x:
                    addmm(d_rows, d[:, part], y[ids[part]].to(d.dtype))
                if of_y:
                    share = d_rows.new_empty((part.stop - part.start, y.shape[1]))
                    addmm(share, d[:, part].t(), x.to(d.dtype), beta=0.0)
                    _zeroed(grads, 2 * k + 1).index_add_(0, ids[part], share)
                    if k == 0 or (not wants_weight and x.shape[1] > 1):
                        squares = torch.linalg.vector_norm(share, dim=1).square_()
                        self.squares[1].add_(kept.of(part).noise(squares))
            if of_x:
                if k == 0:
                    self.squares[0].add_(d_rows.view(-1).dot(d_rows.view(-1)))
                put_rows(grads.of_rows(2 * k), rows.index, d_rows)

    def _along_mean_row(
        self, d: Tensor, of_rows: RowGrads, transform: Any, y: Tensor
    ) -> Tensor | None:
        """The row sums that the kept columns miss, times W's mean row, float32 `[R, H]`."""
        if self.mean_row is None:
            return None
        missed = d.sum(1, dtype=torch.float32).neg_()
        if of_rows.d_logps is not of_rows.d_softmax:
            slope = transform.logit_scale / transform.temperature
            missed += (of_rows.d_logps - of_rows.d_softmax) * slope
        return torch.outer(missed, self.mean_row)

    def shrinkage(self) -> Tensor:
        """The relative variance of the logits' gradient over that of the head's; the smaller one.

        Measured over the blocks so far, which leaves later draws unbiased.
        """
        of_all, exact = self.squares.unbind(1)
        # Variance over exact square of the noisier one, whose square may seem to be all noise: < 0.
        noise = (of_all / exact - 1).amax()
        planned, square, _ = self.draw.planned
        # 0 / 0 before anything was planned.
        shrinkage = (planned / square / noise).nan_to_num_(1 / TYPICAL_VARIANCE_GROWTH)
        return shrinkage.clamp_(1 / _MOST_GROWTH, _MOST_GROWTH)

    def finish(self, grads: Gradients) -> None:
        """Adds the column sums."""
        self.finished = grads
        if self.column_sums is None:
            return
        for k, centre in enumerate(self.centres):
            if grads.wanted[2 * k + 1]:
                _zeroed(grads, 2 * k + 1).addr_(self.column_sums, centre)

    def metrics(self) -> dict[str, Tensor]:
        """Counts of what was kept, and the larger relative noise of the finished gradients."""
        grads, noise = self.finished, [self.squares.new_zeros(())]
        if grads is not None and self.column_sums is not None:
            of_y = grads.found[1] if grads.wanted[1] else grads.found[min(3, len(grads.found) - 1)]
            variances = self.squares[:, 0] - self.squares[:, 1]
            for gradient, variance in zip((grads.found[0], of_y), variances, strict=True):
                if gradient is not None:
                    square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
                    # A noisy gradient is longer than the exact one, by the variance.
                    noise.append(relative_noise(variance, square - variance))
        return self.draw.metrics(torch.stack(noise).amax())


def _zeroed(grads: Gradients, place: int) -> Tensor:
    """The gradient of a y, 0 where nothing was added to it yet."""
    total, beta = grads.of_columns(place)
    return total if beta else total.zero_()


def _gathers(y: Tensor, count: int) -> Iterator[slice]:
    """Cuts `count` rows of y into as many as are gathered at a time."""
    gather_bytes = _CPU_GATHER_BYTES if y.device.type == "cpu" else _GPU_GATHER_BYTES
    step = gather_bytes // (4 * y.shape[1]) // ROW_MULTIPLE * ROW_MULTIPLE
    return slices(0, count, max(ROW_MULTIPLE, step))


def _mean_row(weight: Tensor) -> Tensor:
    """The mean row of W, float32 `[H]`, from enough of them, evenly spread."""
    rows = weight[:: max(1, len(weight) // _ROWS_OF_MEAN)]
    return rows.to(torch.float32).mean(0)


def _mean_of_rows(x: Tensor, plan: RowPlan) -> Tensor:
    """The mean of some rows that have a gradient, float32 `[K]`."""
    some = slice(0, min(plan.num_grad_rows, _ROWS_OF_MEAN))
    rows = x[some if plan.order is None else plan.order[some]]
    return rows.sum(0, dtype=torch.float32) / max(1, len(rows))


def _row_squares(weight: Tensor, dtype: torch.dtype, centre: Tensor | None) -> Tensor:
    """The squared distance of each row of W from `centre [H]`, or from 0, float32 `[V]`."""
    V, H = weight.shape
    squares = weight.new_empty((V, 1), dtype=torch.float32)
    at_once = max(1, _CPU_SQUARES_BYTES // (4 * H)) if weight.device.type == "cpu" else V
    for rows, part_of_weight in slices_of(weight, dtype, at_once):
        part = squares[rows]
        part[:, 0] = torch.linalg.vector_norm(part_of_weight, dim=1, dtype=torch.float32).square_()
        if centre is not None:
            # |w - c|^2 = |w|^2 - 2 w.c + |c|^2, without a copy.
            rounded = centre.to(dtype)
            dots = torch.empty_like(part)
            addmm(dots, part_of_weight, rounded[:, None], beta=0.0)
            part += rounded.float().square().sum() - 2 * dots
    return squares.clamp_(min=0.0).squeeze(1)

"""From logits to the head's gradients: all columns, or those that blocks of rows keep.

Of D, the gradient of a block's logits `[R, V]`, there are K columns, divided by their
probabilities: D~ `[R, K]`. With W~ the rows of W that belong to them,

    dH  = D~ W~ + (rowsum D - rowsum D~) (x) mean row of W
    dW~ += D~^T h - colsum D~ (x) mean h        and at the end dW += colsum D (x) mean h

`column_sampling.py` says which columns, and why this is unbiased.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .column_sampling import (
    TYPICAL_INFLATION,
    ColumnSampler,
    KeptColumns,
    dense_rows,
    relative_noise,
    row_blocks,
)
from .row_chunks import Chunk, HeadChunks, HeadRows, addmm, mm
from .tiles import LogitGradInputs, LogitTransform, Tiles

# No estimate of how the noise grows goes further than this, or 1 over it.
_MOST_INFLATION = 16.0


class HeadGradients:
    """Adds the gradients of rows to those of a head.

    Args:
        head: with room for the gradients wanted.
        row_sums: whether the row sums of D are known: without a softcap, whose slope differs from
            column to column.
        mean_hidden: `[H]`, float32, any constant near the hidden states; None where the column
            sums of D are not known.
    """

    def __init__(
        self,
        head: HeadChunks,
        tiles: Tiles,
        *,
        row_sums: bool = True,
        mean_hidden: Tensor | None = None,
    ) -> None:
        self.head, self.tiles, self.mean_hidden = head, tiles, mean_hidden
        if not head.sampled:
            return
        self.mean_row = head.mean_row() if row_sums else None
        self.row_squares = None
        if mean_hidden is not None and head.d_hidden is not None:
            self.row_squares = head.row_squares(self.mean_row)
        self.column_sums = head.hidden.new_zeros(head.V, dtype=torch.float32)
        # Of hidden, and of weight (next to a frozen one, of outer): the variance of what was added,
        # and its square.
        self.variances, self.squares = head.hidden.new_zeros((2, 2), dtype=torch.float64)

    def add(
        self,
        chunk: Chunk,
        head_rows: HeadRows,
        logits: Tensor,
        targets: Tensor,
        transform: LogitTransform,
        grads: LogitGradInputs,
        sampler: ColumnSampler | None = None,
    ) -> None:
        """The share of a chunk, from its logits `[C, V]`, which are overwritten."""
        blocks = row_blocks(chunk.size, logits.device)
        if sampler is None or sampler.skips(blocks):
            d_logits = self.head.d_logits_like(logits)
            self.tiles.logit_grads_(logits, targets, transform, grads, out=d_logits)
            self.head.add_gradients(chunk, head_rows, d_logits)
            return
        squares, sums = self.tiles.column_scores(logits, targets, transform, grads, blocks)
        samples, missed = sampler.sample(squares, targets, blocks, self.inflation(sampler))
        if self.row_squares is not None:
            self.variances[0] += missed.sum(0) @ self.row_squares
        for rows, kept, block_sums in zip(blocks, samples, sums, strict=True):
            if kept is not None:
                tile = logits[rows].index_select(1, kept.ids)
                self.column_sums += block_sums
                self.add_kept(
                    chunk.part(rows), head_rows.at(rows), tile, targets[rows], transform.at(rows),
                    grads.at(rows), kept, sums_known=True,
                )  # fmt: skip
        for rows in dense_rows(blocks, samples):
            self.add(
                chunk.part(rows), head_rows.at(rows), logits[rows], targets[rows],
                transform.at(rows), grads.at(rows),
            )  # fmt: skip

    def add_kept(
        self,
        chunk: Chunk,
        head_rows: HeadRows,
        logits: Tensor,
        targets: Tensor,
        transform: LogitTransform,
        grads: LogitGradInputs,
        kept: KeptColumns,
        *,
        sums_known: bool = False,
    ) -> None:
        """The columns that one block keeps, from their logits `[R, K]`, which are overwritten.

        `sums_known`: `column_sums` has the block's share.
        """
        head, ids = self.head, kept.ids.long()
        d_logits = logits.view(head.dtype)[:, : len(ids)]
        self.tiles.logit_grads_(
            logits, torch.searchsorted(ids, targets), transform.of_columns(ids), grads,
            out=d_logits, column_weights=kept.weights,
        )  # fmt: skip
        kept_sums = d_logits.sum(0, dtype=torch.float32)
        if head.d_bias is not None and not sums_known:
            head.d_bias.index_add_(0, ids, kept_sums)
        d_rows = self._along_mean_row(d_logits, transform, grads)
        for part in head.gathers(len(ids)):
            if head.d_hidden is not None:
                addmm(d_rows, d_logits[:, part], head.weight[ids[part]].to(head.dtype))
            if head.d_weight is not None:
                share = d_rows.new_empty((part.stop - part.start, head.H))
                mm(d_logits[:, part].t(), head_rows.hidden, out=share)
                if sums_known and self.mean_hidden is not None:
                    share.addr_(kept_sums[part], self.mean_hidden, alpha=-1)
                head.d_weight.index_add_(0, ids[part], share)
                self._count(share, kept.weights[part])
        if head.d_hidden is not None:
            self.squares[0] += torch.linalg.vector_norm(d_rows).square()
            head.d_hidden[chunk.rows] = d_rows.to(head.d_hidden.dtype)
        share_of_outer = head.add_low_rank(chunk, head_rows, d_logits, ids)
        if share_of_outer is not None and head.d_weight is None:
            self._count(share_of_outer, kept.weights)

    def _count(self, share: Tensor, weights: Tensor) -> None:
        """What was added to the weight's gradient, or to outer's in its place, by kept columns."""
        squares = torch.linalg.vector_norm(share, dim=1).square_()
        self.variances[1] += (1 - 1 / weights.clamp(min=1)) @ squares
        self.squares[1] += squares.sum()

    def _along_mean_row(
        self, d_logits: Tensor, transform: LogitTransform, grads: LogitGradInputs
    ) -> Tensor:
        """What the kept columns miss of the row sums, times W's mean row, `[R, H]`, float32."""
        if self.mean_row is None:
            return d_logits.new_zeros((len(d_logits), self.head.H), dtype=torch.float32)
        sums = (grads.d_logps - grads.d_prob) * (transform.logit_scale / transform.temperature)
        return torch.outer(sums - d_logits.sum(1, dtype=torch.float32), self.mean_row)

    def inflation(self, sampler: ColumnSampler) -> Tensor:
        """By how much the relative variance has grown from the logits' gradient to the larger one.

        Going by the blocks so far: what a draw does to later ones leaves them unbiased.
        """
        exact = (self.squares - self.variances).clamp(min=1e-30)
        grown = (self.variances / exact).amax() / (sampler.planned[0] / sampler.planned[1])
        grown = grown.clamp(1 / _MOST_INFLATION, _MOST_INFLATION)
        return torch.where(sampler.planned[0] > 0, grown, TYPICAL_INFLATION).float()

    def finish(self) -> Tensor:
        """Completes the gradients; returns their noise, the larger one, relative to each."""
        head = self.head
        if head.d_bias is not None:
            head.d_bias += self.column_sums
        if head.d_weight is not None and self.mean_hidden is not None:
            head.d_weight.addr_(self.column_sums, self.mean_hidden)
        noise = [self.variances.new_zeros(())]
        second = head.d_outer if head.d_weight is None else head.d_weight
        for gradient, variance in zip((head.d_hidden, second), self.variances, strict=True):
            if gradient is not None:
                square = torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
                # What was drawn is longer than what it stands for.
                noise.append(relative_noise(variance, square - variance))
        return torch.stack(noise).amax()

"""Tokens that are scored over the whole vocabulary: logits, statistics, gradients.

A head is a sum of terms x y^T; an adapter and a bias are terms as its weight is. With D the
gradient of some rows' raw logits `[C, V]`, each term has

    dx = D y,    dy += D^T x                    accumulated in float32

Where D is a factor per row times what the sweep has left behind, D = r o X, it is never made:
dx = r o (X y), dy += X^T (r o x).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..kernels import LogitTransform, RowGrads, TokenStats
from .call import HeadCall
from .plan import Chunk, RowPlan, even_slices, slices
from .products import (
    Products,
    addmm,
    as_operand,
    column_slices,
    columns_at_once,
    new_rows,
    pad_rows,
    slices_of,
)

# Bytes of logits rounded at a time.
_ROUNDED_BYTES = 32 << 20


class Gradients:
    """The gradients of a call's terms: x and y of each in turns, made when first added to.

    Args:
        tensors: x and y of each term.
        wanted: of which tensors gradients are wanted.
        every_row: True if all rows of every x will be set; others are left 0.
    """

    def __init__(
        self, tensors: Sequence[Tensor], wanted: Sequence[bool], *, every_row: bool
    ) -> None:
        self.tensors, self.wanted, self.every_row = tensors, list(wanted), every_row
        self.found: list[Tensor | None] = [None] * len(self.tensors)

    def of_rows(self, place: int) -> Tensor:
        """The gradient of an x, in its dtype."""
        found = self.found[place]
        if found is None:
            x = self.tensors[place]
            make = x.new_empty if self.every_row else x.new_zeros
            found = self.found[place] = make(x.shape)
        return found

    def of_columns(self, place: int) -> tuple[Tensor, float]:
        """The gradient of a y, a float32 sum, and what to multiply it with: 0.0 at first."""
        found = self.found[place]
        if found is not None:
            return found, 1.0
        y = self.tensors[place]
        self.found[place] = y.new_empty(y.shape, dtype=torch.float32)
        return self.found[place], 0.0  # type: ignore[return-value]

    def all(self) -> list[Tensor | None]:
        """All of them, 0 where nothing was added and None where not wanted."""
        return [
            x if x is not None or not wanted else torch.zeros_like(like)
            for x, wanted, like in zip(self.found, self.wanted, self.tensors, strict=True)
        ]


class OneRank:
    """The only rank: it has every column of the vocabulary, and nobody to tell.

    Ranks that share the vocabulary override what is done here (`ranks.py`).
    """

    def place(self, targets: Tensor) -> Tensor:
        """Places of targets among the columns here; -1 of those that are elsewhere."""
        return targets

    def see(self, logits: Tensor, targets: Tensor, transform: LogitTransform) -> None:
        """Looks at raw logits `[c, V]` before a sweep takes their memory."""

    def merge(self, stats: TokenStats, targets: Tensor, exps: Tensor | None) -> TokenStats:
        """The statistics of whole rows, from those of the columns here; `exps [C, V]` follow."""
        return stats

    def sum(self, picked: Tensor, ids: Tensor) -> Tensor:
        """Values of targets, from those of the targets that are here."""
        return picked

    def put(
        self, grad: Tensor, index: slice | Tensor, share: Tensor, factors: Tensor | None
    ) -> None:
        """Stores the gradient of rows, times `factors`, from the share of the columns here."""
        put_rows(grad, index, share, factors)

    def wait(self) -> None:
        """Waits for what `put` has begun."""


class Dense:
    """Sweeps chunks of rows, and adds their gradients; one chunk is in flight at a time.

    `sweep` leaves in the buffers what `add` needs; `resume` takes the statistics of an earlier
    sweep in its place.

    Args:
        call: the terms and their rows.
        plan: the rows that take part, chunk by chunk.
        entropy: whether the entropy is wanted.
        keeps: whether a sweep leaves its exponentials, of which D is a factor per row; else D is
            made by a second sweep, over logits that are there or made again.
        ranks: who has the other columns.
    """

    def __init__(
        self, call: HeadCall, plan: RowPlan, ranks: OneRank, *, entropy: bool, keeps: bool
    ) -> None:
        self.call, self.plan, self.entropy, self.keeps = call, plan, entropy, keeps
        self.ranks = ranks
        self.backend = call.backend
        self.products = Products.of(call.execution, call.dtype)
        self.V = len(call.terms[0].y)
        # A GEMM that rounds its result is enough where nothing is added to that.
        in_gemm = call.rounding == call.dtype and len(call.terms) == 1
        self.strip = self.new_rows(plan.logit_rows, call.dtype if in_gemm else torch.float32)
        self.exps: Tensor | None = None
        self.swept = self.at_hand = False

    @cached_property
    def ys(self) -> list[Tensor]:
        """The y of each term, that of the weight as products take it."""
        weight, *others = (term.y for term in self.call.terms)
        return [as_operand(weight, self.call.dtype), *others]

    def chunks(self) -> Iterator[Chunk]:
        """The rows of the plan."""
        return self.plan.chunks()

    def operands(self, rows: Chunk) -> tuple[list[Tensor], Tensor, LogitTransform]:
        """The x of each term, the targets and the transform of some rows."""
        index = rows.index
        xs = [term.x[index] for term in self.call.terms]
        targets = self.ranks.place(self.call.targets[index])
        return xs, targets, self.call.transform.at(index)

    def sweep(self, rows: Chunk) -> TokenStats:
        """The statistics of `rows`."""
        self._take(rows)
        count = len(self.targets)
        self.swept = self.keeps and rows.needs_grad
        exps = self.gradient_rows(count) if self.swept else None
        like = self.strip[:count] if exps is None else exps
        stats = TokenStats.empty(like, entropy=self.entropy, total=self.swept)
        for part in self.strips():
            logits = self.logits(part)
            if self.swept:
                self.ranks.see(logits, self.targets[part], self.transform.at(part))
            self.backend.token_stats(
                logits,
                self.targets[part],
                self.transform.at(part),
                entropy=self.entropy,
                exps=None if exps is None else exps[part],
                out=stats.at(part),
                invariant=self.products.multiple > 1,
            )
        self.at_hand = not self.swept
        self.stats = self.whole(self.ranks.merge(stats, self.targets, exps))
        return self.stats

    def resume(self, rows: Chunk, stats: TokenStats) -> None:
        """Takes the statistics of `rows`, whose logits `add` will make again."""
        self._take(rows)
        self.swept = self.at_hand = False
        self.stats = stats

    def add(
        self,
        rows: Chunk,
        grads: Gradients,
        d_logps: Tensor,
        d_entropy: Tensor | None = None,
        d_logsumexp: Tensor | None = None,
    ) -> None:
        """Adds the share of the rows in flight, from a loss's gradients by their statistics."""
        if self.swept:
            exps = self.gradient_rows(len(self.targets))
            factors = row_factors(self.stats, d_logps, self.transform)
            self.multiply(rows, exps, factors, grads)
        else:
            d = self.d_logits(d_logps, d_entropy, d_logsumexp)
            self.multiply(rows, d, None, grads)

    def _take(self, rows: Chunk) -> None:
        xs, self.targets, self.transform = self.operands(rows)
        # In float32 beside the weight: it costs little, and an adapter's steps are smaller than
        # bf16's.
        self.xs = [xs[0].to(self.call.dtype), *(x.float() for x in xs[1:])]

    def strips(self) -> Iterator[slice]:
        """Cuts the rows in flight into as many as have their logits in the buffer at a time."""
        return even_slices(0, len(self.targets), max(1, len(self.strip)))

    def new_rows(self, count: int, dtype: torch.dtype) -> Tensor:
        """A buffer for `count` rows as wide as the vocabulary."""
        like = self.call.terms[0].x
        return new_rows(like, self.products.padded(count), self.V, dtype)

    def gradient_rows(self, count: int) -> Tensor:
        """Where the gradient of `count` rows goes: over their logits, if it is as wide."""
        if self.call.dtype == torch.float32:
            return self.strip[:count]
        if self.exps is None:
            self.exps = self.new_rows(self.plan.largest_chunk, self.call.dtype)
        return self.exps[:count]

    def logits(self, part: slice) -> Tensor:
        """Raw logits of a part of the rows in flight, in the strip: valid until the next ones."""
        count = part.stop - part.start
        out = self.strip[: self.products.padded(count)]
        for k, (x, y) in enumerate(zip(self.xs, self.ys, strict=True)):
            x = pad_rows(x[part], len(out))
            for columns, y_part in slices_of(y, x.dtype, columns_at_once(y)):
                self.products.rows(x, y_part.t(), out[:, columns], beta=float(k > 0), own=k == 0)
        return self._rounded(out[:count])

    def _rounded(self, logits: Tensor) -> Tensor:
        dtype = self.call.rounding
        if dtype is None or logits.dtype == dtype:
            return logits
        for rows in slices(0, len(logits), max(1, _ROUNDED_BYTES // (4 * self.V))):
            round_(logits[rows], dtype)
        return logits

    def d_logits(
        self, d_logps: Tensor, d_entropy: Tensor | None, d_logsumexp: Tensor | None
    ) -> Tensor:
        """D of the rows in flight, `[C, V]`, which may lie on their logits."""
        out = self.gradient_rows(len(self.targets))
        grads = RowGrads.of(self.stats, d_logps, d_entropy, d_logsumexp)
        for part in self.strips():
            logits = self.strip[part] if self.at_hand else self.logits(part)
            self.logit_grads(part, logits, grads.at(part), out[part])
        return out

    def logit_grads(self, part: slice, logits: Tensor, grads: RowGrads, out: Tensor) -> None:
        """The gradient of a part's raw logits."""
        self.backend.logit_grads_(
            logits, self.targets[part], self.transform.at(part), grads, out=out
        )

    def multiply(self, rows: Chunk, d: Tensor, factors: Tensor | None, grads: Gradients) -> None:
        """Adds the products of `d [C, V]`, times `factors [C]`, with the ys and the xs."""
        padded = self._with_zeros(d)
        for k, (x, y) in enumerate(zip(self.xs, self.ys, strict=True)):
            if grads.wanted[2 * k]:
                share = self.times(padded, y, own=k == 0)[: len(d)]
                self.ranks.put(grads.of_rows(2 * k), rows.index, share, factors)
            if grads.wanted[2 * k + 1]:
                self._add_columns(grads, 2 * k + 1, d, x, factors)
        self.ranks.wait()

    def _add_columns(
        self, grads: Gradients, place: int, d: Tensor, x: Tensor, factors: Tensor | None
    ) -> None:
        """Adds `d^T x` to the gradient of a y, `factors` times."""
        total, beta = grads.of_columns(place)
        if x.shape[1] == 1 and d.dtype != torch.float32:
            # Two columns, the second with what the first has rounded away.
            exact = x if factors is None else x * factors[:, None]
            high = exact.to(d.dtype)
            sums = total.new_empty((len(total), 2))
            addmm(sums, d.t(), torch.cat((high, (exact - high).to(d.dtype)), 1), beta=0.0)
            both = sums.sum(1, keepdim=True)
            total.copy_(both + total if beta else both)
            return
        x = _times(x, factors, d.dtype)
        for columns in column_slices(self.ys[place // 2]):
            addmm(total[columns], d[:, columns].t(), x, beta=beta)

    def times(self, d: Tensor, y: Tensor, *, own: bool) -> Tensor:
        """`d @ y`, float32 `[C, K]`."""
        out = d.new_empty((len(d), y.shape[1]), dtype=torch.float32)
        for index, (columns, part) in enumerate(slices_of(y, d.dtype, len(y))):
            self.products.rows(d[:, columns], part, out, beta=float(index > 0), own=own)
        return out

    def _with_zeros(self, d: Tensor) -> Tensor:
        """The first rows of a buffer, and after them rows of zeros up to the products' multiple."""
        count, padded = len(d), self.products.padded(len(d))
        if padded == count:
            return d
        buffer = self.gradient_rows(padded)
        buffer[count:] = 0.0
        return buffer

    def whole(self, stats: TokenStats) -> TokenStats:
        """The statistics of rows, with what else is read from them."""
        return stats


def row_factors(stats: TokenStats, d_logps: Tensor, transform: LogitTransform) -> Tensor:
    """The factor per row that makes D of its exponentials X, float32 `[C]`."""
    assert stats.total is not None
    return d_logps * (-transform.logit_scale / transform.temperature) / stats.total


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


def round_(x: Tensor, dtype: torch.dtype) -> None:
    """Rounds float32 values to those of another dtype, in place."""
    x.copy_(x.to(dtype))


def _times(x: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x [C, K]` times a factor per row, rounded to `dtype` once."""
    if factors is None:
        return x.to(dtype)
    return torch.mul(x, factors[:, None], out=torch.empty_like(x, dtype=dtype))

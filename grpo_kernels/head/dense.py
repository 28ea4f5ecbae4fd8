"""Tokens that are scored over the whole vocabulary: logits, statistics, gradients.

A head is a sum of terms x y^T; an adapter and a bias are terms as its weight is. With D the
gradient of some rows' raw logits `[C, V]`, each term has

    dx = D y,    dy += D^T x                    accumulated in float32

Where D is a factor per row times what the sweep has left behind, D = r o X, it is never made:
dx = r o (X y), dy += X^T (r o x).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base.checks import ValueChecks
from ..kernels import Entries, LogitTransform, RowGrads, TokenStats
from .call import HeadCall
from .lm_head import Support
from .plan import Buffers, Chunk, RowPlan, even_slices, every_row, plan_rows, slices
from .products import (
    Gradients,
    Products,
    addmm,
    as_operand,
    column_slices,
    columns_at_once,
    new_rows,
    pad_rows,
    put_rows,
    slices_of,
)

if TYPE_CHECKING:
    from ..kernels.pair_stats import PairStats

# Bytes of logits rounded at a time.
_ROUNDED_BYTES = 32 << 20


class OneRank:
    """The only rank: it has every column of the vocabulary, and nobody to tell.

    Ranks that share the vocabulary override all that is done here (`ranks.py`).

    Args:
        columns: of the whole vocabulary.
    """

    alone = True

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def plan(
        self, call: HeadCall, weight: Tensor, active: Tensor | None, with_grad: Tensor | None,
        buffers: Buffers,
    ) -> RowPlan:  # fmt: skip
        """Plans the rows that are `active`, those `with_grad` first; reads the call's checks."""
        N, chunk_bytes = call.layout.num_tokens, call.execution.chunk_bytes
        if call.execution.capturable:
            return every_row(call.checks, weight, N, buffers, chunk_bytes)
        return plan_rows(active, with_grad, call.checks, weight, N, buffers, chunk_bytes)

    def place(self, targets: Tensor) -> Tensor:
        """Places of targets among the columns here; -1 of those that are elsewhere."""
        return targets

    def see(self, logits: Tensor, targets: Tensor, transform: LogitTransform) -> None:
        """Looks at raw logits `[c, V]` before a sweep takes their memory."""

    def merge(self, stats: TokenStats, targets: Tensor, exps: Tensor | None) -> TokenStats:
        """The statistics of whole rows, from those of the columns here; `exps [C, V]` follow."""
        return stats

    def largest(self, values: Tensor, *beside: Tensor) -> tuple[Tensor, ...]:
        """The largest of the ranks' values `[C]`, and what its rank has beside it."""
        return values, *beside

    def sum(self, share: Tensor) -> Tensor:
        """The sum of what every rank has a share of."""
        return share

    def put(
        self, grad: Tensor, index: slice | Tensor, share: Tensor, factors: Tensor | None
    ) -> None:
        """Stores the gradient of rows, times `factors`, from the share of the columns here."""
        put_rows(grad, index, share, factors)

    def wait(self) -> None:
        """Waits for what `put` has begun."""

    # Of a support.

    def same(self, support: Support, checks: ValueChecks) -> None:
        """Asks whether all ranks have the same sets."""

    def here(self, entries: Entries) -> tuple[Entries, slice | Tensor]:
        """The entries whose rows of the head are here, and which of all they are."""
        return entries, slice(None)

    def whole(self, z: Tensor, which: slice | Tensor, count: int) -> Tensor:
        """The values of all `count` entries, from those of the entries here."""
        return z

    def sum_rows(self, share: Tensor) -> Tensor:
        """The gradient of rows, from the share of the entries here."""
        return share


class OneTarget:
    """What the kernels read from a row of logits: log-prob of its target, logsumexp, entropy.

    A readout is told which rows are in flight, reads each part of their logits while it is there,
    and makes the gradient of the logits from a loss's gradients by what it has read. Another one
    overrides what it reads besides (`many_targets.py`).

    Args:
        call: whose targets they are.
        ranks: who has the other columns.
        entropy: whether the entropy is read.
    """

    def __init__(self, call: HeadCall, ranks: OneRank, *, entropy: bool) -> None:
        self.call, self.ranks, self.entropy = call, ranks, entropy

    def take(self, rows: Chunk) -> None:
        """Turns to `rows`."""
        self.transform = self.call.transform.at(rows.index)
        self.targets = self.ranks.place(self.call.targets[rows.index])
        self.exps: Tensor | None = None

    def begin(self, like: Tensor, exps: Tensor | None) -> None:
        """Begins to read logits of as many rows as `like` has; `exps` gets their exponentials."""
        self.exps = exps
        self.stats = TokenStats.empty(like, entropy=self.entropy, total=exps is not None)

    def read(self, part: slice, logits: Tensor) -> None:
        """Reads raw logits `[c, V]` of a part of the rows."""
        targets, transform = self.targets[part], self.transform.at(part)
        if self.exps is not None:
            self.ranks.see(logits, targets, transform)
        self.call.backend.token_stats(
            logits,
            targets,
            transform,
            entropy=self.entropy,
            exps=None if self.exps is None else self.exps[part],
            out=self.stats.at(part),
            invariant=self.call.execution.batch_invariant,
        )

    def read_product(self, x: Tensor, y: Tensor) -> None:
        """Reads the raw logits `x @ y.T` of all rows in flight, which are not made."""
        assert self.call.backend.exp_gemm is not None
        self.call.backend.exp_gemm(x, y, self.targets, self.transform, self.stats, exps=self.exps)

    def end(self) -> TokenStats:
        """The statistics of all rows in flight."""
        self.stats = self.ranks.merge(self.stats, self.targets, self.exps)
        return self.stats

    def given(
        self, d_logps: Tensor | None, d_entropy: Tensor | None = None,
        d_logsumexp: Tensor | None = None, d_divergence: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Takes a loss's gradients by the statistics.

        Returns what `read` has left, `[C, V]`, and the factor per row that makes D of it; None
        where `d_logits` makes it.
        """
        assert d_logps is not None
        if self.exps is not None:
            return self.exps, row_factors(self.stats, d_logps, self.transform)
        self.grads = RowGrads.of(self.stats, d_logps, d_entropy, d_logsumexp)
        return None

    def d_logits(self, part: slice, logits: Tensor, out: Tensor) -> None:
        """The gradient of a part's raw logits, `[c, V]`, which may lie on them."""
        self.call.backend.logit_grads_(
            logits, self.targets[part], self.transform.at(part), self.grads.at(part), out=out
        )


class Logits:
    """Raw logits of the rows in flight, in one buffer that a strip of them is made in at a time.

    Args:
        call: the terms and their rows.
        plan: the rows that take part, chunk by chunk.
    """

    def __init__(self, call: HeadCall, plan: RowPlan) -> None:
        self.call, self.V = call, len(call.terms[0].y)
        self.products = Products.of(call.execution, call.dtype)
        # A GEMM that rounds its result is enough where nothing is added to that.
        in_gemm = call.rounding == call.dtype and len(call.terms) == 1
        self.rows, self.dtype = plan.logit_rows, call.dtype if in_gemm else torch.float32

    @cached_property
    def strip(self) -> Tensor:
        """The buffer, made when the first logits are."""
        return self.new_rows(self.rows, self.dtype)

    @cached_property
    def ys(self) -> list[Tensor]:
        """The y of each term, that of the weight as products take it."""
        weight, *others = (term.y for term in self.call.terms)
        return [as_operand(weight, self.call.dtype), *others]

    def take(self, rows: Chunk) -> None:
        """Turns to `rows`."""
        self.count = rows.size
        xs = [term.x[rows.index] for term in self.call.terms]
        # In float32 beside the weight: it costs little, and an adapter's steps are smaller than
        # bf16's.
        self.xs = [xs[0].to(self.call.dtype), *(x.float() for x in xs[1:])]

    def strips(self) -> Iterator[slice]:
        """Cuts the rows in flight into as many as have their logits in the buffer at a time."""
        return even_slices(0, self.count, max(1, self.products.padded(self.rows)))

    def new_rows(self, count: int, dtype: torch.dtype) -> Tensor:
        """A buffer for `count` rows as wide as the vocabulary."""
        like = self.call.terms[0].x
        return new_rows(like, self.products.padded(count), self.V, dtype)

    def of(self, part: slice) -> Tensor:
        """Those of a part of the rows in flight, in the strip: valid until the next ones."""
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


class Dense:
    """Sweeps chunks of rows, and adds their gradients; one chunk is in flight at a time.

    `sweep` leaves what `add` needs: the exponentials of the rows, of which D is a factor per row,
    or their logits. `resume` takes the statistics of an earlier sweep, and leaves nothing: `add`
    makes the logits again.

    Args:
        call: the terms and their rows.
        plan: the rows that take part, chunk by chunk.
        readout: what is read from a row of logits.
        exponentials: whether a sweep of rows with a gradient leaves these.
        in_gemm: whether it is the logits' GEMM that does, in place of the logits.
    """

    def __init__(
        self, call: HeadCall, plan: RowPlan, readout: OneTarget, *, exponentials: bool,
        in_gemm: bool = False,
    ) -> None:  # fmt: skip
        self.call, self.plan = call, plan
        self.exponentials, self.in_gemm = exponentials, in_gemm
        self.readout, self.ranks = readout, readout.ranks
        self.logits = Logits(call, plan)
        self.products = self.logits.products
        self.beside: Tensor | None = None  # the gradients' buffer, where it is one of its own
        self.made = False  # whether the logits of the rows in flight, or what is left, are there

    def sweep(self, rows: Chunk) -> TokenStats:
        """The statistics of `rows`."""
        self._take(rows)
        leaves = self.exponentials and rows.needs_grad
        exps = self.gradient_rows(rows.size) if leaves else None
        self.readout.begin(self.logits.xs[0], exps)
        if self.in_gemm:
            self.readout.read_product(self.logits.xs[0], self.logits.ys[0])
        else:
            for part in self.logits.strips():
                self.readout.read(part, self.logits.of(part))
        self.made = True
        return self.readout.end()

    def resume(self, rows: Chunk, stats: TokenStats | PairStats) -> None:
        """Takes the statistics of `rows`, whose logits `add` will make again."""
        self._take(rows)
        self.readout.stats = stats  # type: ignore[assignment]
        self.made = False

    def add(
        self,
        rows: Chunk,
        grads: Gradients,
        d_logps: Tensor | None,
        *others: Tensor | None,
    ) -> None:
        """Adds the share of the rows in flight, from a loss's gradients by their statistics.

        The others are those that `OneTarget.given` takes.
        """
        left = self.readout.given(d_logps, *others)
        d, factors = (self.gradient_rows(rows.size), None) if left is None else left
        if left is None:
            for part in self.logits.strips():
                logits = self.logits.strip[part] if self.made else self.logits.of(part)
                self.readout.d_logits(part, logits, d[part])
        self.multiply(rows, d, factors, grads)

    def leave(self, d_logps: Tensor) -> tuple[Tensor, Tensor]:
        """The exponentials of the rows in flight, and the factor per row that makes D of them."""
        left = self.readout.given(d_logps)
        assert left is not None
        return left

    def add_left(self, rows: Chunk, grads: Gradients, exps: Tensor, factors: Tensor) -> None:
        """Adds the share of `rows` from what `leave` has returned."""
        self.logits.take(rows)
        self.multiply(rows, exps, factors, grads)

    def _take(self, rows: Chunk) -> None:
        self.logits.take(rows)
        self.readout.take(rows)

    def gradient_rows(self, count: int) -> Tensor:
        """Where the gradient of `count` rows goes: over their logits, if it is as wide."""
        if self.call.dtype == torch.float32:
            return self.logits.strip[:count]
        if self.beside is None:
            self.beside = self.logits.new_rows(self.plan.gradient_rows, self.call.dtype)
        return self.beside[:count]

    def multiply(self, rows: Chunk, d: Tensor, factors: Tensor | None, grads: Gradients) -> None:
        """Adds the products of `d [C, V]`, times `factors [C]`, with the ys and the xs."""
        padded = self._with_zeros(d)
        for k, (x, y) in enumerate(zip(self.logits.xs, self.logits.ys, strict=True)):
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
            sums = total.new_empty((len(total), 2), dtype=torch.float32)
            addmm(sums, d.t(), torch.cat((high, (exact - high).to(d.dtype)), 1), beta=0.0)
            both = sums.sum(1, keepdim=True)
            total.copy_(both + total if beta else both)
            return
        x = _times(x, factors, d.dtype)
        for columns in column_slices(self.logits.ys[place // 2]):
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


def row_factors(stats: TokenStats, d_logps: Tensor, transform: LogitTransform) -> Tensor:
    """The factor per row that makes D of its exponentials X, float32 `[C]`."""
    assert stats.total is not None
    return d_logps * (-transform.logit_scale / transform.temperature) / stats.total


def round_(x: Tensor, dtype: torch.dtype) -> None:
    """Rounds float32 values to those of another dtype, in place."""
    x.copy_(x.to(dtype))


def _times(x: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x [C, K]` times a factor per row, rounded to `dtype` once."""
    if factors is None:
        return x.to(dtype)
    return torch.mul(x, factors[:, None], out=torch.empty_like(x, dtype=dtype))

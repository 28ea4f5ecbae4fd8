"""The draw of vocabulary columns for the sampled backward: which ones, how likely, how noisy.

The gradient of the logits of some rows, D `[R, V]`, is dense but for a few columns negligible. For
each block of rows a column v is kept with probability pi_v, independently, and what is kept is
divided by pi_v (Horvitz and Thompson, 1952):

    dH = sum_{v kept} D_v / pi_v (x) W_v         E[dH] = sum_v D_v (x) W_v, whatever pi > 0 is
    dW_v = D_v^T h / pi_v if kept, else 0        E[dW_v] = D_v^T h

The variance of dH is sum_v (1 / pi_v - 1) |D_v|^2 |W_v|^2. Among all pi that keep as many columns
it is smallest for pi_v = min(1, c |D_v|) up to the norms of W's rows, which are much alike; c is
the least that keeps sum_v (1 / pi_v - 1) |D_v|^2 below tolerance^2 |D|^2, less what the step from
D to dH and dW has been seen to add. The columns of the block's targets are always kept, so that
the one-hot part is exact.

Two parts of D are known exactly and take their variance with them (control variates): its row
sums, so that dH is right along the mean row of W, and, where the whole of D is at hand, its column
sums, so that dW is right along the mean hidden state. The column sums are also the bias's gradient.

`docs/sampled_backward.md` has the derivation and the measurements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backends import RowGrads
from .inputs import ColumnSampling
from .objective import wide_dtype

# Rows that share a sample of columns: more of them share the traffic of its rows of W and dW, and
# need more columns.
_CPU_BLOCK_ROWS = 128
_GPU_BLOCK_ROWS = 256
_COLUMN_MULTIPLE = 16
# A block that would keep more than this share of the columns keeps all: gathers cost, too.
_DENSE_SHARE = 1 / 3
# Probabilities are multiples of 2^-24, drawn as integers: a column is kept exactly as often as its
# probability says. None is less likely than this.
_PROBABILITY_STEPS = 1 << 24
_LEAST_PROBABILITY = 2.0**-20
# The level of the probabilities is found from so many columns, evenly spread, in so many parts.
_SOLVER_COLUMNS, _SOLVER_PARTS = 1 << 15, 256
# More likely words than this share of the vocabulary are not worth scoring: e to the entropy of a
# row, on average; a block of many rows will keep several times as many.
_FLAT_SHARE = 1 / 8
# After chunks in which every block was dense, at most this many go dense without scoring.
_MOST_SKIPPED = 8
# Growth of the relative variance from the gradient of the logits to that of W, before it has been
# measured: the rows of W are much alike, and so are the states that a word is likely in.
TYPICAL_VARIANCE_GROWTH = 1.5
# The same where columns are drawn before the gradients of the log-probs are known.
BLIND_VARIANCE_GROWTH = 3.0


def new_generator(seed: int | torch.Generator | None, device: torch.device) -> torch.Generator:
    """A generator on `device`, different on every rank; None takes torch's own state as seed."""
    if not isinstance(seed, int):
        where = seed.device if seed is not None else "cpu"
        seed = int(torch.randint(1 << 62, (), generator=seed, device=where))
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        # Ranks that drew alike would make the same error, which averaging then leaves as it is.
        seed += 0x9E3779B97F4A7C15 * distributed.get_rank()
    return torch.Generator(device).manual_seed(seed % (1 << 63))


class KeptColumns(NamedTuple):
    """The columns that a block of rows keeps, ascending, and 1 over their probabilities.

    `[K]` each; the last column, repeated with a weight of 0, fills K up to what GEMMs like.
    """

    ids: Tensor  # int32 or int64
    weights: Tensor  # float32
    moments: Tensor | None = None  # float32 [2, K]: the share of variance in a square, and 1

    def narrowed(self) -> KeptColumns:
        """A copy with int32 ids, to save between forward and backward."""
        return KeptColumns(self.ids.int(), self.weights)

    def of(self, part: slice) -> KeptColumns:
        """Some of the columns."""
        moments = None if self.moments is None else self.moments[:, part]
        return KeptColumns(self.ids[part], self.weights[part], moments)

    def noise(self, squares: Tensor) -> Tensor:
        """The variance, and the sum, of the squares `[K]` of what the columns give, `[2]`."""
        moments = self.moments
        if moments is None:
            spread = 1 - 1 / self.weights.clamp(min=1)
            moments = torch.stack((spread, torch.ones_like(spread)))
        return moments @ squares


def row_blocks(count: int, device: torch.device) -> list[slice]:
    """Cuts `count` rows into blocks of about equal size; those of a block share their columns."""
    most = _CPU_BLOCK_ROWS if device.type == "cpu" else _GPU_BLOCK_ROWS
    # One somewhat larger block is better than two small ones.
    step = -(-count // max(1, round(count / most)))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def keep_probabilities(
    squares: Tensor, targets: Tensor, blocks: list[slice], variance: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The probability of each column in each block, `[B, V]`, and the dense blocks, bool `[B]`.

    Args:
        squares: `[B, V]`, the squared norms of the columns of each block's gradient.
        targets: `[C]`, kept for certain in their block.
        blocks: of the rows `[C]`, equally large but for the last.
        variance: the one allowed, relative to the square of the whole gradient.

    A block whose squares are not finite is dense, and does not affect the others.
    """
    finite = squares.isfinite().all(1)
    squares = squares.masked_fill(~finite[:, None], 0.0)
    certain = torch.zeros_like(squares, dtype=torch.bool)
    block_rows = blocks[0].stop - blocks[0].start
    block_of_row = torch.arange(len(targets), device=targets.device) // block_rows
    # Not certain[block_of_row, targets] = True, which copies a scalar to a GPU and waits.
    certain.view(-1).index_fill_(0, block_of_row * squares.shape[1] + targets, True)
    norms = squares.masked_fill(certain, 0.0).sqrt_()
    allowed = (variance * squares.sum()).clamp(min=torch.finfo(squares.dtype).tiny)
    level = _level(norms.flatten(), allowed)
    steps = (norms / level).clamp_(_LEAST_PROBABILITY, 1.0).mul_(_PROBABILITY_STEPS).ceil_()
    probabilities = steps.div_(_PROBABILITY_STEPS).masked_fill_(certain, 1.0)
    # By the expected count: a choice that looked at the draw would not be unbiased.
    dense = (probabilities.sum(1) > _DENSE_SHARE * squares.shape[1]) | ~finite
    return probabilities.masked_fill_(dense[:, None], 1.0), dense


def _level(norms: Tensor, allowed: Tensor) -> Tensor:
    """The level u, 0-d, at which the sum over norm < u of norm * (u - norm) is `allowed`.

    That is linear in u between one norm and the next: in order of size, sums over all smaller norms
    say between which two u lies, first among parts, then within one. Any level leaves the draw
    unbiased, so that a part of the columns tells enough.
    """
    wide = wide_dtype(norms.device)
    stride = max(1, len(norms) // _SOLVER_COLUMNS)
    some = norms[::stride].sort().values
    count = min(_SOLVER_PARTS, len(some))
    parts = torch.nn.functional.pad(some, (-len(some) % count, 0)).view(count, -1)

    def find(norms: Tensor, sums: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        through = before + sums @ sums.new_ones(len(norms), len(norms)).triu_()
        before = through - sums
        missed = norms * before[0] - before[1]
        last = (missed <= allowed).sum().clamp(min=1).sub(1)[None]
        return last, before.index_select(1, last), through.index_select(1, last)

    sums = torch.stack((parts.sum(1, dtype=wide), parts.square().sum(1, dtype=wide))) * stride
    last, before, _ = find(parts[:, 0], sums, sums.new_zeros(2, 1))
    part = parts.index_select(0, last).squeeze(0).to(wide)
    _, _, (total, square) = find(part, torch.stack((part, part.square())) * stride, before)
    level = (allowed + square) / total.clamp(min=torch.finfo(norms.dtype).tiny)
    return level.to(norms.dtype).squeeze(0)


def dense_rows(blocks: list[slice], samples: list[KeptColumns | None]) -> list[slice]:
    """The rows of the blocks that keep all columns, neighbours joined."""
    joined: list[slice] = []
    for rows, kept in zip(blocks, samples, strict=True):
        if kept is None and joined and joined[-1].stop == rows.start:
            joined[-1] = slice(joined[-1].start, rows.stop)
        elif kept is None:
            joined.append(rows)
    return joined


class ColumnSampler:
    """Draws the columns of block after block, and counts what it kept."""

    def __init__(self, sampling: ColumnSampling, V: int, device: torch.device) -> None:
        self.V, self.tolerance = V, sampling.tolerance
        self.generator = new_generator(sampling.seed, device)
        self.rows = self.blocks = self.dense_blocks = 0
        self.kept = 0.0
        self.to_skip = self.last_skip = 0
        # The variance of the logits' gradient; its square over blocks that are not dense; over all.
        self.planned = torch.zeros(3, dtype=wide_dtype(device), device=device)

    def should_skip_scoring(self, blocks: list[slice]) -> bool:
        """True if these blocks are to go dense without scoring; counts them, then.

        Exponential back-off, up to eight chunks, after chunks in which every block was dense: a
        flat softmax costs little more than the exact backward. It stays unbiased, as the draw of
        these blocks does not decide.
        """
        if self.to_skip == 0:
            return False
        self.to_skip -= 1
        self._count_dense(blocks)
        return True

    def looks_flat(self, blocks: list[slice], grads: RowGrads) -> bool:
        """True if so many words are likely that scoring is not worth it; counts the blocks, then.

        A look at the values, which a CPU has at hand.
        """
        if grads.entropy is None or grads.entropy.device.type != "cpu":
            return False
        squares = grads.d_softmax.square()
        likely_words = (squares * grads.entropy.exp()).sum() / squares.sum()
        if not likely_words > _FLAT_SHARE * self.V:
            return False
        self._count_dense(blocks)
        self._back_off(True)
        return True

    def _count_dense(self, blocks: list[slice]) -> None:
        for rows in blocks:
            self._count(rows.stop - rows.start, True, self.V)

    def _back_off(self, all_dense: bool) -> None:
        self.last_skip = min(max(1, 2 * self.last_skip), _MOST_SKIPPED) if all_dense else 0
        self.to_skip = self.last_skip

    def sample(
        self,
        squares: Tensor,
        targets: Tensor,
        blocks: list[slice],
        variance_growth: float | Tensor,
    ) -> tuple[list[KeptColumns | None], Tensor]:
        """The columns each block keeps, None for all; and the variance of each column, `[B, V]`.

        `variance_growth`: the relative variance of the head's gradients over that of the logits'.
        Waits for the device, to read how many columns were kept.
        """
        allowed = self.tolerance**2 / variance_growth
        probabilities, dense = keep_probabilities(squares, targets, blocks, allowed)
        squares = torch.where(squares.isfinite(), squares, 0.0)
        variance = squares / probabilities - squares
        sampled = squares.masked_fill(dense[:, None], 0.0)
        self.planned += torch.stack((variance.sum(), sampled.sum(), squares.sum()))
        dice = torch.randint(
            _PROBABILITY_STEPS,
            squares.shape,
            generator=self.generator,
            device=squares.device,
            dtype=torch.int32,
        )
        kept = (dice < probabilities * _PROBABILITY_STEPS) & ~dense[:, None]
        counts = torch.stack((kept.sum(1), dense.long())).tolist()
        # Without waiting for the device once more, where it can.
        can = kept.device.type in ("cpu", "cuda")
        pairs = torch.nonzero_static(kept, size=sum(counts[0])) if can else kept.nonzero()
        self._back_off(all(counts[1]))
        ids, values = pairs[:, 1], probabilities[pairs[:, 0], pairs[:, 1]]
        values = torch.stack((1 / values, 1 - values, torch.ones_like(values)))
        samples: list[KeptColumns | None] = []
        start = 0
        for rows, count, is_dense in zip(blocks, *counts, strict=True):
            part = slice(start, start + count)
            start += count
            padding = -count % _COLUMN_MULTIPLE
            if is_dense:
                samples.append(None)
            else:
                own = torch.cat((ids[part], ids[part][-1:].expand(padding)))
                padded = torch.nn.functional.pad(values[:, part], (0, padding))
                samples.append(KeptColumns(own, padded[0], padded[1:]))
            self._count(rows.stop - rows.start, is_dense, count)
        return samples, variance

    def _count(self, rows: int, is_dense: bool, columns: int) -> None:
        self.rows += rows
        self.blocks += 1
        self.dense_blocks += is_dense
        self.kept += rows * (1.0 if is_dense else columns / self.V)

    def metrics(self, noise: Tensor | None = None) -> dict[str, Tensor]:
        """The shares of columns kept and of dense blocks, and the gradient's relative noise.

        `noise` None: as planned, before the gradients are known.
        """
        if noise is None:
            noise = relative_noise(BLIND_VARIANCE_GROWTH * self.planned[0], self.planned[2])
        kept, dense = self.kept / max(self.rows, 1), self.dense_blocks / max(self.blocks, 1)
        # Filled on the device: a copy would wait for it.
        shares = {"columns_kept": kept, "dense_blocks": dense}
        on_device = {
            name: torch.full((), share, dtype=torch.float32, device=noise.device)
            for name, share in shares.items()
        }
        return {**on_device, "gradient_noise": noise.float()}


def relative_noise(variance: Tensor, square: Tensor) -> Tensor:
    """The standard error over the norm; 0 for a gradient of 0."""
    return (variance / square.clamp(min=1e-30)).sqrt()

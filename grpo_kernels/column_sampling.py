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

from .inputs import ColumnSampling

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
_SOLVER_STEPS = 8
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

    def narrowed(self) -> KeptColumns:
        """A copy with int32 ids, to save between forward and backward."""
        return KeptColumns(self.ids.int(), self.weights)


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
    # An assignment to certain[block_of_row, targets] would copy the True from the CPU, and wait.
    certain.view(-1).index_fill_(0, block_of_row * squares.shape[1] + targets, True)
    rest = squares.masked_fill(certain, 0.0)
    norms = rest.sqrt()
    tiny = torch.finfo(squares.dtype).tiny
    allowed = (variance * squares.sum()).clamp(min=tiny)
    # With u = 1 / c, find where the sum over norm < u of norm * (u - norm) is what is allowed:
    # Newton's method on its logarithm, which is nearly straight, from where no column is certain.
    level = high = (allowed + rest.sum()) / norms.sum().clamp(min=tiny)
    for _ in range(_SOLVER_STEPS):
        below = norms.masked_fill(norms >= level, 0.0)
        total = below.sum()
        missed = ((level - below) * below).sum()
        high = torch.where(missed > allowed, level, high)
        step = (allowed / missed).log() * (missed / (level * total))
        # The step went too far if every column has become certain.
        level = torch.where(missed > 0, level * step.exp(), (level * high).sqrt())
    steps = (norms / level).clamp_(_LEAST_PROBABILITY, 1.0).mul_(_PROBABILITY_STEPS).ceil_()
    probabilities = steps.div_(_PROBABILITY_STEPS).masked_fill_(certain, 1.0)
    # By the expected count: a choice that looked at the draw would not be unbiased.
    dense = (probabilities.sum(1) > _DENSE_SHARE * squares.shape[1]) | ~finite
    return probabilities.masked_fill_(dense[:, None], 1.0), dense


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
        self.planned = torch.zeros(3, dtype=torch.float64, device=device)

    def should_skip_scoring(self, blocks: list[slice]) -> bool:
        """True if these blocks are to go dense without scoring; counts them, then.

        Exponential back-off, up to eight chunks, after chunks in which every block was dense: a
        flat softmax costs little more than the exact backward. It stays unbiased, as the draw of
        these blocks does not decide.
        """
        if self.to_skip == 0:
            return False
        self.to_skip -= 1
        size = sum(rows.stop - rows.start for rows in blocks)
        self.rows += size
        self.kept += size
        self.blocks += len(blocks)
        self.dense_blocks += len(blocks)
        return True

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
        self.last_skip = min(max(1, 2 * self.last_skip), _MOST_SKIPPED) if all(counts[1]) else 0
        self.to_skip = self.last_skip
        samples: list[KeptColumns | None] = []
        start = 0
        for index, (rows, count, is_dense) in enumerate(zip(blocks, *counts, strict=True)):
            ids = pairs[start : start + count, 1]
            start += count
            if is_dense:
                samples.append(None)
            else:
                ids = torch.cat((ids, ids[-1:].expand(-count % _COLUMN_MULTIPLE)))
                weights = 1 / probabilities[index, ids]
                weights[count:] = 0.0
                samples.append(KeptColumns(ids, weights))
            size = rows.stop - rows.start
            self.rows += size
            self.blocks += 1
            self.dense_blocks += is_dense
            self.kept += size * (1.0 if is_dense else count / self.V)
        return samples, variance

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

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

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import RowGrads

# `norms [K], allowed, copies`: the level u at which the sum over norm < u of norm * (u - norm),
# `copies` times, is `allowed`.
ColumnLevel = Callable[[Tensor, Tensor, int], Tensor]

_COLUMN_MULTIPLE = 16
# Rows that share a draw of columns: more share its traffic, and need more columns.
_CPU_BLOCK_ROWS, _GPU_BLOCK_ROWS = 128, 256
# A kept column moves so many bytes per element of its row of W: it is gathered, multiplied twice,
# and added to dW. FLOPs of a large GEMM in the time of a byte, and the speed of a block's GEMMs
# relative to a large one's: measured on a CPU, predicted for a GPU (`docs/sampled_backward.md`).
_BYTES_OF_KEPT = 22
_CPU_PER_BYTE, _CPU_SMALL_GEMM = 21.0, 0.48
_GPU_PER_BYTE, _GPU_SMALL_GEMM = 300.0, 0.5
# Probabilities are multiples of 2^-24: a column is kept exactly as often as its probability says.
# None is less likely than this.
_PROBABILITY_STEPS = 1 << 24
_LEAST_PROBABILITY = 2.0**-20
# The level of the probabilities is found from at most so many columns, evenly spread.
_SOLVER_COLUMNS = 1 << 15
# More likely ids than this share of the vocabulary are not worth scoring: e to the entropy of a
# row, on average; a block of many rows will keep several times as many.
_FLAT_SHARE = 1 / 8
# After chunks in which every block was dense, at most this many go dense without scoring.
_MOST_SKIPPED = 8
# Growth of the relative variance from the gradient of the logits to that of W, before it has been
# measured: the rows of W are much alike, and so are the states that an id is likely in.
TYPICAL_VARIANCE_GROWTH = 1.5


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
    moments: Tensor | None = None  # float32 [2, K]: 1, and the probability; 0 for what fills up

    def of(self, part: slice) -> KeptColumns:
        """Some of the columns."""
        moments = None if self.moments is None else self.moments[:, part]
        return KeptColumns(self.ids[part], self.weights[part], moments)

    def noise(self, squares: Tensor) -> Tensor:
        """The sum of the squares `[K]` of what the columns give, and what is no noise of it."""
        moments = self.moments
        if moments is None:
            inverse = 1 / self.weights.clamp(min=1)
            moments = torch.stack((torch.ones_like(inverse), inverse))
        return moments @ squares


def _block_rows(device_type: str) -> int:
    return _CPU_BLOCK_ROWS if device_type == "cpu" else _GPU_BLOCK_ROWS


def dense_share(device_type: str) -> float:
    """The share of the columns from which on a block had better keep all."""
    on_cpu = device_type == "cpu"
    per_byte = _CPU_PER_BYTE if on_cpu else _GPU_PER_BYTE
    small_gemm = _CPU_SMALL_GEMM if on_cpu else _GPU_SMALL_GEMM
    exact = 4 * _block_rows(device_type)
    return exact / (_BYTES_OF_KEPT * per_byte + exact / small_gemm)


def row_blocks(count: int, device: torch.device) -> list[slice]:
    """Cuts `count` rows into blocks of about equal size; those of a block share their columns."""
    most = _block_rows(device.type)
    # One somewhat larger block is better than two small ones.
    step = -(-count // max(1, round(count / most)))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def finite_squares(squares: Tensor) -> tuple[Tensor, Tensor]:
    """The squares `[B, V]`, 0 in blocks where some were not finite; and which these are, `[B]`."""
    broken = ~(squares.amax(1) < torch.inf)
    return squares.masked_fill(broken[:, None], 0.0), broken


def keep_probabilities(
    squares: Tensor,
    targets: Tensor,
    blocks: list[slice],
    variance: float | Tensor,
    column_level: ColumnLevel,
) -> Tensor:
    """The probability of each column in each block, `[B, V]`.

    Args:
        squares: `[B, V]`, the squared norms of the columns of each block's gradient.
        targets: `[C]`, kept for certain in their block.
        blocks: of the rows `[C]`, equally large but for the last.
        variance: the one allowed, relative to the square of the whole gradient.
        column_level: finds the level of the probabilities.
    """
    certain = torch.zeros_like(squares, dtype=torch.bool)
    size = blocks[0].stop - blocks[0].start
    whole = len(targets) // size
    # Not certain[block, targets] = True, which copies a scalar to a GPU and waits.
    certain[:whole].scatter_(1, targets[: whole * size].view(whole, size), True)
    if whole < len(blocks):
        certain[whole:].scatter_(1, targets[whole * size :][None], True)
    norms = squares.masked_fill(certain, 0.0).sqrt_()
    allowed = squares.sum() * variance
    # Any level leaves the draw unbiased, so that some of the columns tell enough.
    stride = max(1, -(-norms.numel() // _SOLVER_COLUMNS))
    level = column_level(norms.view(-1)[::stride], allowed, stride)
    steps = norms.div_(level).clamp_(_LEAST_PROBABILITY, 1.0).mul_(_PROBABILITY_STEPS).ceil_()
    return steps.div_(_PROBABILITY_STEPS).masked_fill_(certain, 1.0)


def dense_rows(blocks: list[slice], samples: list[KeptColumns | None]) -> list[slice]:
    """The rows of the blocks that keep all columns, neighbours joined."""
    joined: list[slice] = []
    for rows, kept in zip(blocks, samples, strict=True):
        if kept is None and joined and joined[-1].stop == rows.start:
            joined[-1] = slice(joined[-1].start, rows.stop)
        elif kept is None:
            joined.append(rows)
    return joined


class ColumnDraw:
    """Draws the columns of block after block, and counts what it kept."""

    def __init__(
        self,
        tolerance: float,
        seed: int | torch.Generator | None,
        V: int,
        device: torch.device,
        column_level: ColumnLevel,
    ) -> None:
        self.V, self.tolerance, self.column_level = V, tolerance, column_level
        self.generator = new_generator(seed, device)
        self.dense_share = dense_share(device.type)
        self.rows = self.blocks = self.dense_blocks = 0
        self.kept = 0.0
        self.to_skip = self.last_skip = 0
        # The variance of the logits' gradient; its square over blocks that are not dense; over all.
        self.planned = torch.zeros(3, dtype=torch.float32, device=device)

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
        """True if so many ids are likely that scoring is not worth it; counts the blocks, then.

        A look at the values, which a CPU has at hand.
        """
        if grads.entropy is None or grads.entropy.device.type != "cpu":
            return False
        squares = grads.d_softmax.square()
        likely = (squares * grads.entropy.exp()).sum() / squares.sum()
        if not likely > _FLAT_SHARE * self.V:
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
        shrinkage: float | Tensor,
    ) -> tuple[list[KeptColumns | None], Tensor]:
        """The columns each block keeps, None for all; and the variance of each column, `[B, V]`.

        `shrinkage`: the relative variance of the logits' gradient over that of the head's.
        Waits for the device, to read how many columns were kept.
        """
        squares, broken = finite_squares(squares)
        probabilities = keep_probabilities(
            squares, targets, blocks, self.tolerance**2 * shrinkage, self.column_level
        )
        # By the expected count: a choice that looked at the draw would not be unbiased.
        dense = (probabilities.sum(1) > self.dense_share * self.V) | broken
        probabilities.masked_fill_(dense[:, None], 1.0)
        variance = squares / probabilities - squares
        sampled = squares.masked_fill(dense[:, None], 0.0)
        self.planned += torch.stack((variance, sampled, squares)).sum((1, 2))
        # In steps of 2^-24 on a CPU, as the probabilities are, and of less on a GPU.
        dice = torch.rand(
            squares.shape,
            generator=self.generator,
            device=squares.device,
            dtype=torch.float32,
        )
        kept = (dice < probabilities).logical_xor_(dense[:, None])  # of dense blocks none
        counts = torch.stack((kept.sum(1), dense)).tolist()
        # Without waiting for the device once more, where it can.
        can = kept.device.type in ("cpu", "cuda")
        pairs = torch.nonzero_static(kept, size=sum(counts[0])) if can else kept.nonzero()
        self._back_off(all(counts[1]))
        ids, values = pairs[:, 1], probabilities[pairs[:, 0], pairs[:, 1]]
        # 1 / p, 1 and p in one launch.
        values = values[None] ** torch.arange(-1, 2, device=values.device)[:, None]
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

    def metrics(self, noise: Tensor) -> dict[str, Tensor]:
        """The shares of columns kept and of dense blocks, and the gradient's relative noise."""
        shares = {
            "columns_kept": self.kept / max(self.rows, 1),
            "dense_blocks": self.dense_blocks / max(self.blocks, 1),
        }
        # Filled on the device: a copy would wait for it.
        on_device = {
            name: torch.full((), share, dtype=torch.float32, device=noise.device)
            for name, share in shares.items()
        }
        return {**on_device, "gradient_noise": noise.float()}


def relative_noise(variance: Tensor, square: Tensor) -> Tensor:
    """The standard error over the norm; 0 for a gradient of 0."""
    return (variance / square.clamp(min=1e-30)).sqrt()

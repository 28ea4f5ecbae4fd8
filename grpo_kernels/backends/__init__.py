"""The operations on a chunk of logits, once as Triton kernels and once as torch ops.

This is the only seam between devices. A backend is a module with the functions of `Backend`; all
have the same signatures and the same results up to rounding. Nothing here knows about the loss:
what a kernel needs of it comes in as plain tensors and numbers.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "torch")
# Steps of Newton's method in `column_level`: 8 reach a percent at tolerances of 1e-3 and above.
LEVEL_STEPS = 20


@dataclass(frozen=True)
class LogitTransform:
    """Maps `raw = hidden @ weight.T` to logits: `softcap(logit_scale * (raw + bias)) / T`.

    `softcap(x)` is `softcap * tanh(x / softcap)`; `bias` is `[V]`; `temperature` is a number, or
    float32 `[C]` with one value per row.
    """

    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0

    @property
    def per_row(self) -> float | Tensor:
        """The temperature, as it goes with logits `[C, V]`."""
        t = self.temperature
        return t[:, None] if isinstance(t, Tensor) else t

    def apply(self, raw: Tensor) -> Tensor:
        """The logits, float32 `[C, V]`; `raw` itself where there is nothing to do."""
        z = raw.float()
        if self.bias is not None:
            z = z + self.bias
        if self.logit_scale != 1.0:
            z = z * self.logit_scale
        if self.softcap is not None:
            z = (z / self.softcap).tanh_().mul_(self.softcap)
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            z = z / self.per_row
        return z

    def at(self, rows: Tensor | slice) -> LogitTransform:
        """The transform of some rows."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[rows]
        return LogitTransform(self.bias, self.logit_scale, self.softcap, temperature)

    def of_columns(self, ids: Tensor | slice) -> LogitTransform:
        """The transform of some columns."""
        bias = None if self.bias is None else self.bias[ids]
        return LogitTransform(bias, self.logit_scale, self.softcap, self.temperature)


class TokenStats(NamedTuple):
    """Statistics of each row of logits, float32 `[C]`.

    `total` is the sum of the row's exponentials X as they were left behind, so that p = X / total.
    """

    logps: Tensor
    logsumexp: Tensor
    entropy: Tensor | None = None
    total: Tensor | None = None

    @staticmethod
    def empty(like: Tensor, *, entropy: bool, total: bool) -> TokenStats:
        """Statistics to be filled, of the rows of `like [C, V]`."""
        logps, logsumexp, *others = like.new_empty((4, len(like)), dtype=torch.float32)
        return TokenStats(
            logps, logsumexp, others[0] if entropy else None, others[1] if total else None
        )

    def at(self, rows: Tensor | slice) -> TokenStats:
        """The values of some rows."""
        return TokenStats(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class RowGrads(NamedTuple):
    """The parts of the gradient of each row of logits, float32 `[C]`; `of` makes them.

        dL/dz_j = d_logps * 1[j = target] - p_j * (d_softmax + d_entropy * (z_j - lse + entropy))

    `d_softmax` is `d_logps`, less the gradient of the row's logsumexp where that has one.
    `at_target` is the whole of the target's.
    """

    logsumexp: Tensor
    d_logps: Tensor
    d_softmax: Tensor
    at_target: Tensor
    entropy: Tensor | None = None
    d_entropy: Tensor | None = None

    @staticmethod
    def of(
        stats: TokenStats,
        d_logps: Tensor,
        d_softmax: Tensor | None = None,
        d_entropy: Tensor | None = None,
        here: Tensor | None = None,
    ) -> RowGrads:
        """The parts, from a loss's gradients; `d_softmax` None: as `d_logps`.

        `here`, bool `[C]`: False where a column stands for a target that other ranks have.
        """
        if here is not None:
            d_softmax = d_logps if d_softmax is None else d_softmax
            d_logps = torch.where(here, d_logps, 0.0)
        # 1 - p cancels for a target that is all but certain, and -expm1(logps) does not.
        at_target = -d_logps * stats.logps.expm1()
        if d_softmax is None:
            d_softmax = d_logps
        else:
            at_target += (d_logps - d_softmax) * stats.logps.exp()
        if d_entropy is not None:
            assert stats.entropy is not None
            surprise = stats.logps.clamp(min=-1e4) + stats.entropy
            at_target -= stats.logps.exp() * d_entropy * surprise
        return RowGrads(stats.logsumexp, d_logps, d_softmax, at_target, stats.entropy, d_entropy)

    def at(self, rows: Tensor | slice) -> RowGrads:
        """The values of some rows."""
        # Once where two are the same tensor: that says that the logsumexp has no gradient.
        parts = {id(x): x[rows] for x in self if x is not None}
        return RowGrads(*(None if x is None else parts[id(x)] for x in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Words:
    """Pairs of a token and a word of its set, token by token."""

    ids: Tensor  # int64 [E]
    tokens: Tensor  # int64 [E]
    offsets: Tensor  # int64 [N + 1]: where each token's words begin and end
    positions: Tensor  # int64 [N]: place of the target among its token's words
    order: Tensor  # int64 [E]: the words by id, then by token

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def tokens_by_id(self) -> Tensor:
        """The tokens of the words, by id."""
        return self.tokens[self.order]

    def begins_of(self, ids: Tensor) -> Tensor:
        """Where the words of each of `ids`, ascending, begin in `order`."""
        return torch.searchsorted(self.ids[self.order], ids)


class PolicyLoss(NamedTuple):
    """The loss over some tokens, float32 0-d, and its gradients, float32 `[C]`."""

    loss: Tensor
    d_logps: Tensor | None
    d_entropy: Tensor | None


class Backend(Protocol):
    """The functions that every backend has."""

    @property
    def policy_loss(self) -> Callable[..., PolicyLoss] | None:
        """Loss and gradient of token-local objectives, as `triton_policy_loss.policy_loss`.

        None where autograd differentiates the objective instead.
        """
        ...

    def token_stats(
        self,
        logits: Tensor,
        targets: Tensor,
        transform: LogitTransform,
        *,
        entropy: bool,
        exps: Tensor | None = None,
        out: TokenStats | None = None,
        invariant: bool = False,
    ) -> TokenStats:
        """Reduces raw logits `[C, V]` to statistics per row, in `out` if given.

        `exps [C, V]`, float32 or bf16, gets the gradient of the raw logits but for one factor per
        row, `row_factors`:

            X = e^(z - a), with (p_y - 1) * total at the target y; times softcap's slope

        The anchor `a` is at most 60 below the row's largest logit. `exps` may be `logits` itself;
        else `logits` stay as they are. `invariant`: the anchor is the largest logit in any case, so
        that statistics are the same bits with `exps` and without.
        """
        ...

    def logit_grads_(
        self,
        logits: Tensor,
        targets: Tensor,
        transform: LogitTransform,
        grads: RowGrads,
        out: Tensor,
        *,
        column_weights: Tensor | None = None,
    ) -> None:
        """Writes the gradient of the raw logits `[C, V]` to `out [C, V]`.

        `out` may be `logits` itself. `column_weights`, float32 `[V]`, multiplies the columns of the
        result.
        """
        ...

    def column_scores(
        self,
        logits: Tensor,
        targets: Tensor,
        transform: LogitTransform,
        grads: RowGrads,
        blocks: list[slice],
    ) -> tuple[Tensor, Tensor]:
        """Sums the gradient of the raw logits per block and column: squares and values, `[B, V]`.

        `blocks` cut the rows into pieces of equal size but for the last. Float32.
        """
        ...

    def column_level(self, norms: Tensor, allowed: Tensor, copies: int) -> Tensor:
        """The level u, 0-d, at which the sum over norm < u of norm * (u - norm) is `allowed`.

        `norms [K]`, at most 32,768, float32 and not negative, count `copies` times; `allowed` is
        0-d. Found from above, and for any input a number above 0.
        """
        ...

    def word_dots(self, x: Tensor, rows: Tensor, words: Words, out: Tensor) -> None:
        """Adds to `out [E]` the product of each word's token's `x [N, K]` and its `rows [V, K]`.

        Float32 in any case.
        """
        ...

    def word_stats(
        self, logits: Tensor, words: Words, transform: LogitTransform, out: TokenStats
    ) -> None:
        """Reduces raw logits `[E]` to statistics of each token, in `out [N]`.

        Tokens without words keep what is there. `transform` has no bias; `out.entropy` may be None.
        """
        ...

    def word_grads(
        self, logits: Tensor, words: Words, transform: LogitTransform, grads: RowGrads
    ) -> Tensor:
        """The gradient of raw logits `[E]`, from those of each token `[N]`; float32."""
        ...

    def segment_sums(
        self,
        factors: Tensor,
        index: Tensor,
        offsets: Tensor,
        rows: Tensor,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        """Sums `factors[e] * rows[index[e]]` over e of each segment, `[S, K]` in `dtype`.

        Segment s is `offsets[s] : offsets[s + 1]`; every e is in one. `out`, in any dtype, is added
        to and returned. Each sum is taken in float32, always in the same order, and rounded once.
        Rows whose factor is 0 are not read.
        """
        ...


def select_backend(name: str, device: torch.device) -> Backend:
    """The backend `name` for tensors on `device`; `"auto"` is Triton on a GPU, torch on a CPU."""
    if name not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}; got {name!r}")
    on_gpu = device.type in ("cuda", "xpu")
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "torch" or (name == "auto" and not (on_gpu and has_triton)):
        return cast(Backend, import_module(".torch_backend", __package__))
    if not has_triton:
        raise ValueError("backend: 'triton' needs the triton package, which is not installed")
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend: 'triton' needs a GPU, or TRITON_INTERPRET=1 to run on a CPU; got tensors "
            f"on {device}"
        )
    return cast(Backend, import_module(".triton_backend", __package__))

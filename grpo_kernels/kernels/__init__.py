"""The operations on a chunk of logits, once as Triton kernels and once as torch ops.

This is the only seam between devices. A backend is a module with the functions of `Backend`, which
`torch_backend` describes; all have the same signatures and the same results up to rounding. The
loss reaches kernels as plain tensors and numbers.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "torch")


@dataclass(frozen=True)
class LogitTransform:
    """Maps raw logits to logits: `softcap(logit_scale * raw) / temperature`.

    `softcap(x)` is `softcap * tanh(x / softcap)`, except that a raw logit of -inf, which bans an
    entry, stays -inf. `temperature` is a number, or float32 `[C]` with one value per row.

    `rounding`: the dtype to which each step is rounded before the temperature, as in a model of
    that dtype: product with the scale, quotient by the cap, tanh, product with the cap. Slopes
    ignore the rounding.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0
    rounding: torch.dtype | None = None

    @property
    def per_row(self) -> float | Tensor:
        """The temperature, broadcastable to logits `[C, V]`."""
        t = self.temperature
        return t[:, None] if isinstance(t, Tensor) else t

    def apply(self, raw: Tensor, out: Tensor | None = None) -> Tensor:
        """The logits, float32 `[C, V]`, in `out` if given; `raw` itself if nothing changes."""
        z = raw.float()
        if self.logit_scale != 1.0:
            z = round_(torch.mul(z, self.logit_scale, out=out), self.rounding)
        if self.softcap is not None:
            z = round_(torch.div(z, self.softcap, out=out), self.rounding)
            z = round_(round_(z.tanh_(), self.rounding).mul_(self.softcap), self.rounding)
            z.masked_fill_(raw == -torch.inf, -torch.inf)
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            z = torch.div(z, self.per_row, out=out)
        return z

    def slope(self, raw: Tensor) -> float | Tensor:
        """The derivative of the logits by the raw logits, `[C, K]`."""
        slope = self.logit_scale / self.per_row
        chain = self.softcap_slope(raw)
        return slope if chain is None else chain * slope

    def softcap_slope(self, raw: Tensor) -> Tensor | None:
        """The slope of the softcap at raw logits `[C, K]`; None without a softcap.

        `1 - tanh(x)^2 = 4 e / (1 + e)^2`, `e = exp(-2 |x|)`: the difference cancels where tanh is
        flat.
        """
        if self.softcap is None:
            return None
        e = (raw.float() * (2 * self.logit_scale / self.softcap)).abs_().neg_().exp_()
        return e.mul(4).div_(e.add_(1).square_())

    def at(self, rows: Tensor | slice) -> LogitTransform:
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[rows]
        return LogitTransform(self.logit_scale, self.softcap, temperature, self.rounding)


def round_(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Rounds float32 values to another dtype's, in place; None: does nothing."""
    return x if dtype is None else x.copy_(x.to(dtype))


class TokenStats(NamedTuple):
    """Statistics of each row of logits, float32 `[C]`.

    `total` is the sum of the exponentials X stored in place of the logits: p = X / total.
    """

    logps: Tensor
    logsumexp: Tensor
    entropy: Tensor | None = None
    total: Tensor | None = None

    @staticmethod
    def size() -> int:
        """The number of statistics that a second pass needs."""
        return 3

    @property
    def divergence(self) -> Tensor | None:
        """None: only two models' logits have one (`PairStats`)."""
        return None

    @staticmethod
    def of(values: Sequence[Tensor], *, entropy: bool) -> TokenStats:
        return TokenStats(values[0], values[1], values[2] if entropy else None)

    @staticmethod
    def empty(like: Tensor, *, entropy: bool, total: bool) -> TokenStats:
        """Uninitialized statistics of the rows of `like [C, V]`."""
        logps, logsumexp, *others = like.new_empty((4, len(like)), dtype=torch.float32)
        return TokenStats(
            logps, logsumexp, others[0] if entropy else None, others[1] if total else None
        )

    def at(self, rows: Tensor | slice) -> TokenStats:
        return TokenStats(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class StatGrads(NamedTuple):
    """A loss's gradients by the statistics of each row, float32 `[C]`; None where there is none.

    `logps` is `[C, K]` with several targets per row.
    """

    logps: Tensor | None = None
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    divergence: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> StatGrads:
        """Applies `change` to the gradients that are not None."""
        return StatGrads(*(None if x is None else change(x) for x in self))


class RowGrads(NamedTuple):
    """The parts of the gradient of each row of logits, float32 `[C]`; `of` makes them.

        dL/dz_j = d_logps * 1[j = target] - p_j * (d_softmax + d_entropy * (z_j - lse + entropy))

    `d_softmax` is `d_logps` minus the gradient of the row's logsumexp, if there is one.
    `d_target` is the target's entry of dL/dz.
    """

    logsumexp: Tensor
    d_softmax: Tensor
    d_target: Tensor
    entropy: Tensor | None = None
    d_entropy: Tensor | None = None

    @staticmethod
    def of(stats: TokenStats, d_stats: StatGrads) -> RowGrads:
        """The parts, from a loss's gradients by a row's statistics."""
        d_logps, d_entropy, d_logsumexp, _ = d_stats
        assert d_logps is not None
        # 1 - p cancels for a nearly certain target; -expm1(logps) does not.
        d_target, d_softmax = -d_logps * stats.logps.expm1(), d_logps
        if d_logsumexp is not None:
            d_softmax = d_logps - d_logsumexp
            d_target += d_logsumexp * stats.logps.exp()
        if d_entropy is not None:
            assert stats.entropy is not None
            surprise = stats.logps.clamp(min=-1e4) + stats.entropy
            d_target -= stats.logps.exp() * d_entropy * surprise
        return RowGrads(stats.logsumexp, d_softmax, d_target, stats.entropy, d_entropy)

    def at(self, rows: Tensor | slice) -> RowGrads:
        return RowGrads(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Entries:
    """Pairs of a token and an id of its kept set, token by token."""

    ids: Tensor  # int64 [E]
    tokens: Tensor  # int64 [E]
    offsets: Tensor  # int64 [N + 1]: where each token's entries begin and end
    target_places: Tensor  # int64 [N]: place of the target among its token's entries
    order: Tensor  # int64 [E]: the entries by id, then by token

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def tokens_by_id(self) -> Tensor:
        """The tokens of the entries, by id."""
        return self.tokens[self.order]

    def begins_of(self, ids: Tensor) -> Tensor:
        """The place in `order` at which the entries of each of the ascending `ids` begin."""
        return torch.searchsorted(self.ids[self.order], ids)


class PolicyLossResult(NamedTuple):
    """The loss over some tokens, float32 0-d, and its gradients, float32 `[C]`."""

    loss: Tensor
    d_logps: Tensor | None
    d_entropy: Tensor | None


if TYPE_CHECKING:
    from . import torch_backend

    class Backend:
        """The functions of every backend, with the types of `torch_backend`."""

        PAIRS_MODULE: str  # the module with its operations on two models' logits
        # None where torch differentiates the objective; else `triton_policy_loss.policy_loss`.
        policy_loss: Callable[..., PolicyLossResult] | None
        token_stats = staticmethod(torch_backend.token_stats)
        logit_grads_ = staticmethod(torch_backend.logit_grads_)
        entry_dots = staticmethod(torch_backend.entry_dots)
        segment_sums = staticmethod(torch_backend.segment_sums)
else:
    Backend = ModuleType


def pairs_of(backend: Backend) -> ModuleType:
    """The backend's operations on two models' logits: a module like `pairs`."""
    return import_module(backend.PAIRS_MODULE, __package__)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def select_backend(name: str, device: torch.device) -> Backend:
    """The backend `name` for tensors on `device`; `"auto"` is Triton on a GPU, torch on a CPU."""
    if name not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}; got {name!r}")
    on_gpu = device.type in ("cuda", "xpu")
    if name == "torch" or (name == "auto" and not (on_gpu and _has_triton())):
        return cast("Backend", import_module(".torch_backend", __package__))
    if not _has_triton():
        raise ValueError("backend: 'triton' needs the triton package, which is not installed")
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend: 'triton' needs a GPU, or TRITON_INTERPRET=1 to run on a CPU; got tensors "
            f"on {device}"
        )
    return cast("Backend", import_module(".triton_backend", __package__))

"""What happens to one tile of logits, once as Triton kernels and once as torch ops.

This is the only seam between devices. Both modules offer the functions of `Tiles`, with the same
signatures and the same results up to rounding.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ..config import GRPOLossConfig
from ..objective import TokenInputs

BACKENDS = ("auto", "triton", "torch")


@dataclass(frozen=True)
class LogitTransform:
    """From `raw = hidden @ weight.T` to logits: `softcap(logit_scale * (raw + bias)) / T`.

    `softcap(x)` is `softcap * tanh(x / softcap)`; `bias` is `[V]`; `temperature` is a number, or
    float32 `[C]` with one value a row.
    """

    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0

    def at(self, rows: Tensor | slice) -> LogitTransform:
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[rows]
        return LogitTransform(self.bias, self.logit_scale, self.softcap, temperature)

    def of_columns(self, ids: Tensor) -> LogitTransform:
        bias = None if self.bias is None else self.bias[ids]
        return LogitTransform(bias, self.logit_scale, self.softcap, self.temperature)


class TokenStats(NamedTuple):
    """Per row of a tile, float32 `[C]`."""

    logps: Tensor
    logsumexp: Tensor
    entropy: Tensor | None


class LogitGradInputs(NamedTuple):
    """What each row's logit gradient is made of, float32 `[C]`.

    dL/dz_j = d_logps * 1[j = target] - p_j * (d_prob + d_entropy * (z_j - logsumexp + entropy))

    `d_prob` is `d_logps`, less the gradient of the row's logsumexp where that has one. At the
    target 1 - p cancels for a token that is all but certain, and -expm1(logps) does not.
    """

    logps: Tensor
    logsumexp: Tensor
    d_logps: Tensor
    d_prob: Tensor
    entropy: Tensor | None = None
    d_entropy: Tensor | None = None

    def at(self, rows: Tensor | slice) -> LogitGradInputs:
        return LogitGradInputs(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class PolicyLoss(NamedTuple):
    """The loss over some tokens, float32 0-d, and its gradients, float32 `[C]`."""

    loss: Tensor
    d_logps: Tensor | None
    d_entropy: Tensor | None


class Tiles(Protocol):
    def token_stats(
        self, logits: Tensor, targets: Tensor, transform: LogitTransform, *, entropy: bool
    ) -> TokenStats:
        """Reduces raw logits `[C, V]` to per-row statistics; leaves them as they are."""
        ...

    def logit_grads_(
        self,
        logits: Tensor,
        targets: Tensor,
        transform: LogitTransform,
        grads: LogitGradInputs,
        out: Tensor,
        *,
        column_weights: Tensor | None = None,
    ) -> None:
        """Writes the gradient of the raw logits `[C, V]` to `out [C, V]`.

        `out` may lie on the memory of `logits`, row on row, in a dtype as wide or narrower.
        `column_weights`: float32 `[V]`, factors of its columns.
        """
        ...

    def column_scores(
        self,
        logits: Tensor,
        targets: Tensor,
        transform: LogitTransform,
        grads: LogitGradInputs,
        blocks: list[slice],
    ) -> tuple[Tensor, Tensor]:
        """Of the gradient of the raw logits, by column: its squares' sum and its sum, `[B, V]`.

        Each over the rows of a block, which are equally many but in the last. Float32.
        """
        ...

    def policy_loss(
        self,
        config: GRPOLossConfig,
        inputs: TokenInputs,
        logps: Tensor,
        entropy: Tensor | None,
        *,
        grad: bool,
    ) -> PolicyLoss:
        """The objective over `logps [C]` with its gradients, if they are asked for.

        Triton has the token-local objectives (`config.two_pass_reason`), torch all.
        """
        ...


def select_tiles(backend: str, device: torch.device) -> Tiles:
    """The tiles for `backend` on `device`; `"auto"` is Triton on a GPU and torch on the CPU."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}; got {backend!r}")
    on_gpu = device.type in ("cuda", "xpu")
    if backend == "torch" or (backend == "auto" and not on_gpu):
        return cast(Tiles, import_module(".torch_tiles", __package__))
    has_triton = importlib.util.find_spec("triton") is not None
    if backend == "auto" and not has_triton:
        return cast(Tiles, import_module(".torch_tiles", __package__))
    if not has_triton:
        raise ValueError("backend: 'triton' needs the triton package, which is not installed")
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend: 'triton' needs a GPU, or TRITON_INTERPRET=1 to run on a CPU; got tensors "
            f"on {device}"
        )
    return cast(Tiles, import_module(".triton_tiles", __package__))

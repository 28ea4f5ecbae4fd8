"""Results of the public calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .autograd import eager_under_compile


class LogprobOutput(NamedTuple):
    """Per-token results in the shape of the targets: float32, differentiable, 0 where masked.

    Attributes:
        logps: log-probs of the targets.
        entropy: in nats; None without `entropy=True`.
        logsumexp: logsumexp of the logits after temperature.
    """

    logps: Tensor
    entropy: Tensor | None
    logsumexp: Tensor


class Metrics(Mapping[str, Tensor]):
    """Metrics by name, computed when first read: a call whose metrics nobody reads has none.

    A pickle, a copy and a join by `|` are a dict.

    Args:
        values: the metrics, or a function that computes them.
    """

    def __init__(self, values: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]) -> None:
        self._values = values

    @eager_under_compile
    def _computed(self) -> Mapping[str, Tensor]:
        values = self._values  # read once, as another thread may compute them meanwhile
        if not isinstance(values, Mapping):
            self._values = values = values()
        return values

    def __getitem__(self, name: str) -> Tensor:
        return self._computed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._computed())

    def __len__(self) -> int:
        return len(self._computed())

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self}

    def __repr__(self) -> str:
        return repr(self._computed())

    def __reduce__(self) -> tuple[Any, ...]:
        # A dict that torch.load takes without weights_only=False.
        return OrderedDict, (dict(self),)


class DistillationOutput(NamedTuple):
    """A loss, its metrics, and the divergence of each token.

    Attributes:
        loss: differentiable scalar, float32.
        metrics: name to 0-d tensor, on the device; computed when first read, from copies. Reading
            a value synchronizes.
        divergence: float32 `[B, T]` or `[N]`, in nats, detached; 0 where masked.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    divergence: Tensor


class GRPOLossOutput(NamedTuple):
    """A loss, its metrics, and the per-token values it was computed from.

    Attributes:
        loss: differentiable scalar, float32.
        metrics: name to 0-d tensor, on the device; computed when first read, from copies. Reading
            a value synchronizes.
        logps: float32 in the shape of the targets, detached, as are the next three.
        entropy: in nats; None if it was neither computed nor passed.
        ref_logps: log-probs under `reference`; None without one.
        kl: the exact KL to the reference, in nats; None if the loss has none.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    logps: Tensor
    entropy: Tensor | None
    ref_logps: Tensor | None = None
    kl: Tensor | None = None

"""Arguments of a call as an operator takes them: tensors, and a text for what is constant.

The text is JSON. It names every argument, and every field of `LMHead` and `Execution`, as their
dataclasses have them; in the place of a tensor it has its number among the leaves. So have numbers,
which go as 0-d tensors: a graph holds for others as well. A `GRPOLossConfig` is constant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.private import autograd_in_operators
from ..head.execution import Execution
from ..head.lm_head import LMHead
from ..loss.config import GRPOLossConfig

# Of this copy: an installed package and one of a hub are two; a vendored one has dots.
NAMESPACE = __package__.rpartition(".")[0].replace(".", "_")
# Rows are counted by reading from the device, which no CUDA graph can hold.
TAGS = [x for x in (getattr(torch.Tag, "cudagraph_unsafe", None),) if x is not None]
# The first arguments of every operator, `Leaves`.
LEAVES = "Tensor[] tensors, int[] wanted, str text, ScalarType? autocast"

_FIELDS = {of: tuple(its.name for its in fields(of)) for of in (LMHead, Execution)}
# Whose gradients belong to single tokens.
_OF_ROWS = ("hidden", "head.low_rank.0", "logps", "entropy")


class Leaves(NamedTuple):
    """What an operator is given.

    Attributes:
        tensors: all of them, numbers too.
        wanted: for each 0, or 1 if its gradient is wanted, 2 if that belongs to single tokens.
        text: the arguments, and which of the tensors stands where.
        autocast: the caller's dtype, which a graph does not keep.
    """

    tensors: list[Tensor]
    wanted: list[int]
    text: str
    autocast: torch.dtype | None

    @property
    def constants(self) -> dict[str, Any]:
        """The arguments, as the text has them."""
        return json.loads(self.text)

    def place(self, name: str) -> Tensor:
        """An argument that is a tensor."""
        return self.tensors[self.constants[name]["tensor"]]

    def arguments(self, leaves: list[Tensor] | None = None) -> dict[str, Any]:
        """The arguments of the call, of the tensors or of `leaves` in their place."""
        return _arguments(self.text, self.tensors if leaves is None else leaves)

    def like_wanted(self) -> list[Tensor]:
        """What gradients are to a compiler: without the strides that their tensors came with."""
        contiguous = torch.contiguous_format
        return [torch.empty_like(x, memory_format=contiguous) for x in self.chosen(self.tensors)]

    def chosen(self, given: Sequence[Any]) -> list[Any]:
        """Of something per tensor that of those whose gradient is wanted."""
        return [x for x, wanted in zip(given, self.wanted, strict=True) if wanted]

    def placed(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of each of the tensors, from those of the wanted ones."""
        given = iter(gradients)
        return [next(given) if wanted else None for wanted in self.wanted]

    @contextmanager
    def as_called(self) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
        """The tensors that want a gradient, and the arguments, as the eager call has them.

        With the caller's autocast, and with autograd, which is off inside of an operator.
        """
        leaves = [
            x.detach().requires_grad_() if wanted else x
            for x, wanted in zip(self.tensors, self.wanted, strict=True)
        ]
        device, dtype = self.tensors[0].device.type, self.autocast
        with torch.autocast(device, dtype, dtype is not None), autograd_in_operators():
            yield self.chosen(leaves), self.arguments(leaves)


def leaves_of(given: dict[str, Any], like: Tensor) -> Leaves:
    """The leaves of a call's arguments, whose device and autocast are those of `like`."""
    device = like.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    tensors: list[Tensor] = []
    wanted: list[int] = []
    parts = [f'"{name}":{_flat(x, name, tensors, wanted)}' for name, x in given.items()]
    return Leaves(tensors, wanted, "{" + ",".join(parts) + "}", autocast)


def _flat(x: Any, path: str, tensors: list[Tensor], wanted: list[int]) -> str:
    """An argument as text; its tensors go where the others are."""
    if isinstance(x, Tensor):
        tensors.append(x)
        wants = torch.is_grad_enabled() and x.requires_grad and not path.startswith("reference")
        wanted.append((2 if path in _OF_ROWS else 1) if wants else 0)
        return '{"tensor":' + str(len(tensors) - 1) + "}"
    if x is None:
        return "null"
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, (int, float)):
        # Not `torch.tensor(x)`: that a compiler makes anew for every number.
        tensors.append(torch.ones((), dtype=torch.float64) * x)
        wanted.append(0)
        name = "whole" if isinstance(x, int) else "number"
        return '{"' + name + '":' + str(len(tensors) - 1) + "}"
    if isinstance(x, str):
        return f'"{x}"'
    if isinstance(x, GRPOLossConfig):
        return '{"GRPOLossConfig":' + x.text + "}"
    if isinstance(x, (tuple, list)):
        parts = [_flat(y, f"{path}.{i}", tensors, wanted) for i, y in enumerate(x)]
        return "[" + ",".join(parts) + "]"
    if type(x) not in _FIELDS:
        raise TypeError(f"{path}: expected what a graph can hold; got {type(x).__name__}")
    parts = [
        f'"{name}":{_flat(getattr(x, name), f"{path}.{name}", tensors, wanted)}'
        for name in _FIELDS[type(x)]
    ]
    return '{"' + type(x).__name__ + '":{' + ",".join(parts) + "}}"


def _arguments(text: str, leaves: list[Tensor]) -> dict[str, Any]:
    made: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda place: leaves[place],
        "number": lambda place: float(leaves[place]),
        "whole": lambda place: int(leaves[place]),
        "LMHead": lambda its: LMHead(**its),
        "Execution": lambda its: Execution(**its),
        "GRPOLossConfig": lambda its: config_of(json.dumps(its)),
    }

    def of(found: dict[str, Any]) -> Any:
        name = next(iter(found))
        return made[name](found[name]) if len(found) == 1 and name in made else found

    return json.loads(text, object_hook=of)


@cache
def config_of(text: str) -> GRPOLossConfig:
    return GRPOLossConfig(**json.loads(text))

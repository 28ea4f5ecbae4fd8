"""What torch has no public name for, and what holds where a version of it has none at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn

# The versions of torch that have all of it.
SEEN = "2.10 to 2.13"


@contextmanager
def autograd_in_operators() -> Iterator[None]:
    """Lets autograd record in the block, which it does not inside of an operator."""
    excluded, exclude = (
        _private(torch._C, f"_dispatch_tls_{name}_dispatch_key_excluded") for name in ("is", "set")
    )
    keys = _private(torch._C, "DispatchKey")
    off = [x for x in (keys.AutogradFunctionality, keys.AutogradOther) if excluded(x)]
    for key in off:
        exclude(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key in off:
            exclude(key, True)


def graph_is_kept() -> bool:
    """True in a backward after which the graph can be used again; where nobody knows, too."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or bool(asked())


def forget_forward(wrapped: Any) -> None:
    """Has DDP expect no backward of a forward that will have none, or one that broke off."""
    _private(wrapped, "reducer._reset_state")()


def is_unit_within(layer: Any) -> bool:
    """Whether FSDP2 shards the layer as a unit within another; none is before the first forward."""
    return _private(_private(layer, "_get_fsdp_state")(), "_is_root") is False


def hooks_of(layer: nn.Module) -> list[Any]:
    """The hooks that run with the layer's forward and with its backward."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [hook for kind in kinds for hook in _private(layer, kind).values()]


def without_memory() -> AbstractContextManager[Any]:
    """A block in which tensors have no memory, and take the way of a CPU's."""
    return _private(torch, "_subclasses.fake_tensor.FakeTensorMode")()


def _private(owner: Any, name: str) -> Any:
    try:
        return attrgetter(name)(owner)
    except AttributeError as error:
        of = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"torch: expected {SEEN}, which have {of}.{name}; got {torch.__version__}"
        ) from error

"""What is used of torch that is private to it: all of it, and what holds where it is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def autograd_in_operators() -> Iterator[None]:
    """Lets autograd record in the block, which it does not inside of an operator.

    Raises:
        RuntimeError: torch has no such switch any more.
    """
    excluded, exclude, keys = (
        _found(torch._C, name, "a call under torch.compile (outside of it all calls work)")
        for name in ("_dispatch_tls_is_dispatch_key_excluded",
                     "_dispatch_tls_set_dispatch_key_excluded", "DispatchKey")
    )  # fmt: skip
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


def forget_backward(wrapped: Any) -> None:
    """Makes DDP, which expects the backward of a forward that failed, begin anew.

    Raises:
        RuntimeError: torch has no way to do so any more.
    """
    _found(wrapped.reducer, "_reset_state", "a step that is tried again under DDP")()


def _found(holder: Any, name: str, wanted_by: str) -> Any:
    found = getattr(holder, name, None)
    if found is None:
        raise RuntimeError(f"torch {torch.__version__}: expected {name}, for {wanted_by}; got none")
    return found

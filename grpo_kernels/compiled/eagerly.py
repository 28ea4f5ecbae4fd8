"""What stays an eager call between two graphs; `fullgraph=True` says which argument it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..head.lm_head import LMHead

_WHY = {
    "ranks": "ranks: a process group is no part of a graph",
    "support": "support: the sizes of kept sets follow from the data",
    "matmul": "execution.matmul: a function is no part of a graph",
    "loss_type": "config.loss_type: a loss of one's own is no part of a graph",
    "dtensor": "head: a DTensor's parts are taken eagerly",
}


def eagerly(call: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The call as it is outside of a graph, by the reason."""
    return {name: torch.compiler.disable(call, reason=why) for name, why in _WHY.items()}


def why_eager(given: dict[str, Any]) -> str | None:
    """The argument, of those given, that a schema cannot hold; None where there is none."""
    if "config" in given and not isinstance(given["config"].loss_type, str):
        return "loss_type"
    if "head" not in given:
        return None
    head = LMHead.of(given["head"])
    if isinstance(head.weight, DTensor):
        return "dtensor"
    if head.ranks is not None:
        return "ranks"
    if given.get("support") is not None:
        return "support"
    reference = given.get("reference")
    if isinstance(reference, tuple) and isinstance(LMHead.of(reference[1]).weight, DTensor):
        return "dtensor"
    return None if given["execution"].matmul is None else "matmul"

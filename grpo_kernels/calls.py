"""The public calls: each eager, or an operator where `torch.compile` traces it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from .fused_grpo_loss import fused_grpo_loss as eager_fused
from .head.linear_logprobs import linear_logprobs as eager_logprobs
from .head.selective_log_softmax import selective_log_softmax as eager_softmax
from .loss.grpo_loss import grpo_loss as eager_loss

if TYPE_CHECKING:
    from .fused_distillation import fused_distillation_loss as fused_distillation_loss

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _public(eager: Callable[_P, _T]) -> Callable[_P, _T]:
    parameters = inspect.signature(eager).parameters
    name, names = eager.__name__, tuple(parameters)
    defaults = {k: p.default for k, p in parameters.items() if p.default is not p.empty}

    @functools.wraps(eager)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_dynamo_compiling():
            from . import compiled

            given = {**defaults, **dict(zip(names, args)), **kwargs}  # noqa: B905 - the first ones
            return getattr(compiled, name)(**given)
        return eager(*args, **kwargs)

    return call


fused_grpo_loss = _public(eager_fused)
linear_logprobs = _public(eager_logprobs)
grpo_loss = _public(eager_loss)
selective_log_softmax = _public(eager_softmax)


def __getattr__(name: str) -> Any:
    """What an exact call does not load."""
    if name != "fused_distillation_loss":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .fused_distillation import fused_distillation_loss as eager

    call = globals()[name] = _public(eager)
    return call

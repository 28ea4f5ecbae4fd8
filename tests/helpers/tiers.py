"""The choice of cases that the fast tier runs, and of those that the interpreter does."""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest

try:
    from triton.runtime import JITFunction

    from grpo_kernels.kernels.triton_logits import token_stats_kernel
except ImportError:  # neither compiled nor interpreted: macOS, Windows
    INTERPRETED = True
else:
    # Triton's interpreter cuts digits off where bfloat16 is stored, garbles float64 and is slow.
    INTERPRETED = not isinstance(token_stats_kernel, JITFunction)


def cases(*axes: Iterable[Any], fast: Callable[..., bool]) -> list:
    """The product of the axes; what is not `fast` is left to the slow tier."""
    every = [pytest.param(*case, marks=() if fast(*case) else pytest.mark.slow)
             for case in product(*axes)]  # fmt: skip
    assert any(not case.marks for case in every)
    return every


def in_turn(*axes: Iterable[Any]) -> list:
    """The product of the axes, of which each value of the first meets one of the others in turn."""
    first, *other_axes = (list(axis) for axis in axes)
    rest = list(product(*other_axes))
    marks = (pytest.mark.slow,)
    return [
        pytest.param(x, *other, marks=() if i % len(rest) == j else marks)
        for i, x in enumerate(first)
        for j, other in enumerate(rest)
    ]

"""Intervals of steps, and the order of problems."""

from __future__ import annotations

import random
from functools import lru_cache


def every(count: int, step: int) -> bool:
    """True for each `count`-th step; never if `count` is 0."""
    return count > 0 and step % count == 0


def index_at_turn(turn: int, count: int, seed: int) -> int:
    """The index below `count` at a turn: each epoch has all indices, newly shuffled."""
    epoch, place = divmod(turn, count)
    return _shuffled(count, f"{seed}-{epoch}")[place]


@lru_cache(2)
def _shuffled(count: int, seed: str) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order

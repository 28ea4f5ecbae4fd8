"""Judging completions: reward functions by name, called with what they ask for, in bounded time."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from . import ranks
from .bounded import Late, TimedOut, at_most
from .config import imported
from .data import applies
from .interruptions import StepError
from .rewards import REWARDS, Reward


def resolve_rewards(
    names: Sequence[str], more: Mapping[str, Reward] | None = None,
    ours: Mapping[str, Reward] = REWARDS,
) -> dict[str, Reward]:  # fmt: skip
    """The reward functions by name: of the library, the caller's own (`more`), or imported.

    One that is imported, as `module:function`, goes by the name of the function.
    """
    known, found = {**ours, **(more or {})}, dict[str, Reward]()
    for name in names:
        if name not in known and ":" not in name:
            raise ValueError(
                f"rewards: expected some of {', '.join(known)}, or module:function; got {name!r}"
            )
        function = known.get(name) or imported("rewards", name)
        found[name.rpartition(":")[2]] = function
    return found


# What every reward function is given, and first parameters of one that takes all by name.
_TWO = ("prompts", "completions")
_COMPLETIONS = ("completions", "completion_ids")


class RewardError(StepError, ValueError):
    """A reward function that failed, or returned what is no reward."""


def reward_table(
    rewards: Mapping[str, Reward], problems: Sequence[Mapping[str, Any]],
    completions: Sequence[str], *, more: Mapping[str, Sequence[Any]] | None = None,
    timeout: float = 0.0,
) -> list[list[float]]:  # fmt: skip
    """`[B][R]` rewards, one per completion and function; NaN where a function does not apply.

    A function sees only the completions that it judges, with every column that one of their
    problems has, None where another lacks it, and of `more`, lists with one entry per completion,
    those that it names. It may take `timeout` seconds; 0: any time.

    Raises:
        RewardError: a function raised, took longer, or returned another number of values or one
            that is not finite.
    """
    table = [[math.nan] * len(rewards) for _ in problems]
    for place, (name, function) in enumerate(rewards.items()):
        asked = [i for i, problem in enumerate(problems) if applies(name, problem)]
        if not asked:
            continue
        some = [problems[i] for i in asked]
        texts = [completions[i] for i in asked]
        offered = {key: [column[i] for i in asked] for key, column in (more or {}).items()}
        offered |= {
            "prompts": [problem["prompt"] for problem in some],
            "completions": [
                text if isinstance(problem["prompt"], str)
                else [{"role": "assistant", "content": text}]
                for text, problem in zip(texts, some, strict=True)
            ],
        }  # fmt: skip
        call = _call(name, function, some, offered)
        with _asked(f"reward function {name}", timeout):
            values = list(call())
            numbers = [math.nan if value is None else float(value) for value in values]
        if len(values) != len(asked):
            raise RewardError(
                f"reward function {name}: expected {len(asked)} values, one per completion; "
                f"got {len(values)}"
            )
        for i, value, number in zip(asked, values, numbers, strict=True):
            if value is not None and not math.isfinite(number):
                raise RewardError(
                    f"reward function {name}: expected finite numbers, or None where it does not "
                    f"apply; got {number} for {completions[i][:80]!r}"
                )
            table[i][place] = number
    return table


def judge(
    accelerator: Accelerator, rewards: Mapping[str, Reward],
    problems: Sequence[Mapping[str, Any]], completions: Sequence[str], timeout: float,
    more: Mapping[str, Sequence[Any]] | None = None,
) -> Tensor:  # fmt: skip
    """Makes a float64 tensor of `reward_table`. If it raises on one rank, all ranks raise.

    Raises:
        RewardError: on every rank.
    """
    with ranks.raise_on_all_ranks(accelerator, RewardError):
        table = reward_table(rewards, problems, completions, more=more, timeout=timeout)
    return torch.tensor(table, dtype=torch.float64)


def judge_answers(
    accelerator: Accelerator, is_correct: Callable[[str, str], bool],
    problems: Sequence[Mapping[str, Any]], completions: Sequence[str], timeout: float,
) -> list[bool]:  # fmt: skip
    """Per completion, whether it is correct. If the function fails on one rank, all raise.

    Raises:
        RewardError: on every rank.
    """
    pairs = zip(completions, problems, strict=True)
    with ranks.raise_on_all_ranks(accelerator, RewardError), _asked("is_correct", timeout):
        return [bool(is_correct(text, str(problem["answer"]))) for text, problem in pairs]


@contextmanager
def _asked(what: str, timeout: float) -> Iterator[None]:
    """Raises RewardError in the name of a function that fails, or takes longer."""
    late = Late()
    try:
        with at_most(timeout, late):
            yield
    except TimedOut:
        if not late.rang:
            raise
        raise RewardError(
            f"{what}: expected an answer within reward_timeout = {timeout:g} seconds; got none"
        ) from None
    except ImportError:
        raise
    except Exception as error:
        raise RewardError(f"{what}: {type(error).__name__}: {error}") from error


def weighted_sum(rewards: Tensor, weights: Sequence[float]) -> Tensor:
    """`[B]` weighted sums of the `[B, R]` rewards that apply; no weights: 1 each."""
    given = torch.tensor(weights or [1.0] * rewards.shape[1], dtype=rewards.dtype)
    return (rewards.nan_to_num() * given).sum(1)


def _call(
    name: str, function: Reward, problems: Sequence[Mapping[str, Any]],
    offered: Mapping[str, list[Any]],
) -> Callable[[], Sequence[float | None]]:  # fmt: skip
    """A call of a function, with what is `offered` and the columns of problems that it can take.

    It gets them by name; prompts and completions by place where its first two parameters have
    names of their own. What is offered beside these two it gets only where it names it.
    """
    columns = {
        column: [problem.get(column) for problem in problems]
        for column in sorted(set().union(*problems) - {"prompt", *offered})
    }
    known, two = {**offered, **columns}, [offered["prompts"], offered["completions"]]
    kind = inspect.Parameter
    parameters = list(inspect.signature(function).parameters.values())
    places = (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD, kind.VAR_POSITIONAL)
    first = [p for p in parameters if p.kind in places][:2]
    if first and (
        any(p.kind is not kind.POSITIONAL_OR_KEYWORD for p in first)
        or (len(first) == 2 and first[0].name not in _COMPLETIONS
            and not {p.name for p in first} <= set(known))
    ):  # fmt: skip
        parameters = [p for p in parameters if p not in first]
        known = {name: x for name, x in known.items() if name not in _TWO}
    else:
        two = []
    wanted = {p.name: p.default for p in parameters
              if p.kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)}  # fmt: skip
    needed = {name for name, default in wanted.items() if default is kind.empty}
    if not needed <= set(known):
        raise RewardError(
            f"rewards: expected problems with the columns {sorted(needed - set(offered))} for "
            f"{name}; got {list(columns)}"
        )
    if any(p.kind is kind.VAR_KEYWORD for p in parameters):
        wanted |= dict.fromkeys((*columns, *_TWO))
    return partial(function, *two, **{x: known[x] for x in known if x in wanted})

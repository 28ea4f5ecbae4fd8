"""Reward functions, called as in TRL.

Their arguments are keywords: `prompts`, `completions`, `completion_ids` and the problems' columns
that they name, or all with `**columns`; lists with one entry per completion. If a prompt is
messages, so is its completion. They return one number per completion, None where they do not apply.
A function that names `metrics` gets an `OwnMetrics`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..config import imported
from ..run import ranks, user_code
from ..run.interruptions import StepError
from ..run.metrics import Metrics
from .answers import is_correct
from .data import applies, names_rewards, text_of
from .expressions import timed_out

Reward = Callable[..., Sequence[float | None]]

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# Keywords that every reward function may name, besides the columns of problems.
KEYWORDS = ("prompts", "completions", "completion_ids", "transcripts")
# Errors of a function that mistakes texts for messages, or messages for texts.
_SHAPE_ERRORS = (TypeError, IndexError, AttributeError)


def as_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a completion, which may be messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def answer(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **_: Any
) -> list[float]:
    """2.0 for the right answer, which also counts for accuracy."""
    pairs = zip(completions, answer, strict=True)
    return [2.0 * is_correct(as_text(completion), right) for completion, right in pairs]


def format(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """0.2 for each of `<think>`, `</think>`, `<answer>`, `</answer>` that appears exactly once."""
    texts = map(as_text, completions)
    return [0.2 * sum(text.count(tag) == 1 for tag in TAGS) for text in texts]


REWARDS: dict[str, Reward] = {"answer": answer, "format": format}


@dataclass(frozen=True)
class RewardFunction:
    """A reward function, its name among the options, and its metric's name."""

    name: str
    label: str
    function: Reward


class RewardError(StepError, ValueError):
    """Error of a reward function: it raised, or did not return rewards."""


@dataclass(frozen=True)
class OwnMetrics:
    """Columns that reward functions add to a step's row, each with a curve on the page.

    `metrics` None: the completions are an evaluation's, which has no row.
    """

    metrics: Metrics | None = None

    def add(self, name: str, values: float | Iterable[float | None] | Tensor) -> None:
        """Adds values, such as one per completion; NaN and None are ignored. The row has the mean.

        Raises:
            ValueError: a name of the library's metrics.
        """
        if self.metrics is not None:
            several = [values] if isinstance(values, float | int) else values
            self.metrics.add(name, [math.nan if x is None else float(x) for x in several])


def resolve_rewards(
    names: Sequence[str], own: Mapping[str, Reward] | None = None
) -> list[RewardFunction]:
    """Returns the reward functions of these names, one per name.

    Each is one of the library, of the caller's `own`, or imported as `module:function`. Its label
    is the function's name, with a number if several have it.
    """
    known, functions = {**REWARDS, **(own or {})}, list[RewardFunction]()
    for name in names:
        if name not in known and ":" not in name:
            raise ValueError(
                f"rewards: expected some of {', '.join(known)}, or module:function; got {name!r}"
            )
        label = short = name.rpartition(":")[2]
        same = sum(other.name.rpartition(":")[2] == short for other in functions)
        if same:
            label = f"{short}-{same + 1}"
        functions.append(RewardFunction(name, label, known.get(name) or imported("rewards", name)))
    return functions


def check_rewards(
    rewards: Sequence[RewardFunction], problems: Sequence[Mapping[str, Any]], where: str, *,
    needs_answer: bool = False,
) -> None:  # fmt: skip
    """Checks that every problem has a reward function, and every function its columns.

    Answers must be comparable for the reward `answer`, and if `needs_answer`.

    Raises:
        ValueError: the message names the problem, or the function.
    """
    for reward in rewards:
        judged = [problem for problem in problems if applies(reward.name, problem)]
        if judged:
            _keywords(reward, [*KEYWORDS, *_columns(judged)])
    known = {x for reward in rewards for x in (reward.name, reward.name.rpartition(":")[2])}
    for i, problem in enumerate(problems):
        names = names_rewards(problem)
        if names is not None and (not names or set(names) - known):
            raise ValueError(
                f"rewards: the column `rewards` of {where}[{i}] is {problem['rewards']!r}, but the "
                f"run has {', '.join(reward.name for reward in rewards)}: name some of these in "
                "it, or rename the column if it means something else"
            )
        if needs_answer or any(x.function is answer and applies(x.name, problem) for x in rewards):
            try:
                text_of("answer", problem.get("answer"))
            except ValueError as error:
                raise ValueError(f"{error} ({where}[{i}])") from error


def reward_table(
    rewards: Sequence[RewardFunction], problems: Sequence[Mapping[str, Any]],
    completions: Sequence[str], *, more: Mapping[str, Sequence[Any]] | None = None,
    metrics: Metrics | None = None,
) -> list[list[float]]:  # fmt: skip
    """`[B][R]` rewards, one per completion and function; NaN where a function does not apply.

    A function gets copies of its arguments, and only the completions that it judges, with every
    column of their problems, None where a problem lacks it. `more`: lists with one entry per
    completion, by keyword. `metrics`: of the step, None for an evaluation.

    Raises:
        RewardError: a function raised, returned another number of values, or a value that is not
            finite.
    """
    table = [[math.nan] * len(rewards) for _ in problems]
    for place, reward in enumerate(rewards):
        rows = [i for i, problem in enumerate(problems) if applies(reward.name, problem)]
        if not rows:
            continue
        judged = [problems[i] for i in rows]
        offered: dict[str, list[Any]] = {
            key: [problem.get(key) for problem in judged] for key in _columns(judged)
        }
        offered |= {key: [values[i] for i in rows] for key, values in (more or {}).items()}
        offered["prompts"] = [problem["prompt"] for problem in judged]
        offered["completions"] = [
            text if isinstance(problem["prompt"], str)
            else [{"role": "assistant", "content": text}]
            for text, problem in zip([completions[i] for i in rows], judged, strict=True)
        ]  # fmt: skip
        arguments: dict[str, Any] = {
            # Copied one by one: completions of one problem share its objects.
            key: [deepcopy(x) for x in offered[key]] if key in offered else OwnMetrics(metrics)
            for key in _keywords(reward, offered)
        }
        name = f"reward function {reward.label}"
        returned = user_code.call(
            name, partial(reward.function, **arguments), RewardError,
            partial(_shape_of_arguments, offered["prompts"][0]),
        )  # fmt: skip
        # A generator runs here.
        values, numbers = user_code.call(name, partial(_numbers, returned), RewardError)
        if len(values) != len(rows):
            raise RewardError(
                f"{name}: expected {len(rows)} values, one per completion; got {len(values)}"
            )
        for i, value, number in zip(rows, values, numbers, strict=True):
            if value is not None and not math.isfinite(number):
                raise RewardError(
                    f"{name}: expected finite numbers, or None where it does not apply; got "
                    f"{number} for {completions[i][:80]!r}"
                )
            table[i][place] = number
    return table


@dataclass(frozen=True)
class Judged:
    """Texts of a process's completions, and their rewards."""

    texts: list[str]  # [B], what the policy wrote
    transcripts: list[str]  # [B], the texts with the tools' outputs
    rewards: Tensor  # [B, R], float64, NaN where a function does not apply
    correct: list[bool]  # [B], or empty where no answer is judged
    timed_out: int  # comparisons of answers without a result


def judge(
    accelerator: Accelerator, rewards: Sequence[RewardFunction],
    is_correct: Callable[[str, Any], bool] | None, problems: Sequence[Mapping[str, Any]],
    metrics: Metrics | None, *, texts: list[str], transcripts: list[str],
    completion_ids: list[list[int]],
) -> Judged:  # fmt: skip
    """Judges a process's completions; `problems` has one per completion.

    `is_correct`: of a text and its problem's answer; None judges no answer. `metrics`: of the step,
    to which functions may add; None for an evaluation. `texts`: the policy's tokens; `transcripts`:
    with the tools' outputs.

    Raises:
        RewardError: a function failed on one rank; on every rank.
    """
    before, correct = timed_out(), list[bool]()
    more: dict[str, list[Any]] = {"transcripts": transcripts, "completion_ids": completion_ids}
    with ranks.raise_on_all_ranks(accelerator, RewardError):
        table = reward_table(rewards, problems, texts, more=more, metrics=metrics)
        if is_correct is not None:
            right = [deepcopy(problem["answer"]) for problem in problems]
            pairs = list(zip(texts, right, strict=True))
            correct = user_code.call(
                "is_correct", lambda: [bool(is_correct(*pair)) for pair in pairs], RewardError
            )
    table_of_all = torch.tensor(table, dtype=torch.float64, device="cpu")
    return Judged(texts, transcripts, table_of_all, correct, timed_out() - before)


def weighted_sum(rewards: Tensor, weights: Sequence[float]) -> Tensor:
    """`[B]` weighted sums of the `[B, R]` rewards that apply; NaN where none does. Without
    `weights`, 1 each.
    """
    factors = rewards.new_tensor(weights or [1.0] * rewards.shape[1])
    return (rewards.nan_to_num() * factors).sum(1).masked_fill(rewards.isnan().all(1), math.nan)


def _columns(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted(set().union(*problems) - {"prompt", *KEYWORDS})


def _keywords(reward: RewardFunction, offered: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Returns the function's keywords, from `offered` and `metrics`."""
    parameters = inspect.signature(reward.function).parameters.values()
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if "metrics" in by_name:
        if "metrics" in offered:
            raise RewardError(
                f"reward function {reward.label}: its parameter metrics gets the step's metrics, "
                "and the problems have a column metrics: rename the column"
            )
        offered = [*offered, "metrics"]
    lacking = [
        p.name for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.default is p.empty
        and not (p.name in by_name and p.name in offered)
    ]  # fmt: skip
    if lacking:
        raise RewardError(
            f"reward function {reward.label}: nothing is passed for its parameters "
            f"{', '.join(lacking)}. Passed are {', '.join(offered)}. Rename the parameters, or add "
            "such columns to the problems"
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return [key for key in offered if takes_all or key in by_name]


def _numbers(returned: Any) -> tuple[list[Any], list[float]]:
    """Returns the values of a reward function, and the same as numbers, with NaN for None."""
    values = list(returned)
    return values, [math.nan if value is None else float(value) for value in values]


def _shape_of_arguments(prompt: Any, error: BaseException) -> str:
    """Returns a hint at the arguments' shape, if the error may come from it."""
    if not isinstance(error, _SHAPE_ERRORS):
        return ""
    kind = "text" if isinstance(prompt, str) else "lists of messages"
    return f" (prompts and completions are {kind} here)"

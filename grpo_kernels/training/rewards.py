"""Reward functions: what a completion is worth.

A reward function takes `(prompts, completions, **columns)`, lists with one entry per completion;
the columns are those of the problems (`answer`, say). It returns a list of floats, None where it
does not apply. A problem with a column `rewards` is judged by the functions named there alone.
"""

from __future__ import annotations

import inspect
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from . import ranks
from .data import imported
from .interruptions import StepError

Reward = Callable[..., Sequence[float | None]]

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# No number that is an answer is longer; reading one of this length takes no time.
_LONGEST = 100
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"([+-]?)[$€£]?([+-]?)({_DIGITS})(?:\s?/\s?({_DIGITS}))?\s?%?\.?", re.ASCII)


def answer_of(completion: str) -> str | None:
    """The text between the answer tags; None unless there is exactly one pair of them."""
    if completion.count("<answer>") != 1 or completion.count("</answer>") != 1:
        return None
    rest = completion.partition("<answer>")[2]
    inside, closed, _ = rest.partition("</answer>")
    return inside.strip() if closed else None


def marked_answer(completion: str) -> str | None:
    r"""The text marked as the answer by `<answer>` tags, `####` or `\boxed{}`.

    None unless there is exactly one mark.
    """
    tagged = answer_of(completion)
    if tagged is not None:
        completion = completion.replace("<answer>", "", 1)
    elif "<answer>" in completion or "</answer>" in completion:
        return None
    found: list[str | None] = [tagged] if tagged is not None else []
    found += [line.split("\n")[0].strip() for line in completion.split("####")[1:]]
    found += [_in_braces(rest) for rest in completion.split(r"\boxed{")[1:]]
    return found[0] if len(found) == 1 else None


def _in_braces(text: str) -> str | None:
    """The text up to the brace that closes one before it."""
    depth = 1
    for place, letter in enumerate(text[:_LONGEST]):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:place].strip()
    return None


def number_of(text: str) -> Fraction | None:
    """Reads a text as a number: `-3`, `$1,234.50`, `50%` (as 50), `1/2`, `7.`; else None.

    Only ASCII digits count: some others are exponents.
    """
    if len(text) > _LONGEST:
        return None
    match = _NUMBER.fullmatch(text.strip().replace("\u2212", "-"))
    if match is None or (match[1] and match[2]):
        return None
    above, below = (Fraction((part or "1").replace(",", "")) for part in match.groups()[2:])
    if below == 0:
        return None
    return (-1 if "-" in match[1] + match[2] else 1) * above / below


def is_correct(completion: str, answer: str) -> bool:
    """True if the tagged answer equals the right one, as text or as a number."""
    given = answer_of(completion)
    if given is None:
        return False
    number = number_of(given)
    return given == answer.strip() or (number is not None and number == number_of(answer))


def answer(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **_: Any
) -> list[float]:
    """2.0 for the right answer in `<answer>` tags, 1.5 for one that is numerically equal."""
    given = [answer_of(text) for text in completions]
    return [
        2.0 if mine == right.strip() else 1.5 * is_correct(text, right)
        for mine, text, right in zip(given, completions, answer, strict=True)
    ]


def format(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
    """0.2 for each of `<think>`, `</think>`, `<answer>`, `</answer>` that appears exactly once."""
    return [0.2 * sum(text.count(tag) == 1 for tag in TAGS) for text in completions]


def math_equal(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **_: Any
) -> list[float]:
    """2.0 where `math-verify` finds the tagged answer equal to the right one as an expression."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the reward 'math_equal' needs math-verify: pip install 'grpo_kernels[train]'"
        ) from error

    return [
        2.0 * _equal(answer_of(text), right)
        for text, right in zip(completions, answer, strict=True)
    ]


def is_marked_correct(completion: str, answer: str) -> bool:
    """True if `marked_answer` equals the right one, as text, as a number, or for `math-verify`."""
    return _equal(marked_answer(completion), answer)


def _equal(given: str | None, right: str) -> bool:
    from math_verify import parse, verify

    if given is None or len(given) > _LONGEST:
        return False
    number = number_of(given)
    if given == right.strip() or (number is not None and number == number_of(right)):
        return True
    return bool(verify(parse(f"${right}$"), parse(f"${given}$")))


REWARDS: dict[str, Reward] = {"answer": answer, "format": format, "math_equal": math_equal}


def resolve_rewards(
    names: Sequence[str], more: Mapping[str, Reward] | None = None
) -> dict[str, Reward]:
    """The reward functions by name: of the library, the caller's own (`more`), or imported.

    One that is imported, as `module:function`, goes by the name of the function.
    """
    known, found = {**REWARDS, **(more or {})}, dict[str, Reward]()
    for name in names:
        if name not in known and ":" not in name:
            raise ValueError(
                f"rewards: expected some of {', '.join(known)}, or module:function; got {name!r}"
            )
        function = known.get(name) or imported("rewards", name)
        found[name.rpartition(":")[2]] = function
    return found


class RewardError(StepError, ValueError):
    """A reward function that failed, or returned what is no reward."""


class _Late(BaseException):
    """Not an Exception, which a reward function may catch."""


def reward_table(
    rewards: Mapping[str, Reward], problems: Sequence[Mapping[str, Any]],
    completions: Sequence[str], *, timeout: float = 0.0,
) -> list[list[float]]:  # fmt: skip
    """`[B][R]` rewards, one per completion and function; NaN where a function does not apply.

    A function sees only the completions that it judges, with every column that one of their
    problems has, None where another lacks it. It may take `timeout` seconds; 0: any time.

    Raises:
        RewardError: a function raised, took longer, or returned another number of values or one
            that is not finite.
    """
    table = [[math.nan] * len(rewards) for _ in problems]
    for place, (name, function) in enumerate(rewards.items()):
        asked = [i for i, problem in enumerate(problems) if _applies(name, problem)]
        if not asked:
            continue
        some = [problems[i] for i in asked]
        columns = _columns(name, function, some)
        prompts = [problem["prompt"] for problem in some]
        with _asked(f"reward function {name}", timeout):
            values = list(function(prompts, [completions[i] for i in asked], **columns))
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
) -> Tensor:  # fmt: skip
    """Makes a float64 tensor of `reward_table`. If it raises on one rank, all ranks raise.

    Raises:
        RewardError: on every rank.
    """
    with ranks.raise_on_all_ranks(accelerator, RewardError):
        table = reward_table(rewards, problems, completions, timeout=timeout)
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
    try:
        with _at_most(timeout):
            yield
    except _Late:
        raise RewardError(
            f"{what}: expected an answer within reward_timeout = {timeout:g} seconds; got none"
        ) from None
    except ImportError:
        raise
    except Exception as error:
        raise RewardError(f"{what}: {type(error).__name__}: {error}") from error


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises `_Late` in the block after so many seconds; 0: never.

    By an alarm, so in the main thread alone. A function with an alarm of its own, as math-verify
    has, is bounded by that.
    """
    main = threading.current_thread() is threading.main_thread()
    if not seconds or not main or not hasattr(signal, "setitimer"):
        yield
        return

    def late(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def weighted_sum(rewards: Tensor, weights: Sequence[float]) -> Tensor:
    """`[B]` weighted sums of the `[B, R]` rewards that apply; no weights: 1 each."""
    given = torch.tensor(weights or [1.0] * rewards.shape[1], dtype=rewards.dtype)
    return (rewards.nan_to_num() * given).sum(1)


def _columns(
    name: str, function: Reward, problems: Sequence[Mapping[str, Any]]
) -> dict[str, list[Any]]:
    """The columns that a function takes: all of them, or without `**columns` those it names."""
    there = sorted(set().union(*problems) - {"prompt"})
    parameters = list(inspect.signature(function).parameters.values())[2:]
    kinds = inspect.Parameter
    wanted = {p.name for p in parameters if p.kind is not kinds.VAR_KEYWORD}
    needed = {p.name for p in parameters if p.default is kinds.empty} & wanted
    if not needed <= set(there):
        raise RewardError(
            f"rewards: expected problems with the columns {sorted(needed)} for {name}; got {there}"
        )
    if len(wanted) == len(parameters):
        there = [column for column in there if column in wanted]
    return {column: [problem.get(column) for problem in problems] for column in there}


def _applies(name: str, problem: Mapping[str, Any]) -> bool:
    wanted = problem.get("rewards")
    return wanted is None or name == wanted or (not isinstance(wanted, str) and name in wanted)

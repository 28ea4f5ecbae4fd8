"""Reward functions: what a completion is worth.

A reward function takes `(prompts, completions, **columns)`, lists with one entry per completion;
the columns are those of the problems (`answer`, say). Where a prompt is messages, so is its
completion. It returns a list of floats, None where it does not apply. A problem with a column
`rewards` is judged by the functions named there alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, lru_cache, partial
from typing import Any

from .bounded import Late, TimedOut, at_most
from .config import TrainingConfig

Reward = Callable[..., Sequence[float | None]]

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# A number anywhere in a text, as "GRPO from scratch" looks for one.
_ANYWHERE = re.compile(r"-?\d*\.?\d+", re.ASCII)
# No number that is an answer is longer; reading one of this length takes no time.
LONGEST = 100
# Seconds for the comparison of two expressions.
_SECONDS = 5.0
_INTEGER = re.compile(r"-?\d{1,12}", re.ASCII)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"([+-]?)[$€£]?([+-]?)({_DIGITS})(?:\s?/\s?({_DIGITS}))?\s?%?\.?", re.ASCII)


def answer_of(completion: str, *, last: bool = False) -> str | None:
    """The text between the answer tags; None unless there is exactly one pair of them.

    `last`: of several openings the last counts, up to what closes it.
    """
    if last:
        _, opened, rest = completion.rpartition("<answer>")
        inside, closed, _ = rest.partition("</answer>")
        return inside.strip() if opened and closed else None
    if completion.count("<answer>") != 1 or completion.count("</answer>") != 1:
        return None
    rest = completion.partition("<answer>")[2]
    inside, closed, _ = rest.partition("</answer>")
    return inside.strip() if closed else None


def marked_answer(completion: str, *, last: bool = False) -> str | None:
    r"""The text marked as the answer by `<answer>` tags, else by one `####` or `\boxed{}`.

    None where there are several pairs of tags, or no tags and several marks; with `last` the last
    of them counts.
    """
    if "<answer>" in completion or "</answer>" in completion:
        return answer_of(completion, last=last)
    found = [line.split("\n")[0].strip() for line in completion.split("####")[1:]]
    boxed = [_in_braces(rest) for rest in completion.split(r"\boxed{")[1:]]
    marked = [*found, *boxed]
    return marked[-1] if len(marked) == 1 or (last and marked) else None


def _in_braces(text: str) -> str | None:
    """The text up to the brace that closes one before it."""
    depth = 1
    for place, letter in enumerate(text[:LONGEST]):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:place].strip()
    return None


def number_of(text: str) -> Fraction | None:
    """Reads a text as a number: `-3`, `$1,234.50`, `50%` (as 50), `1/2`, `7.`; else None.

    Only ASCII digits count: some others are exponents.
    """
    if len(text) > LONGEST:
        return None
    match = _NUMBER.fullmatch(text.strip().replace("\u2212", "-"))
    if match is None or (match[1] and match[2]):
        return None
    above, below = (Fraction((part or "1").replace(",", "")) for part in match.groups()[2:])
    if below == 0:
        return None
    return (-1 if "-" in match[1] + match[2] else 1) * above / below


def is_correct(completion: str, answer: str, *, last: bool = False) -> bool:
    """True if the tagged answer equals the right one, as text or as a number."""
    given = answer_of(completion, last=last)
    if not given:
        return False
    number = number_of(given)
    return given == answer.strip() or (number is not None and number == number_of(answer))


def as_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a completion, which may be messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def answer(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], *,
    _last: bool = False, **_: Any,
) -> list[float]:  # fmt: skip
    """2.0 for the right answer in `<answer>` tags, 1.5 for one that is numerically equal."""
    texts = [as_text(completion) for completion in completions]
    return [
        (2.0 if answer_of(text, last=_last) == right.strip() else 1.5)
        * is_correct(text, right, last=_last)
        for text, right in zip(texts, answer, strict=True)
    ]


def format(
    prompts: Sequence[Any], completions: Sequence[Any], *, _tag: str = "think",
    _repeated: bool = False, **_: Any,
) -> list[float]:  # fmt: skip
    """0.2 for each of `<think>`, `</think>`, `<answer>`, `</answer>` that appears exactly once.

    Or more often, where it may be repeated.
    """
    tags = (f"<{_tag}>", f"</{_tag}>", *TAGS[2:])
    counts = ([as_text(completion).count(tag) for tag in tags] for completion in completions)
    return [0.2 * sum(n == 1 or (_repeated and n > 1) for n in found) for found in counts]


def correctness(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **_: Any
) -> list[float]:
    """2.0 for the right answer in the last `<answer>` tags, 1.5 for one number that is equal.

    As "GRPO from scratch" pays it: the number may stand in a sentence, and "..." is no answer.
    """

    def paid(given: str | None, right: str) -> float:
        given = None if given == "..." else given
        found = [_ANYWHERE.findall((text or "")[:LONGEST]) for text in (given, right)]
        numbers = [float(x[0]) for x in found if len(x) == 1]
        same = len(numbers) == 2 and numbers[0] == numbers[1]
        return 2.0 if given == right.strip() else 1.5 * same

    texts = (as_text(completion) for completion in completions)
    return [paid(answer_of(x, last=True), y) for x, y in zip(texts, answer, strict=True)]


def math_equal(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], *,
    _last: bool = False, **_: Any,
) -> list[float]:  # fmt: skip
    """2.0 where `math-verify` finds the tagged answer equal to the right one as an expression."""
    return [
        2.0 * equal(answer_of(as_text(completion), last=_last), right)
        for completion, right in zip(completions, answer, strict=True)
    ]


def is_marked_correct(completion: str, answer: str, *, last: bool = False) -> bool:
    """True if `marked_answer` equals the right one, as text, as a number, or for `math-verify`."""
    return equal(marked_answer(completion, last=last), answer)


def equal(given: str | None, right: str) -> bool:
    """True if an answer equals the right one, as text, as a number, or for `math-verify`."""
    right = right.strip()
    if not given or len(given) > LONGEST:
        return False
    number = number_of(given)
    if given == right or (number is not None and number == number_of(right)):
        return True
    if not right or (_INTEGER.fullmatch(given) and _INTEGER.fullmatch(right)):
        return False
    return _equal_expressions(given, right)


def _equal_expressions(given: str, right: str) -> bool:
    """True if two expressions are equal; False if that is not found out in `_SECONDS`."""
    late = Late()
    _math_verify()  # half of an import would be none ever after
    try:
        with at_most(_SECONDS, late):
            return _compared(given, right)
    except TimedOut:
        if not late.rang:
            raise  # that of a block around this one
        return False


@lru_cache(4096)  # a reward and accuracy ask for the same
def _compared(given: str, right: str) -> bool:
    its = _math_verify()
    sides = [its.parse(f"${text}$", parsing_timeout=None) for text in (right, given)]
    return bool(its.verify(*sides, timeout_seconds=None))


@cache
def _math_verify() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise ImportError(
            "answers that are no numbers need math-verify: pip install 'grpo_kernels[train]'"
        ) from error
    # Its own bound is an alarm that the main thread alone has, and that ends one of a caller's.
    math_verify.parser.TIMEOUT_WARNING_SHOWN = math_verify.grader.TIMEOUT_WARNING_SHOWN = True
    return math_verify


REWARDS: dict[str, Reward] = {
    "answer": answer, "correctness": correctness, "format": format, "math_equal": math_equal,
}  # fmt: skip


def of_options(config: TrainingConfig) -> dict[str, Reward]:
    """The library's reward functions, which look for answer and tags as a run's options say."""
    last, tag = config.last_answer, config.think_tag
    return {
        **REWARDS, "answer": partial(answer, _last=last),
        "math_equal": partial(math_equal, _last=last),
        "format": partial(format, _tag=tag, _repeated=last),
    }  # fmt: skip

r"""Answers: the one that a completion marks, and whether it equals the right one."""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Integral

from .expressions import same_expression

# Characters in a number, or in an expression that math-verify gets.
LONGEST = 100
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(rf"([+-]?)[$€£]?([+-]?)({_DIGITS})(?:\s?/\s?({_DIGITS}))?\s?%?\.?", re.ASCII)


def extract_answer(completion: str) -> str | None:
    r"""Returns the answer in the last `<answer>` tags, else in the last `\boxed{}` or after `####`.

    None where nothing is marked, or the last `<answer>` is not closed.
    """
    if "<answer>" in completion or "</answer>" in completion:
        _, opened, rest = completion.rpartition("<answer>")
        inside, closed, _ = rest.partition("</answer>")
        return inside.strip() if opened and closed else None
    _, boxed, rest = completion.rpartition(r"\boxed{")
    if boxed:
        depth = 1
        for place, letter in enumerate(rest):
            depth += (letter == "{") - (letter == "}")
            if depth == 0:
                return rest[:place].strip()
        return None
    _, marked, rest = completion.rpartition("####")
    return rest.partition("\n")[0].strip() if marked else None


def same_answer(answer: str | None, right: str | int) -> bool:
    """Returns whether an answer equals the right one, as text, number or expression.

    Two numbers are equal if they are the same fraction; 50% equals both 50 and 0.5. math-verify is
    asked only where one side is no number.

    Raises:
        TypeError: the right answer is neither text nor a whole number.
    """
    if isinstance(right, bool) or not isinstance(right, str | Integral):
        raise TypeError(
            f"answer: expected text or a whole number; got {right!r}: write it as text, "
            f"{str(right)!r}, or pass an is_correct and reward functions of your own"
        )
    answer, right = (answer or "").strip(), str(right).strip()
    if not answer or not right or answer == right:
        return bool(answer and right)
    number, expected = number_of(answer), number_of(right)
    if number is not None and expected is not None:
        hundreds = Fraction(100) ** (answer.count("%") - right.count("%"))
        return number in (expected, expected * hundreds)
    return max(len(answer), len(right)) <= LONGEST and same_expression(answer, right)


def is_correct(completion: str, answer: str | int) -> bool:
    """Returns whether the answer that a completion marks is the right one."""
    return same_answer(extract_answer(completion), answer)


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

r"""Answers: extracted from completions, and compared with the right ones."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from numbers import Integral

from .expressions import same_expression

# Characters in a number.
LONGEST = 1000
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_PART = rf"((?:{_DIGITS})(?:[eE][+-]?\d{{1,3}})?)"
_NUMBER = re.compile(rf"([+-]?)[$€£]?([+-]?){_PART}(?:\s?/\s?{_PART})?\s?%?\.?", re.ASCII)
_EXPONENT = re.compile(r"[\d.,]+[eE][+-]?\d+", re.ASCII)
# Units of fewer than three letters, which could be factors: by math-verify 5 cm is 5 m.
_UNIT = r"(?:[mcdk]?m|cc|in|ft|yd|mi|[mk]?g|lb|oz|[mcd]?[lL]|ms|s|h|hr|yr)"
# A number of things or of a unit; "5 million" is not 5.
_QUANTITY = re.compile(
    r"([-+$€£\d.,/ ]*\d)\s*(?!(?:hundred|thousand|million|billion|trillion|dozen|percent|or|and)\b)"
    rf"(°|[^\W\d_]{{3,}}(?:[ /-][^\W\d_]+)*|{_UNIT}(?:/{_UNIT})?)"
)
# Spellings that change nothing: `\text{yes}`, `1{,}450`, `50\%`, `5\,m`, `$x$`, `(1, 2)`.
_SPELLINGS = (
    (r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}\\$]*)\}", r"\1"), (r"\{,\}", ","),
    (r"\\([%$])", r"\1"), (r"\\[,;:! ]", " "), ("[\u2212\u2010\u2011]", "-"),
    (r"^\$+([^$]+)\$+$", r"\1"), (r"\s+", " "), (r"(?<=\W) | (?=\W)", ""),
    (r"(?<=\d) percent$", "%"), (r"(?<=\d) degrees?$", "°"),
)  # fmt: skip
# Letters that are neither words nor factors.
_COMMANDS = re.compile(
    r"\\begin\{\w+\*?\}(?:\{[clr|]+\})?|\\(?:end|operatorname|mathbb|mathcal)\{\w+\*?\}|\\[a-zA-Z]+"
    r"|(?<![^\W\d_])(?:sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|lg|exp"
    r"|sqrt|pi|inf|infty|min|max|gcd|lcm|mod|det|and|or)(?![a-zA-Z])"
)
# A word; a code, `A1` or `AB-12`; a time or a ratio, 3 pm as well; a date.
_TEXT = re.compile(
    r"[^\W\d_]{3}|[^\W\d_]{2}-|-[^\W\d_]{2}|[^\W\d_]\d|\d:\d|\d ?[AaPp]\.?[Mm]\b"
    r"|\d{4}-\d{1,2}-\d{1,2}|\d{1,2}([-/.])\d{1,2}\1\d{2}"
)
_TWO_LETTERS = re.compile(r"[^\W\d_]{2}")
# An operator, also of Unicode, a command of LaTeX, or a letter as a factor (`2x`).
_OPERATORS = re.compile(r"[-+*/^=<>|!\\\xb1\xb7\xd7\xf7\u2200-\u22ff]|\d ?[^\W\d_]")
_BRACKETS = re.compile(r"[()\[\]{},]")


def extract_answer(completion: str) -> str | None:
    r"""Returns the answer in the last `<answer>` tags, else in the last `\boxed{}` or after `####`.

    None if nothing is marked, or if the last `<answer>` is not closed.
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

    Two numbers are equal if they are the same fraction; 50% equals both 50 and 0.5, and 5 equals
    `5 apples`. Words, codes, times, ratios and dates are compared as text. math-verify compares
    answers with an operator, a bracket, a fraction or a command of LaTeX.

    Raises:
        TypeError: the right answer is neither text nor an integer.
    """
    if isinstance(right, bool) or not isinstance(right, str | Integral):
        raise TypeError(
            f"answer: expected text or a whole number; got {right!r}: write it as text, "
            f"{str(right)!r}, or pass an is_correct and reward functions of your own"
        )
    answer, right = _plain(answer or ""), _plain(str(right))
    if not answer or not right or answer == right:
        return bool(answer and right)
    number, expected = number_of(answer), number_of(right)
    if number is not None and expected is not None:
        hundreds = Fraction(100) ** (answer.count("%") - right.count("%"))
        return number in (expected, expected * hundreds)
    (amount, unit), (expected, of) = _quantity(answer), _quantity(right)
    if amount is not None and expected is not None:
        return amount == expected and (unit == of or not (unit and of))
    answer, right = _without_exponent(answer), _without_exponent(right)
    if _is_text(answer) or _is_text(right):
        return False
    is_expression = any(x.search(y) for x in (_OPERATORS, _BRACKETS) for y in (answer, right))
    return is_expression and same_expression(answer, right)


def is_correct(completion: str, answer: str | int) -> bool:
    """Returns whether the answer that a completion marks is the right one."""
    return same_answer(extract_answer(completion), answer)


def number_of(text: str) -> Fraction | None:
    """Reads a text as a number: `-3`, `$1,234.50`, `50%` (as 50), `1/2`, `1.5e-3`, `7.`; else None.

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


def _plain(text: str) -> str:
    """The text with LaTeX and punctuation reduced to a plain spelling."""
    for spelling, plain in _SPELLINGS:
        text = re.sub(spelling, plain, text.strip())
    return text.strip().removesuffix(".")


def _quantity(text: str) -> tuple[Fraction | None, str]:
    """The number in a text, and the unit behind it."""
    match = _QUANTITY.fullmatch(text) if len(text) <= LONGEST else None
    return (number_of(match[1]), match[2]) if match else (number_of(text), "")


def _is_text(text: str) -> bool:
    """True for words and codes, which are compared as text."""
    bare = _COMMANDS.sub(" ", text)
    two_letters = _TWO_LETTERS.search(bare) and not _OPERATORS.search(text)
    return bool(_TEXT.search(bare) or two_letters)


def _without_exponent(text: str) -> str:
    """A number such as `1e3` as 1000: math-verify reads e as Euler's number."""
    if number_of(text) is None:
        return text
    return _EXPONENT.sub(lambda x: format(Decimal(x[0].replace(",", "")), "f"), text)

"""Both rewards of the tutorial "GRPO from scratch", as reward functions for `--rewards`.

    python examples/train_gsm8k.py examples/configs/from-scratch-1.5b-lora-24gb.yaml

The recipes `examples/configs/from-scratch-*.yaml` name them, and have the tutorial's system prompt,
which asks for these tags. Its prompts are texts, in no chat template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
# The number of characters of a text in which a number is searched.
LONGEST = 100
NUMBER = re.compile(r"-?\d*\.?\d+", re.ASCII)


def tagged(completion: str) -> str | None:
    """Returns the text in the last answer tags; None where there is none, or the prompt's "..."."""
    _, opened, rest = completion.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    answer = inside.strip()
    return answer if opened and closed and answer != "..." else None


def single_number(text: str) -> Fraction | None:
    """Returns the one number in a text, `$1,450` as 1450; None where there are none or several."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text[:LONGEST].replace("\u2212", "-"))
    found = NUMBER.findall(text)
    return Fraction(found[0]) if len(found) == 1 else None


def correctness(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any
) -> list[float]:
    """2.0 for the right text in the last answer tags, 1.5 where the one number in it is equal."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        text = tagged(completion)
        number = single_number(text or "")
        same = number is not None and number == single_number(right)
        rewards.append(2.0 if text == right.strip() else 1.5 * same)
    return rewards


def format(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """0.2 for each of the tags that a completion has."""
    return [0.2 * sum(tag in completion for tag in TAGS) for completion in completions]

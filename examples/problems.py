"""Problems that need no hub, for `--dataset examples.problems:NAME`, and rewards that fit them.

`additions` are sums of two digits; `gsm_symbolic` are word problems from the package reasoning-gym,
which has a hundred more tasks: a function of three lines for each.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_kernels.training import Problem, TrainingConfig, problem_of
from grpo_kernels.training.problems.answers import extract_answer
from grpo_kernels.training.problems.rewards import TAGS, as_text

ADDITION = "Question: What is 31 + 45?\n<answer>76</answer>\n\nQuestion: What is {} + {}?\n"


def additions(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    """All sums of two digits from 1 to 9, two thirds to train on and a third held out."""
    digits = range(1, 10)
    problems: list[Problem] = [
        {"prompt": ADDITION.format(a, b), "answer": str(a + b)} for a in digits for b in digits
    ]
    random.Random(0).shuffle(problems)
    return problems[27:], problems[:27]


def addition(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **_: Any
) -> list[float]:
    """Rewards an answer and nothing else: 0.2 per tag, 0.1 for a number, 0.5 for the right one.

    A tag that appears exactly once counts anywhere; the number counts only at the beginning, so
    only the first of several guesses counts.
    """
    rewards = []
    for text, right in zip(completions, answer, strict=True):
        tags = sum(text.count(tag) == 1 for tag in TAGS[2:])
        match = re.match(r"\s{0,9}<answer>\s{0,9}(-?\d{1,20})\s{0,9}</answer>", text, re.ASCII)
        correct = match is not None and int(match[1]) == int(right)
        rewards.append(0.2 * tags + 0.1 * (match is not None) + 0.5 * correct)
    return rewards


def gsm_symbolic(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    """Word problems in GSM8K's shape with drawn names and numbers."""
    return of_reasoning_gym("gsm_symbolic", config)


def of_reasoning_gym(task: str, config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    """Different problems of a task, the same for every seed, so that runs can be compared."""
    import reasoning_gym

    count = config.train_size + config.eval_size
    entries = reasoning_gym.create_dataset(task, size=count, seed=0)
    problems = [
        problem_of({**{k: entry[k] for k in ("question", "answer")}, "task": task, "entry": entry},
                   config)
        for entry in {entry["question"]: entry for entry in entries}.values()
    ]  # fmt: skip
    return problems[config.eval_size :], problems[: config.eval_size]


def score(
    prompts: Sequence[Any], completions: Sequence[Any], task: Sequence[str],
    entry: Sequence[Mapping[str, Any]], **_: Any,
) -> list[float]:  # fmt: skip
    """Twice the score, 0 to 1, that reasoning-gym gives the tagged answer."""
    from reasoning_gym import get_score_answer_fn

    given = [extract_answer(as_text(completion)) for completion in completions]
    return [
        0.0 if mine is None else 2.0 * float(get_score_answer_fn(name)(mine, problem))
        for mine, name, problem in zip(given, task, entry, strict=True)
    ]

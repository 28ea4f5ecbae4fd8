"""Accuracy on held-out problems, with its 95 % interval, from judged answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import logs


@dataclass(frozen=True)
class Evaluation:
    """Held-out accuracy with its 95 % interval, of one or several completions per problem."""

    answers: list[dict[str, Any]]  # sorted by problem
    accuracy: float
    low: float  # the 95 % interval
    high: float
    reward: float  # NaN where no function applies
    count: int = 1  # completions per problem
    timed_out: int = 0  # comparisons of answers without a result, which count as wrong

    def __str__(self) -> str:
        text = (
            f"held-out accuracy {self.accuracy:.1%} (95 %: {self.low:.1%} to {self.high:.1%}) of "
            f"{len(self.answers) // self.count}"
        )
        if not math.isnan(self.reward):
            text += f", reward {self.reward:.2f}"
        if self.timed_out:
            text += f"; {self.timed_out} comparisons had no result in time and count as wrong"
        return text

    def summary(self, step: int) -> dict[str, Any]:
        """The row of `evaluations.jsonl`."""
        return {"step": step, **self._numbers()}

    def write(self, folder: Path, step: int, samples: Evaluation | None = None) -> None:
        """Adds the evaluation after `step`, with its answers, to a run's files.

        `samples`: another evaluation, by several completions per problem.
        """
        more = {"samples": {"count": samples.count, **samples._numbers()}} if samples else {}
        logs.append(folder / "evaluations.jsonl", {**self.summary(step), **more})
        for answer in self.answers:
            logs.append(folder / "answers.jsonl", {"step": step, **answer})
        if samples is not None:
            for i, answer in enumerate(samples.answers):
                row = {"step": step, "sample": i % samples.count, **answer}
                logs.append(folder / "answers.jsonl", row)

    def _numbers(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy, "low": self.low, "high": self.high, "reward": self.reward,
            "problems": len(self.answers) // self.count,
            **({"timed_out": self.timed_out} if self.timed_out else {}),
        }  # fmt: skip


def accuracy_of(answers: Sequence[dict[str, Any]], count: int = 1, late: int = 0) -> Evaluation:
    """Sums up answers, `count` per problem, each with `correct` and `reward`.

    The interval is over problems, as completions of a problem are not independent.
    """
    groups = [answers[i : i + count] for i in range(0, len(answers), count)]
    shares = [sum(answer["correct"] for answer in group) / count for group in groups]
    rewards = [answer["reward"] for answer in answers if not math.isnan(answer["reward"])]
    reward = sum(rewards) / len(rewards) if rewards else math.nan
    return Evaluation(list(answers), *_mean_of(shares), reward, count, late)


def wilson_interval(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval (Wilson 1927), within [0, 1] and never of width 0."""
    share = successes / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    # Rounding may move an end to the wrong side of the share.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def _mean_of(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of values from 0 to 1, and its 95 % interval; Wilson's where all are 0 or 1."""
    mean, n = sum(values) / len(values), len(values)
    if set(values) <= {0.0, 1.0}:
        return mean, *wilson_interval(round(sum(values)), n)
    if n == 1:  # the spread is unknown
        return mean, 0.0, 1.0
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    half = 1.96 * math.sqrt(variance / n)
    return mean, max(0.0, mean - half), min(1.0, mean + half)

"""How many held-out problems were answered right, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Evaluation:
    """Of one answer a problem."""

    answers: list[dict[str, Any]]
    accuracy: float
    low: float  # the 95 % interval
    high: float
    reward: float

    def __str__(self) -> str:
        return (
            f"held-out accuracy {self.accuracy:.1%} (95 %: {self.low:.1%} to {self.high:.1%}) of "
            f"{len(self.answers)}, reward {self.reward:.2f}"
        )

    def summary(self, step: int) -> dict[str, Any]:
        """A row of `evaluations.jsonl`."""
        return {
            "step": step, "accuracy": self.accuracy, "low": self.low, "high": self.high,
            "reward": self.reward, "problems": len(self.answers),
        }  # fmt: skip


def accuracy_of(answers: Sequence[dict[str, Any]]) -> Evaluation:
    """Of answers with `right` and `reward`."""
    count, right = len(answers), sum(answer["right"] for answer in answers)
    low, high = wilson_interval(right, count)
    reward = sum(answer["reward"] for answer in answers) / count
    return Evaluation(list(answers), right / count, low, high, reward)


def wilson_interval(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval (Wilson 1927), which stays in [0, 1] and has a width at 0 and at 1."""
    share = successes / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    # Rounding may put an end on the wrong side of the share itself.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))

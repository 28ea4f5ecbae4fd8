"""Accuracy on held-out problems, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from . import ranks
from .config import TrainingConfig
from .data import Problem
from .rewards import Reward, reward_table, weighted_sum
from .rollout import Sampler


@dataclass(frozen=True)
class Evaluation:
    """Held-out accuracy with its 95 % interval, one completion per problem."""

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
        """The row of `evaluations.jsonl`."""
        return {
            "step": step, "accuracy": self.accuracy, "low": self.low, "high": self.high,
            "reward": self.reward, "problems": len(self.answers),
        }  # fmt: skip


def evaluate(
    problems: Sequence[Problem], sampler: Sampler, rewards: Mapping[str, Reward],
    is_correct: Callable[[str, str], bool], config: TrainingConfig, accelerator: Accelerator,
) -> Evaluation:  # fmt: skip
    """Answers each problem once, at `config.eval_temperature`; processes share the work."""
    world, rank = accelerator.num_processes, accelerator.process_index
    each = math.ceil(len(problems) / world)
    # Equally many per process; of those that come twice the second is dropped at the end.
    mine = [problems[i % len(problems)] for i in range(rank * each, (rank + 1) * each)]
    size = max(1, config.prompts_per_step // world * config.num_generations)
    answers = []
    for start in range(0, each, size):
        some = mine[start : start + size]
        completions = sampler(some, 1, config.eval_temperature)
        texts = sampler.texts(completions)
        table = torch.tensor(reward_table(rewards, some, texts), dtype=torch.float64)
        totals = weighted_sum(table, config.reward_weights).tolist()
        rows = zip(some, texts, table.tolist(), totals, completions, strict=True)
        for problem, text, values, total, done in rows:
            answers.append({
                "prompt": problem["prompt"], "completion": text, "answer": problem["answer"],
                "correct": is_correct(text, str(problem["answer"])), "ended": done.ended,
                "reward": total, "rewards": dict(zip(rewards, values, strict=True)),
            })  # fmt: skip
    answers = ranks.reduce(accelerator, answers, lambda parts: [a for part in parts for a in part])
    return accuracy_of(answers[: len(problems)])


def accuracy_of(answers: Sequence[dict[str, Any]]) -> Evaluation:
    """Sums up answers, each of which has `correct` and `reward`."""
    count, correct = len(answers), sum(answer["correct"] for answer in answers)
    low, high = wilson_interval(correct, count)
    reward = sum(answer["reward"] for answer in answers) / count
    return Evaluation(list(answers), correct / count, low, high, reward)


def wilson_interval(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval (Wilson 1927), which stays in [0, 1] and has a width at both ends."""
    share = successes / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    # Rounding may move an end to the wrong side of the share itself.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))

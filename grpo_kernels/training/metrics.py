"""Metrics of micro-batches, updates and processes, merged into those of a step; accuracy."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.sequences import masked_quantile
from .rewards import weighted_sum
from .samples import Samples


class Clock:
    """Seconds that the parts of a step took, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] += time.perf_counter() - start


def of_samples(
    samples: Samples, names: Sequence[str], weights: Sequence[float], group_size: int,
    gather: Callable[[Tensor], Tensor],
) -> dict[str, float]:  # fmt: skip
    """Metrics of a rollout, over all processes.

    Args:
        samples: those of this process.
        names: of the reward functions.
        weights: of the reward functions; empty: 1 each.
        group_size: completions per prompt.
        gather: returns the rows of all processes.
    """
    rewards = gather(samples.rewards)
    lengths = gather(torch.tensor(samples.sampled_lengths).double())
    ended = gather(torch.tensor([float(c.ended) for c in samples.completions]))
    total = weighted_sum(rewards, weights)
    groups = total.view(-1, group_size)
    row = {"reward": float(total.mean()), "reward_std": float(groups.std(1).mean())}
    for name, column in zip(names, rewards.T, strict=True):
        row[f"reward/{name}"] = float(column.nanmean())
    if samples.correct:
        correct = gather(torch.tensor(samples.correct).double())
        row["accuracy"] = float(correct.mean())
        levels = gather(torch.tensor(samples.levels).double())
        for level in sorted(set(levels[~levels.isnan()].tolist())):
            row[f"accuracy/level_{level:g}"] = float(correct[levels == level].mean())
    row["groups_equal"] = float((groups.amax(1) == groups.amin(1)).double().mean())
    row["completion_length"] = float(lengths.mean())
    row["truncated"] = 1 - float(ended.mean())
    return row


def of_support(sizes: Tensor) -> dict[str, float]:
    """Metrics of the supports of a rollout, of which `sizes` are those of the kept sets."""
    if not len(sizes):
        return {}
    sizes = sizes.double()
    return {
        "support/mean": float(sizes.mean()),
        "support/p99": float(masked_quantile(sizes, torch.ones_like(sizes), 0.99)),
        "support/singletons": float((sizes == 1).double().mean()),
    }


# Known of the whole rollout already; and a count of what the trainer does not permit.
_NOT_MERGED = {"support/mean", "support/p99", "support/singletons", "support/fallback"}


def merge_micro_batches(
    parts: Sequence[Mapping[str, Tensor]], gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Merges the metrics of an update's micro-batches: means over tokens, and extremes.

    `parts` are 0-d tensors by name, equally many on each process; `gather` returns the rows of all.
    """
    names = sorted({name for part in parts for name in part} - _NOT_MERGED)
    absent = torch.zeros((), device=parts[0]["tokens"].device)
    values = torch.stack([
        torch.stack([part.get(name, absent).float() for name in names]) for part in parts
    ])  # fmt: skip
    rows = gather(values).double()
    tokens = rows[:, names.index("tokens")]
    merged = {"tokens": float(tokens.sum())}
    if "ce_nll" in names:
        count, mean_nll = (rows[:, names.index(name)] for name in ("ce_tokens", "ce_nll"))
        merged["ce_nll"] = float((count * mean_nll).sum() / count.sum().clamp(min=1))
    rows, tokens = rows[tokens > 0], tokens[tokens > 0]
    for name, column in zip(names, rows.T, strict=True):
        if name == "tokens" or name.startswith("ce_") or not len(column):
            continue
        if reducer_for(name) is mean:
            merged[name] = float((column * tokens).sum() / tokens.sum())
        else:
            merged[name] = reducer_for(name)(column.tolist())
    if "ess" in merged:
        # (sum r)^2 / (N sum r^2), from the same of each part.
        ratio, ess = (rows[:, names.index(name)] for name in ("ratio_mean", "ess"))
        squares = (tokens * ratio**2 / ess).sum()
        merged["ess"] = float((tokens * ratio).sum() ** 2 / (tokens.sum() * squares))
    return merged


def merge_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merges the metrics of a rollout's updates; one that some lack is averaged over the rest."""
    row = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        row[name] = sum(values) if name == "tokens" else reducer_for(name)(values)
    return row


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def reducer_for(name: str) -> Callable[[Sequence[float]], float]:
    """The function that merges values of a metric with this name: the mean, or an extreme."""
    last = name.replace("/", "_").rsplit("_", 1)[-1]
    return {"max": max, "min": min}.get(last, mean)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Columns of problems by whose values accuracy is told apart.
GROUPS = ("held_out", "level")


@dataclass(frozen=True)
class Evaluation:
    """Held-out accuracy with its 95 % interval, one completion per problem."""

    answers: list[dict[str, Any]]
    accuracy: float
    low: float  # the 95 % interval
    high: float
    reward: float

    def __str__(self) -> str:
        told = [
            f"held-out accuracy {self.accuracy:.1%} (95 %: {self.low:.1%} to {self.high:.1%}) of "
            f"{len(self.answers)}, reward {self.reward:.2f}"
        ]
        for column, parts in self.parts.items():
            shares = (f"{value} {part.accuracy:.1%}" for value, part in parts.items())
            told.append(f"{column}: {', '.join(shares)}")
        return "; ".join(told)

    @property
    def parts(self) -> dict[str, dict[str, Evaluation]]:
        """By column of `GROUPS`, the answers to problems with each of its values."""
        found: dict[str, dict[str, Evaluation]] = {}
        for column in GROUPS:
            values: dict[str, list[dict[str, Any]]] = {}
            for answer in self.answers:
                if answer.get(column) is not None:
                    values.setdefault(str(answer[column]), []).append(answer)
            if len(values) > 1:
                found[column] = {value: accuracy_of(values[value]) for value in sorted(values)}
        return found

    def summary(self, step: int) -> dict[str, Any]:
        """The row of `evaluations.jsonl`."""
        by = {
            column: {value: part._numbers() for value, part in parts.items()}
            for column, parts in self.parts.items()
        }
        return {"step": step, **self._numbers(), **({"by": by} if by else {})}

    def _numbers(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy, "low": self.low, "high": self.high, "reward": self.reward,
            "problems": len(self.answers),
        }  # fmt: skip


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

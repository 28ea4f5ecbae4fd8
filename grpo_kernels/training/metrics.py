"""Metrics of micro-batches, updates and processes, merged into those of a step; accuracy."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from statistics import fmean as mean
from typing import Any

import torch
from torch import Tensor

from ..base.sequences import masked_quantile
from . import ranks
from .config import TrainingConfig
from .data import Problem
from .rewards import weighted_sum
from .run import Run
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
        self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Counts more seconds for a part, which is not told where there are none."""
        if seconds:
            self.seconds[name] += seconds


def of_step(
    samples: Samples, names: Sequence[str], updates: Mapping[str, float], run: Run, clock: Clock
) -> dict[str, Any]:
    """A step's row of metrics, over all processes.

    Args:
        samples: those of this process.
        names: of the reward functions.
        updates: metrics of the step's updates.
        run: whose step it is.
        clock: has the step's seconds.
    """
    c, accelerator = run.config, run.accelerator
    gather = partial(ranks.gather, accelerator)
    row = {"step": run.step, **of_samples(samples, names, c, gather)}
    if samples.replay_support:
        row |= of_support(ranks.reduce(accelerator, samples.support_sizes, torch.cat))
    row |= updates
    if run.micro_batch_size < c.micro_batch_size:  # since memory has run out
        row["micro_batch_size"] = run.micro_batch_size
    if run.bad_updates:
        row["bad_updates"] = run.bad_updates
    row["seconds"] = sum(clock.seconds.values())
    row |= {f"seconds/{name}": value for name, value in clock.seconds.items()}
    return row | {"peak_memory_gib": peak_memory(accelerator.device) / 2**30}


def of_samples(
    samples: Samples, names: Sequence[str], config: TrainingConfig,
    gather: Callable[[Tensor], Tensor],
) -> dict[str, float]:  # fmt: skip
    """Metrics of a rollout; `gather` returns the rows of all processes."""
    rewards = gather(samples.rewards)
    sampled = [sum(c.sampled_flags) for c in samples.completions]
    lengths = gather(torch.tensor(sampled, dtype=torch.float64))
    ended = gather(torch.tensor([c.ended for c in samples.completions], dtype=torch.float32))
    # Completions that no function scored are in no figure.
    groups = weighted_sum(rewards, config.reward_weights).view(-1, config.num_generations)
    squares = ((groups - groups.nanmean(1, keepdim=True)) ** 2).nansum(1)
    std = (squares / (groups.isfinite().sum(1) - 1).clamp(min=0)).sqrt()  # NaN of fewer than 2
    row = {"reward": float(groups.nanmean()), "reward_std": float(std.nanmean())}
    for name, column in zip(names, rewards.T, strict=True):
        row[f"reward/{name}"] = float(column.nanmean())
    if samples.correct:
        correct = gather(torch.tensor(samples.correct, dtype=torch.float64))
        row["accuracy"] = float(correct.mean())
        known = [_level_of(samples.problems[i]) for i in samples.prompt_of]
        levels = gather(torch.tensor(known, dtype=torch.float64))
        for level in sorted(set(levels[levels.isfinite()].tolist())):
            row[f"accuracy/level_{level:g}"] = float(correct[levels == level].mean())
    largest, smallest = groups.nan_to_num(-math.inf).amax(1), groups.nan_to_num(math.inf).amin(1)
    row["groups_equal"] = float((largest <= smallest).double().mean())
    late = gather(torch.tensor([float(samples.timed_out)], dtype=torch.float64)).sum()
    if late:
        row["answers_timed_out"] = float(late)
    row["completion_length"] = float(lengths.mean())
    row["truncated"] = 1 - float(ended.mean())
    return row


def _level_of(problem: Problem) -> float:
    """The level of a problem; NaN where that is no number."""
    level = problem.get("level")
    if isinstance(level, bool) or not isinstance(level, Real):
        return math.nan
    return float(level)


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


# What is no mean over the tokens of a micro-batch.
_SUMMED = {"tokens", "ce_loss", "ce_tokens", "ce_nll"}
# Known of the whole rollout already; and a count of what the trainer does not permit.
_NOT_MERGED = {"support/mean", "support/p99", "support/singletons", "support/fallback"}


def merge_micro_batches(
    parts: Sequence[Mapping[str, Tensor]], gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Merges the metrics of an update's micro-batches: means over tokens, and extremes.

    `parts` are 0-d tensors by name, equally many on each process; `gather` returns the rows of all.
    """
    names = sorted({name for part in parts for name in part} - _NOT_MERGED)
    absent = torch.zeros((), dtype=torch.float32, device=parts[0]["tokens"].device)
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
        if name in _SUMMED or not len(column):
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

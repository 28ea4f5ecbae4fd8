"""Metrics of a run: a registry of how each is merged, and the row of a step."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ... import GRPOLossConfig
from ...base.sequences import masked_quantile
from ...loss.metrics import TAKEN, TAKEN_PREFIXES
from ..config import TrainingConfig
from . import ranks

if TYPE_CHECKING:
    from ..problems.data import Problem
    from ..step.samples import Samples
    from .run import Run

PER, MERGE = ("token", "completion"), ("mean", "max", "min", "sum")


@dataclass(frozen=True)
class Metric:
    """A column of a step's row, and how its values are merged.

    Args:
        name: the column's.
        per: `"token"` or `"completion"`: what a loss's mean over a micro-batch is a mean over, by
            the number of which these means are averaged.
        merge: `"mean"`, `"max"`, `"min"` or `"sum"` of micro-batches, updates and processes.
        chart: the title of its picture in `report.html`, which metrics may share; None: no picture.
    """

    name: str
    per: str = "completion"
    merge: str = "mean"
    chart: str | None = None


@dataclass
class _Total:
    """Sums and extremes of values."""

    count: float = 0.0
    weighted: float = 0.0
    largest: float = -math.inf
    smallest: float = math.inf

    def add(self, value: float, count: float) -> None:
        """Counts a value so many times."""
        self.merge(_Total(count, value * count, value, value))

    def merge(self, other: _Total) -> None:
        """Adds another total; NaN stays."""
        self.count, self.weighted = self.count + other.count, self.weighted + other.weighted
        if other.largest > self.largest or math.isnan(other.largest):
            self.largest = other.largest
        if other.smallest < self.smallest or math.isnan(other.smallest):
            self.smallest = other.smallest

    def result(self, merge: str) -> float:
        """NaN of no value."""
        if not self.count:
            return math.nan
        return {
            "mean": self.weighted / self.count, "sum": self.weighted, "max": self.largest,
            "min": self.smallest,
        }[merge]  # fmt: skip


class Metrics:
    """The metrics of a run, by name; losses, rewards, rollouts and users add to them.

    One that is not registered is a mean, `longest_max` as well: no name says how to merge.
    """

    def __init__(self, config: GRPOLossConfig) -> None:
        # A loss averages its own metrics over sequences where it tells these apart.
        self._own_per = "completion" if config.loss.needs_sequences else "token"
        self._metrics = {metric.name: metric for metric in _library_metrics(config)}
        self._totals: dict[str, _Total] = {}

    def register(self, *metrics: Metric) -> None:
        """Adds metrics, or replaces those of the same name.

        Raises:
            ValueError: a name of the library's, or a `per` or `merge` that does not exist.
        """
        for metric in metrics:
            _check_name(metric.name)
            for option, value, known in (("per", metric.per, PER), ("merge", metric.merge, MERGE)):
                if value not in known:
                    raise ValueError(
                        f"{option}: expected one of {', '.join(known)} for {metric.name}; got "
                        f"{value!r}"
                    )
            self._metrics[metric.name] = metric

    def __contains__(self, name: str) -> bool:
        """True for a registered metric."""
        return name in self._metrics

    def add(self, name: str, values: Iterable[float] | Tensor) -> None:
        """Adds values of this process's tokens or completions to the step; NaN is left out.

        Raises:
            ValueError: a name of the library's.
        """
        _check_name(name)
        self._add(name, values)

    def _add(self, name: str, values: Iterable[float] | Tensor) -> None:
        total = self._totals.setdefault(name, _Total())
        numbers = values.flatten().tolist() if isinstance(values, Tensor) else values
        for value in map(float, numbers):
            if not math.isnan(value):
                total.add(value, 1.0)

    def clear(self) -> None:
        """Forgets what was added since the last row, by an evaluation, say."""
        self._totals = {}

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Returns what was added to the step in all processes, merged, and forgets it."""
        totals, self._totals = self._totals, {}
        return self._results(ranks.reduce(accelerator, totals, _merged))

    def merge_micro_batches(
        self, parts: Sequence[Mapping[str, Tensor]], completions: Sequence[int],
        accelerator: Accelerator,
    ) -> dict[str, float]:  # fmt: skip
        """Merges the metrics of an update's micro-batches, over all processes.

        Args:
            parts: 0-d tensors by name, as a loss returns them, per micro-batch.
            completions: the number of completions with a token in each.
            accelerator: of the processes, which make this call together.
        """
        numbers = iter(torch.stack([x.float() for part in parts for x in part.values()]).tolist())
        totals: dict[str, _Total] = {}
        for part, count in zip(parts, completions, strict=True):
            values = {name: next(numbers) for name in part}
            counts = {
                "token": values["tokens"], "completion": count,
                "ce_token": values.get("ce_tokens", 0.0),
            }  # fmt: skip
            if "ess" in values:  # (mean r)^2 / mean r^2, of which the latter can be merged
                ratio, ess = values["ratio_mean"], values.pop("ess")
                values[_SQUARES] = ratio**2 / ess if ess else math.inf
            for name, value in values.items():
                metric = self._metrics.get(name) or Metric(name, self._own_per)
                if name not in _HIDDEN and counts[metric.per]:
                    times = 1.0 if metric.merge == "sum" else counts[metric.per]
                    totals.setdefault(name, _Total()).add(value, times)
        row = {"tokens": 0.0} | self._results(ranks.reduce(accelerator, totals, _merged))
        if _SQUARES in row:
            squares = row.pop(_SQUARES)
            row["ess"] = row["ratio_mean"] ** 2 / squares if squares else math.nan
        return row

    def merge_updates(self, updates: Iterable[Mapping[str, float]]) -> dict[str, float]:
        """Merges updates, each of which counts once; one that some lack is of the others."""
        totals: dict[str, _Total] = {}
        for update in updates:
            for name, value in update.items():
                totals.setdefault(name, _Total()).add(value, 1.0)
        return self._results(totals)

    def charts(self) -> dict[str, list[str]]:
        """Returns the names of the metrics in each picture of the report, by its title."""
        titles: dict[str, list[str]] = {}
        for metric in self._metrics.values():
            if metric.chart is not None:
                titles.setdefault(metric.chart, []).append(metric.name)
        return titles

    def _results(self, totals: Mapping[str, _Total]) -> dict[str, float]:
        known = self._metrics
        return {
            name: total.result(known[name].merge if name in known else "mean")
            for name, total in totals.items()
        }


def _check_name(name: str) -> None:
    if name in TAKEN or name.startswith(TAKEN_PREFIXES):
        raise ValueError(f"metrics: expected a name that the library does not use; got {name!r}")


def _merged(everywhere: Iterable[Mapping[str, _Total]]) -> dict[str, _Total]:
    """Merges the totals of all processes."""
    merged: dict[str, _Total] = {}
    for totals in everywhere:
        for name, total in totals.items():
            merged.setdefault(name, _Total()).merge(total)
    return merged


# The mean square of a micro-batch's ratios.
_SQUARES = "sampling/ratio_squares"
# Values of a micro-batch that a row does not have, or has of the whole rollout.
_HIDDEN = {"ce_loss", "ce_tokens", "support/mean", "support/p99", "support/singletons"}


def _library_metrics(config: GRPOLossConfig) -> Iterator[Metric]:
    """The library's own metrics that are no means over completions or updates."""
    for name in ("tokens", "answers_timed_out"):
        yield Metric(name, "token", "sum")
    by_ratio = "completion" if config.ratio_level == "sequence" else "token"
    by_weight = "completion" if config.corrects_sequences else "token"
    gap, weight = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
    for name in ("ratio_mean", "kl", "entropy", "zero_gradient", "off_policy_dropped",
                 "entropy_kept", "support/gathered", f"{gap}/mean", _SQUARES):  # fmt: skip
        yield Metric(name, "token")
    for name in ("clip_low", "clip_high", "clip_ratio/low_mean", "clip_ratio/high_mean",
                 "clip_ratio/region_mean"):  # fmt: skip
        yield Metric(name, by_ratio)
    yield Metric(f"{weight}/mean", by_weight)
    yield Metric("ce_nll", "ce_token")
    for name in ("ratio_max", "kl_max", "clip_ratio/high_max", f"{gap}/max", f"{weight}/max",
                 "sampler_gap_max"):  # fmt: skip
        yield Metric(name, "token", "max")
    for name in ("clip_ratio/low_min", f"{weight}/min"):
        yield Metric(name, "token", "min")


class Clock:
    """Seconds that the parts of a step took, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = time.perf_counter() - start


def step_row(
    samples: Samples, labels: Sequence[str], updates: Iterable[Mapping[str, float]], run: Run,
    clock: Clock,
) -> dict[str, Any]:  # fmt: skip
    """A step's row of metrics, over all processes.

    Args:
        samples: those of this process.
        labels: of the reward functions.
        updates: metrics of the step's updates.
        run: whose step it is.
        clock: has the step's seconds.
    """
    add_samples(run.metrics, samples, labels, run.config)
    row = {"step": run.step, **run.metrics.take(run.accelerator)}
    if samples.replay_support:
        row |= support_metrics(ranks.reduce(run.accelerator, samples.support_sizes, torch.cat))
    row |= run.metrics.merge_updates(updates)
    if run.micro_batch_size < run.config.micro_batch_size:  # since memory has run out
        row["micro_batch_size"] = run.micro_batch_size
    if run.bad_updates:
        row["bad_updates"] = run.bad_updates
    row["seconds"] = sum(clock.seconds.values())
    row |= {f"seconds/{name}": value for name, value in clock.seconds.items()}
    return row | {"peak_memory_gib": peak_memory(run.accelerator.device) / 2**30}


def add_samples(
    metrics: Metrics, samples: Samples, labels: Sequence[str], config: TrainingConfig
) -> None:
    """Adds what is known of a rollout before its updates.

    Completions that no function scored are in no figure.
    """
    groups = samples.rewards_total.view(-1, config.num_generations)
    squares = ((groups - groups.nanmean(1, keepdim=True)) ** 2).nansum(1)
    std = (squares / (groups.isfinite().sum(1) - 1).clamp(min=0)).sqrt()  # NaN of fewer than 2
    metrics._add("reward", samples.rewards_total)
    metrics._add("reward_std", std)
    for label, column in zip(labels, samples.rewards.T, strict=True):
        metrics._add(f"reward/{label}", column)
    largest, smallest = groups.nan_to_num(-math.inf).amax(1), groups.nan_to_num(math.inf).amin(1)
    metrics._add("groups_equal", largest <= smallest)
    metrics._add("completion_length", [sum(c.sampled_flags) for c in samples.completions])
    metrics._add("truncated", [not c.ended for c in samples.completions])
    if samples.correct:
        metrics._add("accuracy", samples.correct)
        for index, correct in zip(samples.prompt_of, samples.correct, strict=True):
            level = _level_of(samples.problems[index])
            if math.isfinite(level):
                metrics._add(f"accuracy/level_{level:g}", [correct])
    if samples.timed_out:
        metrics._add("answers_timed_out", [samples.timed_out])


def _level_of(problem: Problem) -> float:
    """The level of a problem; NaN where that is no number."""
    level = problem.get("level")
    if isinstance(level, bool) or not isinstance(level, Real):
        return math.nan
    return float(level)


def support_metrics(sizes: Tensor) -> dict[str, float]:
    """Metrics of the supports of a rollout, of which `sizes` are those of the kept sets."""
    if not len(sizes):
        return {}
    sizes = sizes.cpu().double()
    return {
        "support/mean": float(sizes.mean()),
        "support/p99": float(masked_quantile(sizes, torch.ones_like(sizes), 0.99)),
        "support/singletons": float((sizes == 1).double().mean()),
    }


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        from psutil import Process

        memory = Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss)
    # In KiB; in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

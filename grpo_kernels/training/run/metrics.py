"""Metrics of a run: how each is merged, the values of a step, and its seconds."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ...loss.metrics import TAKEN, TAKEN_PREFIXES
from . import ranks

# Each function propagates NaN.
MERGES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean, "max": torch.amax, "min": torch.amin, "sum": torch.sum,
}  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """A column of a step's row, and how its values are merged.

    Args:
        name: the column's.
        merge: `"mean"`, `"max"`, `"min"` or `"sum"` of added values, updates and processes.
        chart: the title of its chart in `report.html`, which metrics may share; None: its name.
        unit: of its values, such as "s" or "tokens"; with "%" the page shows a share of 0.25 as
            25 %.
    """

    name: str
    merge: str = "mean"
    chart: str | None = None
    unit: str = ""


_GAP, _WEIGHT = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
# The library's metrics that are not means.
_LIBRARY = {
    **dict.fromkeys(("tokens", "answers_timed_out"), "sum"),
    **dict.fromkeys(("ratio_max", "kl_max", "sampler_gap_max", "clip_ratio/high_max",
                     f"{_GAP}/max", f"{_WEIGHT}/max"), "max"),
    **dict.fromkeys(("clip_ratio/low_min", f"{_WEIGHT}/min"), "min"),
}  # fmt: skip


class Metrics:
    """The metrics of a run, by name; losses, rewards, rollouts and users add to them.

    A metric that is not registered is a mean, whatever its name.
    """

    def __init__(self) -> None:
        self._metrics = {name: Metric(name, merge) for name, merge in _LIBRARY.items()}
        self._values: dict[str, list[float]] = {}

    def register(self, *metrics: Metric) -> None:
        """Adds metrics; replaces a metric of the same name.

        Raises:
            ValueError: a name of the library's metrics, or a `merge` that does not exist.
            TypeError: a `chart` or a `unit` that is not a text.
        """
        for metric in metrics:
            _check_name(metric.name)
            if metric.merge not in MERGES:
                raise ValueError(
                    f"merge: expected one of {', '.join(MERGES)} for {metric.name}; got "
                    f"{metric.merge!r}"
                )
            for text, value in (("chart", metric.chart or ""), ("unit", metric.unit)):
                if not isinstance(value, str):
                    raise TypeError(f"{text}: expected a text for {metric.name}; got {value!r}")
            self._metrics[metric.name] = metric

    def add(self, name: str, values: Iterable[float] | Tensor) -> None:
        """Adds values of this process's tokens or completions to the step; NaN is ignored.

        Raises:
            ValueError: a name of the library's metrics.
        """
        _check_name(name)
        self.add_own(name, values)

    def add_own(self, name: str, values: Iterable[float] | Tensor) -> None:
        """Adds values of the library's metrics, whose names `add` refuses."""
        numbers = values.flatten().tolist() if isinstance(values, Tensor) else map(float, values)
        self._values.setdefault(name, []).extend(x for x in numbers if not math.isnan(x))

    def clear(self) -> None:
        """Drops the values since the last row, such as an evaluation's."""
        self._values = {}

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Returns the step's values of all processes, merged, and drops them."""
        values, self._values = self._values, {}
        # Each process merges its values first; means are then weighted by counts.
        local = {name: (self._merged(name, x), len(x)) for name, x in values.items()}
        parts = ranks.reduce(accelerator, [local], lambda lists: [one for (one,) in lists])
        row = dict[str, float]()
        for name in dict.fromkeys(name for part in parts for name in part):
            reported = [part[name] for part in parts if name in part and part[name][1]]
            total = sum(count for _, count in reported)
            if self._merge_of(name) == "mean" and reported:
                row[name] = sum(mean * count for mean, count in reported) / total
            else:
                row[name] = self._merged(name, [x for x, _ in reported])
        return row

    def merge_updates(self, updates: Iterable[Mapping[str, float]]) -> dict[str, float]:
        """Merges the metrics of updates, which count once each; some may lack a metric."""
        values: dict[str, list[float]] = {}
        for update in updates:
            for name, value in update.items():
                values.setdefault(name, []).append(value)
        return {name: self._merged(name, x) for name, x in values.items()}

    def by_user(self) -> dict[str, dict[str, str | None]]:
        """Returns the chart and the unit of each metric that the user registered, by name."""
        registered = (metric for name, metric in self._metrics.items() if name not in _LIBRARY)
        return {metric.name: {"chart": metric.chart, "unit": metric.unit} for metric in registered}

    def _merge_of(self, name: str) -> str:
        return self._metrics[name].merge if name in self._metrics else "mean"

    def _merged(self, name: str, values: list[float]) -> float:
        """The values merged by the metric's rule; NaN without values."""
        if not values:
            return math.nan
        numbers = torch.tensor(values, dtype=torch.float64, device="cpu")
        return float(MERGES[self._merge_of(name)](numbers))


def _check_name(name: str) -> None:
    if name in TAKEN or name.startswith(TAKEN_PREFIXES):
        raise ValueError(f"metrics: expected a name that the library does not use; got {name!r}")


class Clock:
    """Seconds of a step: its parts by name, and head and loss within its updates."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self._spans: list[tuple[Any, Any]] = []  # of head and loss

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = time.perf_counter() - start

    @contextmanager
    def head(self) -> Iterator[None]:
        """Counts a forward of head and loss."""
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def head_backward(self, loss: Tensor, hidden: Tensor) -> None:
        """Counts the backward from the loss to these states, once it runs.

        Counts nothing if the states need no gradient, as with a frozen body.
        """
        if loss.requires_grad and hidden.requires_grad:
            starts: list[Any] = []
            loss.register_hook(lambda _: starts.append(self._now()))
            hidden.register_hook(lambda _: self._spans.append((starts.pop(), self._now())))

    @property
    def head_seconds(self) -> float:
        """Seconds of head and loss, in forwards and backwards; read it after the step's parts."""
        if self.device.type == "cuda":
            return sum(start.elapsed_time(end) for start, end in self._spans) / 1000
        return sum(end - start for start, end in self._spans)

    def _now(self) -> Any:
        """Returns the time, or on CUDA an event in the stream, without waiting."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def peak_memory(device: torch.device) -> int:
    """The largest number of bytes that this process has had allocated so far."""
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

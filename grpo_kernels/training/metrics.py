"""Numbers of micro-batches, updates and processes, put together into those of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Clock:
    """Seconds of the parts of a step, by name."""

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


def of_update(
    parts: Sequence[Mapping[str, Tensor]], gather: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """One dict of the micro-batches' of all processes: means by tokens, and extremes.

    `parts` are 0-d tensors by name, as many on each process; `gather` gives the rows of all.
    """
    names = sorted({name for part in parts for name in part})
    absent = torch.zeros((), device=parts[0]["tokens"].device)
    values = torch.stack([
        torch.stack([part.get(name, absent).float() for name in names]) for part in parts
    ])  # fmt: skip
    rows = gather(values).double()
    tokens = rows[:, names.index("tokens")]
    rows, tokens = rows[tokens > 0], tokens[tokens > 0]
    merged = {"tokens": float(tokens.sum())}
    for name, column in zip(names, rows.T, strict=True):
        if name == "tokens" or not len(column):
            continue
        if together(name) is mean:
            merged[name] = float((column * tokens).sum() / tokens.sum())
        else:
            merged[name] = together(name)(column.tolist())
    if "ess" in merged:
        # (sum r)^2 / (N sum r^2), of the parts' own.
        ratio, ess = (rows[:, names.index(name)] for name in ("ratio_mean", "ess"))
        squares = (tokens * ratio**2 / ess).sum()
        merged["ess"] = float((tokens * ratio).sum() ** 2 / (tokens.sum() * squares))
    return merged


def of_step(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the updates on one rollout; what some of them do not have is of the others."""
    row = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        row[name] = sum(values) if name == "tokens" else together(name)(values)
    return row


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def together(name: str) -> Callable[[Sequence[float]], float]:
    """How values of this name are put together."""
    last = name.replace("/", "_").rsplit("_", 1)[-1]
    return {"max": max, "min": min}.get(last, mean)


def peak_memory(device: torch.device) -> int:
    """Bytes that this process held at most so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

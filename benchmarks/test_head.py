"""Compares time and memory of contenders, each in a process of its own: `pytest benchmarks`.

A test is a contender and a workload. A fresh process runs a step for its peak memory, another one
whose memory it keeps, as PyTorch does on a GPU, and then the timed ones. The loss and the gradients
of the second are compared with float64. A contender of this library that is wrong fails and has no
time; a peer's errors are reported, and a peer that raises one is skipped.

With `--benchmark-disable` that comparison is all, in this process.

`extra_info` of the JSON file: `peak_bytes`, the memory of forward and backward beyond the inputs;
`floor_seconds`, what the bare GEMMs took in another process just before and after; `x_floor`, the
median time over that; the errors and their limit; tokens and contender.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checks import TOLERANCE, right, truth_of
from benchmarks.contenders import CONTENDERS, OURS, contenders_of
from benchmarks.measure import (
    FLOOR,
    fresh_process,
    kept_errors,
    kept_step,
    measure_memory,
    reason,
    stored,
)
from benchmarks.workloads import DEMO_H, DEMO_V, QWEN_V, Workload, make

# name: (N, V, H) on a CPU; a GPU has one for all
SHAPES = {
    "rollout": (512, DEMO_V, DEMO_H),
    "dense": (256, DEMO_V, DEMO_H),
    "frozen": (256, DEMO_V, DEMO_H),
    "nucleus": (256, DEMO_V, DEMO_H),
    "two-heads": (256, DEMO_V, DEMO_H),
}
CUDA_SHAPE = (4096, QWEN_V, 896)


class Group:
    """A stored workload, and the times of its bare GEMMs."""

    def __init__(
        self, w: Workload, path: Path, device: torch.device, process: ProcessPoolExecutor
    ) -> None:
        self.path, self.device, self.process = path, device, process
        self.about, self.tokens, self.limit = w.describe(), w.tokens, TOLERANCE[w.hidden.dtype]
        self.contenders = contenders_of(w)
        self.floors: list[float] = []

    def floor(self) -> float:
        """Returns the seconds of the bare GEMMs."""
        return self.process.submit(kept_step, FLOOR, self.path, self.device).result()[0]

    def floor_around(self) -> float:
        """Returns the mean of the bare GEMMs before a contender and after it."""
        self.floors.append(self.floor())
        return statistics.mean(self.floors[-2:])


@pytest.fixture(scope="module", params=SHAPES)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    device = torch.device(request.config.getoption("--device"))
    cuda = device.type == "cuda"
    shape = request.config.getoption("--shape") or (CUDA_SHAPE if cuda else SHAPES[request.param])
    w = make(request.param, shape, device).to(torch.bfloat16 if cuda else torch.float32)
    truth = truth_of(w)
    with stored(w, truth) as path, fresh_process() as process:
        group = Group(w, path, device, process)
        del w, truth  # frees a GPU's memory
        # pytest-xdist turns times off, too.
        if not (
            request.config.getoption("benchmark_disable") or "PYTEST_XDIST_WORKER" in os.environ
        ):
            group.floor()  # not counted
            group.floors.append(group.floor())
        yield group


@pytest.mark.filterwarnings("ignore")  # Peers warn of the way in which they are called here.
@pytest.mark.parametrize("name", CONTENDERS)
def test_step(group: Group, name: str, benchmark: Any, request: pytest.FixtureRequest) -> None:
    absent = CONTENDERS[name].absent(group.device)
    if name not in group.contenders or absent:
        pytest.skip(absent or "no counterpart for this workload")
    benchmark.group = group.about
    try:
        measured(group, name, benchmark, request.config.getoption("--rounds"))
    except Exception as error:
        if name in OURS:
            raise
        pytest.skip(reason(error))
    if benchmark.stats:
        floor = group.floor_around()
        benchmark.extra_info |= {
            "contender": name, "tokens": group.tokens, "limit": group.limit,
            "floor_seconds": floor, "x_floor": benchmark.stats.stats.median / floor,
        }  # fmt: skip


def measured(group: Group, name: str, benchmark: Any, rounds: int) -> None:
    """Compares a contender with float64 and times it, unless it is ours and wrong."""
    arguments = name, group.path, group.device
    with nullcontext() if benchmark.disabled else fresh_process() as process:

        def run(function: Any, *arguments: Any) -> Any:
            if process is None:
                return function(*arguments)
            return process.submit(function, *arguments).result()

        peak_bytes = None if benchmark.disabled else run(measure_memory, *arguments)
        _, loss, _ = run(kept_step, *arguments)
        errors = run(kept_errors, group.path, loss)
        assert name not in OURS or right(errors, group.limit), f"wrong: {errors}"
        if not benchmark.disabled:
            benchmark.pedantic(run, (kept_step, *arguments), rounds=rounds)
            benchmark.extra_info |= {"errors": errors, "peak_bytes": peak_bytes}

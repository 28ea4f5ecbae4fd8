"""Compares time and memory of contenders, each in a process of its own: `pytest benchmarks`.

A test is a contender and a workload. Its loss and gradients are compared with float64 on a few
sequences, then the loss and the norms of a whole step. A contender of this library that is wrong
fails and has no time; a peer's errors are reported. A fresh process runs a step for its peak
memory, another one whose memory it keeps, as PyTorch does on a GPU, and then the timed ones.

With `--benchmark-disable` that first comparison is all, in this process.

`extra_info` of the JSON file: `peak_bytes`, the memory of forward and backward beyond the inputs;
`floor_seconds`, what the bare GEMMs took in another process just before and after; `x_floor`, the
median time over that; the errors and their limit; tokens and contender.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checks import (
    TOLERANCE,
    check,
    has_times,
    right,
    step_error,
    truth_of,
    whole_step,
)
from benchmarks.contenders import CONTENDERS, OURS, contenders_of
from benchmarks.measure import (
    FLOOR,
    fresh_process,
    kept_norms,
    kept_step,
    measure_memory,
    stored,
    take_turn,
)
from benchmarks.workloads import DEMO_H, DEMO_V, QWEN_V, Workload, make

# name: (N, V, H) on a CPU; a GPU has one for all
SHAPES = {
    "rollout": (1024, DEMO_V, DEMO_H),
    "dense": (384, DEMO_V, DEMO_H),
    "frozen": (384, DEMO_V, DEMO_H),
    "nucleus": (384, DEMO_V, DEMO_H),
    "two-heads": (384, DEMO_V, DEMO_H),
}
CUDA_SHAPE = (4096, QWEN_V, 896)


class Group:
    """A stored workload, and what its contenders are compared with."""

    def __init__(
        self, w: Workload, path: Path, device: torch.device, process: ProcessPoolExecutor
    ) -> None:
        self.path, self.device, self.process = path, device, process
        self.about, self.tokens, self.dtype = w.describe(), w.tokens, w.hidden.dtype
        self.contenders = contenders_of(w)
        self.truth = truth_of(w)
        self.expected: list[float] = []
        self.floors: list[float] = []

    def measure(self, w: Workload) -> None:
        """Computes what a whole step should give, and times the bare GEMMs."""
        self.expected, self.floors = whole_step(w), [self.floor()]

    def floor(self) -> float:
        """Returns the seconds of the bare GEMMs."""
        turn = FLOOR, self.path, self.device, "auto"
        return float(self.process.submit(take_turn, *turn).result()["seconds"])

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
    with stored(w) as path, fresh_process() as process:
        group = Group(w, path, device, process)
        # pytest-xdist turns times off, too.
        if not (
            request.config.getoption("benchmark_disable") or "PYTEST_XDIST_WORKER" in os.environ
        ):
            group.measure(w)
        del w  # frees a GPU's memory
        yield group


@pytest.mark.filterwarnings("ignore")  # Peers warn of the way in which they are called here.
@pytest.mark.parametrize("name", CONTENDERS)
def test_step(group: Group, name: str, benchmark: Any, request: pytest.FixtureRequest) -> None:
    absent = CONTENDERS[name].absent(group.device)
    if name not in group.contenders or absent:
        pytest.skip(absent or "no counterpart for this workload")
    errors = check(name, group.truth, "auto")
    if not has_times(name, status := errors.pop("status")):
        (pytest.fail if name in OURS else pytest.skip)(f"{status}: {errors}")
    if benchmark.disabled:
        return
    torch.compiler.reset()  # drops what was compiled for the shapes of the check
    step = name, group.path, group.device, "auto"
    with fresh_process() as process:

        def run(function: Any, *arguments: Any) -> Any:
            return process.submit(function, *arguments).result()

        peak_bytes = run(measure_memory, *step)
        result = [run(kept_step, *step), *run(kept_norms, group.path)]
        errors["step"] = step_error(result, group.expected)
        close = right([errors["step"]], group.dtype)
        assert name not in OURS or close, f"expected {group.expected}; got {result}"
        benchmark.group = group.about
        benchmark.pedantic(run, (kept_step, *step), rounds=request.config.getoption("--rounds"))
    floor = group.floor_around()
    known = {"contender": name, "tokens": group.tokens, "errors": errors}
    known["limit"] = TOLERANCE[group.dtype]
    benchmark.extra_info |= {**known, "peak_bytes": peak_bytes, "floor_seconds": floor}
    benchmark.extra_info["x_floor"] = benchmark.stats.stats.median / floor

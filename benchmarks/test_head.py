"""Compares time and memory of contenders, each in a process of its own: `pytest benchmarks`.

A test is a contender and a workload. Its loss and gradients are compared with float64 on a few
sequences, then the loss and the norms of a whole step. A contender of this library that is wrong
fails and has no time; a peer's errors are reported, and a peer that raises one is skipped. A fresh
process runs a step for its peak memory, another one whose memory it keeps, as PyTorch does on a
GPU, and then the timed ones.

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

from benchmarks.checks import TOLERANCE, check, has_times, right, step_error, truth_of, whole_step
from benchmarks.contenders import CONTENDERS, OURS, contenders_of
from benchmarks.measure import (
    FLOOR,
    fresh_process,
    kept_norms,
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
        self.floor()  # not counted
        self.expected, self.floors = whole_step(w), [self.floor()]

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
    errors = check(name, group.truth)
    if not has_times(name, status := errors.pop("status")):
        (pytest.fail if name in OURS else pytest.skip)(f"{status}: {errors}")
    if benchmark.disabled:
        return
    torch.compiler.reset()  # drops what was compiled for the shapes of the check
    benchmark.group = group.about
    try:
        rounds = request.config.getoption("--rounds")
        errors["step"], peak_bytes = measured(group, name, benchmark, rounds)
    except Exception as error:
        if name in OURS:
            raise
        pytest.skip(reason(error))
    floor = group.floor_around()
    benchmark.extra_info |= {
        "contender": name, "tokens": group.tokens, "errors": errors,
        "limit": TOLERANCE[group.dtype], "peak_bytes": peak_bytes, "floor_seconds": floor,
        "x_floor": benchmark.stats.stats.median / floor,
    }  # fmt: skip


def measured(group: Group, name: str, benchmark: Any, rounds: int) -> tuple[float, int]:
    """Times a contender; returns the error of a whole step, and its peak memory."""
    arguments = name, group.path, group.device
    with fresh_process() as process:

        def run(function: Any, *arguments: Any) -> Any:
            return process.submit(function, *arguments).result()

        peak_bytes = run(measure_memory, *arguments)
        result = [run(kept_step, *arguments)[1], *run(kept_norms, group.path)]
        error = step_error(result, group.expected)
        close = right([error], group.dtype)
        assert name not in OURS or close, f"expected {group.expected}; got {result}"
        benchmark.pedantic(run, (kept_step, *arguments), rounds=rounds)
    return error, peak_bytes

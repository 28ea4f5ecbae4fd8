"""Guards against slowdowns: measures the head's time in units of eager's, in turns with it.

    python -m pytest benchmarks --benchmark-storage=file://benchmarks/results/stored \
        --benchmark-compare='*/0001_two-cores' --benchmark-compare-fail=median:30%

compares with a stored run; `--benchmark-save=NAME` stores this one.

pytest-benchmark stores and compares what its timer returns. The timer here counts in units of the
time that eager took just before on the same inputs, so that runs can be compared although the
machine may be busier today.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.contenders import BASELINE, CONTENDERS, OURS
from benchmarks.measure import keep_memory, step, with_grad
from benchmarks.workloads import make

# Large enough that the GEMMs dominate and that some groups have equal rewards; small enough for
# five minutes in all.
SHAPES = {"dense": (1024, 49_152, 576), "rollout": (4096, 49_152, 576)}
ROUNDS = 7


class EagerTime:
    """A clock whose unit, set by the test, is the time of the last eager step."""

    unit = 1.0

    def __call__(self) -> float:
        return time.perf_counter() / self.unit


clock = EagerTime()


@pytest.fixture(scope="module", autouse=True)
def memory_is_kept() -> None:
    """Keeps memory between steps: without it part of eager's time, the unit, is allocation."""
    keep_memory()


@pytest.mark.parametrize("workload", SHAPES)
@pytest.mark.parametrize("contender", OURS)
@pytest.mark.benchmark(timer=clock, disable_gc=True)
def test_head(workload: str, contender: str, benchmark: Any) -> None:
    w = make(workload, SHAPES[workload])
    eager, ours = CONTENDERS[BASELINE].loss, CONTENDERS[contender].loss

    def time_eager() -> None:
        start = time.perf_counter()
        step(eager, with_grad(w))
        clock.unit = time.perf_counter() - start
        with_grad(w)

    benchmark.group = f"{workload}, in units of eager's time"
    benchmark.pedantic(step, (ours, w), setup=time_eager, rounds=ROUNDS, warmup_rounds=1)
    if benchmark.enabled:
        # Two passes take four GEMMs; eager, with kept memory, hardly more time than three.
        assert benchmark.stats.stats.median < 2

"""Metrics of a run: what the library, a loss and the user's code add, and how it is merged."""

import math
import sys

import psutil  # noqa: F401 - while there is a module `resource`
import pytest
import torch

from grpo_kernels.training import Metric
from grpo_kernels.training.run import ranks
from grpo_kernels.training.run.metrics import Clock, Metrics, peak_memory

pytestmark = pytest.mark.usefixtures("real_memory")


class Alone:
    """Processes of which there is one."""

    num_processes = 1


def test_no_name_decides_how_a_metric_is_merged():
    metrics = Metrics()
    metrics.register(Metric("gap", merge="min"))
    updates = [dict.fromkeys(("ce_gap", "gap_max", "gap"), x) for x in (1.0, 3.0)]
    updates[1] |= {"tokens": 3, "kl_max": 7.0}  # which the first lacks
    assert metrics.merge_updates(updates) == {
        "ce_gap": 2.0, "gap_max": 2.0, "gap": 1.0, "tokens": 3, "kl_max": 7.0,
    }  # fmt: skip


class Others:
    """Two processes, of which the other one has added two values."""

    num_processes = 2


@pytest.mark.parametrize(
    ("merge", "expected"), (("mean", 3.0), ("max", 7.0), ("min", 1.0), ("sum", 9.0))
)
def test_values_of_all_processes_count_alike(merge, expected, monkeypatch):
    """However many a process has, and also if it has none."""
    metrics, other = Metrics(), Metrics()
    for one in (metrics, other):
        one.register(Metric("a", merge=merge))
    other.add("a", [1.0])
    other.add("theirs", [4.0])
    metrics.add("a", [1.0, 7.0])
    metrics.add("ours", [math.nan])
    sent = []
    monkeypatch.setattr(ranks, "gather_object", lambda x: sent.extend(x) or [*x, *sent[:1]])
    other.take(Others)
    monkeypatch.setattr(ranks, "gather_object", lambda x: [*x, *sent])
    row = metrics.take(Others)
    assert math.isnan(row.pop("ours")) and row == {"a": expected, "theirs": 4.0}


@pytest.mark.parametrize(
    ("merge", "expected"), (("mean", 1.5), ("max", 2.0), ("min", 1.0), ("sum", 3.0))
)
def test_nan_is_shown_where_a_loss_has_it_and_left_out_where_it_is_added(merge, expected):
    metrics = Metrics()
    metrics.register(Metric("a", merge=merge))
    for values in ([1.0, math.nan, 2.0], [math.nan, 1.0, 2.0]):
        assert math.isnan(metrics.merge_updates([{"a": x} for x in values])["a"])
        metrics.add("a", values)
        assert metrics.take(Alone) == {"a": expected}
    metrics.add("a", [math.nan])
    assert math.isnan(metrics.take(Alone)["a"]) and metrics.take(Alone) == {}


def test_peak_memory_of_other_systems(monkeypatch):
    """On macOS it is counted in bytes; Windows has no module `resource`."""
    cpu = torch.device("cpu")
    here = peak_memory(cpu)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert peak_memory(cpu) * 1024 == pytest.approx(here, rel=0.5)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert 1 << 26 < peak_memory(cpu) <= 1.5 * here


class Event:
    """An event of CUDA, whose times are its numbers in milliseconds."""

    count = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        Event.count += 1
        self.time = Event.count

    def elapsed_time(self, end):
        return 1000.0 * (end.time - self.time)


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_the_seconds_of_head_and_loss_are_those_of_both_directions(device, monkeypatch):
    """A second passes from one look at the clock to the next one."""
    monkeypatch.setattr("time.perf_counter", iter(map(float, range(99))).__next__)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    clock = Clock(torch.device(device))
    for _ in range(2):  # micro-batches
        hidden = torch.ones(3, requires_grad=True)
        with clock.head():
            loss = hidden.sum()
        clock.head_backward(loss, hidden)
        (loss * 2).backward()
    assert clock.head_seconds == 4.0

"""The benchmark measures what it says, on a workload small enough for a test."""

import json

import pytest
import torch

from benchmarks import head
from benchmarks.memory import PeakMemory
from benchmarks.workloads import synthetic


@pytest.fixture
def tiny(monkeypatch):
    w = synthetic("tiny", N=64, V=500, H=16, T=8)
    monkeypatch.setattr(head, "WORKLOADS", {"tiny": lambda: w})
    monkeypatch.setattr(head, "extra_memory", lambda *_: 1000)
    return w


def args(*more):
    return head.parse_args(["--device", "cpu", *more])


def test_table_and_rows(tiny, capsys):
    rows = head.run_workload("tiny", args("--rounds", "2"))
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*head.CONTENDERS, "bare GEMMs"))
    assert all(len(row["seconds"]) == 2 and row["ok"] for row in rows)
    json.dumps(rows)


def test_a_wrong_contender_gets_no_time(tiny, monkeypatch, capsys):
    wrong = {**head.CONTENDERS, "wrong": lambda w: 1.01 * head.one_pass(w)}
    monkeypatch.setattr(head, "CONTENDERS", wrong)
    rows = head.run_workload("tiny", args("--rounds", "1"))
    row = next(row for row in rows if row["name"] == "wrong")
    assert not row["ok"] and "seconds" not in row
    assert "wrong: errors" in capsys.readouterr().out


def test_peak_memory_sees_what_comes_and_goes():
    with PeakMemory(torch.device("cpu")) as memory:
        torch.ones(200 << 18).sum()
    if memory.extra_bytes is None:
        pytest.skip("this system does not tell")
    assert 195 << 20 < memory.extra_bytes < 210 << 20

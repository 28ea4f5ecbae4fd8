"""The benchmark measures what it says, on a workload small enough for a test."""

import json
import re

import pytest
import torch

from benchmarks import head
from benchmarks.contenders import CONTENDERS, OURS, Contender, one_pass
from benchmarks.memory import PeakMemory
from benchmarks.workloads import make, profile


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(head, "extra_memory", lambda *_: 1000)


def args(*more):
    return head.parse_args(
        ["--device", "cpu", "--workload", "rollout", "--shapes", "512,500,16", *more]
    )


def test_every_contender_has_a_row(tiny, capsys):
    rows = head.run_workload("rollout", args("--rounds", "2"))
    printed = capsys.readouterr().out
    assert [row["name"] for row in rows] == [*CONTENDERS, "bare GEMMs"]
    for row in rows:
        assert row["name"] in printed
        if row["status"] == "ok":
            assert len(row["seconds"]) == 2 and row["tflops"] > 0
        else:  # what needs a GPU, a compiler or another package
            assert "seconds" not in row and row["status"] in printed
    ok = {row["name"] for row in rows if row["status"] == "ok"}
    assert {"eager, log_softmax", "ours, one pass", "TRL chunked head", "Liger fused linear"} <= ok
    json.dumps(rows)


@pytest.mark.parametrize("wrong", (lambda w: 1.01 * one_pass(w), lambda w: one_pass(w) + 1))
def test_a_wrong_contender_gets_no_time(wrong, tiny, monkeypatch, capsys):
    monkeypatch.setitem(CONTENDERS, "wrong", Contender(wrong))
    rows = head.run_workload("rollout", args("--rounds", "1", "--peers", "wrong"))
    row = next(row for row in rows if row["name"] == "wrong")
    assert row["status"] == "wrong" and "seconds" not in row
    assert "wrong: off by loss" in capsys.readouterr().out


def test_what_a_peer_raises_is_its_row(tiny, monkeypatch, capsys):
    def broken(w):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setitem(CONTENDERS, "broken", Contender(broken))
    rows = head.run_workload("rollout", args("--rounds", "1", "--peers", "broken"))
    assert rows[-2]["status"] == "RuntimeError: no such kernel"
    assert [row["name"] for row in rows][:-2] == ["eager, log_softmax", *OURS]


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (("--peers", "nobody"), "--peers: expected the beginning of eager, log_softmax"),
        (("--workload", "smollm"), "--shapes: expected synthetic workloads only; got smollm"),
        (("--shapes", "1,2"), "--shapes: invalid"),
        (("--rounds", "0"), "--rounds: expected at least 1; got 0"),
    ),
)
def test_arguments_are_checked(options, message, capsys):
    with pytest.raises(SystemExit):
        args(*options)
    assert message in capsys.readouterr().err


def test_synthetic_logits_have_the_profile_of_a_language_model():
    """Entropy, tail and peak of the demo model's own samples, at another vocabulary."""
    told = profile(make("dense", (512, 20_011, 192)))
    entropy, words, below = (float(re.search(p, told)[1]) for p in (
        r"entropy ([\d.]+)", r"; (\d+) words", r"2\^-12, ([\d.]+) of",
    ))  # fmt: skip
    assert 2 < entropy < 4 and 80 < words < 250 and below < 0.12
    assert float(re.search(r"entropy ([\d.]+)", profile(make("flat", (256, 5003, 64))))[1]) > 7


def test_rollout_has_padding_tools_and_equal_rewards():
    w = make("rollout", (8192, 500, 16))
    assert 0.3 < 1 - w.tokens / w.targets.numel() < 0.5
    assert 0.3 < (w.advantages == 0).float().mean() < 0.7
    holes = (w.mask.int().diff(dim=1) == 1).any(1)
    assert 0 < holes.sum() < len(holes) / 2


def test_peak_memory_sees_what_comes_and_goes():
    with PeakMemory(torch.device("cpu")) as memory:
        torch.ones(200 << 18).sum()
    if memory.extra_bytes is None:
        pytest.skip("this system does not tell")
    assert 195 << 20 < memory.extra_bytes < 210 << 20

"""The benchmark measures what it says, on a workload small enough for a test."""

import argparse
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
import torch

from benchmarks import head, on_gpu, scaling, tune
from benchmarks.contenders import CONTENDERS, OURS, Contender, one_pass
from benchmarks.memory import PeakMemory
from benchmarks.workloads import make, profile


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(head, "extra_memory", lambda *_: 1000)


@pytest.fixture
def one_process(monkeypatch):
    """What is not about the processes of their own does not wait for them to start."""
    monkeypatch.setattr(head, "ProcessPoolExecutor", lambda n, **_: ThreadPoolExecutor(n))


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
def test_a_wrong_contender_gets_no_time(wrong, tiny, one_process, monkeypatch, capsys):
    monkeypatch.setitem(CONTENDERS, "wrong", Contender(wrong))
    rows = head.run_workload("rollout", args("--rounds", "1", "--peers", "wrong"))
    row = next(row for row in rows if row["name"] == "wrong")
    assert row["status"] == "wrong" and "seconds" not in row
    assert "wrong: off by loss" in capsys.readouterr().out


@pytest.mark.parametrize("factor", (1.01, -1.0, float("nan")))
def test_what_goes_wrong_at_full_size_only_gets_no_time(factor, tiny, one_process, monkeypatch):
    def wrong_if_long(w):
        return one_pass(w) * (1 if w.targets.shape[1] == head.CHECKED_POSITIONS else factor)

    monkeypatch.setitem(CONTENDERS, "wrong", Contender(wrong_if_long))
    rows = head.run_workload("rollout", args("--rounds", "1", "--peers", "wrong"))
    row = next(row for row in rows if row["name"] == "wrong")
    assert row["status"] == "wrong in full" and "seconds" not in row
    assert {row["name"] for row in rows if "seconds" in row} >= {*OURS, "eager, log_softmax"}


def test_memory_that_does_not_suffice_is_a_row(tiny, one_process, monkeypatch):
    def large(w):
        if w.targets.shape[1] == head.CHECKED_POSITIONS:
            return one_pass(w)
        raise torch.OutOfMemoryError

    monkeypatch.setitem(CONTENDERS, "large", Contender(large))
    rows = head.run_workload("rollout", args("--rounds", "1", "--peers", "large"))
    row = next(row for row in rows if row["name"] == "large")
    assert row["status"] == "out of memory" and "seconds" not in row
    assert {row["name"] for row in rows if "seconds" in row} >= {*OURS, "eager, log_softmax"}


def test_what_a_peer_raises_is_its_row(tiny, one_process, monkeypatch, capsys):
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


@pytest.fixture
def scaling_args(one_process, monkeypatch):
    monkeypatch.setattr(scaling, "extra_memory", lambda name, path, *_, **__: path.stat().st_size)
    return argparse.Namespace(
        device="cpu", dtype="float32", everyone=False, rounds=1, limit_s=60.0, memory_bytes=1 << 30
    )


def test_scaling_has_a_row_for_every_point(scaling_args, tmp_path):
    for name, axis in scaling.axes(cuda=False, tiny=True).items():
        rows = list(chain(*scaling.run_axis(name, axis, scaling_args)))
        expected = [n for n in axis.contenders if n not in scaling.PEERS] + ["bare GEMMs"]
        assert [r["name"] for r in rows] == expected * len(axis.values)
        assert all(r["status"] == "ok" and len(r["seconds"]) == 1 for r in rows)
        scaling.plot(rows, {"device": "here"}, tmp_path / f"{name}.png")
    assert {path.stem for path in tmp_path.iterdir()} == set(scaling.LABELS)


@pytest.mark.parametrize(
    ("limits", "left", "told"),
    (
        ({"limit_s": 0.0}, {*OURS, "eager, log_softmax"}, "would take 0 s"),
        # What grows with the tokens and would not fit; ours does not grow so.
        ({"memory_bytes": 1}, {"eager, log_softmax"}, "would take 0 GiB"),
    ),
)
def test_a_contender_leaves_before_it_takes_too_much(limits, left, told, scaling_args):
    vars(scaling_args).update(limits)
    axis = scaling.axes(cuda=False, tiny=True)["tokens"]
    rows = list(chain(*scaling.run_axis("tokens", axis, scaling_args)))
    first, second = ([r for r in rows if r["value"] == n] for n in axis.values[:2])
    assert all(r["status"] == "ok" for r in first)
    gone = {r["name"]: r for r in second if r["status"] != "ok"}
    assert set(gone) == left and all(r["status"] == told for r in gone.values())
    assert not any("seconds" in r for r in gone.values())


def test_tune_times_only_what_is_right(monkeypatch):
    """In the interpreter, as it is set for the tests."""
    good = list(tune.rows(4, 300, torch.device("cpu"), 1))
    assert all(row["status"] == "ok" and row["of_copy"] > 0 for row in good)
    moved = {row["kernel"]: row["bytes"] for row in good}
    assert moved["token_stats"] == 4 * 4 * 300 and moved["logit_grads, float32"] == 8 * 4 * 300
    from grpo_kernels.tiles import triton_tiles

    right = triton_tiles.token_stats

    def wrong_at_other_settings(*args, launch=triton_tiles.ROW_LAUNCH, **options):
        stats = right(*args, **options)
        return stats._replace(logps=stats.logps + (launch.block == 64))

    monkeypatch.setattr(triton_tiles, "token_stats", wrong_at_other_settings)
    monkeypatch.setattr(
        tune, "row_settings", lambda cuda: [{}, {"launch": triton_tiles.Launch(64, 1)}]
    )
    rows = [r for r in tune.rows(4, 300, torch.device("cpu"), 1) if "token_stats" in r["kernel"]]
    assert [r["status"] for r in rows] == ["ok", "wrong"] * 2 and "seconds" not in rows[1]


def test_steps_on_a_gpu_report_what_became_of_them(tmp_path):
    told, late = tmp_path / "told.json", tmp_path / "late"
    # Of what a step starts, too, nothing goes on.
    lasts = f"import time, pathlib; time.sleep(4); pathlib.Path({str(late)!r}).touch()"
    write = f"import pathlib; pathlib.Path({str(told)!r}).write_text('[1]'); print('table')"
    for code, limit_s, left, status in (
        (write, 60, 60, "ok"),
        ("raise SystemExit(3)", 60, 60, "failed, exit status 3"),
        (
            f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {lasts!r}])",
            2,
            60,
            "out of time",
        ),
        ("", 60, 0, "not run: no time left"),
    ):
        step = on_gpu.Step("step", limit_s, [sys.executable, "-c", code], told)
        result = on_gpu.run(step, tmp_path, left, {})
        assert result["status"] == status, step
        assert ("result" in result) == (status == "ok")
    absent = on_gpu.Step("absent", 60, ["no-such-tool"])
    assert on_gpu.run(absent, tmp_path, 60, {})["status"] == "no-such-tool is not there"
    needy = on_gpu.Step("needy", 60, [sys.executable], packages=("torch", "no-such-package"))
    assert on_gpu.run(needy, tmp_path, 60, {})["status"] == "no-such-package is not installed"
    time.sleep(3)
    assert not late.exists()
    names = [step.name for step in on_gpu.steps(tmp_path, dry_run=False)]
    assert names[:2] == ["tests", "head-4096"]
    assert {"training", "memcheck", "racecheck", "tune", "chunk-budget", "scaling"} < set(names)
    (tmp_path / "head.log").write_text("a | table\n")
    steps = {"head": {"status": "ok", "seconds": 1, "result": []}}
    about = {"device": "some GPU", "date": "today", "torch": "2"}
    page = on_gpu.markdown({**about, "steps": steps}, tmp_path)
    assert "# some GPU, today" in page and "| head | ok | 1 |" in page and "a | table" in page

"""Each benchmark at its smallest size: one number that it must print, and none of what is wrong."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import cost_model, gpu_day, measure
from benchmarks.contenders import BASELINE, OURS
from benchmarks.workloads import make, profile

ROOT = Path(__file__).parents[2]


def command(*args, status=0, **env):
    """Runs `python -m` and returns what it prints."""
    # A worker of pytest-xdist, as this may be, times nothing.
    outside = {k: x for k, x in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, args)], capture_output=True, text=True, cwd=ROOT,
        env={**outside, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


# Damages of contenders, made by a plugin of pytest, or before the command.
WRONG = """
from dataclasses import replace
from benchmarks import measure
from benchmarks.contenders import BASELINE, CONTENDERS, OURS, eager, one_pass

def flipped(w, **execution):
    loss = one_pass(w, **execution)
    return 2 * loss.detach() - loss

def rounded(w):
    return (1 + 2e-4) * eager(w)

def other_norms(path):
    w = measure._held[path]
    return [x + 2e-4 * x for x in measure.gradient_norms(w)]

CONTENDERS[BASELINE] = replace(CONTENDERS[BASELINE], loss=rounded)
CONTENDERS[OURS[0]] = replace(CONTENDERS[OURS[0]], loss=flipped)
measure.kept_norms = other_norms
"""


@pytest.fixture
def wrong(tmp_path):
    """The environment of a process whose eager loss is off, and whose own gradient is flipped."""
    (tmp_path / "damages.py").write_text(WRONG)
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def test_head_prints_times_of_what_is_right(tmp_path, wrong):
    """A peer that is wrong has its errors beside its time; ours has none, and the run fails."""
    path = tmp_path / "head.json"
    code = (
        "import damages\nfrom benchmarks.head import main\nif __name__ == '__main__':\n    main()"
    )
    (tmp_path / "wrong_head.py").write_text(code)
    options = ("--device", "cpu", "--workload", "dense", "--shapes", "512,500,16", "--rounds", "1")
    text = command("wrong_head", *options, "--peers", "--json", path, status=1, **wrong)
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert {name for name, row in rows.items() if "seconds" in row} == rows.keys() - {OURS[0]}
    assert rows[OURS[1]]["status"] == "ok" and rows[OURS[1]]["d_hidden"] < 1e-4
    assert rows[OURS[1]]["extra_bytes"] > 0
    assert f"failed: {OURS[0]}" in text and re.search(rf"{OURS[0]} +wrong", text)
    assert re.search(rf"{BASELINE} .*2\.0e-04.* wrong", text)


def test_the_suite_times_nothing_of_ours_that_is_wrong(tmp_path, wrong):
    """A wrong sign shows against float64, another gradient in a full step; a peer's is told."""
    path = tmp_path / "suite.json"
    options = ["--device", "cpu", "--shape", "512,500,16", "--rounds", "2", "-p"]
    options += ["no:cacheprovider", "-k", "dense and (softmax or ours)", "--benchmark-json", path]
    more = {"PYTEST_PLUGINS": "damages", **wrong}
    text = command("pytest", "benchmarks", *options, status=1, **more)
    assert re.search(r"'d_hidden': (1\.9|2\.0)", text), text
    assert "2 failed, 1 passed" in text
    (row,) = json.loads(path.read_text())["benchmarks"]
    info = row["extra_info"]
    assert info["contender"] == BASELINE and info["peak_bytes"] > 0 and info["tokens"] == 512
    assert info["x_floor"] == pytest.approx(row["stats"]["median"] / info["floor_seconds"])
    assert info["errors"]["d_hidden"] == pytest.approx(2e-4, rel=0.1) == info["errors"]["step"]
    assert re.search(r"2\.0e-04 above 1e-04: .*d_hidden, d_weight, step", text)


def test_workloads_are_like_a_language_model_s():
    """Entropy, tail and peak of the demo model's own samples; padding, tools, equal rewards."""
    text = profile(make("dense", (512, 20_011, 192)))
    entropy, words, below = (float(re.search(p, text)[1]) for p in (
        r"entropy ([\d.]+)", r"; (\d+) tokens per row", r"2\^-12, ([\d.]+) of",
    ))  # fmt: skip
    assert 2 < entropy < 4 and 80 < words < 250 and below < 0.12
    w = make("rollout", (8192, 500, 16))
    assert 0.3 < 1 - w.tokens / w.targets.numel() < 0.5
    assert 0.3 < (w.advantages == 0).float().mean() < 0.7
    holes = (w.mask.int().diff(dim=1) == 1).any(1)
    assert 0 < holes.sum() < len(holes) / 2


def test_peak_memory_sees_what_comes_and_goes():
    with measure.PeakMemory(torch.device("cpu")) as memory:
        torch.ones(200 << 18).sum()
    if memory.extra_bytes is None:
        pytest.skip("this system does not tell")
    assert 195 << 20 < memory.extra_bytes < 210 << 20


@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="needs the extra 'peers'")
def test_updates_of_trl_are_timed_where_gradients_agree(tmp_path):
    path = tmp_path / "updates.json"
    options = ("--model", "tiny", "--equal", "50", "--rounds", "1", "--json", path)
    assert "WRONG" not in command("benchmarks.trl_updates", *options)
    steps = {row["contender"]: row["steps"][0] for row in json.loads(path.read_text())["rows"]}
    theirs, mine, ordered, skipped = (step["tokens"] for step in steps.values())
    assert theirs == mine > ordered > 1.5 * skipped
    assert len({round(step["grad_norm"], 4) for step in steps.values()}) == 1


def test_the_cost_model_prints_its_page():
    page = (ROOT / "benchmarks/results/predicted.md").read_text()
    shown = page.split(cost_model.BEGIN)[1].split(cost_model.END)[0]
    assert command("benchmarks.cost_model") == shown, f"stale: run {cost_model.COMMAND}"


def test_a_gpu_s_day_on_a_cpu(tmp_path):
    """A part of each kind from start to end, at tiny sizes; and one that cannot run there."""
    path, peer = tmp_path / "day.json", "Liger Triton loss 8192 x 4096"
    chosen = ["device", "call 4096 x 896", "calls", "gemms 896", "sweep", "model",
              "kept sets 4096 x 896", "exp_gemm 4096 x 896", "tests"]  # fmt: skip
    command("benchmarks.gpu_day", "--json", path, "--device", "cpu", "--parts", *chosen, peer)
    parts = json.loads(path.read_text())["parts"]
    assert parts.pop(peer)["status"].startswith("not run: ")
    assert {name: x["status"] for name, x in parts.items()} == dict.fromkeys(chosen, "ok"), parts
    rows = {row["run"]: row for row in parts["call 4096 x 896"]["rows"] if "ms" in row}
    assert {gpu_day.FLOOR, *gpu_day.OURS} == set(rows)
    assert all(row["x"] > 0 and row["shape"] == [64, 200, 16] for row in rows.values())


def test_a_wrong_result_of_the_day_has_no_time(monkeypatch):
    right = gpu_day.run_of
    factors = {"ours": [1, 1, 1.02], "ours, two passes": [1, -1, 1], "ours, scoring": [torch.nan]}

    def off(day, w, name):
        run, by = right(day, w, name), factors.get(name, [1, 1, 1])
        return lambda: [x if x is None else f * x for f, x in zip(by, run(), strict=True)]

    monkeypatch.setattr(gpu_day, "run_of", off)
    rows = [*gpu_day.call(gpu_day.Day("cpu"), 64, 16)]
    statuses = {row["run"]: row["status"] for row in rows if "status" in row}
    assert statuses == {BASELINE: "right"} | dict.fromkeys(gpu_day.OURS[1:], "wrong")
    assert [row["run"] for row in rows if "ms" in row] == [gpu_day.FLOOR, BASELINE]


def ends_by(how):
    """A part of the day that ends so after its first row."""

    def run(day):
        yield {"run": "before"}
        how()

    return run


def raises(error):
    raise error


# A part, and the status that it ends with.
FAILING = {
    "raises": (lambda: raises(RuntimeError("CUDA error: an illegal access\nmore")),
               "RuntimeError: CUDA error: an illegal access"),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "its process ended, exit code -9"),
    "memory": (lambda: raises(torch.OutOfMemoryError("of 1 TiB")), "out of memory"),
    "hangs": (lambda: time.sleep(60), "out of time: more than 2 s"),
    "quick": (lambda: None, "ok"),
}  # fmt: skip


def test_a_part_of_the_day_that_fails_ends_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "header", lambda device: {"device": device})
    runs = [(name, ends_by(how), 2) for name, (how, _) in FAILING.items()]
    done = gpu_day.run_all(runs, tmp_path / "day.json", "cpu", time.monotonic() + 60)
    assert {name: part["status"] for name, part in done.items()} == {
        name: status for name, (_, status) in FAILING.items()
    }
    assert all(part["rows"] == [{"run": "before"}] for part in done.values())
    assert json.loads((tmp_path / "day.json").read_text())["parts"] == done

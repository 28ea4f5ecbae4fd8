"""The benchmarks print no speed of what is wrong, and time what they say."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch

from benchmarks import checks, head, measure
from benchmarks.contenders import (
    BASELINE,
    CONTENDERS,
    OURS,
    Contender,
    eager,
    one_pass,
    torch_chunked,
)
from benchmarks.measure import FLOOR, PeakMemory
from benchmarks.workloads import make, profile

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Runs contenders in this process, where a test can add some."""
    monkeypatch.setattr(measure, "ProcessPoolExecutor", lambda n, **_: ThreadPoolExecutor(n))
    monkeypatch.setattr(measure, "keep_memory", lambda: None)  # here it would last


def rows_of(*more, workload="rollout"):
    """The rows of a small run, by name."""
    options = ["--device", "cpu", "--workload", workload, "--shapes", "512,500,16", *more]
    return {row["name"]: row for row in head.run_workload(workload, head.parse_args(options))}


@pytest.mark.nightly
def test_every_contender_has_a_row():
    rows = rows_of("--rounds", "2")
    assert [*rows] == [*CONTENDERS, FLOOR]
    ok = {name for name, row in rows.items() if row["status"] == "ok"}  # others need a GPU
    assert {BASELINE, *OURS, "TRL chunked head", "Liger fused linear"} <= ok
    timed = {name for name, row in rows.items() if "seconds" in row}
    assert timed - ok == {name for name, row in rows.items() if row["status"] in checks.WRONG}


def with_a_nan_in_a_gradient(w):
    x = w.weight[0, 0]
    return one_pass(w) + 0 * (x - x.detach()).sqrt()


def raises(error):
    raise error


def at_full_size(loss):
    """A contender that is right on the few sequences that are checked first."""
    return lambda w, **_: (one_pass if len(w.advantages) == checks.CHECKED_SEQUENCES else loss)(w)


# Contenders, and what their row says: a peer that is wrong has times beside its errors.
FAILING = {
    "off": (lambda w: 1.01 * one_pass(w), "wrong"),
    "shifted": (lambda w: one_pass(w) + 1, "wrong"),
    "with a NaN in a gradient": (with_a_nan_in_a_gradient, "wrong"),
    "rounded": (lambda w: (1 + 2e-4) * one_pass(w), "wrong"),
    "raises": (
        lambda w: raises(RuntimeError("no such kernel\nand more")), "RuntimeError: no such kernel"),
    **{f"times {factor}": (at_full_size(lambda w, x=factor: x * one_pass(w)), "wrong in full")
       for factor in (1.01, -1.0, float("nan"))},
    "too large": (
        at_full_size(lambda w: raises(torch.OutOfMemoryError("of 1 TiB"))), "out of memory"),
}  # fmt: skip


def test_a_peer_that_fails_has_a_row(monkeypatch, capsys):
    for name, (loss, _) in FAILING.items():
        monkeypatch.setitem(CONTENDERS, name, Contender(loss))
    rows = rows_of("--rounds", "3", "--limit-s", "0", "--peers", *FAILING)
    good = [BASELINE, *OURS]
    assert list(rows) == [*good, *FAILING, FLOOR]
    statuses = {name: row["status"] for name, row in rows.items()}
    assert statuses == dict.fromkeys((*good, FLOOR), "ok") | {k: x for k, (_, x) in FAILING.items()}
    # No round begins after the limit.
    rounds = {name: len(row["seconds"]) for name, row in rows.items() if "seconds" in row}
    wrong = [name for name, status in statuses.items() if status in checks.WRONG]
    assert rounds == dict.fromkeys((*good, FLOOR, *wrong), 1)
    assert rows["rounded"]["d_hidden"] == pytest.approx(2e-4, rel=0.05)
    line = re.search(r"rounded .*", capsys.readouterr().out)[0]
    assert line.count("2.0e-04") == 2 and line.endswith(" wrong")


@pytest.mark.parametrize("size", ("checked", "full"))
def test_ours_that_is_wrong_has_no_time_and_fails(size, monkeypatch, capsys):
    """Beside a peer that is wrong in the same way, which is no reason to be."""

    def off(w, **_):
        return (1 + 2e-4) * one_pass(w)

    off = at_full_size(off) if size == "full" else off
    for name in (BASELINE, OURS[0]):
        monkeypatch.setitem(CONTENDERS, name, Contender(off))
    options = ["--device", "cpu", "--workload", "dense", "--shapes", "512,500,16"]
    with pytest.raises(SystemExit, match=f"failed: {OURS[0]}$"):
        head.main([*options, "--rounds", "1", "--peers"])
    out = capsys.readouterr().out
    assert re.search(rf"{OURS[0]} +wrong", out) and re.search(rf"{BASELINE} .* wrong", out)


@pytest.mark.parametrize("code", ("os._exit(3)", "time.sleep(60)"))
def test_a_process_alone_ends_with_its_time(code, monkeypatch):
    monkeypatch.undo()
    with pytest.raises((TimeoutError, BrokenProcessPool)):
        measure.run_alone(exec, f"import os, time; {code}", limit_s=2)


def test_a_support_is_ours_and_eager_s():
    rows = rows_of("--rounds", "1", workload="nucleus")
    assert {rows[name]["status"] for name in (BASELINE, *OURS, FLOOR)} == {"ok"}
    w = make("nucleus", (256, 500, 16))
    part = w.sequences(torch.tensor([2, 0])).first(5)
    sets, expected = (x.support[0].split(x.support[1].diff().tolist()) for x in (part, w))
    assert {len(x) for x in sets} > {1}
    assert [x.tolist() for x in sets] == [
        expected[64 * row + t].tolist() for row in (2, 0) for t in range(5)
    ]
    assert one_pass(w.tiny()).item() == pytest.approx(eager(w.tiny()).item(), abs=1e-5)


def test_workloads_are_like_a_language_model_s():
    """Entropy, tail and peak of the demo model's own samples; padding, tools, equal rewards."""
    text = profile(make("dense", (512, 20_011, 192)))
    entropy, words, below = (float(re.search(p, text)[1]) for p in (
        r"entropy ([\d.]+)", r"; (\d+) tokens per row", r"2\^-12, ([\d.]+) of",
    ))  # fmt: skip
    assert 2 < entropy < 4 and 80 < words < 250 and below < 0.12
    for tokens in (512, 8192):
        w = make("rollout", (tokens, 500, 16))
        assert 0.3 < 1 - w.tokens / w.targets.numel() < 0.5
        assert 0.3 < (w.advantages == 0).float().mean() < 0.7
        holes = (w.mask.int().diff(dim=1) == 1).any(1)
        assert 0 < holes.sum() < len(holes) / 2


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch < 2.13")
def test_torch_s_chunked_head_is_chunked():
    """No product has all rows of logits, and the loss and its gradients are eager's."""
    w = measure.with_grad(make("dense", (1024, 500, 16)))
    with torch.profiler.profile(record_shapes=True) as profiler:
        loss = measure.step(torch_chunked, w)
    products = [x.input_shapes for x in profiler.events() if x.name in ("aten::mm", "aten::addmm")]
    assert sum([512, 16] in shapes for shapes in products) >= 2
    assert not any(shape and shape[0] == 1024 for shapes in products for shape in shapes)
    got, expected = measure.gradient_norms(w), measure.step(eager, measure.with_grad(w))
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    assert got == pytest.approx(measure.gradient_norms(w), rel=1e-4)


def suite(folder, chosen, *more, **env):
    """Runs `pytest benchmarks` at a tiny shape; returns its process and what it measured."""
    path = folder / "suite.json"
    options = ["--device", "cpu", "--shape", "512,500,16", "--rounds", "2", *more]
    options += ["-p", "no:cacheprovider", "-k", chosen, "--benchmark-json", path]
    # A worker of pytest-xdist, as this may be, times nothing.
    outside = {k: x for k, x in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks", *options], capture_output=True, text=True,
        cwd=ROOT, env={**outside, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    return process, json.loads(path.read_text())["benchmarks"] if path.exists() else []


def test_the_suite_tells_time_memory_and_floor(tmp_path):
    process, rows = suite(tmp_path, "(frozen or heads) and (softmax or ours or fused)")
    assert process.returncode == 0, process.stdout
    groups = {}
    for row in rows:
        info = row["extra_info"]
        groups.setdefault(row["group"].split(":")[0], []).append(info["contender"])
        assert row["stats"]["rounds"] == 2 and info["peak_bytes"] > 0 and info["tokens"] == 512
        assert info["x_floor"] == pytest.approx(row["stats"]["median"] / info["floor_seconds"])
        assert ("d_weight" in info["errors"]) == ("frozen" not in row["group"])
    liger = ["Liger fused linear"] if importlib.util.find_spec("liger_kernel") else []
    assert groups == {
        "frozen": [BASELINE, *OURS, *liger], "two-heads": [BASELINE, OURS[0], *liger]
    }  # fmt: skip


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


def test_the_suite_times_nothing_of_ours_that_is_wrong(tmp_path):
    """A wrong sign shows against float64, another gradient in a full step; a peer's is told."""
    (tmp_path / "damages.py").write_text(WRONG)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "PYTEST_PLUGINS": "damages"}
    process, rows = suite(tmp_path, "dense and (softmax or ours)", **env)
    assert [row["extra_info"]["contender"] for row in rows] == [BASELINE]
    assert "2 failed, 1 passed" in process.stdout
    assert re.search(r"'d_hidden': (1\.9|2\.0)", process.stdout), process.stdout
    errors = rows[0]["extra_info"]["errors"]
    assert errors["d_hidden"] == pytest.approx(2e-4, rel=0.1)
    assert errors["step"] == pytest.approx(2e-4, rel=0.1)
    assert re.search(r"2\.0e-04 above 1e-04: .*d_hidden, d_weight, step", process.stdout)


def test_the_suite_that_measures_nothing_sees_a_wrong_gradient(tmp_path):
    (tmp_path / "damages.py").write_text(WRONG)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "PYTEST_PLUGINS": "damages"}
    process, rows = suite(tmp_path, "dense and ours", "--benchmark-disable", **env)
    assert not rows and "1 failed, 1 passed" in process.stdout, process.stdout
    assert re.search(r"'d_hidden': (1\.9|2\.0)", process.stdout), process.stdout


def test_peak_memory_sees_what_comes_and_goes():
    with PeakMemory(torch.device("cpu")) as memory:
        torch.ones(200 << 18).sum()
    if memory.extra_bytes is None:
        pytest.skip("this system does not tell")
    assert 195 << 20 < memory.extra_bytes < 210 << 20


@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="needs the extra 'peers'")
def test_updates_of_trl_are_timed_where_gradients_agree(tmp_path):
    path = tmp_path / "updates.json"
    options = ("--model", "tiny", "--equal", "50", "--rounds", "1", "--json", str(path))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.trl_updates", *options], capture_output=True, text=True,
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stderr
    steps = {row["contender"]: row["steps"][0] for row in json.loads(path.read_text())["rows"]}
    theirs, mine, ordered, skipped = (step["tokens"] for step in steps.values())
    assert theirs == mine > ordered > 1.5 * skipped
    assert len({round(step["grad_norm"], 4) for step in steps.values()}) == 1

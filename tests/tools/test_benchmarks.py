"""The benchmarks end, refuse bad arguments, and print no speed of what is wrong."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch

from benchmarks import checks, head, measure
from benchmarks.contenders import BASELINE, CONTENDERS, OURS, Contender, eager, one_pass
from benchmarks.gpu_costs import DEVICES
from benchmarks.measure import FLOOR, PeakMemory
from benchmarks.workloads import TRUNCATED, make, profile
from grpo_kernels import reference
from tests.helpers.supports import csr
from tests.tools import whole_calls

ROOT = Path(__file__).parents[2]


@pytest.fixture
def one_process(monkeypatch):
    """Runs contenders in this process, where a test can add some."""
    monkeypatch.setattr(measure, "ProcessPoolExecutor", lambda n, **_: ThreadPoolExecutor(n))
    monkeypatch.setattr(measure, "keep_memory", lambda: None)  # here it would last


def options(*more, workload="rollout"):
    return ["--device", "cpu", "--workload", workload, "--shapes", "512,500,16", *more]


def measured(*more, workload="rollout"):
    """The rows of a small run, by name."""
    args = head.parse_args(options(*more, workload=workload))
    return {row["name"]: row for row in head.run_workload(workload, args)}


@pytest.mark.nightly
def test_every_contender_has_a_row(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        head.main(options("--rounds", "2", "--json", str(tmp_path / "rows.json")))
    assert not ended.value.code
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    printed = capsys.readouterr().out
    assert [row["name"] for row in rows] == [*CONTENDERS, FLOOR]
    for row in rows:
        assert row["name"] in printed
        if row["status"] == "ok":
            assert len(row["seconds"]) == 2 and row["tflops"] > 0
        else:  # what needs a GPU, a compiler or another package
            assert "seconds" not in row and row["status"] in printed
    ok = {row["name"] for row in rows if row["status"] == "ok"}
    assert {BASELINE, *OURS, "TRL chunked head", "Liger fused linear"} <= ok


def with_a_nan_in_a_gradient(w):
    x = w.weight[0, 0]
    return one_pass(w) + 0 * (x - x.detach()).sqrt()


def raising(error):
    def loss(w):
        raise error

    return loss


def at_full_size(loss):
    """A contender that is right on the few sequences that are checked first."""
    return lambda w: (one_pass if len(w.advantages) == checks.CHECKED_SEQUENCES else loss)(w)


# Contenders, and what their row says instead of a time.
FAILING = {
    "off": (lambda w: 1.01 * one_pass(w), "wrong"),
    "shifted": (lambda w: one_pass(w) + 1, "wrong"),
    "with a NaN in a gradient": (with_a_nan_in_a_gradient, "wrong"),
    "raises": (
        raising(RuntimeError("no such kernel\nand more")), "RuntimeError: no such kernel"),
    **{f"times {factor}": (at_full_size(lambda w, x=factor: x * one_pass(w)), "wrong in full")
       for factor in (1.01, -1.0, float("nan"))},
    "too large": (at_full_size(raising(torch.OutOfMemoryError("of 1 TiB"))), "out of memory"),
    "fails late": (at_full_size(raising(OSError("x\ny"))), "OSError: x"),
}  # fmt: skip


def test_a_contender_that_fails_has_a_row_and_no_time(one_process, monkeypatch, capsys):
    for name, (loss, _) in FAILING.items():
        monkeypatch.setitem(CONTENDERS, name, Contender(loss))
    rows = measured("--rounds", "2", "--peers", *FAILING)
    good = [BASELINE, *OURS]
    assert list(rows) == [*good, *FAILING, FLOOR]
    statuses = {name: row["status"] for name, row in rows.items()}
    assert statuses == dict.fromkeys((*good, FLOOR), "ok") | {k: x for k, (_, x) in FAILING.items()}
    assert {name for name, row in rows.items() if "seconds" in row} == {*good, FLOOR}
    assert "wrong: off by loss" in capsys.readouterr().out


def test_the_backend_is_that_of_ours():
    with pytest.raises(ValueError, match=r"^backend: expected"):
        measure.loss_of(OURS[0], "other")(make("dense", (64, 101, 16)))
    measure.loss_of(BASELINE, "other")(make("dense", (64, 101, 16)))


def test_no_round_begins_after_the_limit(one_process):
    rows = measured("--rounds", "3", "--limit-s", "0", "--peers")
    assert {len(row["seconds"]) for row in rows.values()} == {1}


def test_a_step_that_finds_its_memory_anew_is_taken_again(monkeypatch):
    """At most four times; its gradients are those of one step."""
    w, steps = measure.with_grad(make("dense", (64, 101, 16))), []
    one_pass(w).backward()
    norm = float(w.weight.grad.norm())

    def counted(w):
        steps.append(w)
        return one_pass(w)

    for faults, expected in (([0, 9999, 9999, 9999], 3), ([*range(0, 80_000, 10_000)], 5)):
        counts = iter(faults)
        monkeypatch.setattr(measure, "_page_faults", lambda counts=counts: next(counts))
        steps.clear()
        row = measure.time_step(counted, w)
        assert len(steps) == expected and row["seconds"] > 0
        assert row["results"][2] == pytest.approx(norm, rel=1e-5)


def test_what_is_known_is_saved_after_every_round(tmp_path, one_process, monkeypatch):
    """A run that is killed loses only the round under way."""
    calls = []

    def interrupted(w):
        calls.append(w)
        return raising(KeyboardInterrupt)(w) if len(calls) == 3 else one_pass(w)

    monkeypatch.setitem(CONTENDERS, "ended", Contender(at_full_size(interrupted)))
    path = tmp_path / "told.json"
    with pytest.raises(KeyboardInterrupt):
        head.main(options("--rounds", "2", "--peers", "ended", "--json", str(path)))
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert len(rows["ended"]["seconds"]) == len(rows[OURS[0]]["seconds"]) == 1


def test_a_peer_alone_has_a_limit(one_process, monkeypatch, capsys):
    """On a GPU, where a slow compiler must not end the others."""

    def slow(w):
        time.sleep(4)
        raise RuntimeError("later")

    for name, loss in (("slow", slow), ("quick", one_pass)):
        monkeypatch.setitem(CONTENDERS, name, Contender(loss))
    args = head.parse_args(options("--rounds", "1", "--limit-s", "12", "--peers", "slow", "quick"))
    args.isolate = True
    rows = {row["name"]: row for row in head.run_workload("rollout", args)}
    assert rows["slow"]["status"] == "out of time: more than 3 s" and "seconds" not in rows["slow"]
    assert rows["quick"]["status"] == "ok" and len(rows["quick"]["floor_seconds"]) == 1
    assert all(rows[name]["status"] == "ok" for name in (BASELINE, *OURS))
    assert capsys.readouterr().out.count("ours, two passes") == 2


@pytest.mark.parametrize("code", ("os._exit(3)", "time.sleep(60)"))
def test_a_process_alone_ends_with_its_time(code):
    with pytest.raises((TimeoutError, BrokenProcessPool)):
        measure.run_alone(exec, f"import os, time; {code}", limit_s=2)


def test_predictions_stand_beside_measurements(monkeypatch, capsys):
    """On a GPU that the cost model knows, for what it knows."""
    monkeypatch.setattr(head, "device_of", lambda _: DEVICES["H200"])
    w = make("dense", (64, 101, 16)).to(torch.bfloat16)
    results = head.Results(w, [BASELINE, *OURS, "other"], "cpu", lambda _: None)
    results.add({name: {"status": "ok", "seconds": [1.0]} for name in results.by_name})
    rows = {row["name"]: row.get("predicted_seconds") for row in results.rows()}
    assert all(rows[name] > 0 for name in (BASELINE, *OURS, FLOOR)) and rows["other"] is None
    head.print_table(results.rows())
    printed = capsys.readouterr().out
    assert "x model: the time over that" in printed and "(worst)" in printed


def truncated(*_):
    """A workload with sets of 1 to 90 ids, which hold the target, and old log-probs near them."""
    w = make("dense", (256, 101, 16))
    sizes = [1, 2, 3, 7, 90]
    targets = w.targets.flatten().tolist()
    w.support = csr([[(y + k) % 101 for k in range(sizes[i % 5])] for i, y in enumerate(targets)])
    logps = reference.linear_logprobs(w.hidden, w.weight, w.targets, support=w.support).logps
    w.old_logps = logps + 0.1 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(0))
    return w


def test_a_support_is_ours_and_eager_s(one_process, monkeypatch, capsys):
    monkeypatch.setattr(head, "make", truncated)
    args = head.parse_args(options("--rounds", "1"))
    rows = head.run_workload("support", args)
    assert [(row["name"], row["status"]) for row in rows] == [
        (name, "ok") for name in (BASELINE, *OURS, FLOOR)
    ]
    printed = capsys.readouterr().out
    assert "entries per token: mean 20.5, median 3, p99 90, largest 90, one entry 20%" in printed
    assert not any("tflops" in row for row in rows)


def test_a_part_of_a_workload_keeps_its_sets():
    w = truncated()
    part = w.sequences(torch.tensor([2, 0])).first(5)
    sets, expected = (x.support[0].split(x.support[1].diff().tolist()) for x in (part, w))
    assert [x.tolist() for x in sets] == [
        expected[64 * row + t].tolist() for row in (2, 0) for t in range(5)
    ]
    few = w.tiny()
    assert few.targets.shape == (1, 64) and len(few.weight) == 64
    assert one_pass(few).item() == pytest.approx(eager(few).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("args", "message"),
    (
        (("--peers", "nobody"), "--peers: expected the beginning of eager, log_softmax"),
        (("--workload", "smollm"), "--shapes: expected synthetic workloads only; got smollm"),
        (("--workload", "support"), "--shapes: expected synthetic workloads only; got top-p 0.8"),
        (("--shapes", "1,2"), "--shapes: invalid"),
        (("--rounds", "0"), "--rounds: expected at least 1; got 0"),
    ),
)
def test_arguments(args, message, capsys):
    right = ["--device", "cpu", "--workload", "smollm", "support"]
    assert head.parse_args(right).workload == ["smollm", *TRUNCATED]
    with pytest.raises(SystemExit):
        head.parse_args(options(*args))
    assert message in capsys.readouterr().err


def test_synthetic_logits_have_the_profile_of_a_language_model():
    """Entropy, tail and peak of the demo model's own samples, at another vocabulary."""
    text = profile(make("dense", (512, 20_011, 192)))
    entropy, words, below = (float(re.search(p, text)[1]) for p in (
        r"entropy ([\d.]+)", r"; (\d+) tokens per row", r"2\^-12, ([\d.]+) of",
    ))  # fmt: skip
    assert 2 < entropy < 4 and 80 < words < 250 and below < 0.12
    assert float(re.search(r"entropy ([\d.]+)", profile(make("flat", (256, 5003, 64))))[1]) > 7


@pytest.mark.parametrize("tokens", (512, 8192))
def test_rollout_has_padding_tools_and_equal_rewards(tokens):
    w = make("rollout", (tokens, 500, 16))
    assert 0.3 < 1 - w.tokens / w.targets.numel() < 0.5
    assert 0.3 < (w.advantages == 0).float().mean() < 0.7
    holes = (w.mask.int().diff(dim=1) == 1).any(1)
    assert 0 < holes.sum() < len(holes) / 2


def suite(folder, chosen, **env):
    """Runs `pytest benchmarks` at a tiny shape; returns its process and what it measured."""
    path = folder / "suite.json"
    options = ["--device", "cpu", "--shape", "512,500,16", "--rounds", "2"]
    options += ["-p", "no:cacheprovider", "-k", chosen, "--benchmark-json", path]
    # A worker of pytest-xdist, as this may be, times nothing.
    outside = {k: x for k, x in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks", *options], capture_output=True, text=True,
        cwd=ROOT, env={**outside, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    return process, json.loads(path.read_text())


def test_the_suite_tells_time_memory_and_floor(tmp_path):
    process, report = suite(tmp_path, "(frozen or heads) and (softmax or ours or fused)")
    assert process.returncode == 0, process.stdout
    assert {"device", "torch", "triton"} <= set(report["machine_info"])
    groups = {}
    for row in report["benchmarks"]:
        info = row["extra_info"]
        groups.setdefault(row["group"].split(":")[0], []).append(info["contender"])
        assert row["stats"]["rounds"] == 2 and info["peak_bytes"] > 0 and info["tokens"] == 512
        assert info["x_floor"] == pytest.approx(row["stats"]["median"] / info["floor_seconds"])
        assert ("d_weight" in info["errors"]) == ("frozen" not in row["group"])
        assert re.search(rf"{info['contender']} .* {info['x_floor']:.2f} ", process.stdout)
    liger = ["Liger fused linear"] if importlib.util.find_spec("liger_kernel") else []
    assert groups == {
        "frozen": [BASELINE, *OURS, *liger], "two-heads": [BASELINE, OURS[0], *liger]
    }  # fmt: skip


def test_the_suite_times_nothing_that_is_wrong(tmp_path):
    """A wrong sign shows against float64, another gradient in a full step."""
    (tmp_path / "damages.py").write_text("""
from dataclasses import replace
from pathlib import Path
from benchmarks import measure
from benchmarks.contenders import CONTENDERS, OURS, one_pass

CALLS = Path(__file__).with_name("calls")

def flipped(w, **execution):
    loss = one_pass(w, **execution)
    return 2 * loss.detach() - loss

def other_norms(path):
    with CALLS.open("a") as file:
        file.write("x")
    return [float(CALLS.stat().st_size)] * 2

CONTENDERS[OURS[0]] = replace(CONTENDERS[OURS[0]], loss=flipped)
measure.kept_norms = other_norms
""")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    env = {"PYTHONPATH": path, "PYTEST_PLUGINS": "damages"}
    process, report = suite(tmp_path, "dense and (softmax or ours)", **env)
    assert [row["extra_info"]["contender"] for row in report["benchmarks"]] == [BASELINE]
    assert "2 failed, 1 passed" in process.stdout
    assert re.search(r"'d_hidden': (1\.9|2\.0)", process.stdout), process.stdout
    assert "AssertionError: expected [" in process.stdout


def test_peak_memory_sees_what_comes_and_goes():
    with PeakMemory(torch.device("cpu")) as memory:
        torch.ones(200 << 18).sum()
    if memory.extra_bytes is None:
        pytest.skip("this system does not tell")
    assert 195 << 20 < memory.extra_bytes < 210 << 20


def test_a_wrong_call_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    def off(case):
        value, logps = whole_calls.logps(case)
        return (value if case.package is reference else 1.01 * value), logps

    calls = {"raises": raising(RuntimeError("none")), "off": off, "right": whole_calls.logps}
    cases = {name: (torch.float32, call) for name, call in calls.items()}
    monkeypatch.setattr(whole_calls, "CASES", cases)
    path = tmp_path / "calls.json"
    with pytest.raises(SystemExit, match="failed: raises, off"):
        whole_calls.main(["--device", "cpu", "--json", str(path)])
    statuses = [row["status"] for row in json.loads(path.read_text())["rows"]]
    assert statuses == ["RuntimeError: none", "wrong", "ok"]
    assert "1 of 3 calls are right" in capsys.readouterr().out

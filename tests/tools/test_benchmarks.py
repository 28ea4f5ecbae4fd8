"""The benchmark measures what it says, on a workload small enough for a test."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import pytest
import torch

from benchmarks import gemms, gpu_times, head, measure, on_gpu, tune
from benchmarks.contenders import (
    CONTENDERS,
    MASKED,
    NO_SUPPORT,
    OURS,
    REPLAYS,
    Contender,
    eager_masked,
    one_pass,
    without_support,
)
from benchmarks.gpu_costs import DEVICES
from benchmarks.measure import FLOOR, PeakMemory
from benchmarks.workloads import TRUNCATED, make, profile
from grpo_kernels import reference
from tests.helpers.supports import csr
from tests.tools import whole_calls


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(head, "extra_memory", lambda *_, **__: 1000)


@pytest.fixture
def one_process(monkeypatch):
    """Runs contenders in this process: tests about other things need not wait for new ones."""
    monkeypatch.setattr(measure, "ProcessPoolExecutor", lambda n, **_: ThreadPoolExecutor(n))
    monkeypatch.setattr(measure, "keep_memory", lambda: None)  # here it would last


def args(*more):
    return head.parse_args(
        ["--device", "cpu", "--workload", "rollout", "--shapes", "512,500,16", *more]
    )


@pytest.mark.nightly
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


def with_a_nan_in_a_gradient(w):
    x = w.weight[0, 0]
    return one_pass(w) + 0 * (x - x.detach()).sqrt()


def raising(error):
    def loss(w):
        raise error

    return loss


def at_full_size(loss):
    """A contender that is right on the few sequences that are checked first."""
    return lambda w: (one_pass if len(w.advantages) == head.CHECKED_SEQUENCES else loss)(w)


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


def test_a_contender_that_fails_has_a_row_and_no_time(tiny, one_process, monkeypatch, capsys):
    for name, (loss, _) in FAILING.items():
        monkeypatch.setitem(CONTENDERS, name, Contender(loss))
    rows = head.run_workload("rollout", args("--rounds", "2", "--peers", *FAILING))
    good = ["eager, log_softmax", *OURS]
    assert [row["name"] for row in rows] == [*good, *FAILING, FLOOR]
    told = {row["name"]: row["status"] for row in rows}
    assert told == dict.fromkeys((*good, FLOOR), "ok") | {k: x for k, (_, x) in FAILING.items()}
    assert {row["name"] for row in rows if "seconds" in row} == {*good, FLOOR}
    assert "wrong: off by loss" in capsys.readouterr().out


def test_the_backend_is_that_of_ours(tiny, one_process, monkeypatch):
    from grpo_kernels.kernels import triton_backend

    widths = []

    def counted(logits, *args, right=triton_backend.token_stats, **options):
        widths.append(logits.shape[1])
        return right(logits, *args, **options)

    monkeypatch.setattr(triton_backend, "token_stats", counted)
    few = ["--device", "cpu", "--shapes", "64,101,16", "--rounds", "1", "--peers"]
    for backend in ("torch", "triton"):
        args = head.parse_args(["--workload", "dense", "--backend", backend, *few])
        rows = head.run_workload("dense", args)
        assert [r["name"] for r in rows if "seconds" in r] == ["eager, log_softmax", *OURS, FLOOR]
        assert set(widths) == (set() if backend == "torch" else {101})


def test_no_round_begins_after_the_limit(tiny, one_process):
    rows = head.run_workload("rollout", args("--rounds", "3", "--limit-s", "0", "--peers"))
    assert {len(row["seconds"]) for row in rows} == {1}


def test_a_step_that_finds_its_memory_anew_is_taken_again(monkeypatch):
    """Repeats at most four times, and not where fresh memory is what is measured."""
    w, steps = make("dense", (64, 101, 16)), []

    def counted(w):
        steps.append(w)
        return one_pass(w)

    for found, kept, expected in (
        ([0, 9999, 9999, 9999], True, 3),
        ([*range(0, 80_000, 10_000)], True, 5),
        ([0, 9999], False, 2),
    ):
        told = iter(found)
        monkeypatch.setattr(measure, "_page_faults", lambda told=told: next(told))
        steps.clear()
        measured = measure._turn(counted, measure.with_grad(w), forward=False, kept=kept)
        assert len(steps) == expected and measured["seconds"] > 0
        once = one_pass(measure.with_grad(w))
        once.backward()
        assert measured["results"][2] == pytest.approx(float(w.weight.grad.norm()), rel=1e-5)


def test_what_is_known_is_saved_after_every_step(tmp_path, one_process, monkeypatch):
    """Of a run that is ended, all but the measurement that was under way is on the disk."""
    path = tmp_path / "told.json"
    asked = []

    def interrupted(name, *_, **__):
        asked.append(name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return 1000

    monkeypatch.setattr(head, "extra_memory", interrupted)
    told = []
    monkeypatch.setattr(head, "write_json", lambda p, x: told.append(json.loads(json.dumps(x))))
    options = ["--workload", "dense", "--shapes", "64,101,16", "--device", "cpu", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["head", *options, "--peers", "--json", str(path)])
    with pytest.raises(KeyboardInterrupt):
        head.main()
    ours = [next(r for r in x["rows"] if r["name"] == OURS[0]) for x in told]
    known = list(dict.fromkeys((r["status"], len(r.get("seconds", []))) for r in ours))
    assert known == [("not measured", 0), ("not timed", 0), ("ok", 1), ("ok", 2)]
    assert [r["name"] for r in told[-1]["rows"] if "extra_bytes" in r] == asked[:1]


def test_a_peer_alone_has_a_limit(tiny, one_process, monkeypatch, capsys):
    """On a GPU, where a slow compiler or a crash must not end the others."""

    def slow(w):
        time.sleep(4)
        raise RuntimeError("later")

    def run_alone(run, names, *others, limit_s):
        if names == ["crashes"]:
            raise BrokenProcessPool
        return measure.run_alone(run, names, *others, limit_s=limit_s)

    monkeypatch.setattr(head, "run_alone", run_alone)
    for name, loss in (("slow", slow), ("crashes", one_pass), ("quick", one_pass)):
        monkeypatch.setitem(CONTENDERS, name, Contender(loss))
    given = args("--rounds", "1", "--limit-s", "12", "--peers", "slow", "crashes", "quick")
    given.isolate = True
    rows = {row["name"]: row for row in head.run_workload("rollout", given)}
    assert rows["slow"]["status"] == "out of time: more than 3 s" and "seconds" not in rows["slow"]
    assert rows["crashes"]["status"] == "its process ended"
    assert rows["quick"]["status"] == "ok" and len(rows["quick"]["floor_seconds"]) == 1
    assert all(rows[name]["status"] == "ok" for name in ("eager, log_softmax", *OURS))
    assert capsys.readouterr().out.count("ours, two passes") == 2


@pytest.mark.parametrize("code", ("os._exit(3)", "time.sleep(60)"))
def test_a_process_alone_ends_with_its_time(code):
    with pytest.raises((TimeoutError, BrokenProcessPool)):
        measure.run_alone(exec, f"import os, time; {code}", limit_s=2)


def test_predictions_stand_beside_measurements(tiny, one_process, monkeypatch, capsys):
    """On a GPU that the cost model knows, for what it knows."""
    monkeypatch.setattr(head, "device_of", lambda _: DEVICES["H200"])
    given = ["--workload", "dense", "--shapes", "64,101,16", "--device", "cpu", "--rounds", "1"]
    rows = head.run_workload("dense", head.parse_args([*given, "--dtype", "bfloat16", "--peers"]))
    assert {row["name"] for row in rows if "predicted_seconds" in row} == {
        "eager, log_softmax", *OURS, FLOOR
    }  # fmt: skip
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


def test_a_support_has_contenders_of_its_own(tiny, one_process, monkeypatch, capsys):
    monkeypatch.setattr(head, "make", truncated)
    rows = head.run_workload("support", args("--rounds", "1"))
    assert [(row["name"], row["status"]) for row in rows] == [(n, "ok") for n in (*REPLAYS, FLOOR)]
    printed = capsys.readouterr().out
    assert "entries per token: mean 20.5, median 3, p99 90, largest 90, one entry 20%" in printed
    assert printed.count('"no support": another objective') == 1
    assert not any("tflops" in row for row in rows)
    losses = {row["name"]: row["results"][0][0] for row in rows[:-1]}
    dense = losses.pop(NO_SUPPORT)
    assert max(losses.values()) - min(losses.values()) < 1e-5
    assert abs(dense - losses[MASKED]) > 1e-2


def test_a_contender_of_another_objective_gets_no_time(tiny, one_process, monkeypatch):
    def wrong_if_long(w):
        return eager_masked(w) * (1 if len(w.advantages) == head.CHECKED_SEQUENCES else 1.01)

    wrong = {
        "ignores it": (partial(without_support, one_pass), "wrong"),
        NO_SUPPORT: (one_pass, "wrong"),
        "long": (wrong_if_long, "wrong in full"),
    }
    monkeypatch.setattr(head, "make", truncated)
    for name, (loss, _) in wrong.items():
        monkeypatch.setitem(REPLAYS, name, Contender(loss))
    rows = head.run_workload("support", args("--rounds", "1"))
    told = {row["name"]: row["status"] for row in rows if row["status"] != "ok"}
    assert told == {name: status for name, (_, status) in wrong.items()}
    assert {MASKED, *OURS} <= {row["name"] for row in rows if "seconds" in row}


def test_a_part_of_a_workload_keeps_its_sets():
    w = truncated()
    part = w.sequences(torch.tensor([2, 0])).first(5)
    sets, expected = (x.support[0].split(x.support[1].diff().tolist()) for x in (part, w))
    assert [x.tolist() for x in sets] == [
        expected[64 * row + t].tolist() for row in (2, 0) for t in range(5)
    ]
    few = w.tiny()
    assert few.targets.shape == (1, 64) and len(few.weight) == 64
    losses = [loss.loss(few).item() for name, loss in REPLAYS.items() if name != NO_SUPPORT]
    assert losses == pytest.approx(4 * losses[:1], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (("--peers", "nobody"), "--peers: expected the beginning of eager, log_softmax"),
        (("--workload", "smollm"), "--shapes: expected synthetic workloads only; got smollm"),
        (("--workload", "support"), "--shapes: expected synthetic workloads only; got top-p 0.8"),
        (("--shapes", "1,2"), "--shapes: invalid"),
        (("--rounds", "0"), "--rounds: expected at least 1; got 0"),
    ),
)
def test_arguments(options, message, capsys):
    given = ["--device", "cpu", "--workload", "smollm", "support"]
    assert head.parse_args(given).workload == ["smollm", *TRUNCATED]
    with pytest.raises(SystemExit):
        args(*options)
    assert message in capsys.readouterr().err


def test_synthetic_logits_have_the_profile_of_a_language_model():
    """Entropy, tail and peak of the demo model's own samples, at another vocabulary."""
    told = profile(make("dense", (512, 20_011, 192)))
    entropy, words, below = (float(re.search(p, told)[1]) for p in (
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


def test_peak_memory_sees_what_comes_and_goes():
    with PeakMemory(torch.device("cpu")) as memory:
        torch.ones(200 << 18).sum()
    if memory.extra_bytes is None:
        pytest.skip("this system does not tell")
    assert 195 << 20 < memory.extra_bytes < 210 << 20


def test_tune_times_only_what_is_right(monkeypatch):
    """Tunes in the interpreter, which the tests set."""
    good = list(tune.rows(4, 300, torch.device("cpu"), 1, DEVICES["H200"]))
    assert all(row["status"] == "ok" and row["of_copy"] > 0 for row in good)
    known = {row["kernel"] for row in good if "predicted_seconds" in row}
    assert {"copy", "token_stats", "logit_grads, float32"} < known
    moved = {row["kernel"]: row["bytes"] for row in good}
    assert moved["token_stats"] == 4 * 4 * 300 and moved["logit_grads, float32"] == 8 * 4 * 300
    from grpo_kernels.kernels import triton_backend, triton_logits

    right = triton_backend.token_stats

    def wrong_at_other_settings(*args, launch=triton_logits.ROW_LAUNCH, **options):
        stats = right(*args, **options)
        return stats._replace(logps=stats.logps + (launch.block == 64))

    monkeypatch.setattr(triton_backend, "token_stats", wrong_at_other_settings)
    monkeypatch.setattr(
        tune, "row_settings", lambda cuda: [{}, {"launch": triton_logits.Launch(64, 1)}]
    )
    rows = [r for r in tune.rows(4, 300, torch.device("cpu"), 1) if "token_stats" in r["kernel"]]
    assert [r["status"] for r in rows] == ["ok", "wrong"] * 2 and "seconds" not in rows[1]


def test_gemms_are_timed_one_by_one_if_they_are_right(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gemms, "device_of", lambda _: DEVICES["H200"])
    path = tmp_path / "gemms.json"
    small = ["--device", "cpu", "--heads", "600,32", "601,32", "--rows", "8", "--json", str(path)]
    gemms.main(small)
    rows = json.loads(path.read_text())["rows"]
    names = [f"{name}, {dtype}" for dtype in ("float32", "bfloat16")
             for name in ("logits", "dH", "dW, beta 0", "dW, beta 1")]  # fmt: skip
    assert [row["product"] for row in rows] == 2 * names
    assert all(row["status"] == "ok" and row["predicted_seconds"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert "x model" in printed and "(worst)" in printed and printed.count("dW, beta 1") == 4
    monkeypatch.setattr(
        gemms, "addmm", lambda out, a, b, beta: 1 / 0 if beta else out.copy_(1.1 * (a @ b))
    )
    gemms.main(small)
    rows = json.loads(path.read_text())["rows"]
    failed = [*["wrong"] * 3, "ZeroDivisionError: division by zero"]
    assert [row["status"] for row in rows] == 4 * failed
    assert not any("seconds" in row for row in rows)


def test_steps_on_a_gpu_report_what_became_of_them(tmp_path):
    late = tmp_path / "late"
    # Of what a step starts, too, nothing goes on.
    lasts = f"import time, pathlib; time.sleep(4); pathlib.Path({str(late)!r}).touch()"
    slow = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {lasts!r}])"
    slow = f"print('begun', flush=True); {slow}"
    python = [sys.executable, "-c"]
    for status, step, left in (
        ("ok", on_gpu.Step("step", 60, [*python, "print('a | table')"]), 60),
        ("failed, exit status 3", on_gpu.Step("step", 60, [*python, "exit(3)"]), 60),
        ("out of time", on_gpu.Step("cut", 2, [*python, slow]), 60),
        ("not run: no time left", on_gpu.Step("step", 60, [*python, ""]), 0),
        ("no-such-package is not installed",
         on_gpu.Step("step", 60, python, packages=("torch", "no-such-package")), 60),
    ):  # fmt: skip
        assert on_gpu.run(step, tmp_path, left, {})["status"] == status
    time.sleep(3)
    assert not late.exists()
    assert (tmp_path / "cut.log").read_text() == "begun\n"
    (tmp_path / "step.log").write_text("a | table\n")
    steps = {"step": {"status": "ok", "seconds": 1}}
    page = on_gpu.markdown({"device": "some GPU", "date": "today"}, steps, tmp_path)
    assert "# some GPU, today" in page and "| step | ok | 1 |" in page and "a | table" in page


def test_every_step_on_a_gpu_has_its_time(tmp_path):
    planned = on_gpu.steps(tmp_path, dry_run=False)
    assert [step.name for step in planned] == [
        "calls", "exact", "exp_gemm", "scoring", "graph", "sweep", "gemms", "tests", "tune",
        "peers", "training",
    ]  # fmt: skip
    # Beside them a step that is to come, and the start.
    assert sum(step.limit_s for step in planned) + 30 <= 8 * 60 - 5


def test_wheels_are_found_without_being_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with zipfile.ZipFile(tmp_path / "peer-1.0-py3-none-any.whl", "w") as file:
        file.writestr("peer_of_ours.py", "")
        file.writestr("peer-1.0.dist-info/METADATA", "Name: peer-of-ours\nVersion: 1.0\n")
    site, env = tmp_path / "site", {**os.environ}
    on_gpu.unpack(tmp_path, str(site), env)
    subprocess.run([sys.executable, "-c", "import peer_of_ours"], env=env, check=True)
    assert (site / "peer-1.0.dist-info").exists()


def on_gpu_of(out):
    command = [on_gpu.ROOT / "benchmarks" / "on_gpu.sh", "--dry-run", "--out", out]
    env = {k: x for k, x in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out.parent,
        env={**env, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def packed(out):
    with tarfile.open(out.with_name("day.tar")) as file:
        return {name.removeprefix("day/") for name in file.getnames()}


def test_a_day_on_a_gpu_is_rehearsed(tmp_path):
    """Every step but the training run, at tiny sizes, from start to end."""
    out = tmp_path / "day"
    process = on_gpu_of(out)
    told, _ = process.communicate()
    assert process.returncode == 0, told + (out / "README.md").read_text()
    names = [step.name for step in on_gpu.steps(out, dry_run=True)]
    logs = {f"{name}.log" for name in names}
    results = {f"{name}.json" for name in names if name != "tests"}
    assert packed(out) == {"day", "header.json", "README.md"} | logs | results
    assert {"device", "commit", "torch", "triton"} <= set(
        json.loads((out / "header.json").read_text())
    )
    for name in ("exact", "scoring", "graph", "sweep"):
        rows = json.loads((out / f"{name}.json").read_text())["rows"]
        assert rows and all({"floor", "call"} <= set(row["seconds"]) for row in rows)


def test_a_day_on_a_gpu_that_is_terminated_is_packed(tmp_path):
    out = tmp_path / "day"
    process = on_gpu_of(out)
    log = out / "calls.log"
    while process.poll() is None and not (log.exists() and " ok " in log.read_text()):
        time.sleep(0.1)
    process.terminate()
    told, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, told
    assert {"header.json", "calls.json", "calls.log", "README.md"} <= packed(out)
    assert "ended with the run" in (out / "README.md").read_text()


def test_a_wrong_call_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    def fails(given):
        raise RuntimeError("no such kernel")

    def off(given):
        value, logps = whole_calls.logps(given)
        return (value if given.package is reference else 1.01 * value), logps

    cases = {"raises": fails, "off": off, "right": whole_calls.logps}
    monkeypatch.setattr(
        whole_calls, "CASES", {k: (torch.float32, call) for k, call in cases.items()}
    )
    path = tmp_path / "calls.json"
    with pytest.raises(SystemExit, match="failed: raises, off"):
        whole_calls.main(["--device", "cpu", "--json", str(path)])
    told = [row["status"] for row in json.loads(path.read_text())["rows"]]
    assert told == ["RuntimeError: no such kernel", "wrong", "ok"]
    assert "1 of 3 calls are right" in capsys.readouterr().out


def test_a_shape_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    """And a wrong one has no times, and what the cost model says stands beside the others."""
    seen = []

    def logps_error(w, logps):
        seen.append(w)
        return (float("nan"), 1 / (len(seen) != 2), 1e-6)[len(seen) - 1]

    monkeypatch.setattr(gpu_times, "logps_error", logps_error)
    monkeypatch.setattr(gpu_times, "device_of", lambda _: DEVICES["H200"])
    part = gpu_times.PARTS["scoring"]._replace(tiny=((64, 16),) * 3)
    monkeypatch.setitem(gpu_times.PARTS, "scoring", part)
    path = tmp_path / "scoring.json"
    given = ["scoring", "--device", "cpu", "--rounds", "1", "--json", str(path)]
    with pytest.raises(SystemExit, match="failed"):
        gpu_times.main(given)
    rows = json.loads(path.read_text())["rows"]
    told = [row["status"].split(":")[0] for row in rows]
    assert told == ["wrong", "ZeroDivisionError", "ok"]
    assert [("seconds" in row, "predicted_ms" in row) for row in rows] == [
        (False, False), (False, False), (True, True)
    ]  # fmt: skip
    assert "x model" in capsys.readouterr().out

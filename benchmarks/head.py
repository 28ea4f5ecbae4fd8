"""Forward and backward of the loss head: time, extra peak memory and error, side by side.

    python -m benchmarks.head [--workload smollm qwen05] [--device cpu|cuda] [--json out.json]

Every contender gets the same inputs. Its gradients are compared with float64 on a few sequences
first; one that is wrong gets a row that says so, never a time. Times are taken in turns (a round
runs each contender once) and given as median [20th, 80th percentile]. Memory is the peak beyond
the inputs, in a fresh process for each contender.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import PeakMemory
from benchmarks.workloads import WORKLOADS, Workload
from grpo_kernels import fused_grpo_loss, grpo_loss, linear_logprobs, reference

Loss = Callable[[Workload], Tensor]
CHECKED_SEQUENCES = 2
# Relative to the norm of the float64 gradient of the same inputs.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}


def eager(w: Workload) -> Tensor:
    """Materialised logits, log_softmax, gather."""
    logps = (w.hidden @ w.weight.T).float().log_softmax(-1).gather(-1, w.targets[..., None])
    return reference.grpo_loss(logps.squeeze(-1), w.advantages, old_logps=w.old_logps).loss


def eager_logsumexp(w: Workload) -> Tensor:
    """Materialised logits, target logit minus logsumexp, as some trainers write it."""
    logits = (w.hidden @ w.weight.T).float()
    logps = logits.gather(-1, w.targets[..., None]).squeeze(-1) - logits.logsumexp(-1)
    return reference.grpo_loss(logps, w.advantages, old_logps=w.old_logps).loss


def one_pass(w: Workload) -> Tensor:
    return fused_grpo_loss(w.hidden, w.weight, w.targets, w.advantages, old_logps=w.old_logps).loss


def two_passes(w: Workload) -> Tensor:
    logps = linear_logprobs(w.hidden, w.weight, w.targets).logps
    return grpo_loss(logps, w.advantages, old_logps=w.old_logps).loss


BASELINE = "eager, log_softmax"
CONTENDERS: dict[str, Loss] = {
    BASELINE: eager,
    "eager, logsumexp": eager_logsumexp,
    "ours, one pass": one_pass,
    "ours, two passes": two_passes,
}


def bare_gemms(w: Workload) -> None:
    """The three products alone, in chunks and into buffers that are there already: the floor."""
    hidden, weight = w.hidden.detach().flatten(0, 1), w.weight.detach()
    chunks = hidden.split(512 if hidden.device.type == "cpu" else 4096)
    logits = hidden.new_zeros(len(chunks[0]), weight.shape[0])
    d_hidden, d_weight = torch.zeros_like(chunks[0]), torch.zeros_like(weight)
    for chunk in chunks:
        out = logits[: len(chunk)]
        torch.mm(chunk, weight.T, out=out)
        torch.mm(out, weight, out=d_hidden[: len(chunk)])
        torch.addmm(d_weight, out.T, chunk, out=d_weight)


def with_grad(w: Workload) -> Workload:
    for x in (w.hidden, w.weight):
        x.grad = None
        x.requires_grad_()
    return w


def errors(loss: Loss, w: Workload) -> dict[str, float]:
    """Relative errors of loss and gradients against float64, on a few sequences."""
    w = w.head_of(CHECKED_SEQUENCES)
    exact = Workload(
        w.name, w.hidden.detach().double(), w.weight.detach().double(), w.targets,
        w.advantages.double(), w.old_logps.double(),
    )  # fmt: skip
    mine = Workload(**{**vars(w), "hidden": w.hidden.detach().clone(), "weight": w.weight.detach()})
    reference.fused_grpo_loss(
        with_grad(exact).hidden, exact.weight, exact.targets, exact.advantages,
        old_logps=exact.old_logps,
    ).loss.backward()  # fmt: skip
    loss(with_grad(mine)).backward()
    result = {}
    for name in ("hidden", "weight"):
        truth, grad = getattr(exact, name).grad, getattr(mine, name).grad
        result[f"d_{name}"] = float((grad.double() - truth).norm() / truth.norm())
    w.weight.requires_grad_(False).grad = None
    return result


def time_once(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def times(
    names: list[str], w: Workload, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each contender and of the bare GEMMs, in turns, after one round unmeasured."""
    taken: dict[str, list[float]] = {name: [] for name in ("bare GEMMs", *names)}

    def run(name: str) -> None:
        if name in CONTENDERS:
            CONTENDERS[name](w).backward()
        else:
            bare_gemms(w)

    for round_ in range(rounds + 1):
        for name in taken:
            with_grad(w)
            seconds = time_once(functools.partial(run, name), device)
            if round_:
                taken[name].append(seconds)
    return taken


def extra_memory(name: str, args: argparse.Namespace, workload: str) -> int:
    """Bytes beyond the inputs at the peak of forward and backward, from a fresh process."""
    command = [
        sys.executable, "-m", "benchmarks.head", "--measure-memory-of", name,
        "--workload", workload, "--device", str(args.device), "--dtype", args.dtype,
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"memory of {name!r}: {run.stderr[-2000:]}")
    return int(run.stdout.split()[-1])


def measure_memory(name: str, w: Workload, device: torch.device) -> int:
    # Libraries load and thread pools start on the first call, at a size that costs nothing.
    tiny = Workload(
        "warm-up", w.hidden[:1, :2], w.weight[:64], w.targets[:1, :2] % 64, w.advantages[:1],
        w.old_logps[:1, :2],
    )  # fmt: skip
    tiny.hidden, tiny.weight = tiny.hidden.clone(), tiny.weight.clone()
    CONTENDERS[name](with_grad(tiny)).backward()
    with PeakMemory(device) as memory:
        CONTENDERS[name](with_grad(w)).backward()
    if memory.extra_bytes is None:
        raise OSError(f"this system does not tell the peak memory of work on {device}")
    return memory.extra_bytes


def run_workload(workload: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    w = WORKLOADS[workload]().to(device, dtype)
    print(f"\n{w.describe()}, forward + backward, head trained, {args.rounds} rounds", flush=True)
    rows: list[dict[str, Any]] = []
    for name in CONTENDERS:
        row: dict[str, Any] = {
            "workload": w.describe(),
            "name": name,
            **errors(CONTENDERS[name], w),
        }
        row["ok"] = max(row["d_hidden"], row["d_weight"]) <= TOLERANCE[dtype]
        rows.append(row)
    sound = [row for row in rows if row["ok"]]
    taken = times([row["name"] for row in sound], w, args.rounds, device)
    del w
    for row in sound:
        row["seconds"] = taken[row["name"]]
        row["extra_bytes"] = extra_memory(row["name"], args, workload)
    rows.append({"name": "bare GEMMs", "ok": True, "seconds": taken["bare GEMMs"]})
    print_table(rows)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    base = next(row for row in rows if row["name"] == BASELINE)
    floor = statistics.median(rows[-1]["seconds"])
    print(
        f"{'':22}{'seconds':>8} {'[p20, p80]':>15} {'x eager':>8} {'x GEMMs':>8}"
        f" {'extra MiB':>10} {'x eager':>8} {'dH error':>9} {'dW error':>9}"
    )
    for row in rows:
        if not row["ok"]:
            print(f"{row['name']:22}wrong: errors {row['d_hidden']:.1e}, {row['d_weight']:.1e}")
            continue
        seconds = sorted(row["seconds"])
        median = statistics.median(seconds)
        low, high = (seconds[round(q * (len(seconds) - 1))] for q in (0.2, 0.8))
        line = f"{row['name']:22}{median:8.2f} {f'[{low:.2f}, {high:.2f}]':>15}"
        if base["ok"]:
            line += f" {median / statistics.median(base['seconds']):8.2f}"
        line += f" {median / floor:8.2f}"
        if "extra_bytes" in row:
            share = row["extra_bytes"] / base["extra_bytes"] if base["ok"] else float("nan")
            line += f" {row['extra_bytes'] / 2**20:10,.0f} {share:8.3f}"
            line += f" {row['d_hidden']:9.1e} {row['d_weight']:9.1e}"
        print(line)


def header(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True, text=True, cwd=Path(__file__).parent,
    ).stdout.strip()  # fmt: skip
    device = torch.device(args.device)
    processor = platform.processor() or platform.machine()
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    elif Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((x.split(":")[1].strip() for x in lines if "model name" in x), processor)
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = "absent"
    return {
        "device": f"{processor}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit or "unknown",
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head", description=(__doc__ or "").split("\n")[0]
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument("--json", type=Path, help="write every measurement to this file, too")
    parser.add_argument("--measure-memory-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.dtype is None:
        args.dtype = "bfloat16" if torch.device(args.device).type == "cuda" else "float32"
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1; got {args.rounds}")
    return args


def main() -> None:
    args = parse_args()
    if args.measure_memory_of:
        device = torch.device(args.device)
        w = WORKLOADS[args.workload[0]]().to(device, getattr(torch, args.dtype))
        print(measure_memory(args.measure_memory_of, w, device))
        return
    result = {**header(args), "rows": []}
    print(" | ".join(f"{k}: {v}" for k, v in result.items() if k != "rows"))
    for workload in args.workload:
        result["rows"] += run_workload(workload, args)
    line = json.dumps(result)
    print(f"\n{line}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

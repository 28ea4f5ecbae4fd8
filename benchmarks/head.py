"""Compares implementations of the LM head with the GRPO loss: time, extra memory and error.

    python -m benchmarks.head [--workload smollm rollout] [--device cpu|cuda] [--json out.json]
    python -m benchmarks.head --workload dense --shapes 8192,151936,896 --peers TRL Liger

Every contender gets the same inputs. Its loss and gradients are first compared with float64 on a
few sequences; in every timed step, its loss and the norms of its gradients are compared with those
of the others. A contender that is wrong or not installed gets a row that says so, and no time.

Time: contenders take turns. A turn is a warm-up step, the forward alone, and forward with backward.
The table has the median [20th, 80th percentile] over rounds (of three rounds these are the smallest
and the largest). On a CPU each contender runs in a process of its own, whose allocator keeps its
memory during a turn, as PyTorch's does on a GPU; with --fresh-memory each step has to ask the
system for memory anew.

Memory: "extra" is the peak beyond the inputs, in a fresh process per contender. "workspace" is the
part of it that is neither the gradient of the hidden states nor a float32 gradient of the head.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.contenders import BASELINE, CONTENDERS, OURS, UNPADDED
from benchmarks.measure import (
    FLOOR,
    Loss,
    add_head_options,
    default_dtype,
    extra_memory,
    header,
    loss_of,
    print_header,
    reason,
    spread,
    stored,
    times,
    with_grad,
    write_json,
)
from benchmarks.workloads import SYNTHETIC, WORKLOADS, Workload, make
from grpo_kernels import reference
from grpo_kernels.inputs import DEFAULT_TOLERANCE

CHECKED_SEQUENCES, CHECKED_POSITIONS = 2, 64
# Allowed errors. Those of gradients are relative to the norm of the float64 gradient of the same
# inputs, that of the loss to the mean size of its terms, which is 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
# A sampled gradient is asked for DEFAULT_TOLERANCE; a few sequences alone may be noisier.
SAMPLED_TOLERANCE = 2.5 * DEFAULT_TOLERANCE
ERRORS = ("loss", "d_hidden", "d_weight")


class Truth(NamedTuple):
    """A few sequences of a workload with their loss and gradients in float64."""

    w: Workload
    loss: float
    d_hidden: Tensor
    d_weight: Tensor


def truth_of(w: Workload) -> Truth:
    """Picks a few sequences that have a gradient and computes their loss in float64."""
    trained = torch.arange(len(w.advantages), device=w.advantages.device)
    if w.mask is not None:
        trained = trained[(w.advantages != 0) & w.mask.any(1)]
    w = w.sequences(trained[:CHECKED_SEQUENCES]).first(CHECKED_POSITIONS).each(Tensor.detach)
    exact = with_grad(w.each(lambda x: x.double() if x.is_floating_point() else x))
    loss = reference.fused_grpo_loss(
        exact.hidden,
        exact.weight,
        exact.targets,
        exact.advantages,
        exact.mask,
        old_logps=exact.old_logps,
    ).loss
    loss.backward()
    assert exact.hidden.grad is not None and exact.weight.grad is not None
    return Truth(w, loss.item(), exact.hidden.grad, exact.weight.grad)


def errors(loss: Loss, truth: Truth) -> dict[str, float]:
    """Returns the absolute error of the loss and the relative errors of the gradients."""
    w = with_grad(truth.w.each(Tensor.detach))
    value = loss(w)
    value.backward()
    assert w.hidden.grad is not None and w.weight.grad is not None
    return {
        "loss": abs(value.item() - truth.loss),
        "d_hidden": _relative_error(w.hidden.grad, truth.d_hidden),
        "d_weight": _relative_error(w.weight.grad, truth.d_weight),
    }


def _relative_error(grad: Tensor, expected: Tensor) -> float:
    # In parts, so that a large head is in memory once in float64, not three times.
    parts = zip(grad.split(4096), expected.split(4096), strict=True)
    squares = sum(float((x - y).square().sum()) for x, y in parts)
    return squares**0.5 / float(expected.norm())


def run_workload(workload: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one row per contender; its `status` is "ok", "wrong" or why it has no times."""
    deadline = time.monotonic() + args.limit_s
    w = make(workload, args.shapes, args.device).to(getattr(torch, args.dtype))
    print(f"\n{w.describe()}, forward + backward, head trained, {args.rounds} rounds", flush=True)
    rows: list[dict[str, Any]] = []
    truth = truth_of(w)
    for name in args.contenders:
        row: dict[str, Any] = {"workload": w.describe(), "name": name}
        idle = name == UNPADDED and w.mask is None
        absent = "every token counts" if idle else CONTENDERS[name].absent(w.hidden.device)
        row["status"] = absent or check(name, truth, row, backend=args.backend)
        rows.append(row)
    del truth
    torch.compiler.reset()  # drops what was compiled for the shapes of the check
    correct = [row for row in rows if row["status"] == "ok"]
    flop, device = 6 * w.tokens * w.weight.numel(), w.hidden.device
    gradient_bytes = w.hidden.nbytes + 4 * w.weight.numel()
    with stored(w) as path:
        del w
        names = [row["name"] for row in correct]
        taken = times(
            names,
            path,
            device,
            args.rounds,
            fresh_memory=args.fresh_memory,
            deadline=deadline,
            backend=args.backend,
        )
        wrong = wrong_in_full(taken, getattr(torch, args.dtype))
        for row in correct:
            name, timing = row["name"], taken[row["name"]]
            if "status" in timing:
                row["status"] = timing["status"][0]
                continue
            try:
                row["extra_bytes"] = extra_memory(name, path, device, backend=args.backend)
            except Exception as error:
                row["status"] = reason(name, error)
                continue
            if name in wrong:
                row |= {"status": "wrong in full", "results": timing["results"]}
                continue
            row |= timing
            row["workspace_bytes"] = row["extra_bytes"] - gradient_bytes
            row["tflops"] = flop / statistics.median(row["seconds"]) / 1e12
    seconds = taken[FLOOR]["seconds"]
    tflops = flop / statistics.median(seconds) / 1e12
    rows.append({"name": FLOOR, "status": "ok", "seconds": seconds, "tflops": tflops})
    print_table(rows)
    return rows


def check(name: str, truth: Truth, row: dict[str, Any], **options: Any) -> str:
    """Fills in the errors of a row and returns its status, also if a peer raises an exception."""
    try:
        row |= errors(loss_of(name, options), truth)
    except Exception as error:
        return reason(name, error)
    allowed = SAMPLED_TOLERANCE if "sampled" in name else TOLERANCE[truth.w.hidden.dtype]
    return "ok" if all(row[key] <= allowed for key in ERRORS) else "wrong"


def wrong_in_full(taken: dict[str, dict[str, list[Any]]], dtype: torch.dtype) -> set[str]:
    """Returns the contenders whose loss or gradient norms are not the median of all."""
    results = {name: timing["results"] for name, timing in taken.items() if "results" in timing}
    expected = [statistics.median(x) for x in zip(*chain(*results.values()), strict=True)]
    wrong = set()
    for name, steps in results.items():
        allowed = SAMPLED_TOLERANCE if "sampled" in name else TOLERANCE[dtype]
        for loss, *norms in steps:
            off = [abs(x / y - 1) for x, y in zip(norms, expected[1:], strict=True)]
            # Written so that NaN is wrong.
            if not all(x <= allowed for x in (abs(loss - expected[0]), *off)):
                wrong.add(name)
    return wrong


def print_table(rows: list[dict[str, Any]]) -> None:
    base = next((r for r in rows if r["name"] == BASELINE and r["status"] == "ok"), None)
    floor = statistics.median(rows[-1]["seconds"])
    print(
        f"{'':27}{'seconds':>8} {'[p20, p80]':>15} {'x eager':>8} {'x GEMMs':>8} {'forward':>8}"
        f" {'TFLOP/s':>8} {'extra MiB':>10} {'x eager':>8} {'workspace':>10} {'loss err':>8}"
        f" {'dH err':>8} {'dW err':>8}"
    )
    for row in rows:
        if row["status"] != "ok":
            off = ", ".join(f"{key} {row[key]:.1e}" for key in ERRORS if key in row)
            details = f": off by {off}" if row["status"] == "wrong" else ""
            print(f"{row['name']:27}{row['status']}{details}")
            continue
        median, low, high = spread(row["seconds"])
        line = f"{row['name']:27}{median:8.3g} {f'[{low:.3g}, {high:.3g}]':>15}"
        line += f" {median / spread(base['seconds'])[0]:8.2f}" if base else f"{'':9}"
        line += f" {median / floor:8.2f}"
        if row.get("forward_seconds"):
            line += f" {statistics.median(row['forward_seconds']):8.3g}"
        else:
            line += f"{'':9}"
        line += f" {row['tflops']:8.3g}"
        if row.get("extra_bytes") is not None:
            share = row["extra_bytes"] / base["extra_bytes"] if base else float("nan")
            line += f" {row['extra_bytes'] / 2**20:10,.0f} {share:8.3f}"
            line += f" {row['workspace_bytes'] / 2**20:10,.0f}"
            line += "".join(f" {row[key]:8.1e}" for key in ERRORS)
        print(line)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head", description=(__doc__ or "").split("\n")[0]
    )
    default = ["smollm", "rollout", "flat", "qwen05"]
    parser.add_argument(
        "--workload",
        nargs="+",
        choices=WORKLOADS,
        default=default,
        metavar="NAME",
        help=f"batches to measure, among {', '.join(WORKLOADS)}; benchmarks/workloads.py describes "
        f"them (default: {' '.join(default)})",
    )
    parser.add_argument(
        "--shapes",
        type=shape,
        metavar="N,V,H",
        help="tokens, vocabulary and hidden size of synthetic workloads (default: their own)",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        metavar="NAME",
        help="measure only peers whose name begins with NAME, beside eager and this library "
        "(default: all; without NAME: none)",
    )
    add_head_options(parser)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="start no further round of a workload after this time (default: no limit)",
    )
    parser.add_argument(
        "--fresh-memory",
        action="store_true",
        help="on a CPU: each step asks the system for memory anew, as by default with glibc",
    )
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or default_dtype(args.device)
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1; got {args.rounds}")
    fixed = [name for name in args.workload if name not in SYNTHETIC]
    if args.shapes and fixed:
        parser.error(f"--shapes: expected synthetic workloads only; got {', '.join(fixed)}")
    always = (BASELINE, *OURS)
    peers = [""] if args.peers is None else args.peers
    for peer in peers:
        if not any(name.lower().startswith(peer.lower()) for name in CONTENDERS):
            parser.error(f"--peers: expected the beginning of {', '.join(CONTENDERS)}; got {peer}")
    begins = tuple(peer.lower() for peer in peers)
    args.contenders = [n for n in CONTENDERS if n in always or n.lower().startswith(begins)]
    return args


def shape(text: str) -> tuple[int, int, int]:
    """Parses "N,V,H"."""
    N, V, H = (int(part) for part in text.split(","))
    if min(N, V, H) < 1:
        raise ValueError
    return N, V, H


def main() -> None:
    args = parse_args()
    # Peers warn of the way in which they are called here.
    warnings.filterwarnings("ignore", category=UserWarning)
    result = {**header(args.device), "backend": args.backend, "rows": []}
    result["fresh_memory"] = args.fresh_memory
    print_header(result)
    for workload in args.workload:
        try:
            result["rows"] += run_workload(workload, args)
        except FileNotFoundError as error:  # the demo model's package
            print(f"\n{workload}: {error}")
            result["rows"].append({"workload": workload, "name": "", "status": str(error)})
        # After each workload, so that an interrupted run keeps its results.
        write_json(args.json, result)


if __name__ == "__main__":
    main()

"""Compares implementations of the LM head with the GRPO loss: time, extra memory and error.

    python -m benchmarks.head [--workload smollm rollout] [--json out.json]
    python -m benchmarks.head --workload dense --shapes 8192,151936,896 --peers TRL Liger

Every contender gets the same inputs. Its loss and gradients are first compared with float64 on a
few sequences, then its loss and the norms of its gradients in every timed step. A contender of this
library that is wrong has no time, and the run fails. A peer's row has its errors, and says so where
one is above the limit. What is not installed gets a row that says so.

Time: contenders take turns. A turn is steps of forward and backward in a fresh process, which keeps
its memory, as PyTorch does on a GPU, until one takes no more memory from the system. The table has
the median [20th, 80th percentile] over rounds (of three rounds these are the smallest and the
largest).

Memory is the peak beyond the inputs, in a fresh process as well.

`--workload support` stands for the demo model's samples under top-p, top-k and min-p. Their loss
is over the ids that sampling kept; eager masks all others.

A GPU's kernels and products one by one: `benchmarks.gpu_day`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.checks import TOLERANCE, check, has_times, right, step_error, truth_of, whole_step
from benchmarks.contenders import BASELINE, CONTENDERS, OURS, contenders_of
from benchmarks.measure import (
    FLOOR,
    add_device_and_shape,
    alone,
    measure_memory,
    new_result,
    parser_of,
    reason,
    stored,
    table,
    take_turn,
    write_json,
)
from benchmarks.workloads import TRUNCATED, WORKLOADS, Workload, make

Row = dict[str, Any]


def run_workload(workload: str, args: argparse.Namespace) -> list[Row]:
    """Returns one row per contender; its `status` is "ok", says wrong, or why it has no times."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    w = make(workload, args.shapes, device).to(dtype)
    print(f"\n{w.describe()}, forward + backward, {args.rounds} rounds", flush=True)
    rows = checked(w, [name for name in contenders_of(w) if name in args.contenders])
    about, expected = w.describe(), whole_step(w)
    with stored(w) as path:
        del w
        measure(rows, path, device, args.rounds)
    floor = rows[FLOOR]["seconds"]
    for name, row in rows.items():
        results = row.pop("results", ())
        if row["status"] == "ok" and name != FLOOR:
            steps = (step_error(x, expected) for x in results)
            row["status"] = "ok" if right(steps, dtype) else "wrong in full"
        row |= {"workload": about, "name": name}
        if has_times(name, row["status"]):
            row["floor_seconds"] = floor
        else:
            row.pop("seconds", None)
    print(*table([*rows.values()], TOLERANCE[dtype]), sep="\n", flush=True)
    return [*rows.values()]


def checked(w: Workload, names: list[str]) -> dict[str, Row]:
    """Returns a row per contender with its errors, and one for the bare GEMMs."""
    truth, rows = truth_of(w), dict[str, Row]()
    for name in names:
        absent = CONTENDERS[name].absent(w.hidden.device)
        rows[name] = {"status": absent} if absent else check(name, truth)
    torch.compiler.reset()  # drops what was compiled for the shapes of the check
    return rows | {FLOOR: {"status": "ok"}}


def measure(rows: dict[str, Row], path: Path, device: torch.device, rounds: int) -> None:
    """Adds times, results and memory; the status of what raises an exception is the reason."""
    timed = [name for name, row in rows.items() if has_times(name, row["status"])]
    for number in tqdm(range(rounds + 1), desc="rounds", disable=None):
        for name in timed:
            row = rows[name]
            if not has_times(name, row["status"]):
                continue
            try:
                if number < rounds:
                    seconds, result = alone(take_turn, name, path, device)
                    row.setdefault("seconds", []).append(seconds)
                    row.setdefault("results", []).append(result)
                elif name != FLOOR:
                    row["extra_bytes"] = alone(measure_memory, name, path, device)
            except Exception as error:
                if name == FLOOR:  # every result is relative to it
                    raise
                row["status"] = reason(error)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("benchmarks.head", __doc__, rounds=5)
    default = ["smollm", "rollout", "qwen05"]
    parser.add_argument(
        "--workload", nargs="+", choices=(*WORKLOADS, "support"), default=default, metavar="NAME",
        help=f"batches to measure, among {', '.join(WORKLOADS)}; benchmarks/workloads.py describes "
        f"them; support: the last {len(TRUNCATED)} (default: {' '.join(default)})",
    )  # fmt: skip
    add_device_and_shape(parser.add_argument, "--shapes")
    parser.add_argument(
        "--peers", nargs="*", metavar="NAME",
        help="measure only peers whose name begins with NAME, beside eager and this library "
        "(default: all; without NAME: none)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    args.workload = [
        name for x in args.workload for name in (TRUNCATED if x == "support" else (x,))
    ]
    peers = tuple(peer.lower() for peer in ([""] if args.peers is None else args.peers))
    always = (BASELINE, *OURS)
    args.contenders = [n for n in CONTENDERS if n in always or n.lower().startswith(peers)]
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    # Peers warn of the way in which they are called here.
    warnings.filterwarnings("ignore", category=UserWarning)
    result = new_result(args.device)
    for workload in args.workload:
        try:
            result["rows"] += run_workload(workload, args)
        except FileNotFoundError as error:  # the demo model's package
            print(f"\n{workload}: {error}")
            result["rows"].append({"workload": workload, "name": "", "status": str(error)})
        write_json(args.json, result)
    ours = [x["name"] for x in result["rows"] if x["name"] in OURS and x["status"] != "ok"]
    sys.exit(f"failed: {', '.join(ours)}" if ours else 0)


if __name__ == "__main__":
    main()

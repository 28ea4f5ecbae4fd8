"""Compares implementations of the LM head with the GRPO loss: time, extra memory and error.

    python -m benchmarks.head [--workload smollm rollout] [--json out.json]
    python -m benchmarks.head --workload dense --shapes 8192,151936,896 --peers TRL Liger

Every contender gets the same inputs. The loss and the gradients of its steps are compared with
float64. A contender of this library that is wrong has no time, and the run fails. A peer's row has
its errors, and says so where one is above the limit. What is not installed gets a row that says so.

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

from benchmarks.checks import TOLERANCE, has_times, right, truth_of
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
from benchmarks.workloads import TRUNCATED, WORKLOADS, make

Row = dict[str, Any]


def run_workload(workload: str, args: argparse.Namespace) -> list[Row]:
    """Returns one row per contender; its `status` is "ok", says wrong, or why it has no times."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    w = make(workload, args.shapes, device).to(dtype)
    print(f"\n{w.describe()}, forward + backward, {args.rounds} rounds", flush=True)
    names = [name for name in contenders_of(w) if name in args.contenders]
    rows = {name: {"status": CONTENDERS[name].absent(device) or "ok"} for name in names}
    rows[FLOOR] = {"status": "ok"}
    about, truth = w.describe(), truth_of(w)
    with stored(w, truth) as path:
        del w, truth
        measure(rows, path, device, args.rounds, TOLERANCE[dtype])
    floor = rows[FLOOR]["seconds"]
    for name, row in rows.items():
        row |= {"workload": about, "name": name}
        if has_times(name, row["status"]):
            row["floor_seconds"] = floor
        else:
            row.pop("seconds", None)
    print(*table([*rows.values()], TOLERANCE[dtype]), sep="\n", flush=True)
    return [*rows.values()]


def measure(
    rows: dict[str, Row], path: Path, device: torch.device, rounds: int, limit: float
) -> None:
    """Adds times, errors and memory; the status of what raises an exception is the reason."""
    for number in tqdm(range(rounds + 1), desc="rounds", disable=None):
        for name, row in rows.items():
            if not has_times(name, row["status"]):
                continue
            try:
                if number < rounds:
                    seconds, errors = alone(take_turn, name, path, device)
                    row.setdefault("seconds", []).append(seconds)
                    if row["status"] == "ok":
                        row |= errors | {"status": "ok" if right(errors, limit) else "wrong"}
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

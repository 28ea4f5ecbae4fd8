"""Compares implementations of the LM head with the GRPO loss: time, extra memory and error.

    python -m benchmarks.head [--workload smollm rollout] [--device cpu|cuda] [--json out.json]
    python -m benchmarks.head --workload dense --shapes 8192,151936,896 --peers TRL Liger

Every contender gets the same inputs. Its loss and gradients are first compared with float64 on a
few sequences, then its loss and the norms of its gradients in every timed step. A contender of this
library that is wrong has no time, and the run fails. A peer's row has its errors, and says so where
one is above the limit. What is not installed gets a row that says so.

Time: contenders take turns. A turn is a warm-up step and a step of forward and backward. The table
has the median [20th, 80th percentile] over rounds (of three rounds these are the smallest and the
largest). On a CPU each contender runs in a process of its own, whose allocator keeps its memory
during a turn, as PyTorch's does on a GPU. On a GPU, eager and this library go first, in one
process; then each peer has a process of its own, which is ended after a quarter of --limit-s.

`--workload support` stands for the demo model's samples under top-p, top-k and min-p. Their loss
is over the ids that sampling kept; eager masks all others.

Memory: "extra" is the peak beyond the inputs, in a fresh process per contender. "workspace" is the
part of it that is neither the gradient of the hidden states nor a float32 gradient of the head.

On a GPU that the cost model knows, "x model" is the time over the predicted one. The JSON file is
written after every check, every round and every measurement of memory.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from benchmarks.checks import ERRORS, check, has_times, truth_of, whole_step, wrong_in_full
from benchmarks.contenders import BASELINE, CONTENDERS, OURS, TRUSTED, contenders_of
from benchmarks.cost_model import error_of_the_model, predict, shape
from benchmarks.gpu_costs import METHODS, device_of
from benchmarks.measure import (
    FLOOR,
    ByContender,
    extra_memory,
    header,
    load,
    new_result,
    parser_of,
    reason,
    release,
    run_alone,
    spread,
    stored,
    times,
    write_json,
)
from benchmarks.workloads import SYNTHETIC, TRUNCATED, WORKLOADS, Workload, make
from grpo_kernels.kernels import BACKENDS

# Contenders, and the methods of the cost model that stand for them.
PREDICTED_BY = {
    FLOOR: "bare GEMMs",
    BASELINE: BASELINE,
    OURS[0]: "exact",
    OURS[1]: "two passes",
    "TRL chunked head": "TRL chunked head",
    "Liger scaled CE": "Liger scaled CE",
}


class Results:
    """Results of a workload's contenders so far, saved whenever they grow."""

    def __init__(
        self, w: Workload, names: list[str], device: str, save: Callable[[list[Any]], None]
    ) -> None:
        self.workload, self.save, self.dtype = w.describe(), save, w.hidden.dtype
        self.expected = whole_step(w)
        # Over the entries of a support the FLOPs are others.
        self.flop = 2 * w.gemms * w.tokens * w.weight.numel() if w.support is None else None
        self.gradient_bytes = w.hidden.nbytes + (0 if w.frozen else 4 * w.weight.numel())
        self.by_name: ByContender = {name: {"status": "not measured"} for name in (*names, FLOOR)}
        self.predicted: dict[str, float] = {}
        model = device_of(header(device)["device"])
        # The model is of bfloat16 and three GEMMs where every token counts.
        plain = w.mask is None and w.support is None and w.gemms == 3
        if model and plain and self.dtype == torch.bfloat16:
            V, H = w.weight.shape
            self.predicted = {
                name: predict(model, (w.tokens, V, H), METHODS[method]) / 1e3
                for name, method in PREDICTED_BY.items()
            }

    def add(self, by_name: ByContender) -> None:
        """Adds results of some contenders, and saves the rows."""
        self.by_name |= by_name
        self.save(self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row per contender, the bare GEMMs last; no times of ours that is wrong."""
        wrong = wrong_in_full(self.by_name, self.expected, self.dtype)
        return [self._row(name, known, name in wrong) for name, known in self.by_name.items()]

    def _row(self, name: str, known: dict[str, Any], wrong: bool) -> dict[str, Any]:
        row = {"workload": self.workload, "name": name, **known}
        if wrong and row["status"] == "ok":
            row["status"] = "wrong in full"
        elif row["status"] == "ok" and "seconds" not in row:
            row["status"] = "not timed"
        if "seconds" not in row or not has_times(name, row["status"]):
            return {k: x for k, x in row.items() if not k.endswith("seconds")}
        if self.flop is not None:
            row["tflops"] = self.flop / statistics.median(row["seconds"]) / 1e12
        if name in self.predicted:
            row["predicted_seconds"] = self.predicted[name]
        if "extra_bytes" in row:
            row["workspace_bytes"] = row["extra_bytes"] - self.gradient_bytes
        return row


def run_workload(
    workload: str,
    args: argparse.Namespace,
    save: Callable[[list[Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Returns one row per contender; its `status` is "ok", says wrong, or why it has no times."""
    deadline = time.monotonic() + args.limit_s
    cuda = torch.device(args.device).type == "cuda"
    w = make(workload, args.shapes, args.device).to(torch.bfloat16 if cuda else torch.float32)
    print(f"\n{w.describe()}, forward + backward, {args.rounds} rounds", flush=True)
    names = [name for name in contenders_of(w) if name in args.contenders]
    results = Results(w, names, args.device, save)
    # On a GPU, a peer that takes too long or ends its process shall not take the others with it.
    alone = [n for n in names if args.isolate and n not in TRUSTED]
    with stored(w) as path:
        del w
        together = [name for name in names if name not in alone]
        measure_together(together, path, args, deadline, results.add)
        if alone:
            print_table(results.rows())
            release()
        for name in alone:
            results.add({name: measure_alone(name, path, args, deadline)})
    print_table(results.rows())
    return results.rows()


def measure_alone(
    name: str, path: Path, args: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    """Measures a contender in a process of its own and returns its row."""
    limit_s = min(args.limit_s / 4, deadline - time.monotonic())
    absent = CONTENDERS[name].absent(torch.device(args.device))
    if absent or limit_s <= 0:
        return {"status": absent or "not run: no time left"}
    try:
        result = run_alone(measure_together, [name], path, args, deadline, limit_s=limit_s)
    except TimeoutError as error:
        return {"status": f"out of time: {error}"}
    except BrokenProcessPool:
        return {"status": "its process ended"}
    except Exception as error:
        return {"status": reason(error)}
    return {**result[name], "floor_seconds": result[FLOOR].get("seconds", [])}


def measure_together(
    names: list[str],
    path: Path,
    args: argparse.Namespace,
    deadline: float,
    tell: Callable[[ByContender], None] = lambda _: None,
) -> ByContender:
    """Checks contenders, then times them in turns, then measures their memory; returns all of it.

    `tell` gets the results so far after each step, and after each round.
    """
    warnings.filterwarnings("ignore", category=UserWarning)
    device, contenders = torch.device(args.device), ByContender()
    truth = truth_of(load(path, device, shared=True))
    for name in names:
        absent = CONTENDERS[name].absent(device)
        contenders[name] = {"status": absent} if absent else check(name, truth, args.backend)
        tell(contenders)
    del truth
    torch.compiler.reset()  # drops what was compiled for the shapes of the check
    timed = [name for name in names if has_times(name, contenders[name]["status"])]
    contenders[FLOOR] = {"status": "ok"}

    def tell_times(taken: ByContender) -> None:
        for name, timing in taken.items():
            contenders[name] |= timing
        tell(contenders)

    tell_times(times(timed, path, device, args.rounds, args.backend, deadline, tell_times))
    for name in timed:
        row = contenders[name]
        if has_times(name, row["status"]):
            try:
                row["extra_bytes"] = extra_memory(name, path, device, args.backend)
            except Exception as error:
                row["status"] = reason(error)
            tell(contenders)
    return contenders


def print_table(rows: list[dict[str, Any]]) -> None:
    base = next((r for r in rows if r["name"] == BASELINE and "seconds" in r), None)
    predicted = any("predicted_seconds" in row for row in rows)
    floor = statistics.median(rows[-1]["seconds"])
    print(
        f"{'':27}{'seconds':>8} {'[p20, p80]':>15} {'x eager':>8} {'x GEMMs':>8} {'TFLOP/s':>8} "
        f"{'extra MiB':>10} {'x eager':>8} {'workspace':>10} {'loss err':>8} {'dH err':>8} "
        f"{'dW err':>8}{' x model' if predicted else ''}"
    )
    for row in rows:
        if "seconds" not in row:
            off = ", ".join(f"{key} {row[key]:.1e}" for key in ERRORS if key in row)
            details = f": off by {off}" if row["status"] == "wrong" else ""
            print(f"{row['name']:27}{row['status']}{details}")
            continue
        median, low, high = spread(row["seconds"])
        line = f"{row['name']:27}{median:8.3g} {f'[{low:.3g}, {high:.3g}]':>15}"
        line += f" {median / spread(base['seconds'])[0]:8.3f}" if base else f"{'':9}"
        line += f" {median / floor:8.3f}"
        line += f" {row['tflops']:8.3g}" if "tflops" in row else f"{'':9}"
        if "extra_bytes" in row:
            share = row["extra_bytes"] / ((base or {}).get("extra_bytes") or math.nan)
            line += f" {row['extra_bytes'] / 2**20:10,.0f} {share:8.3f}"
            line += f" {row['workspace_bytes'] / 2**20:10,.0f}"
            line += "".join(f" {row[key]:8.1e}" if key in row else f"{'':9}" for key in ERRORS)
        if "predicted_seconds" in row:
            line = f"{line:146}{median / row['predicted_seconds']:8.2f}"
        line += f" {row['status']}" if row["status"] != "ok" else ""
        print(line, flush=True)
    if predicted:
        print(f"x model: the time over that of benchmarks/cost_model.py. {error_of_the_model()}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of("benchmarks.head", __doc__, rounds=5)
    default = ["smollm", "rollout", "flat", "qwen05"]
    parser.add_argument(
        "--workload", nargs="+", choices=(*WORKLOADS, "support"), default=default, metavar="NAME",
        help=f"batches to measure, among {', '.join(WORKLOADS)}; benchmarks/workloads.py describes "
        f"them; support: the last {len(TRUNCATED)} (default: {' '.join(default)})",
    )  # fmt: skip
    parser.add_argument(
        "--shapes", type=shape, metavar="N,V,H",
        help="tokens, vocabulary and hidden size of synthetic workloads (default: their own)",
    )  # fmt: skip
    parser.add_argument(
        "--peers", nargs="*", metavar="NAME",
        help="measure only peers whose name begins with NAME, beside eager and this library "
        "(default: all; without NAME: none)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="of this library (default: auto)"
    )
    parser.add_argument(
        "--limit-s", type=float, default=math.inf, metavar="SECONDS",
        help="start no further round of a workload after this time; on a GPU, end a peer after a "
        "quarter of it (default: no limit)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    args.isolate = torch.device(args.device).type == "cuda"
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1; got {args.rounds}")
    args.workload = [
        name for x in args.workload for name in (TRUNCATED if x == "support" else (x,))
    ]
    fixed = [name for name in args.workload if name not in SYNTHETIC]
    if args.shapes and fixed:
        parser.error(f"--shapes: expected synthetic workloads only; got {', '.join(fixed)}")
    peers = tuple(peer.lower() for peer in ([""] if args.peers is None else args.peers))
    for peer in peers:
        if not any(name.lower().startswith(peer) for name in CONTENDERS):
            parser.error(f"--peers: expected the beginning of {', '.join(CONTENDERS)}; got {peer}")
    always = (BASELINE, *OURS)
    args.contenders = [n for n in CONTENDERS if n in always or n.lower().startswith(peers)]
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    # Peers warn of the way in which they are called here.
    warnings.filterwarnings("ignore", category=UserWarning)
    result = new_result(args.device, backend=args.backend)
    done: list[dict[str, Any]] = []

    def save(rows: list[dict[str, Any]]) -> None:
        result["rows"] = done + rows
        write_json(args.json, result)

    for workload in args.workload:
        try:
            done += run_workload(workload, args, save)
        except FileNotFoundError as error:  # the demo model's package
            print(f"\n{workload}: {error}")
            done.append({"workload": workload, "name": "", "status": str(error)})
        save([])
    ours = [row for row in done if row["name"].startswith("ours") and row["status"] != "ok"]
    sys.exit(f"failed: {', '.join(row['name'] for row in ours)}" if ours else 0)


if __name__ == "__main__":
    main()

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
system for memory anew. On a GPU, eager and this library go first, in one process; then each peer
has a process of its own, which is ended after a quarter of --limit-s.

`--workload support` stands for the demo model's samples under top-p, top-k and min-p. Their loss
is over the ids that sampling kept; eager masks all others. "no support" is the loss over the
whole vocabulary, which is compared with that in float64, and with nobody else's.

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
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.contenders import (
    BASELINE,
    CONTENDERS,
    MASKED,
    NO_SUPPORT,
    OURS,
    REPLAYS,
    TRUSTED,
    UNPADDED,
    contender,
)
from benchmarks.cost_model import error_of_the_model, predict, shape
from benchmarks.gpu_costs import METHODS, device_of
from benchmarks.measure import (
    FLOOR,
    Loss,
    add_head_options,
    default_dtype,
    extra_memory,
    header,
    load,
    loss_of,
    print_header,
    reason,
    release,
    run_alone,
    spread,
    stored,
    times,
    with_grad,
    write_json,
)
from benchmarks.workloads import SYNTHETIC, TRUNCATED, WORKLOADS, Workload, make
from grpo_kernels import reference

CHECKED_SEQUENCES, CHECKED_POSITIONS = 2, 64
# Allowed errors. Those of gradients are relative to the norm of the float64 gradient of the same
# inputs, that of the loss to the mean size of its terms, which is 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
ERRORS = ("loss", "d_hidden", "d_weight")
# Contenders, and the methods of the cost model that stand for them.
PREDICTED_BY = {
    FLOOR: "bare GEMMs",
    BASELINE: BASELINE,
    OURS[0]: "exact",
    OURS[1]: "two passes",
    "TRL chunked head": "TRL chunked head",
    "Liger scaled CE": "Liger scaled CE",
}


class Truth(NamedTuple):
    """A few sequences of a workload with their loss and gradients in float64."""

    w: Workload
    loss: float
    d_hidden: Tensor
    d_weight: Tensor


def truth_of(w: Workload, *, replayed: bool = True) -> Truth:
    """Picks a few sequences that have a gradient and computes their loss in float64.

    With a support the loss is over its entries, unless it is not to be `replayed`.
    """
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
        support=exact.support if replayed else None,
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


Found = dict[str, dict[str, Any]]


class Results:
    """What has been found out about a workload's contenders so far, saved whenever it grows."""

    def __init__(
        self,
        w: Workload,
        names: list[str],
        args: argparse.Namespace,
        save: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        self.workload, self.names, self.save = w.describe(), names, save
        self.dtype = w.hidden.dtype
        # Over the entries of a support the FLOPs are others.
        self.flop = 6 * w.tokens * w.weight.numel() if w.support is None else None
        self.gradient_bytes = w.hidden.nbytes + 4 * w.weight.numel()
        self.found: Found = {name: {"status": "not measured"} for name in (*self.names, FLOOR)}
        self.predicted: dict[str, float] = {}
        device = device_of(header(args.device)["device"])
        # The model is of bfloat16 where every token counts.
        if device and w.mask is None and w.support is None and self.dtype == torch.bfloat16:
            V, H = w.weight.shape
            self.predicted = {
                name: predict(device, (w.tokens, V, H), METHODS[method]) / 1e3
                for name, method in PREDICTED_BY.items()
            }

    def add(self, found: Found) -> None:
        """Takes what is now known of some contenders, and saves the rows."""
        self.found |= found
        self.save(self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """One row per contender, the bare GEMMs last; times only where all is right."""
        timed = {n: x for n, x in self.found.items() if x["status"] == "ok" and "results" in x}
        wrong = wrong_in_full(timed, self.dtype) if timed else set()
        rows = []
        for name, known in self.found.items():
            row = {"workload": self.workload, "name": name, **known}
            if name in wrong:
                row["status"] = "wrong in full"
            elif row["status"] == "ok" and "seconds" not in row:
                row["status"] = "not timed"
            if row["status"] != "ok":
                row = {k: x for k, x in row.items() if not k.endswith("seconds")}
            else:
                if self.flop is not None:
                    row["tflops"] = self.flop / statistics.median(row["seconds"]) / 1e12
                if name in self.predicted:
                    row["predicted_seconds"] = self.predicted[name]
                if "extra_bytes" in row:
                    row["workspace_bytes"] = row["extra_bytes"] - self.gradient_bytes
            rows.append(row)
        return rows


def run_workload(
    workload: str,
    args: argparse.Namespace,
    save: Callable[[list[dict[str, Any]]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Returns one row per contender; its `status` is "ok", "wrong" or why it has no times."""
    deadline = time.monotonic() + args.limit_s
    w = make(workload, args.shapes, args.device).to(getattr(torch, args.dtype))
    print(f"\n{w.describe()}, forward + backward, head trained, {args.rounds} rounds", flush=True)
    names = args.contenders if w.support is None else [*REPLAYS]
    results = Results(w, names, args, save)
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
    """Measures a contender in a process of its own; returns what is known of it at the end."""
    limit_s = min(args.limit_s / 4, deadline - time.monotonic())
    absent = CONTENDERS[name].absent(torch.device(args.device))
    if absent or limit_s <= 0:
        return {"status": absent or "not run: no time left"}
    try:
        found = run_alone(measure_together, [name], path, args, deadline, limit_s=limit_s)
    except TimeoutError as error:
        return {"status": f"out of time: {error}"}
    except BrokenProcessPool:
        return {"status": "its process ended"}
    except Exception as error:
        return {"status": reason(name, error)}
    return {**found[name], "floor_seconds": found[FLOOR].get("seconds", [])}


def measure_together(
    names: list[str],
    path: Path,
    args: argparse.Namespace,
    deadline: float,
    tell: Callable[[Found], None] = lambda _: None,
) -> Found:
    """Checks contenders, then times them in turns, then measures their memory; returns all of it.

    `tell` gets what is known after each of these, and after each round.
    """
    warnings.filterwarnings("ignore", category=UserWarning)
    device, backend = torch.device(args.device), args.backend
    w = load(path, device, shared=True)
    truth, masked = truth_of(w), w.mask is not None
    dense = truth if w.support is None else truth_of(w, replayed=False)
    del w
    found: Found = {}
    for name in names:
        row: dict[str, Any] = {}
        idle = name == UNPADDED and not masked
        absent = "every token counts" if idle else contender(name).absent(device)
        sought = dense if name == NO_SUPPORT else truth
        row["status"] = absent or check(name, sought, row, backend=backend)
        found[name] = row
        tell(found)
    del truth, dense, sought
    torch.compiler.reset()  # drops what was compiled for the shapes of the check
    correct = [name for name in names if found[name]["status"] == "ok"]
    found[FLOOR] = {"status": "ok"}

    def tell_times(taken: dict[str, dict[str, list[Any]]]) -> None:
        for name, timing in taken.items():
            failed = {"status": timing["status"][0]} if "status" in timing else {}
            found[name] |= timing | failed
        tell(found)

    options = {"fresh_memory": args.fresh_memory, "deadline": deadline, "backend": backend}
    tell_times(times(correct, path, device, args.rounds, each_round=tell_times, **options))
    for name in correct:
        row = found[name]
        if row["status"] == "ok":
            try:
                row["extra_bytes"] = extra_memory(name, path, device, backend=backend)
            except Exception as error:
                row["status"] = reason(name, error)
            tell(found)
    return found


def check(name: str, truth: Truth, row: dict[str, Any], **options: Any) -> str:
    """Fills in the errors of a row and returns its status, also if a peer raises an exception."""
    try:
        row |= errors(loss_of(name, options), truth)
    except Exception as error:
        return reason(name, error)
    allowed = TOLERANCE[truth.w.hidden.dtype]
    return "ok" if all(row[key] <= allowed for key in ERRORS) else "wrong"


def wrong_in_full(taken: dict[str, dict[str, list[Any]]], dtype: torch.dtype) -> set[str]:
    """Returns those whose loss or gradient norms are not the median of all with their objective."""
    results = {name: timing["results"] for name, timing in taken.items() if "results" in timing}
    medians = []
    for other in (False, True):
        steps = [x for name, x in results.items() if (name == NO_SUPPORT) == other]
        medians.append([statistics.median(x) for x in zip(*chain(*steps), strict=True)])
    wrong = set()
    for name, steps in results.items():
        expected = medians[name == NO_SUPPORT]
        for loss, *norms in steps:
            off = [abs(x / y - 1) for x, y in zip(norms, expected[1:], strict=True)]
            # Written so that NaN is wrong.
            if not all(x <= TOLERANCE[dtype] for x in (abs(loss - expected[0]), *off)):
                wrong.add(name)
    return wrong


def print_table(rows: list[dict[str, Any]]) -> None:
    eager = (BASELINE, MASKED)
    base = next((r for r in rows if r["name"] in eager and r["status"] == "ok"), None)
    predicted = any("predicted_seconds" in row for row in rows)
    floor = statistics.median(rows[-1]["seconds"])
    print(
        f"{'':27}{'seconds':>8} {'[p20, p80]':>15} {'x eager':>8} {'x GEMMs':>8} {'forward':>8}"
        f" {'TFLOP/s':>8} {'extra MiB':>10} {'x eager':>8} {'workspace':>10} {'loss err':>8}"
        f" {'dH err':>8} {'dW err':>8}{' x model' if predicted else ''}"
    )
    for row in rows:
        if row["status"] != "ok":
            off = ", ".join(f"{key} {row[key]:.1e}" for key in ERRORS if key in row)
            details = f": off by {off}" if row["status"] == "wrong" else ""
            print(f"{row['name']:27}{row['status']}{details}")
            continue
        median, low, high = spread(row["seconds"])
        line = f"{row['name']:27}{median:8.3g} {f'[{low:.3g}, {high:.3g}]':>15}"
        line += f" {median / spread(base['seconds'])[0]:8.3f}" if base else f"{'':9}"
        line += f" {median / floor:8.3f}"
        if row.get("forward_seconds"):
            line += f" {statistics.median(row['forward_seconds']):8.3g}"
        else:
            line += f"{'':9}"
        line += f" {row['tflops']:8.3g}" if "tflops" in row else f"{'':9}"
        if row.get("extra_bytes") is not None:
            share = row["extra_bytes"] / base["extra_bytes"] if base else math.nan
            line += f" {row['extra_bytes'] / 2**20:10,.0f} {share:8.3f}"
            line += f" {row['workspace_bytes'] / 2**20:10,.0f}"
            line += "".join(f" {row[key]:8.1e}" for key in ERRORS)
        if "predicted_seconds" in row:
            line += " " * (155 - len(line)) + f"{median / row['predicted_seconds']:8.2f}"
        print(line, flush=True)
    if any(row["name"] == NO_SUPPORT for row in rows):
        print('"no support": another objective, for its cost. No peer takes a support: see eager.')
    if predicted:
        print(f"x model: the time over that of benchmarks/cost_model.py. {error_of_the_model()}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head", description=(__doc__ or "").split("\n")[0]
    )
    default = ["smollm", "rollout", "flat", "qwen05"]
    parser.add_argument(
        "--workload",
        nargs="+",
        choices=(*WORKLOADS, "support"),
        default=default,
        metavar="NAME",
        help=f"batches to measure, among {', '.join(WORKLOADS)}; benchmarks/workloads.py describes "
        f"them; support: the last {len(TRUNCATED)} (default: {' '.join(default)})",
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
        help="start no further round of a workload after this time; on a GPU, end a peer after a "
        "quarter of it (default: no limit)",
    )
    parser.add_argument(
        "--fresh-memory",
        action="store_true",
        help="on a CPU: each step asks the system for memory anew, as by default with glibc",
    )
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or default_dtype(args.device)
    args.isolate = torch.device(args.device).type == "cuda"
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1; got {args.rounds}")
    args.workload = [
        name for given in args.workload for name in (TRUNCATED if given == "support" else (given,))
    ]
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


def main() -> None:
    args = parse_args()
    # Peers warn of the way in which they are called here.
    warnings.filterwarnings("ignore", category=UserWarning)
    result = {**header(args.device), "backend": args.backend, "rows": []}
    result["fresh_memory"] = args.fresh_memory
    print_header(result)
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

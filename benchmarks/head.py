"""Forward and backward of the loss head: time, extra peak memory and error, side by side.

    python -m benchmarks.head [--workload smollm rollout] [--device cpu|cuda] [--json out.json]
    python -m benchmarks.head --workload dense --shapes 8192,151936,896 --peers TRL Liger

Every contender gets the same inputs. Its loss and gradients are compared with float64 on a few
sequences first, and loss and norms of the gradients with the others' in every step that is timed;
one that is wrong, and one that is not there, gets a row that says so, never a time. Times are taken
in turns (in each a step to warm up, forward alone, and forward with backward) and given as median
[20th, 80th percentile], which of three rounds are the least and the largest. On a CPU each
contender is timed in a process of its own, whose allocator keeps its memory during a turn, as
PyTorch's does on a GPU; with --fresh-memory each step has to find it anew. Memory is the peak
beyond the inputs, in a fresh process for each contender; workspace is what of it is neither the
gradient of the hidden states nor one of the head in float32.
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
from grpo_kernels.backends import BACKENDS
from grpo_kernels.inputs import DEFAULT_TOLERANCE

CHECKED_SEQUENCES, CHECKED_POSITIONS = 2, 64
# Relative to the norm of the float64 gradient of the same inputs; of the loss, to the mean size
# of its terms, which is 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
# The noise that a sampled gradient is asked for; a few sequences alone may come out noisier.
SAMPLED_TOLERANCE = 2.5 * DEFAULT_TOLERANCE
ERRORS = ("loss", "d_hidden", "d_weight")


class Truth(NamedTuple):
    """A few sequences of a workload, and their loss and gradients in float64."""

    w: Workload
    loss: float
    d_hidden: Tensor
    d_weight: Tensor


def truth_of(w: Workload) -> Truth:
    trained = torch.arange(len(w.advantages), device=w.advantages.device)
    if w.mask is not None:
        trained = trained[(w.advantages != 0) & w.mask.any(1)]
    w = w.sequences(trained[:CHECKED_SEQUENCES]).first(CHECKED_POSITIONS).each(Tensor.detach)
    exact = with_grad(w.each(lambda x: x.double() if x.is_floating_point() else x))
    loss = reference.fused_grpo_loss(
        exact.hidden, exact.weight, exact.targets, exact.advantages, exact.mask,
        old_logps=exact.old_logps,
    ).loss  # fmt: skip
    loss.backward()
    assert exact.hidden.grad is not None and exact.weight.grad is not None
    return Truth(w, loss.item(), exact.hidden.grad, exact.weight.grad)


def errors(loss: Loss, truth: Truth) -> dict[str, float]:
    """Of the loss, and relative ones of the gradients."""
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
    # In parts: a large head in float64 is there once, not three times.
    parts = zip(grad.split(4096), expected.split(4096), strict=True)
    squares = sum(float((mine - right).square().sum()) for mine, right in parts)
    return squares**0.5 / float(expected.norm())


def run_workload(workload: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a contender: its `status` is "ok", "wrong" or why it is absent."""
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
    torch.compiler.reset()  # compiled for the shapes of the check
    sound = [row for row in rows if row["status"] == "ok"]
    flop, device = 6 * w.tokens * w.weight.numel(), w.hidden.device
    gradient_bytes = w.hidden.nbytes + 4 * w.weight.numel()
    with stored(w) as path:
        del w
        names = [row["name"] for row in sound]
        taken = times(
            names, path, device, args.rounds, fresh_memory=args.fresh_memory, deadline=deadline,
            backend=args.backend,
        )  # fmt: skip
        wrong = wrong_in_full(taken, getattr(torch, args.dtype))
        for row in sound:
            name, mine = row["name"], taken[row["name"]]
            if "status" in mine:
                row["status"] = mine["status"][0]
                continue
            try:
                row["extra_bytes"] = extra_memory(name, path, device, backend=args.backend)
            except Exception as error:
                row["status"] = reason(name, error)
                continue
            if name in wrong:
                row |= {"status": "wrong in full", "results": mine["results"]}
                continue
            row |= mine
            row["workspace_bytes"] = row["extra_bytes"] - gradient_bytes
            row["tflops"] = flop / statistics.median(row["seconds"]) / 1e12
    seconds = taken[FLOOR]["seconds"]
    tflops = flop / statistics.median(seconds) / 1e12
    rows.append({"name": FLOOR, "status": "ok", "seconds": seconds, "tflops": tflops})
    print_table(rows)
    return rows


def check(name: str, truth: Truth, row: dict[str, Any], **options: Any) -> str:
    """Fills in the row's errors; what a peer raises is its row, not the end of the run."""
    try:
        row |= errors(loss_of(name, options), truth)
    except Exception as error:
        return reason(name, error)
    allowed = SAMPLED_TOLERANCE if "sampled" in name else TOLERANCE[truth.w.hidden.dtype]
    return "ok" if all(row[key] <= allowed for key in ERRORS) else "wrong"


def wrong_in_full(taken: dict[str, dict[str, list[Any]]], dtype: torch.dtype) -> set[str]:
    """Those whose loss or norms of gradients are not the ones that most have."""
    results = {name: told["results"] for name, told in taken.items() if "results" in told}
    expected = [statistics.median(x) for x in zip(*chain(*results.values()), strict=True)]
    wrong = set()
    for name, steps in results.items():
        allowed = SAMPLED_TOLERANCE if "sampled" in name else TOLERANCE[dtype]
        for loss, *norms in steps:
            off = [abs(x / y - 1) for x, y in zip(norms, expected[1:], strict=True)]
            # Not ">", which NaN is not, either.
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
            told = f": off by {off}" if row["status"] == "wrong" else ""
            print(f"{row['name']:27}{row['status']}{told}")
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
    cuda = torch.cuda.is_available()
    default = ["smollm", "rollout", "flat", "qwen05"]
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=default)
    parser.add_argument(
        "--shapes",
        type=shape,
        metavar="N,V,H",
        help="of the synthetic workloads, instead of theirs",
    )
    parser.add_argument(
        "--peers", nargs="*", metavar="NAME", help="beside eager and ours, those whose name begins "
        "so (default: all; none given: none)",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="of ours")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument(
        "--limit-s", type=float, default=math.inf, metavar="S", help="begin no further round of a "
        "workload after this many seconds"
    )  # fmt: skip
    parser.add_argument(
        "--fresh-memory", action="store_true", help="on a CPU: time with memory that each step has "
        "to find anew, as the C library's allocator comes"
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write every measurement to this file, too")
    args = parser.parse_args(argv)
    if args.dtype is None:
        args.dtype = "bfloat16" if torch.device(args.device).type == "cuda" else "float32"
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
    N, V, H = (int(part) for part in text.split(","))
    if min(N, V, H) < 1:
        raise ValueError
    return N, V, H


def main() -> None:
    args = parse_args()
    # Of peers, about how they are called here.
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
        # After each workload, so that an interrupted run leaves what it has.
        write_json(args.json, result)


if __name__ == "__main__":
    main()

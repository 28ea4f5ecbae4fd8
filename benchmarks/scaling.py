"""Measures how time and memory of the loss head grow with tokens, vocabulary and chunk budget.

    python -m benchmarks.scaling [--axes tokens vocabulary chunk ranks] [--device cpu|cuda]

Runs forward and backward on the `dense` workload; at each point the contenders take turns. A
contender is dropped from an axis if, going by its last point, the next one would take more than
`--limit-s` per run or more memory than is available. Writes the measurements of each axis
(`tokens.json`) and a picture (`tokens.png`). `ranks` grows the tokens of each of several ranks that
have one head (`benchmarks/ranks.py`).
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.contenders import BASELINE, CONTENDERS, OURS
from benchmarks.measure import (
    FLOOR,
    add_head_options,
    default_dtype,
    extra_memory,
    header,
    print_header,
    reason,
    stored,
    times,
    write_json,
)
from benchmarks.ranks import run_ranks
from benchmarks.workloads import make

PEERS = ("eager, compiled", "TRL chunked head", "Liger fused linear")
LABELS = {
    "tokens": "tokens N", "vocabulary": "vocabulary V", "chunk": "chunk budget, MiB",
    "ranks": "tokens per rank",
}  # fmt: skip


class Axis(NamedTuple):
    """The points of an axis: a shape and a chunk budget for each of its values."""

    values: list[int]
    shapes: Sequence[tuple[int, int, int]]  # (N, V, H)
    chunk_bytes: Sequence[int | None]  # None: the default budget
    contenders: tuple[str, ...]


def axes(cuda: bool, tiny: bool) -> dict[str, Axis]:
    """Returns the axes: around the demo's head on a CPU, around a 1.5B model's on a GPU.

    `tiny` makes all sizes so small that a run only shows that it works.
    """
    N, V, H = (8192, 151_936, 1536) if cuda else (2048, 49_152, 576)
    tokens = [1024 << i for i in range(11 if cuda else 8)]
    vocabularies = [32_768 << i for i in range(4)]
    budgets = [(64 if cuda else 4) << i for i in range(8)]
    if tiny:
        N, V, H, tokens, vocabularies, budgets = 256, 512, 16, [64, 128], [512, 1024], [1, 2]
    default = [None] * 20
    everyone = (BASELINE, *PEERS, *OURS)
    return {
        "tokens": Axis(tokens, [(n, V, H) for n in tokens], default, everyone),
        "vocabulary": Axis(vocabularies, [(N // 2, v, H) for v in vocabularies], default, everyone),
        "chunk": Axis(budgets, [(N, V, H)] * 20, [mib << 20 for mib in budgets], OURS[:1]),
    }


def run_axis(name: str, axis: Axis, args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of each point: one per contender, whose status is "ok" or why it is not."""
    running = [n for n in axis.contenders if args.everyone or n not in PEERS]
    last: dict[str, dict[str, Any]] = {}
    for value, shape, chunk_bytes in zip(*axis[:3], strict=False):
        options: dict[str, Any] = {"backend": args.backend, "chunk_bytes": chunk_bytes}
        point: dict[str, dict[str, Any]] = {}
        for contender in running:
            absent = CONTENDERS[contender].absent(torch.device(args.device))
            status = absent or _too_much(last.get(contender), shape, args)
            row = {"axis": name, "value": value, "shape": shape, "name": contender}
            point[contender] = {**row, "status": status or "ok"}
        running = [n for n in running if point[n]["status"] == "ok"]
        w = make("dense", shape, args.device).to(getattr(torch, args.dtype))
        device = w.hidden.device
        with stored(w) as path:
            del w  # frees its memory for the measurement
            for contender in running:
                try:
                    point[contender]["extra_bytes"] = extra_memory(
                        contender, path, device, **options
                    )
                except Exception as error:
                    point[contender]["status"] = reason(contender, error)
            running = [n for n in running if point[n]["status"] == "ok"]
            # Long runs get one round.
            slowest = max(
                (_predicted(last[n], shape)[0] for n in running if n in last), default=0.0
            )
            rounds = args.rounds if slowest < args.limit_s / 8 else 1
            taken = times(running, path, device, rounds, forward=False, **options)
        for contender in running:
            if "status" in taken[contender]:
                point[contender]["status"] = taken[contender]["status"][0]
            else:
                point[contender] |= taken[contender]
                last[contender] = point[contender]
        running = [n for n in running if point[n]["status"] == "ok"]
        _print_point(list(point.values()), statistics.median(taken[FLOOR]["seconds"]))
        floor = {"axis": name, "value": value, "shape": shape, "name": FLOOR, "status": "ok"}
        yield [*point.values(), floor | taken[FLOOR]]
        if not running:
            return


def _predicted(row: dict[str, Any], shape: tuple[int, int, int]) -> tuple[float, float]:
    """Returns seconds and bytes at another shape, in proportion to the work N * V * H."""
    (N, V, H), (n, v, h) = shape, row["shape"]
    times_larger = N * V * H / (n * v * h)
    return times_larger * statistics.median(row["seconds"]), times_larger * row["extra_bytes"]


def _too_much(
    row: dict[str, Any] | None, shape: tuple[int, int, int], args: argparse.Namespace
) -> str | None:
    if row is None:
        return None
    seconds, extra_bytes = _predicted(row, shape)
    if seconds > args.limit_s:
        return f"would take {seconds:.0f} s"
    # Memory that does not grow with the work is predicted too large; ours is tried all the same.
    if extra_bytes > 0.8 * args.memory_bytes and row["name"] not in OURS:
        return f"would take {extra_bytes / 2**30:.0f} GiB"
    return None


def _points(name: str, args: argparse.Namespace, cuda: bool) -> Iterator[list[dict[str, Any]]]:
    if name != "ranks":
        yield from run_axis(name, axes(cuda, args.tiny)[name], args)
        return
    tokens, V, H = ([2048 << i for i in range(4)], 151_936, 4096) if cuda else (
        [128 << i for i in range(5)], 49_152, 576
    )  # fmt: skip
    if args.tiny:
        tokens, V, H = [16, 32], 512, 16
    for rows in run_ranks(tokens, V, H, args.device, args.dtype, args.rounds):
        _print_point(rows, statistics.median(rows[0]["seconds"]), "the first")
        yield rows


def _print_point(rows: list[dict[str, Any]], floor: float, of: str = "GEMMs") -> None:
    for row in rows:
        line = f"{row['axis']:10} {row['value']:>9,} {row['name']:27}"
        if row["status"] == "ok":
            median = statistics.median(row["seconds"])
            line += f" {median:8.3g} s {median / floor:6.2f} x {of}"
            line += f" {row['extra_bytes'] / 2**20:10,.0f} MiB"
        else:
            line += f" {row['status']}"
        print(line, flush=True)


def plot(rows: list[dict[str, Any]], about: dict[str, Any], path: Path) -> None:
    """Draws time and memory side by side, one line per contender."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    axis = rows[0]["axis"]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    names = list(dict.fromkeys(row["name"] for row in rows))
    for name in names:
        points = [row for row in rows if row["name"] == name and row["status"] == "ok"]
        style: dict[str, Any] = {"marker": "o", "markersize": 3, "label": name}
        if name in OURS:
            style |= {"linewidth": 2.5, "color": ("C3", "C1")[OURS.index(name)]}
        elif name == FLOOR:
            style |= {"color": "0.6", "linestyle": ":"}
        else:
            style["color"] = ("0.1", "C0", "C2", "C4")[names.index(name) % 4]
        x = [row["value"] for row in points]
        panels[0].plot(x, [statistics.median(row["seconds"]) for row in points], **style)
        if name != FLOOR:
            panels[1].plot(x, [row["extra_bytes"] / 2**30 for row in points], **style)
    shape = next(row["shape"] for row in rows)
    fixed = {"tokens": "V = {1:,}, H = {2:,}", "vocabulary": "N = {0:,}, H = {2:,}"}
    fixed["ranks"] = f"{rows[0].get('ranks')} ranks, {fixed['tokens']}"
    text = fixed.get(axis, "N = {0:,}, V = {1:,}, H = {2:,}").format(*shape)
    for panel, what in zip(panels, ("seconds", "GiB beyond the inputs"), strict=True):
        panel.set(xscale="log", yscale="log", xlabel=LABELS[axis], title=what)
        values = sorted({row["value"] for row in rows})
        panel.set_xticks(values, [f"{v:,}" if v < 1024 else f"{v // 1024:,}k" for v in values])
        panel.minorticks_off()
        # On an axis of less than a decade, labels at powers of ten alone would be one or none.
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3, which="both")
    panels[0].legend(fontsize=8)
    figure.suptitle(f"Loss head, forward and backward: {text}; {about['device']}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--axes", nargs="+", choices=LABELS, default=list(LABELS), help="what grows (default: all)"
    )
    add_head_options(parser)
    parser.add_argument(
        "--ours-only", dest="everyone", action="store_false", help="leave out the peers"
    )
    parser.add_argument("--rounds", type=int, default=3, help="at most so many (default: 3)")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=120,
        metavar="SECONDS",
        help="drop contenders that would take longer per run (default: 120)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/scaling"),
        help="folder for measurements and pictures (default: %(default)s)",
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    args = parser.parse_args(argv)
    on_cuda = torch.device(args.device).type == "cuda"
    args.dtype = args.dtype or default_dtype(args.device)
    args.memory_bytes = _available(args.device)
    warnings.filterwarnings("ignore", category=UserWarning)
    about = {**header(args.device), "backend": args.backend}
    print_header(about)
    for name in args.axes:
        rows: list[dict[str, Any]] = []
        # After each point, so that an interrupted run keeps its results.
        for point in _points(name, args, on_cuda):
            rows += point
            write_json(args.out / f"{name}.json", {**about, "rows": rows})
            plot(rows, about, args.out / f"{name}.png")


def _available(device: str) -> int:
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        kib = next(line.split()[1] for line in file if line.startswith("MemAvailable"))
    return int(kib) * 1024


if __name__ == "__main__":
    main()

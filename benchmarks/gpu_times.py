"""Times whole calls on a GPU beside their GEMMs, and the sweep beside a copy.

    python -m benchmarks.gpu_times exact|exp_gemm|scoring|graph|sweep [--device cuda]

- exact: forward and backward of the loss, in turns with the three bare GEMMs; with peak memory;
- exp_gemm: the same and scoring, with logits and a sweep and with a GEMM that leaves exponentials;
  `--choose` writes the largest H at which the latter is faster, which the library then takes;
- scoring: `linear_logprobs` without a gradient, in turns with its one GEMM;
- graph: a step captured in a CUDA graph and replayed, in turns with the same step as it is;
- sweep: the kernel that reads logits and leaves their exponentials, on as many rows as the library
  launches it with, at this and other block sizes, in turns with a copy of as many bytes.

V = 151,936, in bf16, the most telling shape first. Every row is compared with a reference first,
and one that is wrong has no times. On a GPU that the cost model knows, its prediction stands
beside; "x model" is the time over it. On a CPU the sizes are tiny, to see that all of it runs;
there a captured step is one that is called again.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cost_model import error_of_the_model, predict
from benchmarks.gpu_costs import INSTRUCTIONS, Device, device_of, scoring, sweep_ms
from benchmarks.gpu_costs import bare_gemms as bare_cost
from benchmarks.gpu_costs import exact as exact_cost
from benchmarks.measure import (
    PeakMemory,
    bare_gemms,
    header,
    new_result,
    parser_of,
    reason,
    spread,
    timed,
    with_grad,
    write_json,
)
from benchmarks.workloads import Workload, make
from grpo_kernels import Execution, fused_grpo_loss, linear_logprobs, reference
from grpo_kernels.kernels import LogitTransform, select_backend
from grpo_kernels.kernels.triton_common import Launch

V = 151_936
# N and H: the first two tell most.
SHAPES = ((16_384, 2048), (4096, 2048), (16_384, 896), (4096, 896), (16_384, 4096), (4096, 4096))
GRAPHS = ((512, 896), (4096, 2048))
# A strip's rows now, twice as many, and a whole chunk's.
SWEPT = ((512, V), (1024, V), (4096, V))
OTHER_LAUNCHES = ((1024, 4), (2048, 4), (4096, 8), (4096, 16))  # columns and warps
TINY, TINY_V = ((64, 16),), 601
CHECKED = 64  # tokens whose log-probs are compared with float64
# A wrong kernel is off by far more than the budget of 1e-4, which stands in the row.
LOGPS, GRADIENT = 1e-3, 1e-2

Run = Callable[[], Any]
Row = dict[str, Any]
Shape = tuple[int, ...]


class Bench:
    """The device, its model, and how often everything is measured."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = torch.device(device), rounds
        self.model: Device | None = device_of(header(device)["device"])
        self.large = self.device.type == "cuda"

    def workload(self, N: int, H: int) -> Workload:
        """States whose softmax is spread like a language model's; bf16, but interpreted."""
        vocabulary = V if self.large else TINY_V
        dtype = torch.bfloat16 if self.large else torch.float32
        return make("dense", (N, vocabulary, H), self.device).to(dtype)

    def execution(self, **options: Any) -> Execution:
        """The kernels; in Triton's interpreter only what needs them, as that takes its time."""
        needed = self.large or options.get("exp_gemm") is not None
        return Execution(backend="triton" if needed else "torch", **options)

    def in_turns(self, repeat: int = 1, **runs: Run) -> Row:
        """Seconds per call of each, which take turns, after a round that is not counted."""
        taken: Row = {name: [] for name in runs}
        for counted in range(self.rounds + 1):
            for name, run in runs.items():
                several = partial(_repeated, run, repeat)
                seconds, _ = timed(several, self.device)
                if counted:
                    taken[name].append(seconds / repeat)
        return taken

    def peak(self, run: Run) -> int | None:
        """Bytes beyond those at the start."""
        with PeakMemory(self.device) as memory:
            run()
        return memory.extra_bytes


def _repeated(run: Run, times: int) -> None:
    for _ in range(times):
        run()


def logps_error(w: Workload, logps: Tensor) -> float:
    """The largest error of the log-probs of a few tokens, against float64."""
    few = [x.detach().flatten(0, 1)[:CHECKED] for x in (w.hidden, w.targets)]
    true = reference.linear_logprobs(few[0].double(), w.weight.detach().double(), few[1]).logps
    return float((logps.flatten()[:CHECKED] - true).abs().max())


def step(w: Workload, execution: Execution) -> list[Tensor]:
    """Log-probs of the loss, and its gradients."""
    given = w.hidden, w.weight, w.targets, w.advantages
    out = fused_grpo_loss(*given, old_logps=w.old_logps, execution=execution)
    return [out.logps, *torch.autograd.grad(out.loss, (w.hidden, w.weight))]


def checked(shape: Shape, error: float, allowed: float, take: Callable[[], Row]) -> Row:
    """A row with its error, and what `take` measures if that is small (NaN is not)."""
    row: Row = {"shape": shape, "error": error, "status": "ok" if error <= allowed else "wrong"}
    return row | take() if row["status"] == "ok" else row


def exact(b: Bench, N: int, H: int) -> Row:
    """The exact call beside three bare GEMMs."""
    w = with_grad(b.workload(N, H))
    run, shape = partial(step, w, b.execution()), (N, len(w.weight), H)
    costs = {"floor": bare_cost, "call": exact_cost}

    def take() -> Row:
        row: Row = {"seconds": b.in_turns(floor=bare_gemms(w), call=run)}
        row["extra_bytes"] = b.peak(run)
        if b.model:
            row["predicted_ms"] = {k: predict(b.model, shape, cost) for k, cost in costs.items()}
        return row

    return checked(shape, logps_error(w, run()[0]), LOGPS, take)


def exp_gemm(b: Bench, N: int, H: int) -> Row:
    """The exact call and scoring, with logits and without."""
    w = with_grad(b.workload(N, H))
    swept, in_gemm = (b.execution(exp_gemm=x) for x in (False, True))

    @torch.no_grad()
    def scored(execution: Execution) -> Tensor:
        return linear_logprobs(w.hidden, w.weight, w.targets, execution=execution).logps

    def take() -> Row:
        return {
            "seconds": b.in_turns(
                floor=partial(step, w, swept), call=partial(step, w, in_gemm),
                scored=partial(scored, swept), scored_in_gemm=partial(scored, in_gemm),
            )
        }  # fmt: skip

    return checked((N, len(w.weight), H), logps_error(w, step(w, in_gemm)[0]), LOGPS, take)


def largest_size(rows: list[Row]) -> int:
    """The largest H up to which every row is faster without logits; 0 if none is."""
    won: dict[int, bool] = {}
    for row in rows:
        medians = {k: statistics.median(x) for k, x in row.get("seconds", {}).items()}
        faster = bool(medians) and medians["call"] < medians["floor"]
        won[row["shape"][-1]] = won.get(row["shape"][-1], True) and faster
    taken = list(itertools.takewhile(won.get, sorted(won)))
    return taken[-1] if taken else 0


def choose(name: str, size: int) -> None:
    """Writes down for a card up to which H the library takes the GEMM that leaves exponentials."""
    from grpo_kernels.kernels import triton_exp_gemm

    page = Path(triton_exp_gemm.__file__).with_suffix(".json")
    known = json.loads(page.read_text()) | {name: size}
    page.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


def score(b: Bench, N: int, H: int) -> Row:
    """Log-probs without a gradient beside the one GEMM."""
    w = b.workload(N, H)
    shape = (N, len(w.weight), H)
    chunks = w.hidden.flatten(0, 1).split(4096)
    logits = w.hidden.new_empty(len(chunks[0]), len(w.weight))

    def floor() -> None:
        for chunk in chunks:
            torch.mm(chunk, w.weight.T, out=logits[: len(chunk)])

    @torch.no_grad()
    def run() -> Tensor:
        return linear_logprobs(w.hidden, w.weight, w.targets, execution=b.execution()).logps

    def take() -> Row:
        row: Row = {"seconds": b.in_turns(floor=floor, call=run), "extra_bytes": b.peak(run)}
        return row | (
            {"predicted_ms": {"call": predict(b.model, shape, scoring)}} if b.model else {}
        )

    return checked(shape, logps_error(w, run()), LOGPS, take)


def captured(run: Callable[[], list[Tensor]], cuda: bool) -> tuple[list[Tensor], Run]:
    """The results of a captured call, and the function that replays it into them."""
    if not cuda:
        results = run()
        return results, lambda: [old.copy_(new) for old, new in zip(results, run(), strict=True)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return results, graph.replay


def graph(b: Bench, N: int, H: int) -> Row:
    """A replayed step beside the same step as it is, and beside one that need not be captured."""
    w = with_grad(b.workload(N, H))
    run = partial(step, w, b.execution(capturable=True))
    plain = partial(step, w, b.execution())
    results, replay = captured(run, b.large)
    with torch.no_grad():
        w.hidden.mul_(0.9)  # other states than those that were captured
    replay()
    error = max(
        float((mine - other).float().norm() / other.float().norm())
        for mine, other in zip(results, plain(), strict=True)
    )

    def take() -> Row:
        return {"seconds": b.in_turns(floor=run, call=replay, plain=plain)}

    return checked((N, len(w.weight), H), error, GRADIENT, take)


def sweep(b: Bench, rows: int, V: int) -> Row:
    """Statistics and exponentials of float32 logits beside a copy of as many bytes."""
    g = torch.Generator(b.device).manual_seed(0)
    logits = 3 * torch.randn(rows, V, generator=g, device=b.device)
    targets = torch.randint(0, V, (rows,), generator=g, device=b.device)
    exps = torch.empty_like(logits, dtype=torch.bfloat16)
    stats = select_backend("triton", b.device).token_stats
    run = partial(stats, logits, targets, LogitTransform(), entropy=True, exps=exps)
    launches = (Launch(*sizes) for sizes in OTHER_LAUNCHES)
    others = {f"{x.block} x {x.num_warps}": partial(run, launch=x) for x in launches}
    few = slice(CHECKED)
    true = logits[few].double().log_softmax(1).gather(1, targets[few, None])[:, 0]
    moved = 6 * rows * V  # four bytes of a logit are read, two are written
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=b.device)
    copy = partial(torch.empty_like(source).copy_, source)

    def take() -> Row:
        # Many at a time, as a launch takes the CPU a good part of a strip's time.
        row: Row = {"seconds": b.in_turns(20 if b.large else 1, floor=copy, call=run, **others)}
        rates = {k: moved / statistics.median(x) / 1e9 for k, x in row["seconds"].items()}
        row |= {"bytes": moved, "gb_per_s": rates}
        if b.model:
            ms = sweep_ms(b.model, rows * V, 6, INSTRUCTIONS["one sweep"])
            row["predicted_ms"] = {"call": ms}
        return row

    off = [float((x().logps[few] - true).abs().max()) for x in (run, *others.values())]
    return checked((rows, V), max(off), LOGPS, take)


class Part(NamedTuple):
    """What is measured, at which sizes, and the names of what is timed in turns."""

    measure: Callable[[Bench, int, int], Row]
    shapes: tuple[tuple[int, int], ...]
    tiny: tuple[tuple[int, int], ...]
    names: dict[str, str]


PARTS = {
    "exact": Part(
        exact, SHAPES, TINY, {"floor": "three bare GEMMs", "call": "fused_grpo_loss"}
    ),
    "exp_gemm": Part(
        exp_gemm, SHAPES, TINY,
        {
            "floor": "loss, logits swept", "call": "loss, X left by the GEMM",
            "scored": "scoring, logits swept", "scored_in_gemm": "scoring, in the GEMM",
        },
    ),
    "scoring": Part(
        score, SHAPES, TINY, {"floor": "one bare GEMM", "call": "linear_logprobs, no gradient"}
    ),
    "graph": Part(
        graph, GRAPHS, TINY,
        {"floor": "capturable", "call": "replayed", "plain": "not capturable"},
    ),
    "sweep": Part(
        sweep, SWEPT, ((2, TINY_V),), {"floor": "copy", "call": "token_stats with exps"}
    ),
}  # fmt: skip


def told(row: Row, names: dict[str, str]) -> str:
    """A row as lines of text: what was timed, and how it compares with the first."""
    lines = [f"{', '.join(f'{x:,}' for x in row['shape'])}: {row['status']}"]
    if "error" in row:
        lines[0] += f", off by {row['error']:.1e}"
    if row.get("extra_bytes") is not None:
        lines[0] += f", peak {row['extra_bytes'] / 2**20:,.0f} MiB beyond the inputs"
    for name, seconds in row.get("seconds", {}).items():
        median, low, high = (1e3 * x for x in spread(seconds))
        line = f"  {names.get(name, name):30} {median:9.4g} ms {f'[{low:.4g}, {high:.4g}]':>18}"
        line += f" {median / (1e3 * statistics.median(row['seconds']['floor'])):7.3f} x first"
        if name in row.get("gb_per_s", {}):
            rate = row["gb_per_s"][name]
            line += f" {rate:8.4g} GB/s, {rate / row['gb_per_s']['floor']:.0%} of the copy's"
        if name in row.get("predicted_ms", {}):
            ms = row["predicted_ms"][name]
            line += f"  predicted {ms:.4g} ms, {median / ms:.2f} x model"
        lines.append(line)
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of("benchmarks.gpu_times", __doc__, rounds=9)
    parser.add_argument("part", choices=PARTS, help="what is measured")
    parser.add_argument("--choose", action="store_true", help="of exp_gemm: keep the choice")
    args = parser.parse_args(argv)
    b = Bench(args.device, args.rounds)
    result: Row = new_result(args.device, part=args.part)
    if b.model:
        print(f"x model: the time over the predicted one. {error_of_the_model()}")
    part = PARTS[args.part]
    for shape in part.shapes if b.large else part.tiny:
        try:
            row = part.measure(b, *shape)
        except Exception as error:  # the next one may well fit, or be right
            row = {"shape": shape, "status": reason(error)}
        result["rows"].append(row)
        print(told(row, part.names), flush=True)
        write_json(args.json, result)  # after each row: an interrupted run keeps its results
    if args.part == "exp_gemm":
        size = largest_size(result["rows"])
        print(f"faster up to H = {size:,}" if size else "not faster")
        if args.choose and b.large:
            choose(torch.cuda.get_device_name(b.device), size)
    bad = [row["shape"] for row in result["rows"] if row["status"] != "ok"]
    sys.exit(f"failed: {bad}" if bad else 0)


if __name__ == "__main__":
    main()

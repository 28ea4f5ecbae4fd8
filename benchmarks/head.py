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
beyond the inputs, in a fresh process for each contender.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.contenders import BASELINE, CONTENDERS, OURS, UNPADDED
from benchmarks.memory import PeakMemory
from benchmarks.workloads import SYNTHETIC, WORKLOADS, Workload, make
from grpo_kernels import reference
from grpo_kernels.column_sampling import DEFAULT_TOLERANCE

CHECKED_SEQUENCES, CHECKED_POSITIONS = 2, 64
# Relative to the norm of the float64 gradient of the same inputs; of the loss, to the mean size
# of its terms, which is 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
# The noise that a sampled gradient is asked for; a few sequences alone may come out noisier.
SAMPLED_TOLERANCE = 2.5 * DEFAULT_TOLERANCE
# Of a GPU's memory, or of a process that was killed for want of it.
OUT_OF_MEMORY = (torch.OutOfMemoryError, BrokenProcessPool)
FLOOR = "bare GEMMs"
# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
ERRORS = ("loss", "d_hidden", "d_weight")
Loss = Callable[[Workload], Tensor]
T = TypeVar("T")


def bare_gemms(w: Workload) -> Callable[[], None]:
    """The three products of the tokens that count, into buffers that are there: the floor."""
    hidden, weight = w.hidden.detach().flatten(0, 1), w.weight.detach()
    if w.mask is not None:
        hidden = hidden[w.mask.flatten()]
    chunks = hidden.split(4096)
    logits = hidden.new_zeros(len(chunks[0]), weight.shape[0])
    d_hidden, d_weight = torch.zeros_like(chunks[0]), torch.zeros_like(weight)

    def run() -> None:
        for i, chunk in enumerate(chunks):
            out = logits[: len(chunk)]
            torch.mm(chunk, weight.T, out=out)
            torch.mm(out, weight, out=d_hidden[: len(chunk)])
            torch.addmm(d_weight, out.T, chunk, beta=min(i, 1), out=d_weight)

    return run


def with_grad(w: Workload) -> Workload:
    for x in (w.hidden, w.weight):
        x.grad = None
        x.requires_grad_()
    return w


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


def step(loss: Loss, w: Workload) -> Tensor:
    value = loss(w)
    value.backward()
    return value.detach()


def time_once(run: Callable[[], Any], device: torch.device) -> float:
    return timed(run, device)[0]


def timed(run: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds, and what `run` returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def times(
    names: Sequence[str],
    path: Path,
    device: torch.device,
    rounds: int,
    *,
    forward: bool = True,
    fresh_memory: bool = False,
    **options: Any,
) -> dict[str, dict[str, list[Any]]]:
    """Seconds of each contender with its backward and of the bare GEMMs, in turns.

    On a CPU each one has a process of its own, which waits while others run: in a shared one the
    allocator serves a contender faster or slower for what others took and gave back.

    Args:
        names: of the contenders.
        path: of a stored workload.
        device: where it is taken to.
        rounds: that are measured.
        forward: the loss alone, too.
        fresh_memory: on a CPU, as the C library's allocator comes.
        options: of every contender.

    Returns:
        Lists of `seconds`, `forward_seconds` and `results` (loss and norms of the gradients); a
        contender for which the memory did not suffice is left out.
    """
    taken: dict[str, dict[str, list[Any]]] = {name: {} for name in (*names, FLOOR)}
    runs = [name for _ in range(rounds) for name in taken]
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(fresh_process(None if fresh_memory else keep_memory))
            for name in (() if device.type == "cuda" else taken)
        }
        for name in tqdm(runs, desc="timing", disable=None):
            if name not in taken:
                continue
            turn = (name, path, device, forward, options)
            pool = pools.get(name)
            try:
                told = take_turn(*turn) if pool is None else pool.submit(take_turn, *turn).result()
            except OUT_OF_MEMORY:
                if name == FLOOR:
                    raise
                del taken[name]
                continue
            for key, value in told.items():
                taken[name].setdefault(key, []).append(value)
    _held.clear()
    return taken


def _norm_of_gradient(x: Tensor) -> float:
    assert x.grad is not None
    return float(x.grad.float().norm())


def fresh_process(initializer: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """Forked, where that can be, from one that has imported what all need and done nothing."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload(["benchmarks.contenders"])
    return ProcessPoolExecutor(1, mp_context=context, initializer=initializer)


def keep_memory() -> None:
    """This process gives none back to the system (glibc; elsewhere as it is)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


# The workload of this process.
_held: dict[Path, Workload] = {}


def _hold(path: Path, device: torch.device, *, shared: bool) -> Workload:
    """Shared: with the other processes of a CPU, mapped."""
    if path not in _held:
        warnings.filterwarnings("ignore", category=UserWarning)
        mapped = shared and device.type == "cpu"
        loaded = torch.load(path, mmap=mapped, map_location=device)
        _held.clear()
        _held[path] = Workload(**loaded)
    return with_grad(_held[path])


def take_turn(
    name: str, path: Path, device: torch.device, forward: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Once to warm up and to find the memory, then timed; at the end the memory is given back."""
    w = _hold(path, device, shared=True)
    measured = _turn(name, w, device, forward, options)
    with_grad(w)
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)  # to the others, who wait with theirs
    return measured


def _turn(
    name: str, w: Workload, device: torch.device, forward: bool, options: dict[str, Any]
) -> dict[str, Any]:
    if name == FLOOR:
        run = bare_gemms(w)
        run()
        return {"seconds": time_once(run, device)}
    measured: dict[str, Any] = {}
    loss = partial(CONTENDERS[name].loss, **options)
    step(loss, w)
    with_grad(w)
    if forward:
        with torch.no_grad():
            measured["forward_seconds"] = time_once(partial(loss, w), device)
    measured["seconds"], value = timed(partial(step, loss, w), device)
    measured["results"] = (float(value), *map(_norm_of_gradient, (w.hidden, w.weight)))
    return measured


@contextmanager
def stored(w: Workload) -> Iterator[Path]:
    """A file of the workload, for fresh processes: to make it takes as long as to score it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.pt"
        torch.save(
            {k: v.detach() if isinstance(v, Tensor) else v for k, v in vars(w).items()}, path
        )
        del w  # what is measured has the memory to itself, if the caller lets go of it, too
        yield path


def extra_memory(name: str, path: Path, device: torch.device, **options: Any) -> int:
    """Bytes beyond the inputs, a stored workload, at the peak of forward and backward.

    On a CPU in a fresh process, as memory that the allocator kept would not be seen; raises
    BrokenProcessPool if that is killed for want of memory.
    """
    if device.type == "cuda":
        return measure_memory(name, path, device, options)
    with fresh_process() as pool:
        return pool.submit(measure_memory, name, path, device, options).result()


def measure_memory(name: str, path: Path, device: torch.device, options: dict[str, Any]) -> int:
    loss, w = partial(CONTENDERS[name].loss, **options), _hold(path, device, shared=False)
    # Libraries load and thread pools start on the first call, at a size that costs nothing; what is
    # compiled is so for its shapes.
    if "compiled" in name:
        step(loss, w)
        with_grad(w)
    else:
        tiny = w.sequences(slice(1)).each(Tensor.detach)
        tiny.weight = w.weight.detach()[:64].clone()
        tiny.targets = tiny.targets % 64
        step(loss, with_grad(tiny.each(torch.clone)))
    with PeakMemory(w.hidden.device) as memory:
        step(loss, with_grad(w))
    if memory.extra_bytes is None:
        raise OSError(f"this system does not tell the peak memory of work on {w.hidden.device}")
    return memory.extra_bytes


def run_workload(workload: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a contender: its `status` is "ok", "wrong" or why it is absent."""
    w = make(workload, args.shapes, args.device).to(getattr(torch, args.dtype))
    print(f"\n{w.describe()}, forward + backward, head trained, {args.rounds} rounds", flush=True)
    rows: list[dict[str, Any]] = []
    truth = truth_of(w)
    for name in args.contenders:
        row: dict[str, Any] = {"workload": w.describe(), "name": name}
        idle = name == UNPADDED and w.mask is None
        absent = "every token counts" if idle else CONTENDERS[name].absent(w.hidden.device)
        row["status"] = absent or check(name, truth, row)
        rows.append(row)
    del truth
    torch.compiler.reset()  # compiled for the shapes of the check
    sound = [row for row in rows if row["status"] == "ok"]
    flop, device = 6 * w.tokens * w.weight.numel(), w.hidden.device
    with stored(w) as path:
        del w
        names = [row["name"] for row in sound]
        taken = times(names, path, device, args.rounds, fresh_memory=args.fresh_memory)
        wrong = wrong_in_full(taken, getattr(torch, args.dtype))
        for row in sound:
            name = row["name"]
            try:
                row["extra_bytes"] = extra_memory(name, path, device) if name in taken else None
            except OUT_OF_MEMORY:
                row["extra_bytes"] = None
            if row["extra_bytes"] is None:
                row["status"] = "out of memory"
            elif name in wrong:
                row |= {"status": "wrong in full", "results": taken[name]["results"]}
            else:
                row |= taken[name]
                row["tflops"] = flop / statistics.median(row["seconds"]) / 1e12
    seconds = taken[FLOOR]["seconds"]
    tflops = flop / statistics.median(seconds) / 1e12
    rows.append({"name": FLOOR, "status": "ok", "seconds": seconds, "tflops": tflops})
    print_table(rows)
    return rows


def check(name: str, truth: Truth, row: dict[str, Any]) -> str:
    """Fills in the row's errors; what a peer raises is its row, not the end of the run."""
    try:
        row |= errors(CONTENDERS[name].loss, truth)
    except Exception as error:
        if name in (BASELINE, *OURS):
            raise
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:90]
    allowed = SAMPLED_TOLERANCE if "sampled" in name else TOLERANCE[truth.w.hidden.dtype]
    return "ok" if max(row[key] for key in ERRORS) <= allowed else "wrong"


def wrong_in_full(taken: dict[str, dict[str, list[Any]]], dtype: torch.dtype) -> set[str]:
    """Those whose loss or norms of gradients are not the ones that most have."""
    results = {name: told["results"] for name, told in taken.items() if name != FLOOR}
    expected = [statistics.median(x) for x in zip(*chain(*results.values()), strict=True)]
    wrong = set()
    for name, steps in results.items():
        allowed = SAMPLED_TOLERANCE if "sampled" in name else TOLERANCE[dtype]
        for loss, *norms in steps:
            off = [abs(x / y - 1) for x, y in zip(norms, expected[1:], strict=True)]
            # Not ">", which NaN is not, either.
            if not max(abs(loss - expected[0]), *off) <= allowed:
                wrong.add(name)
    return wrong


def print_table(rows: list[dict[str, Any]]) -> None:
    base = next((r for r in rows if r["name"] == BASELINE and r["status"] == "ok"), None)
    floor = statistics.median(rows[-1]["seconds"])
    print(
        f"{'':19}{'seconds':>8} {'[p20, p80]':>15} {'x eager':>8} {'x GEMMs':>8} {'forward':>8}"
        f" {'TFLOP/s':>8} {'extra MiB':>10} {'x eager':>8} {'loss err':>8} {'dH err':>8}"
        f" {'dW err':>8}"
    )
    for row in rows:
        if row["status"] != "ok":
            told = [f"{key} {row[key]:.1e}" for key in ERRORS if key in row]
            print(f"{row['name']:19}{row['status']}{': off by ' if told else ''}{', '.join(told)}")
            continue
        median, low, high = spread(row["seconds"])
        line = f"{row['name']:19}{median:8.3g} {f'[{low:.3g}, {high:.3g}]':>15}"
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
            line += "".join(f" {row[key]:8.1e}" for key in ERRORS)
        print(line)


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    ordered = sorted(values)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
    return statistics.median(ordered), low, high


def header(device: str) -> dict[str, Any]:
    """Where and with what a measurement was taken."""
    commit = _told_by("git", "describe", "--always", "--dirty", "--exclude=*")
    processor = platform.processor() or platform.machine()
    about = {}
    if torch.device(device).type == "cuda":
        processor = torch.cuda.get_device_name(device)
        driver = _told_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        about = {"driver": driver.split("\n")[0], "cuda": torch.version.cuda}
    elif Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((x.split(":")[1].strip() for x in lines if "model name" in x), processor)
        processor += f", {torch.get_num_threads()} threads"
    return {
        "device": processor,
        **about,
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": commit or os.environ.get("GRPO_KERNELS_COMMIT", "unknown"),
        "peers": {name: version(name) for name in ("trl", "liger-kernel", "cut-cross-entropy")},
    }


def print_header(result: dict[str, Any]) -> None:
    told = {**result, **result["peers"]}
    print(" | ".join(f"{k}: {v}" for k, v in told.items() if isinstance(v, str)))


def _told_by(*command: str) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return ""
    return run.stdout.strip()


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head", description=(__doc__ or "").split("\n")[0]
    )
    cuda = torch.cuda.is_available()
    default = ["smollm", "rollout", "flat", "qwen05"]
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=default)
    parser.add_argument(
        "--shapes",
        type=_shape,
        metavar="N,V,H",
        help="of the synthetic workloads, instead of theirs",
    )
    parser.add_argument(
        "--peers", nargs="*", metavar="NAME", help="beside eager and ours, those whose name begins "
        "so (default: all; none given: none)",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
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


def _shape(text: str) -> tuple[int, int, int]:
    N, V, H = (int(part) for part in text.split(","))
    if min(N, V, H) < 1:
        raise ValueError
    return N, V, H


def main() -> None:
    args = parse_args()
    # Of peers, about how they are called here.
    warnings.filterwarnings("ignore", category=UserWarning)
    result = {**header(args.device), "fresh_memory": args.fresh_memory, "rows": []}
    print_header(result)
    for workload in args.workload:
        try:
            result["rows"] += run_workload(workload, args)
        except FileNotFoundError as error:  # the demo model's package
            print(f"\n{workload}: {error}")
            result["rows"].append({"workload": workload, "name": "", "status": str(error)})
        if args.json:  # after each workload, so that an interrupted run leaves what it has
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{json.dumps(result)}")


if __name__ == "__main__":
    main()

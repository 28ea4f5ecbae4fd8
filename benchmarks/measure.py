"""Time and peak memory of contenders, and where they were taken."""

from __future__ import annotations

import ctypes
import json
import math
import multiprocessing
import os
import platform
import re
import resource
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
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.contenders import BASELINE, CONTENDERS, OURS
from benchmarks.workloads import Workload

FLOOR = "bare GEMMs"
# Of a GPU's memory, or of a process that was killed for want of it.
OUT_OF_MEMORY = (torch.OutOfMemoryError, BrokenProcessPool)
# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
# What a step may find anew, in pages, and how often it is tried.
_FEW_FAULTS, _TRIES = 5_000, 4
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

Loss = Callable[[Workload], Tensor]
T = TypeVar("T")


class PeakMemory:
    """Measures within a `with` block; afterwards `extra_bytes` is the peak beyond the start.

    On CUDA the caching allocator's own peak. On a CPU the kernel's high-water mark of the resident
    set, reset at the start (Linux; elsewhere `extra_bytes` is None). Memory that was freed before
    but kept by the allocator is used again unseen, so a number to be published comes from a fresh
    process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.extra_bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        self._start: int | None = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        elif _CLEAR_REFS.exists():
            try:
                _CLEAR_REFS.write_text("5")
                self._start = _peak_resident_bytes()
            except OSError:  # a sandbox that does not let a process reset its own mark
                pass
        return self

    def __exit__(self, *_: object) -> None:
        if self._start is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = _peak_resident_bytes()
        self.extra_bytes = peak - self._start


def _peak_resident_bytes() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    if match is None:
        raise OSError(f"no VmHWM in {_STATUS}")
    return int(match[1]) * 1024


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


def loss_of(name: str, options: dict[str, Any]) -> Loss:
    """The options are those of this library's."""
    return partial(CONTENDERS[name].loss, **(options if name in OURS else {}))


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
    deadline: float = math.inf,
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
        deadline: of `time.monotonic`, after which no further round begins.
        options: of this library's contenders.

    Returns:
        Lists of `seconds`, `forward_seconds` and `results` (loss and norms of the gradients), or
        of one that raised an error `status`, the reason.
    """
    taken: dict[str, dict[str, list[Any]]] = {name: {} for name in (*names, FLOOR)}
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(fresh_process())
            for name in (() if device.type == "cuda" else taken)
        }
        bar = stack.enter_context(tqdm(total=rounds * len(taken), desc="timing", disable=None))
        for done in range(rounds):
            if done and time.monotonic() > deadline:
                break
            for name, mine in taken.items():
                bar.update()
                if "status" in mine:
                    continue
                turn = (name, path, device, forward, fresh_memory, options)
                try:
                    pool = pools.get(name)
                    told = pool.submit(take_turn, *turn).result() if pool else take_turn(*turn)
                except Exception as error:
                    taken[name] = {"status": [reason(name, error)]}
                    continue
                for key, value in told.items():
                    mine.setdefault(key, []).append(value)
    _held.clear()
    return taken


def reason(name: str, error: Exception) -> str:
    """What its row says of an error; one of ours is raised, but for want of memory."""
    if isinstance(error, OUT_OF_MEMORY) and name != FLOOR:
        return "out of memory"
    if name in (BASELINE, FLOOR, *OURS):
        raise error
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:90]


def keep_memory() -> None:
    """This process gives none back to the system (glibc; elsewhere as it is)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def fresh_process() -> ProcessPoolExecutor:
    """Forked, where that can be, from one that has imported what all need and done nothing."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload(["benchmarks.contenders"])
    return ProcessPoolExecutor(1, mp_context=context)


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
    name: str,
    path: Path,
    device: torch.device,
    forward: bool,
    fresh_memory: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Once to warm up and to find the memory, then timed; at the end the memory is given back."""
    w = _hold(path, device, shared=True)
    kept = device.type == "cpu" and not fresh_memory
    if kept:
        keep_memory()
    try:
        if name == FLOOR:
            run = bare_gemms(w)
            run()
            return {"seconds": time_once(run, device)}
        return _turn(loss_of(name, options), w, forward, kept)
    finally:
        with_grad(w)
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if give_back is not None:
            give_back(0)  # to the others, who wait with theirs


def _turn(loss: Loss, w: Workload, forward: bool, kept: bool) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    device, tries = w.hidden.device, _TRIES if kept else 1
    step(loss, w)
    with_grad(w)
    if forward:
        with torch.no_grad():
            measured["forward_seconds"] = time_once(partial(loss, w), device)
    for left in reversed(range(tries)):
        faults = _page_faults()
        measured["seconds"], value = timed(partial(step, loss, w), device)
        # Once in a while what was kept lies so that it does not fit, and is found anew.
        if not left or _page_faults() - faults < _FEW_FAULTS:
            break
        with_grad(w)
    gradients = [x.grad for x in (w.hidden, w.weight)]
    norms = [0.0 if x is None else float(x.float().norm()) for x in gradients]
    measured["results"] = (float(value), *norms)
    return measured


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


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
    loss, w = loss_of(name, options), _hold(path, device, shared=False)
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


def write_json(path: Path | None, result: Any) -> None:
    """Whole or not at all, if it is wanted: a run is stopped at any time."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(result, indent=1) + "\n")
        scratch.replace(path)


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

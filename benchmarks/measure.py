"""Measures time and peak memory of contenders, and describes the machine."""

from __future__ import annotations

import argparse
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
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.contenders import CONTENDERS
from benchmarks.workloads import Workload

FLOOR = "bare GEMMs"
# The GPU's memory is exhausted, or the system killed the process for want of memory.
OUT_OF_MEMORY = (torch.OutOfMemoryError, BrokenProcessPool)
# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
# Memory that malloc holds is sometimes too fragmented for a step. A step with more page faults than
# this is repeated, up to so many times in all.
_FEW_FAULTS, _TRIES = 5_000, 4
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

Loss = Callable[[Workload], Tensor]
ByContender = dict[str, dict[str, Any]]  # results so far
T = TypeVar("T")


class PeakMemory:
    """Measures a `with` block; afterwards `extra_bytes` is the peak beyond the memory at its start.

    On CUDA this is the peak of PyTorch's caching allocator. On a CPU it is the system's high-water
    mark of resident memory, reset at the start (on Linux; elsewhere `extra_bytes` is None). That
    misses memory which the allocator kept from before and uses again, so publish numbers from
    fresh processes only.
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
        else:
            with suppress(OSError):  # a system that does not tell, or does not let it be reset
                _CLEAR_REFS.write_text("5")
                self._start = _peak_resident_bytes()
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
    """Returns the lower bound: the GEMMs of the unmasked tokens, into existing buffers.

    They are the logits and the gradients of the hidden states and of a head that is not frozen,
    and the logits of a teacher.
    """
    weight, teacher = w.weight.detach(), w.teacher
    rows = slice(None) if w.mask is None else w.mask.flatten()
    chunks = w.hidden.detach().flatten(0, 1)[rows].split(4096)
    teacher_chunks = teacher.hidden.flatten(0, 1)[rows].split(4096) if teacher else ()
    logits = weight.new_zeros(len(chunks[0]), weight.shape[0])
    d_hidden, d_weight = torch.zeros_like(chunks[0]), torch.zeros_like(weight)

    def run() -> None:
        for i, chunk in enumerate(chunks):
            out = logits[: len(chunk)]
            if teacher:
                torch.mm(teacher_chunks[i], teacher.head.T, out=out)
            torch.mm(chunk, weight.T, out=out)
            torch.mm(out, weight, out=d_hidden[: len(chunk)])
            if not w.frozen:
                torch.addmm(d_weight, out.T, chunk, beta=min(i, 1), out=d_weight)

    return run


def with_grad(w: Workload) -> Workload:
    """Makes hidden states and a trained head require gradients, and clears what they have."""
    for x, trained in ((w.hidden, True), (w.weight, not w.frozen)):
        x.grad = None
        x.requires_grad_(trained)
    return w


def loss_of(name: str, backend: str) -> Loss:
    """Returns a contender's loss, with `backend` if it is one of this library's."""
    execution: dict[str, Any] = {"backend": backend} if "ours" in name else {}
    return partial(CONTENDERS[name], **execution)


def step(loss: Loss, w: Workload) -> Tensor:
    """Runs forward and backward; returns the loss."""
    value = loss(w)
    value.backward()
    return value.detach()


def timed(run: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Returns the seconds that one call takes, and its result."""
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
    backend: str = "auto",
    deadline: float = math.inf,
    each_round: Callable[[ByContender], None] = lambda _: None,
) -> ByContender:
    """Times forward and backward of the bare GEMMs and each contender, in turns.

    On a CPU each contender has a process of its own, which waits while others run. In a shared one
    the time would depend on the memory that the others left with the allocator.

    Args:
        names: the contenders.
        path: the file of a stored workload.
        device: where to load the workload.
        rounds: how many times each contender is measured.
        backend: of this library's contenders.
        deadline: a value of `time.monotonic()` after which no further round begins.
        each_round: called after each round with what has been taken so far.

    Returns:
        For each name lists of `seconds` and `results` (the loss and the norms of the gradients),
        one entry per round; for one that failed, `status` with the reason.
    """
    from tqdm import tqdm

    taken: ByContender = {name: {} for name in (FLOOR, *names)}
    with ExitStack() as stack:
        own_process = () if device.type == "cuda" else taken
        pools = {name: stack.enter_context(fresh_process()) for name in own_process}
        bar = stack.enter_context(tqdm(total=rounds * len(taken), desc="timing", disable=None))
        for done in range(rounds):
            if done and time.monotonic() > deadline:
                break
            for name, samples in taken.items():
                bar.update()
                if "status" in samples:
                    continue
                turn, pool = (name, path, device, backend), pools.get(name)
                try:
                    result = pool.submit(take_turn, *turn).result() if pool else take_turn(*turn)
                except Exception as error:
                    if name == FLOOR:  # every result is relative to it
                        raise
                    taken[name] = {"status": reason(error)}
                    continue
                for key, value in result.items():
                    samples.setdefault(key, []).append(value)
            each_round(taken)
    _held.clear()
    return taken


def reason(error: Exception) -> str:
    """Returns the text of an error, on a line."""
    if isinstance(error, OUT_OF_MEMORY):
        return "out of memory"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:90]


def keep_memory() -> None:
    """Makes the allocator return no memory to the system (with glibc; no effect elsewhere)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def fresh_process() -> ProcessPoolExecutor:
    """Returns an executor of one process, forked (if possible) after the imports and no work."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload(["benchmarks.contenders"])
    return ProcessPoolExecutor(1, mp_context=context)


def run_alone(run: Callable[..., T], *arguments: Any, limit_s: float = math.inf) -> T:
    """Returns the result of a function that runs in a process of its own, for a time at most.

    Raises:
        TimeoutError: the time is over; the process has been killed.
        BrokenProcessPool: the process ended by itself.
    """
    pool = fresh_process()
    try:
        waits = None if math.isinf(limit_s) else max(0.0, limit_s)
        return pool.submit(run, *arguments).result(waits)
    except FutureTimeout:
        for process in (getattr(pool, "_processes", None) or {}).values():
            process.kill()
        raise TimeoutError(f"more than {limit_s:.0f} s") from None
    finally:
        pool.shutdown(cancel_futures=True)


def trim_memory() -> None:
    """Returns freed memory to the system (with glibc; no effect elsewhere)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# The workload that this process has loaded, by its path.
_held: dict[Path, Workload] = {}


def load(path: Path, device: torch.device, *, shared: bool) -> Workload:
    """Loads a stored workload once; `shared` maps its memory, which all processes then share."""
    if path not in _held:
        warnings.filterwarnings("ignore", category=UserWarning)
        mapped = shared and device.type == "cpu"
        loaded = torch.load(path, mmap=mapped, map_location=device)
        _held.clear()
        _held[path] = Workload(**loaded)
    return with_grad(_held[path])


def release() -> None:
    """Gives the GPU's memory back, for another process."""
    _held.clear()
    torch.cuda.empty_cache()


def take_turn(name: str, path: Path, device: torch.device, backend: str) -> dict[str, Any]:
    """Runs a warm-up step and a timed one, then returns the memory to the system."""
    w = load(path, device, shared=True)
    if device.type == "cpu":
        keep_memory()  # as PyTorch does on a GPU
    try:
        if name == FLOOR:
            run = bare_gemms(w)
            run()
            return {"seconds": timed(run, device)[0]}
        return time_step(loss_of(name, backend), w)
    finally:
        with_grad(w)
        trim_memory()  # the other processes need it


def time_step(loss: Loss, w: Workload) -> dict[str, Any]:
    """Times a step, after one that is not counted."""
    step(loss, w)
    for remaining in reversed(range(_TRIES)):
        with_grad(w)
        before = _page_faults()
        seconds, value = timed(partial(step, loss, w), w.hidden.device)
        if not remaining or _page_faults() - before < _FEW_FAULTS:
            break
    return {"seconds": seconds, "results": (float(value), *gradient_norms(w))}


def gradient_norms(w: Workload) -> list[float]:
    """Returns the norms of the gradients of the hidden states and the head; 0 where is none."""
    gradients = [x.grad for x in (w.hidden, w.weight)]
    return [0.0 if x is None else float(x.float().norm()) for x in gradients]


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextmanager
def stored(w: Workload) -> Iterator[Path]:
    """Writes the workload to a temporary file, from which fresh processes load it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.pt"
        torch.save(vars(w.each(Tensor.detach)), path)
        del w  # frees its memory for the measurement, if the caller drops it, too
        yield path


def extra_memory(name: str, path: Path, device: torch.device, backend: str = "auto") -> int:
    """Returns the peak memory of forward and backward beyond the inputs, in bytes.

    On a CPU this runs in a fresh process, as `PeakMemory` needs, and raises `BrokenProcessPool` if
    that is killed for want of memory.
    """
    args = (name, path, device, backend)
    return measure_memory(*args) if device.type == "cuda" else run_alone(measure_memory, *args)


def measure_memory(name: str, path: Path, device: torch.device, backend: str) -> int:
    loss, w = loss_of(name, backend), load(path, device, shared=False)
    # The first call loads libraries and starts thread pools: make it a tiny one. torch.compile
    # compiles for the shapes, so its first call has to be of full size.
    step(loss, w if "compiled" in name else with_grad(w.tiny()))
    with_grad(w)
    with PeakMemory(w.hidden.device) as memory:
        step(loss, w)
    if memory.extra_bytes is None:
        raise OSError(f"this system does not report peak memory for {w.hidden.device}")
    return memory.extra_bytes


def kept_step(name: str, path: Path, device: torch.device, backend: str) -> float:
    """Runs a step whose memory this process keeps for the next one; returns the loss."""
    if device.type == "cpu":
        keep_memory()  # as PyTorch does on a GPU
    w = load(path, device, shared=False)
    return float(timed(partial(step, loss_of(name, backend), w), device)[1])


def kept_norms(path: Path) -> list[float]:
    """Returns the norms of the gradients of `kept_step`, in the same process."""
    return gradient_norms(_held[path])


def spread(values: list[float]) -> tuple[float, float, float]:
    """Returns the median, the 20th and the 80th percentile."""
    ordered = sorted(values)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
    return statistics.median(ordered), low, high


def header(device: str) -> dict[str, Any]:
    """Describes the machine, the versions and the commit of a measurement."""
    commit = output_of("git", "describe", "--always", "--dirty", "--exclude=*")
    processor = platform.processor() or platform.machine()
    about = {}
    if torch.device(device).type == "cuda":
        processor = torch.cuda.get_device_name(device)
        driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
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


def new_result(device: str, **more: Any) -> dict[str, Any]:
    """Prints what `header` describes, on one line; returns it with an empty list of rows."""
    result = {**header(device), **more, "rows": []}
    values = {**result, **result["peers"]}
    print(" | ".join(f"{k}: {v}" for k, v in values.items() if isinstance(v, str)))
    return result


def write_json(path: Path | None, result: Any) -> None:
    """Writes a file atomically, as a run may be stopped at any time; None writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(result, indent=1) + "\n")
        scratch.replace(path)


def output_of(*command: str) -> str:
    """Returns what a command prints; nothing if there is no such command."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return ""
    return run.stdout.strip()


def parser_of(
    module: str, doc: str | None, *, rounds: int = 0, cpu: bool = False
) -> argparse.ArgumentParser:
    """Returns a parser with --json, with --device but on a `cpu`, and --rounds with a default."""
    about = (doc or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    if not cpu:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", default=default, help=f"cpu or cuda (default: {default})")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    if rounds:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help=f"measured rounds (default: {rounds})"
        )
    return parser


def version(package: str) -> str:
    """Returns the installed version of a package, or "absent"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"

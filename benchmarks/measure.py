"""Measures time and peak memory of contenders, and describes the machine."""

from __future__ import annotations

import argparse
import ctypes
import json
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from benchmarks.contenders import BASELINE, CONTENDERS, IMPORTED
from benchmarks.workloads import Workload

FLOOR = "bare GEMMs"
ERRORS = ("loss", "d_hidden", "d_weight")
# The GPU's memory is exhausted, or the system killed the process for want of memory.
OUT_OF_MEMORY = (torch.OutOfMemoryError, BrokenProcessPool)
# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
# Memory that malloc holds is sometimes too fragmented for a step. A step with more page faults than
# this is repeated, and the first one in any case.
_FEW_FAULTS, _MOST_STEPS = 5_000, 5
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

Loss = Callable[[Workload], Tensor]
T = TypeVar("T")


def wait(device: torch.device) -> None:
    """Waits until a GPU has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
        wait(self.device)
        if self.device.type == "cuda":
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
        wait(self.device)
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = _peak_resident_bytes()
        self.extra_bytes = peak - self._start


def _peak_resident_bytes() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    if match is None:
        raise OSError(f"no VmHWM in {_STATUS}")
    return int(match[1]) * 1024


def bare_gemms(w: Workload) -> Callable[[], Tensor | None]:
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


def step(loss: Loss, w: Workload) -> Tensor:
    """Runs forward and backward; returns the loss."""
    value = loss(w)
    value.backward()
    return value.detach()


def timed(run: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Returns the seconds that one call takes, and its result."""
    wait(device)
    start = time.perf_counter()
    result = run()
    wait(device)
    return time.perf_counter() - start, result


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
    context.set_forkserver_preload(["benchmarks.measure", *IMPORTED])
    return ProcessPoolExecutor(1, mp_context=context)


def alone(run: Callable[..., T], *arguments: Any) -> T:
    """Returns the result of a function in a fresh process."""
    with fresh_process() as process:
        return process.submit(run, *arguments).result()


# The workload that this process has loaded, by its path.
_held: dict[Path, Workload] = {}


def load(path: Path, device: torch.device) -> Workload:
    """Loads a stored workload once."""
    if path not in _held:
        warnings.filterwarnings("ignore", category=UserWarning)
        _held.clear()
        _held[path] = Workload(**torch.load(path, map_location=device))
    return with_grad(_held[path])


class Truth(NamedTuple):
    """The loss of a workload and its gradients, by the name of their error."""

    loss: float
    gradients: dict[str, Tensor]


def gradients_of(w: Workload) -> dict[str, Tensor]:
    """Returns the gradients of the hidden states and of a head that is not frozen."""
    gradients = {"d_hidden": w.hidden.grad, "d_weight": w.weight.grad}
    return {name: x for name, x in gradients.items() if x is not None}


def relative_error(grad: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over that of what is expected."""
    # In parts, so that a large head is in memory once in float64, not three times.
    parts = zip(grad.split(4096), expected.split(4096), strict=True)
    squares = sum(float((x - y).square().sum()) for x, y in parts)
    return squares**0.5 / float(expected.norm())


@contextmanager
def stored(w: Workload, truth: Truth) -> Iterator[Path]:
    """Writes a workload and its truth to temporary files, from which fresh processes load them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.pt"
        torch.save(vars(w.each(Tensor.detach)), path)
        torch.save(tuple(truth), path.with_name("truth.pt"))
        del w, truth  # frees memory for the measurement, if the caller drops them, too
        yield path


def measure_memory(name: str, path: Path, device: torch.device) -> int:
    """Returns the peak memory of forward and backward beyond the inputs, in bytes.

    On a CPU `PeakMemory` needs a fresh process for it.
    """
    loss, w = CONTENDERS[name], load(path, device)
    # The first call loads libraries and starts thread pools: make it a tiny one. torch.compile
    # compiles for the shapes, so its first call has to be of full size.
    step(loss, w if "compiled" in name else with_grad(w.tiny()))
    with_grad(w)
    with PeakMemory(w.hidden.device) as memory:
        step(loss, w)
    if memory.extra_bytes is None:
        raise OSError(f"this system does not report peak memory for {w.hidden.device}")
    return memory.extra_bytes


def kept_step(name: str, path: Path, device: torch.device) -> tuple[float, float, int]:
    """Runs a step in memory that this process keeps for the next one.

    Returns seconds, loss and page faults.
    """
    if device.type == "cpu":
        keep_memory()  # as PyTorch does on a GPU
    w = load(path, device)
    run = bare_gemms(w) if name == FLOOR else partial(step, CONTENDERS[name], w)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds, loss = timed(run, device)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return seconds, 0.0 if loss is None else float(loss), faults


def kept_errors(path: Path, loss: float) -> dict[str, float]:
    """Returns the errors of `kept_step` in the same process: of the loss, relative of gradients."""
    gradients = gradients_of(_held[path])
    truth = Truth(*torch.load(path.with_name("truth.pt"), map_location=_held[path].hidden.device))
    if gradients.keys() != truth.gradients.keys():
        raise ValueError(f"gradients: expected {[*truth.gradients]}; got {[*gradients]}")
    relative = {k: relative_error(x, truth.gradients[k]) for k, x in gradients.items()}
    return {"loss": abs(loss - truth.loss), **relative}


def take_turn(name: str, path: Path, device: torch.device) -> tuple[float, dict[str, float]]:
    """Runs steps until one takes no more memory; returns its seconds and errors."""
    for number in range(_MOST_STEPS):
        seconds, loss, faults = kept_step(name, path, device)
        if number and faults < _FEW_FAULTS:
            break
    return seconds, {} if name == FLOOR else kept_errors(path, loss)


def spread(values: list[float]) -> tuple[float, float, float]:
    """Returns the median, the 20th and the 80th percentile."""
    ordered = sorted(values)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
    return statistics.median(ordered), low, high


def table(rows: Sequence[dict[str, Any]], limit: float) -> Iterable[str]:
    """Returns lines of time and memory beside eager's and the bare GEMMs, and the largest error.

    Args:
        rows: a dict per contender; one that was timed has lists of `seconds` and `floor_seconds`.
        limit: of the errors.
    """
    yield (
        f"{'':25}{'seconds':>8} {'[p20, p80]':>16} {'x eager':>8} {'x GEMMs':>8} {'extra MiB':>9} "
        f"{'x eager':>8} {'error':>8}"
    )
    base = next((x for x in rows if x["name"] == BASELINE and "seconds" in x), None)
    for row in rows:
        status = row.get("status", "ok")
        line = f"{row['name']:25}"
        if "seconds" in row:
            median, low, most = spread(row["seconds"])
            line += f"{median:8.3f} {f'[{low:.3f}, {most:.3f}]':>16}"
            line += f" {median / spread(base['seconds'])[0]:8.2f}" if base else f"{'':9}"
            line += f" {median / statistics.mean(row['floor_seconds']):8.2f}"
            if "extra_bytes" in row:
                line += f" {row['extra_bytes'] / 2**20:9,.0f}"
                line += f" {row['extra_bytes'] / base['extra_bytes']:8.2f}" if base else f"{'':9}"
        else:
            line += status
        errors = {k: row[k] for k in ERRORS if k in row}
        if errors:
            # Written so that NaN is above the limit.
            high = {k: x for k, x in errors.items() if not x <= limit}
            line += f" {max((high or errors).values()):8.1e}"
            line += f" above {limit:.0e}: {', '.join(high)}" if high else ""
        yield line + (f" {status}" if "seconds" in row and status != "ok" else "")


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


def parser_of(module: str, doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Returns a parser with --json, and --rounds with a default."""
    about = (doc or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"measured rounds (default: {rounds})"
    )
    return parser


def add_device_and_shape(add: Callable[..., Any], name: str) -> None:
    """Adds --device, and an option for tokens, vocabulary and hidden size."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=default, help=f"cpu or cuda (default: {default})")
    about = "tokens, vocabulary and hidden size of synthetic workloads (default: their own)"
    add(name, type=shape, metavar="N,V,H", help=about)


def shape(text: str) -> tuple[int, int, int]:
    """Parses "N,V,H"."""
    N, V, H = (int(part) for part in text.split(","))
    if min(N, V, H) < 1:
        raise ValueError
    return N, V, H


def version(package: str) -> str:
    """Returns the installed version of a package, or "absent"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"

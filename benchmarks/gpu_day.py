"""Measures a GPU on its first day, the most important figures first, in six minutes.

    python -m benchmarks.gpu_day --json day.json [--minutes 5.5] [--parts NAME ...]
    python -m benchmarks.gpu_day --json day.json --device cpu     rehearses it, at tiny sizes

Needs torch, triton and numpy, no network; a part that needs another package says so.

Each part runs in a process of its own, forked from this one, which has imported torch and never
touches CUDA, so that a start takes a second: a kernel that reads out of bounds, a compiler that
hangs and memory that runs out end one part. The part replaces the file after each of its rows: a
run that is killed keeps what it had.

Results are compared with float64 first, and what is wrong has no time. Times are the median, 20th
and 80th percentile of CUDA events, runs in turns; `model_ms` is what `gpu_costs.py` predicts.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import math
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import contenders, gpu_costs, measure
from benchmarks.checks import errors_of, truth_in_full
from benchmarks.contenders import BASELINE, CONTENDERS, trl_logps
from benchmarks.workloads import Workload, make
from grpo_kernels import doctor, linear_logprobs
from grpo_kernels.head.products import addmm, new_buffers
from grpo_kernels.kernels import LogitTransform, TokenStats, select_backend

ROOT = Path(__file__).parents[1]
V, ODD_V = 151_936, 151_669  # the second is what `weight[:V]` leaves of a padded head
FLOOR, SCORING, (ONE_PASS, TWO_PASSES) = measure.FLOOR, "ours, scoring", contenders.OURS
OURS = (BASELINE, SCORING, TWO_PASSES, "ours")
PEERS = ("TRL chunked head", "torch linear CE, chunked", "Liger scaled CE", "cut-cross-entropy",
         "Liger Triton loss", "Liger fused linear")  # fmt: skip
FLOAT64 = ((8, 0), (9, 0), (10, 0))  # compute capabilities that have cores for it
STRIPS = (512, 640, 660, 768, 1024)
LAUNCHES = ((1024, 4), (2048, 4), (4096, 8), (4096, 16))  # columns and warps of the sweep
TESTS = """tests/test_cuda_values.py tests/test_pairs.py -m gpu -k
"not on_a_gpu or (bfloat16 and (softcap or batch_invariant))" """
MODELLED = {**gpu_costs.METHODS, "ours": gpu_costs.exact, SCORING: gpu_costs.scoring,
            TWO_PASSES: gpu_costs.METHODS["two passes"]}  # fmt: skip

Row = dict[str, Any]
Rows = Iterator[Row]
Run = Callable[[], Any]


class Day:
    """The device, the sizes there, and how everything is timed."""

    def __init__(self, device: str) -> None:
        self.device, self.large = torch.device(device), device == "cuda"
        self.rounds = 7 if self.large else 1
        self.model = gpu_costs.device_of(torch.cuda.get_device_name() if self.large else "")

    def size(self, large: int, tiny: int) -> int:
        """Returns a size for the device."""
        return large if self.large else tiny

    def workload(self, N: int, H: int, vocabulary: int = V, kind: str = "dense") -> Workload:
        """Makes states whose softmax is spread like a language model's, in bf16 (CPU: float32).

        Without old log-probs, as no ratio is then near where it is clipped.
        """
        shape = (N, vocabulary, H) if self.large else (64, 200 - vocabulary % 2, 16)
        dtype = torch.bfloat16 if self.large else torch.float32
        w = replace(make(kind, shape, self.device).to(dtype), old_logps=None)
        return measure.with_grad(w)

    @property
    def exact(self) -> torch.dtype:
        """The dtype of what results are compared with; products in float32 take no TF32."""
        slow = self.large and torch.cuda.get_device_capability() not in FLOAT64
        return torch.float32 if slow else torch.float64

    def ms(self, run: Run, repeat: int = 1) -> tuple[float, float]:
        """Returns milliseconds per call on the device, and of the CPU until all is launched."""
        measure.wait(self.device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 if self.large else 0)]
        start = time.perf_counter()
        for event in events[:1]:
            event.record()
        for _ in range(repeat):
            run()
        for event in events[1:]:
            event.record()
        host = 1e3 * (time.perf_counter() - start) / repeat
        measure.wait(self.device)
        return (events[0].elapsed_time(events[1]) / repeat if events else host), host

    def row(self, name: str, shape: Sequence[int], known: Callable[[], Row]) -> Row:
        """Returns a row with what `known` returns, or with the reason of its exception."""
        row: Row = {"run": name, "shape": shape}
        try:
            return row | known()
        except ImportError:
            raise
        except Exception as error:  # the next one may well compile, or fit
            return row | {"status": measure.reason(error)}

    def rate(
        self, name: str, shape: Sequence[int], work: float, run: Run,
        check: Callable[[], Row] = dict, repeat: int = 1,
    ) -> Row:  # fmt: skip
        """Returns a row with billions of bytes or FLOPs per second, if the results are right."""

        def measured() -> Row:
            run()
            row = check()
            if row.get("status") != "wrong":
                ms = measure.spread([self.ms(run, repeat)[0] for _ in range(self.rounds)])[0]
                row["g_per_s"] = work / ms / 1e6
            return row

        return self.row(name, shape, measured)

    def times(self, w: Workload | tuple[int, int, int], runs: Mapping[str, Run]) -> Rows:
        """Yields time and peak memory of each run, in turns, and their ratio to the first."""
        shape = w if isinstance(w, tuple) else shape_of(w)
        peaks: dict[str, Row] = {}
        for name, run in runs.items():
            row = self.row(name, shape, partial(self.peak, run))
            if "status" in row:
                yield row
            else:
                peaks[name] = row
        taken = [{name: self.ms(runs[name]) for name in peaks} for _ in range(self.rounds)]
        first = 0.0
        for name, row in peaks.items():
            ms, host = (measure.spread([turn[name][i] for turn in taken]) for i in range(2))
            first = first or ms[0]
            row |= {"ms": ms, "x": ms[0] / first, "host_ms": host}
            modelled = isinstance(w, tuple) or w.support is None
            if self.model and name in MODELLED and modelled:
                terms = MODELLED[name](gpu_costs.Step(self.model, *shape))
                expected = sum(terms.values())
                row |= {"model": terms, "model_ms": expected, "x_model": ms[0] / expected}
            yield row

    def peak(self, run: Run) -> Row:
        """Returns the memory of a run."""
        run()
        gc.collect()
        if self.large:
            torch.cuda.empty_cache()
        with measure.PeakMemory(self.device) as memory:
            run()
        row: Row = {"extra_mib": (memory.extra_bytes or 0) / 2**20}
        if self.large:
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        return row


def shape_of(w: Workload) -> tuple[int, int, int]:
    """Returns N, V and H."""
    return w.targets.numel(), len(w.weight), w.weight.shape[1]


def run_of(day: Day, w: Workload, name: str) -> Run:
    """Returns a function that makes log-probs or None, and but for scoring dh and dw."""
    if name == SCORING:
        return lambda: [linear_logprobs(w.hidden, w.weight, w.targets, support=w.support).logps]
    contender = CONTENDERS[ONE_PASS if name == "ours" else name]
    if why := contender.absent(day.device):
        raise ImportError(why)
    return lambda: [None, *torch.autograd.grad(contender.loss(w), (w.hidden, w.weight))]


def call(
    day: Day, N: int, H: int, names: tuple[str, ...] = OURS, vocabulary: int = V,
    kind: str = "dense",
) -> Rows:  # fmt: skip
    """Compares runs with float64, times those that are right, and traces ours."""
    w = day.workload(N, H, vocabulary, kind)
    true, right = truth_in_full(w, day.exact), {FLOOR: measure.bare_gemms(w)}

    def checked(name: str, run: Run) -> Row:
        begin = time.perf_counter()
        got = run()
        measure.wait(day.device)
        first_s = time.perf_counter() - begin  # imports and compilers, too
        return {"first_s": first_s, **errors_of(got, true, rounded="ours" not in name)}

    for name in names:
        run = run_of(day, w, name)
        row = day.row(name, shape_of(w), partial(checked, name, run))
        if row["status"] == "right":
            right[name] = run
        yield row
    true.clear()  # frees memory
    yield from day.times(w, right)
    if "ours" in right:
        yield {"run": "trace of ours", "shape": shape_of(w), **trace(day, right["ours"])}


def trace(day: Day, run: Run) -> Row:
    """Returns milliseconds and launches of each kernel, and the GPU's idle time."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if day.large else [])]
    with profile(activities=kinds) as profiler:
        run()
        measure.wait(day.device)
    kernels: dict[str, list[float]] = {}
    events = [x for x in profiler.events() or () if "CUDA" in str(x.device_type)]
    for event in events:
        place = kernels.setdefault(event.name[:80], [0.0, 0])
        place[0], place[1] = place[0] + event.time_range.elapsed_us() / 1e3, place[1] + 1
    busy, times = sum(ms for ms, _ in kernels.values()), [event.time_range for event in events]
    span = max((x.end for x in times), default=0) - min((x.start for x in times), default=0)
    most = dict(sorted(kernels.items(), key=lambda item: -item[1][0])[:14])
    return {"busy_ms": busy, "idle_ms": span / 1e3 - busy, "launches": len(events), "kernels": most}


def device(day: Day) -> Rows:
    """Tells what the GPU is, and its rates beside those that the cost model takes."""
    query = "name,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    smi = measure.output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    yield {"run": "device", **measure.header(day.device.type), "smi": smi}
    source = torch.zeros(day.size(1 << 30, 1 << 10), dtype=torch.uint8, device=day.device)
    copy, n = torch.empty_like(source), day.size(8192, 64)
    row = day.rate("copy", source.shape, 2 * source.numel(), partial(copy.copy_, source))
    yield row | {"model": day.model and 1e3 * day.model.tb_per_s}
    a = torch.randn(n, n, device=day.device).bfloat16()
    row = day.rate("bf16", (n, n, n), 2 * n**3, partial(torch.mm, a, a))
    yield row | {"model": day.model and 1e3 * day.model.tflops}


def calls(day: Day) -> Rows:
    """Compares kinds of calls with float64 in each dtype, as the doctor does."""
    for dtype, name in itertools.product(doctor.GRADIENT_TOLERANCE, doctor.CALLS):
        line, problem = doctor.check_call(name, dtype, day.device)
        yield {"run": f"{name}, {dtype}", "result": line.strip(), "status": problem or "right"}


def gemms(day: Day, H: int) -> Rows:
    """Measures the rate of each product as the library calls it, by rows of a strip and odd V."""
    w = day.workload(4096, H)
    hidden, weight = w.hidden.detach().flatten(0, 1), w.weight.detach()
    odd, fp32, half = len(weight) - day.size(V - ODD_V, 1), torch.float32, weight.dtype
    strips = [(rows, len(weight), fp32) for rows in STRIPS]
    strips += [(640, odd, fp32), (4096, len(weight), half)]
    products = [("logits", *x) for x in strips]
    products += [(x, 4096, *y) for x in ("dh", "dw")
                 for y in itertools.product((len(weight), odd), (fp32, half))]  # fmt: skip
    for name, rows, columns, dtype in products:
        x, y = hidden[:rows], weight[:columns]
        size = len(x), dtype if name == "logits" else half
        z = new_buffers(x, columns, [size])[0].normal_()
        out, a, b = {"logits": (z, x, y.T), "dh": (x, z, y), "dw": (y, z.T, x)}[name]
        out = out if out is z else torch.zeros_like(out, dtype=dtype)
        run = partial(addmm, out, a, b, beta=float(name == "dw" and dtype == fp32))
        shape = (len(x), columns, x.shape[1])
        yield day.rate(f"{name}, {dtype}", shape, 2 * math.prod(shape), run)


def sweep(day: Day) -> Rows:
    """Measures the sweep on strips and with other launches, beside a copy of as many bytes."""
    from grpo_kernels.kernels.triton_common import Launch

    stats, repeat = select_backend("triton", day.device).token_stats, day.size(10, 1)
    # Many at a time, as a launch takes the CPU a good part of a strip's time.
    cases: list[tuple[int, Row]] = [(rows, {}) for rows in STRIPS]
    for rows, how in [*cases, *((640, {"launch": Launch(*x)}) for x in LAUNCHES)]:
        shape = (day.size(rows, 2), day.size(V, 201))
        logits = 3 * torch.randn(shape, device=day.device)
        targets = torch.randint(0, shape[1], shape[:1], device=day.device)
        exps = torch.empty_like(logits, dtype=torch.bfloat16 if day.large else torch.float32)
        run = partial(stats, logits, targets, LogitTransform(), entropy=True, exps=exps, **how)
        true = logits.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
        moved = 6 * logits.numel()  # four bytes of a logit are read, two are written
        source = torch.zeros(moved // 2, dtype=torch.uint8, device=day.device)
        copy = partial(torch.empty_like(source).copy_, source)
        check = partial(lambda run, true: errors_of([run().logps], [true]), run, true)
        yield day.rate("copy", shape, moved, copy, repeat=repeat)
        yield day.rate(f"sweep {how or ''}".strip(), shape, moved, run, check, repeat)


def exp_gemm(day: Day, N: int, H: int) -> Rows:
    """Compares the experiment's GEMM with float64, on an odd V, and times it beside a plain one."""
    from benchmarks.exp_gemm import LARGEST, SMALL, TILES, Tile, errors, exp_gemm, operands

    M, H, columns, odd = (day.size(*x) for x in ((N, 40), (H, 24), (V, 206), (ODD_V, 203)))
    dtype = torch.bfloat16 if day.large else torch.float32
    hidden, peaked, weight, targets = operands(M, odd, H, day.device, dtype)
    aligned = torch.cat([weight, weight[: columns - odd]])
    (exps,) = new_buffers(hidden, columns, [(M, dtype)])
    out = TokenStats.empty(hidden, entropy=True, total=True)
    right: dict[str, Run] = {"mm": partial(torch.mm, hidden, aligned.T, out=exps)}

    def checked(tile: Tile) -> Row:
        x = peaked, weight, targets, exps[:, :odd], out
        exp_gemm(*x, tile=tile)
        off = errors(*x)
        good = all(error <= LARGEST for error in off.values())  # a NaN is not
        return {"errors": off, "status": "right" if good else "wrong"}

    major = torch.cuda.get_device_capability()[0] if day.large else 0
    for tile in TILES.get(major, TILES[8]) if day.large else SMALL:
        row = day.row(f"exp_gemm, {tuple(tile)}", (M, odd, H), partial(checked, tile))
        if row["status"] == "right":
            right[row["run"]] = partial(exp_gemm, hidden, aligned, targets, exps, out, tile=tile)
        yield row
    yield from day.times((M, columns, H), right)


def model(day: Day) -> Rows:
    """Measures a GRPO step of Qwen2.5-0.5B's architecture: random weights, 8 x 1,024 tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from grpo_kernels.integrations.transformers import Objective, attach_fused_head

    words, H, inner, layers, heads = (V, 896, 4864, 24, 14) if day.large else (601, 32, 64, 2, 2)
    (B, T, prompt), dtype = ((8, 1024, 256), torch.bfloat16) if day.large else ((2, 24, 8), None)
    config = Qwen2Config(
        vocab_size=words, hidden_size=H, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(day.device):
        net = Qwen2ForCausalLM(config).to(dtype).train()
    net.gradient_checkpointing_enable()
    attach_fused_head(net)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-6)
    ids = torch.randint(0, words, (B, T), device=day.device)
    labels, advantages = ids.clone(), torch.randn(B, device=day.device)
    labels[:, :prompt] = -100

    def fused() -> Tensor:
        return net(ids, labels=labels, fused_head=Objective(advantages)).loss

    def mean(logps: Tensor) -> Tensor:
        return -((logps - logps.detach()).exp() * advantages[:, None]).mean()

    def trl() -> Tensor:
        states = net.model(ids).last_hidden_state[:, prompt - 1 : -1].flatten(0, 1)
        targets = ids[:, prompt:]
        logps = trl_logps(states, net.lm_head.weight, targets.flatten())
        return mean(logps.view_as(targets))

    def eager() -> Tensor:
        logits = net(ids, logits_to_keep=T - prompt + 1).logits[:, :-1].float()
        return mean(logits.log_softmax(-1).gather(-1, ids[:, prompt:, None])[..., 0])

    def step(loss: Callable[[], Tensor]) -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    norms, losses = [], (fused, eager, *([trl] if find_spec("trl") else []))
    for loss in losses:
        loss().backward()
        norms.append(float(torch.nn.utils.get_total_norm([x.grad for x in net.parameters()])))
        optimizer.zero_grad()
    off = max(abs(norm - norms[1]) for norm in norms)
    status = "right" if off <= 0.05 * norms[1] else "wrong"
    yield {"run": "model", "gradient norms": norms, "status": status}
    if status == "right":
        runs = {f"model, {loss.__name__}": partial(step, loss) for loss in losses}
        yield from day.times((B * (T - prompt), words, H), runs)


def tests(day: Day) -> Rows:
    """Runs the project's own tests of CUDA; a few failures tell enough."""
    import_module("pytest")
    chosen = TESTS if day.large else "tests/test_backends.py -k 1003-plain"
    workers = "-n 8" if day.large and find_spec("xdist") else ""
    command = f"-m pytest -q --tb=short --maxfail=3 -p no:cacheprovider {chosen} {workers}"
    status = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT).returncode
    yield {"run": command, "status": f"exit status {status}" if status else "ok"}


Part = tuple[str, Callable[[Day], Rows], float]  # its name, and its limit in seconds


def at(title: str, N: int, H: int, run: Callable[..., Rows] = call, **options: Any) -> Part:
    """Returns a part of these sizes, by default whole calls."""
    return f"{title} {N} x {H}", partial(run, N=N, H=H, **options), 40


PARTS: list[Part] = [
    ("device", device, 30),
    at("call", 4096, 896),
    at("call, odd V,", 4096, 896, vocabulary=ODD_V),
    ("calls", calls, 75),
    at("call", 16_384, 2048),
    ("gemms 2048", partial(gemms, H=2048), 25),
    ("sweep", sweep, 25),
    at("call", 8192, 4096),
    *(at(name, 8192, 4096, names=(name,)) for name in PEERS),
    ("model", model, 45),
    at("kept sets", 4096, 896, kind="nucleus"),
    at("exp_gemm", 4096, 896, exp_gemm),
    at("exp_gemm", 4096, 2048, exp_gemm),
    ("tests", tests, 60),
    at("call", 512, 896),
    at("call", 4096, 2048),
    ("gemms 896", partial(gemms, H=896), 25),
    ("gemms 4096", partial(gemms, H=4096), 25),
]


def work(run: Callable[[Day], Rows], device: str, path: Path, result: Row, name: str) -> None:
    """Runs a part in a new process, which saves its rows as they come, and then its status."""
    os.setpgrp()  # its children end with it
    if hasattr(libc := ctypes.CDLL(None), "prctl"):
        libc.prctl(1, signal.SIGKILL)  # and it with the run
    part = result["parts"][name]
    try:
        for row in run(Day(device)):
            row = json.loads(json.dumps(row), parse_float=lambda x: float(f"{float(x):.5g}"))
            part["rows"].append(row)
            print(f"  {json.dumps(row)}", flush=True)
            measure.write_json(path, result)
        fine = ("ok", "right", "not run")
        bad = [row for row in part["rows"] if not row.get("status", "ok").startswith(fine)]
        part["status"] = "; ".join(f"{row['run']}: {row['status']}" for row in bad) or "ok"
    except ImportError as why:
        part["status"] = f"not run: {why}"
    except Exception as error:
        traceback.print_exc()
        part["status"] = measure.reason(error)
    measure.write_json(path, result)


def run_all(parts: list[Part], path: Path, device: str, end: float) -> Row:
    """Runs the parts and returns their results, which the file has at any time."""
    for module in ("triton", "torch._dynamo"):  # here, as every part would import them
        import_module(module)
    about = {"date": str(date.today()), "python": sys.version, **measure.header("cpu")}
    result: Row = {**about, "parts": {}}
    for name, run, limit in parts:
        begin = time.monotonic()
        remaining = end - begin
        status = "ended with the run" if remaining > 3 else "not run: no time"
        result["parts"][name] = {"status": status, "rows": []}
        measure.write_json(path, result)
        if remaining > 3:
            args = run, device, path, result, name
            process = multiprocessing.get_context("fork").Process(target=work, args=args)
            try:
                process.start()
                process.join(limit := min(limit, remaining))
            finally:  # after Ctrl-C, too
                ended = not process.is_alive()
                if process.pid:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()  # not yet in a process group
                    process.join(10)  # a kernel that hangs may hold it
            result = json.loads(path.read_text())
            part = result["parts"][name]
            if part["status"] == status:
                died, late = f"exit code {process.exitcode}", f"more than {limit:.0f} s"
                part["status"] = f"its process ended, {died}" if ended else f"out of time: {late}"
            part["seconds"] = round(time.monotonic() - begin, 1)
            measure.write_json(path, result)
        print(f"{name}: {result['parts'][name]['status']}", flush=True)
    return result["parts"]


def main(argv: list[str] | None = None) -> None:
    began = time.monotonic()
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day", description=about)
    parser.add_argument("--json", type=Path, required=True, help="the file of all results")
    # No default by what there is: asking CUDA here would keep the parts' processes from it.
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(default: cuda)")
    parser.add_argument("--minutes", type=float, default=5.5, help="of all parts (default: 5.5)")
    parser.add_argument("--parts", nargs="+", help="parts whose names begin so (default: all)")
    args = parser.parse_args(argv)
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    parts = [x for x in PARTS if not args.parts or x[0].startswith((*args.parts,))]
    done = run_all(parts, args.json, args.device, began + 60 * args.minutes)
    bad = [name for name, x in done.items() if not x["status"].startswith(("ok", "not run"))]
    sys.exit(f"not ok: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()

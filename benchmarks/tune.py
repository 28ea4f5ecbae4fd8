"""Compares the speed of the memory-bound kernels with a copy's, at several block sizes.

    python -m benchmarks.tune [--device cpu|cuda] [--tokens N] [--vocabulary V] [--json out.json]

On a GPU, runs each Triton kernel at several block sizes and numbers of warps, on as many rows as
the library has in a strip; on a CPU, each torch function at several cache block sizes; with
TRITON_INTERPRET=1, each Triton kernel once, to see that it runs. The bytes are those that have to
be moved: the logits are read once, their gradient is written once. A setting whose result differs
from the default's gets no time.

On a GPU that the cost model knows, "x model" is the time over the predicted one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.cost_model import error_of_the_model
from benchmarks.gpu_costs import INSTRUCTIONS, Device, device_of, sweep_ms
from benchmarks.measure import (
    add_device_option,
    header,
    print_header,
    reason,
    time_once,
    write_json,
)
from grpo_kernels.kernels import LogitTransform, RowGrads, torch_backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COPY = "copy"
Run = Callable[[], Any]


def row_settings(cuda: bool) -> list[dict[str, Any]]:
    """Returns the settings of the kernels that work row by row, the default first."""
    if cuda or INTERPRETED:
        from grpo_kernels.kernels.triton_common import Launch
        from grpo_kernels.kernels.triton_logits import ROW_LAUNCH

        tried = itertools.product((1024, 2048, 4096, 8192), (4, 8, 16)) if cuda else []
        return [{"launch": x} for x in dict.fromkeys([ROW_LAUNCH, *(Launch(*t) for t in tried)])]
    default = torch_backend.CPU_BLOCK_BYTES
    return [{"block_bytes": x} for x in dict.fromkeys([default, *(1 << i for i in range(17, 25))])]


def token_settings(cuda: bool) -> list[dict[str, Any]]:
    if not (cuda or INTERPRETED):
        return [{}]
    from grpo_kernels.kernels.triton_common import Launch
    from grpo_kernels.kernels.triton_policy_loss import TOKEN_LAUNCH

    tried = itertools.product((128, 256, 512, 1024), (2, 4, 8)) if cuda else []
    return [{"launch": x} for x in dict.fromkeys([TOKEN_LAUNCH, *(Launch(*t) for t in tried)])]


def cases(N: int, V: int, device: torch.device) -> Iterator[tuple[str, int, list[Any], Any]]:
    """Yields name, bytes moved, settings, and a function from a setting to the result."""
    cuda = device.type == "cuda"
    backend: Any = torch_backend
    if cuda or INTERPRETED:
        from grpo_kernels.kernels import triton_backend as backend
    g = torch.Generator(device).manual_seed(0)
    logits = 3 * torch.randn(N, V, generator=g, device=device)
    targets = torch.randint(0, V, (N,), generator=g, device=device)
    transform = LogitTransform()
    stats = backend.token_stats(logits, targets, transform, entropy=True)
    copied = torch.empty_like(logits)
    yield COPY, 8 * N * V, [{}], lambda: copied.copy_(logits)
    # In memory of their own, so that every run finds the same logits.
    halves = (torch.bfloat16, torch.float32) if cuda else (torch.float32,)
    for dtype in halves:
        exps = torch.empty(N, V, dtype=dtype, device=device)

        def sweep(exps: Tensor = exps, **setting: Any) -> Tensor:
            args = (logits, targets, transform)
            backend.token_stats(*args, entropy=True, exps=exps, **setting)
            return exps

        name = f"one sweep, {str(dtype).removeprefix('torch.')}"
        yield name, N * V * (4 + dtype.itemsize), row_settings(cuda), sweep
    for entropy in (False, True):
        read = partial(backend.token_stats, logits, targets, transform, entropy=entropy)
        name = f"token_stats{', entropy' if entropy else ''}"
        yield name, 4 * N * V, row_settings(cuda), lambda read=read, **s: read(**s)
    weights = torch.randn(N, generator=g, device=device)
    for dtype, entropy in itertools.product(halves, (False, True)):
        out = torch.empty(N, V, dtype=dtype, device=device)
        grads = RowGrads.of(stats, weights, weights if entropy else None)

        def write(out: Tensor = out, grads: RowGrads = grads, **setting: Any) -> Tensor:
            backend.logit_grads_(logits, targets, transform, grads, out, **setting)
            return out

        name = f"logit_grads, {str(dtype).removeprefix('torch.')}{', entropy' if entropy else ''}"
        yield name, N * V * (4 + dtype.itemsize), row_settings(cuda), write
    M = 64 if INTERPRETED else 1 << 20
    logps, old, advantages = torch.randn(3, M, generator=g, device=device) - 2
    ones = torch.ones(M, device=device)
    if backend.policy_loss is not None:
        given = {"advantages": advantages, "weights": ones, "count": ones.sum(), "old_logps": old}
        clip = {"surrogate": "clip", "low": 0.8, "high": 1.2}
        policy = partial(backend.policy_loss, logps, None, grad=True, **given, **clip)
        # Reads log-probs, old log-probs, advantages and weights; writes the gradient.
        yield f"policy_loss, {M:,} tokens", 20 * M, token_settings(cuda), lambda **s: policy(**s)


def predicted_ms(model: Device, name: str, N: int, V: int, moved: int) -> float | None:
    """Returns what the cost model has for a case, if it has anything."""
    kernel, _, _ = name.partition(",")
    if name == COPY:
        return moved / (1e9 * model.tb_per_s)
    if kernel in INSTRUCTIONS:
        return sweep_ms(model, N * V, moved / (N * V), INSTRUCTIONS[kernel])
    return None


def measure(run: Run, device: torch.device, rounds: int) -> list[float]:
    """Returns seconds in ascending order: three percentiles on CUDA, else one per round."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return [ms / 1e3 for ms in do_bench(run, warmup=10, rep=60, quantiles=[0.2, 0.5, 0.8])]
    run()
    return sorted(time_once(run, device) for _ in range(rounds))


def tensors(result: Any) -> list[Tensor]:
    return [x for x in (result if isinstance(result, tuple) else [result]) if x is not None]


def same(result: Any, expected: list[Tensor]) -> bool:
    pairs = zip(tensors(result), expected, strict=True)
    return all(torch.allclose(x.float(), y.float(), rtol=1e-3, atol=1e-4) for x, y in pairs)


def _describe(setting: dict[str, Any]) -> str:
    return ", ".join(str(tuple(x) if isinstance(x, tuple) else x) for x in setting.values())


def rows(
    N: int, V: int, device: torch.device, rounds: int, model: Device | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the measurements, one row per kernel and setting."""
    copy_gb_per_s = 0.0
    for name, moved, settings, run in cases(N, V, device):
        expected: list[Tensor] = []
        for setting in tqdm(settings, desc=name, disable=None, leave=False):
            row: dict[str, Any] = {"kernel": name, "setting": _describe(setting), "bytes": moved}
            try:
                result = run(**setting)
                expected = expected or [x.clone() for x in tensors(result)]
                row["status"] = "ok" if same(result, expected) else "wrong"
                del result
                if row["status"] == "ok":
                    row["seconds"] = measure(partial(run, **setting), device, rounds)
            except Exception as error:  # too many registers, or too little memory
                row["status"] = reason(name, error)
            if "seconds" in row:
                row["gb_per_s"] = moved / statistics.median(row["seconds"]) / 1e9
                copy_gb_per_s = copy_gb_per_s or row["gb_per_s"]  # the first row is the copy
                row["of_copy"] = row["gb_per_s"] / copy_gb_per_s
                ms = predicted_ms(model, name, N, V, moved) if model else None
                if ms is not None:
                    row["predicted_seconds"] = ms / 1e3
            yield row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune", description=(__doc__ or "").split("\n")[0]
    )
    add_device_option(parser)
    parser.add_argument(
        "--tokens", type=int, help="rows of logits (default: 512 on cuda, 144 on cpu)"
    )
    parser.add_argument(
        "--vocabulary", type=int, help="columns (default: 151936 on cuda, 49152 on cpu)"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="measured rounds, on a CPU only (default: 7)"
    )
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    N, V = (512, 151_936) if device.type == "cuda" else (144, 49_152)
    N, V = args.tokens or N, args.vocabulary or V
    result = {**header(args.device), "shape": [N, V], "rows": []}
    print_header(result)
    print(f"logits [{N:,}, {V:,}], float32")
    model = device_of(result["device"])
    if model:
        print(f"x model: the time over the predicted one. {error_of_the_model()}")
    print(f"{'':34}{'setting':>12} {'ms':>9} {'GB/s':>8} {'of a copy':>10} {'x model':>8}")
    for row in rows(N, V, device, args.rounds, model):
        result["rows"].append(row)
        line = f"{row['kernel']:34}{row['setting']:>12}"
        if row["status"] == "ok":
            line += f" {1e3 * statistics.median(row['seconds']):9.4g} {row['gb_per_s']:8.4g}"
            line += f" {row['of_copy']:10.0%}"
            if "predicted_seconds" in row:
                line += f" {statistics.median(row['seconds']) / row['predicted_seconds']:8.2f}"
        else:
            line += f" {row['status']}"
        print(line, flush=True)
        write_json(args.json, result)  # after each row: an interrupted run keeps its results


if __name__ == "__main__":
    main()

"""Times the loss over the ids that a sampler kept, its kernels, and the exact loss beside it.

    python -m benchmarks.support_replay [--device cpu|cuda] [--shape N,V,H] [--entries 8 64]

Sets are long-tailed, a median of 3 entries where the mean is 8, and their ids follow Zipf's law.
First the gradients of a few tokens are compared with those of masked rows of logits in float32;
what differs is not timed. Bytes are those that have to be moved if no row is met in a cache.

On a GPU that the cost model knows, "x model" is the time over the predicted one.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cost_model import ENTRIES, REPLAY, error_of_the_model, shape
from benchmarks.gpu_costs import Device, Step, device_of, exact, replay
from benchmarks.measure import (
    add_device_option,
    default_dtype,
    header,
    print_header,
    reason,
    write_json,
)
from benchmarks.tune import INTERPRETED, measure
from grpo_kernels import Execution, Support, fused_grpo_loss
from grpo_kernels.kernels import Entries, select_backend

CHECKED_TOKENS = 32
# Of the logarithm of a set's size.
_SPREAD = 1.4
BACKEND = "triton" if INTERPRETED else "auto"


def sets(N: int, V: int, mean: float, device: torch.device) -> tuple[Support, Tensor]:
    """Returns a support of about `mean` entries per token, and a target among each."""
    g = torch.Generator(device).manual_seed(0)
    median = mean / math.exp(_SPREAD**2 / 2)
    sizes = median * (_SPREAD * torch.randn(N, generator=g, device=device)).exp()
    counts = sizes.clamp(1, max(1, V // 8)).round().long()
    tokens = torch.arange(N, device=device).repeat_interleave(counts)
    uniform = torch.rand(len(tokens), generator=g, device=device)
    ids = (uniform * math.log(V)).exp().long().clamp(max=V - 1)
    targets = ids[counts.cumsum(0) - counts]
    entries = (tokens * V + ids).unique()
    begins = torch.bincount(entries // V, minlength=N).cumsum(0)
    return Support(entries % V, torch.nn.functional.pad(begins, (1, 0))), targets


def step(hidden: Tensor, weight: Tensor, *rest: Any, support: Support | None) -> list[Tensor]:
    """Returns the gradients of the loss."""
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    out = fused_grpo_loss(
        hidden, weight, *rest, support=support, execution=Execution(backend=BACKEND)
    )
    return list(torch.autograd.grad(out.loss, (hidden, weight)))


def masked(
    hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, support: Support
) -> list[Tensor]:
    """The same from rows of float32 logits, in which the ids left out are -inf."""
    ids, offsets = support
    hidden, weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    out = torch.ones(len(targets), len(weight), dtype=torch.bool, device=hidden.device)
    out[torch.arange(len(targets), device=hidden.device).repeat_interleave(offsets.diff()), ids] = 0
    logits = (hidden @ weight.t()).masked_fill(out, float("-inf"))
    logps = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
    return list(torch.autograd.grad(-(advantages * logps).mean(), (hidden, weight)))


def error(
    hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, support: Support
) -> float:
    """The largest relative error of the gradients of a few tokens."""
    ids, offsets = support
    few = CHECKED_TOKENS
    of_few = Support(ids[: offsets[few]], offsets[: few + 1])
    given = hidden[:few], weight, targets[:few], advantages[:few]
    pairs = zip(step(*given, support=of_few), masked(*given, of_few), strict=True)
    return max(float((x.float() - y).norm() / y.norm()) for x, y in pairs)


def kernels(hidden: Tensor, weight: Tensor, support: Support) -> Iterator[tuple[str, Any, int]]:
    """Yields the kernels over entries: name, call, bytes."""
    ids, offsets = support
    N, V, row = len(hidden), len(weight), hidden.shape[1] * hidden.element_size()
    tokens = torch.arange(N, device=ids.device).repeat_interleave(offsets.diff())
    order = ids.argsort(stable=True)
    entries = Entries(ids, tokens, offsets, torch.zeros_like(offsets[1:]), order)
    begins = entries.begins_of(torch.arange(V + 1, device=ids.device))
    backend = select_backend(BACKEND, hidden.device)
    factors, dtype, sums = torch.rand(ids.shape, device=ids.device), weight.dtype, ids.numel() * row
    z, by_id = torch.zeros_like(factors), entries.tokens_by_id
    yield "forward", lambda: backend.entry_dots(hidden, weight, entries, z), sums + N * row
    dh = partial(backend.segment_sums, factors, ids, offsets, weight, dtype)
    yield "dh", dh, sums + N * row
    dW = partial(backend.segment_sums, factors[order], by_id, begins, hidden, dtype)
    yield "dW", dW, sums + V * row


def rows(
    N: int, V: int, H: int, means: list[int], device: torch.device, model: Device | None
) -> Iterator[dict[str, Any]]:
    """Yields the measurements, of the exact loss last."""
    g = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, default_dtype(device.type))
    hidden = torch.randn(N, H, generator=g, device=device).to(dtype)
    weight = (3 * H**-0.5 * torch.randn(V, H, generator=g, device=device)).to(dtype)
    advantages = torch.randn(N, generator=g, device=device)
    allowed = 1e-4 if dtype == torch.float32 else 6e-3
    for mean in means:
        support, targets = sets(N, V, mean, device)
        about = {"entries": len(support[0]) / N, "asked": mean}
        try:
            off = error(hidden, weight, targets, advantages, support)
        except Exception as failure:
            yield about | {"what": "all", "status": reason("replay", failure)}
            continue
        if not off <= allowed:
            yield about | {"what": "all", "status": f"wrong: gradients off by {off:.1e}"}
            continue
        given = (hidden, weight, targets, advantages)
        calls = [*kernels(hidden, weight, support), ("all", partial(step, *given), 0)]
        predicted = replay(Step(model, N, V, H), about["entries"]) if model else {}
        for what, call, moved in calls:
            run = partial(call, support=support) if what == "all" else call
            row = about | {"what": what, "status": "ok", "bytes": moved, "error": off}
            row["seconds"] = measure(run, device, rounds=3)
            if predicted:
                ms = sum(predicted.values()) if what == "all" else predicted[what]
                writing = predicted["writing dW"] if what == "dW" else 0.0
                row["predicted_seconds"] = (ms + writing) / 1e3
            yield row
    targets = torch.randint(V, (N,), generator=g, device=device)
    run = partial(step, hidden, weight, targets, advantages, support=None)
    row = {"entries": V, "what": "exact", "status": "ok", "bytes": 0}
    row["seconds"] = measure(run, device, rounds=3)
    if model:
        row["predicted_seconds"] = sum(exact(Step(model, N, V, H)).values()) / 1e3
    yield row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.support_replay", description=(__doc__ or "").split("\n")[0]
    )
    add_device_option(parser)
    parser.add_argument("--shape", type=shape, metavar="N,V,H",
                        help=f"tokens, vocabulary, hidden size (on cuda {REPLAY})")  # fmt: skip
    parser.add_argument("--entries", nargs="+", type=int, default=list(ENTRIES),
                        help="mean sizes of sets (default: 8 64)")  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    N, V, H = args.shape or (REPLAY if device.type == "cuda" else (256, 2000, 64))
    result: dict[str, Any] = {**header(args.device), "shape": [N, V, H], "rows": []}
    print_header(result)
    model = device_of(result["device"])
    print(f"{N:,} tokens, {V:,} rows of {H:,}, {default_dtype(device.type)}")
    if model:
        print(f"x model: the time over the predicted one. {error_of_the_model()}")
    print(f"{'entries per token':>17} {'':8}{'ms':>9} {'GB/s':>8} {'x model':>8}")
    for row in rows(N, V, H, args.entries, device, model):
        result["rows"].append(row)
        line = f"{row['entries']:17,.1f} {row['what']:8}"
        if row["status"] == "ok":
            seconds = statistics.median(row["seconds"])
            line += f"{1e3 * seconds:9.4g}"
            line += f" {row['bytes'] / seconds / 1e9:8.4g}" if row["bytes"] else " " * 9
            line += f" {seconds / row['predicted_seconds']:8.2f}" if model else ""
        else:
            line += f" {row['status']}"
        print(line, flush=True)
        write_json(args.json, result)  # after each row: an interrupted run keeps its results


if __name__ == "__main__":
    main()

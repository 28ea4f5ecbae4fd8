"""Measures the ways to have an LM head on several ranks that have tokens of their own.

    python -m benchmarks.scaling --axes ranks

Each way makes the loss, and the gradients of the states and of this rank's rows of the head:

- "whole on every rank" adds up dW over the ranks, as DDP does;
- "gathered, dW reduced" gathers the head and scatters the sum of dW, as FSDP2 and ZeRO-3 do;
- "sharded, states gathered" leaves the head where it is: `VocabRanks(hidden="partial")`.

Two processes on a CPU, by gloo, with half of its cores each; all GPUs of a machine, by NCCL.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from benchmarks.measure import PeakMemory, time_once
from grpo_kernels import LMHead, VocabRanks, fused_grpo_loss

Shape = tuple[int, int, int]


class Inputs(NamedTuple):
    """What one rank has: tokens of its own, and its rows of the head, or all of them."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V / R, H], or [V, H]
    targets: Tensor  # [N]
    advantages: Tensor  # [N]


def _of_whole(x: Inputs, weight: Tensor) -> None:
    fused_grpo_loss(x.hidden, weight, x.targets, x.advantages).loss.backward()


def whole(x: Inputs) -> None:
    """A whole head, whose gradient is averaged."""
    _of_whole(x, x.weight)
    assert x.weight.grad is not None
    dist.all_reduce(x.weight.grad)
    x.weight.grad /= dist.get_world_size()


def gathered(x: Inputs) -> None:
    """A whole head for as long as the call lasts."""
    full = x.weight.new_empty((dist.get_world_size() * len(x.weight), x.weight.shape[1]))
    dist.all_gather_into_tensor(full, x.weight.detach())
    _of_whole(x, full.requires_grad_())
    assert full.grad is not None
    x.weight.grad = torch.empty_like(x.weight)
    dist.reduce_scatter_tensor(x.weight.grad, full.grad)
    x.weight.grad /= dist.get_world_size()


def sharded(x: Inputs) -> None:
    """This rank's rows of the head, for the tokens of all ranks."""
    hidden, targets, advantages = (
        torch.cat(all_gather(y, dist.group.WORLD)) for y in (x.hidden, x.targets, x.advantages)
    )
    head = LMHead(x.weight, ranks=VocabRanks(dist.group.WORLD, hidden="partial"))
    fused_grpo_loss(hidden, head, targets, advantages).loss.backward()


WAYS: dict[str, Callable[[Inputs], None]] = {
    "whole on every rank": whole,
    "gathered, dW reduced": gathered,
    "sharded, states gathered": sharded,
}


def inputs(way: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Returns random inputs: the same head on all ranks, other tokens on each."""
    (N, V, H), rank, ranks = shape, dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(V // ranks * ranks, H, generator=g).mul_(H**-0.5)
    if way != "whole on every rank":
        weight = weight.chunk(ranks)[rank].clone()
    g.manual_seed(1 + rank)
    hidden = torch.randn(N, H, generator=g)
    weight, hidden = (x.to(device, dtype).requires_grad_() for x in (weight, hidden))
    targets = torch.randint(V // ranks * ranks, (N,), generator=g).to(device)
    return Inputs(hidden, weight, targets, torch.randn(N, generator=g).to(device))


def measured(
    ways: list[str], shape: Shape, device: str, dtype: str, rounds: int
) -> dict[str, list[float]]:
    """Returns the seconds of each way's rounds, taken in turns; or, without rounds, its memory."""
    at = torch.device(f"{device}:{dist.get_rank()}" if device == "cuda" else device)
    found: dict[str, list[float]] = {way: [] for way in ways}
    given = {way: inputs(way, shape, at, getattr(torch, dtype)) for way in ways}
    small = (16, *shape[1:])
    for way in ways:  # connections are made and libraries loaded by a first call
        WAYS[way](inputs(way, small, at, getattr(torch, dtype)))
        if not rounds:
            with PeakMemory(at) as memory:
                WAYS[way](given[way])
            found[way].append(float(memory.extra_bytes or 0))
    for _ in range(rounds):
        for way, x in given.items():
            x.hidden.grad = x.weight.grad = None
            dist.barrier()

            def run(way: str = way, x: Inputs = x) -> None:
                WAYS[way](x)
                dist.barrier()

            found[way].append(time_once(run, at))
    return found


def on_ranks(ranks: int, *given: Any) -> dict[str, list[float]]:
    """Returns the largest of what `measured` finds on fresh ranks."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool,
    ):
        running = [pool.submit(_rank, folder, rank, ranks, *given) for rank in range(ranks)]
        found = [job.result() for job in running]
    return {way: [max(x) for x in zip(*(f[way] for f in found), strict=True)] for way in found[0]}


def _rank(folder: str, rank: int, ranks: int, *given: Any) -> dict[str, list[float]]:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    warnings.simplefilter("ignore")  # newer versions of torch rename collectives
    kind = "gloo"
    if given[2] == "cuda":
        torch.cuda.set_device(rank)
        kind = "nccl"
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group(kind, store=store, rank=rank, world_size=ranks)
    try:
        return measured(*given)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def run_ranks(
    tokens: list[int], V: int, H: int, device: str, dtype: str, rounds: int
) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of each point, as an axis of `benchmarks.scaling` has them."""
    ranks = torch.cuda.device_count() if device == "cuda" else 2
    if ranks < 2:
        print("ranks: nothing measured: one GPU")
        return
    for N in tokens:
        seconds = on_ranks(ranks, list(WAYS), (N, V, H), device, dtype, rounds)
        rows = []
        for way in WAYS:
            memory = on_ranks(ranks, [way], (N, V, H), device, dtype, 0)[way]
            rows.append({
                "axis": "ranks", "value": N, "shape": (N, V, H), "name": way, "status": "ok",
                "ranks": ranks, "seconds": seconds[way], "extra_bytes": int(memory[0]),
            })  # fmt: skip
        yield rows

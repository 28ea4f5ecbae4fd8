"""A LoRA on the LM head: its product added to the logits, or a weight made of it in each step.

    python -m benchmarks.lora_head [--shapes 2048,49152,576] [--rounds 5]

Forward and backward of the loss with a frozen head, in turns, on a CPU each in its own process;
memory as in `benchmarks.head`. Gradients of the adapter agree, or there are no times.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from torch import Tensor

from benchmarks import contenders
from benchmarks.head import shape
from benchmarks.measure import extra_memory, header, print_header, spread, stored, times
from benchmarks.workloads import Workload, make
from grpo_kernels import fused_grpo_loss

_RANK = 16


def adapter(w: Workload) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    V, H = w.weight.shape
    made = torch.randn(_RANK, H, generator=g) / H**0.5, 0.01 * torch.randn(V, _RANK, generator=g)
    down, up = (x.to(w.weight.device, w.weight.dtype).requires_grad_() for x in made)
    return down, up


def loss(w: Workload, how: str, pair: tuple[Tensor, Tensor] | None = None) -> Tensor:
    down, up = adapter(w) if pair is None else pair
    weight, low_rank = w.weight.detach(), None
    if how == "added":
        low_rank = (w.hidden @ down.T, up)
    elif how == "made":
        weight = weight + up @ down
    return fused_grpo_loss(
        w.hidden, weight, w.targets, w.advantages, w.mask, old_logps=w.old_logps,
        low_rank=low_rank,
    ).loss  # fmt: skip


HOW = {"no adapter": "none", "product added": "added", "weight made": "made"}
contenders.CONTENDERS |= {k: contenders.Contender(partial(loss, how=v)) for k, v in HOW.items()}


def gradients(w: Workload, how: str) -> list[Tensor]:
    pair = adapter(w)
    return list(torch.autograd.grad(loss(w, how, pair), pair))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", type=shape, default=(2048, 49_152, 576))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    print_header(header(args.device))
    w = make("dense", args.shapes, args.device)
    few = w.sequences(slice(2))
    for mine, other in zip(gradients(few, "added"), gradients(few, "made"), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))
    device = w.hidden.device
    print(f"{w.describe()}, head frozen, rank {_RANK}, {args.rounds} rounds")
    with stored(w) as path:
        del w
        taken = times(list(HOW), path, device, args.rounds, forward=False)
        for name in HOW:
            median, low, most = spread(taken[name]["seconds"])
            base = statistics.median(taken["no adapter"]["seconds"])
            extra = extra_memory(name, path, device) / 2**20
            figures = f"{median:6.2f} s [{low:.2f}, {most:.2f}] {median / base:5.2f} x"
            print(f"{name:14} {figures} {extra:7,.0f} MiB", flush=True)


if __name__ == "__main__":
    main()

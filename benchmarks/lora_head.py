"""Compares two ways to train a LoRA on the LM head: added to the logits, merged into the weight.

    python -m benchmarks.lora_head [--shapes 2048,49152,576] [--rounds 5]

Times forward and backward of the loss with a frozen head; time and memory are taken as in
`benchmarks.head`. The adapter's gradients are compared first, and a difference is an error.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from torch import Tensor

from benchmarks import contenders
from benchmarks.measure import (
    add_dense_options,
    extra_memory,
    header,
    print_header,
    spread,
    stored,
    times,
)
from benchmarks.workloads import Workload, make
from grpo_kernels import LMHead, fused_grpo_loss

_RANK = 16


def adapter(w: Workload) -> tuple[Tensor, Tensor]:
    """Returns LoRA's matrices A `[r, H]` and B `[V, r]`."""
    g = torch.Generator().manual_seed(0)
    V, H = w.weight.shape
    matrices = (
        torch.randn(_RANK, H, generator=g) / H**0.5,
        0.01 * torch.randn(V, _RANK, generator=g),
    )
    lora_a, lora_b = (x.to(w.weight.device, w.weight.dtype).requires_grad_() for x in matrices)
    return lora_a, lora_b


def loss(w: Workload, how: str, pair: tuple[Tensor, Tensor] | None = None) -> Tensor:
    lora_a, lora_b = adapter(w) if pair is None else pair
    weight, low_rank = w.weight.detach(), None
    if how == "added":
        low_rank = (w.hidden @ lora_a.T, lora_b)
    elif how == "merged":
        weight = weight + lora_b @ lora_a
    head = LMHead(weight, low_rank=low_rank)
    return fused_grpo_loss(
        w.hidden, head, w.targets, w.advantages, w.mask, old_logps=w.old_logps
    ).loss


HOW = {"no adapter": "none", "added to the logits": "added", "merged into W": "merged"}
contenders.CONTENDERS |= {k: contenders.Contender(partial(loss, how=v)) for k, v in HOW.items()}


def gradients(w: Workload, how: str) -> list[Tensor]:
    """Returns the gradients of A and B."""
    pair = adapter(w)
    return list(torch.autograd.grad(loss(w, how, pair), pair))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lora_head", description=(__doc__ or "").split("\n")[0]
    )
    add_dense_options(parser)
    args = parser.parse_args(argv)
    print_header(header(args.device))
    w = make("dense", args.shapes, args.device)
    few = w.sequences(slice(2))
    for x, y in zip(gradients(few, "added"), gradients(few, "merged"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4 * float(y.abs().max()))
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
            print(f"{name:20} {figures} {extra:7,.0f} MiB", flush=True)


if __name__ == "__main__":
    main()

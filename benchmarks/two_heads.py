"""Compares ways to hold a model to another one over the whole vocabulary.

    python -m benchmarks.two_heads [--shapes 512,151936,896] [--rounds 5]

"eager" has the logits of both, TRL and Liger theirs of a chunk. A GRPO step with the exact KL is
beside one with `k3`, whose log-probs of the reference are computed, too. Gradients of a few
sequences are compared with float64 first, and a difference is an error. Time and memory, of a head
with a gradient, are taken as in `benchmarks.head`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import contenders
from benchmarks.head import TOLERANCE
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
from grpo_kernels import (
    GRPOLossConfig,
    Reference,
    fused_distillation_loss,
    fused_grpo_loss,
    linear_logprobs,
)
from grpo_kernels import reference as exact


def other(w: Workload) -> Reference:
    """A model whose states are near the policy's, and whose head is the same."""
    hidden = w.hidden.detach()
    return Reference(hidden + 0.1 * hidden.roll(1, 1), w.weight.detach())


def eager(w: Workload, kind: str) -> Tensor:
    return exact.divergence(w.hidden, w.weight, other(w), kind=kind).mean()


def ours(w: Workload, kind: str) -> Tensor:
    return fused_distillation_loss(w.hidden, w.weight, other(w), kind=kind).loss


def trl(w: Workload) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as function

    theirs = other(w)
    states = w.hidden.flatten(0, 1), w.weight, None, theirs.hidden.flatten(0, 1), theirs.head, None
    return function.apply(*states, 0.0)[0].mean()


def liger(w: Workload) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=False
    )
    theirs, targets = other(w), w.targets.flatten()
    states = w.hidden.flatten(0, 1), w.weight, theirs.hidden.flatten(0, 1), theirs.head
    return loss(*states, targets)


def grpo(w: Workload, estimator: str) -> Tensor:
    config, theirs = GRPOLossConfig(beta=0.04, kl_estimator=estimator), other(w)
    given: dict[str, Any] = {"reference": theirs}
    if estimator != "exact":
        with torch.no_grad():
            given = {"ref_logps": linear_logprobs(*theirs, w.targets).logps}
    out = fused_grpo_loss(
        w.hidden, w.weight, w.targets, w.advantages, old_logps=w.old_logps, config=config, **given
    )
    return out.loss


BASELINE = "eager, reverse"
LOSSES: dict[str, Callable[[Workload], Tensor]] = {
    **{f"eager, {kind}": partial(eager, kind=kind) for kind in ("reverse", "jsd")},
    **{f"ours, {kind}": partial(ours, kind=kind) for kind in ("reverse", "forward", "jsd")},
    "TRL chunked divergence": trl,
    "Liger JSD": liger,
    "GRPO, k3": partial(grpo, estimator="k3"),
    "GRPO, exact": partial(grpo, estimator="exact"),
}
contenders.CONTENDERS |= {name: contenders.Contender(loss) for name, loss in LOSSES.items()}


def error(w: Workload, kind: str) -> float:
    """The error of the gradient by the states, relative to float64's norm."""
    found = []
    for x, loss in ((w, ours), (w.each(_doubled), eager)):
        hidden = x.hidden.detach().clone().requires_grad_()
        value = loss(replace(x, hidden=hidden), kind)
        found.append(torch.autograd.grad(value, hidden)[0].double())
    return float((found[0] - found[1]).norm() / found[1].norm())


def _doubled(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_heads", description=(__doc__ or "").split("\n")[0]
    )
    add_dense_options(parser)
    args = parser.parse_args(argv)
    print_header(header(args.device))
    w = make("dense", args.shapes, args.device)
    few, device = w.sequences(slice(1)), w.hidden.device
    for kind in ("reverse", "forward", "jsd"):
        found = error(few, kind)
        print(f"{kind}: error {found:.0e} of the gradient")
        if not found <= TOLERANCE[torch.float32]:
            raise SystemExit(1)
    print(f"{w.describe()}, {args.rounds} rounds")
    with stored(w) as path:
        del w
        taken = times(list(LOSSES), path, device, args.rounds, forward=False)
        base = statistics.median(taken[BASELINE]["seconds"])
        for name in LOSSES:
            if "status" in taken[name]:
                print(f"{name:24} {taken[name]['status'][0]}", flush=True)
                continue
            median, low, most = spread(taken[name]["seconds"])
            extra = extra_memory(name, path, device) / 2**20
            figures = f"{median:6.2f} s [{low:.2f}, {most:.2f}] {median / base:6.3f} x"
            print(f"{name:24} {figures} {extra:7,.0f} MiB", flush=True)


if __name__ == "__main__":
    main()

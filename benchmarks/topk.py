"""Compares ways to score K ids per token, with the forward KL to a teacher over them.

    python -m benchmarks.topk [--shapes 2048,49152,576] [--rounds 5]

"dense" is plain PyTorch: all logits, their log-softmax, K of them. "targets" are K log-probs under
the whole softmax, "entries" K under the softmax over these ids. TRL's chunked divergence is over
the whole vocabulary, so that it has the teacher's product with its head, too. The ids are the
largest logits of states near the student's; their teacher's probabilities fall as 1 / rank.

Gradients by the states of a few sequences are compared with float64 first, and a difference is an
error. Time and memory, of a head with a gradient, are taken as in `benchmarks.head`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

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
from grpo_kernels import Support, linear_logprobs, topk_kl

MOST = 128


def of_teacher(w: Workload, K: int) -> tuple[Tensor, Tensor]:
    """The teacher's top K ids and their log-probs among themselves, `[N, K]` each."""
    assert w.support is not None
    ids = w.support.token_ids.view(w.targets.numel(), -1)[:, :K].long()
    ranks = torch.arange(1, ids.shape[1] + 1, device=ids.device).float()
    return ids, (-ranks.log()).log_softmax(0).expand(ids.shape)


def dense(w: Workload, K: int) -> Tensor:
    ids, teacher = of_teacher(w, K)
    logits = w.hidden.flatten(0, 1) @ w.weight.T
    exact = torch.promote_types(logits.dtype, torch.float32)
    logps = logits.to(exact).log_softmax(-1).gather(1, ids).log_softmax(-1)
    return (teacher.exp() * (teacher - logps)).sum(-1).mean()


def targets(w: Workload, K: int) -> Tensor:
    """Log-probs of the whole softmax, renormalised: the same divergence as that of entries.

    Of one id, whose divergence is 0, the cross-entropy.
    """
    ids, teacher = of_teacher(w, K)
    logps = linear_logprobs(w.hidden.flatten(0, 1), w.weight, ids).logps
    if K == 1:
        return -logps.mean()
    return topk_kl(logps.flatten(), teacher.flatten(), offsets(ids)).mean()


def entries(w: Workload, K: int) -> Tensor:
    ids, teacher = of_teacher(w, K)
    kept = Support(ids.flatten(), offsets(ids))
    hidden = w.hidden.flatten(0, 1)
    logps = linear_logprobs(hidden, w.weight, None, support=kept, entries=True).logps
    return topk_kl(logps, teacher.flatten(), kept.offsets).mean()


def offsets(ids: Tensor) -> Tensor:
    return torch.arange(len(ids) + 1, device=ids.device) * ids.shape[1]


def trl(w: Workload) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as function

    hidden, weight = w.hidden.flatten(0, 1), w.weight
    of_each = function.apply(
        hidden, weight, None, _near(hidden.detach()), weight.detach(), None, 0.0
    )
    return of_each[0].mean()


def _near(hidden: Tensor) -> Tensor:
    """A teacher's states."""
    return hidden + 0.1 * hidden.roll(1, 0)


BASELINE = "dense, K = 16"
SCORES: dict[str, Callable[..., Tensor]] = {
    **{f"dense, K = {K}": partial(dense, K=K) for K in (16, MOST)},
    **{f"targets, K = {K}": partial(targets, K=K) for K in (1, 16, 64, MOST)},
    **{f"entries, K = {K}": partial(entries, K=K) for K in (16, 64, MOST)},
    "TRL chunked divergence": trl,
}
contenders.CONTENDERS |= {name: contenders.Contender(loss) for name, loss in SCORES.items()}


def with_teacher(w: Workload) -> Workload:
    """The workload with the teacher's largest logits of each token as its sets."""
    states = _near(w.hidden.flatten(0, 1))
    ids = torch.cat([(x @ w.weight.T).topk(MOST, 1).indices for x in states.split(256)])
    return replace(w, support=Support(ids.flatten(), offsets(ids)))


def error(w: Workload, name: str) -> float:
    """The error of the gradient by the states, relative to float64's norm."""
    exact = partial(dense, K=int(name.rpartition("=")[2]))
    found = []
    for x, loss in ((w, SCORES[name]), (w.each(_doubled), exact)):
        hidden = x.hidden.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(replace(x, hidden=hidden)), hidden)
        found.append(gradient.double())
    return float((found[0] - found[1]).norm() / found[1].norm())


def _doubled(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.topk", description=(__doc__ or "").split("\n")[0]
    )
    add_dense_options(parser)
    args = parser.parse_args(argv)
    print_header(header(args.device))
    w = with_teacher(make("dense", args.shapes, args.device))
    few, device, errors = w.sequences(slice(1)), w.hidden.device, {}
    for name in SCORES:
        if name != "TRL chunked divergence" and not name.endswith("= 1"):
            errors[name] = error(few, name)
            if not errors[name] <= TOLERANCE[torch.float32]:
                raise SystemExit(f"{name}: error {errors[name]:.1e} of the gradient")
    print(f"{w.describe()}, {args.rounds} rounds")
    with stored(w) as path:
        del w
        taken = times(list(SCORES), path, device, args.rounds, forward=False)
        base = statistics.median(taken[BASELINE]["seconds"])
        for name in SCORES:
            if "status" in taken[name]:
                print(f"{name:24} {taken[name]['status'][0]}", flush=True)
                continue
            median, low, most = spread(taken[name]["seconds"])
            extra = extra_memory(name, path, device) / 2**20
            told = f"{errors[name]:.0e}" if name in errors else "-"
            figures = f"{median:6.2f} s [{low:.2f}, {most:.2f}] {median / base:6.3f} x"
            print(f"{name:24} {figures} {extra:7,.0f} MiB  error {told}", flush=True)


if __name__ == "__main__":
    main()

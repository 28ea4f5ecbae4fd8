"""Measures sampled gradients on the demo model's own samples: noise, control variates, Adam.

    python -m benchmarks.sampled_gradients [--workload smollm] [--steps 20]

Prints three tables:

- noise and kept columns by tolerance;
- the same without one or both control variates;
- Adam's updates from sampled gradients of the head against those from exact ones, for rows of the
  head by how often their token is expected in a batch. The weights stay as they are, so that the
  gradients are compared, not the training runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import one_pass, two_passes
from benchmarks.measure import with_grad
from benchmarks.workloads import SYNTHETIC, Workload, make
from grpo_kernels import Execution, fused_grpo_loss, grpo_loss, linear_logprobs
from grpo_kernels.arguments import head_call
from grpo_kernels.dense import Gradients
from grpo_kernels.experimental import Sampled
from grpo_kernels.experimental.column_draw import TYPICAL_VARIANCE_GROWTH
from grpo_kernels.experimental.sampled import SampledDense
from grpo_kernels.routes import routes_of

TOLERANCES = (2e-3, 5e-3, 1e-2, 2e-2, 5e-2)
SEEDS = range(5)
BETAS, EPS = (0.9, 0.999), 1e-8
# Lower limits of groups of vocabulary entries, by the sum of their probabilities over a batch.
EXPECTED = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 0.0)
Pair = tuple[Tensor, Tensor]  # gradients of hidden states and head
Drawn = tuple[Pair, dict[str, Tensor]]  # and metrics


def gradients(loss: Callable[..., Tensor], w: Workload, **execution: Any) -> Pair:
    """Returns the gradients of hidden states and head."""
    given = with_grad(w.each(Tensor.detach))
    loss(given, **execution).backward()
    assert given.hidden.grad is not None and given.weight.grad is not None
    return given.hidden.grad, given.weight.grad


def relative_error(sampled: Tensor, exact: Tensor) -> float:
    return float((sampled - exact).norm() / exact.norm())


def drawn(w: Workload, seed: int, tolerance: float) -> Drawn:
    """Draws columns in a call."""
    given = with_grad(w.each(Tensor.detach))
    out = fused_grpo_loss(
        given.hidden, given.weight, w.targets, w.advantages, w.mask, old_logps=w.old_logps,
        execution=Execution(backward=Sampled(tolerance, seed)),
    )  # fmt: skip
    out.loss.backward()
    assert given.hidden.grad is not None and given.weight.grad is not None
    return (given.hidden.grad, given.weight.grad), out.metrics


class Without(SampledDense):
    """Leaves control variates out, and keeps as many columns as with them."""

    def __init__(self, *args: Any, row_sums: bool, column_sums: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        if row_sums:
            self.mean_row = None
        if column_sums:
            for centre in self.centres:
                centre.zero_()

    def shrinkage(self) -> Tensor:
        return torch.tensor(1 / TYPICAL_VARIANCE_GROWTH)


def drawn_without(w: Workload, seed: int, d_logps: Tensor, **left_out: bool) -> Drawn:
    """Draws columns for these gradients of the log-probs, without some control variates."""
    execution = Execution(backward=Sampled(seed=seed))
    call = head_call(w.hidden, w.weight, w.targets, w.mask, None, execution)
    routes = routes_of(call, None, None, gradients=True, keeps=True, agreed={})
    dense = Without(call, routes.plan, entropy=True, keeps=True, **left_out)
    grads = Gradients(call.tensors, [True, True], every_row=False)
    for rows in dense.chunks():
        dense.sweep(rows)
        dense.add(rows, grads, d_logps[rows.index])
    dense.finish(grads)
    d_hidden, d_weight = grads.all()
    assert d_hidden is not None and d_weight is not None
    return (d_hidden.view_as(w.hidden), d_weight), dense.metrics()


def of_logps(w: Workload) -> Tensor:
    """Returns the loss's gradient by the log-prob of each token, `[N]`."""
    logps = linear_logprobs(w.hidden, w.weight, w.targets, w.mask).logps.detach()
    loss = grpo_loss(logps.requires_grad_(), w.advantages, w.mask, old_logps=w.old_logps).loss
    return torch.autograd.grad(loss, logps)[0].flatten()


def noise(draw: Callable[[int], Drawn], exact: Pair) -> list[float]:
    """Returns the share of columns kept, noise of dH and dW, predicted noise; means over seeds."""
    rows = []
    for seed in SEEDS:
        found, metrics = draw(seed)
        d_hidden, d_weight = map(relative_error, found, exact)
        kept, predicted = (float(metrics[x]) for x in ("columns_kept", "gradient_noise"))
        rows.append([kept, d_hidden, d_weight, predicted])
    return [statistics.mean(column) for column in zip(*rows, strict=True)]


def print_noise(label: str, row: list[float]) -> None:
    kept, *errors = row
    print(f"| {label} | {kept:.1%} | {' | '.join(f'{x:.1e}' for x in errors)} |", flush=True)


class Adam:
    """Computes Adam's updates without applying them."""

    def __init__(self) -> None:
        self.first: Any = 0.0
        self.second: Any = 0.0
        self.count = 0

    def update(self, gradient: Tensor) -> Tensor:
        self.count += 1
        b1, b2 = BETAS
        self.first = b1 * self.first + (1 - b1) * gradient
        self.second = b2 * self.second + (1 - b2) * gradient.square()
        step: Tensor = self.first / (1 - b1**self.count)
        return step / ((self.second / (1 - b2**self.count)).sqrt() + EPS)


def adam(w: Workload, steps: int, per_step: int) -> str:
    """Returns the table of updates after `steps` batches of `per_step` drawn sequences."""
    contenders: dict[str, Callable[[Workload, int], Tensor]] = {
        "exact": lambda w, _: gradients(one_pass, w)[1]
    }
    for tolerance in (5e-3, 2e-2):
        for name, loss in (("one pass", one_pass), ("two passes", two_passes)):
            contenders[f"{name}, {tolerance:g}"] = lambda w, seed, loss=loss, t=tolerance: (
                gradients(loss, w, backward=Sampled(t, seed))[1]  # type: ignore[misc]
            )
    optimizers = {name: Adam() for name in contenders}
    draw = torch.Generator().manual_seed(0)
    occurs = torch.zeros(len(w.weight), dtype=torch.bool)
    expected = torch.zeros(len(w.weight))
    updates = {}
    for step in range(steps):
        part = w.sequences(torch.randperm(len(w.targets), generator=draw)[:per_step])
        occurs[part.targets.flatten()] = True
        for hidden in part.hidden.flatten(0, 1).split(256):
            expected += (hidden @ w.weight.T).softmax(-1).sum(0) / steps
        for name, gradient in contenders.items():
            updates[name] = optimizers[name].update(gradient(part, step))
    exact = updates.pop("exact")
    groups = {"tokens that occurred": occurs}
    above = torch.inf
    for least in EXPECTED:
        chosen = ~occurs & (expected >= least) & (expected < above)
        groups[f"others, expected {least:g} times or more" if least else "others, fewer"] = chosen
        above = least
    lines = [
        "| rows of the head | how many | " + " | ".join(updates) + " |",
        "|---|---|" + "---|" * len(updates),
    ]
    for name, chosen in groups.items():
        if not chosen.any():
            continue
        cells = []
        for update in updates.values():
            x, y = update[chosen], exact[chosen]
            length = x.norm(dim=1) / y.norm(dim=1)
            cosine = torch.cosine_similarity(x, y, dim=1)
            cells.append(f"{length.median():.2f}, {cosine.median():.2f}")
        lines.append(f"| {name} | {int(chosen.sum()):,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampled_gradients", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--workload",
        default="smollm",
        choices=("smollm", *SYNTHETIC),
        help="see benchmarks/workloads.py (default: smollm)",
    )
    parser.add_argument("--steps", type=int, default=20, help="of Adam (default: 20)")
    parser.add_argument(
        "--per-step", type=int, default=8, help="sequences per batch for Adam (default: 8)"
    )
    args = parser.parse_args()
    w = make(args.workload)
    print(w.describe())
    exact = gradients(one_pass, w)
    columns = "columns kept | error of dH | error of dW | predicted |\n|---|---|---|---|---|"
    print(f"\n| tolerance | {columns}")
    for tolerance in TOLERANCES:
        print_noise(f"{tolerance:g}", noise(partial(drawn, w, tolerance=tolerance), exact))
    print(f"\n| at {Sampled.tolerance:g}, without | {columns}")
    d_logps = of_logps(w)
    for name, *left_out in (
        ("nothing", False, False),
        ("W's mean row", True, False),
        ("the mean hidden state", False, True),
        ("both", True, True),
    ):
        options = dict(zip(("row_sums", "column_sums"), left_out, strict=True))
        print_noise(name, noise(partial(drawn_without, w, d_logps=d_logps, **options), exact))
    print(f"\nAdam's update after {args.steps} batches, sampled to exact: length ratio, cosine\n")
    print(adam(w, args.steps, args.per_step))


if __name__ == "__main__":
    main()

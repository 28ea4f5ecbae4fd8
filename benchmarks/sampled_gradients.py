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
import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.contenders import one_pass
from benchmarks.measure import with_grad
from benchmarks.workloads import SYNTHETIC, Workload, make
from grpo_kernels import fused_grpo_loss
from grpo_kernels.column_sampling import TYPICAL_VARIANCE_GROWTH
from grpo_kernels.sampled_gradients import SampledGradients, _row_squares

TOLERANCES = (2e-3, 5e-3, 1e-2, 2e-2, 5e-2)
SEEDS = range(5)
BETAS, EPS = (0.9, 0.999), 1e-8
# Lower limits of groups of vocabulary entries, by the sum of their probabilities over a batch.
EXPECTED = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 0.0)


def gradients(loss: Callable[..., Tensor], w: Workload, **options: Any) -> tuple[Tensor, Tensor]:
    """Returns the gradients of hidden states and head."""
    given = with_grad(w.each(Tensor.detach))
    loss(given, **options).backward()
    assert given.hidden.grad is not None and given.weight.grad is not None
    return given.hidden.grad, given.weight.grad


def relative_error(sampled: Tensor, exact: Tensor) -> float:
    return float((sampled - exact).norm() / exact.norm())


@contextlib.contextmanager
def without(row_sums: bool, column_sums: bool) -> Iterator[None]:
    """Takes control variates out of the estimator, which keeps as many columns as with them."""
    real = SampledGradients.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        if row_sums:
            self.mean_row, self.row_squares = None, _row_squares(self.head, None)
        if column_sums:
            self.mean_hidden.zero_()

    def shrinkage(self: Any) -> Tensor:
        return torch.tensor(1 / TYPICAL_VARIANCE_GROWTH)

    with mock.patch.multiple(SampledGradients, __init__=init, shrinkage=shrinkage):
        yield


def noise(w: Workload, exact: tuple[Tensor, Tensor], tolerance: float) -> list[float]:
    """Returns the share of columns kept, noise of dH and dW, predicted noise; means over seeds."""
    rows = []
    for seed in SEEDS:
        given = with_grad(w.each(Tensor.detach))
        out = fused_grpo_loss(
            given.hidden,
            given.weight,
            w.targets,
            w.advantages,
            w.mask,
            old_logps=w.old_logps,
            backward="sampled",
            tolerance=tolerance,
            seed=seed,
        )
        out.loss.backward()
        assert given.hidden.grad is not None and given.weight.grad is not None
        d_hidden, d_weight = map(relative_error, (given.hidden.grad, given.weight.grad), exact)
        kept, predicted = (float(out.metrics[x]) for x in ("columns_kept", "gradient_noise"))
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
        contenders[f"{tolerance:g}"] = lambda w, seed, t=tolerance: gradients(  # type: ignore[misc]
            one_pass, w, backward="sampled", tolerance=t, seed=seed
        )[1]
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
        print_noise(f"{tolerance:g}", noise(w, exact, tolerance))
    print(f"\n| at 5e-3, without | {columns}")
    for name, dropped in (
        ("nothing", (False, False)),
        ("W's mean row", (True, False)),
        ("the mean hidden state", (False, True)),
        ("both", (True, True)),
    ):
        with without(*dropped):
            print_noise(name, noise(w, exact, 5e-3))
    print(f"\nAdam's update after {args.steps} batches, sampled to exact: length ratio, cosine\n")
    print(adam(w, args.steps, args.per_step))


if __name__ == "__main__":
    main()

"""Checks contenders: against float64 on a few sequences, and at full size against each other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measure import ByContender, Loss, loss_of, reason, step, with_grad
from benchmarks.workloads import Workload
from grpo_kernels import Reference, reference

CHECKED_SEQUENCES, CHECKED_POSITIONS = 2, 64
# Allowed errors. Those of gradients are relative to the norm of the float64 gradient of the same
# inputs, that of the loss to the mean size of its terms, which is 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
ERRORS = ("loss", "d_hidden", "d_weight")


class Truth(NamedTuple):
    """A few sequences of a workload with their loss and gradients in float64."""

    w: Workload
    loss: float
    gradients: dict[str, Tensor]  # by the name of their error


def truth_of(w: Workload) -> Truth:
    """Picks a few sequences that have a gradient and computes their loss in float64."""
    trained = torch.arange(len(w.advantages), device=w.advantages.device)
    if w.mask is not None:
        trained = trained[(w.advantages != 0) & w.mask.any(1)]
    w = w.sequences(trained[:CHECKED_SEQUENCES]).first(CHECKED_POSITIONS).each(Tensor.detach)
    exact = with_grad(w.each(lambda x: x.double() if x.is_floating_point() else x))
    states, head = exact.hidden, exact.weight
    if exact.teacher is None:
        loss = reference.fused_grpo_loss(
            states, head, exact.targets, exact.advantages, exact.mask,
            old_logps=exact.old_logps, support=exact.support,
        ).loss  # fmt: skip
    else:
        teacher = Reference(*exact.teacher)
        loss = reference.divergence(states, head, teacher, exact.mask).sum() / exact.tokens
    loss.backward()
    return Truth(w, loss.item(), _gradients(exact))


def _gradients(w: Workload) -> dict[str, Tensor]:
    gradients = {"d_hidden": w.hidden.grad, "d_weight": w.weight.grad}
    return {name: x for name, x in gradients.items() if x is not None}


def errors(loss: Loss, truth: Truth) -> dict[str, float]:
    """Returns the absolute error of the loss and the relative errors of the gradients."""
    w = with_grad(truth.w.each(Tensor.detach))
    value, gradients = step(loss, w), _gradients(w)
    if gradients.keys() != truth.gradients.keys():
        raise ValueError(f"gradients: expected {[*truth.gradients]}; got {[*gradients]}")
    relative = {k: _relative_error(x, truth.gradients[k]) for k, x in gradients.items()}
    return {"loss": abs(value.item() - truth.loss), **relative}


def _relative_error(grad: Tensor, expected: Tensor) -> float:
    # In parts, so that a large head is in memory once in float64, not three times.
    parts = zip(grad.split(4096), expected.split(4096), strict=True)
    squares = sum(float((x - y).square().sum()) for x, y in parts)
    return squares**0.5 / float(expected.norm())


def check(name: str, truth: Truth, backend: str) -> dict[str, Any]:
    """Returns the errors of a contender and its status, also if it raises an exception."""
    try:
        row = errors(loss_of(name, backend), truth)
    except Exception as error:
        return {"status": reason(error)}
    # Written so that NaN is wrong.
    right = all(error <= TOLERANCE[truth.w.hidden.dtype] for error in row.values())
    return {**row, "status": "ok" if right else "wrong"}


def agree(result: Sequence[float], expected: Sequence[float], dtype: torch.dtype) -> bool:
    """Compares a step's loss and the norms of its gradients with those of another."""
    sizes = (1.0, *expected[1:])
    # Written so that NaN is wrong.
    return all(
        abs(x - y) <= TOLERANCE[dtype] * size
        for x, y, size in zip(result, expected, sizes, strict=True)
    )


def wrong_in_full(rows: ByContender, dtype: torch.dtype) -> set[str]:
    """Returns the contenders whose loss or gradient norms are not the median of all."""
    results = {k: x["results"] for k, x in rows.items() if x["status"] == "ok" and "results" in x}
    expected = [statistics.median(x) for x in zip(*chain(*results.values()), strict=True)]
    return {k for k, steps in results.items() if not all(agree(x, expected, dtype) for x in steps)}

"""Checks contenders: gradients on a few sequences, their norms over a whole step.

Ours have to be right. A peer's error is reported beside its time, as its own rounding may be above
the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.contenders import CONTENDERS, OURS
from benchmarks.measure import Loss, gradient_norms, reason, step, with_grad
from benchmarks.workloads import Workload
from grpo_kernels import Reference, reference

CHECKED_SEQUENCES, CHECKED_POSITIONS = 2, 64
# Allowed errors. Those of gradients are relative to the norm of the float64 gradient of the same
# inputs, that of the loss to the mean size of its terms, which is 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
WRONG = ("wrong", "wrong in full")  # statuses of a row that has errors above the limit


# Of results at a GPU's sizes: a wrong kernel is off by far more than its budget of 1e-4 and 3e-3;
# peers round logits to bf16.
LARGEST, ROUNDED = {"logps": 1e-3, "dh": 1e-2, "dw": 1e-2}, 0.1


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
    loss, _, exact = _exact(w, torch.float64)
    return Truth(w, loss, _gradients(exact))


def whole_step(w: Workload) -> list[float]:
    """Computes the loss and the norms of the gradients of all sequences by the reference.

    It computes in float64, for half-precision inputs in float32: most GPUs have little float64.
    """
    loss, _, exact = _exact(w, torch.float64 if w.hidden.dtype == torch.float32 else torch.float32)
    return [loss, *gradient_norms(exact)]


def truth_in_full(w: Workload, dtype: torch.dtype) -> list[Tensor]:
    """Returns log-probs and both gradients of all sequences, computed in `dtype`."""
    _, logps, exact = _exact(w, dtype)
    return [torch.cat(logps), *_gradients(exact).values()]


def _exact(w: Workload, dtype: torch.dtype) -> tuple[float, list[Tensor], Workload]:
    """Returns loss, log-probs by parts, and the workload in another dtype with its gradients."""
    exact = with_grad(w.each(lambda x: x.detach().to(dtype if x.is_floating_point() else x.dtype)))
    total, logps = 0.0, []
    # A few sequences at a time, so that their logits fit.
    for first in range(0, len(exact.advantages), CHECKED_SEQUENCES):
        part = exact.sequences(slice(first, first + CHECKED_SEQUENCES))
        if part.tokens:
            loss, each = _reference(part)
            loss = loss * (part.tokens / exact.tokens)
            loss.backward()
            total += loss.item()
            logps.append(each.flatten())
    return total, logps, exact


def _reference(w: Workload) -> tuple[Tensor, Tensor]:
    """Returns the loss, and log-probs or divergences."""
    if w.teacher is not None:
        each = reference.divergence(w.hidden, w.weight, Reference(*w.teacher), w.mask)
        return each.sum() / w.tokens, each.detach()
    out = reference.fused_grpo_loss(
        w.hidden, w.weight, w.targets, w.advantages, w.mask,
        old_logps=w.old_logps, support=w.support,
    )  # fmt: skip
    return out.loss, out.logps


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


def check(name: str, truth: Truth) -> dict[str, Any]:
    """Returns the errors of a contender and its status, also if it raises an exception."""
    try:
        row = errors(CONTENDERS[name], truth)
    except Exception as error:
        return {"status": reason(error)}
    status = "ok" if right(row.values(), truth.w.hidden.dtype) else "wrong"
    return {**row, "status": status}


def right(errors: Iterable[float], dtype: torch.dtype) -> bool:
    """Returns True if no error is above the limit."""
    # Written so that NaN is wrong.
    return all(error <= TOLERANCE[dtype] for error in errors)


def has_times(name: str, status: str) -> bool:
    """Returns True if a contender is right, or a peer, whose errors stand beside its times."""
    return status == "ok" or (status in WRONG and name not in OURS)


def step_error(result: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest error of a step's loss and of the norms of its gradients."""
    sizes = (1.0, *(size or 1.0 for size in expected[1:]))
    errors = [abs(x - y) / size for x, y, size in zip(result, expected, sizes, strict=True)]
    return float(torch.tensor(errors).max())  # NaN, if one is


def errors_of(
    got: Sequence[Tensor | None], true: Sequence[Tensor], *, rounded: bool = False
) -> dict[str, Any]:
    """Returns the errors of log-probs and gradients, and if they are small; a NaN is not."""
    off: dict[str, float] = {}
    for name, x, y in zip(LARGEST, got, true, strict=False):
        if x is not None:
            x = x.detach().view_as(y)
            off[name] = float((x - y).abs().max()) if name == "logps" else _relative_error(x, y)
    ok = all(x <= (ROUNDED if rounded else LARGEST[name]) for name, x in off.items())
    return {"errors": off, "status": "right" if ok else "wrong"}

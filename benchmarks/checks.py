"""Loss and gradients of a whole step in float64, which contenders are compared with.

Ours have to be right. A peer's error is reported beside its time, as its own rounding may be above
the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import OURS
from benchmarks.measure import Truth, gradients_of, relative_error, with_grad
from benchmarks.workloads import Workload
from grpo_kernels import Reference, reference

SEQUENCES = 2  # at a time, so that their logits fit
# Allowed errors. Those of gradients are relative to the norm of the float64 gradient of the same
# inputs, that of the loss to the mean size of its terms, which is 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
# Of results at a GPU's sizes: a wrong kernel is off by far more than its budget of 1e-4 and 3e-3;
# peers round logits to bf16.
LARGEST, ROUNDED = {"logps": 1e-3, "dh": 1e-2, "dw": 1e-2}, 0.1


def truth_of(w: Workload) -> Truth:
    """Computes the loss and the gradients of all sequences by the reference.

    It computes in float64, for half-precision inputs in float32: most GPUs have little float64.
    """
    loss, _, exact = _exact(w, torch.float64 if w.hidden.dtype == torch.float32 else torch.float32)
    return Truth(loss, {name: x.float() for name, x in gradients_of(exact).items()})


def truth_in_full(w: Workload, dtype: torch.dtype) -> list[Tensor]:
    """Returns log-probs and both gradients of all sequences, computed in `dtype`."""
    _, logps, exact = _exact(w, dtype)
    return [torch.cat(logps), *gradients_of(exact).values()]


def _exact(w: Workload, dtype: torch.dtype) -> tuple[float, list[Tensor], Workload]:
    """Returns loss, log-probs by parts, and the workload in another dtype with its gradients."""
    exact = with_grad(w.each(lambda x: x.detach().to(dtype if x.is_floating_point() else x.dtype)))
    total, logps = 0.0, []
    for first in range(0, len(exact.advantages), SEQUENCES):
        part = exact.sequences(slice(first, first + SEQUENCES))
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


def right(errors: Mapping[str, float], limit: float) -> bool:
    """Returns True if no error is above the limit."""
    # Written so that NaN is wrong.
    return all(error <= limit for error in errors.values())


def has_times(name: str, status: str) -> bool:
    """Returns True if a contender is right, or a peer, whose errors stand beside its times."""
    return status == "ok" or (status == "wrong" and name not in OURS)


def errors_of(
    got: Sequence[Tensor | None], true: Sequence[Tensor], *, rounded: bool = False
) -> dict[str, Any]:
    """Returns the errors of log-probs and gradients, and if they are small; a NaN is not."""
    off: dict[str, float] = {}
    for name, x, y in zip(LARGEST, got, true, strict=False):
        if x is not None:
            x = x.detach().view_as(y)
            off[name] = float((x - y).abs().max()) if name == "logps" else relative_error(x, y)
    ok = all(x <= (ROUNDED if rounded else LARGEST[name]) for name, x in off.items())
    return {"errors": off, "status": "right" if ok else "wrong"}

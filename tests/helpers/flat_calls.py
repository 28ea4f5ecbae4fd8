"""The library's calls with flat options, as tables of them and generated pairs want it.

`fused_grpo_loss(hidden, weight, targets, ..., bias=b, chunk_bytes=n)` makes an `LMHead` of the
options that are fields of one, an `Execution` likewise, and passes on the rest. Which are which is
read off the dataclasses.
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import grpo_kernels
import grpo_kernels.reference as _reference
from grpo_kernels import DistillationOutput, Execution, GRPOLossOutput, LMHead, LogprobOutput

HEAD_FIELDS = tuple(field.name for field in fields(LMHead) if field.name != "weight")
EXECUTION_FIELDS = tuple(field.name for field in fields(Execution))


def split(weight: Tensor, options: dict[str, Any]) -> tuple[LMHead | Tensor, dict, dict]:
    """The head, the fields of an Execution, and the other options."""
    head_options = {name: x for name, x in options.items() if name in HEAD_FIELDS}
    execution_options = {name: x for name, x in options.items() if name in EXECUTION_FIELDS}
    rest = {name: x for name, x in options.items() if name not in head_options | execution_options}
    # A plain weight where nothing else is asked for, as most callers have it.
    return LMHead(weight, **head_options) if head_options else weight, execution_options, rest


def fused_grpo_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, mask: Any = None,
    **options: Any,
) -> GRPOLossOutput:  # fmt: skip
    head, execution, rest = split(weight, options)
    if execution:
        rest["execution"] = Execution(**execution)
    return grpo_kernels.fused_grpo_loss(hidden, head, targets, advantages, mask, **rest)


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Any = None, **options: Any
) -> LogprobOutput:
    head, execution, rest = split(weight, options)
    if execution:
        rest["execution"] = Execution(**execution)
    return grpo_kernels.linear_logprobs(hidden, head, targets, mask, **rest)


def fused_distillation_loss(
    hidden: Tensor, weight: Tensor, reference: Any, mask: Any = None, **options: Any
) -> DistillationOutput:
    head, execution, rest = split(weight, options)
    if execution:
        rest["execution"] = Execution(**execution)
    return grpo_kernels.fused_distillation_loss(hidden, head, reference, mask, **rest)


def _exact(call: Any) -> Any:
    """A call of the reference; options of execution do not concern it."""

    def flat(hidden: Tensor, weight: Tensor, *args: Any, **options: Any) -> Any:
        rounded_to = options.pop("logits_dtype", None)
        if isinstance(rounded_to, torch.dtype):
            options["rounded_to"] = rounded_to
        head, _, rest = split(weight, options)
        return call(hidden, head, *args, **rest)

    return flat


reference = SimpleNamespace(
    fused_grpo_loss=_exact(_reference.fused_grpo_loss),
    linear_logprobs=_exact(_reference.linear_logprobs),
    linear_logits=_exact(_reference.linear_logits),
    grpo_loss=_reference.grpo_loss,
    selective_log_softmax=_reference.selective_log_softmax,
    kept_entries=_reference.kept_entries,
)

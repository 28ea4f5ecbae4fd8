"""The calls under `torch.compile`: operators, which leave no break in the graph.

A call over a head is a loop of kernels and GEMMs whose lengths follow from the data, which a
compiler has nothing to add to; the sizes of its results do not. So each call is one operator with a
fake kernel, and the gradient of log-probs another one:

    grpo_kernels::linear_logprobs             log-probs, logsumexp, entropy; gradients that are kept
    grpo_kernels::linear_logprobs_backward    the gradients of the head's tensors, by those
    grpo_kernels::fused_grpo_loss             loss and metrics, and the loss's gradients
    grpo_kernels::grpo_loss                   likewise, of log-probs
    grpo_kernels::selective_log_softmax       log-probs of logits, and ..._backward their gradient

The public calls come here where Dynamo traces them. What a schema cannot hold (a
process group, a function), and a support, whose sizes follow from the data, stay an eager call
between two graphs; `fullgraph=True` says which argument it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..base.autograd import refuse_double_backward
from ..base.outputs import GRPOLossOutput, LogprobOutput
from ..fused_grpo_loss import fused_grpo_loss as eager_loss
from ..head.execution import Execution
from ..head.linear_logprobs import check_options, first_pass, planned, second_pass
from ..head.linear_logprobs import linear_logprobs as eager_logprobs
from ..head.lm_head import LMHead, Support
from ..head.passes import keeps_gradients
from ..loss.config import GRPOLossConfig
from .losses import (
    LOSS,
    NAMESPACE,
    TAGS,
    as_called,
    eagerly,
    flat_loss_arguments,
    like,
    of_wanted,
    options_of_loss,
    results_of,
    scaled,
)

# The first arguments of every operator: the head's five tensors, what is constant, numbers.
_HEAD = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_a_out, Tensor? lora_b, "
    "Tensor targets, Tensor? mask, Tensor? temperatures, float temperature, float logit_scale, "
    "float? softcap, str logits_dtype, str backend, int? chunk_bytes, bool batch_invariant, "
    "bool capturable, ScalarType? autocast, bool[] wanted"
)


class _Flat(NamedTuple):
    """The arguments of `_HEAD`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a_out: Tensor | None
    lora_b: Tensor | None
    targets: Tensor
    mask: Tensor | None
    temperatures: Tensor | None
    temperature: float
    logit_scale: float
    softcap: float | None
    logits_dtype: str
    backend: str
    chunk_bytes: int | None
    batch_invariant: bool
    capturable: bool
    autocast: torch.dtype | None
    wanted: list[bool]

    def head(self, leaves: Sequence[Tensor | None]) -> LMHead:
        """The head, of the four of its tensors that `leaves` have after the states."""
        _, weight, bias, a_out, lora_b = leaves
        low_rank = None if a_out is None or lora_b is None else (a_out, lora_b)
        return LMHead(
            weight,  # type: ignore[arg-type]
            bias,
            low_rank,
            temperature=self.temperature if self.temperatures is None else self.temperatures,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            logits_dtype=self.logits_dtype,
        )

    def given(self, leaves: list[Any]) -> tuple[Any, Any, Any, Any]:
        """The first arguments of a call over a head."""
        return leaves[0], self.head(leaves), self.targets, self.mask

    def execution(self, keep_gradients: bool = True) -> Execution:
        return Execution(
            keep_gradients=keep_gradients,
            backend=self.backend,
            chunk_bytes=self.chunk_bytes,
            batch_invariant=self.batch_invariant,
            capturable=self.capturable,
        )

    def check_targets(self) -> None:
        shape = self.hidden.shape[:-1]
        if self.targets.shape[: len(shape)] != shape:
            raise ValueError(
                f"targets: expected shape {list(shape)}; got {list(self.targets.shape)}"
            )

    @property
    def tensors(self) -> list[Tensor | None]:
        """The head's tensors, for `wanted`."""
        return [self.hidden, self.weight, self.bias, self.lora_a_out, self.lora_b]

    def leaves(self) -> list[Tensor | None]:
        """The head's tensors, of which those that are wanted ask for a gradient."""
        return [
            None if x is None else x.detach().requires_grad_(wanted)
            for x, wanted in zip(self.tensors, self.wanted, strict=True)
        ]


_SHARED = len(_Flat._fields)


def _flat(
    hidden: Tensor, head: LMHead, targets: Tensor, mask: Tensor | None, execution: Execution
) -> tuple[Any, ...]:
    a_out, lora_b = (None, None) if head.low_rank is None else head.low_rank
    tensors = (hidden, head.weight, head.bias, a_out, lora_b)
    device, t = hidden.device.type, head.temperature
    per_token = isinstance(t, Tensor)
    return (
        *tensors,
        targets,
        mask,
        t if per_token else None,
        1.0 if per_token else float(t),
        float(head.logit_scale),
        None if head.softcap is None else float(head.softcap),
        head.logits_dtype,
        execution.backend,
        execution.chunk_bytes,
        execution.batch_invariant,
        execution.capturable,
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors],
    )


# Log-probs


@torch.library.custom_op(
    f"{NAMESPACE}::linear_logprobs",
    mutates_args=(),
    tags=TAGS,
    schema=f"({_HEAD}, bool entropy, bool keep) -> Tensor[]",
)
def _linear_logprobs(*args: Any) -> list[Tensor]:
    """Log-probs, logsumexp and entropy of every row, masked ones as they come; what is kept."""
    *shared, entropy, keep = args
    flat = _Flat(*shared)
    with as_called(flat.hidden, flat.autocast):
        leaves = flat.leaves()
        call, passes = planned(*flat.given(leaves), entropy, flat.execution(keep))
    tensors = [x.detach() for x in call.tensors]
    per_token, kept = passes.run(partial(first_pass, tensors, passes))
    return [*per_token, *(x for x in kept if x is not None)]


@_linear_logprobs.register_fake
def _(*args: Any) -> list[Tensor]:
    *shared, _, keep = args
    flat = _Flat(*shared)
    flat.check_targets()
    N = math.prod(flat.hidden.shape[:-1])
    several = flat.targets.ndim == flat.hidden.ndim and flat.targets.shape[-1] > 1
    shapes = [(N, flat.targets.shape[-1]) if several else (N,), (N,), (N,)]
    per_token = [flat.hidden.new_empty(shape, dtype=torch.float32) for shape in shapes]
    of_rows = zip(flat.tensors[::3], flat.wanted[::3], strict=True)
    kept = [
        x.new_empty((N, x.shape[-1])) for x, wanted in of_rows if keep and wanted and x is not None
    ]
    return [*per_token, *kept]


@torch.library.custom_op(
    f"{NAMESPACE}::linear_logprobs_backward",
    mutates_args=(),
    tags=TAGS,
    schema=f"({_HEAD}, bool entropy, Tensor[] found, Tensor? d_logps, Tensor? d_logsumexp, "
    "Tensor? d_entropy) -> Tensor[]",
)
def _linear_logprobs_backward(*args: Any) -> list[Tensor]:
    """The gradients of the head's tensors that are wanted."""
    *shared, entropy, found, d_logps, d_logsumexp, d_entropy = args
    flat = _Flat(*shared)
    per_token, kept = found[:3], found[3:]
    with as_called(flat.hidden, flat.autocast):
        leaves = flat.leaves()
        call, passes = planned(*flat.given(leaves), entropy, flat.execution(bool(kept)))
        tensors = call.tensors
        wanted = [x.requires_grad for x in tensors]
        of_rows = [x and i % 2 == 0 for i, x in enumerate(wanted)]
        with torch.no_grad():
            gradients = second_pass(
                [x.detach() for x in tensors],
                passes,
                [*per_token, *(of_wanted(of_rows, kept) if kept else [])],
                (d_logps, d_entropy, d_logsumexp),
                wanted,
            )
        reached = [x for x, g in zip(tensors, gradients, strict=True) if g is not None]
        ends = [x for x in leaves if x is not None and x.requires_grad]
        found = torch.autograd.grad(reached, ends, [g for g in gradients if g is not None])
        return [x.contiguous() for x in found]


def _ends_like(flat: _Flat) -> list[Tensor]:
    found = zip(flat.tensors, flat.wanted, strict=True)
    return [like(x) for x, wanted in found if wanted and x is not None]


@_linear_logprobs_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    return _ends_like(_Flat(*args[:_SHARED]))


def _keep_of_logprobs(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors = inputs[: _Flat._fields.index("temperature")]
    ctx.save_for_backward(*tensors, *output)
    ctx.rest, ctx.count = inputs[len(tensors) : _SHARED + 1], len(tensors)
    ctx.set_materialize_grads(False)


def _backward_of_logprobs(ctx: Any, given: Sequence[Tensor | None]) -> tuple[Any, ...]:
    refuse_double_backward("linear_logprobs")
    saved = ctx.saved_tensors
    shared, found = (*saved[: ctx.count], *ctx.rest), list(saved[ctx.count :])
    wanted = ctx.rest[-2]
    gradients = _linear_logprobs_backward(*shared, found, *given[:3])
    return (*of_wanted(wanted, gradients), *[None] * (_SHARED + 2 - len(wanted)))


_linear_logprobs.register_autograd(_backward_of_logprobs, setup_context=_keep_of_logprobs)


def linear_logprobs(
    hidden: Tensor,
    head: Tensor | LMHead,
    targets: Tensor | None,
    mask: Tensor | None,
    *,
    entropy: bool,
    execution: Execution,
    **others: Any,
) -> LogprobOutput:
    """`grpo_kernels.linear_logprobs` as one operator."""
    check_options(targets, entropy, others["support"], others["entries"])
    head = LMHead.of(head)
    why = _why_eager(head, others["support"], execution)
    if why is not None or targets is None:
        eager = _EAGER_LOGPROBS[why or "support"]
        return eager(hidden, head, targets, mask, entropy=entropy, execution=execution, **others)
    flat = _flat(hidden, head, targets, mask, execution)
    of_head = [flat[-1][i] for i in (1, 2, 4)]
    several = targets.ndim == hidden.ndim and targets.shape[-1] > 1
    keep = keeps_gradients(execution.keep_gradients, flat[-1][::3], of_head, several)
    logps, logsumexp, of_entropy, *_ = _linear_logprobs(*flat, entropy, keep)
    shape = hidden.shape[:-1]
    logps = logps.reshape(targets.shape)
    results = [logsumexp.reshape(shape), of_entropy.reshape(shape)]
    if mask is not None:
        counts = mask != 0
        each = counts if logps.ndim == counts.ndim else counts[..., None]
        logps = torch.where(each, logps, 0.0)
        results = [torch.where(counts, x, 0.0) for x in results]
    return LogprobOutput(logps, results[1] if entropy else None, results[0])


# The loss


@torch.library.custom_op(
    f"{NAMESPACE}::fused_grpo_loss",
    mutates_args=(),
    tags=TAGS,
    schema=f"({_HEAD}, {LOSS}) -> Tensor[]",
)
def _fused_grpo_loss(*args: Any) -> list[Tensor]:
    """Log-probs, entropy, and what `results_of` has."""
    flat, given = _Flat(*args[:_SHARED]), args[_SHARED:]
    with as_called(flat.hidden, flat.autocast):
        leaves = flat.leaves()
        out = eager_loss(
            leaves[0],  # type: ignore[arg-type]
            flat.head(leaves),
            flat.targets,
            given[0],
            flat.mask,
            execution=flat.execution(),
            **options_of_loss(given),
        )
        results = results_of(out, leaves[::3], [leaves[i] for i in (1, 2, 4)], given[-1])
    assert out.entropy is not None
    return [out.logps.clone(), out.entropy.clone(), *results]


@_fused_grpo_loss.register_fake
def _(*args: Any) -> list[Tensor]:
    flat = _Flat(*args[:_SHARED])
    flat.check_targets()
    shapes: tuple[Any, ...] = (flat.targets.shape, flat.targets.shape, (), (args[-1],))
    results = [flat.hidden.new_empty(shape, dtype=torch.float32) for shape in shapes]
    of_rows = zip(flat.tensors[::3], flat.wanted[::3], strict=True)
    rows = [like(x) for x, wanted in of_rows if wanted and x is not None]
    of_head = ((flat.tensors[i], flat.wanted[i]) for i in (1, 2, 4))
    return [*results, *rows, *(like(x) for x, wanted in of_head if wanted and x is not None)]


def _keep_of_fused(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*output[4:])
    flat = _Flat(*inputs[:_SHARED])
    ctx.wanted, ctx.count = flat.wanted, len(inputs)
    ctx.tokens = math.prod(flat.targets.shape)
    ctx.set_materialize_grads(False)


def _backward_of_fused(ctx: Any, given: Sequence[Tensor | None]) -> tuple[Any, ...]:
    refuse_double_backward("fused_grpo_loss")
    rows = sum(ctx.wanted[::3])
    hidden, weight, bias, a_out, lora_b = ctx.wanted
    gradients = scaled(ctx.saved_tensors, given[2], rows, ctx.tokens)
    of_rows = of_wanted((hidden, a_out), gradients[:rows])
    of_head = of_wanted((weight, bias, lora_b), gradients[rows:])
    ordered = (of_rows[0], of_head[0], of_head[1], of_rows[1], of_head[2])
    return (*ordered, *[None] * (ctx.count - len(ordered)))


_fused_grpo_loss.register_autograd(_backward_of_fused, setup_context=_keep_of_fused)


def fused_grpo_loss(
    hidden: Tensor,
    head: Tensor | LMHead,
    targets: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    *,
    support: Support | None,
    config: GRPOLossConfig,
    num_items: float | Tensor | None,
    execution: Execution,
    **constants: Tensor | None,
) -> GRPOLossOutput:
    """`grpo_kernels.fused_grpo_loss` as one operator."""
    head = LMHead.of(head)
    why = _why_eager(head, support, execution)
    if not isinstance(config.loss_type, str):
        why = "loss_type"
    if why is not None:
        return _EAGER_FUSED[why](
            hidden, head, targets, advantages, mask, support=support, config=config,
            num_items=num_items, execution=execution, **constants,
        )  # fmt: skip
    flat = _flat(hidden, head, targets, mask, execution)
    wants_grad = any(flat[-1])
    of_loss, names = flat_loss_arguments(
        config, targets.ndim, wants_grad, True, advantages, num_items, constants
    )
    logps, entropy, loss, metrics, *_ = _fused_grpo_loss(*flat, *of_loss)
    by_name = dict(zip(names, metrics.detach().unbind(), strict=True))
    return GRPOLossOutput(loss, by_name, logps.detach(), entropy.detach())


# What stays eager


def _why_eager(head: LMHead, support: object, execution: Execution) -> str | None:
    if isinstance(head.weight, DTensor):
        return "dtensor"
    if head.ranks is not None:
        return "ranks"
    if support is not None:
        return "support"
    return None if execution.matmul is None else "matmul"


_EAGER_LOGPROBS, _EAGER_FUSED = eagerly(eager_logprobs), eagerly(eager_loss)

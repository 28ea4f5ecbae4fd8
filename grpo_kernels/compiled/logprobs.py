"""The two calls that give log-probs as operators: `linear_logprobs`, `selective_log_softmax`.

Each has a second operator for its backward, which is given what the first one found.

    linear_logprobs          -> log-probs, logsumexp, entropy; gradients that are kept
    selective_log_softmax    -> log-probs, logsumexp
    ..._backward             -> gradients that are wanted
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.autograd import refuse_double_backward
from ..base.outputs import LogprobOutput
from ..head.linear_logprobs import check_options, first_pass, planned, second_pass
from ..head.linear_logprobs import linear_logprobs as eager_logprobs
from ..head.passes import keeps_gradients
from ..head.selective_log_softmax import checked, gradient, sweep
from .eagerly import eagerly, why_eager
from .leaves import LEAVES, NAMESPACE, TAGS, Leaves, leaves_of

_LOGPROBS_EAGERLY = eagerly(eager_logprobs)


def _operator(
    name: str,
    forward: Callable[[Leaves], list[Tensor]],
    fake: Callable[[Leaves], list[Tensor]],
    backward: Callable[[Leaves, list[Tensor], Sequence[Tensor | None]], list[Tensor]],
) -> Any:
    """An operator, whose results' gradients `backward` turns into those that are wanted."""

    @torch.library.custom_op(
        f"{NAMESPACE}::{name}", mutates_args=(), tags=TAGS, schema=f"({LEAVES}) -> Tensor[]"
    )
    def operator(*args: Any) -> list[Tensor]:
        return forward(Leaves(*args))

    @operator.register_fake
    def _(*args: Any) -> list[Tensor]:
        return fake(Leaves(*args))

    @torch.library.custom_op(
        f"{NAMESPACE}::{name}_backward",
        mutates_args=(),
        tags=TAGS,
        schema=f"({LEAVES}, Tensor[] found, Tensor? d_logps, Tensor? d_logsumexp, "
        "Tensor? d_entropy) -> Tensor[]",
    )
    def backward_operator(*args: Any) -> list[Tensor]:
        *leaves, found, d_logps, d_logsumexp, d_entropy = args
        return backward(Leaves(*leaves), found, (d_logps, d_entropy, d_logsumexp))

    @backward_operator.register_fake
    def _(*args: Any) -> list[Tensor]:
        return Leaves(*args[:4]).like_wanted()

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        tensors, *ctx.rest = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)

    def of_operator(ctx: Any, given: Sequence[Tensor | None]) -> tuple[Any, ...]:
        refuse_double_backward(name)
        saved = ctx.saved_tensors
        leaves, found = Leaves(list(saved[: ctx.count]), *ctx.rest), list(saved[ctx.count :])
        three = [*given[:3], None][:3]
        return leaves.placed(backward_operator(*leaves, found, *three)), *[None] * 3

    operator.register_autograd(of_operator, setup_context=keep)
    return operator


# Of a head


def _first(given: Leaves) -> list[Tensor]:
    with given.as_called() as (_, arguments):
        call, plan = planned(**arguments)
    tensors = [x.detach() for x in call.tensors]
    per_token, kept = plan.run(partial(first_pass, tensors))
    return [*per_token, *(x for x in kept if x is not None)]


def _first_fake(given: Leaves) -> list[Tensor]:
    hidden, targets = given.place("hidden"), given.place("targets")
    shape = hidden.shape[:-1]
    if targets.shape[: len(shape)] != shape:
        raise ValueError(f"targets: expected shape {list(shape)}; got {list(targets.shape)}")
    N, K = math.prod(shape), targets.shape[-1] if targets.ndim == hidden.ndim else 1
    shapes = [(N, K) if K > 1 else (N,), (N,), (N,)]
    per_token = [hidden.new_empty(size, dtype=torch.float32) for size in shapes]
    of_rows = [x for x, wanted in zip(given.tensors, given.wanted, strict=True) if wanted == 2]
    asked = given.constants["execution"]["Execution"]["keep_gradients"]
    of_head = [wanted == 1 for wanted in given.wanted]
    if not keeps_gradients(asked, [bool(of_rows)], of_head, K > 1):
        return per_token
    return [*per_token, *(x.new_empty((N, x.shape[-1])) for x in of_rows)]


def _second(given: Leaves, found: list[Tensor], d_results: Sequence[Tensor | None]) -> list[Tensor]:
    with given.as_called() as (ends, arguments):
        call, plan = planned(**arguments)
        tensors = call.tensors
        wanted = [x.requires_grad for x in tensors]
        # Of x's alone, if any were kept.
        kept = iter(found[3:])
        of_xs = [next(kept, None) if x and i % 2 == 0 else None for i, x in enumerate(wanted)]
        all_found = [*found[:3], *(of_xs if len(found) > 3 else [])]
        with torch.no_grad():
            plain = [x.detach() for x in tensors]
            gradients = second_pass(plain, plan, all_found, d_results, wanted)
        reached = [x for x, g in zip(tensors, gradients, strict=True) if g is not None]
        of_ends = torch.autograd.grad(reached, ends, [g for g in gradients if g is not None])
    return [x.contiguous() for x in of_ends]


_logprobs_operator = _operator("linear_logprobs", _first, _first_fake, _second)


def linear_logprobs(**given: Any) -> LogprobOutput:
    """`grpo_kernels.linear_logprobs` as one operator."""
    hidden, targets, mask, entropy = (
        given[name] for name in ("hidden", "targets", "mask", "entropy")
    )
    check_options(targets, entropy, given["support"], given["entries"])
    why = why_eager(given)
    if why is not None or targets is None:
        return _LOGPROBS_EAGERLY[why or "support"](**given)
    del given["support"], given["entries"]
    logps, logsumexp, of_entropy, *_ = _logprobs_operator(*leaves_of(given, hidden))
    logps = logps.reshape(targets.shape)
    results = [logsumexp.reshape(hidden.shape[:-1]), of_entropy.reshape(hidden.shape[:-1])]
    if mask is not None:
        counts = mask != 0
        each = counts if logps.ndim == counts.ndim else counts[..., None]
        logps = torch.where(each, logps, 0.0)
        results = [torch.where(counts, x, 0.0) for x in results]
    return LogprobOutput(logps, results[1] if entropy else None, results[0])


# Of logits


def _sweep(given: Leaves) -> list[Tensor]:
    arguments = given.arguments()
    return list(sweep(arguments["logits"], *checked(**arguments)))


def _sweep_fake(given: Leaves) -> list[Tensor]:
    logits, N = given.place("logits"), given.place("targets").numel()
    return [logits.new_empty(N, dtype=torch.float32) for _ in range(2)]


def _gradient(
    given: Leaves, found: list[Tensor], d_results: Sequence[Tensor | None]
) -> list[Tensor]:
    arguments, d_logps = given.arguments(), d_results[0]
    d_logps = torch.zeros_like(found[0]) if d_logps is None else d_logps
    return [gradient(arguments["logits"], *checked(**arguments), found, d_logps)]


_softmax_operator = _operator("selective_log_softmax", _sweep, _sweep_fake, _gradient)


def selective_log_softmax(**given: Any) -> Tensor:
    """`grpo_kernels.selective_log_softmax` as one operator."""
    logps, _ = _softmax_operator(*leaves_of(given, given["logits"]))
    return logps.reshape(given["targets"].shape)

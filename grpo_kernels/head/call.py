"""A call over a head, checked once and flat."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.checks import (
    HEAD_DTYPES,
    ValueChecks,
    check_tensor,
    dtype_name,
    saveable,
)
from ..base.layout import Layout, check_target_ids, check_targets
from ..kernels import Backend, LogitTransform, select_backend
from ..kernels.divergences import Divergence
from .budget import gpu
from .execution import Execution, check_execution
from .lm_head import LMHead, Reference


@dataclass(frozen=True)
class HeadSpec:
    """A call over a head, checked and flat, without its tensors, so that a backward may keep it.

    `checks` are still to be read from the device.
    """

    num_terms: int  # of the raw logits, the head's weight first
    has_bias: bool  # the last term is a bias, which alone may be -inf
    targets: Tensor | None  # int64 [N] or [N, K]; None: no id has its log-prob read
    sampled: bool  # whether the targets were sampled; False: they are ids to look up, or None
    mask: Tensor | None  # bool [N], the tokens that take part; None: every token
    transform: LogitTransform
    layout: Layout
    checks: ValueChecks
    backend: Backend
    dtype: torch.dtype  # of the operands of GEMMs with the weight
    adapter_rounding: torch.dtype | None  # of an adapter's product alone, as `transform`'s is
    execution: Execution
    reference: HeadSpec | None = None  # the reference model's head, on the same tokens
    divergence: Divergence | None = None  # the divergence between the two

    @property
    def sums(self) -> list[list[int]]:
        """The terms by number, in groups; a model rounds the sum after each group."""
        layer = [0, self.num_terms - 1] if self.has_bias else [0]
        return [layer, [k for k in range(self.num_terms) if k not in layer]]

    @property
    def targets_per_token(self) -> int:
        """The ids of each token that have their log-prob read."""
        if self.targets is None:
            return 0
        return 1 if self.targets.ndim == 1 else self.targets.shape[1]


class HeadCall(NamedTuple):
    """A call over a head: the tensors that autograd follows, and the rest.

    `tensors` are x and y of each term in turns, `x0, y0, x1, y1, ...`, y0 the head's weight; then
    the reference's tensors.
    """

    head: LMHead
    tensors: list[Tensor]
    spec: HeadSpec

    def with_reference(self, other: HeadCall, divergence: Divergence) -> HeadCall:
        """The same call with a reference's, whose divergence from it is computed."""
        spec = replace(self.spec, reference=other.spec, divergence=divergence)
        return HeadCall(self.head, self.tensors + other.tensors, spec)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the raw logits, `[V]`, as a constant; None without one."""
        spec = self.spec
        return self.tensors[2 * spec.num_terms - 1].detach()[:, 0] if spec.has_bias else None

    def needs_grad(self) -> list[bool]:
        """True for each of `tensors` whose gradient the current call is to prepare."""
        enabled = torch.is_grad_enabled()
        return [enabled and x.requires_grad for x in self.tensors]


def reference_call(call: HeadCall, reference: Reference) -> HeadCall:
    """The reference's call on the same tokens, checked."""
    hidden, head = reference
    spec, shape = call.spec, call.spec.layout.shape
    targets, mask = (None if x is None else x.reshape(shape) for x in (spec.targets, spec.mask))
    with named_reference(spec.checks):
        hidden = check_tensor("hidden", hidden, dtypes=HEAD_DTYPES, device=spec.layout.device)
        check_tensor("hidden", hidden, shape=(*shape, *hidden.shape[-1:]))
        other = head_call(
            hidden, head, targets, mask, None, spec.execution, spec.checks, sampled=spec.sampled
        )
    policy_ranks, reference_ranks = call.head.ranks, other.head.ranks
    if (policy_ranks and (policy_ranks.group, policy_ranks.start)) != (
        reference_ranks and (reference_ranks.group, reference_ranks.start)
    ):
        raise ValueError(
            "reference: expected a head whose rows the ranks share as they do the policy's, with "
            f"the same group and start; got ranks={reference_ranks}, beside {policy_ranks}"
        )
    V, others = len(call.tensors[1]), len(other.tensors[1])
    if others != V:
        raise ValueError(
            f"reference: expected a head of {V} rows, like the policy's; got {others}. If the rest "
            f"is padding, slice it off: weight[:{min(V, others)}]"
        )
    return other._replace(tensors=[saveable(x.detach()) for x in other.tensors])


@contextmanager
def named_reference(checks: ValueChecks) -> Iterator[None]:
    """Prefixes errors and value checks of the block with the reference's name."""

    def named(message: str) -> str:
        return f"reference.{'' if message.startswith(('hidden', 'head')) else 'head.'}{message}"

    first = len(checks.messages)
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(named(str(error))) from error
    checks.messages[first:] = map(named, checks.messages[first:])


def head_call(
    hidden: Tensor,
    head: Tensor | LMHead,
    targets: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    execution: Execution,
    checks: ValueChecks | None = None,
    *,
    sampled: bool = True,
) -> HeadCall:
    """Checks and flattens the arguments that all calls over a head share.

    `checks`: the outer call's, if there is one. Targets that are not sampled are ids to look up, or
    None.
    """
    check_execution(execution)
    head = _checked_head(hidden, head)
    backend = select_backend(execution.backend, hidden.device)
    checks = ValueChecks() if checks is None else checks
    flat_targets = None
    if targets is not None or sampled:
        targets = check_tensor("targets", targets)
        flat_targets = check_targets(targets, hidden.shape[:-1], hidden.device)
    like = hidden.new_empty(hidden.shape[:-1]) if targets is None else targets
    layout = Layout.of("targets", like, cu_seqlens, checks)
    flat_mask = layout.flat_mask(mask, checks)
    temperature = layout.flat_temperature(head.temperature, flat_mask, checks)
    terms = head.terms(hidden)
    rounding = _rounding(hidden, head.weight, head)
    transform = LogitTransform(float(head.logit_scale), head.softcap, temperature, rounding)
    spec = HeadSpec(
        num_terms=len(terms),
        has_bias=head.bias is not None,
        targets=flat_targets,
        sampled=sampled,
        mask=flat_mask,
        transform=transform,
        layout=layout,
        checks=checks,
        backend=backend,
        dtype=_gemm_dtype(hidden, head.weight),
        adapter_rounding=head.low_rank and _rounding(*head.low_rank, head),
        execution=execution,
    )
    return HeadCall(head, [x for term in terms for x in term], spec)


def check_ids(
    call: HeadCall,
    reference: HeadCall | None,
    columns: int,
    local_ids: Tensor,
    add_up: Callable[[Tensor], Tensor],
) -> None:
    """Adds checks that targets are ids below `columns`, and that no head bans a sampled one.

    `local_ids`: the targets' columns on this rank, or numbers outside of it. `add_up` sums a count
    over the ranks.
    """
    spec = call.spec
    if spec.targets is None:
        return
    check_target_ids(spec.targets, spec.mask, columns, spec.checks)
    for prefix, head in (("", call), ("reference.head.", reference)):
        bias = None if head is None or not spec.sampled else head.bias
        if bias is None:
            continue
        place = local_ids.clamp(0, len(bias) - 1)
        banned = (bias[place] == -torch.inf) & (place == local_ids)
        banned = banned if spec.mask is None else banned & spec.mask
        spec.checks.add(
            add_up(banned.sum()),
            f"{prefix}bias: expected more than -inf at every unmasked target; got -inf: mask these "
            "tokens, or change the bias",
        )


def _checked_head(hidden: object, head: Tensor | LMHead) -> LMHead:
    """Checks that the head consists of plain tensors and goes with `hidden [..., H]`."""
    hidden = check_tensor("hidden", hidden, dtypes=HEAD_DTYPES)
    if hasattr(hidden, "full_tensor"):
        raise TypeError(
            "hidden: expected a plain tensor; got a DTensor: call this inside the wrapped "
            "module's forward, or pass hidden.full_tensor()"
        )
    if hidden.ndim not in (2, 3):
        raise ValueError(f"hidden: expected shape [B, T, H] or [N, H]; got {list(hidden.shape)}")
    if hidden.device.type == "meta":
        raise ValueError("hidden: expected a tensor with values; got one on the meta device")
    head = LMHead.of(head)
    check_tensor("weight", head.weight, dtypes=HEAD_DTYPES, device=hidden.device)
    (V, H), size = head.weight.shape, hidden.shape[-1]
    if size == V > H:
        raise ValueError(
            f"hidden: its last dimension {size} is the head's number of rows: pass hidden states, "
            f"[..., {H}], not logits"
        )
    if size != H:
        hint = ": transpose it" if size == V else ""
        raise ValueError(f"weight: expected shape [V, {size}]; got [{V}, {H}]{hint}")
    if head.bias is not None:
        check_tensor("bias", head.bias, dtypes=HEAD_DTYPES)
    if head.low_rank is not None:
        a_out, lora_b = head.low_rank
        shape = [*hidden.shape[:-1], lora_b.shape[1]]
        check_tensor("low_rank[0]", a_out, shape=shape, dtypes=HEAD_DTYPES)
        check_tensor("low_rank[1]", lora_b, dtypes=HEAD_DTYPES)
    return head


def _gemm_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the operands of GEMMs with the weight.

    CUDA tensor cores take bf16 and fp16 operands and give float32. Elsewhere the result would be
    rounded to the operands' dtype, so they are upcast, a slice of the vocabulary at a time; so is
    bf16 before Ampere. Autocast sets its dtype on CUDA and is ignored on a CPU.
    """
    if hidden.device.type != "cuda" or torch.version.hip is not None:
        return torch.float32
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    if autocast not in (torch.bfloat16, torch.float16):
        autocast = None
    if autocast is None and hidden.dtype != weight.dtype:
        _warn_of_float32_products(hidden.dtype, weight.dtype)
        return torch.float32
    dtype = autocast or hidden.dtype
    if dtype == torch.bfloat16 and gpu(hidden.device).major < 8:
        _warn_of_emulated_bf16()
        return torch.float32
    return dtype


@cache
def _warn_of_float32_products(hidden: torch.dtype, weight: torch.dtype) -> None:
    warnings.warn(
        f"weight: {dtype_name(hidden)} hidden states and a {dtype_name(weight)} head are "
        "multiplied in float32, some 15 times slower than in half precision: call under "
        "torch.autocast, or cast one to the dtype of the other",
        stacklevel=2,
    )


@cache
def _warn_of_emulated_bf16() -> None:
    warnings.warn(
        "weight: bfloat16 is multiplied in float32, some 8 times slower than float16, as this GPU "
        "has no tensor cores for bfloat16: pass float16 hidden states and head, or call under "
        "torch.autocast('cuda', torch.float16)",
        stacklevel=2,
    )


def _rounding(x: Tensor, y: Tensor, head: LMHead) -> torch.dtype | None:
    """The dtype in which the model's layer would return `x @ y.T`; None without that rounding."""
    if head.logits_dtype == "fp32":
        return None
    device = x.device.type
    result = x.dtype if x.dtype == y.dtype else torch.float32
    if torch.is_autocast_enabled(device):
        result = torch.get_autocast_dtype(device)
    return None if result == torch.float32 else result

"""Loss and gradients of a token-local objective, in one pass over chunks of logits.

The gradient of a token's log-prob follows from that token alone, so a chunk of logits can be
computed, used for loss and gradient, and overwritten: three GEMMs.

    for each chunk of rows:
        Z        = h W^T                        GEMM 1, float32, one reused buffer
        l, E, X  = token_stats(Z)               log-prob of the target, entropy; X = e^(z - a) stays
        x, g     = policy_loss(l, E)            loss, dL/dl
        dh       = r o (X W)                    GEMM 2, r = -g / (T sum X) for each row
        dW      += X^T (r o h)                  GEMM 3, accumulated in float32

The gradient of the logits, r o X, is never made. Where the entropy has a gradient, or the GEMMs
take float16, it is, by a second sweep: `logit_grads_(Z)`.

The loss is a scalar, so the backward only multiplies the stored gradients by its gradient. They
are computed and stored `scale` times as large, a power of two that float16 needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .autograd import dtypes_of, power_of_two_scale, refuse_double_backward, scaled_gradient
from .backends import RowGrads, TokenStats
from .config import GRPOLossConfig
from .grpo_loss import policy_loss
from .head_call import HeadCall, HeadOperands
from .head_gradients import HeadGradients
from .lm_head import LMHead
from .objective import LossInputs
from .row_plan import RowPlan, in_memory
from .sampled_gradients import SampledGradients
from .support_head import SupportHead


class OnePassLoss(torch.autograd.Function):
    """Returns the loss; per token, detached, log-probs, entropy and the loss's gradient of each.

    And the metrics of the sampled backward. The gradients are None where not computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a_out: Tensor | None,
        lora_b: Tensor | None,
        config: GRPOLossConfig,
        inputs: LossInputs,
        call: HeadCall,
        plan: RowPlan,
        wanted: Sequence[bool],
    ) -> tuple[Any, ...]:
        operands = HeadOperands(hidden, weight, bias, lora_a_out, lora_b)
        work = partial(OnePassLoss._of_rows, ctx, operands, config, inputs, call, wanted)
        return in_memory(work, plan, call)

    @staticmethod
    def _of_rows(
        ctx: Any,
        operands: HeadOperands,
        config: GRPOLossConfig,
        inputs: LossInputs,
        call: HeadCall,
        wanted: Sequence[bool],
        plan: RowPlan,
    ) -> tuple[Any, ...]:
        hidden, shape = operands.hidden, (4, len(operands.hidden))
        logps, entropy, d_logps, d_entropy = hidden.new_zeros(shape, dtype=torch.float32)
        losses = [logps.new_zeros(())]
        with torch.autocast(hidden.device.type, enabled=False):
            scale = power_of_two_scale(_largest_weight(config, inputs))
            if call.shard is not None and call.shard.own_rows:
                scale = call.shard.least(scale)  # what is added up over ranks has one
            # With a cross-entropy term there are rows outside the policy's mask.
            masked = call.capturable or inputs.ce_weights is not None
            head = LMHead(operands, call, plan.logit_rows)
            gradients = _new_gradients(head, plan, wanted)
            for chunk in plan.chunks():
                index, wants_grad = chunk.index, chunk.needs_grad and any(wanted)
                rows = head.rows(index, chunk.of_ranks)
                swept = wants_grad and gradients.sweeps_once and one_sweep(config, call)
                if swept:
                    stats, own = gradients.sweep(rows)
                else:
                    logits = head.logits(rows)  # [C, V], not yet transformed
                    stats, own = head.stats(rows, logits, entropy=True)
                stats = stats.at(rows.mine)
                policy = policy_loss(
                    config,
                    inputs.at(index, masked=masked),
                    stats.logps,
                    stats.entropy,
                    call.backend,
                    grad=wants_grad,
                )
                losses.append(policy.loss)
                assert stats.entropy is not None
                logps[index], entropy[index] = stats.logps, stats.entropy
                if policy.d_logps is None:
                    continue
                g = d_logps[index] = scale * policy.d_logps
                e = None
                if policy.d_entropy is not None:
                    e = d_entropy[index] = scale * policy.d_entropy
                g = head.of_all(rows, g)
                if swept:
                    gradients.add_swept(rows, own, g)
                    continue
                e = None if e is None else head.of_all(rows, e)
                gradients.add(rows, logits, RowGrads.of(own, g, None, e, rows.here))
            if call.support is not None:
                per_token = (logps, entropy, d_logps, d_entropy)
                losses.append(_add_support(config, inputs, gradients, scale, per_token, wanted))
            call.zeroed(logps, entropy)
            finished, sampled = gradients.finish(), gradients.metrics()
        ctx.save_for_backward(scale, *finished)
        ctx.dtypes, ctx.shard = dtypes_of(*operands), call.shard
        ctx.mark_non_differentiable(logps, entropy, d_logps, d_entropy)
        of_loss = (d_logps, d_entropy) if any(wanted) else (None, None)
        return torch.stack(losses).sum(), logps, entropy, *of_loss, sampled

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_double_backward("fused_grpo_loss")
        scale, *gradients = ctx.saved_tensors
        factor = d_loss / scale
        factors = [factor] * len(gradients)
        if ctx.shard is not None and ctx.shard.own_rows:
            ctx.shard.check_equal(d_loss)
            factors = ctx.shard.factors(factor)
        scaled = (
            scaled_gradient(stored, f, dtype)
            for stored, f, dtype in zip(gradients, factors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None, None)


def _add_support(
    config: GRPOLossConfig,
    inputs: LossInputs,
    gradients: HeadGradients,
    scale: Tensor,
    per_token: Sequence[Tensor],
    wanted: Sequence[bool],
) -> Tensor:
    """Adds the tokens that have a support to `gradients`; returns their loss.

    Sets what belongs to them in `per_token`: log-probs, entropies, and the gradients of each.
    """
    call = gradients.head.call
    assert call.support is not None
    words = SupportHead(gradients.head.operands, call)
    logits = words.logits()
    logps, entropy, d_logps, d_entropy = per_token
    stats = TokenStats(logps, torch.zeros_like(logps), entropy)
    words.stats(logits, stats)
    inputs = inputs.within(call.support.tokens)
    policy = policy_loss(config, inputs, logps, entropy, call.backend, grad=any(wanted))
    if policy.d_logps is not None:
        g, e = scale * policy.d_logps, None
        d_logps += g
        needed = g != 0
        if policy.d_entropy is not None:
            e = scale * policy.d_entropy
            d_entropy += e
            needed |= e != 0
        grads = RowGrads.of(stats, g, d_entropy=e)
        words.add_to(words.word_grads(logits, grads, needed), gradients)
    return policy.loss


def _largest_weight(config: GRPOLossConfig, inputs: LossInputs) -> Tensor:
    largest = abs(config.entropy_coef) * (inputs.count > 0) / inputs.count.clamp(min=1)
    if inputs.ce_weights is not None and inputs.ce_weights.numel():
        largest = largest.maximum(inputs.ce_weights.abs().max())
    return largest.maximum(inputs.weights.max()) if inputs.weights.numel() else largest


def one_sweep(config: GRPOLossConfig, call: HeadCall) -> bool:
    """False where the gradient of the logits is no factor per row, or one beyond float16."""
    return config.entropy_coef == 0.0 and call.dtype != torch.float16


def _new_gradients(head: LMHead, plan: RowPlan, wanted: Sequence[bool]) -> HeadGradients:
    call = head.call
    if call.sampling is not None and any(wanted):
        return SampledGradients(head, call.backend, wanted, call.sampling, plan)
    every_row = plan.num_grad_rows == call.layout.num_tokens
    return HeadGradients(head, call.backend, wanted, plan.largest_chunk, every_row=every_row)

"""Per-token log-probs and entropy of a linear head, differentiable, for any loss of the caller's.

Two passes, four GEMMs. The forward computes each chunk of logits once and keeps three numbers per
row; the backward, which only then knows the gradient of every log-prob, computes the logits again
for the rows that have one:

    forward    Z = h W^T;  lse, l, E = token_stats(Z)
    backward   Z = h W^T;  dZ = logit_grads_(Z);  dh = dZ W;  dW += dZ^T h
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .autograd import (
    dtypes_of,
    eager_only,
    power_of_two_scale,
    refuse_double_backward,
    scaled_gradient,
)
from .backends import RowGrads, TokenStats
from .head_call import HeadCall, HeadOperands, head_call
from .head_gradients import HeadGradients, chunk_layout
from .lm_head import LMHead
from .outputs import LogprobOutput
from .row_plan import RowPlan, in_memory, plan_rows
from .support_head import SupportHead, with_support

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@eager_only
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: str = "fp32",
    batch_invariant: bool = False,
    matmul: Callable[[Tensor, Tensor], Tensor] | None = None,
    entropy: bool = False,
    backward: str = "exact",
    tolerance: float | None = None,
    seed: int | torch.Generator | None = None,
    backend: str = "auto",
    chunk_bytes: int | None = None,
    capturable: bool = False,
    support: tuple[Tensor, Tensor] | None = None,
    vocab_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    hidden_layout: str = "replicated",
) -> LogprobOutput:
    """Computes log-probs of the targets under a linear head, without ever holding the logits.

    Equivalent PyTorch:

        logits = (hidden @ weight.T + bias).float() / temperature
        logps = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    Args:
        hidden: `[B, T, H]` or packed `[N, H]`, float32, bfloat16 or float16. `hidden[..., t, :]`
            is the state that predicts `targets[..., t]`: the caller shifts.
        weight: `[V, H]`, the LM head; a frozen one costs no gradient work.
        targets: `[B, T]` or `[N]`, integer token ids in [0, V) wherever the mask is 1.
        bias: `[V]` or None.
        low_rank: `(lora_a_out, lora_b)`, `[B, T, r]` or `[N, r]` and `[V, r]`: a LoRA on the head,
            as in `fused_grpo_loss`.
        mask: of the shape of `targets`, bool or 0/1; None computes every token. Masked positions
            may hold anything, cost nothing, and come back as 0.
        temperature: a number, or one value per token in the shape of `targets`; a constant.
        logit_scale: factor on `hidden @ weight.T + bias`.
        softcap: `softcap * tanh(logits / softcap)` before the temperature, as Gemma 2 has it.
        logits_dtype: `"fp32"`, or `"model"`: rounded as the model's own head does, as in
            `fused_grpo_loss`.
        batch_invariant: as in `fused_grpo_loss`; with it log-probs of the same weights are equal
            bits, so that a ratio of them is exactly 1.
        matmul: as in `fused_grpo_loss`.
        entropy: computes the entropy, too.
        backward: `"exact"`; `"sampled"`, which is for `fused_grpo_loss`, is refused where gradients
            are wanted, and makes no difference elsewhere.
        tolerance: of a sampled backward.
        seed: of a sampled backward.
        backend: `"auto"`, `"triton"` or `"torch"`.
        chunk_bytes: budget of the buffers of logits and of their gradient, in bytes, as in
            `fused_grpo_loss`.
        capturable: reads nothing back from the device, as in `fused_grpo_loss`.
        support: the words that the sampler kept for each token, as in `fused_grpo_loss`: log-probs,
            entropy and logsumexp are of the softmax over these words.
        vocab_group: ranks that share the vocabulary, as in `fused_grpo_loss`; what is computed from
            the results has to be the same on all of them, too, unless each has tokens of its own
            (`hidden_layout`).
        vocab_start: as in `fused_grpo_loss`.
        hidden_layout: as in `fused_grpo_loss`.

    Returns:
        `logps`, `entropy` (in nats) and `logsumexp` (of the logits after temperature), each with
        gradients for `hidden`, `weight`, `bias` and `low_rank`. The backward skips rows whose
        gradient turns out to be 0.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. Values on the
            device (target ids, a mask other than 0/1) are read together with the row count, in
            the forward's one device-to-host transfer; the backward has one, for its row count.
        RuntimeError: on double backward.

    Under autocast on a GPU the GEMMs run in its dtype, as in `fused_grpo_loss`.

    Reference: `grpo_kernels.reference.linear_logprobs`, in any dtype up to float64.
    """
    if not isinstance(entropy, bool):
        raise TypeError(f"entropy: expected a bool; got {entropy!r}")
    operands, call = head_call(
        hidden,
        weight,
        targets,
        mask,
        bias=bias,
        low_rank=low_rank,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        logits_dtype=logits_dtype,
        batch_invariant=batch_invariant,
        matmul=matmul,
        cu_seqlens=None,
        backward=backward,
        tolerance=tolerance,
        seed=seed,
        backend=backend,
        chunk_bytes=chunk_bytes,
        capturable=capturable,
        vocab_group=vocab_group,
        vocab_start=vocab_start,
        hidden_layout=hidden_layout,
        agreed={"entropy": entropy},
    )
    if call.sampling is not None and any(operands.wants_grad()):
        raise ValueError(
            "backward: expected 'exact', as the gradients of the log-probs come too late for a "
            "draw: fused_grpo_loss has the sampled one; got 'sampled'"
        )
    if support is not None:
        call = with_support(call, support, logsumexp=True)
    plan = plan_rows(
        call.mask,
        None,
        call.checks,
        num_tokens=call.layout.num_tokens,
        weight=operands.weight,
        chunk_bytes=chunk_bytes,
        capturable=capturable,
        shard=call.shard,
    )
    scores = flat_logprobs(operands, call, plan, entropy=entropy)
    shape = call.layout.shape
    return LogprobOutput(*(None if x is None else x.reshape(shape) for x in scores))  # type: ignore[arg-type]


def flat_logprobs(
    operands: HeadOperands, call: HeadCall, plan: RowPlan, *, entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probs, entropy and logsumexp, each `[N]`."""
    return _LinearLogprobs.apply(*operands, call, plan, entropy)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a_out: Tensor | None,
        lora_b: Tensor | None,
        call: HeadCall,
        plan: RowPlan,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        operands = HeadOperands(hidden, weight, bias, lora_a_out, lora_b)
        work = partial(_LinearLogprobs._of_rows, ctx, operands, call, wants_entropy)
        return in_memory(work, plan, call)

    @staticmethod
    def _of_rows(
        ctx: Any,
        operands: HeadOperands,
        call: HeadCall,
        wants_entropy: bool,
        plan: RowPlan,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.words = None
        hidden, head = operands.hidden, LMHead(operands, call, plan.logit_rows)
        logps = torch.zeros(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        logsumexp, entropy = torch.zeros_like(logps), torch.zeros_like(logps)
        own_logps = logps if call.shard is None else torch.zeros_like(logps)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in plan.chunks():
                index = chunk.index
                rows = head.rows(index, chunk.of_ranks)
                logits = head.logits(rows)  # [C, V], not yet transformed
                stats, own = head.stats(rows, logits, entropy=wants_entropy)
                if own is not stats:
                    own_logps[index] = (own if call.here is not None else stats).logps[rows.mine]
                stats = stats.at(rows.mine)
                logps[index], logsumexp[index] = stats.logps, stats.logsumexp
                if stats.entropy is not None:
                    entropy[index] = stats.entropy
            if call.support is not None:
                words = SupportHead(operands, call)
                ctx.words = words.logits()
                words.stats(ctx.words, TokenStats(logps, logsumexp, entropy))
                if own_logps is not logps:  # of the words of a support every rank knows all
                    own_logps = torch.where(call.support.tokens, logps, own_logps)
        # Copies, as the caller may change the outputs in place.
        kept = (own_logps.clone(), logsumexp.clone(), entropy.clone())
        call.zeroed(logps, logsumexp, entropy)
        ctx.save_for_backward(*operands, *kept)
        ctx.call, ctx.has_rows = call, plan.num_rows > 0
        ctx.wants_entropy = wants_entropy
        ctx.set_materialize_grads(False)
        return logps, entropy if wants_entropy else None, logsumexp

    @staticmethod
    def backward(
        ctx: Any,
        d_logps: Tensor | None,
        d_entropy: Tensor | None,
        d_logsumexp: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_logprobs")
        *tensors, logps, logsumexp, entropy = ctx.saved_tensors
        operands, call = HeadOperands(*tensors), ctx.call
        d_logps = torch.zeros_like(logps) if d_logps is None else d_logps.float().contiguous()
        d_softmax = d_logps if d_logsumexp is None else d_logps - d_logsumexp.float()
        needed = (d_logps != 0) | (d_softmax != 0)
        if ctx.wants_entropy and call.shard is not None and call.shard.own_rows:
            # What is gathered has to be the same on all ranks, of whatever the losses are made.
            d_entropy = torch.zeros_like(logps) if d_entropy is None else d_entropy
        if d_entropy is not None:
            d_entropy = d_entropy.float().contiguous()
            needed |= d_entropy != 0
        has_grad = needed
        if call.mask is not None:
            # Masked rows came back as the constant 0, whatever gradient their value is given.
            needed = needed & call.mask
        if call.capturable:
            # The others take part, too.
            d_logps, d_softmax = (torch.where(needed, x, 0.0) for x in (d_logps, d_softmax))
            d_entropy = None if d_entropy is None else torch.where(needed, d_entropy, 0.0)
        given = [x for x in (d_logps, d_softmax, d_entropy) if x is not None]
        words = None if call.support is None else SupportHead(operands, call)
        if words is not None and not ctx.has_rows:
            scale = logps.new_ones(())  # float32 alone, and gradients in their own dtype
        else:
            counts = needed if words is None else needed | words.support.tokens
            scale = _power_of_two_scale_of(given, counts)
            if call.shard is not None and call.shard.own_rows:
                scale = call.shard.least(scale)
        here = call.here
        if here is not None and call.support is not None:
            here = here | call.support.tokens
        grads = RowGrads.of(
            TokenStats(logps, logsumexp, entropy),
            scale * d_logps,
            scale * d_softmax,
            None if d_entropy is None else scale * d_entropy,
            here=here,
        )
        wanted = ctx.needs_input_grad[:5]
        with torch.autocast(logps.device.type, enabled=False):
            if words is None:
                gradients = _exact_gradients(operands, call, grads, needed, wanted)
            else:
                d_words = words.word_grads(ctx.words, grads, has_grad)
                if not ctx.has_rows:
                    return (*words.gathered_gradients(d_words, wanted), None, None, None)
                also = partial(words.add_to, d_words)
                gradients = _exact_gradients(operands, call, grads, needed, wanted, also)
        factors = [1 / scale] * len(gradients)
        if call.shard is not None:
            factors = call.shard.factors(1 / scale)
        unscaled = (
            scaled_gradient(gradient, factor, dtype, fresh=True)
            for gradient, factor, dtype in zip(
                gradients, factors, dtypes_of(*operands), strict=True
            )
        )
        return (*unscaled, None, None, None)


def _exact_gradients(
    operands: HeadOperands,
    call: HeadCall,
    grads: RowGrads,
    needed: Tensor,
    wanted: Sequence[bool],
    also: Callable[[HeadGradients], None] | None = None,
) -> tuple[Tensor | None, ...]:
    """The head's gradients, from those of all rows `[N]`; rows not `needed` are left out.

    `also` adds the tokens that have a support.
    """
    plan = plan_rows(
        needed,
        None,
        None,
        num_tokens=len(needed),
        weight=operands.weight,
        chunk_bytes=call.chunk_bytes,
        capturable=call.capturable,
        shard=call.shard,
        **chunk_layout(call, True, strips=True),
    )
    return in_memory(partial(_gradients_of_rows, operands, call, grads, wanted, also), plan, call)


def _gradients_of_rows(
    operands: HeadOperands,
    call: HeadCall,
    grads: RowGrads,
    wanted: Sequence[bool],
    also: Callable[[HeadGradients], None] | None,
    plan: RowPlan,
) -> tuple[Tensor | None, ...]:
    head = LMHead(operands, call, plan.logit_rows)
    every_row = plan.num_rows == len(operands.hidden)
    gradients = HeadGradients(head, call.backend, wanted, plan.largest_chunk, every_row=every_row)
    for chunk in plan.chunks():
        rows = head.rows(chunk.index, chunk.of_ranks)
        of_rows = grads.at(chunk.index)
        if chunk.of_ranks is not None:
            given = [x for x in of_rows if x is not None]
            of_all = iter(head.of_all(rows, torch.stack(given, 1)).unbind(1))
            of_rows = RowGrads(*(None if x is None else next(of_all) for x in of_rows))  # type: ignore[arg-type]
        gradients.add_again(rows, of_rows)
    if also is not None:
        also(gradients)
    return gradients.finish()


def _power_of_two_scale_of(gradients: list[Tensor], needed: Tensor) -> Tensor:
    # Rows that are not needed may be given anything, NaN included.
    peaks = [torch.where(needed, x, 0.0).abs().amax() for x in gradients if x.numel()]
    none = torch.zeros((), device=needed.device)
    return power_of_two_scale(torch.stack(peaks).amax() if peaks else none)

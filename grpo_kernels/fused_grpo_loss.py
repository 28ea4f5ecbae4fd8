"""From hidden states to the GRPO loss and its gradients, without ever holding the logits.

For a token-local objective the gradient of a token's log-prob follows from that token alone, so a
chunk of logits can be made, used for loss and gradient, and overwritten: one pass, three GEMMs.

    for each chunk of rows:
        Z        = h W^T                        GEMM 1, float32, one reused buffer
        l, E     = token_stats(Z)               log-prob of the target, entropy
        x, g, e  = policy_loss(l, E)            loss terms, dL/dl, dL/dE
        dZ       = logit_grads_(Z)              on the memory of Z
        dh       = dZ W                         GEMM 2
        dW      += dZ^T h                       GEMM 3, accumulated in float32

With `backward="sampled"` the last three take few of dZ's columns (`column_sampling.py`).

The loss is a scalar, so the backward only multiplies the stored gradients by its gradient. They
are made and stored `scale` times as large, a power of two that float16 needs.

For the other objectives (`GRPOLossConfig.one_pass` says which) the log-probs are taken first, by
the two passes and four GEMMs of `linear_logprobs`, and the loss of them is differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .autograd_support import (
    dtypes_of,
    eager_only,
    power_of_two_scale,
    refuse_double_backward,
    scaled_gradient,
)
from .column_sampling import ColumnSampler, Sampling
from .config import GRPOLossConfig
from .grpo_loss import GRPOLossOutput, loss_of_tokens
from .head_gradients import HeadGradients
from .inputs import check_target_ids, flat_tokens
from .linear_logprobs import LogprobJob, check_head_call, flat_logprobs
from .metrics import loss_metrics
from .objective import TokenInputs, token_local
from .row_chunks import HeadChunks, LowRank, RowPlan, gemm_dtype, plan_rows
from .tiles import LogitGradInputs, LogitTransform, Tiles


@eager_only
def fused_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    sampling_logps: Tensor | None = None,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    config: GRPOLossConfig = GRPOLossConfig(),  # noqa: B008 - frozen
    num_items: float | Tensor | None = None,
    entropy_threshold: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float | Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    skip_untrained: bool = False,
    backward: str = "exact",
    tolerance: float | None = None,
    seed: int | torch.Generator | None = None,
    backend: str = "auto",
    chunk_bytes: int | None = None,
) -> GRPOLossOutput:
    """The GRPO loss of a linear head over hidden states, with gradients for all three.

    Equivalent PyTorch, with the logits never held:

        logits = (hidden @ weight.T + bias).float() / config.temperature
        logps = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        loss = grpo_loss(logps, advantages, mask, old_logps=..., ref_logps=..., config=config).loss

    Args:
        hidden: `[B, T, H]` or packed `[N, H]`, float32, bfloat16 or float16. `hidden[..., t, :]`
            is the state that predicts `targets[..., t]`: the caller shifts.
        weight: `[V, H]`, the LM head; a frozen one costs no gradient work.
        targets: `[B, T]` or `[N]`, integer token ids in [0, V) wherever the mask is 1.
        advantages: `[B]`, `[B, T]` or `[N]`; `[B]` with packed input needs `cu_seqlens`.
        mask: of the shape of `targets`, bool or 0/1; None counts every token. Masked positions
            may hold anything, NaN included, in any argument.
        old_logps: log-probs under the policy that is the ratio's denominator, a constant of the
            shape of `targets`; None is on-policy: ratio 1, with its gradient.
        ref_logps: log-probs under the reference policy, likewise; needed when `config.beta` is
            not 0, and otherwise used for the `kl` metrics alone.
        sampling_logps: log-probs as the sampler reported them, likewise, NaN where it reported
            none; needed by `config.is_correction`, used by `config.off_policy_threshold`, and
            otherwise by the metrics alone.
        bias: `[V]` or None.
        low_rank: `inner`, `[B, T, r]` or `[N, r]`, and `outer`, `[V, r]`: adds `inner @ outer.T`
            to `hidden @ weight.T`, with gradients for both. A LoRA on the head, `inner` being
            `scaling * lora_A(hidden)` and `outer` the weight of `lora_B`: next to a frozen
            `weight` it is trained for little more than the frozen head costs.
        config: what loss to compute; `config.one_pass` says whether in one pass or two.
        num_items: the `dapo` average's denominator, int, float or 0-d tensor: the unmasked tokens
            of the whole optimizer step over all ranks, divided by the number of ranks over which
            gradients are averaged. None: the unmasked tokens of this call.
        entropy_threshold: with `config.top_entropy_quantile` below 1, the entropy from which on
            tokens train, a number or 0-d tensor: the quantile over all ranks, say. None: the
            quantile over this call's tokens.
        cu_seqlens: `[B + 1]` int32 or int64 offsets of the sequences of a packed input; needed
            where the objective tells sequences apart.
        temperature: overrides `config.temperature`: a number, or one value a token in the shape
            of `targets`.
        logit_scale: factor on `hidden @ weight.T + bias`.
        softcap: `softcap * tanh(logits / softcap)` before the temperature, as Gemma 2 has it.
        skip_untrained: leave tokens whose gradient is known to be 0 beforehand (advantage or
            sampler's correction 0, no KL, no entropy term; in two passes: whole sequences of
            advantage 0) out of the forward too. The gradients are the same; their `logps` are 0,
            and the metrics are over the other tokens.
        backward: `"exact"`, or `"sampled"`: unbiased gradients of hidden and weight from a few
            percent of the vocabulary's columns (`docs/sampled_backward.md`).
        tolerance: of the sampled backward's noise, relative to the gradient; None: 5e-3.
        seed: what the sampled backward draws from: an int, which gives the same gradients again
            and is to be another one in each call, a `torch.Generator`, or None, torch's own
            generator on the CPU. Ranks draw differently in any case.
        backend: `"auto"`, `"triton"` or `"torch"`.
        chunk_bytes: budget for the buffer of logits. None: on a CPU a quarter of the weight's
            float32 gradient, within 16 and 160 MiB; on a GPU 1.5 GiB or a sixteenth of its memory.

    Returns:
        `loss`, a float32 scalar; `metrics`, 0-d tensors that have not been read from the device
        (means over unmasked tokens): `tokens`, `ratio_mean`, `ratio_max`, `ess` (effective sample
        size of the ratios, 1 at best), `entropy`, `zero_gradient` (share of tokens), `kl` and
        `kl_max` given `ref_logps`, `clip_low` and `clip_high` (0 where nothing clips), and what
        its options add, by TRL's names (`docs/objectives.md`), and of the sampled backward
        `columns_kept`, `dense_blocks`, `gradient_noise`; `logps` and `entropy`, float32 in the
        shape of `targets`, 0 where masked, detached (for differentiable ones see
        `linear_logprobs`).

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. Values on the
            device (target ids, a mask other than 0/1, `cu_seqlens`) are read together with the
            row counts, in the call's one device-to-host transfer; the sampled backward has two
            more a chunk.
        RuntimeError: on double backward.

    Under autocast on a GPU the products are taken in its dtype, a float32 `weight` being copied to
    it once a call, as autocast does for any linear layer; on a CPU autocast changes nothing here.

    Reference: `grpo_kernels.reference.fused_grpo_loss`, in any dtype up to float64.
    """
    call = check_head_call(
        hidden, weight, bias, low_rank, targets, cu_seqlens, softcap, logit_scale, backend,
        Sampling.asked_for(backward, tolerance, seed),
    )  # fmt: skip
    layout, checks, tiles = call.layout, call.checks, call.tiles
    inputs = flat_tokens(
        config, layout, checks, advantages, mask, old_logps=old_logps, ref_logps=ref_logps,
        sampling_logps=sampling_logps, num_items=num_items, entropy_threshold=entropy_threshold,
    )  # fmt: skip
    check_target_ids(call.targets, inputs.mask, weight.shape[0], checks)
    if temperature is None:
        temperature = config.temperature
    elif config.temperature != 1.0:
        raise ValueError(
            "temperature: expected None when config.temperature is set; got both "
            f"({config.temperature} in the config)"
        )
    transform = call.transform(bias, temperature, inputs.mask)
    one_pass = token_local(config, inputs)
    trained = _trained_tokens(config, inputs, one_pass)
    if skip_untrained and trained is not None:
        inputs = replace(inputs, mask=trained if inputs.mask is None else inputs.mask & trained)

    if not one_pass:
        two_pass = LogprobJob(
            call.targets, inputs.mask, transform, tiles, True, chunk_bytes, call.sampling, trained
        )
        logps, entropy, _, sampled = flat_logprobs(
            hidden, weight, bias, call.low_rank, two_pass, checks
        )
        loss, metrics = loss_of_tokens(config, inputs, logps, entropy, tiles)
        assert entropy is not None
        per_token = (x.detach().reshape(layout.shape) for x in (logps, entropy))
        return GRPOLossOutput(loss, metrics | sampled, *per_token)

    plan = plan_rows(
        inputs.mask,
        trained,
        checks,
        num_tokens=layout.num_tokens,
        weight=weight,
        chunk_bytes=chunk_bytes,
    )
    job = _Job(
        config, inputs, call.targets, transform, plan, tiles, gemm_dtype(hidden, weight),
        torch.is_grad_enabled(), call.sampling,
    )  # fmt: skip
    loss, *per_token, sampled = _FusedGRPOLoss.apply(
        hidden.reshape(-1, weight.shape[1]), weight, bias, *call.low_rank, job
    )
    metrics = loss_metrics(config, inputs, *per_token) | sampled
    logps, entropy = (x.reshape(layout.shape) for x in per_token[:2])
    return GRPOLossOutput(loss, metrics, logps, entropy)


def _trained_tokens(config: GRPOLossConfig, inputs: TokenInputs, one_pass: bool) -> Tensor | None:
    """Bool `[N]`: the tokens that may have a gradient, as far as that is known beforehand."""
    if config.beta or config.entropy_coef or callable(config.loss_type):
        return None
    trained = inputs.advantages != 0
    if one_pass:
        return trained if inputs.correction is None else trained & (inputs.correction != 0)
    if config.top_entropy_quantile < 1 or inputs.sequences is None:
        return None
    # A token of advantage 0 still counts in the mean over its sequence.
    if inputs.mask is not None:
        trained = trained & inputs.mask
    sequences = inputs.sequences
    return sequences.spread(sequences.sum(trained.float())) > 0


@dataclass(frozen=True)
class _Job:
    """Everything the Function needs that has no gradient."""

    config: GRPOLossConfig
    inputs: TokenInputs
    targets: Tensor
    transform: LogitTransform
    plan: RowPlan
    tiles: Tiles
    dtype: torch.dtype
    grad_enabled: bool
    sampling: Sampling | None


class _FusedGRPOLoss(torch.autograd.Function):
    """Returns the loss; per token, detached, what the metrics are made of; the sampler's metrics.

    Per token that is log-prob, entropy, and the loss's gradients of the two, None where not
    computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inner: Tensor | None,
        outer: Tensor | None,
        job: _Job,
    ) -> tuple[Any, ...]:
        wants = [g and job.grad_enabled for g in ctx.needs_input_grad[:5]]
        low_rank = None if inner is None or outer is None else (inner, outer)
        with torch.autocast(hidden.device.type, enabled=False):
            scale = power_of_two_scale(_largest_weight(job.config, job.inputs))
            loss, per_token, gradients, sampled = _loss_and_gradients(
                hidden, weight, low_rank, job, scale, wants
            )
        ctx.save_for_backward(scale, *gradients)
        ctx.dtypes = dtypes_of(hidden, weight, bias, inner, outer)
        ctx.mark_non_differentiable(*(x for x in per_token if x is not None))
        return loss, *per_token, sampled

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_double_backward("fused_grpo_loss")
        scale, *gradients = ctx.saved_tensors
        scaled = (
            scaled_gradient(stored, d_loss / scale, dtype)
            for stored, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return (*scaled, None)


def _largest_weight(config: GRPOLossConfig, inputs: TokenInputs) -> Tensor:
    largest = abs(config.entropy_coef) / inputs.count.clamp(min=1)
    return largest.maximum(inputs.weights.max()) if inputs.weights.numel() else largest


def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    low_rank: LowRank | None,
    job: _Job,
    scale: Tensor,
    wants: list[bool],
) -> tuple[Tensor, tuple[Tensor | None, ...], tuple[Tensor | None, ...], dict[str, Tensor]]:
    plan, tiles, config = job.plan, job.tiles, job.config
    head = HeadChunks(hidden, weight, job.dtype, plan.largest_chunk, low_rank)
    sampling = job.sampling if any(wants) else None
    head.want_gradients(
        wants, partial=plan.num_grad_rows < hidden.shape[0], sampled=sampling is not None
    )
    gradients = HeadGradients(
        head, tiles, row_sums=job.transform.softcap is None,
        mean_hidden=None if sampling is None else plan.mean_of(hidden),
    )  # fmt: skip
    sampler = None if sampling is None else ColumnSampler(sampling, head.V, hidden.device)
    loss, logps, entropy, d_logps, d_entropy = (
        torch.zeros(shape, dtype=torch.float32, device=hidden.device)
        for shape in ((), *4 * [hidden.shape[:1]])
    )
    for chunk in plan.chunks():
        rows = chunk.rows
        targets = job.targets[rows]
        transform = job.transform.at(rows)
        wants_grad = chunk.needs_grad and any(wants)

        head_rows = head.rows(chunk)
        logits = head.logits(head_rows)  # [C, V], not yet transformed
        stats = tiles.token_stats(logits, targets, transform, entropy=True)
        policy = tiles.policy_loss(
            config, job.inputs.at(rows), stats.logps, stats.entropy, grad=wants_grad
        )
        loss += policy.loss
        assert stats.entropy is not None
        logps[rows], entropy[rows] = stats.logps, stats.entropy
        if wants_grad:
            assert policy.d_logps is not None
            g = scale * policy.d_logps
            e = None if policy.d_entropy is None else scale * policy.d_entropy
            d_logps[rows] = g
            if e is not None:
                d_entropy[rows] = e
            grads = LogitGradInputs(stats.logps, stats.logsumexp, g, g, stats.entropy, e)
            gradients.add(chunk, head_rows, logits, targets, transform, grads, sampler)
    sampled = {} if sampler is None else sampler.metrics(gradients.finish())
    per_token = (logps, entropy, *((d_logps, d_entropy) if any(wants) else (None, None)))
    return loss, per_token, head.gradients(), sampled

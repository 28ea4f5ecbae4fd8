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

The loss is a scalar, so the backward only multiplies the stored gradients by its gradient. A
token's share of it is about 1 / N, which float16 does not hold for long: the gradients are made
and stored `scale` times as large, a power of two that brings the largest weight of a token to
between 1 and 2, and the backward takes it out again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .autograd_support import eager_only, refuse_double_backward, scaled_gradient
from .grpo_loss import GRPOLossOutput
from .inputs import (
    Layout,
    ValueChecks,
    check_backward,
    check_head,
    check_target_ids,
    check_targets,
    flat_tokens,
)
from .objective import GRPOLossConfig, PolicySums, TokenInputs, metrics_from_sums
from .row_chunks import HeadChunks, RowPlan, gemm_dtype, plan_rows
from .tiles import LogitGradInputs, LogitTransform, Tiles, select_tiles


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
    bias: Tensor | None = None,
    config: GRPOLossConfig = GRPOLossConfig(),  # noqa: B008 - frozen
    num_items: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float | Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    skip_untrained: bool = False,
    backward: str = "exact",
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
            not 0, and otherwise used for the `kl` metric alone.
        bias: `[V]` or None.
        config: what loss to compute.
        num_items: `dapo`'s denominator, int, float or 0-d tensor: the unmasked tokens of the whole
            optimizer step over all ranks, divided by the number of ranks over which gradients
            are averaged. None: the unmasked tokens of this call.
        cu_seqlens: `[B + 1]` int32 or int64 offsets of the sequences of a packed input.
        temperature: overrides `config.temperature`: a number, or one value a token in the shape
            of `targets`.
        logit_scale: factor on `hidden @ weight.T + bias`.
        softcap: `softcap * tanh(logits / softcap)` before the temperature, as Gemma 2 has it.
        skip_untrained: leave tokens whose gradient is known to be 0 beforehand (advantage 0, no
            KL, no entropy term) out of the forward too. The loss and the gradients are the same;
            their `logps` are 0 and the metrics' means are over the other tokens.
        backward: `"exact"`.
        backend: `"auto"`, `"triton"` or `"torch"`.
        chunk_bytes: budget for the buffer of logits. None: on a CPU a quarter of the weight's
            float32 gradient, within 16 and 160 MiB; on a GPU 1.5 GiB or a sixteenth of its memory.

    Returns:
        `loss`, a float32 scalar; `metrics`, 0-d tensors that have not been read from the device
        (means over unmasked tokens): `ratio_mean`, `ratio_max`, `clip_low`, `clip_high`,
        `entropy`, `tokens`, and `kl` given `ref_logps`; `logps`, float32 in the shape of
        `targets`, 0 where masked, detached (for differentiable ones see `linear_logprobs`).

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. Values on the
            device (target ids, a mask other than 0/1, `cu_seqlens`) are read together with the
            row counts, in the call's one device-to-host transfer.
        RuntimeError: on double backward.

    Under autocast on a GPU the products are taken in its dtype, a float32 `weight` being copied to
    it once a call, as autocast does for any linear layer; on a CPU autocast changes nothing here.

    Reference: `grpo_kernels.reference.fused_grpo_loss`, in any dtype up to float64.
    """
    check_backward(backward)
    check_head(hidden, weight, bias, softcap, logit_scale)
    tiles = select_tiles(backend, hidden.device)
    V, H = weight.shape
    flat_targets = check_targets(targets, hidden.shape[:-1], hidden.device)
    checks = ValueChecks()
    layout = Layout.of("targets", targets, cu_seqlens, checks)
    tokens = flat_tokens(config, layout, checks, advantages, mask, old_logps, ref_logps, num_items)
    check_target_ids(flat_targets, tokens.mask, V, checks)
    if temperature is None:
        temperature = config.temperature
    elif config.temperature != 1.0:
        raise ValueError(
            "temperature: expected None when config.temperature is set; got both "
            f"({config.temperature} in the config)"
        )
    transform = LogitTransform(
        None if bias is None else bias.detach().contiguous(),
        float(logit_scale),
        softcap,
        layout.flat_temperature(temperature, tokens.mask, checks),
    )

    trained = None
    if not config.beta and not config.entropy_coef:
        trained = tokens.advantages != 0
    wanted = tokens.mask
    if skip_untrained and trained is not None:
        wanted = trained if wanted is None else wanted & trained
    plan = plan_rows(
        wanted,
        trained,
        checks,
        num_tokens=layout.num_tokens,
        weight=weight,
        chunk_bytes=chunk_bytes,
    )
    job = _Job(
        config, tokens, flat_targets, transform, plan, tiles, gemm_dtype(hidden, weight),
        torch.is_grad_enabled(),
    )  # fmt: skip
    loss, logps, sums, ratio_max = _FusedGRPOLoss.apply(hidden.reshape(-1, H), weight, bias, job)
    metrics = metrics_from_sums(
        PolicySums(sums, ratio_max),
        plan.num_rows,
        tokens.count,
        has_entropy=True,
        has_kl=tokens.ref_logps is not None,
    )
    return GRPOLossOutput(loss, metrics, logps.reshape(layout.shape))


@dataclass(frozen=True)
class _Job:
    """Everything the Function needs that has no gradient."""

    config: GRPOLossConfig
    tokens: TokenInputs
    targets: Tensor
    transform: LogitTransform
    plan: RowPlan
    tiles: Tiles
    dtype: torch.dtype
    grad_enabled: bool


class _FusedGRPOLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: _Job
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            scale = _gradient_scale(job.config, job.tokens)
            logps, totals, gradients = _loss_and_gradients(
                hidden,
                weight,
                job,
                scale,
                [g and job.grad_enabled for g in ctx.needs_input_grad[:3]],
            )
        loss = totals.sums[0].clone()
        ctx.save_for_backward(scale, *gradients)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(logps, totals.sums, totals.ratio_max)
        return loss, logps, totals.sums, totals.ratio_max

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("fused_grpo_loss")
        scale, *gradients = ctx.saved_tensors
        scaled = (
            scaled_gradient(stored, d_loss / scale, dtype)
            for stored, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return (*scaled, None)


def _gradient_scale(config: GRPOLossConfig, tokens: TokenInputs) -> Tensor:
    """The power of two, 0-d, that brings the largest weight of a token to between 1 and 2."""
    largest = (abs(config.entropy_coef) / tokens.count.clamp(min=1)).clamp(min=1e-30)
    if tokens.weights.numel():
        largest = largest.maximum(tokens.weights.max())
    return torch.exp2(-largest.log2().floor())


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, job: _Job, scale: Tensor, wants: list[bool]
) -> tuple[Tensor, PolicySums, tuple[Tensor | None, ...]]:
    plan, tiles, config = job.plan, job.tiles, job.config
    head = HeadChunks(hidden, weight, job.dtype, plan.largest_chunk)
    head.want_gradients(wants, partial=plan.num_grad_rows < hidden.shape[0])
    all_logps = torch.zeros(hidden.shape[0], device=hidden.device)
    totals = PolicySums.zero(hidden.device)
    for chunk in plan.chunks():
        targets = job.targets[chunk.rows]
        transform = job.transform.at(chunk.rows)
        wants_grad = chunk.needs_grad and any(wants)

        hidden_rows = head.rows(chunk)  # [C, H]
        logits = head.logits(hidden_rows)  # [C, V], not yet transformed
        stats = tiles.token_stats(logits, targets, transform, entropy=True)
        policy = tiles.policy_loss(
            config, job.tokens.at(chunk.rows), stats.logps, stats.entropy, grad=wants_grad
        )
        all_logps[chunk.rows] = stats.logps
        totals += policy.totals
        if wants_grad:
            assert policy.d_logps is not None
            d_logps = scale * policy.d_logps
            d_entropy = None if policy.d_entropy is None else scale * policy.d_entropy
            d_logits = head.d_logits_like(logits)
            grads = LogitGradInputs(
                stats.logps, stats.logsumexp, d_logps, d_logps, stats.entropy, d_entropy
            )
            tiles.logit_grads_(logits, targets, transform, grads, out=d_logits)
            head.add_gradients(chunk, hidden_rows, d_logits)
    return all_logps, totals, head.gradients()

"""The GRPO loss and its gradients from hidden states, without storing the logits.

Where the objective is token-local (`GRPOLossConfig.one_pass`), the gradient of a token's log-prob
follows from that token alone. So a chunk of logits can be computed, used for loss and gradient, and
overwritten: one pass, three GEMMs.

    for each chunk of rows:
        Z        = h W^T                        GEMM 1, float32, one reused buffer
        l, E, X  = token_stats(Z)               log-prob of the target, entropy; X = S (p - 1_y)
        x, g     = objective(l, E)              loss, dL/dl
        dh       = r o (X W)                    GEMM 2, r = -g / (T S) for each row
        dW      += X^T (r o h)                  GEMM 3, accumulated in float32

with p the softmax, 1_y the target's unit vector and S = sum_j e^(z_j - a) for an anchor a; X
overwrites Z. The gradient of the logits, r o X, is never made. Where the loss has a gradient by the
entropy or by an exact KL, or the GEMMs take float16, a second sweep makes it: `logit_grads_(Z)`.

The loss is a scalar, so the backward only multiplies the stored gradients by its gradient. In
float16 they are computed and stored `scale` times as large, a power of two.

A reference's log-probs are computed before; with an exact KL, its logits together with the
policy's, strip by strip (`head/two_heads.py`).

For other objectives `linear_logprobs` makes the log-probs first, in two passes, and the loss over
them is differentiated.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .base.autograd import (
    eager_under_compile,
    float16_scale,
    save_gradients,
    saved_gradients,
    scaled,
)
from .base.checks import suggests_names
from .base.outputs import GRPOLossOutput
from .head.call import head_call
from .head.execution import Execution, check_execution
from .head.linear_logprobs import compute_logprobs
from .head.lm_head import LMHead, Reference, Support
from .head.plan import GradMode, call_of_reference, local_head, plan_head, reference_logps
from .kernels import StatGrads
from .kernels.divergences import ReverseKL
from .loss.config import GRPOLossConfig
from .loss.grpo_loss import d_kl, flat_loss, policy_loss_and_grads
from .loss.inputs import check_config, loss_inputs, tokens_in_loss
from .loss.metrics import metrics_of_call
from .loss.objective import token_local
from .loss.tokens import Tokens


@eager_under_compile
@suggests_names
def fused_grpo_loss(
    hidden: Tensor,
    head: Tensor | LMHead,
    targets: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    sampling_logps: Tensor | None = None,
    ce_weights: Tensor | None = None,
    support: Support | None = None,
    reference: Reference | None = None,
    config: GRPOLossConfig = GRPOLossConfig(),  # noqa: B008 - frozen
    num_items: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    execution: Execution = Execution(),  # noqa: B008 - frozen
) -> GRPOLossOutput:
    """Computes the GRPO loss of a linear head over hidden states, and its gradients.

    Equivalent PyTorch, without storing the logits:

        logits = (hidden @ weight.T + bias).float() / temperature
        logps = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        loss = grpo_loss(logps, advantages, mask, old_logps=..., ref_logps=..., config=config).loss

    Args:
        hidden: `[B, T, H]` or packed `[N, H]`, float32, bfloat16 or float16. `hidden[..., t, :]`
            is the state that predicts `targets[..., t]`: the caller shifts.
        head: the LM head's weight `[V, H]`, or an `LMHead` if it has a bias, a LoRA, a scale, a
            softcap or a temperature, or is split over ranks.
        targets: `[B, T]` or `[N]`, integer token ids in [0, V) where the mask is 1.
        advantages: `[B]`, `[B, T]` or `[N]`; `[B]` with packed input needs `cu_seqlens`.
        mask: of the shape of `targets`, bool or 0/1; None counts every token. Masked positions
            may hold anything, NaN included, in any argument.
        old_logps: log-probs under the policy before the update, the ratio's denominator: a constant
            in the shape of `targets`. None: on-policy, the ratio is 1 but has a gradient.
        ref_logps: log-probs under the reference policy, same shape; required if `config.beta` is
            not 0, otherwise used for the `kl` metrics only.
        sampling_logps: the sampler's log-probs, same shape, NaN where it reported none; required by
            `config.is_correction`, used by `config.off_policy_threshold`, otherwise for metrics
            only.
        ce_weights: adds the cross-entropy term `-(ce_weights * logps).sum()` on any tokens, such as
            a tool's or a demonstration's: float constants in the shape of `targets`, normalized by
            you. Tokens with a weight count for this term whether masked or not; all other terms,
            `num_items` and metrics use `mask`. A negative weight makes its token less likely,
            without bound.
        support: the ids that the sampler kept for each token. Log-probs, entropy, loss and metrics
            are then of the softmax over these ids, with exact gradients, from their rows of the
            head only (`docs/support.md`). A token with an empty set is scored over the full
            vocabulary; masked tokens may have any set.
        reference: another model's hidden states and head on the same tokens, instead of
            `ref_logps`: same vocabulary; constants in float32, bfloat16 or float16. With
            `config.kl_estimator = "exact"` the KL to it is over the full vocabulary. Does not work
            with a support.
        config: the loss to compute; `config.one_pass` is False if it takes two passes.
        num_items: denominator of the loss, a number > 0 or 0-d tensor: the unmasked tokens (`dapo`
            and `bnpo`) or the sequences (`grpo`, `luspo` and `dr_grpo`) of the optimizer step over
            all ranks, divided by the number of ranks over which gradients are averaged. The losses
            of the step's calls then add up; the entropy bonus stays a mean over each call. None:
            the count of this call.
        cu_seqlens: `[B + 1]` int32 or int64 offsets of the sequences of a packed input; required
            by losses that depend on sequences.
        execution: backend, memory and reproducibility.

    Returns:
        `loss`: float32 scalar.
        `metrics`: 0-d device tensors, means over unmasked tokens, computed when first read; reading
            a value synchronizes. `docs/objectives.md` lists them, `docs/support.md` a support's.
        `logps`, `entropy`: float32 in the shape of `targets`, detached (`linear_logprobs` has
            differentiable ones); 0 where masked without a weight in `ce_weights`.
        `ref_logps`, `kl`: the reference's log-probs or the exact KL to it, same shape; None without
            a `reference`.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. Values on the
            device (target ids, NaN advantages, a mask other than 0/1, `cu_seqlens`) are read
            together with the row counts, in the call's one device-to-host transfer.
        RuntimeError: on double backward.

    Under autocast on a GPU the GEMMs run in its dtype; a float32 weight is copied to it once per
    call, as autocast does for any linear layer. On a CPU autocast changes nothing here.

    Reference: `grpo_kernels.reference.fused_grpo_loss`, in any dtype up to float64.
    """
    rows = tokens_in_loss(mask, ce_weights, hidden)
    call = head_call(hidden, local_head(head), targets, rows, cu_seqlens, execution)
    spec, other = call.spec, None
    if reference is not None:
        other = call_of_reference(call, reference, support)
    tokens = loss_inputs(
        config,
        spec.layout,
        spec.checks,
        advantages,
        spec.mask if rows is mask else spec.layout.flat_mask(mask, spec.checks),
        old_logps=old_logps,
        ref_logps=ref_logps,
        sampling_logps=sampling_logps,
        ce_weights=ce_weights,
        num_items=num_items,
        has_reference=reference is not None,
    )
    if config.exact_kl and other is not None:
        call = call.with_reference(other, ReverseKL())
    one_pass = support is None and token_local(config, tokens)
    other_grads = config.entropy_has_gradient or config.exact_kl
    plan = plan_head(
        call,
        support,
        GradMode.of(call, one_pass=one_pass, other_grads=other_grads),
        entropy=True,
        with_grad=_tokens_with_grad(config, tokens),
        reference=None if config.exact_kl or not config.beta else other,
        loss_settings={
            "one pass": one_pass,
            "entropy_coef": config.entropy_coef,
            "beta": config.beta,
            "reference": other is not None,
        },
    )
    if other is not None and not config.exact_kl:
        tokens = replace(tokens, ref_logps=plan.run_with_retry(partial(reference_logps, other)))
    if one_pass:
        run = partial(_OnePass.apply, *call.tensors, config, tokens)
        loss, logps, entropy, kl, *d_outputs = plan.run_with_retry(run)
        tokens = tokens if kl is None else replace(tokens, kl=kl)
        metrics = metrics_of_call(config, tokens, logps, entropy, *d_outputs)
    else:
        logps, entropy, _, kl = compute_logprobs(call, plan)
        loss, metrics = flat_loss(config, tokens, logps, entropy, spec.backend, kl)
    shape = spec.layout.shape
    ref_logps = None if other is None or config.exact_kl else tokens.ref_logps
    return GRPOLossOutput(
        loss,
        metrics if plan.sets is None else metrics | plan.metrics(),
        logps.detach().reshape(shape),
        entropy.detach().reshape(shape),
        None if ref_logps is None else ref_logps.reshape(shape),
        None if kl is None else kl.detach().reshape(shape),
    )


class FusedGRPOLoss(nn.Module):
    """The call of `fused_grpo_loss` as a module; it has no parameters.

        grpo = FusedGRPOLoss(GRPOLossConfig(loss_type="grpo", beta=0.04))
        out = grpo(hidden, model.lm_head.weight, targets, advantages, mask, ref_logps=ref)
        out.loss.backward()

    A call takes all other arguments of `fused_grpo_loss` under the same names.

    Args:
        config: the loss to compute.
        execution: backend, memory and reproducibility.

    Raises:
        TypeError, ValueError: as `fused_grpo_loss`; `config` or `execution` passed to a call.
    """

    @suggests_names
    def __init__(
        self,
        config: GRPOLossConfig = GRPOLossConfig(),  # noqa: B008 - frozen
        execution: Execution = Execution(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__()
        check_config(config)
        self.config, self.execution = config, check_execution(execution)

    def forward(self, *args: Any, **tensors: Any) -> GRPOLossOutput:
        """Calls `fused_grpo_loss(hidden, head, targets, advantages, mask, ...)`."""
        for name in ("config", "execution"):
            if name in tensors:
                raise TypeError(f"{name}: a call takes none: pass it to FusedGRPOLoss({name}=...)")
        return fused_grpo_loss(*args, **tensors, config=self.config, execution=self.execution)

    def extra_repr(self) -> str:
        values = [(f, getattr(x, f.name)) for x in (self.config, self.execution) for f in fields(x)]
        return ", ".join(f"{f.name}={value!r}" for f, value in values if value != f.default)


class _OnePass(torch.autograd.Function):
    """The loop over chunks, of a token-local objective.

    Returns the loss; per token, detached, log-probs, entropy, the exact KL and the loss's gradients
    by log-probs and entropy; None for what is not computed.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Any, ...]:
        *tensors, config, tokens, plan = args
        N, any_grad = len(tensors[0]), any(plan.needs_grad)
        per_token = tensors[0].new_zeros((5, N), dtype=torch.float32)
        logps, entropy, kl, d_logps, d_entropy = per_token.unbind()
        d_divergence = d_kl(config, tokens)
        entropy_has_grad = any_grad and config.entropy_has_gradient
        loss = None
        with torch.autocast(logps.device.type, enabled=False):
            dtypes = plan.spec.dtype, *(x.dtype for x in tensors)
            scale = float16_scale(dtypes, partial(_largest_weight, config, tokens))
            head, grads = plan.chunked_head(tensors), plan.gradients(tensors)
            for chunk in plan.rows.chunks():
                index = chunk.index
                stats = head.forward(chunk)  # GEMM 1
                constants = tokens.at(index)
                if d_divergence is not None:
                    kl[index] = stats.divergence
                    constants = replace(constants, kl=stats.divergence)
                policy = policy_loss_and_grads(
                    config,
                    constants,
                    stats.logps,
                    stats.entropy,
                    plan.spec.backend,
                    grad=chunk.needs_grad and any_grad,
                )
                loss = policy.loss if loss is None else loss + policy.loss
                logps[index], entropy[index] = stats.logps, stats.entropy
                if policy.d_logps is None:
                    continue
                d_stats = StatGrads(
                    policy.d_logps,
                    policy.d_entropy,
                    divergence=None if d_divergence is None else d_divergence[index],
                ).each(partial(scaled, scale=scale))
                d_logps[index] = d_stats.logps
                if d_stats.entropy is not None:
                    d_entropy[index] = d_stats.entropy
                head.backward(chunk, grads, d_stats)  # GEMMs 2 and 3
        save_gradients(ctx, tensors, scale, grads.finalize())
        d_outputs = [d_logps if any_grad else None, d_entropy if entropy_has_grad else None]
        if loss is None:
            loss = logps.new_zeros(())
        kl = None if d_divergence is None else kl
        ctx.mark_non_differentiable(*(x for x in (logps, entropy, kl, *d_outputs) if x is not None))
        return loss, logps, entropy, kl, *d_outputs

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return (*saved_gradients(ctx, d_loss, "fused_grpo_loss"), *[None] * 3)


def _largest_weight(config: GRPOLossConfig, tokens: Tokens) -> Tensor:
    largest = abs(config.entropy_coef) * tokens.count.clamp(max=1) / tokens.count.clamp(min=1)
    if tokens.ce_weights is not None and tokens.ce_weights.numel():
        largest = largest.maximum(tokens.ce_weights.abs().max())
    return largest.maximum(tokens.weights.max()) if tokens.weights.numel() else largest


def _tokens_with_grad(config: GRPOLossConfig, tokens: Tokens) -> Tensor | None:
    """The tokens that may have a gradient, bool `[N]`, as far as known beforehand; None: all."""
    if not config.gradient_needs_advantage or not token_local(config, tokens):
        return None
    with_grad, weights = tokens.advantages != 0, tokens.importance_sampling_weights
    if weights is not None:
        with_grad = with_grad & (weights != 0)
    return with_grad if tokens.ce_weights is None else with_grad | (tokens.ce_weights != 0)

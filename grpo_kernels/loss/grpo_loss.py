"""The GRPO loss from log-probs: ratio, clip, KL and masked mean, with their gradient.

The formulas are in `objective.py` and `losses.py`. Value and gradient come from one kernel if there
is one, else from a closed form or autograd. The backward multiplies by the loss's gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base.autograd import dtypes_of, eager_under_compile, refuse_double_backward, scaled_gradient
from ..base.checks import HEAD_DTYPES, ValueChecks, check_tensor, flatten, suggests_names
from ..base.layout import Layout
from ..base.outputs import GRPOLossOutput, Metrics
from ..kernels import Backend, PolicyLossResult, select_backend
from .config import GRPOLossConfig
from .cross_entropy import cross_entropy
from .inputs import check_has_entropy, loss_inputs
from .metrics import metrics_of_call
from .objective import (
    exact_kl,
    objective_in_closed_form,
    policy_objective,
    surrogate_scale,
    token_local,
    tokens_of,
)
from .tokens import Tokens

_KERNEL_ESTIMATORS = ("k1", "k2", "k3")


@eager_under_compile
@suggests_names
def grpo_loss(
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    sampling_logps: Tensor | None = None,
    ce_weights: Tensor | None = None,
    entropy: Tensor | None = None,
    config: GRPOLossConfig = GRPOLossConfig(),  # noqa: B008 - frozen
    num_items: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> GRPOLossOutput:
    """Computes the GRPO loss from per-token log-probs, with gradients for `logps` and `entropy`.

    Equivalent PyTorch, for on-policy `dapo` without a KL:

        loss = -((logps - logps.detach()).exp() * advantages[:, None] * mask).sum() / mask.sum()

    Args:
        logps: `[B, T]` or packed `[N]`, float32, bfloat16 or float16; computed in float32.
        advantages: `[B]`, `[B, T]` or `[N]`; `[B]` with packed input needs `cu_seqlens`.
        mask: of the shape of `logps`, bool or 0/1; None counts every token. Masked positions may
            hold anything, NaN included, in any argument.
        old_logps: log-probs under the policy before the update, the ratio's denominator: a constant
            in the shape of `logps`. None: on-policy.
        ref_logps: log-probs under the reference policy, same shape; required if `config.beta` is
            not 0, otherwise used for the `kl` metrics only.
        sampling_logps: the sampler's log-probs, same shape, NaN where it reported none; required by
            `config.is_correction`, used by `config.off_policy_threshold`, otherwise for metrics
            only.
        ce_weights: adds `-(ce_weights * logps).sum()` over any tokens, as in `fused_grpo_loss`.
        entropy: in nats, in the shape of `logps`; required if `config.entropy_coef` is not 0 or
            `config.top_entropy_quantile` is below 1, otherwise used for the metric only.
        config: the loss to compute.
        num_items: the denominator, as in `fused_grpo_loss`.
        cu_seqlens: `[B + 1]` int32 or int64 offsets of the sequences of a packed input; required
            by losses that depend on sequences.
        backend: `"auto"`, `"triton"` or `"torch"`. Triton has a kernel for token-local losses that
            clip a ratio, `cispo` included, without a KL or with `"k1"`, `"k2"` or `"k3"` without a
            clamp; all others are torch operations.

    Returns:
        `loss`; `metrics` as in `fused_grpo_loss` (`entropy` only if you pass it); `logps` and
        `entropy`, detached.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. No value is
            read from a GPU: there, offending values end in a device-side assertion.
        RuntimeError: on double backward.

    Reference: `grpo_kernels.reference.grpo_loss`, in any dtype up to float64.
    """
    check_tensor("logps", logps, dtypes=HEAD_DTYPES)
    kernels = select_backend(backend, logps.device)
    checks = ValueChecks()
    layout = Layout.of("logps", logps, cu_seqlens, checks)
    tokens = loss_inputs(
        config,
        layout,
        checks,
        advantages,
        layout.flat_mask(mask, checks),
        old_logps=old_logps,
        ref_logps=ref_logps,
        sampling_logps=sampling_logps,
        ce_weights=ce_weights,
        num_items=num_items,
    )
    flat_logps = flatten(logps)
    banned = flat_logps.detach() == -torch.inf
    checks.add(
        banned if tokens.unmasked is None else banned & tokens.unmasked,
        "logps: expected more than -inf at unmasked positions; got tokens with probability 0: "
        "mask them",
    )
    checks.check_without_sync()
    check_has_entropy(config, entropy)
    flat_entropy = None
    if entropy is not None:
        check_tensor(
            "entropy", entropy, shape=layout.shape, dtypes=HEAD_DTYPES, device=layout.device
        )
        flat_entropy = flatten(entropy)
    loss, metrics = flat_loss(config, tokens, flat_logps, flat_entropy, kernels)
    detached = None if entropy is None else entropy.detach().float()
    return GRPOLossOutput(loss, metrics, logps.detach().float(), detached)


def flat_loss(
    config: GRPOLossConfig,
    tokens: Tokens,
    logps: Tensor,
    entropy: Tensor | None,
    backend: Backend,
    kl: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """The differentiable loss of flat `logps [N]` and `entropy [N]`, and its metrics.

    `tokens`: the constants. `kl [N]`: the exact KL, if there is a reference.
    """
    if kl is not None:
        tokens = replace(tokens, kl=kl.detach())
    loss, d_logps, d_entropy = _PolicyLoss.apply(
        logps, entropy, kl, config, tokens, backend, torch.is_grad_enabled()
    )
    detached = None if entropy is None else entropy.detach().float()
    values = logps.detach().float(), detached, d_logps, d_entropy
    return loss, metrics_of_call(config, tokens, *values)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logps: Tensor,
        entropy: Tensor | None,
        kl: Tensor | None,
        config: GRPOLossConfig,
        tokens: Tokens,
        backend: Backend,
        grad_enabled: bool,
    ) -> tuple[Tensor | None, ...]:
        grad = grad_enabled and any(ctx.needs_input_grad)
        with torch.autocast(logps.device.type, enabled=False):
            entropy_float = None if entropy is None else entropy.float()
            policy = policy_loss_and_grads(
                config, tokens, logps.float(), entropy_float, backend, grad=grad
            )
        # Autograd may return one element at stride 0, which cannot be scaled in place.
        stored = [None if x is None else x.contiguous() for x in policy[1:]]
        by_kl = d_kl(config, tokens) if grad and kl is not None else None
        ctx.save_for_backward(*stored, by_kl)
        ctx.dtypes = dtypes_of(logps, entropy, kl)
        ctx.mark_non_differentiable(*(x for x in stored if x is not None))
        return policy.loss, *stored  # which the backward scales in place

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("grpo_loss")
        scaled = (
            scaled_gradient(stored, d_loss, dtype)
            for stored, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None)


def d_kl(config: GRPOLossConfig, tokens: Tokens) -> Tensor | None:
    """The gradient by the exact KL of each token; None if the loss has no exact KL."""
    return config.beta * tokens.weights if config.exact_kl else None


def policy_loss_and_grads(
    config: GRPOLossConfig,
    constants: Tokens,
    logps: Tensor,
    entropy: Tensor | None,
    backend: Backend,
    *,
    grad: bool,
) -> PolicyLossResult:
    """The objective and the cross-entropy term over float32 `logps [C]` and `entropy [C]`.

    With gradients if `grad`.
    """
    is_local, kernel = token_local(config, constants), backend.policy_loss
    options = None if kernel is None else _kernel_options(config)
    if kernel is None or options is None or not is_local:
        policy = _by_definition(config, constants, logps, entropy, grad=grad, is_local=is_local)
    else:
        scale = None
        if config.scales_token_losses:
            scale, _ = surrogate_scale(config, tokens_of(config, constants, logps, entropy))
        policy = kernel(
            logps,
            entropy,
            advantages=constants.advantages,
            weights=constants.weights,
            count=constants.count,
            mask=constants.unmasked,
            old_logps=constants.old_logps,
            ref_logps=constants.ref_logps,
            scale=scale,
            grad=grad,
            **options,
        )
        if config.exact_kl:
            policy = policy._replace(loss=policy.loss + exact_kl(config, constants))
    if constants.ce_weights is None:
        return policy
    return policy._replace(
        loss=policy.loss + cross_entropy(constants.ce_weights, logps),
        d_logps=None if policy.d_logps is None else policy.d_logps - constants.ce_weights,
    )


def _kernel_options(config: GRPOLossConfig) -> dict[str, Any] | None:
    """The kernel's arguments for this loss; None if the kernel does not support it."""
    kernel_loss = config.loss.kernel()
    has_kl = config.kl_estimator in _KERNEL_ESTIMATORS and config.kl_clamp is None
    beta = 0.0 if config.exact_kl else config.beta
    if kernel_loss is None or (beta and not has_kl):
        return None
    options = {"beta": beta, "entropy_coef": config.entropy_coef, **kernel_loss._asdict()}
    if beta:
        options |= {
            "kl_estimator": config.kl_estimator,
            "kl_ratio": config.use_bias_correction_kl,
        }
    return options


def _by_definition(
    config: GRPOLossConfig,
    constants: Tokens,
    logps: Tensor,
    entropy: Tensor | None,
    *,
    grad: bool,
    is_local: bool,
) -> PolicyLossResult:
    """The objective by its definition, differentiated in closed form or by autograd."""
    if not grad:
        with torch.no_grad():
            tokens = tokens_of(config, constants, logps, entropy)
            return PolicyLossResult(policy_objective(config, tokens), None, None)
    leaves = [x.detach().requires_grad_() for x in (logps, entropy) if x is not None]
    with torch.enable_grad():
        tokens = tokens_of(config, constants, leaves[0], None if entropy is None else leaves[1])
        closed_form = objective_in_closed_form(config, tokens)
        if closed_form is not None:
            return PolicyLossResult(*closed_form, None)
        loss = policy_objective(config, tokens, stable_kl=True)
        d_logps, *d_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
    policy = PolicyLossResult(
        loss.detach(),
        torch.zeros_like(logps) if d_logps is None else d_logps,
        d_entropy[0] if d_entropy else None,
    )
    if is_local and policy.d_entropy is not None and not config.entropy_has_gradient:
        raise ValueError(
            "loss_type: a loss with token_local=True whose gradient reaches the entropy needs "
            "entropy_gradient=True: set it"
        )
    return policy

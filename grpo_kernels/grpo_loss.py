"""From log-probs to the GRPO loss: ratio, clip, KL and masked mean, with their gradient.

The formulas are in `grpo_kernels.objective`. One kernel, or torch operations where the objective
is not token-local, gives value and gradient; the backward multiplies the gradient by the loss's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autograd_support import dtypes_of, eager_only, refuse_double_backward, scaled_gradient
from .config import GRPOLossConfig
from .inputs import Layout, ValueChecks, check_tensor, flat_tokens, flatten
from .metrics import loss_metrics
from .objective import TokenInputs, token_local
from .tiles import Tiles, select_tiles, torch_tiles


class GRPOLossOutput(NamedTuple):
    """`loss`, a float32 scalar; `metrics`, name to 0-d tensor; `logps` and `entropy`, per token.

    The latter two are detached, float32, and `entropy` None where it was neither made nor given.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    logps: Tensor
    entropy: Tensor | None


@eager_only
def grpo_loss(
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    sampling_logps: Tensor | None = None,
    entropy: Tensor | None = None,
    config: GRPOLossConfig = GRPOLossConfig(),  # noqa: B008 - frozen
    num_items: float | Tensor | None = None,
    entropy_threshold: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> GRPOLossOutput:
    """The GRPO loss of per-token log-probs, with gradients for `logps` and `entropy`.

    Equivalent PyTorch, for on-policy `dapo` without a KL:

        loss = -((logps - logps.detach()).exp() * advantages[:, None] * mask).sum() / mask.sum()

    Args:
        logps: `[B, T]` or packed `[N]`, float32, bfloat16 or float16; computed in float32.
        advantages: `[B]`, `[B, T]` or `[N]`; `[B]` with packed input needs `cu_seqlens`.
        mask: of the shape of `logps`, bool or 0/1; None counts every token. Masked positions may
            hold anything, NaN included, in any argument.
        old_logps: the ratio's denominator, a constant of the shape of `logps`; None is on-policy.
        ref_logps: log-probs under the reference policy, likewise; needed when `config.beta` is
            not 0, and otherwise used for the `kl` metrics alone.
        sampling_logps: log-probs as the sampler reported them, likewise, NaN where it reported
            none; needed by `config.is_correction`, used by `config.off_policy_threshold`, and
            otherwise by the metrics alone.
        entropy: of the shape of `logps`; needed when `config.entropy_coef` is not 0 or
            `config.top_entropy_quantile` below 1, and otherwise used for the metric alone.
        config: what loss to compute. Its temperature has been applied already, to the logits.
        num_items: the `dapo` average's denominator, as in `fused_grpo_loss`.
        entropy_threshold: the entropy above which tokens train, as in `fused_grpo_loss`.
        cu_seqlens: `[B + 1]` int32 or int64 offsets of the sequences of a packed input; needed
            where the objective tells sequences apart.
        backend: `"auto"`, `"triton"` or `"torch"`, for the objectives that Triton has, those of
            which `config.one_pass` is true; the others are torch operations in any case.

    Returns:
        `loss`; `metrics` as in `fused_grpo_loss` (`entropy` only where it was given); `logps` and
        `entropy` as they came, detached.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. No value is
            read from a GPU: there, offending values end in a device-side assertion.
        RuntimeError: on double backward.

    Reference: `grpo_kernels.reference.grpo_loss`, in any dtype up to float64.
    """
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    check_tensor("logps", logps, dtypes=dtypes)
    tiles = select_tiles(backend, logps.device)
    checks = ValueChecks()
    layout = Layout.of("logps", logps, cu_seqlens, checks)
    inputs = flat_tokens(
        config, layout, checks, advantages, mask, old_logps=old_logps, ref_logps=ref_logps,
        sampling_logps=sampling_logps, num_items=num_items, entropy_threshold=entropy_threshold,
    )  # fmt: skip
    checks.check_without_sync()
    check_entropy_given(config, entropy)
    flat_entropy = None
    if entropy is not None:
        check_tensor("entropy", entropy, shape=layout.shape, dtypes=dtypes, device=layout.device)
        flat_entropy = flatten(entropy)
    loss, metrics = loss_of_tokens(config, inputs, flatten(logps), flat_entropy, tiles)
    detached = None if entropy is None else entropy.detach().float()
    return GRPOLossOutput(loss, metrics, logps.detach().float(), detached)


def check_entropy_given(config: GRPOLossConfig, entropy: Tensor | None) -> None:
    if entropy is not None:
        return
    for name, unused in (("entropy_coef", 0.0), ("top_entropy_quantile", 1.0)):
        value = getattr(config, name)
        if value != unused:
            raise ValueError(
                f"entropy: expected the entropy of every token, as config.{name} = {value}; "
                "got None"
            )


def loss_of_tokens(
    config: GRPOLossConfig,
    inputs: TokenInputs,
    logps: Tensor,
    entropy: Tensor | None,
    tiles: Tiles,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The differentiable loss of flat `logps [N]` and `entropy [N]`, and its metrics."""
    used = tiles if token_local(config, inputs) else torch_tiles
    job = _Job(config, inputs, used, torch.is_grad_enabled())
    loss, d_logps, d_entropy = _PolicyLoss.apply(logps, entropy, job)
    metrics = loss_metrics(
        config,
        inputs,
        logps.detach().float(),
        None if entropy is None else entropy.detach().float(),
        d_logps,
        d_entropy,
    )
    return loss, metrics


@dataclass(frozen=True)
class _Job:
    """Everything the Function needs that has no gradient."""

    config: GRPOLossConfig
    inputs: TokenInputs
    tiles: Tiles
    grad_enabled: bool


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logps: Tensor, entropy: Tensor | None, job: _Job
    ) -> tuple[Tensor | None, ...]:
        grad = job.grad_enabled and any(ctx.needs_input_grad)
        with torch.autocast(logps.device.type, enabled=False):
            policy = job.tiles.policy_loss(
                job.config,
                job.inputs,
                logps.float(),
                None if entropy is None else entropy.float(),
                grad=grad,
            )
        d_logps, d_entropy = policy.d_logps, policy.d_entropy
        ctx.save_for_backward(d_logps, d_entropy)
        ctx.dtypes = dtypes_of(logps, entropy)
        shown = [None if x is None else x.clone() for x in (d_logps, d_entropy)]
        ctx.mark_non_differentiable(*(x for x in shown if x is not None))
        return policy.loss, *shown

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("grpo_loss")
        scaled = (
            scaled_gradient(stored, d_loss, dtype)
            for stored, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None)

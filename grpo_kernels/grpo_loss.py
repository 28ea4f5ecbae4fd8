"""From log-probs to the GRPO loss: ratio, clip, KL and masked mean, with their gradient.

The formulas are in `grpo_kernels.objective`. One kernel gives value, gradient and metrics; the
backward multiplies the stored gradient by the loss's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autograd_support import eager_only, refuse_double_backward, scaled_gradient
from .inputs import Layout, ValueChecks, check_tensor, flat_tokens, flatten
from .objective import GRPOLossConfig, PolicySums, TokenInputs, metrics_from_sums
from .tiles import Tiles, select_tiles


class GRPOLossOutput(NamedTuple):
    """`loss`, a float32 scalar; `metrics`, name to 0-d tensor; `logps`, detached float32."""

    loss: Tensor
    metrics: dict[str, Tensor]
    logps: Tensor


@eager_only
def grpo_loss(
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    entropy: Tensor | None = None,
    config: GRPOLossConfig = GRPOLossConfig(),  # noqa: B008 - frozen
    num_items: float | Tensor | None = None,
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
            not 0, and otherwise used for the `kl` metric alone.
        entropy: of the shape of `logps`; needed when `config.entropy_coef` is not 0, and
            otherwise used for the metric alone.
        config: what loss to compute. Its temperature has been applied already, to the logits.
        num_items: `dapo`'s denominator, as in `fused_grpo_loss`.
        cu_seqlens: `[B + 1]` int32 or int64 offsets of the sequences of a packed input.
        backend: `"auto"`, `"triton"` or `"torch"`.

    Returns:
        `loss`; `metrics` as in `fused_grpo_loss` (`entropy` only where it was given); `logps` as
        they came, detached.

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
    tokens = flat_tokens(config, layout, checks, advantages, mask, old_logps, ref_logps, num_items)
    checks.check_without_sync()
    flat_entropy = None
    if entropy is not None:
        check_tensor("entropy", entropy, shape=layout.shape, dtypes=dtypes, device=layout.device)
        flat_entropy = flatten(entropy)
    elif config.entropy_coef:
        raise ValueError(
            f"entropy: expected the entropy of every token, as config.entropy_coef = "
            f"{config.entropy_coef}; got None"
        )
    loss, sums, ratio_max = _PolicyLoss.apply(
        flatten(logps), flat_entropy, config, tokens, tiles, torch.is_grad_enabled()
    )
    metrics = metrics_from_sums(
        PolicySums(sums, ratio_max),
        tokens.count,
        tokens.count,
        has_entropy=entropy is not None,
        has_kl=ref_logps is not None,
    )
    return GRPOLossOutput(loss, metrics, logps.detach().float())


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logps: Tensor,
        entropy: Tensor | None,
        config: GRPOLossConfig,
        tokens: TokenInputs,
        tiles: Tiles,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad = grad_enabled and any(ctx.needs_input_grad)
        with torch.autocast(logps.device.type, enabled=False):
            policy = tiles.policy_loss(
                config,
                tokens,
                logps.float(),
                None if entropy is None else entropy.float(),
                grad=grad,
            )
        sums, ratio_max = policy.totals
        ctx.save_for_backward(policy.d_logps, policy.d_entropy)
        ctx.dtypes = (logps.dtype, None if entropy is None else entropy.dtype)
        ctx.mark_non_differentiable(sums, ratio_max)
        return sums[0].clone(), sums, ratio_max

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("grpo_loss")
        scaled = (
            scaled_gradient(stored, d_loss, dtype)
            for stored, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None)

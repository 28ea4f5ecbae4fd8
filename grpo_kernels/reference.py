"""The slow truth: every public call in straight-line PyTorch, in any dtype up to float64.

Logits are materialised, gradients are autograd's, nothing is skipped. The dtype of the first
argument decides that of all arithmetic and of every result. Arguments mean what they mean in the
fast calls; of them, only shapes are checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import GRPOLossConfig
from .inputs import check_entropy_given, loss_inputs
from .layout import Layout, ValueChecks
from .metrics import loss_metrics
from .objective import policy_loss
from .outputs import GRPOLossOutput, LogprobOutput


def linear_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: str | torch.dtype = "fp32",
) -> Tensor:
    """`softcap(logit_scale * (hidden @ weight.T + low_rank + bias)) / temperature`, `[..., V]`.

    A dtype as `logits_dtype` is what the sum in brackets is rounded to; `"model"` is that of
    `hidden`, in which everything is computed here.
    """
    logits = hidden @ weight.to(hidden.dtype).T
    if low_rank is not None:
        lora_a_out, lora_b = (x.to(hidden.dtype) for x in low_rank)
        logits = logits + lora_a_out @ lora_b.T
    if bias is not None:
        logits = logits + bias.to(hidden.dtype)
    if isinstance(logits_dtype, torch.dtype):
        rounded = logits.detach().to(logits_dtype).to(logits.dtype)
        logits = logits + (rounded - logits).detach()
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / _last_dim(temperature, logits)


def selective_log_softmax(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """`log_softmax(logits / temperature)` at the targets."""
    log_p = (logits / _last_dim(temperature, logits)).log_softmax(-1)
    return log_p.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)


def kept_words(support: tuple[Tensor, Tensor], active: Tensor, V: int) -> Tensor:
    """The words of each token's set as a mask, bool `[..., V]`; all words where there is none."""
    ids, offsets = (x.tolist() for x in support)
    kept = torch.ones(active.numel(), V, dtype=torch.bool, device=active.device)
    for i, is_active in enumerate(active.reshape(-1).tolist()):
        words = ids[offsets[i] : offsets[i + 1]] if is_active else []
        if words:
            kept[i] = False
            kept[i, words] = True
    return kept.reshape(*active.shape, V)


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
    logits_dtype: str | torch.dtype = "fp32",
    support: tuple[Tensor, Tensor] | None = None,
) -> LogprobOutput:
    """Log-probs of the targets, entropy and logsumexp; 0 where masked."""
    if mask is None:
        mask = torch.ones_like(targets)
    active = mask.bool()
    # Masked positions must not reach a sum, even as NaN times 0.
    hidden = hidden.masked_fill(~active.unsqueeze(-1), 0.0)
    if low_rank is not None:
        low_rank = (low_rank[0].masked_fill(~active.unsqueeze(-1), 0.0), low_rank[1])
    if isinstance(temperature, Tensor):
        temperature = temperature.masked_fill(~active, 1.0)
    logits = linear_logits(
        hidden,
        weight,
        bias=bias,
        low_rank=low_rank,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        logits_dtype=logits_dtype,
    )
    targets = targets.long().masked_fill(~active, 0)
    if support is not None:
        kept = kept_words(support, active, logits.shape[-1])
        logits = logits.masked_fill(~kept, -torch.inf)
    log_p = logits.log_softmax(-1)
    logps = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    # p log p is 0 where p is: a word of logit -inf adds nothing.
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    entropy = -(log_p.exp() * finite).sum(-1)
    results = (logps, entropy, logits.logsumexp(-1))
    return LogprobOutput(*(x.masked_fill(~active, 0.0) for x in results))


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
    entropy_threshold: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> GRPOLossOutput:
    """`grpo_kernels.objective` over all tokens at once, differentiated by autograd."""
    checks = ValueChecks()
    layout = Layout.of("logps", logps, cu_seqlens, checks)
    inputs = loss_inputs(
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
        entropy_threshold=entropy_threshold,
        dtype=logps.dtype,
    )
    check_entropy_given(config, entropy)
    flat = logps.reshape(-1)
    flat_entropy = None if entropy is None else entropy.reshape(-1)
    loss = policy_loss(config, inputs, flat, flat_entropy)
    if ce_weights is not None:
        chosen = ce_weights.reshape(-1) != 0
        loss = loss - (ce_weights.reshape(-1)[chosen].to(flat.dtype) * flat[chosen]).sum()
    d_logps, d_entropy = _gradients(loss, flat, flat_entropy)
    metrics = loss_metrics(config, inputs, flat, flat_entropy, d_logps, d_entropy)
    detached = None if entropy is None else entropy.detach()
    return GRPOLossOutput(loss, metrics, logps.detach(), detached)


def _gradients(
    loss: Tensor, logps: Tensor, entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The loss's gradients per token, for the metric that counts tokens without any."""
    if not loss.requires_grad:
        return None, None
    wanted = [x for x in (logps, entropy) if x is not None and x.requires_grad]
    gradients = iter(torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True))
    d_logps = next(gradients) if logps.requires_grad else None
    d_entropy = next(gradients) if entropy is not None and entropy.requires_grad else None
    return torch.zeros_like(logps) if d_logps is None else d_logps, d_entropy


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
    ce_weights: Tensor | None = None,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    config: GRPOLossConfig = GRPOLossConfig(),  # noqa: B008 - frozen
    num_items: float | Tensor | None = None,
    entropy_threshold: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float | Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: str | torch.dtype = "fp32",
    support: tuple[Tensor, Tensor] | None = None,
) -> GRPOLossOutput:
    """`linear_logprobs`, then `grpo_loss`."""
    scored = mask
    if mask is not None and ce_weights is not None:
        scored = mask.bool() | (ce_weights != 0)
    out = linear_logprobs(
        hidden,
        weight,
        targets,
        bias=bias,
        low_rank=low_rank,
        mask=scored,
        temperature=config.temperature if temperature is None else temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        logits_dtype=logits_dtype,
        support=support,
    )
    return grpo_loss(
        out.logps,
        advantages,
        mask,
        old_logps=old_logps,
        ref_logps=ref_logps,
        sampling_logps=sampling_logps,
        ce_weights=ce_weights,
        entropy=out.entropy,
        config=config,
        num_items=num_items,
        entropy_threshold=entropy_threshold,
        cu_seqlens=cu_seqlens,
    )


def _last_dim(temperature: float | Tensor, logits: Tensor) -> float | Tensor:
    if isinstance(temperature, Tensor):
        return temperature.to(logits.dtype).unsqueeze(-1)
    return temperature

"""The slow truth: every public call in straight-line PyTorch, in any dtype up to float64.

Logits are materialized, gradients are autograd's, nothing is skipped. All arithmetic and results
have the dtype of the first argument. Arguments are as in the fast calls; only shapes are checked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .base.checks import ValueChecks
from .base.layout import Layout
from .base.outputs import GRPOLossOutput, LogprobOutput
from .head.lm_head import LMHead, Reference, Support
from .loss.config import GRPOLossConfig
from .loss.distillation import divergence_addends, make_divergence
from .loss.inputs import check_has_entropy, loss_inputs, tokens_in_loss
from .loss.metrics import loss_metrics
from .loss.objective import policy_objective, tokens_of


def linear_logits(
    hidden: Tensor, head: Tensor | LMHead, *, rounded_to: torch.dtype | None = None
) -> Tensor:
    """`softcap(logit_scale * (hidden @ weight.T + low_rank + bias)) / temperature`, `[..., V]`.

    `rounded_to`: the dtype to which each step is rounded, as in a model of that dtype: the product
    with the weight and the bias, the product of `low_rank`, their sum, the product with the scale,
    and the softcap's quotient, tanh and product. Gradients ignore the rounding. A raw logit of -inf
    stays -inf.
    """
    head = LMHead.of(head)
    raw = hidden @ head.weight.to(hidden.dtype).T
    if head.bias is not None:
        raw = raw + head.bias.to(hidden.dtype)
    if head.low_rank is not None:
        lora_a_out, lora_b = (x.to(hidden.dtype) for x in head.low_rank)
        adapter = lora_a_out @ lora_b.T
        if rounded_to is not None:
            raw, adapter = (_with_values(x, x.detach().to(rounded_to)) for x in (raw, adapter))
        raw = raw + adapter
    logits = raw
    if rounded_to is not None:
        rounded = raw.detach().to(rounded_to)
        logits = _with_values(raw, rounded)
    logits = logits * head.logit_scale
    if head.softcap is not None:
        banned = logits == -torch.inf
        capped = head.softcap * torch.tanh(logits.masked_fill(banned, 0.0) / head.softcap)
        logits = capped.masked_fill(banned, -torch.inf)
    if rounded_to is not None:
        # torch rounds the result of each operation on half-precision tensors.
        rounded = rounded * head.logit_scale
        if head.softcap is not None:
            rounded = torch.tanh(rounded / head.softcap) * head.softcap
        logits = _with_values(logits, rounded)
    return logits / _last_dim(head.temperature, logits)


def _with_values(x: Tensor, values: Tensor) -> Tensor:
    """`values` where x is finite, with gradients that pass to x unchanged."""
    return x + torch.where(x.isfinite(), values - x, 0.0).detach()


def selective_log_softmax(
    logits: Tensor, targets: Tensor, *, temperature: float | Tensor = 1.0
) -> Tensor:
    """`log_softmax(logits / temperature)` at the targets."""
    log_p = _log_softmax(logits / _last_dim(temperature, logits))
    return log_p.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    """`logits.log_softmax(-1)`, with the digits of 1 - p in the largest entry."""
    peak, place = logits.max(-1, keepdim=True)
    others = (logits - peak).exp().scatter(-1, place, 0.0).sum(-1, keepdim=True)
    return logits.log_softmax(-1).scatter(-1, place, -others.log1p())


def kept_entries(support: Support, active: Tensor, V: int) -> Tensor:
    """Each token's kept set as a mask, bool `[..., V]`; all True where there is none."""
    ids, offsets = (x.tolist() for x in support)
    in_set = torch.ones(active.numel(), V, dtype=torch.bool, device=active.device)
    for i, is_active in enumerate(active.reshape(-1).tolist()):
        entries = ids[offsets[i] : offsets[i + 1]] if is_active else []
        if entries:
            in_set[i] = False
            in_set[i, entries] = True
    return in_set.reshape(*active.shape, V)


def linear_logprobs(
    hidden: Tensor,
    head: Tensor | LMHead,
    targets: Tensor | None,
    mask: Tensor | None = None,
    *,
    support: Support | None = None,
    entries: bool = False,
    rounded_to: torch.dtype | None = None,
) -> LogprobOutput:
    """Log-probs of the targets, entropy and logsumexp; 0 where masked."""
    if targets is None:
        targets = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    many = targets.ndim == hidden.ndim
    each = targets if many else targets.unsqueeze(-1)
    active = torch.ones_like(each[..., 0], dtype=torch.bool) if mask is None else mask.bool()
    hidden, head = _masked(hidden, LMHead.of(head), active)
    logits = linear_logits(hidden, head, rounded_to=rounded_to)
    each = each.long().masked_fill(~active.unsqueeze(-1), 0)
    if support is not None:
        in_set = kept_entries(support, active, logits.shape[-1])
        logits = logits.masked_fill(~in_set, -torch.inf)
    log_p = _log_softmax(logits)
    logps = log_p.gather(-1, each).masked_fill(~active.unsqueeze(-1), 0.0)
    # p log p is 0 where p is 0: a logit of -inf adds nothing.
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    entropy = -(log_p.exp() * finite).sum(-1)
    others = [x.masked_fill(~active, 0.0) for x in (entropy, logits.logsumexp(-1))]
    if entries:
        assert support is not None
        ids, offsets = (x.long() for x in support)
        tokens = torch.arange(active.numel(), device=ids.device).repeat_interleave(offsets.diff())
        rows = log_p.reshape(-1, log_p.shape[-1])
        entry_logps = rows[tokens, ids.clamp(0, rows.shape[1] - 1)]  # masked tokens may have any
        return LogprobOutput(entry_logps.masked_fill(~active.reshape(-1)[tokens], 0.0), *others)
    return LogprobOutput(logps if many else logps.squeeze(-1), *others)


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
    kl: Tensor | None = None,
) -> GRPOLossOutput:
    """`grpo_kernels.loss.objective` over all tokens at once, differentiated by autograd.

    `kl`: the exact KL of each token.
    """
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
        dtype=logps.dtype,
        has_reference=kl is not None,
    )
    checks.read()
    if kl is not None:
        tokens = replace(tokens, kl=kl.reshape(-1))
    check_has_entropy(config, entropy)
    flat = logps.reshape(-1)
    flat_entropy = None if entropy is None else entropy.reshape(-1)
    loss = policy_objective(config, tokens_of(config, tokens, flat, flat_entropy))
    if ce_weights is not None:
        chosen = ce_weights.reshape(-1) != 0
        loss = loss - (ce_weights.reshape(-1)[chosen].to(flat.dtype) * flat[chosen]).sum()
    d_logps, d_entropy = _gradients(loss, flat, flat_entropy)
    metrics = loss_metrics(config, tokens, flat, flat_entropy, d_logps, d_entropy)
    detached = None if entropy is None else entropy.detach()
    kl = None if kl is None else kl.detach()
    return GRPOLossOutput(loss, metrics, logps.detach(), detached, kl=kl)


def _gradients(
    loss: Tensor, logps: Tensor, entropy: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The loss's gradients per token, for the metric that counts tokens without any."""
    if not loss.requires_grad:
        return None, None
    leaves = [x for x in (logps, entropy) if x is not None and x.requires_grad]
    gradients = iter(torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True))
    d_logps = next(gradients) if logps.requires_grad else None
    d_entropy = next(gradients) if entropy is not None and entropy.requires_grad else None
    return torch.zeros_like(logps) if d_logps is None else d_logps, d_entropy


def fused_grpo_loss(
    hidden: Tensor,
    head: Tensor | LMHead,
    targets: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    ce_weights: Tensor | None = None,
    support: Support | None = None,
    reference: Reference | None = None,
    rounded_to: torch.dtype | None = None,
    **loss_args: Any,
) -> GRPOLossOutput:
    """`linear_logprobs` and `divergence`, then `grpo_loss`, which takes `loss_args`."""
    scored, ref_logps = tokens_in_loss(mask, ce_weights, hidden), None
    out = linear_logprobs(hidden, head, targets, scored, support=support, rounded_to=rounded_to)
    if reference is not None:
        if loss_args.get("config", GRPOLossConfig()).exact_kl:
            loss_args["kl"] = divergence(hidden, head, reference, scored, rounded_to=rounded_to)
        else:
            with torch.no_grad():
                ref_hidden = reference.hidden.to(hidden.dtype)
                reference_out = linear_logprobs(ref_hidden, reference.head, targets, scored)
            ref_logps = loss_args["ref_logps"] = reference_out.logps
    loss = grpo_loss(
        out.logps, advantages, mask, ce_weights=ce_weights, entropy=out.entropy, **loss_args
    )
    return loss._replace(ref_logps=ref_logps)


def divergence(
    hidden: Tensor,
    head: Tensor | LMHead,
    reference: Reference,
    mask: Tensor | None = None,
    *,
    kind: str = "reverse",
    beta: float = 0.5,
    rounded_to: torch.dtype | None = None,
) -> Tensor:
    """The divergence of each token's softmax from the reference's; 0 where masked.

    `rounded_to`: of the logits of `hidden`.
    """
    divergence = make_divergence("kind", kind, beta)
    active = torch.ones_like(hidden[..., 0], dtype=torch.bool) if mask is None else mask.bool()
    states = reference.hidden.detach().to(hidden.dtype)
    policy = _masked(hidden, LMHead.of(head), active)
    other = _masked(states, LMHead.of(reference.head), active)
    s = linear_logits(*policy, rounded_to=rounded_to).log_softmax(-1)
    t = linear_logits(*other).detach().log_softmax(-1)
    return divergence_addends(s, t, divergence).sum(-1).masked_fill(~active, 0.0)


def _masked(hidden: Tensor, head: LMHead, active: Tensor) -> tuple[Tensor, LMHead]:
    """The states and the head with zeros at masked positions, which may hold NaN."""
    hidden = hidden.masked_fill(~active.unsqueeze(-1), 0.0)
    if head.low_rank is not None:
        a_out = head.low_rank[0].masked_fill(~active.unsqueeze(-1), 0.0)
        head = head.replace(low_rank=(a_out, head.low_rank[1]))
    if isinstance(head.temperature, Tensor) and head.temperature.ndim:
        head = head.replace(temperature=head.temperature.masked_fill(~active, 1.0))
    return hidden, head


def _last_dim(temperature: float | Tensor, logits: Tensor) -> float | Tensor:
    if isinstance(temperature, Tensor) and temperature.ndim:
        return temperature.to(logits.dtype).unsqueeze(-1)
    return temperature

"""Distillation over the whole vocabulary, from the hidden states of both models, without logits.

    for each chunk of rows:
        Z, Z'   = h W^T, h' W'^T                GEMMs 1 and 2, float32, two reused buffers
        s       = statistics(Z, Z')             one sweep over both, as the next two
        L       = divergence(Z, Z', s)
        D       = dL/dZ                         on the memory of Z
        dh, dW += D W, D^T h                    GEMMs 3 and 4, dW accumulated in float32

The weight of a token in the loss is a constant, so its gradient follows from its logits: one pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .base.autograd import (
    eager_under_compile,
    float16_scale,
    save_gradients,
    saved_gradients,
    scaled,
)
from .base.checks import suggests_names
from .base.outputs import DistillationOutput, Metrics
from .head.call import head_call
from .head.execution import Execution
from .head.lm_head import LMHead, Reference
from .head.plan import GradMode, call_of_reference, local_head, plan_head
from .kernels import StatGrads
from .kernels.divergences import DIVERGENCES
from .kernels.pair_stats import PairStats
from .loss.distillation import make_divergence
from .loss.inputs import number_of_items

METRICS = ("tokens", "divergence", "entropy", "ref_entropy", "agreement", "divergence_max")


@eager_under_compile
@suggests_names
def fused_distillation_loss(
    hidden: Tensor,
    head: Tensor | LMHead,
    reference: Reference,
    mask: Tensor | None = None,
    *,
    kind: str = "reverse",
    beta: float = 0.5,
    num_items: float | Tensor | None = None,
    execution: Execution = Execution(),  # noqa: B008 - frozen
) -> DistillationOutput:
    """Computes the divergence of a linear head's softmax from a reference's, and its gradients.

    Equivalent PyTorch for `kind="reverse"`, without storing the logits:

        s = (hidden @ weight.T).log_softmax(-1)
        t = (reference.hidden @ reference.head.T).log_softmax(-1)
        loss = ((s.exp() * (s - t)).sum(-1) * mask).sum() / mask.sum()

    Args:
        hidden: the student's hidden states, `[B, T, H]` or packed `[N, H]`, float32, bfloat16 or
            float16.
        head: the student's LM head, a weight `[V, H]` or an `LMHead`.
        reference: the teacher's hidden states on the same tokens, `[B, T, H']` or `[N, H']`, and
            head, `[V, H']`, with the same vocabulary: constants in float32, bfloat16 or float16.
            Slice off rows that are padding: `weight[:V]`.
        mask: `[B, T]` or `[N]`, bool or 0/1; None counts every token. Masked positions may hold
            anything, NaN included, in either model's states.
        kind: with s the student and t the teacher, `"reverse"`: KL(s || t), `"forward"`:
            KL(t || s), or `"jsd"`: `beta KL(t || m) + (1 - beta) KL(s || m)`, with
            `m = beta t + (1 - beta) s`.
        beta: the teacher's share of m in `"jsd"`, in (0, 1). As `beta` goes to 0, the loss divided
            by `beta` goes to the forward KL; as it goes to 1, the loss divided by `1 - beta` goes
            to the reverse KL.
        num_items: denominator of the loss, a number > 0 or 0-d tensor: the unmasked tokens of the
            optimizer step. None: the count of this call.
        execution: backend, memory and reproducibility.

    Returns:
        `loss`: float32 scalar, the sum over unmasked tokens divided by `num_items`.
        `metrics`: 0-d device tensors: `tokens`; `divergence` and `divergence_max`, mean and
            maximum over unmasked tokens; `entropy` and `ref_entropy`, in nats; `agreement`, the
            share of tokens for which student and teacher have the same most likely id.
        `divergence`: float32 in the shape of the mask, detached, 0 where masked.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
        RuntimeError: on double backward.

    Ids at -inf in both models are ignored. -inf in the teacher only makes the reverse KL infinite,
    in the student only the forward KL; the jsd is always finite.

    Source: generalised JSD and on-policy distillation, arXiv:2306.13649. Reference:
    `grpo_kernels.reference.divergence`, in any dtype up to float64.
    """
    divergence = make_divergence("kind", kind, beta)
    call = head_call(hidden, local_head(head), None, mask, None, execution, sampled=False)
    other = call_of_reference(call, reference)
    call = call.with_reference(other, divergence)
    spec = call.spec
    count = torch.full((), spec.layout.num_tokens, dtype=torch.float32, device=hidden.device)
    if spec.mask is not None:
        count = spec.mask.sum(dtype=torch.float32)
    items = number_of_items(num_items, count, spec.checks)
    if items is None:
        weight = 1.0 / count.clamp(min=1)
    elif isinstance(items, Tensor):
        weight = 1.0 / torch.where(items == 0, 1.0, items.float())
    else:
        weight = torch.full_like(count, 1.0 / (items or 1.0))
    plan = plan_head(
        call,
        None,
        GradMode.of(call, one_pass=True, other_grads=True),
        entropy=True,
        loss_settings={"kind": list(DIVERGENCES).index(kind), "beta": float(beta)},
    )
    loss, values = plan.run_with_retry(partial(_Distillation.apply, *call.tensors, weight))
    stats = PairStats(values)
    # Copies for the metrics, as the caller may change its mask and the result in place.
    mask = None if spec.mask is None else spec.mask.clone()
    metrics = Metrics(partial(_metrics, stats, mask, count))
    return DistillationOutput(loss, metrics, stats.divergence.clone().reshape(spec.layout.shape))


@torch.no_grad()
def _metrics(stats: PairStats, mask: Tensor | None, count: Tensor) -> dict[str, Tensor]:
    agrees = (stats.ref_at_peak == stats.ref_peak).float()
    agrees = agrees if mask is None else agrees * mask
    each = torch.stack([stats.divergence, stats.entropy, stats.ref_entropy, agrees])
    sums = each.sum(1) / count.clamp(min=1)
    most = stats.divergence.amax() if len(stats.divergence) else count.new_zeros(())
    return dict(zip(METRICS, (count, *sums.unbind(), most), strict=True))


class _Distillation(torch.autograd.Function):
    """The loop over chunks. Returns the loss, and the statistics of every row, detached."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *tensors, weight, plan = args
        N = len(tensors[0])
        values = tensors[0].new_zeros((PairStats.size(), N), dtype=torch.float32)
        with torch.autocast(weight.device.type, enabled=False):
            dtypes = plan.spec.dtype, *(x.dtype for x in tensors)
            scale = float16_scale(dtypes, lambda: weight)
            head, grads = plan.chunked_head(tensors), plan.gradients(tensors)
            for chunk in plan.rows.chunks():
                stats = head.forward(chunk)  # GEMMs 1 and 2
                values[:, chunk.index] = stats.values
                if any(plan.needs_grad):
                    d = scaled(weight, scale).expand(chunk.size)
                    head.backward(
                        chunk, grads, StatGrads(divergence=d.contiguous())
                    )  # GEMMs 3 and 4
        save_gradients(ctx, tensors, scale, grads.finalize())
        ctx.mark_non_differentiable(values)
        return weight * PairStats(values).divergence.sum(), values

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return (*saved_gradients(ctx, d_loss, "fused_distillation_loss"), *[None] * 2)

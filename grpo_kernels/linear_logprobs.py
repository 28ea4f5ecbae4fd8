"""Per-token log-probs and entropy of a linear head, differentiable, for any loss of the caller's.

Two passes, four GEMMs. The forward makes each chunk of logits once and keeps three numbers a row;
the backward, which only then knows the gradient of every log-prob, makes the logits again for the
rows that have one:

    forward    Z = h W^T;  lse, l, E = token_stats(Z)
    backward   Z = h W^T;  dZ = logit_grads_(Z);  dh = dZ W;  dW += dZ^T h
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autograd_support import (
    dtypes_of,
    eager_only,
    placed,
    power_of_two_scale,
    refuse_double_backward,
    scaled_gradient,
)
from .column_sampling import (
    BLIND_INFLATION,
    ColumnSampler,
    KeptColumns,
    Sampling,
    dense_rows,
    row_blocks,
)
from .head_gradients import HeadGradients
from .inputs import (
    Layout,
    ValueChecks,
    check_head,
    check_low_rank,
    check_target_ids,
    check_targets,
)
from .row_chunks import Chunk, HeadChunks, LowRank, RowPlan, gemm_dtype, plan_rows
from .tiles import LogitGradInputs, LogitTransform, Tiles, select_tiles


class LogprobOutput(NamedTuple):
    """Float32, in the shape of the targets, differentiable; 0 where masked.

    `entropy` (in nats) is None unless it was asked for.
    """

    logps: Tensor
    entropy: Tensor | None
    logsumexp: Tensor


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
    entropy: bool = False,
    backward: str = "exact",
    tolerance: float | None = None,
    seed: int | torch.Generator | None = None,
    backend: str = "auto",
    chunk_bytes: int | None = None,
) -> LogprobOutput:
    """Log-probs of the targets under a linear head, without ever holding the logits.

    Equivalent PyTorch:

        logits = (hidden @ weight.T + bias).float() / temperature
        logps = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    Args:
        hidden: `[B, T, H]` or packed `[N, H]`, float32, bfloat16 or float16. `hidden[..., t, :]`
            is the state that predicts `targets[..., t]`: the caller shifts.
        weight: `[V, H]`, the LM head; a frozen one costs no gradient work.
        targets: `[B, T]` or `[N]`, integer token ids in [0, V) wherever the mask is 1.
        bias: `[V]` or None.
        low_rank: `inner`, `[B, T, r]` or `[N, r]`, and `outer`, `[V, r]`, a LoRA on the head, as in
            `fused_grpo_loss`.
        mask: of the shape of `targets`, bool or 0/1; None computes every token. Masked positions
            may hold anything, cost nothing, and come back as 0.
        temperature: a number, or one value a token in the shape of `targets`; a constant.
        logit_scale: factor on `hidden @ weight.T + bias`.
        softcap: `softcap * tanh(logits / softcap)` before the temperature, as Gemma 2 has it.
        entropy: whether to compute the entropy, too.
        backward: `"exact"`, or `"sampled"`: unbiased gradients of hidden and weight from a few
            percent of the vocabulary's columns (`docs/sampled_backward.md`).
        tolerance: of the sampled backward's noise, relative to the gradient; None: 5e-3.
        seed: what the sampled backward draws from: an int, which gives the same gradients again
            and is to be another one in each call, a `torch.Generator`, or None, torch's own
            generator on the CPU. Ranks draw differently in any case.
            The columns are drawn in the forward and kept as 8 bytes each, at most V / 3 for
            each 128 tokens (256 on a GPU, fewer if a chunk has fewer); gradients of the entropy
            widen the noise, which is planned without them.
        backend: `"auto"`, `"triton"` or `"torch"`.
        chunk_bytes: budget for the buffer of logits. None: on a CPU a quarter of the weight's
            float32 gradient, within 16 and 160 MiB; on a GPU 1.5 GiB or a sixteenth of its memory.

    Returns:
        `logps`, `entropy` and `logsumexp` (of the logits after temperature), each with gradients
        for `hidden`, `weight` and `bias`. Rows whose gradient turns out to be 0 are skipped in
        the backward.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. Values on the
            device (target ids, a mask other than 0/1) are read together with the row count, in
            the forward's one device-to-host transfer; the backward has one, for its row count.
        RuntimeError: on double backward.

    Under autocast on a GPU the products are taken in its dtype, as in `fused_grpo_loss`.

    Reference: `grpo_kernels.reference.linear_logprobs`, in any dtype up to float64.
    """
    call = check_head_call(
        hidden, weight, bias, low_rank, targets, None, softcap, logit_scale, backend,
        Sampling.asked_for(backward, tolerance, seed),
    )  # fmt: skip
    layout, checks = call.layout, call.checks
    flat_mask = layout.flat_mask(mask, checks)
    check_target_ids(call.targets, flat_mask, weight.shape[0], checks)
    transform = call.transform(bias, temperature, flat_mask)
    job = LogprobJob(
        call.targets, flat_mask, transform, call.tiles, entropy, chunk_bytes, call.sampling
    )
    logps, entropies, logsumexp, _ = flat_logprobs(hidden, weight, bias, call.low_rank, job, checks)
    return LogprobOutput(
        logps.reshape(layout.shape),
        None if entropies is None else entropies.reshape(layout.shape),
        logsumexp.reshape(layout.shape),
    )


class HeadCall(NamedTuple):
    """The arguments that every call over a linear head shares, checked."""

    tiles: Tiles
    targets: Tensor  # int64 [N]
    layout: Layout
    checks: ValueChecks
    logit_scale: float
    softcap: float | None
    sampling: Sampling | None
    low_rank: tuple[Tensor | None, Tensor | None]  # inner [N, r], outer [V, r]

    def transform(
        self, bias: Tensor | None, temperature: float | Tensor, mask: Tensor | None
    ) -> LogitTransform:
        return LogitTransform(
            None if bias is None else bias.detach().contiguous(),
            self.logit_scale,
            self.softcap,
            self.layout.flat_temperature(temperature, mask, self.checks),
        )


def check_head_call(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_rank: tuple[Tensor, Tensor] | None,
    targets: Tensor,
    cu_seqlens: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    backend: str,
    sampling: Sampling | None,
) -> HeadCall:
    check_head(hidden, weight, bias, softcap, logit_scale)
    pair = check_low_rank(low_rank, hidden, weight)
    tiles = select_tiles(backend, hidden.device)
    flat_targets = check_targets(targets, hidden.shape[:-1], hidden.device)
    checks = ValueChecks()
    layout = Layout.of("targets", targets, cu_seqlens, checks)
    return HeadCall(
        tiles, flat_targets, layout, checks, float(logit_scale), softcap, sampling, pair
    )


@dataclass(frozen=True)
class LogprobJob:
    """Everything the Function needs that has no gradient, flat; `mask` None is all rows.

    `trained`: of them, those that may be given a gradient; None is all.
    """

    targets: Tensor
    mask: Tensor | None
    transform: LogitTransform
    tiles: Tiles
    entropy: bool
    chunk_bytes: int | None
    sampling: Sampling | None
    trained: Tensor | None = None


def flat_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_rank: tuple[Tensor | None, Tensor | None],
    job: LogprobJob,
    checks: ValueChecks,
) -> tuple[Tensor, Tensor | None, Tensor, dict[str, Tensor]]:
    """Log-probs, entropy and logsumexp of the rows of `hidden [..., H]`, each `[N]`.

    And what the sampled backward says of itself.
    """
    hidden = hidden.reshape(-1, weight.shape[1])
    plan = plan_rows(
        job.mask,
        job.trained if job.sampling is not None else None,
        checks,
        num_tokens=hidden.shape[0],
        weight=weight,
        chunk_bytes=job.chunk_bytes,
    )
    grad_enabled = torch.is_grad_enabled()
    return _LinearLogprobs.apply(hidden, weight, bias, *low_rank, job, plan, grad_enabled)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inner: Tensor | None,
        outer: Tensor | None,
        job: LogprobJob,
        plan: RowPlan,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, dict[str, Tensor]]:
        logps = torch.zeros(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        logsumexp, entropy = torch.zeros_like(logps), torch.zeros_like(logps)
        dtype = gemm_dtype(hidden, weight)
        operands = (hidden, weight, bias, inner, outer)
        head = HeadChunks(hidden, weight, dtype, plan.largest_chunk, _low_rank(operands))
        sampler: ColumnSampler | None = None
        samples: list[list[KeptColumns | None]] = []
        if job.sampling is not None and grad_enabled and any(ctx.needs_input_grad[:5]):
            sampler = ColumnSampler(job.sampling, head.V, hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in plan.chunks():
                rows, targets = chunk.rows, job.targets[chunk.rows]
                transform = job.transform.at(rows)
                logits = head.logits(head.rows(chunk))  # [C, V], not yet transformed
                stats = job.tiles.token_stats(logits, targets, transform, entropy=job.entropy)
                logps[rows], logsumexp[rows] = stats.logps, stats.logsumexp
                if stats.entropy is not None:
                    entropy[rows] = stats.entropy
                if sampler is None or not chunk.needs_grad:
                    continue
                blocks = row_blocks(chunk.size, hidden.device)
                if sampler.skips(blocks):
                    samples.append([None] * len(blocks))
                else:
                    # Every log-prob as if it had the same gradient: none is known yet.
                    ones = torch.ones_like(stats.logps)
                    grads = LogitGradInputs(stats.logps, stats.logsumexp, ones, ones)
                    squares, _ = job.tiles.column_scores(logits, targets, transform, grads, blocks)
                    drawn, _ = sampler.sample(squares, targets, blocks, BLIND_INFLATION)
                    samples.append([None if x is None else x.narrowed() for x in drawn])
        # Kept apart from the outputs, which the caller may change in place.
        kept = (logps.clone(), logsumexp.clone(), entropy.clone())
        ctx.save_for_backward(*operands, *kept)
        ctx.job, ctx.dtype = job, dtype
        ctx.plan, ctx.samples = plan, None if sampler is None else samples
        ctx.set_materialize_grads(False)
        sampled = {} if sampler is None else sampler.metrics()
        return logps, entropy if job.entropy else None, logsumexp, sampled

    @staticmethod
    def backward(
        ctx: Any,
        d_logps: Tensor | None,
        d_entropy: Tensor | None,
        d_logsumexp: Tensor | None,
        _: Any,
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_logprobs")
        *operands, logps, logsumexp, entropy = ctx.saved_tensors
        job: LogprobJob = ctx.job
        d_logps = torch.zeros_like(logps) if d_logps is None else d_logps.float().contiguous()
        d_prob = d_logps if d_logsumexp is None else d_logps - d_logsumexp.float()
        needed = (d_logps != 0) | (d_prob != 0)
        if d_entropy is not None:
            d_entropy = d_entropy.float().contiguous()
            needed |= d_entropy != 0
        if job.mask is not None:
            # Masked rows came back as the constant 0, whatever gradient their value is given.
            needed &= job.mask
        given = [x for x in (d_logps, d_prob, d_entropy) if x is not None]
        scale = _power_of_two_scale_of(given, needed)
        grads = LogitGradInputs(
            logps,
            logsumexp,
            scale * d_logps,
            scale * d_prob,
            None if d_entropy is None else entropy,
            None if d_entropy is None else scale * d_entropy,
        )
        wants = ctx.needs_input_grad[:5]
        with torch.autocast(logps.device.type, enabled=False):
            if ctx.samples is None:
                head = _exact_gradients(operands, job, grads, needed, ctx.dtype, wants)
            else:
                head = _sampled_gradients(operands, ctx, grads, needed, wants)
        unscaled = (
            scaled_gradient(gradient, 1 / scale, dtype, fresh=True)
            for gradient, dtype in zip(head.gradients(), dtypes_of(*operands), strict=True)
        )
        return (*unscaled, None, None, None)


def _exact_gradients(
    operands: Sequence[Tensor],
    job: LogprobJob,
    grads: LogitGradInputs,
    needed: Tensor,
    dtype: torch.dtype,
    wants: Sequence[bool],
) -> HeadChunks:
    hidden, weight = operands[:2]
    plan = plan_rows(
        needed,
        None,
        ValueChecks(),
        num_tokens=hidden.shape[0],
        weight=weight,
        chunk_bytes=job.chunk_bytes,
    )
    head = HeadChunks(hidden, weight, dtype, plan.largest_chunk, _low_rank(operands))
    head.want_gradients(wants, partial=plan.num_rows < hidden.shape[0])
    gradients = HeadGradients(head, job.tiles)
    for chunk in plan.chunks():
        rows = chunk.rows
        head_rows = head.rows(chunk)
        gradients.add(
            chunk, head_rows, head.logits(head_rows), job.targets[rows],
            job.transform.at(rows), grads.at(rows),
        )  # fmt: skip
    return head


def _sampled_gradients(
    operands: Sequence[Tensor],
    ctx: Any,
    grads: LogitGradInputs,
    needed: Tensor,
    wants: Sequence[bool],
) -> HeadChunks:
    """From the columns drawn in the forward: their logits alone are made again."""
    job: LogprobJob = ctx.job
    hidden, weight = operands[:2]
    # Of each block the rows that have a gradient, by their places in the forward's order.
    work: list[tuple[slice, KeptColumns | None]] = []
    place = 0
    trained = (chunk for chunk in ctx.plan.chunks() if chunk.needs_grad)
    for chunk, samples in zip(trained, ctx.samples, strict=True):
        blocks = row_blocks(chunk.size, hidden.device)
        parts = [(rows, None) for rows in dense_rows(blocks, samples)]
        parts += [(r, kept) for r, kept in zip(blocks, samples, strict=True) if kept is not None]
        work += [(slice(place + r.start, place + r.stop), kept) for r, kept in parts]
        place += chunk.size
    order = ctx.plan.order
    order = torch.arange(place, device=hidden.device) if order is None else order[:place]
    # The one wait for the device.
    places = needed[order].cpu().nonzero().squeeze(1)
    bounds = torch.tensor([(r.start, r.stop) for r, _ in work], dtype=torch.int64)
    found = torch.searchsorted(places, bounds).tolist()
    places = placed(places, hidden.device)
    rows_of = [order[places[begin:end]] for begin, end in found]
    largest = max(
        (len(r) for r, (_, kept) in zip(rows_of, work, strict=True) if kept is None), default=0
    )

    head = HeadChunks(hidden, weight, ctx.dtype, largest, _low_rank(operands))
    head.want_gradients(wants, partial=True, sampled=True)
    gradients = HeadGradients(head, job.tiles, row_sums=job.transform.softcap is None)
    for rows, (_, kept) in zip(rows_of, work, strict=True):
        if len(rows) == 0:
            continue
        chunk = Chunk(rows, len(rows), True)
        head_rows = head.rows(chunk)
        given = (job.targets[rows], job.transform.at(rows), grads.at(rows))
        if kept is None:
            gradients.add(chunk, head_rows, head.logits(head_rows), *given)
        else:
            logits = head.logits_of(head_rows, kept.ids.long())
            gradients.add_kept(chunk, head_rows, logits, *given, kept)
    return head


def _low_rank(operands: Sequence[Tensor | None]) -> LowRank | None:
    inner, outer = operands[3:]
    return None if inner is None or outer is None else (inner, outer)


def _power_of_two_scale_of(gradients: list[Tensor], needed: Tensor) -> Tensor:
    # Rows that are not needed may be given anything, NaN included.
    peaks = [torch.where(needed, x, 0.0).abs().amax() for x in gradients if x.numel()]
    return power_of_two_scale(torch.stack(peaks).amax() if peaks else needed.new_ones(()))

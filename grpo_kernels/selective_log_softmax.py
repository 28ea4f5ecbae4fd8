"""Log-probs of the targets from logits the caller already holds.

    forward    l = z_y - logsumexp(z),  z = logits / T
    backward   dlogits_j = dl * (1[j = y] - p_j) / T

The same backend functions as in the fused calls, on the caller's logits as one chunk: log_softmax
itself, a second tensor of the size of the logits, is never made. All arithmetic is float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autograd import eager_only, refuse_double_backward
from .backends import (
    Backend,
    LogitTransform,
    RowGrads,
    TokenStats,
    Words,
    select_backend,
)
from .config import check_choice
from .layout import (
    HEAD_DTYPES,
    Layout,
    ValueChecks,
    check_target_ids,
    check_targets,
    check_tensor,
    flatten,
)
from .support import FALLBACKS, check_support, indices, support_of


@eager_only
def selective_log_softmax(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    backend: str = "auto",
    support: tuple[Tensor, Tensor] | None = None,
    support_fallback: str = "error",
) -> Tensor:
    """Computes log-probs of the targets from logits, float32, with a gradient for the logits.

    Equivalent PyTorch:

        (logits.float() / temperature).log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    Args:
        logits: `[B, T, V]` or `[N, V]`, float32, bfloat16 or float16. May hold -inf.
        targets: `[B, T]` or `[N]`, integer ids in [0, V).
        temperature: a number, or one value per token in the shape of `targets`; a constant.
        backend: `"auto"`, `"triton"` or `"torch"`.
        support: the words that the sampler kept for each token, as in `fused_grpo_loss`: log-probs
            are of the softmax over these, and no other logit is read.
        support_fallback: as in `fused_grpo_loss`.

    Returns:
        Float32 log-probs in the shape of `targets`.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. No value is
            read from a GPU, where an id outside [0, V) ends in a device-side assertion; with a
            support one transfer reads its size and its checks.
        RuntimeError: on double backward.

    Reference: `grpo_kernels.reference.selective_log_softmax`, in any dtype up to float64.
    """
    check_tensor("logits", logits, dtypes=HEAD_DTYPES)
    if logits.ndim not in (2, 3) or logits.shape[-1] < 1:
        raise ValueError(f"logits: expected shape [B, T, V] or [N, V]; got {list(logits.shape)}")
    if logits.device.type == "meta":
        raise ValueError("logits: expected a tensor with values; got one on the meta device")
    selected = select_backend(backend, logits.device)
    V = logits.shape[-1]
    flat_targets = check_targets(targets, logits.shape[:-1], logits.device)
    checks = ValueChecks()
    layout = Layout.of("targets", targets, None, checks)
    check_target_ids(flat_targets, None, V, checks)
    transform = LogitTransform(temperature=layout.flat_temperature(temperature, None, checks))
    check_choice("support_fallback", support_fallback, FALLBACKS)
    if support is not None:
        words, others = _words_of(support, support_fallback, flat_targets, logits, checks)
        logps = _OfSupport.apply(logits, words, transform, selected)
        if len(others):
            rows = logits[_places(logits, others)]
            of_others = _SelectiveLogSoftmax.apply(
                rows, flat_targets[others], transform.at(others), selected
            )
            logps = logps.index_put((others,), of_others)
        return logps.reshape(layout.shape)
    checks.check_without_sync()
    logps = _SelectiveLogSoftmax.apply(logits, flat_targets, transform, selected)
    return logps.reshape(layout.shape)


def _words_of(
    support: object, fallback: str, targets: Tensor, logits: Tensor, checks: ValueChecks
) -> tuple[Words, Tensor]:
    """The words of all tokens, and the tokens `[C]` that have none."""
    ids, offsets = check_support(support, len(targets), logits.device)
    found = support_of(
        ids,
        offsets,
        fallback,
        targets=targets,
        mask=None,
        V=logits.shape[-1],
        bytes_per_element=logits.element_size(),
        rows_per_chunk=max(1, len(targets)),
        checks=checks,
        all_gathered=True,
    )
    (count,) = checks.read((~found.tokens).sum())
    return found.gathered, indices(~found.tokens, count)


def _chunks_of(logits: Tensor) -> list[tuple[slice, Tensor]]:
    """`[B, T, V]` as one chunk of rows or, where a slice such as `[:, :-1]` allows none, as B."""
    V = logits.shape[-1]
    rows = logits.numel() // V
    try:
        return [(slice(0, rows), logits.view(-1, V))]
    except RuntimeError:
        T = logits.shape[1]
        return [(slice(b * T, (b + 1) * T), chunk) for b, chunk in enumerate(logits)]


class _SelectiveLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, transform: LogitTransform, backend: Backend
    ) -> Tensor:
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        logps, logsumexp = torch.empty((2, targets.shape[0]), device=logits.device).unbind()
        with torch.autocast(logits.device.type, enabled=False):
            for rows, chunk in _chunks_of(logits):
                out = TokenStats(logps[rows], logsumexp[rows])
                backend.token_stats(
                    chunk, targets[rows], transform.at(rows), entropy=False, out=out
                )
        # A copy, as the caller may change the output in place.
        ctx.save_for_backward(logits, targets, logps, logsumexp)
        ctx.transform, ctx.backend = transform, backend
        return logps.clone()

    @staticmethod
    def backward(ctx: Any, d_logps: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("selective_log_softmax")
        logits, targets, logps, logsumexp = ctx.saved_tensors
        d_logps = flatten(d_logps).float()
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        flat_out = out.view(-1, out.shape[-1])
        all_grads = RowGrads.of(TokenStats(logps, logsumexp), d_logps)
        with torch.autocast(logits.device.type, enabled=False):
            for rows, chunk in _chunks_of(logits):
                grads = all_grads.at(rows)
                ctx.backend.logit_grads_(
                    chunk, targets[rows], ctx.transform.at(rows), grads, flat_out[rows]
                )
        return out, None, None, None


def _places(logits: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
    """The indices of flat `tokens` in `[B, T, V]` or `[N, V]`, which need not be contiguous."""
    if logits.ndim == 2:
        return (tokens,)
    T = logits.shape[1]
    return tokens // T, tokens % T


class _OfSupport(torch.autograd.Function):
    """Log-probs over the words of each token, `[N]`; 0 where there is none."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, words: Words, transform: LogitTransform, backend: Backend
    ) -> Tensor:
        z = logits[(*_places(logits, words.tokens), words.ids)].float()
        count = logits.shape[:-1].numel()
        stats = TokenStats(*torch.zeros((2, count), device=logits.device))
        if len(words):
            backend.word_stats(z, words, transform, stats)
        # The words alone: the caller may free or change the logits.
        ctx.save_for_backward(z, *stats[:2])
        ctx.words, ctx.transform, ctx.backend = words, transform, backend
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return stats.logps.clone()

    @staticmethod
    def backward(ctx: Any, d_logps: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward("selective_log_softmax")
        z, *stats = ctx.saved_tensors
        words = ctx.words
        out = torch.zeros(ctx.shape, dtype=ctx.dtype, device=z.device)
        if len(words):
            grads = RowGrads.of(TokenStats(*stats), flatten(d_logps).float())
            d_words = ctx.backend.word_grads(z, words, ctx.transform, grads)
            out.view(-1, ctx.shape[-1])[words.tokens, words.ids] = d_words.to(ctx.dtype)
        return out, None, None, None

"""Divergences from a teacher, from log-probs of several ids per token.

With s the policy's and t the teacher's probabilities of some ids of a token:

    forward   KL(t || s) = sum t (log t - log s)
    reverse   KL(s || t) = sum s (log s - log t)
    jsd       beta KL(t || m) + (1 - beta) KL(s || m),  m = beta t + (1 - beta) s

Over a kept set both are renormalized over its ids, so that only these rows of the head are
needed: `linear_logprobs(..., support=, entries=True)`. Over `targets [..., K]` they are
probabilities of the full softmax, and all other ids are one further outcome.

References: generalised JSD, arXiv:2306.13649; on-policy distillation from a teacher's top k,
arXiv:2306.13649 and the trainers of verl and TRL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.checks import FLOATS, INTEGERS, check_choice, check_number, check_tensor, saveable
from ..base.segments import RowsLogSoftmax, row_sums
from ..kernels.divergences import DIVERGENCES, Divergence


def topk_kl(
    logps: Tensor,
    teacher_logps: Tensor,
    offsets: Tensor | None = None,
    *,
    direction: str = "forward",
    beta: float = 0.5,
) -> Tensor:
    """Computes the divergence of teacher and policy from log-probs of some ids per token.

    Equivalent PyTorch, for `[..., K]` log-probs renormalized over the K, and "forward":

        t, s = (x.log_softmax(-1) for x in (teacher_logps, logps))
        divergence = (t.exp() * (t - s)).sum(-1)

    Args:
        logps: log-probs under the policy: `[..., K]` for K different ids per token, or `[E]` for
            all ids of a support.
        teacher_logps: log-probs of the same ids under the teacher, a constant of the same shape.
        offsets: `[N + 1]`, the offsets of the support, with `[E]`: both are renormalized over each
            set, and an empty set has divergence 0. None, with `[..., K]`: all other ids count as
            one.
        direction: `"forward"`, `"reverse"` or `"jsd"`.
        beta: with `"jsd"`, the teacher's share of the mixture, in (0, 1).

    Returns:
        float32 (float64 for float64), `[N]` or `[...]`, in nats, differentiable in `logps`.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
    """
    check_tensor("logps", logps, dtypes=FLOATS)
    check_tensor(
        "teacher_logps", teacher_logps, shape=logps.shape, dtypes=FLOATS, device=logps.device
    )
    divergence = make_divergence("direction", direction, beta)
    dtype = torch.promote_types(torch.float32, logps.dtype)
    s, t = logps.to(dtype), saveable(teacher_logps.detach()).to(dtype)
    if offsets is None:
        if logps.ndim < 2:
            raise ValueError(
                "offsets: expected those of the support with log-probs [E] of its entries; got None"
            )
        s, t = (torch.cat([x, _log_rest(x)[..., None]], -1) for x in (s, t))
        return divergence_addends(s, t, divergence).sum(-1)
    if logps.ndim != 1:
        raise ValueError(
            f"logps: expected shape [E], of the support's entries; got {list(logps.shape)}"
        )
    check_tensor("offsets", offsets, dtypes=INTEGERS[:2], device=logps.device)
    offsets = saveable(offsets).long()
    tokens = torch.repeat_interleave(offsets.diff(), output_size=len(s))
    s, t = (RowsLogSoftmax.apply(x, tokens, offsets)[0] for x in (s, t))
    return row_sums(divergence_addends(s, t, divergence), offsets)


def make_divergence(argument: str, name: str, beta: float) -> Divergence:
    """Returns the divergence of that name; an error names the caller's argument."""
    check_choice(argument, name, tuple(DIVERGENCES))
    return DIVERGENCES[name](check_number("beta", beta, "in (0, 1)"))


def divergence_addends(s: Tensor, t: Tensor, divergence: Divergence) -> Tensor:
    """The part of each outcome in the divergence, from log-probs `s` and `t` of one shape."""
    # An outcome that both exclude adds 0, as equal log-probs do: -inf - -inf would be NaN.
    none = (s == -torch.inf) & (t == -torch.inf)
    return divergence.addends(s.masked_fill(none, 0.0), t.masked_fill(none, 0.0))


def _log_rest(log_p: Tensor) -> Tensor:
    """The log of 1 - sum of the probabilities `[..., K]`; of an ulp of 1, if nothing is left."""
    if not log_p.shape[-1]:
        return log_p.sum(-1)
    # 1 - p of the likeliest by expm1: the difference cancels for a confident model.
    place = log_p.argmax(-1, keepdim=True)
    others = log_p.exp().scatter(-1, place, 0.0).sum(-1)
    rest = -log_p.gather(-1, place).squeeze(-1).expm1() - others
    return torch.where(rest > 0, rest, torch.finfo(log_p.dtype).eps).log()

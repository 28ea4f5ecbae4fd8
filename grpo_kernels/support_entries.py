"""Log-probs of every entry of the kept sets, each under its token's own softmax.

What a divergence over a teacher's top k needs: k rows of W per token, and no dense product. With
g_j the gradient of the log-prob of entry j, G their sum over the set, e and q those of entropy and
logsumexp,

    l_j = z_j - lse,    dL/dz_j = g_j - p_j (G - q + e (l_j + E))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import HeadCall, selected
from .autograd import refuse_double_backward
from .backends import RowGrads, TokenStats
from .dense import Gradients
from .outputs import LogprobOutput
from .routes import Routes


def entry_logprobs(call: HeadCall, routes: Routes, *, entropy: bool) -> LogprobOutput:
    """Log-probs `[E]` in the order of the support's ids, entropy and logsumexp `[N]`."""
    logps, entropies, logsumexp = _Entries.apply(*call.tensors, routes, entropy)
    shape = call.layout.shape
    entropies = None if entropies is None else entropies.reshape(shape)
    return LogprobOutput(logps, entropies, logsumexp.reshape(shape))


class _Entries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        *tensors, routes, wants_entropy = args
        sets, N = routes.sets, len(tensors[0])
        with torch.autocast(tensors[0].device.type, enabled=False):
            route = _route(routes, tensors, wants_entropy)
            logps = tensors[0].new_zeros(sets.size, dtype=torch.float32)
            lse, entropy = logps.new_zeros((2, N)).unbind()
            for rows in route.chunks():
                stats = route.sweep(rows)
                lse[rows.index] = stats.logsumexp
                if wants_entropy:
                    entropy[rows.index] = stats.entropy
                z = routes.call.transform.at(sets.entries.tokens).apply(sets.logits[:, None])
                of_entries = z.squeeze(1) - lse[sets.entries.tokens]
                logps[sets.places] = of_entries
        ctx.save_for_backward(*tensors, logps.clone(), entropy.clone())
        ctx.routes, ctx.wants_entropy = routes, wants_entropy
        ctx.set_materialize_grads(False)
        return logps, entropy if wants_entropy else None, lse

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor | None, d_entropy: Tensor | None, d_logsumexp: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_double_backward("linear_logprobs")
        # Dense, as kernels address them: autograd's may be expanded, or a column of another tensor.
        d_logps, d_entropy, d_logsumexp = (
            None if x is None else x.contiguous() for x in (d_logps, d_entropy, d_logsumexp)
        )
        *tensors, logps, entropy = ctx.saved_tensors
        routes, sets = ctx.routes, ctx.routes.sets
        grads = Gradients(tensors, ctx.needs_input_grad[: len(tensors)], every_row=False)
        entries = sets.entries
        if len(entries):
            with torch.autocast(logps.device.type, enabled=False):
                d = _d_logits(ctx, logps[sets.places], d_logps, d_entropy, d_logsumexp, entropy)
                _route(routes, tensors, ctx.wants_entropy).add_products(d, grads)
        return (*grads.all(), None, None)


def _route(routes: Routes, tensors: Any, entropy: bool) -> Any:
    """The route of the tokens that have a set: there are no others."""
    return routes.of(tensors, routes.plan, entropy=entropy, keeps=False, draws=False)[-1]


def _d_logits(
    ctx: Any, logps: Tensor, d_logps: Tensor | None, d_entropy: Tensor | None,
    d_logsumexp: Tensor | None, entropy: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of the entries' raw logits `[E]`."""
    sets, call = ctx.routes.sets, ctx.routes.call
    tokens = sets.entries.tokens
    g = torch.zeros_like(logps) if d_logps is None else d_logps.float()[sets.places]
    of_set = _sums(ctx, g)[tokens]
    others = [None if x is None else x[tokens] for x in (d_entropy, d_logsumexp)]
    # As of a target with all of the set's gradient, but for what belongs to other entries.
    stats = TokenStats(logps, torch.zeros_like(logps), entropy[tokens])
    d = RowGrads.of(stats, of_set, *others).at_target - (of_set - g)
    local = call.transform.at(tokens)
    raw = local.slope(sets.logits[:, None])
    d = d * (raw.squeeze(1) if isinstance(raw, Tensor) else raw)
    # Tokens without a gradient have no part in any product, whatever their states hold.
    needed = _sums(ctx, (g != 0).float()) != 0
    for x in (d_entropy, d_logsumexp):
        needed = needed if x is None else needed | (x != 0)
    return selected(needed[tokens], d, 0.0)


def _sums(ctx: Any, x: Tensor) -> Tensor:
    """The sums `[N]` of the entries' values `[E]` over each token's set, in one order."""
    entries, backend = ctx.routes.sets.entries, ctx.routes.call.backend
    ones, first = x.new_ones((1, 1)), torch.zeros_like(entries.ids)
    return backend.segment_sums(x, first, entries.offsets, ones, torch.float32, None).squeeze(1)

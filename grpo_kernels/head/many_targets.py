"""Several targets per token: their log-probs under the one softmax of the token's logits.

With g_k the gradient of l_k = z_{y_k} - lse, G their sum, e and q those of entropy and logsumexp,

    dL/dz_j = sum over k with y_k = j of g_k  -  p_j (G - q + e (z_j - lse + E))

The sweep and the GEMMs are those of one target. The K logits of a row are picked from it while it
is there; in the gradient their K entries are set again, each from all targets that are its id, so
that it is rounded once and no order of a sum matters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels import RowGrads, TokenStats
from .dense import Dense
from .plan import Chunk


class ManyTargets(Dense):
    """Rows `[C, V]` with K targets each; `call.targets` is `[N, K]`, a log-prob `[C, K]`."""

    ids: Tensor  # of the targets of the rows in flight, [C, K]; -1 of those that are elsewhere

    def _take(self, rows: Chunk) -> None:
        super()._take(rows)
        self.ids = self.targets
        # The first of them is the one that kernels know of.
        self.targets = self.ids[:, 0].contiguous()
        self.places = self.ids.clamp(min=0)
        self.picked = torch.empty(self.ids.shape, dtype=torch.float32, device=self.ids.device)

    def logits(self, part: slice) -> Tensor:
        found = super().logits(part)
        self.picked[part] = found.gather(1, self.places[part]).float()
        return found

    def whole(self, stats: TokenStats) -> TokenStats:
        z = self.transform.apply(self.ranks.sum(self.picked, self.ids))
        return stats._replace(logps=z - stats.logsumexp[:, None])

    def d_logits(
        self, d_logps: Tensor, d_entropy: Tensor | None, d_logsumexp: Tensor | None
    ) -> Tensor:
        self.stats_of_all, self.given = self.stats, (d_logps, d_entropy, d_logsumexp)
        self.stats = self.stats._replace(logps=self.stats.logps[:, 0].contiguous())
        return super().d_logits(d_logps.sum(1), d_entropy, d_logsumexp)

    def logit_grads(self, part: slice, logits: Tensor, grads: RowGrads, out: Tensor) -> None:
        super().logit_grads(part, logits, grads, out)
        stats = self.stats_of_all.at(part)
        d_logps, *others = (None if x is None else x[part] for x in self.given)
        columns = [None if x is None else x[:, None] for x in others]
        assert d_logps is not None
        # As of one target with all of the gradient, but for what belongs to others.
        of_all = RowGrads.of(_columns(stats), d_logps.sum(1, keepdim=True), *columns)
        d = of_all.at_target - _of_others(self.ids[part], d_logps)
        transform = self.transform.at(part)
        slope = transform.slope(self.picked[part])
        self._set(part, out, (d * slope).to(out.dtype))

    def _set(self, part: slice, out: Tensor, d: Tensor) -> None:
        """Sets the targets' entries of `out [c, V]` to `d [c, K]`, equal where ids are."""
        # For those elsewhere an entry that is here is set once more, to what it is.
        ids = self.ids[part]
        first = (ids >= 0).int().argmax(1, keepdim=True)
        place = ids.gather(1, first)
        value = torch.where(place < 0, out[:, :1], d.gather(1, first))
        out.scatter_(
            1, torch.where(ids < 0, place.clamp(min=0), ids), torch.where(ids < 0, value, d)
        )


def _columns(stats: TokenStats) -> TokenStats:
    """The same, with one column where there is one number per row."""
    entropy = None if stats.entropy is None else stats.entropy[:, None]
    return TokenStats(stats.logps, stats.logsumexp[:, None], entropy)


def _of_others(ids: Tensor, d_logps: Tensor) -> Tensor:
    """The gradient of the targets of each row that are not this one's id, `[C, K]`.

    Sums of what comes before the run of its id, and after: no difference of sums, which would have
    no digits beside a target that has nearly all of the probability.
    """
    ids, order = ids.sort(1)
    g = d_logps.gather(1, order)
    before = pad(g.cumsum(1), (1, 0))
    after = pad(g.flip(1).cumsum(1), (1, 0)).flip(1)
    begins, ends = (torch.searchsorted(ids, ids, right=right) for right in (False, True))
    others = before.gather(1, begins) + after.gather(1, ends)
    return torch.empty_like(others).scatter_(1, order, others)

"""Several targets per token: their log-probs under the one softmax of the token's logits.

With g_k the gradient of l_k = z_{y_k} - lse, G their sum, e and q those of entropy and logsumexp,

    dL/dz_j = sum over k with y_k = j of g_k  -  p_j (G - q + e (z_j - lse + E))

The sweep and the GEMMs treat a row as if it had one target t, the likeliest of its K: only t's
probability can be nearly 1, so l_t + (z_k - z_t) loses no digits of any l_k. The forward picks the
K logits from the row; the backward sets their entries of the gradient anew, each from all targets
with its id: rounded once, and independent of the order of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..base.sequences import widened
from ..kernels import RowGrads, StatGrads, TokenStats
from .chunked_head import TargetReadout
from .row_plan import Chunk


class MultiTargetReadout(TargetReadout):
    """K targets of each row: `spec.targets` is `[N, K]`, log-probs are `[C, K]`."""

    ids: Tensor  # of the targets of the rows in flight, [C, K]; -1 where another rank has them

    def select(self, chunk: Chunk) -> None:
        super().select(chunk)
        self.ids = self.targets
        # The kernels' one target per row; `forward` chooses the likeliest.
        self.targets = self.ids[:, 0].clone()
        self.picked = torch.empty(self.ids.shape, dtype=torch.float32, device=self.ids.device)

    def _pick(self, strip: slice, logits: Tensor) -> None:
        self.picked[strip] = logits.gather(1, self.ids[strip].clamp(min=0)).float()

    def forward(self, strip: slice, logits: Tensor) -> None:
        self._pick(strip, logits)
        ids = self.ids[strip]
        top = self.picked[strip].masked_fill(ids < 0, -torch.inf).argmax(1, keepdim=True)
        self.targets[strip] = ids.gather(1, top).squeeze(1)
        super().forward(strip, logits)

    def finish(self) -> TokenStats:
        stats = super().finish()
        z = self.transform.apply(self.ranks.sum(self.picked.masked_fill(self.ids < 0, 0.0)))
        below = (z - z.amax(1, keepdim=True)).masked_fill_(z == -torch.inf, -torch.inf)
        self.stats = stats._replace(logps=stats.logps[:, None] + below)
        return self.stats

    def set_grads(self, d_stats: StatGrads) -> None:
        assert d_stats.logps is not None
        stats, total = self.stats, d_stats._replace(logps=d_stats.logps.sum(1))
        first = stats._replace(logps=stats.logps[:, 0].contiguous())
        self.grads = RowGrads.of(first, total)
        same, others = _sums_by_id(self.ids, d_stats.logps)
        d_columns = total.each(lambda x: x[:, None])._replace(logps=same)
        columns = RowGrads.of(_columns(stats), d_columns)
        self.d_targets = columns.d_target - stats.logps.exp() * others

    def backward(self, strip: slice, logits: Tensor, out: Tensor) -> None:
        self._pick(strip, logits)
        super().backward(strip, logits, out)
        slope = self.transform.at(strip).slope(self.picked[strip])
        self._set(strip, out, (self.d_targets[strip] * slope).to(out.dtype))

    def _set(self, strip: slice, out: Tensor, d: Tensor) -> None:
        """Sets the targets' entries of `out [c, V]` to `d [c, K]`, equal where ids are."""
        # scatter_ writes K columns. Targets on other ranks repeat a local target with the same
        # value, or column 0 unchanged if none is local.
        ids = self.ids[strip]
        first = (ids >= 0).int().argmax(1, keepdim=True)
        place = ids.gather(1, first)
        value = torch.where(place < 0, out[:, :1], d.gather(1, first))
        out.scatter_(
            1, torch.where(ids < 0, place.clamp(min=0), ids), torch.where(ids < 0, value, d)
        )


def _columns(stats: TokenStats) -> TokenStats:
    """The statistics with shape `[C, 1]` for one number per row."""
    entropy = None if stats.entropy is None else stats.entropy[:, None]
    return TokenStats(stats.logps, stats.logsumexp[:, None], entropy)


def _sums_by_id(ids: Tensor, d_logps: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of a row's gradients over the targets with the same id, and over the others.

    Both are summed directly: one as the row's sum minus the other would lose its digits.
    """
    ids, order = ids.sort(1)
    g = widened(d_logps.gather(1, order))
    before = pad(g.cumsum(1), (1, 0))
    after = pad(g.flip(1).cumsum(1), (1, 0)).flip(1)
    begins, ends = (torch.searchsorted(ids, ids, right=right) for right in (False, True))
    same = before.gather(1, ends) - before.gather(1, begins)
    others = before.gather(1, begins) + after.gather(1, ends)
    return (
        torch.empty_like(d_logps).scatter_(1, order, same.to(d_logps.dtype)),
        torch.empty_like(d_logps).scatter_(1, order, others.to(d_logps.dtype)),
    )

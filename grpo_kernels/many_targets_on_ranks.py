"""Several targets per token, whose rows of the head lie on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .many_targets import ManyTargets
from .row_plan import Chunk
from .vocab_parallel import VocabParallel


class ManyOnRanks(ManyTargets, VocabParallel):
    """Rows of logits of which each rank has some columns, and some of the K targets.

    Raw logits of the targets are added up over the ranks, 4 bytes each.
    """

    def _take(self, rows: Chunk) -> None:
        super()._take(rows)
        self.all_here, self.here = self.here, self.here[:, 0]

    def whole(self, picked: Tensor) -> Tensor:
        total, work = self.shard.sum(torch.where(self.all_here, picked, 0.0), None)
        work.wait()
        return total

    def known(self, part: slice) -> Tensor:
        # Those elsewhere are none of those that are here.
        return torch.where(self.all_here[part], self.ids[part], -1)

    def set_targets(self, part: slice, out: Tensor, d: Tensor) -> None:
        # The first column stands for targets elsewhere: its own entry goes there again.
        ids, here = self.ids[part], self.all_here[part]
        of_first = here & (ids == 0)
        first = torch.where(of_first, d, 0.0).sum(1) / of_first.sum(1).clamp(min=1)
        first = torch.where(of_first.any(1), first.to(d.dtype), out[:, 0])
        super().set_targets(part, out, torch.where(here, d, first[:, None]))

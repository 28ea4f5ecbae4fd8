"""Several targets per token, whose rows of the head lie on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .many_targets import ManyTargets
from .vocab_parallel import VocabParallel


class ManyOnRanks(ManyTargets, VocabParallel):
    """Rows of logits of which each rank has some columns, and some of the K targets.

    Raw logits of the targets are added up over the ranks, 4 bytes each.
    """

    def whole(self, picked: Tensor) -> Tensor:
        total = torch.where(self.ids < 0, 0.0, picked)
        self.shard.sum(total).wait()
        return total

    def set_targets(self, part: slice, out: Tensor, d: Tensor) -> None:
        # For those elsewhere an entry that is here is set once more, to what it is.
        ids = self.ids[part]
        first = (ids >= 0).int().argmax(1, keepdim=True)
        place = ids.gather(1, first)
        value = torch.where(place < 0, out[:, :1], d.gather(1, first))
        place = place.clamp(min=0)
        out.scatter_(1, torch.where(ids < 0, place, ids), torch.where(ids < 0, value, d))

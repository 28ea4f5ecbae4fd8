"""What a step sampled, and how it is cut into micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from .data import Problem
from .rollout import Completion


@dataclass
class Samples:
    """What one process sampled in a step: `B` completions, those of a prompt together."""

    problems: list[Problem]
    prompts: list[list[int]]
    completions: list[Completion]
    texts: list[str]
    rewards: Tensor  # [B, R], NaN where a function does not apply
    totals: Tensor  # [B], of the rewards, weighed
    advantages: Tensor  # [B]
    mask: Tensor  # [B, T], int64
    right: list[bool]  # empty where problems have no answer
    old_logps: Tensor | None = None  # [B, T], as all that follow
    ref_logps: Tensor | None = None
    sampling_logps: Tensor | None = None
    entropy_threshold: Tensor | None = None  # 0-d
    logps: Tensor | None = None  # of the last update that saw them, 0 where none did

    @cached_property
    def counted(self) -> list[int]:
        """How many tokens of each completion count."""
        counts: list[int] = self.mask.sum(1).tolist()
        return counts

    @cached_property
    def has_advantage(self) -> list[bool]:
        """Whether that of each completion is not 0."""
        nonzero: list[bool] = (self.advantages != 0).tolist()
        return nonzero

    @property
    def lengths(self) -> list[int]:
        return [len(c.token_ids) for c in self.completions]


def micro_batches(
    rows: Sequence[int], size: int, prompts: Sequence[Sequence[int]], lengths: Sequence[int],
    *, shared: bool,
) -> list[list[int]]:  # fmt: skip
    """Rows in parts of at most `size`: by length, or by prompt and length, as takes fewer tokens.

    Completions of one prompt together save encoding it again, completions of one length padding.
    """
    group_length: dict[tuple[int, ...], int] = defaultdict(int)
    keys = {i: tuple(prompts[i]) for i in rows}
    for i in rows:
        group_length[keys[i]] = max(group_length[keys[i]], lengths[i])

    def tokens(part: Sequence[int]) -> int:
        longest = max(len(keys[i]) for i in part)
        encoded = len({keys[i] for i in part}) if shared else len(part)
        return encoded * longest + len(part) * max(lengths[i] for i in part)

    orders = (
        sorted(rows, key=lambda i: (lengths[i], keys[i], i)),
        sorted(rows, key=lambda i: (group_length[keys[i]], keys[i], lengths[i], i)),
    )
    plans = [[list(o[i : i + size]) for i in range(0, len(o), size)] for o in orders]
    return min(plans, key=lambda plan: sum(map(tokens, plan)))

"""The data of an explanation: numbers per token, per sequence and per group, and ranked causes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from torch import Tensor

SHARES = ("loss_share", "gradient_share", "kl_share")


@dataclass(frozen=True)
class Cause:
    """A reason for the step's loss, with its share of the step and the options that bound it."""

    name: str
    share: float  # of the step, 0 to 1
    text: str
    remedy: str
    tokens: list[tuple[int, int]]  # sequence and position, worst first, at most 20


@dataclass(frozen=True)
class Explanation:
    """Numbers per token of one step, their sums, and what stands out."""

    columns: dict[str, Tensor]  # float32 [N] on the CPU, NaN where a token has none
    sequence: Tensor  # int64 [N], non-decreasing
    position: Tensor  # int64 [N], index of the token in its completion
    sequences: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    causes: list[Cause]
    texts: list[list[str]] | None
    token_ids: Tensor | None  # int64 [N]
    loss: float | None

    def __str__(self) -> str:
        causes = (f"{x.share:4.0%}  {x.name}: {x.text}\n      {x.remedy}" for x in self.causes)
        return "\n".join(causes) or "nothing stands out"


def group_sums(sequences: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The shares, and the mean and spread of the rewards, of each group, by its first sequence."""
    members: dict[int | None, list[int]] = {}
    for i, row in enumerate(sequences):
        members.setdefault(row["group"], []).append(i)
    groups = []
    for group, ids in members.items():
        rows = [sequences[i] for i in ids]
        sums = {
            x: math.fsum(row[x] for row in rows) for x in SHARES if all(x in row for row in rows)
        }
        rewards = [row["reward"] for row in rows if not math.isnan(row.get("reward", math.nan))]
        known = {"reward": fmean(rewards), "reward_std": pstdev(rewards)} if rewards else {}
        groups.append({"group": group, "sequences": ids, **sums, **known})
    return groups

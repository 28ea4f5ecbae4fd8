"""The data of an explanation: numbers per token, per sequence and per group, and ranked causes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .page import step_page
from .records import write_jsonl

SHARES = ("loss_share", "gradient_share", "kl_share")


@dataclass(frozen=True)
class Cause:
    """A reason for the step's loss, its share of the step, and options that help."""

    name: str
    share: float  # of the step, 0 to 1
    text: str
    remedy: str
    tokens: list[tuple[int, int]]  # sequence and position, worst first, at most 20


@dataclass(frozen=True)
class Explanation:
    """Columns per token of one step, their sums and the causes; `print` shows the causes."""

    columns: dict[str, Tensor]  # float32 [N] on the CPU, NaN where a token has none
    sequence: Tensor  # int64 [N], non-decreasing
    position: Tensor  # int64 [N], index of the token in its completion
    sequences: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    causes: list[Cause]
    texts: list[list[str]] | None  # of the tokens of the columns, per sequence
    token_ids: Tensor | None  # int64 [N]
    loss: float | None

    def __str__(self) -> str:
        lines = []
        for cause in self.causes:
            head = f"{100 * cause.share:3.0f} %  {cause.name}: {cause.text}"
            lines += textwrap.wrap(head, 100, subsequent_indent=" " * 7)
            lines += textwrap.wrap(f"-> {cause.remedy}", 100, initial_indent=" " * 7,
                                   subsequent_indent=" " * 10)  # fmt: skip
        return "\n".join(lines) or f"no cause stands out: {self._largest()}"

    def _largest(self) -> str:
        share = self.columns.get("gradient_share")
        if share is None or not share.numel():
            return "no token counts" if share is not None else "no gradient is known"
        if not share.any():
            return "no token has a gradient"
        i, rows = int(share.argmax()), [row["gradient_share"] for row in self.sequences]
        return (
            f"the largest shares of the gradient are {100 * share[i]:.1f} % (sequence "
            f"{self.sequence[i]}, token {self.position[i]}) and {100 * max(rows):.1f} % (sequence "
            f"{rows.index(max(rows))})"
        )

    def write(self, path: str | Path) -> None:
        """Writes a page (`.html`) or a row per sequence (`.jsonl`), over an existing file."""
        path = Path(path)
        if path.suffix == ".html":
            path.write_text(step_page(self, path.name, path=path), encoding="ascii")
        elif path.suffix == ".jsonl":
            write_jsonl(self, path)
        else:
            got = repr(path.suffix or str(path))
            raise ValueError(f"path: expected a name in .html or .jsonl; got {got}")


def shares(x: Tensor) -> Tensor:
    """Absolute values as shares of their sum; values that are not finite share all of it."""
    size = x.abs() if x.isfinite().all() else (~x.isfinite()).to(x.dtype)
    # Relative to the largest, so that no sum overflows.
    size = size / size.max().clamp(min=torch.finfo(x.dtype).tiny) if size.numel() else size
    return size / size.sum(dtype=torch.float64).clamp(min=1).to(x.dtype)


def sums_of(x: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Sums over each of `count` sequences, float64 `[count]`."""
    return x.new_zeros(count, dtype=torch.float64).index_add_(0, sequence, x.double())


def sequence_shares(
    columns: Mapping[str, Tensor], sequence: Tensor, count: int
) -> dict[str, list[float]]:
    """Shares of each sequence in the step's loss, gradient and KL, if there is one."""
    parts = {"loss_share": shares(columns["loss"]), "gradient_share": columns["gradient_share"]}
    if "kl" in columns:  # none at tokens outside of the mask
        parts["kl_share"] = shares(torch.where(columns["advantage"].isnan(), 0.0, columns["kl"]))
    return {name: sums_of(x, sequence, count).tolist() for name, x in parts.items()}


def group_sums(sequences: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The shares, and the mean and spread of the rewards, of each group, by its first sequence."""
    members: dict[int | None, list[int]] = {}
    for i, row in enumerate(sequences):
        members.setdefault(row["group"], []).append(i)
    groups = []
    for group, ids in members.items():
        rows = [sequences[i] for i in ids]
        sums = {x: sum(row.get(x, math.nan) for row in rows) for x in SHARES if x in rows[0]}
        numbers = [row.get("reward", math.nan) for row in rows]
        rewards = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        groups.append({"group": group, "sequences": ids, **sums})
        if len(rewards := rewards[~rewards.isnan()]):  # of an infinite one the spread is NaN
            spread = rewards.std(correction=0).item()
            groups[-1] |= {"reward": rewards.mean().item(), "reward_std": spread}
    return groups

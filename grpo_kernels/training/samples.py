"""`Samples`: the completions of a step, with rewards, advantages and log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import batch_support
from ..base.layout import to_device
from .data import Problem, level_of
from .micro_batches import Plan, Size, plan_micro_batches
from .policy import Batch
from .rollout import Completion, pad


@dataclass
class Samples:
    """One process's part of a rollout: `B` completions of `P` prompts, sorted by prompt."""

    problems: list[Problem]  # [P]
    prompts: list[list[int]]  # [P], token ids
    prompt_of: list[int]  # [B], index into `prompts`
    completions: list[Completion]  # [B]
    texts: list[str]  # [B], what the policy wrote
    rewards: Tensor  # [B, R], NaN where a function does not apply
    totals: Tensor  # [B], weighted sums of the rewards
    advantages: Tensor  # [B]
    mask: Tensor  # [B, T], int64
    correct: list[bool]  # [B], or empty where problems have no answer
    transcripts: list[str]  # [B], the texts with what the policy was given between
    replay_support: bool = False  # whether log-probs are over the completions' supports
    old_logps: Tensor | None = None  # [B, T], as all that follow
    ref_logps: Tensor | None = None
    sampling_logps: Tensor | None = None
    ce_weights: Tensor | None = None
    entropy_threshold: float | None = None  # of the whole rollout
    logps: Tensor | None = None  # in the last update that saw them, 0 where none did

    @cached_property
    def token_counts(self) -> list[int]:
        """The number of tokens of each completion that the mask keeps."""
        counts: list[int] = self.mask.sum(1).tolist()
        return counts

    @cached_property
    def may_train(self) -> list[bool]:
        """True for each completion with an advantage, or tokens of a cross-entropy."""
        nonzero = (self.advantages != 0) & (self.mask != 0).any(1)
        if self.ce_weights is not None:
            nonzero |= (self.ce_weights != 0).any(1)
        found: list[bool] = nonzero.tolist()
        return found

    @property
    def support_sizes(self) -> Tensor:
        """The sizes of the kept sets of the completions' tokens: int64, 1-D."""
        sizes = support_sizes(self.completions, self.mask.shape[1])
        return sizes[sizes > 0]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each completion, whoever they are from."""
        return [len(c.token_ids) for c in self.completions]

    @property
    def sampled_lengths(self) -> list[int]:
        """The number of tokens of each completion that the policy sampled."""
        return [sum(sampled_tokens(c)) for c in self.completions]

    @property
    def levels(self) -> list[float]:
        """The level of each completion's problem; NaN where that is no number."""
        levels = [level_of(problem) for problem in self.problems]
        known = [math.nan if level is None else level for level in levels]
        return [known[i] for i in self.prompt_of]

    def size(self, rows: Sequence[int]) -> Size:
        """The number of these rows, and of their tokens that the mask keeps."""
        return Size(len(rows), sum(self.token_counts[i] for i in rows))

    def micro_batches(self, rows: Sequence[int], size: int, *, shared: bool) -> Plan:
        """Cuts rows into micro-batches of at most `size`; see `plan_micro_batches`."""
        prompt_lengths = [len(prompt) for prompt in self.prompts]
        return plan_micro_batches(
            rows, size, self.prompt_of, prompt_lengths, self.lengths, shared=shared
        )

    def batch(self, rows: Sequence[int], pad_id: int) -> tuple[Batch, Tensor]:
        """Makes a batch of rows; returns it and the row numbers, on the mask's device.

        Without rows it is the last completion, all masked: a forward that counts for nothing.
        """
        chosen, device = rows or [len(self.completions) - 1], self.mask.device
        batch = Batch.of_rows(
            self.prompts, [self.prompt_of[i] for i in chosen],
            [self.completions[i].token_ids for i in chosen], pad_id, device,
        )  # fmt: skip
        where = to_device(torch.tensor(chosen), device)
        mask = self.mask[where, : batch.attention.shape[1]]
        support = None
        if self.replay_support:
            supports = [self.completions[i].support for i in chosen]
            support = batch_support(supports, mask.shape[1], device)
        mask = mask if rows else torch.zeros_like(mask)
        return replace(batch, mask=mask, support=support), where

    def per_token(self, where: Tensor, T: int, ce_items: float) -> dict[str, Any]:
        """Options of `fused_grpo_loss` for the first `T` tokens of rows.

        That is their log-probs under other policies, and the weights of a cross-entropy, divided
        by `ce_items`.
        """
        constants = {
            "old_logps": self.old_logps, "ref_logps": self.ref_logps,
            "sampling_logps": self.sampling_logps,
            "ce_weights": None if self.ce_weights is None else self.ce_weights / ce_items,
        }  # fmt: skip
        return {name: None if x is None else x[where, :T] for name, x in constants.items()}


def sampled_tokens(one: Completion) -> Sequence[bool]:
    """True for each token of a completion that the policy sampled."""
    return [True] * len(one.token_ids) if one.sampled is None else one.sampled


def completion_mask(completions: Sequence[Completion], drop_truncated: bool) -> Tensor:
    """`[B, T]`, int64: 1 for sampled tokens; 0 for others and, if wanted, truncated completions."""
    mask = pad([sampled_tokens(c) for c in completions], 0)[0]
    return mask * torch.tensor([[c.ended] for c in completions]) if drop_truncated else mask


def sampling_logps(completions: Sequence[Completion], mask: Tensor) -> Tensor | None:
    """`[B, T]` log-probs that the rollout reported, on the mask's device; None if it did not."""
    logps = torch.zeros(mask.shape)
    for row, completion in zip(logps, completions, strict=True):
        if completion.logps is None:
            return None
        row[: len(completion.logps)] = torch.tensor(completion.logps)
    return logps.to(mask.device)


def ce_weights(completions: Sequence[Completion], mask: Tensor) -> Tensor | None:
    """`[B, T]` weights of the cross-entropy, on the mask's device; None without any."""
    if all(c.ce_weights is None for c in completions):
        return None
    weights = torch.zeros(mask.shape)
    for row, completion in zip(weights, completions, strict=True):
        if completion.ce_weights is not None:
            row[: len(completion.ce_weights)] = torch.tensor(completion.ce_weights)
    return weights.to(mask.device)


def support_sizes(completions: Sequence[Completion], T: int) -> Tensor:
    """`[B, T]`, int64: the size of each token's kept set; 0 where there is none."""
    sizes = torch.zeros(len(completions), T, dtype=torch.int64)
    for row, completion in zip(sizes, completions, strict=True):
        if completion.support is not None:
            row[: len(completion.token_ids)] = completion.support.offsets.diff()
    return sizes

"""`Samples`: the completions of a step, with rewards and advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .. import batch_support, group_advantages
from ..base.layout import to_device
from . import ranks
from .data import Problem, level_of
from .loading import check_has_logps
from .micro_batches import Plan, Size, plan_micro_batches
from .policy import Batch
from .rewards import Reward, judge, judge_answers, weighted_sum
from .rollout import Completion, Sampler, pad


@dataclass(frozen=True, eq=False)
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
    sampling_logps: Tensor | None  # [B, T], of the rollout
    ce_weights: Tensor | None  # [B, T], of the cross-entropy
    replay_support: bool  # whether log-probs are over the completions' supports

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


def judged(
    problems: Sequence[Problem], completions: Sequence[Completion], sampler: Sampler,
    rewards: Mapping[str, Reward], is_correct: Callable[[str, str], bool] | None,
) -> Samples:  # fmt: skip
    """What this process's completions of its problems are worth; None judges no answer."""
    config, accelerator, G = sampler.config, sampler.accelerator, sampler.config.num_generations
    device, texts = accelerator.device, sampler.texts(completions)
    more = sampler.beside(completions, texts)
    asked = [problem for problem in problems for _ in range(G)], texts, config.reward_timeout
    table = judge(accelerator, rewards, *asked, more)
    first = accelerator.process_index * len(texts)
    advantages = group_advantages(
        ranks.gather(accelerator, table), G, scale=config.scale_rewards,
        weights=config.reward_weights or None,
    )[first : first + len(texts)]  # fmt: skip
    correct = [] if is_correct is None else judge_answers(accelerator, is_correct, *asked)
    mask = to_device(completion_mask(completions, config.mask_truncated_completions), device)
    logps = sampling_logps(completions, mask)
    check_has_logps(config, logps is not None)
    # Equal in all processes, so that they have the same metrics.
    has_support = any(c.support is not None for c in completions)
    return Samples(
        list(problems), [sampler.encode(problem) for problem in problems],
        [i for i in range(len(problems)) for _ in range(G)], list(completions), texts, table,
        weighted_sum(table, config.reward_weights), advantages.to(device), mask, correct,
        transcripts=more["transcripts"], sampling_logps=logps,
        ce_weights=ce_weights(completions, mask),
        replay_support=config.replay_support and ranks.reduce(accelerator, has_support, any),
    )  # fmt: skip


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

"""`Sampling`: from the problems of a step to its `Samples`, judged and compared within groups."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from .. import group_advantages
from ..base.layout import to_device
from . import ranks
from .data import Problem
from .loading import check_has_logps
from .metrics import Clock
from .rewards import Reward, judge, judge_answers, weighted_sum
from .rollout import Completion, Sampler
from .samples import Samples, ce_weights, completion_mask, sampling_logps


class Sampling:
    """Samples and judges the completions of a step.

    Args:
        sampler: samples from the policy as it is now.
        rewards: functions by name.
        is_correct: takes a completion and its problem's answer.
        problems: all that are trained on, from which groups of equal rewards are replaced.
    """

    def __init__(
        self, sampler: Sampler, rewards: Mapping[str, Reward],
        is_correct: Callable[[str, str], bool], problems: Sequence[Problem],
    ) -> None:  # fmt: skip
        self.sampler, self.rewards, self.is_correct = sampler, rewards, is_correct
        self.config, self.accelerator = sampler.config, sampler.accelerator
        self.problems = problems
        self.has_answers = all(problem.get("answer") is not None for problem in problems)

    def __call__(self, problems: Sequence[Problem], step: int, clock: Clock) -> Samples:
        """Samples this process's part of a rollout of `problems`, with rewards and advantages."""
        config, device, rank = self.config, self.accelerator.device, self.accelerator.process_index
        G = config.num_generations
        mine = list(problems[rank :: self.accelerator.num_processes])
        self.sampler.update_weights()
        completions, texts, rewards = self._judged(mine, clock)
        resampled = self._resample(step, mine, completions, texts, rewards, clock)
        with clock("reward"):
            advantages = group_advantages(
                ranks.gather(self.accelerator, rewards), G, scale=config.scale_rewards,
                weights=config.reward_weights or None,
            )[rank * len(texts) : (rank + 1) * len(texts)]  # fmt: skip
            judged = [problem for problem in mine for _ in range(G)]
            asked = (self.accelerator, self.is_correct, judged, texts, config.reward_timeout)
            correct = judge_answers(*asked) if self.has_answers else []
        mask = to_device(completion_mask(completions, config.mask_truncated_completions), device)
        logps = sampling_logps(completions, mask)
        check_has_logps(config, logps is not None)
        # Equal in all processes, so that they have the same metrics.
        replay_support = config.replay_support and ranks.reduce(
            self.accelerator, any(c.support is not None for c in completions), any
        )
        return Samples(
            mine, [self.sampler.encode(problem) for problem in mine],
            [i for i in range(len(mine)) for _ in range(G)], completions, texts, rewards,
            weighted_sum(rewards, config.reward_weights), advantages.to(device), mask, correct,
            replay_support=replay_support, sampling_logps=logps, resampled=resampled,
            ce_weights=ce_weights(completions, mask),
            transcripts=self.sampler.beside(completions, texts)["transcripts"],
        )  # fmt: skip

    def _judged(
        self, problems: Sequence[Problem], clock: Clock
    ) -> tuple[list[Completion], list[str], Tensor]:
        """Completions of problems, their texts, and their rewards by function: `[B, R]`."""
        config = self.config
        with clock("generate"):
            G, support = config.num_generations, config.records_support
            completions = self.sampler(problems, G, config.temperature, record_support=support)
        with clock("reward"):
            judged = [problem for problem in problems for _ in range(G)]
            texts = self.sampler.texts(completions)
            more = self.sampler.beside(completions, texts)
            asked = (self.accelerator, self.rewards, judged, texts, config.reward_timeout)
            table = judge(*asked, more)
        return completions, texts, table

    def _resample(
        self, step: int, problems: list[Problem], completions: list[Completion],
        texts: list[str], rewards: Tensor, clock: Clock,
    ) -> int:  # fmt: skip
        """Replaces groups of equal rewards by those of other problems; returns how many."""
        config, G, replaced = self.config, self.config.num_generations, 0
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        for attempt in range(config.resample_equal_groups):
            totals = weighted_sum(rewards, config.reward_weights).view(-1, G)
            equal = (totals.amax(1) == totals.amin(1)).nonzero()[:, 0].tolist()
            # All processes sample while one has such a group, as sharded weights want it.
            most = ranks.reduce(self.accelerator, len(equal), max)
            if not most:
                break
            draw = random.Random(f"{config.seed}-{step}-{attempt}")
            drawn = draw.choices(self.problems, k=world * most)[rank::world]
            fresh = drawn[: max(1, len(equal))]
            new_completions, new_texts, new_rewards = self._judged(fresh, clock)
            for place, group in enumerate(equal):
                old, new = slice(group * G, group * G + G), slice(place * G, place * G + G)
                problems[group], completions[old] = fresh[place], new_completions[new]
                texts[old], rewards[old] = new_texts[new], new_rewards[new]
            replaced += len(equal)
        return replaced

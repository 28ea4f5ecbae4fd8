"""`Sampling`: from the problems of a step to its `Samples`, judged and compared within groups."""

from __future__ import annotations

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
        problems: all that are trained on.
    """

    def __init__(
        self, sampler: Sampler, rewards: Mapping[str, Reward],
        is_correct: Callable[[str, str], bool], problems: Sequence[Problem],
    ) -> None:  # fmt: skip
        self.sampler, self.rewards, self.is_correct = sampler, rewards, is_correct
        self.config, self.accelerator = sampler.config, sampler.accelerator
        self.has_answers = all(problem.get("answer") is not None for problem in problems)

    def __call__(self, problems: Sequence[Problem], clock: Clock) -> Samples:
        """Samples this process's part of a rollout of `problems`, with rewards and advantages."""
        config, device, rank = self.config, self.accelerator.device, self.accelerator.process_index
        G = config.num_generations
        mine = list(problems[rank :: self.accelerator.num_processes])
        self.sampler.update_weights()
        completions, texts, rewards = self._judged(mine, clock)
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
            replay_support=replay_support, sampling_logps=logps,
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

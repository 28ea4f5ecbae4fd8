"""Records of a step: `Samples`, judged completions; their `Scores`; an `Update`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from ... import GRPOLossConfig, batch_support, group_advantages
from ...base.layout import to_device
from ..config import TrainingConfig
from ..run import ranks, user_code
from ..run.interruptions import StepError
from ..sampling.completions import Completion, RolloutError, check_has_logps, pad
from .micro_batches import Size, config_of_part, num_items
from .policy import Batch

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Samples:
    """The part of a rollout in one process: `B` completions of `P` prompts, sorted by prompt."""

    problems: list[dict[str, Any]]  # [P]
    prompts: list[list[int]]  # [P], token ids
    prompt_of: list[int]  # [B], index into `prompts`
    completions: list[Completion]  # [B]
    texts: list[str]  # [B], the policy's tokens as text
    rewards: Tensor  # [B, R], NaN where a function does not apply
    rewards_total: Tensor  # [B], weighted sums of the rewards; NaN where none applies
    advantages: Tensor  # [B]
    mask: Tensor  # [B, T], int64
    correct: list[bool]  # [B], or empty where problems have no answer
    timed_out: int  # comparisons of answers without a result
    transcripts: list[str]  # [B], the texts with the tools' outputs
    sampling_logps: Tensor | None  # [B, T], of the rollout
    ce_weights: Tensor | None  # [B, T], of the cross-entropy
    replay_support: bool  # whether log-probs are over the completions' supports

    @cached_property
    def token_counts(self) -> list[int]:
        """The number of unmasked tokens of each completion."""
        counts: list[int] = self.mask.sum(1).tolist()
        return counts

    @cached_property
    def may_train(self) -> list[bool]:
        """True for each completion with an advantage, or tokens of a cross-entropy."""
        nonzero = (self.advantages != 0) & (self.mask != 0).any(1)
        if self.ce_weights is not None:
            nonzero |= (self.ce_weights != 0).any(1)
        trainable: list[bool] = nonzero.tolist()
        return trainable

    @property
    def support_sizes(self) -> Tensor:
        """The sizes of the supports of the completions' tokens: int64, 1-D."""
        sizes = [c.support.offsets.diff() for c in self.completions if c.support is not None]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *sizes]).long()

    @cached_property
    def has_set(self) -> Tensor | None:
        """1 at each token that was sampled from a kept set, `[B, T]`; None: the full softmax."""
        if not self.replay_support:
            return None
        sets = (c.support for c in self.completions)
        flags = [None if x is None else (x.offsets.diff() > 0).tolist() for x in sets]
        return pad_per_token(flags, self.mask)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each completion, tool output included."""
        return [len(c.token_ids) for c in self.completions]

    def size(self, rows: Sequence[int]) -> Size:
        """The number of these rows, and of their unmasked tokens."""
        return Size(len(rows), sum(self.token_counts[i] for i in rows))

    def batch(self, rows: Sequence[int], pad_id: int) -> tuple[Batch, Tensor]:
        """Makes a batch of rows; returns it and the row numbers, on the mask's device.

        Without rows the batch is the last completion, fully masked.
        """
        chosen, device = rows or [len(self.completions) - 1], self.mask.device
        batch = Batch.from_rows(
            self.prompts, [self.prompt_of[i] for i in chosen],
            [self.completions[i].token_ids for i in chosen], pad_id, device,
        )  # fmt: skip
        where = to_device(torch.tensor(chosen, dtype=torch.int64, device="cpu"), device)
        mask = self.mask[where, : batch.attention.shape[1]]
        support = None
        if self.replay_support:
            supports = [self.completions[i].support for i in chosen]
            support = batch_support(supports, mask.shape[1], device)
        mask = mask if rows else torch.zeros_like(mask)
        return replace(batch, mask=mask, support=support), where


@dataclass(frozen=True)
class Scores:
    """Log-probs `[B, T]` that updates on samples compare with, or None.

    `entropy_threshold` is the quantile of the rollout's entropies in all processes.
    """

    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    entropy_threshold: float | None = None


@dataclass(frozen=True)
class Update:
    """Results of an optimizer step, and of its loss, in the process.

    Per-token values are `[B, T]`, of the policy before the step, and 0 where it saw no token.
    """

    metrics: dict[str, float]
    logps: Tensor
    entropy: Tensor
    loss: float  # of this process
    rows: list[int]  # completions in the loss
    scores: Scores
    size: Size  # of the update, in all processes
    kl: Tensor | None = None  # the exact KL


def loss_config(config: TrainingConfig, scores: Scores) -> GRPOLossConfig:
    """The config of the loss, with the threshold of the step's entropies if there is one."""
    loss = config.loss_config()
    if scores.entropy_threshold is None:
        return loss
    return replace(loss, entropy_threshold=scores.entropy_threshold)


def call_loss(config: TrainingConfig, work: Callable[[], _T]) -> _T:
    """Returns the result of work that calls the loss.

    Raises:
        StepError: the loss is the user's own, and failed.
    """
    loss = config.loss_type
    if isinstance(loss, str) and ":" not in loss:
        return work()
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    return user_code.call(f"loss_type {name}", work, StepError, retried=True)


def loss_options(
    samples: Samples, scores: Scores, part: Sequence[int], where: Tensor, T: int, full: Size,
    config: TrainingConfig, world: int,
) -> dict[str, Any]:  # fmt: skip
    """Options of `fused_grpo_loss` for a part of an update.

    `where`: the completions of `part` as a tensor; without any, one fully masked completion. `T`:
    their longest length. `full`: the size of the update, in all `world` processes.
    """
    loss, weights = loss_config(config, scores), samples.ce_weights
    # Without rows the cross-entropy is 0, too.
    ce_items = max(full.tokens, 1) / world if part else math.inf
    tensors = {
        "old_logps": scores.old_logps, "ref_logps": scores.ref_logps,
        "sampling_logps": samples.sampling_logps,
        "ce_weights": None if weights is None else weights / ce_items,
    }  # fmt: skip
    return {
        "config": config_of_part(loss, samples.size(part), full, world),
        "num_items": num_items(loss, full, world),
        **{name: None if x is None else x[where, :T] for name, x in tensors.items()},
    }


def samples_of(
    problems: Sequence[Mapping[str, Any]], prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion], judged: Mapping[str, Any], config: TrainingConfig,
    accelerator: Accelerator,
) -> Samples:  # fmt: skip
    """Makes the samples of this process from completions of its problems.

    `judged`: the fields `texts`, `transcripts`, `rewards`, `rewards_total`, `correct` and
    `timed_out`.

    Raises:
        StepError: the rollout does not report log-probs that the options need, or no function
            scored any completion; on every rank.
    """
    G, device = config.num_generations, accelerator.device
    mask = to_device(loss_mask(completions, config.mask_truncated_completions), device)
    logps, weights = [c.logps for c in completions], [c.ce_weights for c in completions]
    if config.is_correction != "none":
        with ranks.raise_on_all_ranks(accelerator, RolloutError, others="rollout: "):
            check_has_logps(config, None not in logps)
    # Equal in all processes, so that they have the same metrics.
    has_support = any(c.support is not None for c in completions)
    return Samples(
        problems=[dict(problem) for problem in problems],
        prompts=[list(ids) for ids in prompts],
        prompt_of=[i for i in range(len(problems)) for _ in range(G)],
        completions=list(completions),
        **judged,
        advantages=group_relative_advantages(judged["rewards"], config, accelerator).to(device),
        mask=mask,
        sampling_logps=None if None in logps else pad_per_token(logps, mask),
        ce_weights=None if weights.count(None) == len(weights) else pad_per_token(weights, mask),
        replay_support=config.replay_support and ranks.reduce(accelerator, has_support, any),
    )


def group_relative_advantages(
    rewards: Tensor, config: TrainingConfig, accelerator: Accelerator
) -> Tensor:
    """Returns `[B]` advantages of this process's completions from the `[B, R]` rewards of all.

    Raises:
        StepError: no function scored any completion; on every rank.
    """
    every = ranks.reduce(accelerator, rewards, torch.cat)
    if every.isnan().all():
        raise StepError(
            "rewards: no completion of this step has a reward: every reward function "
            "returned None. Return numbers, or add a function that does"
        )
    advantages = group_advantages(
        every, config.num_generations, scale=config.scale_rewards,
        weights=config.reward_weights or None,
    )  # fmt: skip
    return advantages.split(len(rewards))[accelerator.process_index]


def loss_mask(completions: Sequence[Completion], drop_truncated: bool) -> Tensor:
    """Makes an int64 `[B, T]` mask of sampled tokens, without cut completions if asked for."""
    mask = pad([c.sampled_flags for c in completions], 0)[0]
    ended = mask.new_tensor([[c.ended] for c in completions])
    return mask * ended if drop_truncated else mask


def pad_per_token(rows: Sequence[Sequence[float] | None], mask: Tensor) -> Tensor:
    """Pads numbers per token to `[B, T]` on the mask's device, with 0 where there are none."""
    padded = torch.zeros(mask.shape, dtype=torch.float32, device="cpu")
    for row, numbers in zip(padded, rows, strict=True):
        if numbers is not None:
            row[: len(numbers)] = row.new_tensor(numbers)
    return padded.to(mask.device)

"""Log-probs of a rollout before it is trained on, and the micro-batches of every forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from .. import GRPOLossConfig, SamplerCheck, check_sampler
from ..head.lm_head import LOGITS_DTYPES
from . import ranks
from .config import TrainingConfig
from .interruptions import Interruptions, OutOfMemory, StepError
from .micro_batches import Plan, pad_plan
from .reference_model import ReferenceModel
from .samples import Samples

_T = TypeVar("_T")


class Scorer:
    """Scores the completions of a process by the policy and by the reference.

    Args:
        policy: wrapped for the processes.
        reference: None where there is no KL.
        interruptions: tells all processes that one of them ran out of memory.
        pad_id: the token that fills up batches.
    """

    def __init__(
        self, policy: Any, reference: ReferenceModel | None, interruptions: Interruptions,
        config: TrainingConfig, pad_id: int,
    ) -> None:  # fmt: skip
        self.policy, self.reference, self.interruptions = policy, reference, interruptions
        self.accelerator = interruptions.accelerator
        self.config, self.pad_id = config, pad_id
        self.micro_batch_size = config.micro_batch_size  # less, once memory has run out

    def plan(self, samples: Samples, rows: Sequence[int]) -> Plan:
        """Cuts rows into micro-batches, equally many in every process."""
        shared = self.accelerator.unwrap_model(self.policy).shares_prompts
        plan = samples.micro_batches(rows, self.micro_batch_size, shared=shared)
        return pad_plan(plan, ranks.reduce(self.accelerator, len(plan), max))

    def loss(self, samples: Samples) -> GRPOLossConfig:
        """The loss of every update on these samples."""
        config = self.config.loss_config()
        if samples.entropy_threshold is None:
            return config
        return replace(config, entropy_threshold=samples.entropy_threshold)

    def memory(self) -> list[int]:
        """The option `micro_batch_size`, and what is taken of it."""
        return [self.config.micro_batch_size, self.micro_batch_size]

    def taken_of_memory(self) -> dict[str, float]:
        """For a row of metrics: what is taken once memory has run out; nothing before."""
        less = self.micro_batch_size < self.config.micro_batch_size
        return {"micro_batch_size": self.micro_batch_size} if less else {}

    def restore_memory(self, memory: Sequence[int]) -> None:
        """Goes on with what a run had left of it, unless the option is another one now."""
        option, size = memory
        if option == self.config.micro_batch_size:
            self.micro_batch_size = size

    def in_memory(
        self,
        work: Callable[[], _T],
        drop_gradients: Callable[[], None],
        warn: Callable[[str], None],
    ) -> _T:
        """Does the work again, in smaller parts, as long as memory runs out.

        Micro-batches do not change gradients: what was added up is dropped and made again.
        """
        while True:
            try:
                return work()
            except OutOfMemory:
                drop_gradients()
                now = self._smaller()
            clear_device_cache(garbage_collection=True)
            warn(f"memory ran out: from now on {now}; the gradients are the same")

    def _smaller(self) -> str:
        """Halves micro-batches; the head takes fewer rows at a time by itself.

        Returns:
            A text that says what holds from now on.

        Raises:
            StepError: they have one completion.
        """
        if self.micro_batch_size == 1:
            raise StepError(
                "memory ran out in a micro-batch of one completion: shorten "
                "max_completion_length, or take gradient_checkpointing, lora_rank or dtype bf16"
            )
        self.micro_batch_size //= 2
        return f"micro_batch_size is {self.micro_batch_size}"

    def trained(self, samples: Samples, number: int, rows: Sequence[int]) -> list[int]:
        """The completions of `rows` that the rollout's update `number` does not leave out."""
        c = self.config
        if not (c.skip_untrained and self.loss(samples).gradient_needs_advantage):
            return list(rows)
        trained = [i for i in rows if samples.may_train[i]]
        if number == 0 and samples.sampling_logps is not None and not trained:
            # Some rows all the same, whose gradient is 0: they tell the gap to the sampler.
            return [i for i in rows if samples.token_counts[i]][: c.micro_batch_size]
        return trained

    def score(self, samples: Samples, minibatches: Plan) -> None:
        """Sets the log-probs and the threshold that the updates on `minibatches` compare with."""
        config = self.config
        plan = self.plan(samples, range(len(samples.texts)))
        quantile_of_rollout = config.top_entropy_quantile < 1 and config.entropy_threshold is None
        # In a rollout's first update the policy is the one that sampled, and the ratio is 1.
        if config.minibatches > 1:  # in the same parts as then, so that states have the same bits
            trained = (self.trained(samples, *x) for x in enumerate(minibatches))
            parts = [part for rows in trained for part in self.plan(samples, rows)]
        with self._in_forwards():
            if config.minibatches > 1:
                samples.old_logps, _ = self._logps(self.policy, samples, parts)
            if quantile_of_rollout:
                _, entropy = self._logps(self.policy, samples, plan, entropy=True)
            if self.reference is not None:
                with self.reference.active(self.policy) as reference:
                    samples.ref_logps, _ = self._logps(reference, samples, plan)
        if quantile_of_rollout:
            share, of_tokens = config.top_entropy_quantile, entropy[samples.mask != 0]
            samples.entropy_threshold = ranks.top_quantile(self.accelerator, of_tokens, share)

    def check_sampler(self, samples: Samples) -> SamplerCheck | None:
        """Compares the sampler's log-probs with those of logits that are rounded, and not."""
        some = self.plan(samples, range(len(samples.texts)))[:1]
        with self._in_forwards():
            by_policy = [
                self._logps(self.policy, samples, some, logits_dtype=x)[0] for x in LOGITS_DTYPES
            ]
        assert samples.sampling_logps is not None
        given = (samples.sampling_logps, *by_policy, samples.mask)
        sampled, fp32, model, mask = (x[some[0]] for x in given)
        return check_sampler(sampled, fp32, model, mask) if mask.any() else None

    def _in_forwards(self) -> AbstractContextManager[None]:
        """Forwards in which one process may run out of memory; nothing else is exchanged inside."""
        return self.interruptions.shared(waits=ranks.sharding(self.accelerator) is not None)

    def _logps(
        self, policy: Any, samples: Samples, plan: Plan, entropy: bool = False,
        logits_dtype: str | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`[B, T]` log-probs under the policy, and its entropies (0 unless they are wanted)."""
        logps, entropies = torch.zeros(2, *samples.mask.shape, device=samples.mask.device)
        execution = self.config.execution()
        for part in plan:
            batch, where = samples.batch(part, self.pad_id)
            with self.accelerator.autocast():
                part_logps, part_entropy = policy(
                    "logps", batch, entropy, execution=execution, logits_dtype=logits_dtype
                )
            if part:
                logps[where, : part_logps.shape[1]] = part_logps
            if part and entropy:
                entropies[where, : part_logps.shape[1]] = part_entropy
        return logps, entropies

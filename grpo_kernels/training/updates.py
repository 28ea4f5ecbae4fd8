"""`Updates`: optimizer steps on the samples of a rollout, each made micro-batch by micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import checkpoint, metrics, ranks
from .interruptions import BadUpdates
from .micro_batches import Size, config_of_part, num_items
from .run_log import RunLog
from .samples import Samples
from .scoring import Scorer

_T = TypeVar("_T")
# Updates in a row without a finite gradient, after which the run ends.
MOST_BAD = 10


class Updates:
    """Takes optimizer steps, whose gradients do not depend on micro-batches and processes.

    Args:
        scorer: has the policy, and cuts samples into micro-batches.
        optimizer: wrapped for the processes.
        log: of the run.
    """

    def __init__(self, scorer: Scorer, optimizer: Any, log: RunLog) -> None:
        self.scorer, self.optimizer, self.log = scorer, optimizer, log
        self.policy, self.config = scorer.policy, scorer.config
        self.accelerator = scorer.accelerator
        self.bad = 0  # without a finite gradient, the last ones in a row
        self.within_step = False  # whether weights are between two steps

    def __call__(
        self, samples: Samples, step: int, number: int, rows: Sequence[int],
        why_gap: str | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """Takes update `number` of a step, on these rows of every process; its metrics.

        `why_gap`: the dtype that explains a gap to the sampler's log-probs, if one is to.
        """
        rate = self.config.learning_rate_at((step - 1) * self.config.updates_per_step + number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        work = partial(self._accumulate, samples, number, rows, why_gap)
        merged, loss = self.in_memory(work)
        return {
            **merged, "grad_norm": self._optimizer_step(), "learning_rate": rate,
            "loss": ranks.reduce(self.accelerator, float(loss), metrics.mean),
        }  # fmt: skip

    def in_memory(self, work: Callable[[], _T]) -> _T:
        """Does the work again, in smaller parts, as long as memory runs out."""
        return self.scorer.in_memory(work, self.drop_gradients, self.log.warn)

    def drop_gradients(self) -> None:
        """Forgets what was added up."""
        ranks.drop_gradients(self.accelerator, self.policy, self.optimizer)

    def _accumulate(
        self, samples: Samples, number: int, rows: Sequence[int], why_gap: str | None
    ) -> tuple[dict[str, float], Tensor]:
        """Adds up the gradient of an update, part by part; its metrics and its loss."""
        accelerator, scorer = self.accelerator, self.scorer
        plan = scorer.plan(samples, scorer.trained(samples, number, rows))
        whole = Size(*(ranks.reduce(accelerator, n, sum) for n in samples.size(rows)))
        world, loss_config = accelerator.num_processes, scorer.loss(samples)
        items, ce_items = num_items(loss_config, whole, world), max(whole.tokens, 1) / world
        if samples.logps is None:
            samples.logps = torch.zeros(samples.mask.shape, device=accelerator.device)
        measured: list[dict[str, Tensor]] = []
        loss = torch.zeros((), device=accelerator.device)
        sharded, interruptions = ranks.sharding(accelerator) is not None, scorer.interruptions
        for index, part in enumerate(plan):
            batch, where = samples.batch(part, scorer.pad_id)
            T = batch.attention.shape[1]
            part_config = config_of_part(loss_config, samples.size(part), whole, world)
            last = index == len(plan) - 1
            # DeepSpeed steps within the backward in which gradients are to be synced.
            accelerator.sync_gradients = last
            with nullcontext() if last else accelerator.no_sync(self.policy):
                with interruptions.shared(waits=sharded, may_stop=number == 0):
                    with accelerator.autocast():
                        # Of a part without rows the cross-entropy counts for nothing, too.
                        constants = samples.per_token(where, T, ce_items if part else math.inf)
                        part_loss, part_metrics, logps = self.policy(
                            "loss", batch, samples.advantages[where], part_config,
                            **constants, num_items=items,
                            execution=self.config.execution(),
                        )  # fmt: skip
                    if not last:
                        accelerator.backward(part_loss)
                measured.append(part_metrics)
                if last:
                    gather = partial(ranks.gather, accelerator)
                    merged = metrics.merge_micro_batches(measured, gather)
                    if number == 0:
                        merged |= self.log.watch.sampler_gap(merged, why_gap)
                    with interruptions.shared(waits=sharded or world > 1):
                        accelerator.backward(part_loss)
            loss += part_loss.detach()
            if part:
                samples.logps[where, :T] = logps
        return merged, loss

    def _optimizer_step(self) -> float:
        """Clips the gradient and, if it is finite, steps; returns its norm."""
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        norm = self.accelerator.clip_grad_norm_(trained, self.config.max_grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        grad_norm = float(norm) if norm is not None else math.nan
        self.bad += 1
        if norm is None or math.isfinite(grad_norm):
            self.within_step = True
            self.optimizer.step()
            self.bad = 0
        self.optimizer.zero_grad()
        if self.bad >= MOST_BAD:
            raise BadUpdates(self.bad, checkpoint.latest(self.config.folder))
        return grad_norm

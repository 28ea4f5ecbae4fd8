"""Gradients of an update: forwards and backwards of its micro-batches, and its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from ..run import ranks
from .micro_batches import Size
from .row import update_metrics
from .samples import Samples, Scores, Update, call_loss, loss_options
from .scoring import Scorer, checked_gap


def add_gradients(
    scorer: Scorer, samples: Samples, scores: Scores, number: int, rows: Sequence[int],
    sampler_dtype: str | None,
) -> Update:  # fmt: skip
    """Adds up the gradients of an update's micro-batches, over all processes.

    `number`: the update's in its step, from 0. `sampler_dtype`: its rounding explains a gap to the
    sampler's log-probs; None: any gap is explained.

    Raises:
        OutOfMemory: a process ran out of memory; raised in all, before the last backward.
        StepError: the user's own loss failed; raised in all processes.
        RolloutError: the first update finds a larger gap than the dtype explains.
    """
    accelerator, run, config = scorer.accelerator, scorer.run, scorer.config
    trained = scorer.trainable_rows(samples, rows, first_update=number == 0)
    plan = scorer.plan(samples, trained)
    full = Size(*(ranks.reduce(accelerator, n, sum) for n in samples.size(rows)))
    names = ("logps", "entropy", *(("kl",) if config.loss_config().exact_kl else ()))
    per_token = {name: torch.zeros_like(samples.mask, dtype=torch.float32) for name in names}
    losses = list[Tensor]()

    def forward(part: Sequence[int]) -> Tensor:
        batch, where = samples.batch(part, scorer.pad_id)
        T, world = batch.attention.shape[1], accelerator.num_processes
        with accelerator.autocast():
            forward_of_part = partial(
                scorer.policy, "loss", batch, samples.advantages[where],
                reference=scorer.reference_of(batch), clock=run.clock,
                **loss_options(samples, scores, part, where, T, full, config, world),
            )  # fmt: skip
            out = call_loss(config, forward_of_part)
        losses.append(out.loss.detach())
        for name, values in per_token.items() if part else ():
            values[where, :T] = getattr(out, name)
        return out.loss

    # No process waits for another inside; an error in one process is raised in all at the end.
    guard = run.interruptions.guard
    with guard(may_stop=number == 0):
        for part in plan[:-1]:
            with accelerator.no_sync(scorer.policy):
                accelerator.backward(forward(part))
            if accelerator.num_processes == 1:  # several processes check once, in the guard
                run.interruptions.check(may_stop=number == 0)
        last_loss = forward(plan[-1])
    metrics = update_metrics(samples, scores, trained, per_token, config, accelerator)
    if number == 0:
        metrics |= checked_gap(metrics, sampler_dtype, run)
    # Processes wait for each other in the last backward, so that it cannot be retried.
    with guard() if accelerator.num_processes == 1 else nullcontext():
        accelerator.backward(last_loss)
    loss = float(sum(losses))
    return Update(metrics, loss=loss, rows=trained, scores=scores, size=full, **per_token)

"""Explanations of a run's steps, token by token, as pages in its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.outputs import GRPOLossOutput
from ...explain import explain
from ...explain.records import read_rows
from ...explain.steps import ExplainedSteps
from .samples import Samples, Update, loss_options
from .scoring import Scorer


class Explanations:
    """Pages of every `explain_every` steps, and of steps where the gradient norm or KL jumps.

    With several processes they show the main process's completions.
    """

    def __init__(self, scorer: Scorer, tokenizer: Any) -> None:
        config = scorer.config
        self.steps = ExplainedSteps(config.folder, every=config.explain_every)
        self.scorer, self.tokenizer = scorer, tokenizer

    def open(self) -> None:
        """Begins a run, or goes on after the steps in the folder of the resumed run."""
        run = self.scorer.run
        if run.accelerator.is_main_process:
            rows = read_rows(run.config.folder / "metrics.jsonl")
            run.call_observer("explain", self.steps.open, rows)

    def write(
        self, row: Mapping[str, Any], samples: Samples, updates: Sequence[Update]
    ) -> dict[str, Any] | None:
        """Writes the page of a step's largest update if it is due; prints its place.

        A spike is a warning, a page by `explain_every` is not. Call it for every step. Returns the
        record for the step's row; None without a page.
        """
        run, scorer, why = self.scorer.run, self.scorer, self.steps.why(row)
        every = range(len(samples.texts))
        if why is None or not scorer.trainable_rows(samples, every, first_update=False):
            return None
        norms = [update.metrics["grad_norm"] for update in updates]
        trained = [i for i, update in enumerate(updates) if update.rows]
        number = max(trained, key=lambda i: norms[i] if math.isfinite(norms[i]) else math.inf)
        update = updates[number]
        if len(updates) > 1:
            why = f"{why}; update {number + 1} of {len(updates)}"
        rows = sorted(update.rows)
        batch, where = samples.batch(rows, self.tokenizer.pad_token_id)
        T, world = batch.completions.shape[1], run.accelerator.num_processes
        # Only the main process comes here; scoring needs all processes.
        after = scorer.logps(samples) if world == 1 else None

        def selected(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[where, :T]

        out = GRPOLossOutput(
            loss=torch.tensor(update.loss, dtype=torch.float32, device="cpu"), metrics={},
            logps=update.logps[where, :T], entropy=selected(update.entropy), kl=selected(update.kl),
        )  # fmt: skip
        prompts = [samples.prompts[samples.prompt_of[i]] for i in rows]
        explanation = explain(
            out, batch.completions, samples.advantages[where], batch.mask,
            **loss_options(samples, update.scores, rows, where, T, update.size, run.config, world),
            groups=[samples.prompt_of[i] for i in rows],
            rewards=samples.rewards_total[rows],
            truncated=[not samples.completions[i].ended for i in rows],
            prompts=[self.tokenizer.decode(ids) for ids in prompts],
            next_logps=selected(after), tokenizer=self.tokenizer,
        )  # fmt: skip
        record = self.steps.write(run.step, why, explanation)
        (run.warn if record["spike"] else run.print_main)(self.steps.message(run.step, record))
        return record

"""GRPO's loop, to be read downwards: sample, judge, score, update. Begin with `train_step`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..base.memory import ran_out_of_memory
from ..integrations.private import forget_forward
from .checks import checked_rewards, have_answers, start
from .config import TrainingConfig
from .evaluate import evaluate
from .loading import load_model, make_rollout, prepared, set_pad_token
from .problems.answers import is_correct as answer_is_correct
from .problems.data import Problem
from .problems.data import load as load_problems
from .problems.held_out import write_problems
from .problems.prompts import PromptEncoder, short_enough
from .problems.rewards import Reward
from .run import checkpoint, ranks
from .run.interruptions import BadUpdates, OutOfMemory, Preempted, StepError
from .run.metrics import Clock, step_row
from .run.observers import introduction, print_above
from .run.run import Run, place_of
from .sampling.rollout import Rollout, Sampler
from .step.explanations import Explanations
from .step.micro_batches import Size, equal_parts
from .step.reference_model import ReferenceModel
from .step.samples import Samples, Scores, Update, loss_options, samples_of
from .step.scoring import Scorer, checked_gap

_T = TypeVar("_T")
OnStep = Callable[[dict[str, Any], Samples], object]
# Updates in a row without a finite gradient, after which the run ends.
MOST_BAD = 10


class Trainer:
    """GRPO for a causal language model.

    Args:
        config: every number and name of the run.
        model: a transformers or PEFT model; parameters that require a gradient are trained.
        tokenizer: the model's.
        train: problems, dicts with a `prompt` (a string, or a chat's messages) and the columns that
            the reward functions want.
        held_out: problems for the evaluations.
        rewards: functions by name, for names in `config.rewards` that are not the library's.
        is_correct: takes a completion and its problem's answer; evaluations count by it.
        rollout: given the wrapped policy, returns who samples; None: as `config.rollout` says. To
            put something around that one, set it: `trainer.rollout = Mine(trainer.rollout)`.

    `train()` runs it. The run's folder then has `config.json`, logs (`metrics.jsonl` with one row
    per step, samples, evaluations and answers), `held_out.jsonl`, `checkpoints/`, `report.html` and
    `model/`. Who shows these is in `run.observers`, a list that may be changed; anyone may add to
    `metrics`.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module,
        tokenizer: Any,
        train: Sequence[Problem],
        held_out: Sequence[Problem] = (),
        *,
        rewards: Mapping[str, Reward] | None = None,
        is_correct: Callable[[str, Any], bool] = answer_is_correct,
        rollout: Callable[[nn.Module], Rollout] | None = None,
    ) -> None:
        self.config, self.tokenizer, self.is_correct = config, tokenizer, is_correct
        self.accelerator = accelerator = start(config, own_rollout=rollout is not None)
        self.rewards = checked_rewards(config, train, held_out, rewards, is_correct)
        self.has_answers = have_answers(train)
        set_pad_token(tokenizer, model)
        set_seed(config.seed)
        encode = PromptEncoder(tokenizer, chat=config.chat)
        say = print_above if accelerator.is_main_process else lambda _: None
        self.train_problems, self.held_out = (
            short_enough(problems, encode, config.max_prompt_length, say)
            for problems in (train, held_out)
        )
        self.reference = (
            ReferenceModel(accelerator, model, tokenizer, config) if config.beta else None
        )
        weights = {"weights of the model": (model, False)}
        if self.reference is not None:
            weights |= self.reference.weights(model)
        fingerprint = checkpoint.fingerprint(self.train_problems, self.held_out, tokenizer, weights)
        self.run = Run(config, accelerator, fingerprint)
        self.metrics = self.run.metrics
        self.policy, self.optimizer = prepared(
            model, config, accelerator, encode(self.train_problems[0])
        )
        self.sampler = Sampler(
            rollout(self.policy) if rollout is not None
            else make_rollout(config, self.policy, tokenizer, accelerator),
            model, encode, config, accelerator,
        )  # fmt: skip
        self.scorer = Scorer(self.policy, self.reference, self.run, tokenizer.pad_token_id)
        self.explanations = Explanations(config, tokenizer)
        checkpoint.weights_that_move(accelerator, self.reference if config.sync_ref_every else None)

    @classmethod
    def from_config(
        cls, config: TrainingConfig, *, rewards: Mapping[str, Reward] | None = None,
        is_correct: Callable[[str, Any], bool] = answer_is_correct,
        load: Callable[[TrainingConfig], tuple[nn.Module, Any]] = load_model,
    ) -> Trainer:  # fmt: skip
        """Loads the problems and the model that the options name.

        Whatever can be refused without a model is refused before one is loaded.

        Args:
            config: every number and name of the run.
            rewards: functions by name, as in `Trainer`.
            is_correct: takes a completion and its problem's answer, as in `Trainer`.
            load: returns the model and its tokenizer.
        """
        start(config, own_rollout=False)
        problems = load_problems(config)
        checked_rewards(config, *problems, rewards, is_correct)
        return cls(config, *load(config), *problems, rewards=rewards, is_correct=is_correct)

    @property
    def rollout(self) -> Rollout:
        """Sampler of the run."""
        return self.sampler.rollout

    @rollout.setter
    def rollout(self, rollout: Rollout) -> None:
        self.sampler.rollout = rollout
        self.sampler.weights_changed()

    def train(self, on_step: OnStep | None = None) -> Path:
        """Runs the steps that are left and returns the run's folder.

        Args:
            on_step: called in every process with each step's row of metrics and its `Samples`,
                before the step's evaluation and checkpoint. In one process its first error is
                printed; in several an error ends the run.
        """
        run, config = self.run, self.config
        with run.locked(), run.interruptions:
            self._open()
            run.notify("start", run.step)
            if run.step == 0 or not run.evaluated:
                self._evaluate()
                if run.step:  # due before, and not to be made again
                    run.save(self.policy)
                run.interruptions.check()
            while run.step < config.steps:
                run.trained = run.step
                try:
                    run.step += 1
                    improved = self._step(on_step)
                    last = run.step == config.steps
                    run.interruptions.check(may_stop=not last)
                except BaseException as error:
                    if isinstance(error, (StepError, Preempted)) or ran_out_of_memory(error):
                        self._drop_gradients()
                        run.stop(error, self.policy)
                    raise
                if improved or last or _every(config.save_every, run.step):
                    run.save(self.policy)
            if config.save_model:
                folder = config.folder / "model"
                checkpoint.save_model(self.accelerator, self.policy, self.tokenizer, folder)
            run.notify("end")
        return config.folder

    def _step(self, on_step: OnStep | None) -> bool:
        """A step, and what is due after it; returns True for the best accuracy so far."""
        run, config, problems = self.run, self.config, self.train_problems
        turns = range((run.step - 1) * config.prompts_per_step, run.step * config.prompts_per_step)
        row, samples = self.train_step(
            [problems[place_of(turn, len(problems), config.seed)] for turn in turns]
        )
        if self.reference is not None and _every(config.sync_ref_every, run.step):
            self.reference.sync(self.policy)
        run.trained, run.within_step = run.step, False
        run.evaluated = not (run.step == config.steps or _every(config.eval_every, run.step))
        run.write_step(row, samples)
        if on_step is not None and self.accelerator.num_processes == 1:
            run.look_on("on_step", on_step, row, samples)
        elif on_step is not None:
            # It may change weights, or wait for other processes: one alone cannot go on without it.
            with ranks.raise_on_all_ranks(self.accelerator, StepError, others="on_step: "):
                on_step(row, samples)
        return not run.evaluated and self._evaluate()

    def train_step(self, problems: Sequence[Problem]) -> tuple[dict[str, Any], Samples]:
        """Runs a rollout of these problems (of all processes) and the updates on it."""
        config, accelerator, run, sampler = self.config, self.accelerator, self.run, self.sampler
        # A seed per step: a run that goes on from a checkpoint draws what it would have drawn.
        set_seed(run.seed("step"))
        clock = Clock(accelerator.device)
        self.metrics.clear()
        local = problems[accelerator.process_index :: accelerator.num_processes]
        labels = [reward.label for reward in self.rewards]
        with clock("sync"):
            sampler.update_weights()
        with clock("generate"):
            completions = sampler(
                local, config.num_generations, config.temperature,
                record_support=config.records_support,
            )  # fmt: skip
        with clock("reward"):
            judge = self.is_correct if self.has_answers else None
            samples = samples_of(local, completions, sampler, self.rewards, judge)
        run.interruptions.check()
        minibatches = equal_parts(len(samples.texts), config.minibatches)
        with clock("score"):
            scores = self._fitting(self.scorer.score, samples, minibatches)
            if run.step == 1:
                self._fitting(self.scorer.compare_roundings, samples)
        with clock("train"):
            sampler.weights_changed()
            updates = list[Update]()
            for number, rows in enumerate(minibatches * config.epochs_per_rollout):
                updates.append(self.update(samples, scores, number, rows))
                if scores.old_logps is None:  # of the policy that sampled
                    scores = replace(scores, old_logps=updates[0].logps)
        row = step_row(samples, labels, [x.metrics for x in updates], run, clock)
        why = self.explanations.steps.why(run.step, row)
        if why is not None and accelerator.is_main_process:
            run.look_on("explain", self._explain, why, samples, updates)
        return row, samples

    def _explain(self, why: str, samples: Samples, updates: Sequence[Update]) -> None:
        # One of several processes is alone here, and cannot score.
        alone = self.accelerator.num_processes == 1
        after = self.scorer.logps(samples) if alone else None
        self.run.warn(self.explanations.write(self.run, why, samples, updates, after))

    def update(self, samples: Samples, scores: Scores, number: int, rows: Sequence[int]) -> Update:
        """The optimizer step of this number on the samples: on these rows, of every process."""
        config, run = self.config, self.run
        rate = config.learning_rate_at((run.step - 1) * config.updates_per_step + number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        update = self._fitting(self._add_gradients, samples, scores, number, rows)
        more = {
            "grad_norm": self._optimizer_step(), "learning_rate": rate,
            "loss": ranks.reduce(self.accelerator, update.loss, fmean),
        }  # fmt: skip
        return replace(update, metrics=update.metrics | more)

    def _add_gradients(
        self, samples: Samples, scores: Scores, number: int, rows: Sequence[int]
    ) -> Update:
        """Adds up the gradients of an update's micro-batches."""
        accelerator, guard = self.accelerator, self.run.interruptions.guard
        trained = self.scorer.trainable_rows(samples, rows, first_update=number == 0)
        plan = self.scorer.plan(samples, trained)
        full = Size(*(ranks.reduce(accelerator, n, sum) for n in samples.size(rows)))
        zeros = torch.zeros_like(samples.mask, dtype=torch.float32)
        per_token = {"logps": zeros, "entropy": zeros.clone()}
        if self.config.loss_config().exact_kl:
            per_token["kl"] = zeros.clone()
        losses, parts = list[Tensor](), list[Mapping[str, Tensor]]()

        def forward(part: Sequence[int]) -> Tensor:
            batch, where = samples.batch(part, self.scorer.pad_id)
            T, world = batch.attention.shape[1], accelerator.num_processes
            options = loss_options(samples, scores, part, where, T, full, self.config, world)
            with accelerator.autocast():
                out = self.policy(
                    "loss", batch, samples.advantages[where],
                    reference=self.scorer.reference_of(batch), **options,
                )  # fmt: skip
            losses.append(out.loss.detach())
            parts.append(out.metrics)
            for name, values in per_token.items() if part else ():
                x = getattr(out, name)
                values[where, : x.shape[1]] = x
            return out.loss

        for part in plan[:-1]:
            with accelerator.no_sync(self.policy), guard(may_stop=number == 0):
                accelerator.backward(forward(part))
        with guard(may_stop=number == 0):
            last_loss = forward(plan[-1])
        completions = [sum(samples.token_counts[i] > 0 for i in part) for part in plan]
        merged = self.metrics.merge_micro_batches(parts, completions, accelerator)
        if number == 0:
            merged |= checked_gap(merged, self.sampler.why_gap, self.run)
        # Processes wait for each other in it: then nothing can be tried again.
        with guard() if accelerator.num_processes == 1 else nullcontext():
            accelerator.backward(last_loss)
        loss = float(sum(losses))
        return Update(merged, loss=loss, rows=trained, scores=scores, size=full, **per_token)

    def _optimizer_step(self) -> float:
        """Clips the gradient and, if it is finite, steps; returns its norm."""
        run, trained = self.run, [p for p in self.policy.parameters() if p.requires_grad]
        grad_norm = float(self.accelerator.clip_grad_norm_(trained, self.config.max_grad_norm))
        run.bad_updates += 1
        if math.isfinite(grad_norm):
            run.within_step = True
            self.optimizer.step()
            run.bad_updates = 0
        self.optimizer.zero_grad()
        if run.bad_updates >= MOST_BAD:
            raise BadUpdates(run.bad_updates, checkpoint.latest(self.config.folder))
        return grad_norm

    def _fitting(self, work: Callable[..., _T], *args: Any) -> _T:
        """Does the work, again in smaller micro-batches as long as memory runs out."""
        while True:
            try:
                return work(*args)
            except OutOfMemory:
                self._drop_gradients()
            self.run.halve_micro_batches()

    def _drop_gradients(self) -> None:
        """Forgets what was added up, after forwards and backwards that may not have ended."""
        self.optimizer.zero_grad()
        if isinstance(self.policy, DistributedDataParallel):
            forget_forward(self.policy)

    def _evaluate(self) -> bool:
        """Answers the held-out problems; returns True for the best accuracy of the training."""
        run, run.evaluated = self.run, not self.held_out
        if run.evaluated:
            return False
        set_seed(run.seed("evaluation"))
        evaluation = evaluate(
            self.held_out, self.sampler, self.rewards, self.is_correct, self.config,
            self.accelerator,
        )  # fmt: skip
        run.evaluated = True
        better = evaluation.accuracy > run.best.get("accuracy", -1.0)
        if better:
            run.best = {"step": run.step, "accuracy": evaluation.accuracy}
        if self.accelerator.is_main_process:
            evaluation.write(self.config.folder, run.step)
        run.notify("evaluation", run.step, evaluation)
        return better and run.step > 0

    def _open(self) -> None:
        """Makes the run's folder, or resumes the run in it."""
        run, counts = self.run, (len(self.train_problems), len(self.held_out))
        path = run.open()
        if self.accelerator.is_main_process:
            parts = self.train_problems, self.held_out
            write_problems(self.config.folder, *parts, self.is_correct, run.print_main)
        self.explanations.open(run.step)
        for text in introduction(self.config, self.accelerator, self.policy, *counts):
            run.print_main(text)
        if path is not None:
            self.accelerator.load_state(str(path))
            self.sampler.weights_changed()
            run.print_main(f"Going on after step {run.step}, from {path}")
        self.accelerator.wait_for_everyone()


def _every(count: int, step: int) -> bool:
    return count > 0 and step % count == 0

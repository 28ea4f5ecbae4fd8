"""GRPO's loop, to be read downwards: sample, judge, score, update. Begin with `train_step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from accelerate.utils import set_seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..base.memory import ran_out_of_memory
from ..integrations.private import forget_forward
from .checks import checked_rewards, have_answers, start
from .config import TrainingConfig
from .evaluate import evaluate
from .loading import (
    check_names,
    load_model,
    load_reference,
    make_rollout,
    prepared,
    set_pad_token,
)
from .problems.answers import is_correct as answer_is_correct
from .problems.data import Problem, not_held_out
from .problems.data import load as load_problems
from .problems.held_out import write_problems
from .problems.prompts import PromptEncoder, short_enough
from .problems.rewards import Reward, judge, weighted_sum
from .run import checkpoint, ranks, user_code
from .run.interruptions import OutOfMemory, Preempted, StepError
from .run.lock import locked
from .run.metrics import Clock
from .run.observers import introduction, print_above
from .run.run import Run
from .run.schedule import every, index_at_turn
from .sampling.completions import Completion, vocabulary_of
from .sampling.rollout import Rollout, Sampler
from .step.explanations import Explanations
from .step.gradients import add_gradients
from .step.micro_batches import equal_parts
from .step.reference_model import ReferenceModel
from .step.row import step_row
from .step.samples import Samples, Scores, Update, samples_of
from .step.scoring import Scorer

_T = TypeVar("_T")
OnStep = Callable[[dict[str, Any], Samples], object]


class Trainer:
    """GRPO for a causal language model.

    Args:
        config: all options of the run.
        model: a transformers or PEFT model; parameters that require a gradient are trained, others
            are frozen.
        tokenizer: the model's.
        train: problems, dicts with a `prompt` (a string, or a chat's messages) and the columns that
            the reward functions want.
        held_out: problems for the evaluations; problems of `train` with the same prompts are
            dropped.
        rewards: functions by name, for names in `config.rewards` that are not the library's.
        is_correct: takes a completion and its problem's answer; evaluations count by it.
        rollout: takes the wrapped policy, returns a `Rollout`; None: `config.rollout`. To wrap
            that, set `trainer.rollout = Mine(trainer.rollout)`.

    `train()` runs it. The run's folder then has `config.json`, logs (`metrics.jsonl` with one row
    per step, samples, evaluations and answers), `held_out.jsonl`, `checkpoints/`, `report.html` and
    `model/`. The list `run.observers` has the objects that write or show these; add your own. Add
    metrics to `metrics`.
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
        check_names(model)
        self.config, self.tokenizer, self.is_correct = config, tokenizer, is_correct
        self.accelerator = accelerator = start(config, own_rollout=rollout is not None)
        self.rewards = checked_rewards(config, train, held_out, rewards, is_correct)
        self.has_answers = have_answers(train)
        set_pad_token(tokenizer, model)
        set_seed(config.seed)
        encode = PromptEncoder(tokenizer, chat=config.chat, vocabulary=vocabulary_of(model))
        say = print_above if accelerator.is_main_process else lambda _: None
        self.train_problems, self.held_out = (
            short_enough(problems, encode, config.max_prompt_length, say)
            for problems in (not_held_out(train, held_out, say), held_out)
        )
        self.reference: ReferenceModel | None = None
        if config.beta:
            other = load_reference(config, tokenizer)
            self.reference = ReferenceModel(accelerator, model, other, config)
        self.policy, self.optimizer = prepared(
            model, config, accelerator, encode(self.train_problems[0])
        )
        inputs = checkpoint.inputs_of(
            self.train_problems, self.held_out, tokenizer, model,
            frozen=[] if self.reference is None else self.reference.origin,
        )  # fmt: skip
        changing = checkpoint.TrainedState(
            accelerator.unwrap_model(self.policy), optimizer=self.optimizer,
            reference=self.reference if config.sync_ref_every else None, scaler=accelerator.scaler,
        )  # fmt: skip
        self.run = Run(config, accelerator, inputs, changing)
        self.metrics = self.run.metrics
        self.sampler = Sampler(
            rollout(self.policy) if rollout is not None
            else make_rollout(config, self.policy, tokenizer, accelerator),
            model, tokenizer, encode, config, accelerator,
        )  # fmt: skip
        self.scorer = Scorer(self.policy, self.reference, self.run, tokenizer.pad_token_id)
        self.explanations = Explanations(self.scorer, tokenizer)

    @classmethod
    def from_config(
        cls, config: TrainingConfig, *, rewards: Mapping[str, Reward] | None = None,
        is_correct: Callable[[str, Any], bool] = answer_is_correct,
        load: Callable[[TrainingConfig], tuple[nn.Module, Any]] = load_model,
    ) -> Trainer:  # fmt: skip
        """Loads the problems and the model that the options name.

        Options are checked before a model is loaded.

        Args:
            config: all options of the run.
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
                before the step's checkpoint and evaluation. Its errors end the run, after a
                checkpoint.
        """
        run, config = self.run, self.config
        with locked(self.accelerator, config.folder, run.warn), run.interruptions:
            self._open()
            run.notify("start", run.step)
            self._evaluate()
            run.interruptions.check()
            while run.step < config.steps:
                run.begin_step()
                try:
                    self._step(on_step)
                    run.interruptions.check(may_stop=run.step < config.steps)
                except BaseException as error:
                    if isinstance(error, (StepError, Preempted)) or ran_out_of_memory(error):
                        self._drop_gradients()
                        run.stop(error)
                    raise
            if config.save_model:
                checkpoint.save_model(self.accelerator, self.policy, self.tokenizer, config.folder)
            run.write_waiting()
            run.notify("end")
        return config.folder

    def _step(self, on_step: OnStep | None) -> None:
        """Runs a step, writes its checkpoint (the last before the evaluation), and evaluates."""
        run, config, problems = self.run, self.config, self.train_problems
        turns = range((run.step - 1) * config.prompts_per_step, run.step * config.prompts_per_step)
        row, samples = self.train_step(
            [problems[index_at_turn(turn, len(problems), config.seed)] for turn in turns]
        )
        if self.reference is not None and every(config.sync_ref_every, run.step):
            self.reference.sync(self.policy)
        run.end_updates()
        run.write_step(row, samples)
        if on_step is not None:
            with ranks.raise_on_all_ranks(self.accelerator, StepError):
                user_code.call("on_step", partial(on_step, row, samples), StepError)
        if run.step == config.steps or every(config.save_every, run.step):
            run.save()
        if self._evaluate():
            run.save()

    def train_step(self, problems: Sequence[Problem]) -> tuple[dict[str, Any], Samples]:
        """Runs a rollout of these problems (of all processes) and the updates on it."""
        config, accelerator, run, sampler = self.config, self.accelerator, self.run, self.sampler
        # A seed per step: a resumed run draws the same.
        set_seed(run.seed_of("step"))
        clock = run.clock = Clock(accelerator.device)
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
            samples = self.judged(local, completions)
        run.interruptions.check()
        minibatches = equal_parts(len(samples.texts), config.minibatches)
        with clock("score"):
            scores = self._with_retry(self.scorer.score, samples, minibatches)
            if run.step == 1:
                self._with_retry(self.scorer.compare_roundings, samples)
        with clock("train"):
            sampler.weights_changed()
            updates = list[Update]()
            for number, rows in enumerate(minibatches * config.epochs_per_rollout):
                updates.append(self.update(samples, scores, number, rows))
                if scores.old_logps is None:  # of the policy that sampled
                    scores = replace(scores, old_logps=updates[0].logps)
        row = step_row(samples, labels, [x.metrics for x in updates], run)
        if accelerator.is_main_process:
            explained = run.call_observer("explain", self.explanations.write, row, samples, updates)
            row |= {"explained": explained} if explained else {}
        return row, samples

    def judged(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Samples:
        """Makes samples of this process's completions, with their rewards."""
        config, copies = self.config, deepcopy(list(problems))  # observers may change what they see
        judged = judge(
            self.accelerator, self.rewards, self.is_correct if self.has_answers else None,
            [problem for problem in copies for _ in range(config.num_generations)], self.metrics,
            **self.sampler.decoded(completions),
        )  # fmt: skip
        total = weighted_sum(judged.rewards, config.reward_weights)
        return samples_of(
            copies, [self.sampler.encode(problem) for problem in problems], completions,
            vars(judged) | {"rewards_total": total}, config, self.accelerator,
        )  # fmt: skip

    def update(self, samples: Samples, scores: Scores, number: int, rows: Sequence[int]) -> Update:
        """Makes optimizer step `number` of the samples, on these rows of every process."""
        config, run = self.config, self.run
        rate = config.learning_rate_at((run.step - 1) * config.updates_per_step + number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        update = self._with_retry(
            add_gradients, self.scorer, samples, scores, number, rows, self.sampler.sampler_dtype
        )
        scaler = self.accelerator.scaler  # where GEMMs are in float16
        scale = {} if scaler is None else {"loss_scale": scaler.get_scale()}
        more = scale | {
            "grad_norm": self._optimizer_step(), "learning_rate": rate,
            "loss": ranks.reduce(self.accelerator, update.loss, fmean),
        }  # fmt: skip
        return replace(update, metrics=update.metrics | more)

    def _optimizer_step(self) -> float:
        """Clips the gradient and, if it is finite, steps; returns its norm."""
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        grad_norm = float(self.accelerator.clip_grad_norm_(trained, self.config.max_grad_norm))
        scaler = self.accelerator.scaler
        if self.run.begin_update(grad_norm, 1.0 if scaler is None else scaler.get_scale()):
            self.optimizer.step()
        elif scaler is not None:
            scaler.update()
        self.optimizer.zero_grad()
        return grad_norm

    def _with_retry(self, work: Callable[..., _T], *args: Any) -> _T:
        """Calls `work`; a single process halves micro-batches and retries if memory runs out."""
        while True:
            try:
                return work(*args)
            except OutOfMemory:
                self._drop_gradients()
            self.run.halve_micro_batches()

    def _drop_gradients(self) -> None:
        """Drops the gradients of a failed step, perhaps within a backward."""
        self.optimizer.zero_grad()
        if isinstance(self.policy, DistributedDataParallel):
            forget_forward(self.policy)

    def _evaluate(self) -> bool:
        """Evaluates if it is due; returns True for the best accuracy of the training."""
        run = self.run
        if run.evaluated or not self.held_out:
            return False
        set_seed(run.seed_of("evaluation"))
        evaluation = evaluate(
            self.held_out, self.sampler, self.rewards, self.is_correct, self.config,
            self.accelerator,
        )  # fmt: skip
        return run.write_evaluation(evaluation)

    def _open(self) -> None:
        """Makes the run's folder, or resumes the run in it."""
        run, counts = self.run, (len(self.train_problems), len(self.held_out))
        path = run.open()
        if self.accelerator.is_main_process:
            parts = self.train_problems, self.held_out
            write_problems(self.config.folder, *parts, self.is_correct, run.print_main)
        self.explanations.open()
        for text in introduction(self.config, self.accelerator, self.policy, *counts):
            run.print_main(text)
        if path is not None:
            self.sampler.weights_changed()
            run.print_main(f"Going on after step {run.step}, from {path}")
        self.accelerator.wait_for_everyone()

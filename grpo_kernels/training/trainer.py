"""The training loop: sample, judge, compare within groups, step. Begin with `train_step`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import set_seed
from torch import nn

from ..head.plan import ran_out_of_memory
from ..integrations.hf_head import check_logits
from . import checkpoint, metrics, ranks
from .config import TrainingConfig
from .data import Order, Problem, PromptEncoder, short_enough
from .evaluate import evaluate
from .interruptions import Interruptions, Preempted, StepError
from .loading import check_folder, check_rollout, make_rollout, set_pad_token
from .metrics import Evaluation
from .micro_batches import equal_parts
from .policy import Policy, without_dropout
from .reference_model import ReferenceModel
from .rewards import Reward, is_marked_correct, of_options, resolve_rewards
from .rollout import Rollout, Sampler, end_tokens, vocabulary_of
from .run_log import RunLog
from .samples import Samples
from .sampling import Sampling
from .scoring import Scorer
from .updates import Updates

_T = TypeVar("_T")
OnStep = Callable[[dict[str, Any], Samples], object]


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
    per step, samples, evaluations and answers), `checkpoints/`, `report.html` and `model/`.
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
        is_correct: Callable[[str, str], bool] = is_marked_correct,
        rollout: Callable[[nn.Module], Rollout] | None = None,
    ) -> None:
        check_folder(config)
        self.config, self.tokenizer = config, tokenizer
        if is_correct is is_marked_correct:
            is_correct = partial(is_correct, last=config.last_answer)
        self.is_correct = is_correct
        set_pad_token(tokenizer, model)
        self.rewards = resolve_rewards(config.rewards, rewards, of_options(config))
        self.accelerator = ranks.make_accelerator(config)
        self._gather = partial(ranks.gather, self.accelerator)
        if rollout is None:
            check_rollout(config, self.accelerator)
        set_seed(config.seed)
        self.log = RunLog(config, self.accelerator, tokenizer)
        self.encode = PromptEncoder(tokenizer, chat=config.chat)
        self.train_problems, self.held_out = (
            short_enough(problems, self.encode, config.max_prompt_length, self.log.say)
            for problems in (train, held_out)
        )
        if any(problem.get("answer") is None for problem in self.held_out):
            raise ValueError("held_out: expected an answer in every problem, to compare with")
        self.order = Order(self.train_problems, config.seed)
        self.reference = ReferenceModel(self.accelerator, model, config) if config.beta else None
        self.given = checkpoint.digests(
            self.train_problems, self.held_out, self.encode, model,
            trained=self.reference is not None and self.reference.copy is not None,
        )  # fmt: skip
        self.policy, optimizer = self._prepare(model)
        self.sampler = Sampler(
            rollout(self.policy) if rollout is not None
            else make_rollout(config, self.policy, tokenizer, self.accelerator),
            self.encode, config, self.accelerator, vocabulary_of(model),
            end_tokens(model, tokenizer),
        )  # fmt: skip
        self.sampling = Sampling(self.sampler, self.rewards, is_correct, self.train_problems)
        self.interruptions = Interruptions(self.accelerator)
        self.scorer = Scorer(
            self.policy, self.reference, self.interruptions, config, tokenizer.pad_token_id
        )
        self.updates = Updates(self.scorer, optimizer, self.log)
        self.step, self.best = 0, dict[str, Any]()
        self.saved = 0  # the last step of which there is a checkpoint
        self.evaluated = True  # False where an evaluation is due
        checkpoint.trained_weights_only(self.accelerator)

    @property
    def rollout(self) -> Rollout:
        """Who samples."""
        return self.sampler.rollout

    @rollout.setter
    def rollout(self, rollout: Rollout) -> None:
        self.sampler.rollout = rollout

    def train(self, on_step: OnStep | None = None) -> Path:
        """Runs the steps that are left and returns the run's folder.

        Args:
            on_step: called in every process with each step's row of metrics and its `Samples`,
                before the step's evaluation and checkpoint.
        """
        config = self.config
        with self.log.locked(), self.interruptions:
            self._open_folder()
            if self.step == 0 or not self.evaluated:
                self._evaluate()
                if self.step and config.save_every >= 0:  # due before, and not to be made again
                    self._save()
                self.interruptions.check()
            self.order.restore(self.order.done)  # problems of a step that failed come again
            self.log.start(self.step)
            self._train_steps(on_step)
            if config.save_model:
                folder = config.folder / "model"
                checkpoint.save_model(self.accelerator, self.policy, self.tokenizer, folder)
            self.log.finish()
        return config.folder

    def _train_steps(self, on_step: OnStep | None) -> None:
        config = self.config
        while self.step < config.steps:
            problems = self.order.next(config.prompts_per_step)
            trained = self.step
            try:
                self.step += 1
                row, samples = self.train_step(problems)
                if self.reference is not None and _every(config.sync_ref_every, self.step):
                    self.reference.sync(self.policy)
                trained, last = self.step, self.step == config.steps
                self.evaluated = not (last or _every(config.eval_every, self.step))
                self.order.step_done()
                self.log.step(row, samples)
                if on_step is not None:
                    on_step(row, samples)
                improved = not self.evaluated and self._evaluate()
                self.interruptions.check(may_stop=not last)
            except BaseException as error:
                if not isinstance(error, (StepError, Preempted)) and not ran_out_of_memory(error):
                    raise
                self.updates.drop_gradients()
                self._stop_after(trained, error)
                raise
            due = improved or last or _every(config.save_every, self.step)
            if due and config.save_every >= 0:
                self._save()

    def train_step(self, problems: Sequence[Problem]) -> tuple[dict[str, Any], Samples]:
        """One rollout of these problems (of all processes) and the updates on it."""
        # A seed per step: a run that goes on from a checkpoint draws what it would have drawn.
        set_seed(self._seed("step"))
        clock = metrics.Clock(self.accelerator.device)
        samples = self.sampling(problems, clock)
        self.interruptions.check()
        minibatches = equal_parts(len(samples.texts), self.config.minibatches)
        with clock("score"):
            self.updates.in_memory(partial(self.scorer.score, samples, minibatches))
            rounds = self.step == 1 and ranks.gemm_dtype(self.config) != "float32"
            if rounds and samples.sampling_logps is not None:
                found = self.updates.in_memory(partial(self.scorer.check_sampler, samples))
                if found is not None and found.closer not in (None, self.config.logits_dtype):
                    self.log.warn(str(found))
        with clock("train"):
            why_gap, update = getattr(self.rollout, "why_gap", None), self.updates
            self.sampler.weights_changed()
            of_updates = [update(samples, self.step, 0, minibatches[0], why_gap)]
            if samples.old_logps is None and samples.logps is not None:
                samples.old_logps = samples.logps.clone()  # of the policy that sampled
            rest = (minibatches * self.config.epochs_per_rollout)[1:]
            of_updates += [update(samples, self.step, i, rows) for i, rows in enumerate(rest, 1)]
        self.updates.within_step = False
        return self._row(samples, of_updates, clock), samples

    # Metrics and evaluations

    def _row(
        self, samples: Samples, updates: list[dict[str, float]], clock: metrics.Clock
    ) -> dict[str, Any]:
        """The step's row of metrics, over all processes."""
        c = self.config
        row = {"step": self.step} | metrics.of_samples(
            samples, list(self.rewards), c.reward_weights, c.num_generations, self._gather
        )
        if samples.replay_support:
            sizes = ranks.reduce(self.accelerator, samples.support_sizes, torch.cat)
            row |= metrics.of_support(sizes)
        row |= metrics.merge_updates(updates)
        row |= self.scorer.taken_of_memory()
        if self.updates.bad:
            row["bad_updates"] = self.updates.bad
        # That of an evaluation before this step, too.
        if self.sampler.sync_seconds:
            clock.seconds["sync"], self.sampler.sync_seconds = self.sampler.sync_seconds, 0.0
        row["seconds"] = sum(clock.seconds.values())
        row |= {f"seconds/{name}": value for name, value in clock.seconds.items()}
        row["peak_memory_gib"] = metrics.peak_memory(self.accelerator.device) / 2**30
        return row

    def evaluate(self, problems: Sequence[Problem]) -> Evaluation:
        """Accuracy of one completion per problem, of the likeliest tokens."""
        return evaluate(
            problems, self.sampler, self.rewards, self.is_correct, self.config, self.accelerator
        )

    def _evaluate(self) -> bool:
        """Answers the held-out problems; returns True for the best accuracy of the training."""
        self.evaluated = not self.held_out
        if self.evaluated:
            return False
        set_seed(self._seed("evaluation"))
        evaluation = self.evaluate(self.held_out)
        self.evaluated = True
        better = evaluation.accuracy > self.best.get("accuracy", -1.0)
        if better:
            self.best = {"step": self.step, "accuracy": evaluation.accuracy}
        self.log.evaluation(self.step, evaluation)
        return better and self.step > 0

    # The run's folder

    def _open_folder(self) -> None:
        """Makes the run's folder, or resumes the run in it."""
        config, state = self.config, dict[str, Any]()
        found = checkpoint.latest(config.folder) if config.resume else None
        if found is not None:
            state = checkpoint.state_of(found)
            given = ranks.reduce(self.accelerator, self.given, lambda of_all: of_all[0])
            checkpoint.check_same(state, config.as_json(), self.accelerator.num_processes, given)
        self.accelerator.wait_for_everyone()
        self.log.open(state.get("step", -1))
        sampler = getattr(self.sampler.rollout, "description", None)
        self.log.introduce(self.policy, len(self.train_problems), len(self.held_out), sampler)
        if found is not None:
            self.accelerator.load_state(str(found))
            self.sampler.weights_changed()
            self.step, self.best = state["step"], state["best"]
            self.saved, self.updates.within_step = self.step, False
            self.scorer.restore_memory(state["memory"])
            self.order.restore(state["problems"])
            self.evaluated = state["evaluated"]
            self.log.watch.restore(state["watch"])
            self.log.say(f"Going on after step {self.step}, from {found}")
        self.accelerator.wait_for_everyone()

    def _stop_after(self, step: int, error: BaseException) -> None:
        """Keeps what was trained up to a step, if its weights are still the policy's."""
        self.step = step
        if self.accelerator.num_processes > 1 and not isinstance(error, (StepError, Preempted)):
            return  # the others wait elsewhere
        if self.saved < step and not self.updates.within_step and self.config.save_every >= 0:
            self._save()
        then = f"resume goes on after step {self.saved}" if self.saved else "no checkpoint was kept"
        self.log.say(f"Stopped: {then}")
        if step and isinstance(error, Preempted):
            self.log.finish()
        self.accelerator.wait_for_everyone()

    def _save(self) -> None:
        if self.updates.bad or not ranks.finite(self.accelerator, self.policy):
            self.log.warn(f"no checkpoint of step {self.step}: gradients or weights are not finite")
            return
        state = {
            "step": self.step, "best": self.best, "evaluated": self.evaluated,
            "config": self.config.as_json(), "processes": self.accelerator.num_processes,
            "problems": self.order.done, "watch": self.log.watch.state(), "given": self.given,
            "memory": self.scorer.memory(),
        }  # fmt: skip
        folder = self.config.folder
        error = checkpoint.save(self.accelerator, folder, state)
        if error is None:
            self.saved = self.step
            checkpoint.prune(self.accelerator, folder, self.best.get("step", self.step))
        else:
            self.log.warn(
                f"no checkpoint of step {self.step} ({error}); the last one is untouched and "
                f"training goes on. Make room in {folder}"
            )

    # What a run begins with

    def _prepare(self, model: nn.Module) -> tuple[Any, Any]:
        """Wraps policy and optimizer for the processes."""
        config = self.config
        policy = without_dropout(Policy.of_run(model, config))
        check_logits(policy.model, torch.tensor([self.encode(self.train_problems[0])]))
        trained = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=config.learning_rate, betas=(0.9, config.adam_beta2),
            weight_decay=config.weight_decay,
        )  # fmt: skip
        if ranks.sharding(self.accelerator) == "DEEPSPEED":
            ranks.configure_deepspeed(self.accelerator, config)
        policy, optimizer = self.accelerator.prepare(policy, optimizer)
        return ranks.may_fail_alone(policy), optimizer

    def _seed(self, what: str) -> int:
        """The seed of one kind of draws, different in every step and process."""
        text = f"{self.config.seed}-{self.step}-{self.accelerator.process_index}-{what}"
        return random.Random(text).getrandbits(31)


def _every(count: int, step: int) -> bool:
    return count > 0 and step % count == 0

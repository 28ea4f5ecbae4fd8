"""The training loop: sample, judge, compare within groups, step. Begin with `train_step`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn

from .. import group_advantages
from ..arguments import to_device
from ..execution import Execution
from ..hf_head import check_logits
from ..retry import ran_out_of_memory
from . import checkpoint, metrics, ranks
from .config import TrainingConfig
from .data import Order, Problem, PromptEncoder, short_enough
from .evaluate import Evaluation, evaluate
from .interruptions import BadUpdates, Interruptions, Preempted, StepError
from .loading import check_folder
from .micro_batches import Size, config_of_part, equal_parts, num_items
from .policy import Policy, without_dropout
from .reference_model import ReferenceModel
from .rewards import Reward, is_correct, judge, judge_answers, resolve_rewards, weighted_sum
from .rollout import (
    Completion,
    Rollout,
    Sampler,
    check_has_logps,
    check_rollout,
    make_rollout,
    vocabulary_of,
)
from .run_log import RunLog
from .samples import Samples, completion_mask, sampling_logps
from .scoring import Scorer

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
        rollout: given the wrapped policy, returns who samples; None: as `config.rollout` says.

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
        is_correct: Callable[[str, str], bool] = is_correct,
        rollout: Callable[[nn.Module], Rollout] | None = None,
    ) -> None:
        check_folder(config)
        self.config, self.tokenizer, self.is_correct = config, tokenizer, is_correct
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.rewards = resolve_rewards(config.rewards, rewards)
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
        if not all("answer" in problem for problem in self.held_out):
            raise ValueError("held_out: expected an answer in every problem, to compare with")
        self.order = Order(self.train_problems, config.seed)
        self.has_answers = all("answer" in problem for problem in self.train_problems)
        self.reference = ReferenceModel(self.accelerator, model, config) if config.beta else None
        self.policy, self.optimizer = self._prepare(model)
        self.sampler = Sampler(
            rollout(self.policy) if rollout is not None
            else make_rollout(config, self.policy, tokenizer, self.accelerator),
            self.encode, config, self.accelerator, vocabulary_of(model),
        )  # fmt: skip
        self.interruptions = Interruptions(self.accelerator)
        self.scorer = Scorer(
            self.policy, self.reference, self.interruptions, config, tokenizer.pad_token_id
        )
        self.step, self.best, self.bad_updates = 0, dict[str, Any](), 0
        self.saved = 0  # the last step of which there is a checkpoint
        self.within_step = False  # whether weights are between two steps
        self.evaluated = True  # False where an evaluation is due
        checkpoint.trained_weights_only(self.accelerator)

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
                self._drop_gradients()
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
        samples = self._sample(problems, clock)
        self.interruptions.check()
        minibatches = equal_parts(len(samples.texts), self.config.minibatches)
        with clock("score"):
            self._in_memory(partial(self.scorer.score, samples, minibatches))
            rounds = self.step == 1 and ranks.gemm_dtype(self.config) != "float32"
            if rounds and samples.sampling_logps is not None:
                found = self._in_memory(partial(self.scorer.check_sampler, samples))
                if found is not None and found.closer not in (None, self.config.logits_dtype):
                    self.log.warn(str(found))
        with clock("train"):
            updates = [self._update(samples, 0, minibatches[0])]
            if samples.old_logps is None and samples.logps is not None:
                samples.old_logps = samples.logps.clone()  # of the policy that sampled
            rest = (minibatches * self.config.epochs_per_rollout)[1:]
            updates += [self._update(samples, number, rows) for number, rows in enumerate(rest, 1)]
        self.within_step = False
        return self._row(samples, updates, clock), samples

    # Sampling and judging

    def _sample(self, problems: Sequence[Problem], clock: metrics.Clock) -> Samples:
        """Samples this process's part of a rollout, with rewards and advantages."""
        config, device, rank = self.config, self.accelerator.device, self.accelerator.process_index
        G = config.num_generations
        mine = list(problems[rank :: self.accelerator.num_processes])
        self.sampler.update_weights()
        completions, texts, rewards = self._judged(mine, clock)
        resampled = self._resample(mine, completions, texts, rewards, clock)
        with clock("reward"):
            advantages = group_advantages(
                self._gather(rewards), G, scale=config.scale_rewards,
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
            mine, [self.encode(problem) for problem in mine],
            [i for i in range(len(mine)) for _ in range(G)], completions, texts, rewards,
            weighted_sum(rewards, config.reward_weights), advantages.to(device), mask, correct,
            replay_support=replay_support, sampling_logps=logps, resampled=resampled,
        )  # fmt: skip

    def _judged(
        self, problems: Sequence[Problem], clock: metrics.Clock
    ) -> tuple[list[Completion], list[str], Tensor]:
        """Completions of problems, their texts, and their rewards by function: `[B, R]`."""
        config = self.config
        with clock("generate"):
            G, support = config.num_generations, config.records_support
            completions = self.sampler(problems, G, config.temperature, record_support=support)
        with clock("reward"):
            judged = [problem for problem in problems for _ in range(G)]
            texts = self.sampler.texts(completions)
            table = judge(self.accelerator, self.rewards, judged, texts, config.reward_timeout)
        return completions, texts, table

    def _resample(
        self, problems: list[Problem], completions: list[Completion], texts: list[str],
        rewards: Tensor, clock: metrics.Clock,
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
            draw = random.Random(f"{config.seed}-{self.step}-{attempt}")
            drawn = draw.choices(self.train_problems, k=world * most)[rank::world]
            fresh = drawn[: max(1, len(equal))]
            new_completions, new_texts, new_rewards = self._judged(fresh, clock)
            for place, group in enumerate(equal):
                old, new = slice(group * G, group * G + G), slice(place * G, place * G + G)
                problems[group], completions[old] = fresh[place], new_completions[new]
                texts[old], rewards[old] = new_texts[new], new_rewards[new]
            replaced += len(equal)
        return replaced

    # Updates

    def _update(self, samples: Samples, number: int, rows: list[int]) -> dict[str, float]:
        """Takes the rollout's optimizer step `number`, on these rows of every process."""
        config = self.config
        rate = config.learning_rate_at((self.step - 1) * config.updates_per_step + number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        merged, loss = self._in_memory(partial(self._accumulate, samples, number, rows))
        return {
            **merged, "grad_norm": self._optimizer_step(), "learning_rate": rate,
            "loss": ranks.reduce(self.accelerator, float(loss), metrics.mean),
        }  # fmt: skip

    def _in_memory(self, work: Callable[[], _T]) -> _T:
        """Does the work again, in smaller parts, as long as memory runs out."""
        return self.scorer.in_memory(work, self._drop_gradients, self.log.warn)

    def _accumulate(
        self, samples: Samples, number: int, rows: list[int]
    ) -> tuple[dict[str, float], Tensor]:
        """Adds up the gradient of an update, part by part; its metrics and its loss."""
        accelerator = self.accelerator
        plan = self.scorer.plan(samples, self.scorer.trained(samples, number, rows))
        whole = Size(*(ranks.reduce(accelerator, n, sum) for n in samples.size(rows)))
        world, loss_config = accelerator.num_processes, self.scorer.loss(samples)
        items = num_items(loss_config, whole, world)
        if samples.logps is None:
            samples.logps = torch.zeros(samples.mask.shape, device=accelerator.device)
        measured: list[dict[str, Tensor]] = []
        loss = torch.zeros((), device=accelerator.device)
        sharded, interruptions = ranks.sharding(accelerator) is not None, self.interruptions
        for index, part in enumerate(plan):
            batch, where = samples.batch(part, self.tokenizer.pad_token_id)
            T = batch.mask.shape[1]
            part_config = config_of_part(loss_config, samples.size(part), whole, world)
            last = index == len(plan) - 1
            # DeepSpeed steps within the backward in which gradients are to be synced.
            accelerator.sync_gradients = last
            with nullcontext() if last else accelerator.no_sync(self.policy):
                with interruptions.shared(waits=sharded, may_stop=number == 0):
                    with accelerator.autocast():
                        part_loss, part_metrics, logps = self.policy(
                            "loss", batch, samples.advantages[where], part_config,
                            **samples.other_logps(where, T), num_items=items,
                            execution=self._execution(f"columns-{number}-{index}"),
                        )  # fmt: skip
                    if not last:
                        accelerator.backward(part_loss)
                measured.append(part_metrics)
                if last:
                    merged = metrics.merge_micro_batches(measured, self._gather)
                    if number == 0:
                        dtype = getattr(self.sampler.rollout, "why_gap", None)
                        merged |= self.log.watch.sampler_gap(merged, dtype)
                    with interruptions.shared(waits=sharded or world > 1):
                        accelerator.backward(part_loss)
            loss += part_loss.detach()
            if part:
                samples.logps[where, :T] = logps
        return merged, loss

    def _execution(self, draw: str) -> Execution:
        """The `Execution` of a micro-batch's loss; a sampled backward has the columns of a draw."""
        execution = self.scorer.execution()
        if self.config.backward == "exact":
            return execution
        from ..experimental import Sampled

        return replace(execution, backward=Sampled(self.config.tolerance, self._seed(draw)))

    def _drop_gradients(self) -> None:
        ranks.drop_gradients(self.accelerator, self.policy, self.optimizer)

    def _optimizer_step(self) -> float:
        """Clips the gradient and, if it is finite, steps; returns its norm."""
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        norm = self.accelerator.clip_grad_norm_(trained, self.config.max_grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        grad_norm = float(norm) if norm is not None else math.nan
        self.bad_updates += 1
        if norm is None or math.isfinite(grad_norm):
            self.within_step = True
            self.optimizer.step()
            self.bad_updates = 0
        self.sampler.weights_changed()
        self.optimizer.zero_grad()
        if self.bad_updates >= self.config.max_bad_updates:
            raise BadUpdates(self.bad_updates, checkpoint.latest(self.config.folder))
        return grad_norm

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
        if c.resample_equal_groups:
            row["resampled"] = ranks.reduce(self.accelerator, samples.resampled, sum)
        row |= self.scorer.taken_of_memory()
        if self.bad_updates:
            row["bad_updates"] = self.bad_updates
        # That of an evaluation before this step, too.
        if self.sampler.sync_seconds:
            clock.seconds["sync"], self.sampler.sync_seconds = self.sampler.sync_seconds, 0.0
        row["seconds"] = sum(clock.seconds.values())
        row |= {f"seconds/{name}": value for name, value in clock.seconds.items()}
        row["peak_memory_gib"] = metrics.peak_memory(self.accelerator.device) / 2**30
        return row

    def evaluate(self, problems: Sequence[Problem]) -> Evaluation:
        """Accuracy of one completion per problem, at `config.eval_temperature`."""
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
            checkpoint.verify(self.accelerator, config.folder, found)
            state = checkpoint.state_of(found)
            checkpoint.check_same(state, config.as_json(), self.accelerator.num_processes)
        self.accelerator.wait_for_everyone()
        self.log.open(state.get("step", -1))
        sampler = getattr(self.sampler.rollout, "description", None)
        self.log.introduce(self.policy, len(self.train_problems), len(self.held_out), sampler)
        if found is not None:
            self.accelerator.load_state(str(found))
            self.sampler.weights_changed()
            self.step, self.best = state["step"], state["best"]
            self.saved, self.within_step = self.step, False
            self.scorer.restore_memory(state.get("memory"))
            self.sampler.restore_memory(state.get("sampling_memory"))
            self.order.restore(state["problems"])
            self.evaluated = state.get("evaluated", True)
            self.log.watch.restore(state["watch"])
            self.log.say(f"Going on after step {self.step}, from {found}")
        self.accelerator.wait_for_everyone()

    def _stop_after(self, step: int, error: BaseException) -> None:
        """Keeps what was trained up to a step, if its weights are still the policy's."""
        self.step = step
        if self.accelerator.num_processes > 1 and not isinstance(error, (StepError, Preempted)):
            return  # the others wait elsewhere
        if self.saved < step and not self.within_step and self.config.save_every >= 0:
            self._save()
        then = f"resume goes on after step {self.saved}" if self.saved else "no checkpoint was kept"
        self.log.say(f"Stopped: {then}")
        if step and isinstance(error, Preempted):
            self.log.finish()
        self.accelerator.wait_for_everyone()

    def _save(self) -> None:
        if self.bad_updates or not ranks.finite(self.accelerator, self.policy):
            self.log.warn(f"no checkpoint of step {self.step}: gradients or weights are not finite")
            return
        state = {
            "step": self.step, "best": self.best, "evaluated": self.evaluated,
            "config": self.config.as_json(), "processes": self.accelerator.num_processes,
            "problems": self.order.done, "watch": self.log.watch.state(),
            "memory": self.scorer.memory(), "sampling_memory": self.sampler.memory(),
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

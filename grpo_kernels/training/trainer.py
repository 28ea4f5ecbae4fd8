"""The loop: sample, judge, compare within groups, step. Read `Trainer.train_step` first."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn
from tqdm import tqdm

from .. import GRPOLossConfig, group_advantages
from ..layout import to_device as placed
from ..integrations.head import check_logits
from ..objective import masked_quantile
from . import checkpoint, logs, metrics, report
from .config import TrainingConfig
from .data import Problem, in_order
from .evaluate import Evaluation, accuracy_of
from .loading import check_folder
from .policy import Batch, Policy, without_dropout
from .rewards import Reward, is_right, named, reward_table, weighed
from .rollout import (
    Completion,
    ContinuousBatchingRollout,
    GenerateRollout,
    Rollout,
    Sampling,
    pad,
)
from .samples import Samples, micro_batches
from .watch import Watch


class Trainer:
    """GRPO for a causal language model.

    Args:
        config: every number and name of the run.
        model: a transformers or PEFT model; what requires a gradient is trained.
        tokenizer: the model's.
        train: problems, dicts with a `prompt` (a string, or a chat's messages), and the columns
            that the reward functions want.
        held_out: problems for the evaluations.
        rewards: functions by name, for names in `config.rewards` that are not the library's.
        is_right: takes a completion and its problem's answer; the accuracy of evaluations.
        rollout: who samples, given the wrapped policy; None: as `config.rollout` says.

    `train()` runs it. The run's folder then has `config.json`, `metrics.jsonl` (a row a step),
    `samples.jsonl`, `evaluations.jsonl`, `answers.jsonl` (of the evaluations), `checkpoints/`,
    `report.html`, `reward.png` and `model/`.
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
        is_right: Callable[[str, str], bool] = is_right,
        rollout: Callable[[nn.Module], Rollout] | None = None,
    ) -> None:
        check_folder(config)
        self.config, self.tokenizer, self.is_right = config, tokenizer, is_right
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.rewards = named(config.rewards, rewards)
        self.accelerator = Accelerator(
            mixed_precision=_precision(config), log_with=config.trackers or None,
            project_dir=str(config.folder),
        )  # fmt: skip
        there = {str(tracker) for tracker in self.accelerator.log_with}
        missing = [name for name in config.trackers if name not in there | {"all"}]
        if missing:
            raise ImportError(f"trackers: {missing[0]} is not installed: pip install {missing[0]}")
        world, kind = self.accelerator.num_processes, self.accelerator.distributed_type.value
        self.sharded = kind if kind in ("FSDP", "DEEPSPEED") else None
        if config.prompts_per_step % (world * config.minibatches):
            raise ValueError(
                f"prompts_per_step: expected a multiple of processes times minibatches, {world} * "
                f"{config.minibatches}; got {config.prompts_per_step}"
            )
        if rollout is None:
            self._check_default_rollout()
        if self.sharded == "DEEPSPEED" and config.num_iterations > 1:
            raise ValueError(
                f"num_iterations: expected 1 with DeepSpeed, which shards the policy and not the "
                f"reference; got {config.num_iterations}"
            )
        set_seed(config.seed)
        self.train_problems = self._short_enough(train)
        self.held_out = self._short_enough(held_out)
        if not all("answer" in problem for problem in self.held_out):
            raise ValueError("held_out: expected an answer in every problem, to compare with")
        self.judged = all("answer" in problem for problem in self.train_problems)
        self.reference = self._make_reference(model)
        policy = without_dropout(Policy(model, share_prompts=config.share_prompts))
        check_logits(policy.model, torch.tensor([self._encode(self.train_problems[0])]))
        trained = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=config.learning_rate, betas=(0.9, config.adam_beta2),
            weight_decay=config.weight_decay,
        )  # fmt: skip
        if self.sharded == "DEEPSPEED":
            self._configure_deepspeed()
        self.policy, self.optimizer = self.accelerator.prepare(policy, optimizer)
        if self.reference is not None:
            self.reference = self._placed(self.reference)
        self.rollout = (rollout or self._default_rollout)(self.policy)
        self.watch = Watch(config)
        self.logs = logs.Logs(config.folder)
        self.step = 0
        self.best: dict[str, Any] = {}
        checkpoint.trained_weights_only(self.accelerator)

    def train(self) -> Path:
        """Runs what is left of the steps; returns the run's folder."""
        config, main = self.config, self.accelerator.is_main_process
        self._open_folder()
        if self.step == 0:
            self._evaluate()
        ids = islice(
            in_order(len(self.train_problems), config.seed),
            self.step * config.prompts_per_step,
            None,
        )
        progress = tqdm(
            total=config.steps, initial=self.step, desc=config.name, disable=not main,
            dynamic_ncols=True,
        )  # fmt: skip
        while self.step < config.steps:
            problems = [self.train_problems[i] for i in islice(ids, config.prompts_per_step)]
            self.step += 1
            row, samples = self.train_step(problems)
            self._tell(progress, row, samples)
            last = self.step == config.steps
            improved = (last or _every(config.eval_every, self.step)) and self._evaluate()
            if improved or last or _every(config.save_every, self.step):
                self._save()
        progress.close()
        return self._finish()

    def train_step(self, problems: Sequence[Problem]) -> tuple[dict[str, Any], Samples]:
        """One rollout of these problems (of all processes) and the updates on it."""
        config = self.config
        # Anew in each step: a run that goes on from a checkpoint draws what it would have drawn.
        set_seed(self._draw("step"))
        if self.reference is not None and self._starts_iteration():
            self._refresh_reference()
        clock = metrics.Clock(self.accelerator.device)
        samples = self._sample(problems, clock)
        with clock("score"):
            self._score(samples)
        minibatches = self._minibatches(len(samples.texts)) * config.epochs_per_rollout
        with clock("train"):
            updates = [self._update(samples, *update) for update in enumerate(minibatches)]
        row = self._row(samples, updates, clock)
        return row, samples

    # Sampling and judging

    def _sample(self, problems: Sequence[Problem], clock: metrics.Clock) -> Samples:
        config, rank = self.config, self.accelerator.process_index
        mine = problems[rank :: self.accelerator.num_processes]
        G = config.num_generations
        with clock("generate"):
            prompts = [self._encode(problem) for problem in mine]
            completions = self._completions(prompts, G, self._sampling(config.temperature))
        with clock("reward"):
            repeated = [problem for problem in mine for _ in range(G)]
            texts = self._texts(completions)
            rewards = torch.tensor(reward_table(self.rewards, repeated, texts), dtype=torch.float64)
            totals = weighed(rewards, config.reward_weights)
            everyone = self._gather(rewards)
            advantages = group_advantages(
                everyone, G, scale=config.scale_rewards, weights=config.reward_weights or None
            )[rank * len(texts) : (rank + 1) * len(texts)]
        device = self.accelerator.device
        mask = pad([[1] * len(c.token_ids) for c in completions], 0, device=device)[0]
        if config.mask_truncated_completions:
            mask *= torch.tensor([[c.ended] for c in completions], device=device)
        return Samples(
            repeated, [prompt for prompt in prompts for _ in range(G)], completions, texts, rewards,
            totals, advantages.to(device), mask, self._right(repeated, texts),
            sampling_logps=self._sampling_logps(completions, mask),
        )  # fmt: skip

    def _completions(
        self, prompts: list[list[int]], count: int, sampling: Sampling
    ) -> list[Completion]:
        with self.accelerator.autocast():
            completions = self.rollout(prompts, count, sampling)
        if len(completions) != len(prompts) * count:
            raise ValueError(
                f"rollout: expected {count} completions of {len(prompts)} prompts; got "
                f"{len(completions)}"
            )
        if not all(c.token_ids for c in completions):
            raise ValueError("rollout: expected at least one token in every completion; got none")
        return completions

    def _sampling_logps(self, completions: list[Completion], mask: Tensor) -> Tensor | None:
        if any(c.logps is None for c in completions):
            self._check_no_correction()
            return None
        logps = torch.zeros(mask.shape)
        for i, c in enumerate(completions):
            logps[i, : len(c.token_ids)] = torch.tensor(c.logps)
        return logps.to(mask.device)

    def _sampling(self, temperature: float) -> Sampling:
        c = self.config
        return Sampling(
            c.max_completion_length, temperature, c.top_k, c.top_p, c.min_p, tuple(c.stop)
        )

    def _right(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[bool]:
        if not self.judged:
            return []
        return [self.is_right(t, str(p["answer"])) for t, p in zip(texts, problems, strict=True)]

    def _texts(self, completions: Sequence[Completion]) -> list[str]:
        ids = [c.token_ids for c in completions]
        return list(self.tokenizer.batch_decode(ids, skip_special_tokens=True))

    # Log-probs of other policies, and of this one before its updates

    def _score(self, samples: Samples) -> None:
        config = self.config
        everything = self._plan(samples, range(len(samples.texts)))
        # With one update a rollout the policy is the one that sampled: its ratio is 1.
        needs_old = config.updates_per_step > 1
        needs_entropy = config.top_entropy_quantile < 1
        if needs_old or needs_entropy:
            old, entropy = self._logps(self.policy, samples, everything, entropy=needs_entropy)
            samples.old_logps = old if needs_old else None
            if needs_entropy:
                samples.entropy_threshold = self._entropy_threshold(samples, entropy)
        if config.beta:
            adapted = self.accelerator.unwrap_model(self.policy).model
            with adapted.disable_adapter() if config.lora_rank else nullcontext():
                reference = self.policy if config.lora_rank else self.reference
                samples.ref_logps, _ = self._logps(reference, samples, everything)

    def _logps(
        self, policy: Any, samples: Samples, plan: list[list[int]], entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        logps, entropies = torch.zeros(2, *samples.mask.shape, device=samples.mask.device)
        for rows in self._same_number(plan):
            batch, where = self._batch(samples, rows)
            with self.accelerator.autocast():
                some, their_entropy = policy("logps", batch, self.config.temperature, entropy)
            if rows is _NOTHING:
                continue
            logps[where, : some.shape[1]] = some
            if entropy:
                entropies[where, : some.shape[1]] = their_entropy
        return logps, entropies

    def _entropy_threshold(self, samples: Samples, entropy: Tensor) -> Tensor:
        """The quantile over all processes, which no micro-batch knows by itself."""
        values = [entropy[samples.mask != 0].cpu()]
        if self.accelerator.num_processes > 1:
            values = gather_object(values)
        together = torch.cat([v.cpu() for v in values])
        q = 1 - self.config.top_entropy_quantile
        return masked_quantile(together, torch.ones_like(together), q).to(entropy.device)

    # Updates

    def _minibatches(self, count: int) -> list[list[int]]:
        """Rows of whole groups, in as many parts; the same parts for any number of processes."""
        size = count // self.config.minibatches
        return [list(range(start, start + size)) for start in range(0, count, size)]

    def _update(self, samples: Samples, number: int, rows: list[int]) -> dict[str, float]:
        """One optimizer step, of this number in the rollout, on these rows of every process."""
        config, accelerator = self.config, self.accelerator
        rate = learning_rate(config, (self.step - 1) * config.updates_per_step + number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        plan = self._plan(samples, [i for i in rows if self._trains(samples, i)])
        tokens = sum(samples.counted[i] for i in rows)
        all_tokens = self._over_processes(tokens, sum)
        all_rows = self._over_processes(len(rows), sum)
        world = accelerator.num_processes
        plan = self._same_number(plan)
        gathered: list[dict[str, Tensor]] = []
        loss = torch.zeros((), device=accelerator.device)
        for index, some in enumerate(plan):
            batch, where = self._batch(samples, some)
            mine = [] if some is _NOTHING else some
            count = sum(samples.counted[i] for i in mine)
            share = world * self._share(count, len(mine), all_tokens, all_rows)
            config_here = self._loss_config(share, world * count / max(all_tokens, 1))
            T = batch.mask.shape[1]
            options: dict[str, Any] = {
                key: None if x is None else x[where, :T]
                for key, x in (
                    ("old_logps", samples.old_logps),
                    ("ref_logps", samples.ref_logps),
                    ("sampling_logps", samples.sampling_logps),
                )
            }
            if config_here.average == "dapo":
                options["num_items"] = all_tokens / world
            if config.top_entropy_quantile < 1:
                options["entropy_threshold"] = samples.entropy_threshold
            if config.backward == "sampled":
                options |= {"backward": "sampled", "tolerance": config.tolerance}
                options["seed"] = self._draw(f"columns-{number}-{index}")
            last = index == len(plan) - 1
            with nullcontext() if last else accelerator.no_sync(self.policy):
                with accelerator.autocast():
                    part, told, logps = self.policy(
                        "loss", batch, samples.advantages[where], config_here, **options
                    )
                # DeepSpeed steps within the backward, where gradients are to be synced.
                accelerator.sync_gradients = last
                accelerator.backward(part * share)
            loss += part.detach() * share
            gathered.append(told)
            if samples.logps is None:
                samples.logps = torch.zeros(samples.mask.shape, device=logps.device)
            if mine:
                samples.logps[where, :T] = logps
        norm = accelerator.clip_grad_norm_(self._trained(), config.max_grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        grad_norm = float(norm) if norm is not None else math.nan
        if math.isfinite(grad_norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            **metrics.of_update(gathered, self._gather), "grad_norm": grad_norm,
            "loss": self._over_processes(float(loss), metrics.mean), "learning_rate": rate,
        }  # fmt: skip

    def _trains(self, samples: Samples, row: int) -> bool:
        """Whether a completion has a gradient at all."""
        c = self.config
        if not c.skip_untrained or c.beta or c.entropy_coef:
            return True
        return samples.has_advantage[row] and samples.counted[row] > 0

    def _share(self, tokens: int, rows: int, all_tokens: int, all_rows: int) -> float:
        """What a micro-batch's loss counts for, so that the parts add up to that of the whole."""
        average = self.config.loss().average
        if average == "dapo":  # its denominator is the whole's already
            return 1 / self.accelerator.num_processes
        if average == "bnpo":
            return tokens / max(all_tokens, 1)
        return rows / max(all_rows, 1)

    def _loss_config(self, share: float, token_share: float) -> GRPOLossConfig:
        """The mean entropy is over tokens, whatever the loss is averaged over."""
        loss = self.config.loss()
        if not loss.entropy_coef or not share:
            return loss
        return replace(loss, entropy_coef=loss.entropy_coef * token_share / share)

    def _plan(self, samples: Samples, rows: Sequence[int]) -> list[list[int]]:
        """Micro-batches with as little padding as can be had by sorting."""
        unwrapped = self.accelerator.unwrap_model(self.policy)
        return micro_batches(
            rows, self.config.micro_batch_size, samples.prompts, samples.lengths,
            shared=unwrapped.not_shared is None,
        )  # fmt: skip

    def _same_number(self, plan: list[list[int]]) -> list[list[int]]:
        """As many micro-batches as the process with the most: gradients are reduced together."""
        most = max(1, self._over_processes(len(plan), max))
        return [*plan, *[_NOTHING] * (most - len(plan))]

    def _batch(self, samples: Samples, rows: list[int]) -> tuple[Batch, Tensor]:
        """Some rows of the samples, and their numbers, both on the device."""
        pad_id, device = self.tokenizer.pad_token_id, self.accelerator.device
        batch = Batch.of_rows(
            [samples.prompts[i] for i in rows], [samples.completions[i].token_ids for i in rows],
            pad_id, device,
        )  # fmt: skip
        where = placed(torch.tensor(rows), device)
        mask = samples.mask[where, : batch.mask.shape[1]]
        return replace(batch, mask=torch.zeros_like(mask) if rows is _NOTHING else mask), where

    # The reference

    def _make_reference(self, model: nn.Module) -> Any:
        """A copy of the model as it is now; what is frozen in both is there once."""
        if not self.config.beta or self.config.lora_rank:
            return None
        frozen = [] if self.sharded else [p for p in model.parameters() if not p.requires_grad]
        copied = copy.deepcopy(model, {id(p): p for p in frozen}).eval().requires_grad_(False)
        return Policy(copied, share_prompts=self.config.share_prompts)

    def _placed(self, reference: Policy) -> Any:
        """On the device, sharded as the policy is."""
        if self.accelerator.is_fsdp2:
            from accelerate.utils.fsdp_utils import fsdp2_prepare_model

            return fsdp2_prepare_model(self.accelerator, reference)
        return reference.to(self.accelerator.device)

    def _configure_deepspeed(self) -> None:
        """What it wants to know before anything is prepared, and does in our place."""
        plugin = self.accelerator.state.deepspeed_plugin
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": self.config.micro_batch_size,
            "train_batch_size": self.config.micro_batch_size * self.accelerator.num_processes,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.config.max_grad_norm,
            "zero_allow_untested_optimizer": True,
        }

    def _starts_iteration(self) -> bool:
        """Whether this step is the first of an iteration after the first."""
        starts = {
            round(i * self.config.steps / self.config.num_iterations)
            for i in range(1, self.config.num_iterations)
        }
        return self.step - 1 in starts

    @torch.no_grad()
    def _refresh_reference(self) -> None:
        unwrap = self.accelerator.unwrap_model
        policy, reference = unwrap(self.policy), unwrap(self.reference)
        for module in (*policy.modules(), *reference.modules()):
            # Under FSDP2 a root stays whole after its forward.
            if hasattr(module, "reshard"):
                module.reshard()
        for mine, theirs in zip(policy.parameters(), reference.parameters(), strict=True):
            theirs.copy_(mine)

    # Metrics

    def _row(
        self, samples: Samples, updates: list[dict[str, float]], clock: metrics.Clock
    ) -> dict[str, Any]:
        """What a step is remembered by: means over all processes."""
        rewards = self._gather(samples.rewards)
        lengths = self._gather(torch.tensor(samples.lengths).double())
        ended = self._gather(torch.tensor([float(c.ended) for c in samples.completions]))
        total = weighed(rewards, self.config.reward_weights)
        groups = total.view(-1, self.config.num_generations)
        row: dict[str, Any] = {"step": self.step, "reward": float(total.mean())}
        row["reward_std"] = float(groups.std(1).mean())
        for name, column in zip(self.rewards, rewards.T, strict=True):
            row[f"reward/{name}"] = float(column.nanmean())
        if self.judged:
            row["right"] = float(self._gather(torch.tensor(samples.right).double()).mean())
        row["groups_equal"] = float((groups.amax(1) == groups.amin(1)).double().mean())
        row["completion_length"] = float(lengths.mean())
        row["truncated"] = 1 - float(ended.mean())
        row |= metrics.of_step(updates)
        row["seconds"] = sum(clock.seconds.values())
        row |= {f"seconds/{name}": value for name, value in clock.seconds.items()}
        row["peak_memory_gib"] = metrics.peak_memory(self.accelerator.device) / 2**30
        return row

    # Between processes

    def _gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes, in the order of their ranks, on the CPU."""
        if self.accelerator.num_processes == 1:
            return rows.cpu()
        return self.accelerator.gather(rows.to(self.accelerator.device)).cpu()

    def _over_processes(self, value: Any, reduce: Callable[[list[Any]], Any]) -> Any:
        if self.accelerator.num_processes == 1:
            return value
        return reduce(gather_object([value]))

    # What is seen and kept

    def _tell(self, progress: Any, row: dict[str, Any], samples: Samples) -> None:
        warnings = self.watch.after_step(row, self._worst_token(samples, row))
        if warnings:
            row["warnings"] = warnings
        if not self.accelerator.is_main_process:
            return
        self._log("metrics.jsonl", row)
        if self.config.trackers:
            numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
            self.accelerator.log(numbers, step=self.step)
        progress.update()
        for warning in warnings:
            tqdm.write(f"      warning: {warning}")
        tqdm.write(report.line(row))
        if self.step == 1 or self.step % self.config.show_every == 0:
            shown = report.sample_rows(samples, self.config.num_generations)
            for sample in shown:
                self._log("samples.jsonl", {"step": self.step, **sample})
            tqdm.write(report.sample_table(shown))
            self._report()

    def _log(self, name: str, row: Mapping[str, Any]) -> None:
        problem = self.logs.append(name, row)
        if problem is not None:
            tqdm.write(
                f"      warning: {name} was not written ({problem}); its rows are kept and written "
                f"when there is room in {self.config.folder}"
            )

    def _report(self) -> None:
        try:
            report.write(self.config.folder)
        except OSError as error:
            tqdm.write(f"      warning: no report ({type(error).__name__}: {error})")

    def _worst_token(self, samples: Samples, row: dict[str, Any]) -> str | None:
        """The token whose log-prob moved the most, in words; None without one to compare."""
        spike = self.watch.spike(row)
        against = {"ratio_max": samples.old_logps, "kl_max": samples.ref_logps}.get(spike or "")
        if spike is None or against is None:
            return None
        gap, text = 0.0, ""
        if samples.logps is not None:
            seen = (samples.mask != 0) & (samples.logps != 0)
            gaps = torch.where(seen, samples.logps - against, 0.0).abs()
            i, t = divmod(int(gaps.argmax()), gaps.shape[1])
            ids = samples.completions[i].token_ids
            token, before = (
                self.tokenizer.decode(some) for some in ([ids[t]], ids[max(0, t - 8) : t])
            )
            gap = float(gaps[i, t])
            text = (
                f"token {t} {token!r} after {before!r}: log-prob {float(against[i, t]):.2f} -> "
                f"{float(samples.logps[i, t]):.2f}"
            )
        found: tuple[float, str] = self._over_processes((gap, text), max)
        return found[1]

    def _evaluate(self) -> bool:
        """Answers the held-out problems; whether they were answered better than ever."""
        if not self.held_out:
            return False
        set_seed(self._draw("evaluation"))
        evaluation = self.evaluate(self.held_out)
        better = evaluation.accuracy > self.best.get("accuracy", -1.0)
        if better:
            self.best = {"step": self.step, "accuracy": evaluation.accuracy}
        warning = self.watch.after_evaluation(evaluation)
        if self.accelerator.is_main_process:
            self._log("evaluations.jsonl", evaluation.summary(self.step))
            for answer in evaluation.answers:
                self._log("answers.jsonl", {"step": self.step, **answer})
            tqdm.write(f"{self.step:5d}  {evaluation}")
            if warning:
                tqdm.write(f"      warning: {warning}")
            if self.config.trackers:
                self.accelerator.log({"accuracy": evaluation.accuracy}, step=self.step)
        return better and self.step > 0

    def evaluate(self, problems: Sequence[Problem]) -> Evaluation:
        """Accuracy of one completion a problem, at `config.eval_temperature`."""
        config, world = self.config, self.accelerator.num_processes
        each = math.ceil(len(problems) / world)
        rank = self.accelerator.process_index
        # The same number for everyone; of those that come twice the second is left out.
        mine = [i % len(problems) for i in range(rank * each, (rank + 1) * each)]
        size = max(1, config.prompts_per_step // world * config.num_generations)
        answers = []
        for start in range(0, each, size):
            some = [problems[i] for i in mine[start : start + size]]
            prompts = [self._encode(problem) for problem in some]
            completions = self._completions(prompts, 1, self._sampling(config.eval_temperature))
            texts = self._texts(completions)
            table = torch.tensor(reward_table(self.rewards, some, texts), dtype=torch.float64)
            totals = weighed(table, config.reward_weights).tolist()
            rows = zip(some, texts, table.tolist(), totals, completions, strict=True)
            for problem, text, values, total, done in rows:
                answers.append({
                    "prompt": problem["prompt"], "completion": text, "answer": problem["answer"],
                    "right": self.is_right(text, str(problem["answer"])), "ended": done.ended,
                    "reward": total, "rewards": dict(zip(self.rewards, values, strict=True)),
                })  # fmt: skip
        if world > 1:
            answers = gather_object(answers)
        return accuracy_of(answers[: len(problems)])

    def _save(self) -> None:
        state = {
            "step": self.step, "best": self.best, "config": asdict(self.config),
            "processes": self.accelerator.num_processes, "watch": self.watch.state(),
        }  # fmt: skip
        reference = self.reference if self.config.num_iterations > 1 else None
        problem = checkpoint.save(self.accelerator, self.config.folder, state, reference)
        if problem is None:
            keep = {self.step, self.best.get("step", self.step)}
            checkpoint.prune(self.accelerator, self.config.folder, keep)
        elif self.accelerator.is_main_process:
            tqdm.write(
                f"      warning: no checkpoint of step {self.step} ({problem}); the last one is "
                f"untouched and training goes on. Make room in {self.config.folder}"
            )

    def _open_folder(self) -> None:
        config, main = self.config, self.accelerator.is_main_process
        found = checkpoint.latest(config.folder) if config.resume else None
        state = {} if found is None else checkpoint.state_of(found)
        if found is not None:
            checkpoint.check_same(state, asdict(config), self.accelerator.num_processes)
        self.accelerator.wait_for_everyone()
        if main:
            config.folder.mkdir(parents=True, exist_ok=True)
            logs.cut(config.folder, state.get("step", -1))
            (config.folder / "config.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
            tqdm.write(self._about())
        if found is not None:
            checkpoint.load(self.accelerator, found, self.reference)
            self.step, self.best = state["step"], state["best"]
            self.watch.restore(state["watch"])
            if main:
                tqdm.write(f"Going on after step {self.step}, from {found}")
        self.accelerator.wait_for_everyone()
        if config.trackers:
            self.accelerator.init_trackers(config.name, config=report.flat(config))

    def _about(self) -> str:
        policy = self.accelerator.unwrap_model(self.policy)
        trained = sum(p.numel() for p in self._trained())
        text = (
            f"{self.config.model} on {self.accelerator.device}, {self.accelerator.num_processes} "
            f"process(es): {trained / 1e6:,.1f}M parameters trained; "
            f"{len(self.train_problems):,} problems, {len(self.held_out):,} held out; "
            f"results in {self.config.folder}/"
        )
        if self.config.dtype == "bf16" and not self.config.lora_rank:
            text += (
                "\nwarning: weights in bf16 move by 1/256 of themselves or not at all: use dtype "
                "fp32 (its products are bf16 with precision), lora_rank, or a large learning_rate"
            )
        if self.config.share_prompts and policy.not_shared:
            text += f"\nPrompts are encoded with each completion: {policy.not_shared}"
        return text

    def _finish(self) -> Path:
        folder = self.config.folder
        if self.config.save_model:
            model = self.accelerator.unwrap_model(self.policy).model
            state = self.accelerator.get_state_dict(self.policy)
            if self.accelerator.is_main_process:
                state = {name.removeprefix("model."): value for name, value in state.items()}
                model.save_pretrained(folder / "model", state_dict=state)
                self.tokenizer.save_pretrained(folder / "model")
        if self.accelerator.is_main_process:
            self._report()
            report.picture(folder)
            tqdm.write(report.summary(folder))
        for tracker in self.accelerator.trackers:
            tracker.finish()
        return folder

    # Prompts, draws

    def _encode(self, problem: Problem) -> list[int]:
        prompt = problem["prompt"]
        if isinstance(prompt, str) and not self.config.chat:
            return list(self.tokenizer(prompt).input_ids)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        return list(ids if isinstance(ids, list) else ids["input_ids"])

    def _short_enough(self, problems: Sequence[Problem]) -> list[Problem]:
        longest = self.config.max_prompt_length
        kept = [p for p in problems if len(self._encode(p)) <= longest]
        if len(kept) < len(problems) and self.accelerator.is_main_process:
            tqdm.write(
                f"{len(problems) - len(kept)} of {len(problems)} problems are left out: their "
                f"prompts have more than max_prompt_length = {longest} tokens"
            )
        if problems and not kept:
            raise ValueError(
                f"max_prompt_length: expected room for at least one prompt; got {longest}"
            )
        return kept

    def _draw(self, what: str) -> int:
        """A seed of its own for each thing that is drawn in each step and process."""
        text = f"{self.config.seed}-{self.step}-{self.accelerator.process_index}-{what}"
        return random.Random(text).getrandbits(31)

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.policy.parameters() if p.requires_grad]

    def _default_rollout(self, policy: nn.Module) -> Rollout:
        if self.config.rollout == "continuous_batching":
            return ContinuousBatchingRollout(
                self.accelerator.unwrap_model(policy).model, self.tokenizer
            )
        return GenerateRollout(policy, self.tokenizer, synced=self.sharded is not None)

    def _check_no_correction(self) -> None:
        if self.config.is_correction != "none":
            raise ValueError(
                f"is_correction: expected 'none' with a rollout that reports no log-probs; got "
                f"{self.config.is_correction!r}"
            )

    def _check_default_rollout(self) -> None:
        self._check_no_correction()
        if self.config.rollout == "continuous_batching" and self.sharded:
            raise ValueError(
                "rollout: expected generate with sharded weights; got continuous_batching"
            )


# A micro-batch that takes part and counts for nothing: the last completion, masked.
_NOTHING = [-1]


def _precision(config: TrainingConfig) -> str:
    if config.precision != "auto":
        return config.precision
    return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"


def learning_rate(config: TrainingConfig, update: int) -> float:
    """Of the optimizer's step of this number, from 0."""
    total = config.steps * config.updates_per_step
    warm = min(1.0, (update + 1) / (config.warmup_steps + 1))
    done = max(0.0, (update - config.warmup_steps) / max(1, total - config.warmup_steps))
    falls = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}
    return config.learning_rate * warm * falls[config.schedule]


def _every(count: int, step: int) -> bool:
    return count > 0 and step % count == 0

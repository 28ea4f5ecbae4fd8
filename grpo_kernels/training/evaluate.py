"""Accuracy on held-out problems, and how sure it is.

    python -m grpo_kernels.training.evaluate run.yaml --model FOLDER

answers problems with the likeliest tokens, and by `--num_generations` samples: all of
`--eval_dataset`, or of `--dataset` the split test, else validation; with `--eval_size` so many. A
run writes its own to `held_out.jsonl` in its folder. Options are those of the training, in its own
file if there is one. A new folder, `--output` or one like it, gets the answers and a report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm import tqdm

from .config import DEFAULTS, TrainingConfig
from .problems.answers import extract_answer, is_correct
from .problems.data import Problem
from .problems.prompts import PromptEncoder, short_enough
from .problems.rewards import RewardFunction, check_rewards, judge, resolve_rewards, weighted_sum
from .run import logs, ranks
from .sampling.completions import vocabulary_of
from .sampling.rollout import Sampler

# Columns of problems by whose values accuracy is parts apart.
SUBGROUPS = ("held_out", "level")


@dataclass(frozen=True)
class Evaluation:
    """Held-out accuracy with its 95 % interval, of one or several completions per problem."""

    answers: list[dict[str, Any]]  # those of a problem are neighbors
    accuracy: float
    low: float  # the 95 % interval
    high: float
    reward: float  # NaN where no function applies
    count: int = 1  # completions per problem
    timed_out: int = 0  # comparisons of answers without a result, which count as wrong

    def __str__(self) -> str:
        texts = [
            f"held-out accuracy {self.accuracy:.1%} (95 %: {self.low:.1%} to {self.high:.1%}) of "
            f"{len(self.answers) // self.count}, reward {self.reward:.2f}"
        ]
        if self.timed_out:
            texts.append(f"{self.timed_out} comparisons had no result in time and count as wrong")
        for column, parts in self.parts.items():
            shares = (f"{value} {part.accuracy:.1%}" for value, part in parts.items())
            texts.append(f"{column}: {', '.join(shares)}")
        return "; ".join(texts)

    @property
    def parts(self) -> dict[str, dict[str, Evaluation]]:
        """Results, by column of `SUBGROUPS`, for problems with each of its values."""
        evaluations: dict[str, dict[str, Evaluation]] = {}
        for column in SUBGROUPS:
            values: dict[str, list[dict[str, Any]]] = {}
            for answer in self.answers:
                if answer.get(column) is not None:
                    values.setdefault(str(answer[column]), []).append(answer)
            if len(values) > 1:
                evaluations[column] = {
                    value: accuracy_of(values[value], self.count) for value in sorted(values)
                }
        return evaluations

    def summary(self, step: int) -> dict[str, Any]:
        """The row of `evaluations.jsonl`."""
        by = {
            column: {value: part._numbers() for value, part in parts.items()}
            for column, parts in self.parts.items()
        }
        return {"step": step, **self._numbers(), **({"by": by} if by else {})}

    def write(self, folder: Path, step: int, samples: Evaluation | None = None) -> None:
        """Adds the evaluation to a run's files, with its answers.

        Args:
            folder: the run's.
            step: the evaluated weights are those after it.
            samples: another evaluation, by several completions per problem.
        """
        more = {"samples": {"count": samples.count, **samples._numbers()}} if samples else {}
        logs.append(folder / "evaluations.jsonl", {**self.summary(step), **more})
        for answer in self.answers:
            logs.append(folder / "answers.jsonl", {"step": step, **answer})
        if samples is not None:
            for i, answer in enumerate(samples.answers):
                row = {"step": step, "sample": i % samples.count, **answer}
                logs.append(folder / "answers.jsonl", row)

    def _numbers(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy, "low": self.low, "high": self.high, "reward": self.reward,
            "problems": len(self.answers) // self.count,
            **({"timed_out": self.timed_out} if self.timed_out else {}),
        }  # fmt: skip


def accuracy_of(answers: Sequence[dict[str, Any]], count: int = 1, late: int = 0) -> Evaluation:
    """Sums up answers, `count` per problem, each of which has `correct` and `reward`.

    The interval is over problems, whose completions are not independent of each other.
    """
    groups = [answers[i : i + count] for i in range(0, len(answers), count)]
    shares = [sum(answer["correct"] for answer in group) / count for group in groups]
    rewards = [answer["reward"] for answer in answers if not math.isnan(answer["reward"])]
    reward = sum(rewards) / len(rewards) if rewards else math.nan
    return Evaluation(list(answers), *_mean_of(shares), reward, count, late)


def wilson_interval(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval (Wilson 1927), which stays in [0, 1] and has a width at both ends."""
    share = successes / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    # Rounding may move an end to the wrong side of the share itself.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def evaluate(
    problems: Sequence[Problem], sampler: Sampler, rewards: Sequence[RewardFunction],
    is_correct: Callable[[str, Any], bool], config: TrainingConfig, accelerator: Accelerator,
    count: int = 1,
) -> Evaluation:  # fmt: skip
    """Answers each problem `count` times; processes share the work.

    One answer is at `config.eval_temperature`, several are at `config.temperature`, and neighbors.
    """
    temperature = config.eval_temperature if count == 1 else config.temperature
    length = config.eval_max_completion_length
    world, rank = accelerator.num_processes, accelerator.process_index
    each = math.ceil(len(problems) / world)
    # Equally many per process; of those that come twice the second is dropped at the end.
    local = [problems[i % len(problems)] for i in range(rank * each, (rank + 1) * each)]
    size = max(1, config.prompts_per_step // world * config.num_generations // count)
    labels, answers, late = [reward.label for reward in rewards], [], 0
    for start in range(0, each, size):
        asked = deepcopy(local[start : start + size])  # which observers may change
        some = [problem for problem in asked for _ in range(count)]
        completions = sampler(asked, count, temperature, length=length)
        judged = judge(accelerator, rewards, is_correct, some, None, **sampler.written(completions))
        late += judged.timed_out
        totals = weighted_sum(judged.rewards, config.reward_weights).tolist()
        for i, problem in enumerate(some):
            text, whole = judged.texts[i], judged.transcripts[i]
            values = judged.rewards[i].tolist()
            answers.append({
                "prompt": problem["prompt"], "completion": whole,
                "answered": extract_answer(text),
                **({} if text == whole else {"sampled": text}), "answer": problem["answer"],
                "correct": judged.correct[i], "ended": completions[i].ended,
                "reward": totals[i], "rewards": dict(zip(labels, values, strict=True)),
                **{column: problem[column] for column in SUBGROUPS if column in problem},
            })  # fmt: skip
    answers = ranks.reduce(accelerator, answers, lambda parts: [a for part in parts for a in part])
    late = ranks.reduce(accelerator, late, sum)
    return accuracy_of(answers[: len(problems) * count], count, late)


def _mean_of(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of values from 0 to 1, and its 95 % interval; Wilson's where all are 0 or 1."""
    mean, n = sum(values) / len(values), len(values)
    if set(values) <= {0.0, 1.0}:
        return mean, *wilson_interval(round(sum(values)), n)
    if n == 1:  # of which nothing is known
        return mean, 0.0, 1.0
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    half = 1.96 * math.sqrt(variance / n)
    return mean, max(0.0, mean - half), min(1.0, mean + half)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(TrainingConfig):
    """Options of a run; those that an evaluation has no use for are as if they were not set."""

    def __post_init__(self) -> None:
        # The folder is new, and the model is taken as it is.
        for name in ("resume", "gradient_checkpointing", "lora_rank", "lora_alpha",
                     "lora_target", "eval_every"):  # fmt: skip
            object.__setattr__(self, name, DEFAULTS[name])
        super().__post_init__()


def main(argv: Sequence[str] | None = None) -> None:
    from .command_line import parse_config
    from .loading import check_rollout, load_model, make_rollout, set_pad_token
    from .problems.data import problems_of
    from .run import report
    from .step.policy import Policy

    config: TrainingConfig = parse_config(
        argv, kind=EvaluationConfig, output="runs/evaluation", eval_size=0
    ).in_new_folder()
    accelerator = ranks.make_accelerator(config)
    check_rollout(config, accelerator)
    rewards = resolve_rewards(config.rewards)
    try:
        problems = problems_of(config.dataset, config)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    check_rewards(rewards, problems, config.dataset, compared=True)
    model, tokenizer = load_model(config)
    set_pad_token(tokenizer, model)
    say = tqdm.write if accelerator.is_main_process else lambda _: None
    encode = PromptEncoder(tokenizer, chat=config.chat, vocabulary=vocabulary_of(model))
    problems = short_enough(problems, encode, config.max_prompt_length, say)
    if not problems:
        raise SystemExit("eval_size: expected at least one problem to answer; got none")
    policy = Policy.from_config(model.to(accelerator.device).eval(), config)
    rollout = make_rollout(config, policy, tokenizer, accelerator)
    sampler = Sampler(rollout, model, tokenizer, encode, config, accelerator)

    def ask(count: int) -> Evaluation:
        set_seed(config.seed, device_specific=True)
        return evaluate(problems, sampler, rewards, is_correct, config, accelerator, count)

    one, several = ask(1), ask(config.num_generations)
    say(f"    0  {one}")
    say(f"{several}, {several.count} samples per problem")
    if accelerator.is_main_process:
        logs.open_folder(config.folder, config.as_json(), -1)
        one.write(config.folder, 0, several)
        report.write_environment(config.folder)
        say(f"Look at {report.write(config.folder)[0]}")


if __name__ == "__main__":
    main()

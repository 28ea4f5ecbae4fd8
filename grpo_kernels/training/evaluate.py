"""Accuracy on held-out problems, and how sure it is.

    python -m grpo_kernels.training.evaluate --model FOLDER --dataset openai/gsm8k:main

answers problems with the likeliest tokens, and by `--num_generations` samples: those of the split
test, else validation, else all there are; with `--eval_size` so many. Options are those of the
training. A folder `evaluation` in `--output` gets the answers and a report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm import tqdm

from . import logs, ranks
from .config import TrainingConfig
from .data import Problem, PromptEncoder, short_enough
from .judging import judge, judge_answers, resolve_rewards, weighted_sum
from .rewards import LONGEST, Reward, equal, is_marked_correct, marked_answer, of_options
from .rollout import end_tokens, vocabulary_of
from .sampler import Sampler

# A share and its 95 % interval.
Share = tuple[float, float, float]
# Columns of problems by whose values accuracy is told apart.
GROUPS = ("held_out", "level")


@dataclass(frozen=True)
class Evaluation:
    """Held-out accuracy with its 95 % interval, one completion per problem."""

    answers: list[dict[str, Any]]
    accuracy: float
    low: float  # the 95 % interval
    high: float
    reward: float

    def __str__(self) -> str:
        told = [
            f"held-out accuracy {self.accuracy:.1%} (95 %: {self.low:.1%} to {self.high:.1%}) of "
            f"{len(self.answers)}, reward {self.reward:.2f}"
        ]
        for column, parts in self.parts.items():
            shares = (f"{value} {part.accuracy:.1%}" for value, part in parts.items())
            told.append(f"{column}: {', '.join(shares)}")
        return "; ".join(told)

    @property
    def parts(self) -> dict[str, dict[str, Evaluation]]:
        """Results, by column of `GROUPS`, for problems with each of its values."""
        found: dict[str, dict[str, Evaluation]] = {}
        for column in GROUPS:
            values: dict[str, list[dict[str, Any]]] = {}
            for answer in self.answers:
                if answer.get(column) is not None:
                    values.setdefault(str(answer[column]), []).append(answer)
            if len(values) > 1:
                found[column] = {value: accuracy_of(values[value]) for value in sorted(values)}
        return found

    def summary(self, step: int) -> dict[str, Any]:
        """The row of `evaluations.jsonl`."""
        by = {
            column: {value: part._numbers() for value, part in parts.items()}
            for column, parts in self.parts.items()
        }
        return {"step": step, **self._numbers(), **({"by": by} if by else {})}

    def write(self, folder: Path, step: int, samples: Mapping[str, Any] | None = None) -> None:
        """Adds it to a run's files, with its answers.

        Args:
            folder: of the run.
            step: the evaluated weights are those after it.
            samples: what several answers per problem show, if they were asked for.
        """
        more = {"samples": samples} if samples else {}
        logs.append(folder / "evaluations.jsonl", {**self.summary(step), **more})
        for answer in self.answers:
            logs.append(folder / "answers.jsonl", {"step": step, **answer})

    def _numbers(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy, "low": self.low, "high": self.high, "reward": self.reward,
            "problems": len(self.answers),
        }  # fmt: skip


def accuracy_of(answers: Sequence[dict[str, Any]]) -> Evaluation:
    """Sums up answers, each of which has `correct` and `reward`."""
    count, correct = len(answers), sum(answer["correct"] for answer in answers)
    low, high = wilson_interval(correct, count)
    reward = sum(answer["reward"] for answer in answers) / count
    return Evaluation(list(answers), correct / count, low, high, reward)


def wilson_interval(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval (Wilson 1927), which stays in [0, 1] and has a width at both ends."""
    share = successes / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    # Rounding may move an end to the wrong side of the share itself.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def evaluate(
    problems: Sequence[Problem], sampler: Sampler, rewards: Mapping[str, Reward],
    is_correct: Callable[[str, str], bool], config: TrainingConfig, accelerator: Accelerator,
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
    mine = [problems[i % len(problems)] for i in range(rank * each, (rank + 1) * each)]
    size = max(1, config.prompts_per_step // world * config.num_generations // count)
    answers = []
    for start in range(0, each, size):
        asked = mine[start : start + size]
        some = [problem for problem in asked for _ in range(count)]
        completions = sampler(asked, count, temperature, length=length)
        texts = sampler.texts(completions)
        more = sampler.beside(completions, texts)
        table = judge(accelerator, rewards, some, texts, config.reward_timeout, more)
        right = judge_answers(accelerator, is_correct, some, texts, config.reward_timeout)
        totals = weighted_sum(table, config.reward_weights).tolist()
        rows = zip(some, texts, more["transcripts"], table.tolist(), totals, completions, right,
                   strict=True)  # fmt: skip
        for problem, text, whole, values, total, done, correct in rows:
            answers.append({
                "prompt": problem["prompt"], "completion": whole,
                "answered": marked_answer(text, last=config.last_answer),
                **({} if text == whole else {"sampled": text}), "answer": problem["answer"],
                "correct": correct, "ended": done.ended,
                "reward": total, "rewards": dict(zip(rewards, values, strict=True)),
                **{column: problem[column] for column in GROUPS if column in problem},
            })  # fmt: skip
    answers = ranks.reduce(accelerator, answers, lambda parts: [a for part in parts for a in part])
    return accuracy_of(answers[: len(problems) * count])


def of_samples(answers: Sequence[dict[str, Any]], count: int) -> dict[str, Share]:
    """Figures of several samples per problem: `name: (mean, low, high)` over problems, 95 %.

    `accuracy` is that of one sample, `pass@k` the probability that one of k is right (without bias
    where k is less than `count`: Chen et al. 2021, arXiv:2107.03374), `majority@count` that of the
    answer that most of them give.
    """
    groups = [answers[i : i + count] for i in range(0, len(answers), count)]
    right = [sum(answer["correct"] for answer in group) for group in groups]
    found = {"accuracy": _mean_of([n / count for n in right])}
    for k in sorted({2**i for i in range(1, count.bit_length())} | {count}):
        if 1 < k <= count:
            values = [1 - math.comb(count - n, k) / math.comb(count, k) for n in right]
            found[f"pass@{k}"] = _mean_of(values)
    votes = [_majority(group) for group in groups]
    found[f"majority@{count}"] = _mean_of([float(correct) for correct in votes])
    return found


def _mean_of(values: Sequence[float]) -> Share:
    """The mean of values from 0 to 1, and its 95 % interval; Wilson's where all are 0 or 1."""
    mean, n = sum(values) / len(values), len(values)
    if set(values) <= {0.0, 1.0}:
        return mean, *wilson_interval(round(sum(values)), n)
    if n == 1:  # of which nothing is known
        return mean, 0.0, 1.0
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    half = 1.96 * math.sqrt(variance / n)
    return mean, max(0.0, mean - half), min(1.0, mean + half)


def _majority(group: Sequence[dict[str, Any]]) -> bool:
    """True if the answer that is given most often is right; of equally many, the first."""
    found: list[list[dict[str, Any]]] = []  # groups of equal answers
    for answer in group:
        if _given(answer):
            same = next((some for some in found if _same(some[0], answer)), None)
            if same is None:
                found.append([answer])
            else:
                same.append(answer)
    return bool(found and max(found, key=len)[0]["correct"])


def _given(answer: dict[str, Any]) -> str | None:
    """Returns what is marked in the policy's own part of a completion."""
    if "answered" in answer:
        return answer["answered"]
    return marked_answer(answer.get("sampled", answer["completion"]))


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if two answers to a problem are right, or equal."""
    if one["correct"] or other["correct"]:
        return bool(one["correct"] and other["correct"])
    given = [_given(answer) or "" for answer in (one, other)]
    return given[0] == given[1] or (max(map(len, given)) <= LONGEST and equal(*given))


def main(argv: Sequence[str] | None = None) -> None:
    from . import report
    from .command_line import parse_config
    from .data import load_to_answer
    from .loading import check_rollout, load_model, make_rollout, set_pad_token
    from .policy import Policy

    config = parse_config(argv, name="evaluation", eval_size=0)
    # The folder is new, and the model is taken as it is.
    config = replace(config, resume=False, lora_rank=0, trainable=None).unused()
    accelerator = ranks.make_accelerator(config)
    check_rollout(config, accelerator)
    rewards = resolve_rewards(config.rewards, None, of_options(config))
    is_correct = partial(is_marked_correct, last=config.last_answer)
    problems, which = load_to_answer(config)
    model, tokenizer = load_model(config)
    set_pad_token(tokenizer, model)
    say = tqdm.write if accelerator.is_main_process else lambda _: None
    say(which)
    encode = PromptEncoder(tokenizer, chat=config.chat)
    problems = short_enough(problems, encode, config.max_prompt_length, say)
    if not problems:
        raise SystemExit("eval_size: expected at least one problem to answer; got none")
    policy = Policy.of_run(model.to(accelerator.device).eval(), config)
    rollout = make_rollout(config, policy, tokenizer, accelerator)
    ends = end_tokens(model, tokenizer)
    sampler = Sampler(rollout, encode, config, accelerator, vocabulary_of(model), ends)

    def ask(count: int) -> Evaluation:
        set_seed(config.seed)
        return evaluate(problems, sampler, rewards, is_correct, config, accelerator, count)

    one, count = ask(1), config.num_generations
    several = ask(count)
    shown = of_samples(several.answers, count)
    for name, (mean, low, high) in shown.items():
        say(f"{name}: {mean:.1%} (95 %: {low:.1%} to {high:.1%}), {count} samples per problem")
    say(f"    0  {one}")
    if accelerator.is_main_process:
        logs.open_folder(config.folder, config.as_json(), -1)
        one.write(config.folder, 0, shown)
        for i, answer in enumerate(several.answers):
            logs.append(config.folder / "answers.jsonl", {"step": 0, "sample": i % count, **answer})
        say(f"Look at {report.write(config.folder)[0]}")


if __name__ == "__main__":
    main()

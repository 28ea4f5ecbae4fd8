"""Trains a model: `python -m grpo_kernels.training run.yaml --steps 100`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import Trainer, load_model, load_problems, parse_config


def main(argv: Sequence[str] | None = None) -> Path:
    config = parse_config(argv)
    problems = load_problems(config)  # before a model is downloaded
    return Trainer(config, *load_model(config), *problems).train()


if __name__ == "__main__":
    main()

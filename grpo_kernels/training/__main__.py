"""Trains a model: `python -m grpo_kernels.training run.yaml --steps 100`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import Trainer, parse_config
from .command_line import user_errors


def main(argv: Sequence[str] | None = None) -> Path:
    with user_errors(argv):
        trainer = Trainer.from_config(parse_config(argv))
    return trainer.train()


if __name__ == "__main__":
    main()

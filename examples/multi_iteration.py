"""Several updates on each rollout, and a reference that moves along.

    python examples/multi_iteration.py [--steps 12] [--model NAME] [--help]

The whole algorithm of the GRPO paper (arXiv:2402.03300, algorithm 1): I iterations, at the start of
which the reference becomes the policy; in each, rollouts; on each rollout mu epochs of updates,
whose importance ratios are against the policy that sampled, and clipped. Here I = 3 and mu = 3, in
two minibatches an epoch; look at `ratio_max`, `clip_low` and `clip_high` in the run's report.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples import smollm
from examples.train_additions import upper_half
from grpo_kernels.training import Trainer, load_model, load_problems, parse_config


def main(argv: Sequence[str] | None = None) -> Path:
    config = parse_config(
        argv, model=smollm.MODEL, name="multi-iteration", dataset="additions", steps=12,
        num_iterations=3, epochs_per_rollout=3, minibatches=2, beta=0.04, epsilon_high=0.28,
        rewards=["addition"], prompts_per_step=4, num_generations=8, max_completion_length=16,
        micro_batch_size=32, learning_rate=1e-5, eval_size=27, save_model=False,
    ).unused()  # fmt: skip
    if config.model == smollm.MODEL:
        config = replace(config, model=str(smollm.model_path()))
    if config.trainable is None:
        config = replace(config, trainable=upper_half(config.model))
    train, held_out = load_problems(config)
    return Trainer(config, *load_model(config), train, held_out).train()


if __name__ == "__main__":
    main()

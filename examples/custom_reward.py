"""A reward function of one's own, and one that applies to some problems only.

    python examples/custom_reward.py [--steps 20] [--model NAME] [--help]

Short answers to questions: one function likes brevity; another one, where a problem asks for it in
its column `rewards`, wants the answer to end with a full stop. Each is averaged and plotted apart.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples import smollm
from grpo_kernels.training import Trainer, load_model, parse_config

QUESTIONS = {
    "What is the capital of France?": "Paris",
    "How many legs has a spider?": "8",
    "Which planet is the largest?": "Jupiter",
    "What is frozen water called?": "ice",
}


def brief(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """1 for one word, less for each more."""
    return [1.0 / max(1, len(text.split())) for text in completions]


def full_stop(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [float(text.rstrip().endswith(".")) for text in completions]


def contains(completion: str, answer: str) -> bool:
    """What counts as right in evaluations; it earns nothing here."""
    return answer.lower() in completion.lower()


def main(argv: Sequence[str] | None = None) -> Path:
    config = parse_config(
        argv, model=smollm.MODEL, name="custom-reward", dataset="questions", steps=20,
        num_generations=8, prompts_per_step=4, max_completion_length=24, learning_rate=1e-5,
        rewards=["brief", "full_stop"], reward_weights=[1.0, 0.5], save_model=False,
    ).unused()  # fmt: skip
    if config.model == smollm.MODEL:
        config = replace(config, model=str(smollm.model_path()))
    problems = [
        {
            "prompt": f"Question: {question}\nAnswer:",
            "answer": answer,
            "rewards": ["brief", "full_stop"] if i % 2 else ["brief"],
        }
        for i, (question, answer) in enumerate(QUESTIONS.items())
    ]
    functions = {"brief": brief, "full_stop": full_stop}
    return Trainer(
        config, *load_model(config), problems, problems, rewards=functions, is_right=contains
    ).train()


if __name__ == "__main__":
    main()

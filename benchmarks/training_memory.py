"""The memory that a training run is predicted to need, and what it takes, on a CPU.

    python -m benchmarks.training_memory [--model FOLDER] [--parts]

Each case is two steps in a fresh process, with completions as long as they may be: what
`grpo_kernels.training.memory` counts on. The model has random weights, made in place. `--parts`
measures each part by itself: what stays when it has been made, or the peak beyond that.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import PeakMemory, header, write_json
from examples.demo_model import model_path
from grpo_kernels import fused_grpo_loss
from grpo_kernels.training import Completion, Trainer, TrainingConfig
from grpo_kernels.training import policy as policy_module
from grpo_kernels.training.loading import set_trainable
from grpo_kernels.training.memory import predict
from grpo_kernels.training.policy import Policy

PROMPT, LENGTH = 96, 64
CASES: dict[str, dict[str, Any]] = {
    "everything trained": {},
    "upper half, KL": {"trainable": r"\.layers\.(1[5-9]|2\d)\.", "beta": 0.1},
    "LoRA, rank 16": {"lora_rank": 16},
    "prompts not shared": {"share_prompts": False},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "half the micro-batch": {"micro_batch_size": 8},
}


class Longest:
    """A rollout whose completions are as long as they may be."""

    def __call__(self, prompts: Any, count: int, sampling: Any) -> list[Completion]:
        draw = torch.Generator().manual_seed(0)
        shape = (len(prompts) * count, sampling.max_new_tokens)
        ids = torch.randint(100, 1000, shape, generator=draw).tolist()
        return [Completion(row, False) for row in ids]


class NoTokenizer:
    """Prompts of nearly the greatest length, which differ so that there is padding."""

    pad_token_id, eos_token = 0, "."

    def __call__(self, prompt: str) -> Any:
        draw = torch.Generator().manual_seed(int(prompt))
        return argparse.Namespace(
            input_ids=torch.randint(100, 999, (PROMPT - int(prompt) % 4,), generator=draw).tolist()
        )

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        return ["x"] * len(rows)

    def decode(self, row: Any, **_: Any) -> str:
        return "x"


def rewards(prompts: list[Any], completions: list[str], **_: Any) -> list[float]:
    return [float(i % 3) for i in range(len(completions))]


def config_of(model: str, options: dict[str, Any], output: str = "runs") -> TrainingConfig:
    return TrainingConfig(**{
        "model": model, "steps": 2, "prompts_per_step": 4, "num_generations": 4, "output": output,
        "micro_batch_size": 16, "max_prompt_length": PROMPT, "max_completion_length": LENGTH,
        "rewards": ["it"], "eval_size": 0, "save_model": False, "save_every": -1, "precision": "no",
        **options,
    })  # fmt: skip


def measured(model: str, options: dict[str, Any]) -> int:
    """Returns the peak of a run."""
    with tempfile.TemporaryDirectory() as output:
        config, make = _model_of(model, options, output)
        with PeakMemory(torch.device("cpu")) as memory:
            _trainer_of(config, make()).train()
    assert memory.extra_bytes is not None
    return memory.extra_bytes


def measured_parts(model: str, options: dict[str, Any]) -> dict[str, int]:
    """Returns the bytes of each part of a run, by their names in `Prediction`."""
    parts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as output:
        config, make = _model_of(model, options, output)
        start = _resident()
        policy = make()
        parts["weights"] = _resident() - start
        trainer = _trainer_of(config, policy)
        start = _resident()
        hidden, step = Policy.hidden, trainer.optimizer.step

        def of_hidden(self: Policy, batch: Any) -> torch.Tensor:
            before = _resident()
            states = hidden(self, batch)
            if states.requires_grad:
                parts["activations"] = _resident() - before
            return states

        def of_head(*args: Any, **given: Any) -> Any:
            with PeakMemory(torch.device("cpu")) as memory:
                out = fused_grpo_loss(*args, **given)
            parts["head"] = memory.extra_bytes or 0
            return out

        def of_step(*args: Any, **given: Any) -> None:
            before = _resident()
            parts.setdefault("gradients", before - start)
            step(*args, **given)
            parts.setdefault("optimizer", _resident() - before)

        Policy.hidden = of_hidden  # type: ignore[method-assign]
        policy_module.fused_grpo_loss = of_head
        trainer.optimizer.step = of_step
        trainer.train()
    return parts


def _model_of(
    model: str, options: dict[str, Any], output: str
) -> tuple[TrainingConfig, Callable[[], Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    # Libraries and thread pools take their memory now.
    (torch.ones(512, 512, requires_grad=True) @ torch.ones(512, 512)).sum().backward()
    config = config_of(model, options, output)
    architecture = AutoConfig.from_pretrained(model)
    AutoModelForCausalLM.from_config(_small(architecture))
    return config, lambda: set_trainable(AutoModelForCausalLM.from_config(architecture), config)


def _trainer_of(config: TrainingConfig, policy: Any) -> Trainer:
    return Trainer(
        config, policy, NoTokenizer(), [{"prompt": str(i)} for i in range(16)],
        rewards={"it": rewards}, rollout=lambda _: Longest(),
    )  # fmt: skip


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _small(architecture: Any) -> Any:
    import copy

    small = copy.deepcopy(architecture)
    small.num_hidden_layers, small.vocab_size = 1, 128
    return small


def _figures(predicted: int, taken: int) -> str:
    return f"{predicted / 2**30:.2f} | {taken / 2**30:.2f} | {predicted / taken - 1:+.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_memory", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", default=None, help="a folder; default: the demo's")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", action="store_true", help="each part by itself")
    args = parser.parse_args()
    from transformers import AutoConfig

    # Freed tensors go back to the system at once, so that resident memory is held memory.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    model = args.model or str(model_path())
    columns = [
        "run",
        *(["part"] if args.parts else []),
        "predicted, GiB",
        "measured, GiB",
        "off by",
    ]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    rows: list[dict[str, Any]] = []
    for name, options in CASES.items():
        prediction = predict(
            config_of(model, options), AutoConfig.from_pretrained(model), gpu=False
        )
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            if args.parts:
                parts = pool.submit(measured_parts, model, options).result()
                for part, taken in parts.items():
                    print(f"| {name} | {part} | {_figures(getattr(prediction, part), taken)} |")
                rows.append({"name": name, "measured": parts, **asdict(prediction)})
                continue
            taken = pool.submit(measured, model, options).result()
        peak = replace(prediction, kv_cache=0, sampling_logits=0).peak  # nothing is sampled
        print(f"| {name} | {_figures(peak, taken)} |", flush=True)
        rows.append({"name": name, "measured": taken, **asdict(prediction)})
    write_json(args.json, {**header("cpu"), "rows": rows})


if __name__ == "__main__":
    main()

"""From a config to the model with what is trained of it set, and its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn

from . import checkpoint
from .config import DTYPES, TrainingConfig


def load_model(config: TrainingConfig) -> tuple[nn.Module, Any]:
    """The model with what is trained of it set, and its tokenizer.

    Raises:
        FileExistsError: before anything is loaded, if the run's folder has another run in it.
        OSError: no such model, or the hub was not reached.
    """
    check_folder(config)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = getattr(torch, DTYPES[config.dtype])
    with finding(config.model):
        tokenizer = AutoTokenizer.from_pretrained(config.model)
        model = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype)
    return prepared(model, config), tokenizer


@contextmanager
def finding(model: str) -> Iterator[None]:
    """Says of a model that is not found what would be."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"model: {model!r} is no folder with a model, and the hub gave none "
            f"({str(error).splitlines()[0]}). Without the hub: the folder of a downloaded model"
        ) from error


def prepared(model: Any, config: TrainingConfig) -> nn.Module:
    """With adapters if they are asked for, and with what is not trained frozen."""
    if config.lora_rank:
        model = _with_adapters(model, config)
    elif config.trainable is not None:
        names = [name for name, _ in model.named_parameters()]
        wanted = {name for name in names if re.search(config.trainable, name)}
        if not wanted:
            raise ValueError(
                f"trainable: expected to match the name of a parameter (like {names[-1]}); "
                f"{config.trainable!r} matches none"
            )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in wanted)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.lora_rank:
            model.enable_input_require_grads()
    return model


def _with_adapters(model: nn.Module, config: TrainingConfig) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise ImportError(
            "lora_rank: adapters need peft: pip install 'grpo_kernels[train]'"
        ) from error
    set_seed(config.seed)
    lora = peft.LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0.0,
        target_modules=config.lora_target, task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(model, lora)


def check_folder(config: TrainingConfig) -> None:
    if not config.resume and checkpoint.latest(config.folder) is not None:
        raise FileExistsError(
            f"name: expected one without checkpoints, which a new run would replace; "
            f"{config.folder / 'checkpoints'} has some. Give resume, another name, or delete "
            f"{config.folder}"
        )

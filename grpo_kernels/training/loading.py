"""Models, tokenizers and rollouts of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..integrations.hf_head import check_logits
from .checks import check_model_name, is_adapter, start
from .config import DTYPES, TrainingConfig
from .problems.data import why_not_downloaded
from .sampling.completions import vocabulary_of
from .sampling.rollout import GenerateRollout, Rollout
from .step.policy import Policy, misses_parameters, without_dropout
from .step.reference_model import check_tokens


def load_model(config: TrainingConfig) -> tuple[nn.Module, Any]:
    """Loads the model, in which only trained parameters require gradients, and the tokenizer.

    Raises:
        FileExistsError, ImportError, ValueError: as `start`; or the tokenizer has no template for
            `chat`, or other tokens than the tokenizer of `ref_model`. Then no model is loaded.
        OSError: there is no such model, or the hub was not reached.
    """
    start(config)
    tokenizer = load_tokenizer(config)
    if config.ref_model is not None:
        check_tokens(config.ref_model, tokenizer)
    return set_trainable(_pretrained("model", config.model, config), config), tokenizer


def load_tokenizer(config: TrainingConfig) -> Any:
    """Loads the tokenizer of the model.

    Raises:
        OSError: there is no such model, or the hub was not reached.
        ValueError: it has no template for `chat`.
    """
    from transformers import AutoTokenizer

    with explain_missing_model(config.model):
        tokenizer = AutoTokenizer.from_pretrained(config.model)
    if config.chat and not tokenizer.chat_template:
        raise ValueError(
            f"chat: the tokenizer of {config.model} has no chat template: leave chat out, or take "
            "an instruction-tuned model"
        )
    return tokenizer


def load_for_inference(option: str, model: str, config: TrainingConfig) -> Any:
    """Loads a model that is not trained, in the dtype of the policy; adapters stay adapters.

    Raises:
        OSError: there is no such model, or the hub was not reached.
    """
    check_model_name(option, model)
    if not is_adapter(model):
        return _pretrained(option, model, config)
    import peft

    base = peft.PeftConfig.from_pretrained(model).base_model_name_or_path
    return peft.PeftModel.from_pretrained(_pretrained(option, str(base), config), model)


def load_reference(config: TrainingConfig, tokenizer: Any) -> Any:
    """Loads the model that `ref_model` names; None if it names none.

    Raises:
        OSError: there is no such model, or the hub was not reached.
        ValueError: it has other tokens than the policy's tokenizer.
    """
    if config.ref_model is None:
        return None
    check_tokens(config.ref_model, tokenizer)
    return load_for_inference("ref_model", config.ref_model, config)


def _pretrained(option: str, model: str, config: TrainingConfig) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, DTYPES[config.dtype])
    with explain_missing_model(model, option):
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype)


@contextmanager
def explain_missing_model(model: str, option: str = "model") -> Iterator[None]:
    """Adds to the error of a missing model what works without the hub."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{option}: {model!r} is not a folder with a model, and not on the hub: "
            f"{why_not_downloaded(error).rstrip('.')}. Without the hub, pass the folder of a "
            "downloaded model"
        ) from error


def set_trainable(model: Any, config: TrainingConfig) -> nn.Module:
    """Adds adapters if the options have any, which freezes the model's weights."""
    if config.lora_rank:
        model = _with_adapters(model, config)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.lora_rank:
            model.enable_input_require_grads()
    return model


def _with_adapters(model: nn.Module, config: TrainingConfig) -> nn.Module:
    import peft

    set_seed(config.seed)
    lora = peft.LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0.0,
        target_modules=config.lora_target, task_type="CAUSAL_LM",
    )  # fmt: skip
    try:
        return peft.get_peft_model(model, lora)
    except ValueError as error:
        raise ValueError(f"lora_target={config.lora_target!r}: {error}") from error


def check_names(model: nn.Module) -> None:
    """Refuses a model whose weights would be saved under names that `from_pretrained` ignores.

    Raises:
        ValueError: the model, or a part of it, was compiled.
    """
    name = next((name for name, _ in model.named_parameters() if "_orig_mod." in name), None)
    if name is not None:
        raise ValueError(
            "model: expected one that was not passed to torch.compile, which renames its weights; "
            f"got {name}: pass the model itself"
        )


def set_pad_token(tokenizer: Any, model: Any) -> None:
    """Pads with the end token where there is no pad token.

    Raises:
        ValueError: the tokenizer has neither, or the model knows no such token.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    vocabulary, pad_token = vocabulary_of(model), tokenizer.pad_token_id
    if pad_token is None or pad_token >= vocabulary:
        raise ValueError(
            f"tokenizer: expected a pad_token, or an eos_token, among the {vocabulary} tokens of "
            f"the model; got {tokenizer.pad_token!r} ({pad_token}) in "
            f"{type(tokenizer).__name__}: set tokenizer.pad_token"
        )


def make_rollout(
    config: TrainingConfig, policy: nn.Module, tokenizer: Any, accelerator: Accelerator
) -> Rollout:
    if config.rollout == "vllm":
        from .sampling.vllm_rollout import VLLMRollout

        model = accelerator.unwrap_model(policy).model
        return VLLMRollout(config, model, tokenizer, accelerator)
    return GenerateRollout(policy, tokenizer)


def prepared(
    model: nn.Module, config: TrainingConfig, accelerator: Accelerator, prompt: list[int]
) -> tuple[Any, Any]:
    """The policy and its optimizer, wrapped for the processes.

    `prompt`: some tokens, on which the head is compared with the model's logits.
    """
    policy = without_dropout(Policy.from_config(model, config))
    ids = torch.tensor([prompt], dtype=torch.int64, device="cpu")
    check_logits(policy.model, ids)
    if accelerator.num_processes > 1 and misses_parameters(policy.model, ids[:, :2]):
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=config.learning_rate, weight_decay=config.weight_decay
    )
    policy, optimizer = accelerator.prepare(policy, optimizer)
    if isinstance(policy, DistributedDataParallel):
        # No buffer of a language model changes. With broadcasts in a forward, other processes would
        # wait for a process that failed.
        policy.broadcast_buffers = False
    return policy, optimizer

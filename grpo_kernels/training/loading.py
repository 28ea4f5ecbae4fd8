"""Start of a run: its model and tokenizer, and who samples from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..integrations.hf_head import check_logits
from .config import DTYPES, TrainingConfig, split_revision
from .problems.data import why_not_downloaded
from .run import checkpoint, ranks
from .sampling.rollout import GenerateRollout, Rollout, vocabulary_of
from .step.policy import Policy, misses_parameters, without_dropout


def load_model(config: TrainingConfig) -> tuple[nn.Module, Any]:
    """Loads the model, in which only trained parameters require gradients, and the tokenizer.

    Raises:
        FileExistsError: the run's folder has another run in it; nothing is loaded then.
        ImportError: vLLM is to sample in this process, and is not installed; likewise.
        OSError: there is no such model, or the hub was not reached.
        ValueError: the run that is to go on had other options, the launch shards the weights, or
            vLLM has none of an option on this host; likewise.
    """
    check_folder(config)
    ranks.check_launch()
    check_host(config, on_cpu=not torch.accelerator.is_available())
    from transformers import AutoTokenizer

    model, (name, revision) = (
        _pretrained("model", config.model, config),
        split_revision(config.model),
    )
    tokenizer = AutoTokenizer.from_pretrained(name, **revision)
    return set_trainable(model, config), tokenizer


def load_reference(config: TrainingConfig) -> Any:
    """Loads the model that `ref_model` names, in the dtype of the policy.

    Raises:
        OSError: there is no such model, or the hub was not reached.
    """
    return _pretrained("ref_model", str(config.ref_model), config)


def _pretrained(option: str, model: str, config: TrainingConfig) -> Any:
    from transformers import AutoModelForCausalLM

    (name, revision), dtype = split_revision(model), getattr(torch, DTYPES[config.dtype])
    with explain_missing_model(model, option):
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **revision)


@contextmanager
def explain_missing_model(model: str, option: str = "model") -> Iterator[None]:
    """If a model is not found, adds to the error what works without the hub."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{option}: {model!r} is not a folder with a model, and not on the hub: "
            f"{why_not_downloaded(error)}. Without the hub, pass the folder of a downloaded model"
        ) from error


def set_trainable(model: Any, config: TrainingConfig) -> nn.Module:
    """Adds adapters if there are to be any, and freezes what is not trained."""
    if config.lora_rank:
        model = _with_adapters(model, config)
    elif config.trainable is not None:
        names = [name for name, _ in model.named_parameters()]
        trained = {name for name in names if re.search(config.trainable, name)}
        if not trained:
            raise ValueError(
                f"trainable={config.trainable!r} matches no parameter; one is {names[-1]}"
            )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
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
    try:
        return peft.get_peft_model(model, lora)
    except ValueError as error:
        raise ValueError(f"lora_target={config.lora_target!r}: {error}") from error


def check_names(model: nn.Module) -> None:
    """Refuses a model whose weights would be saved under names that `from_pretrained` ignores.

    Raises:
        ValueError: it was compiled, or a part of it.
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


def check_folder(config: TrainingConfig) -> None:
    """Refuses a folder with a trained run in it, unless that run is to go on with its options."""
    folder, log = config.folder, config.folder / "metrics.jsonl"
    begun, finished = checkpoint.latest(folder), (folder / "model").exists()
    if config.resume and begun:
        checkpoint.check_options(checkpoint.state_of(begun), config)
    if config.resume and finished and not begun:
        raise FileExistsError(
            f"resume: the run in {folder} is finished and has no checkpoint to resume from. Pass "
            "another output, or delete the folder"
        )
    if not config.resume and (begun or finished or (log.exists() and log.stat().st_size)):
        raise FileExistsError(
            f"output: {folder} has a run already. Pass resume to continue it, pass another output, "
            "or delete the folder"
        )


def check_rollout(config: TrainingConfig, accelerator: Accelerator) -> None:
    """Refuses options that the library's own rollouts cannot honor."""
    check_has_logps(config, config.rollout == "vllm")
    check_host(config, accelerator.device.type == "cpu")


def check_host(config: TrainingConfig, on_cpu: bool) -> None:
    """Refuses a vLLM that is not installed, and what it does not have on a CPU."""
    for name in ("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization"):
        if on_cpu and getattr(config, name) != getattr(TrainingConfig, name):
            raise ValueError(
                f"{name}: expected {getattr(TrainingConfig, name)} on a CPU, where vLLM has no "
                f"GPU memory; got {getattr(config, name)}"
            )
    if config.rollout == "vllm" and not find_spec("vllm"):
        raise ImportError(
            "rollout: vllm is not installed: pip install 'grpo_kernels[vllm]' for a GPU; for a "
            "CPU, nox -s vllm in a checkout"
        )


def check_has_logps(config: TrainingConfig, has_logps: bool) -> None:
    """Refuses a correction by log-probs that the rollout does not report."""
    if config.is_correction != "none" and not has_logps:
        raise ValueError(
            f"is_correction={config.is_correction!r} needs log-probs of the sampler, and this "
            "rollout returns none: set is_correction to none"
        )


def make_rollout(
    config: TrainingConfig, policy: nn.Module, tokenizer: Any, accelerator: Accelerator
) -> Rollout:
    """The rollout that `config.rollout` names."""
    if config.rollout == "vllm":
        from .sampling.vllm_rollout import VLLMRollout

        model = accelerator.unwrap_model(policy).model
        return VLLMRollout(config, model, tokenizer, accelerator)
    return GenerateRollout(policy, tokenizer)


def prepared(
    model: nn.Module, config: TrainingConfig, accelerator: Accelerator, prompt: list[int]
) -> tuple[Any, Any]:
    """The policy and its optimizer, wrapped for the processes.

    `prompt`: some tokens, by which the head is found to make the model's own logits.
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
        # No buffer of a language model changes, and a process that fails in a forward is to leave
        # no other waiting for one.
        policy.broadcast_buffers = False
    return policy, optimizer

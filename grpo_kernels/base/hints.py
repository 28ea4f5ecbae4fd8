"""Names in other libraries, and what to use here; loaded for an unknown name only.

A hint about an option of this library begins with "Set" and its name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

_PROMPTS = "Set prompts_per_step: prompts, not completions"
_PASSES = "Set epochs_per_rollout; to update the reference, sync_ref_every."
_PROBLEMS = "Set steps: each takes prompts_per_step problems."
_FOLDER = "Set output: the name of the folder is the name of the run."
_HALF = "Set dtype to mixed, or to bf16 for weights as well."
_DOWNLOAD = "Set model to the folder of a download: hf download NAME --revision REVISION."
_IN_PYTHON = "Pass your own model to Trainer in Python"
_COPY = "An updated reference is a copy of the policy: set sync_ref_every."
_NO_VALUES = "There is no value function: a completion's tokens have one advantage, undiscounted."
_SHARDED = (
    "Sharded weights are for TRL's trainer with this library's head (docs/integrations.md). On one "
    "GPU set lora_rank or gradient_checkpointing."
)
_BETAS = "The optimizer is AdamW with PyTorch's betas: set learning_rate."
_NOT_QUANTISED = "Quantised weights are not trained. To save memory set lora_rank and dtype bf16."
_PROCESSES = "The launcher starts processes: accelerate launch --num_processes N -m ..."
_SPLITS = "The split train is trained on; test, or validation, is held out: set eval_size."
_TOKENIZER = f"The model's own is loaded. {_IN_PYTHON} for another tokenizer."
# Options of trainers and of their losses.
ELSEWHERE = {
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "adv_estimator": "Advantages are GRPO's, within a group: set scale_rewards, or loss_type.",
    "attn_implementation": f"{_IN_PYTHON}: from_pretrained(..., attn_implementation=...).",
    "batch_size": f"{_PROMPTS}, over all processes.",
    "beta1": _BETAS,
    "beta2": _BETAS,
    "bf16": _HALF,
    "clip_eps": "Set epsilon.",
    "clip_range": "Set epsilon.",
    "clip_ratio": "Set epsilon.",
    "clip_ratio_c": "Set dual_clip.",
    "clip_ratio_high": "Set epsilon_high.",
    "clip_ratio_low": "Set epsilon.",
    "cliprange": "Set epsilon.",
    "data_path": "Set dataset.",
    "dataset_name": "Set dataset.",
    "dataset_split": _SPLITS,
    "deepspeed": _SHARDED,
    "device": "The GPU that is there is used: set the environment's CUDA_VISIBLE_DEVICES.",
    "ent_coef": "Set entropy_coef.",
    "entropy_coeff": "Set entropy_coef.",
    "epochs": _PROBLEMS,
    "eps_clip": "Set epsilon.",
    "epsilon_low": "Set epsilon.",
    "eta": "Set epsilon, or beta for the weight of the KL.",
    "eval_dataset": "Have dataset name a function of two lists, or data with a test split; to "
    "evaluate on other problems: training.evaluate RUN --problems FILE.",
    "eval_steps": "Set eval_every.",
    "eval_strategy": "Set eval_every: 0 evaluates before and after training.",
    "experiment_name": _FOLDER,
    "flash_attention": f"{_IN_PYTHON}: from_pretrained(..., attn_implementation=...).",
    "fp16": "Set dtype to mixed, which takes fp16 on GPUs without bf16.",
    "fsdp": _SHARDED,
    "gae_lambda": _NO_VALUES,
    "gamma": _NO_VALUES,
    "generation_batch_size": f"{_PROMPTS}.",
    "gpus": _PROCESSES,
    "grad_clip": "Set max_grad_norm.",
    "gradient_accumulation_steps": "Set prompts_per_step (batch) and micro_batch_size (what fits "
    "in memory); gradients are accumulated automatically.",
    "group_size": "Set num_generations.",
    "iters": _PROBLEMS,
    "kl": "Set beta.",
    "kl_beta": "Set beta.",
    "kl_coef": "Set beta.",
    "kl_coeff": "Set beta.",
    "kl_loss_coef": "Set beta.",
    "load_in_4bit": _NOT_QUANTISED,
    "load_in_8bit": _NOT_QUANTISED,
    "log_dir": _FOLDER,
    "logging_dir": _FOLDER,
    "logging_steps": "Metrics are logged every step; set show_every for printed completions.",
    "logits_dtype": "Pass LMHead(weight, logits_dtype=...) to a call of the library in Python.",
    "lora_dropout": "Adapters have no dropout: set lora_rank, lora_alpha and lora_target.",
    "lora_r": "Set lora_rank.",
    "lora_target_modules": "Set lora_target.",
    "loss_agg_mode": "Set aggregation, or loss_type.",
    "lr": "Set learning_rate.",
    "lr_scheduler_type": "Set schedule.",
    "max_length": "Set max_prompt_length and max_completion_length.",
    "max_new_tokens": "Set max_completion_length.",
    "max_response_length": "Set max_completion_length.",
    "max_seq_length": "Set max_prompt_length and max_completion_length.",
    "max_steps": "Set steps: a step is a rollout and epochs_per_rollout * minibatches updates.",
    "max_tokens": "Set max_completion_length.",
    "min_lr": "A schedule decays to 0: set schedule.",
    "mini_batch_size": "Set minibatches, their number, or micro_batch_size, which changes memory.",
    "model_name": "Set model.",
    "model_name_or_path": "Set model.",
    "model_revision": _DOWNLOAD,
    "mu": "Set epochs_per_rollout.",
    "n": "Set num_generations.",
    "n_samples": "Set num_generations.",
    "norm_adv_by_std_in_grpo": "Set scale_rewards to none.",
    "num_epochs": _PROBLEMS,
    "num_gpus": _PROCESSES,
    "num_iterations": _PASSES,
    "num_processes": _PROCESSES,
    "num_return_sequences": "Set num_generations.",
    "num_steps": "Set steps.",
    "num_train_epochs": _PROBLEMS,
    "optim": "The optimizer is AdamW: set learning_rate, weight_decay and schedule.",
    "output_dir": "Set output.",
    "overlong_filter": "Set mask_truncated_completions.",
    "per_device_train_batch_size": "Set micro_batch_size, in completions: it changes memory, not "
    "gradients.",
    "ppo_epochs": _PASSES,
    "precision": "Set dtype: mixed, fp32 or bf16.",
    "project_name": _FOLDER,
    "prompt_template": "Have dataset name a function (module:function), which makes the prompts.",
    "push_to_hub": "The model is in the folder model/ of output: hf upload NAME output/model.",
    "quantization": _NOT_QUANTISED,
    "ref_mixup_alpha": _COPY,
    "ref_model_mixup_alpha": _COPY,
    "ref_model_sync_steps": "Set sync_ref_every, in steps, not updates.",
    "report_to": "Set trackers.",
    "resume_from_checkpoint": "Set resume: the run in output continues from its last checkpoint.",
    "revision": _DOWNLOAD,
    "reward_funcs": "Set rewards.",
    "reward_model": "Set rewards to module:function, a function that calls your model.",
    "rollout_batch_size": f"{_PROMPTS}.",
    "rollout_n": "Set num_generations.",
    "run_name": _FOLDER,
    "save_dir": "Set output.",
    "save_steps": "Set save_every.",
    "save_strategy": "Set save_every.",
    "save_total_limit": "Only the checkpoints that are needed are kept: set save_every.",
    "split": _SPLITS,
    "sync_ref_model": "Set sync_ref_every above 0.",
    "system_message": "Set system_prompt.",
    "target_kl": "No update is cut short by its KL: set beta.",
    "tokenizer": _TOKENIZER,
    "tokenizer_name": _TOKENIZER,
    "train_batch_size": f"{_PROMPTS}.",
    "train_file": "Set dataset.",
    "trainable": f"{_IN_PYTHON}, with requires_grad set: set lora_rank to train adapters alone.",
    "use_liger_kernel": f"The loss never stores logits. {_IN_PYTHON} for other kernels of Liger's.",
    "use_lora": "Set lora_rank above 0.",
    "use_peft": "Set lora_rank above 0.",
    "use_vllm": "Set rollout to vllm.",
    "vllm": "Set rollout to vllm.",
    "wandb": "Set trackers to wandb.",
    "wandb_project": "Set trackers to wandb; its project is the environment's WANDB_PROJECT.",
    "warmup_ratio": "Set warmup_steps, in optimizer steps.",
}
# Arguments of calls.
ARGUMENTS = {
    "attention_mask": "mask",
    "completion_ids": "token_ids",
    "completion_mask": "mask",
    "eos_token_id": "end_ids",
    "final_logit_softcapping": "softcap",
    "group_size": "groups",
    "hidden_states": "hidden",
    "index": "targets",
    "inference_logprobs": "sampling_logps",
    "input_ids": "targets",
    "labels": "targets",
    "lin_weight": "head",
    "lm_head": "head",
    "lm_head_weight": "head",
    "log_prob": "logps",
    "log_probs": "logps",
    "logit_softcapping": "softcap",
    "logits_softcap": "softcap",
    "loss_mask": "mask",
    "num_generations": "groups",
    "num_items_in_batch": "num_items",
    "old_log_prob": "old_logps",
    "old_log_probs": "old_logps",
    "old_per_token_logps": "old_logps",
    "per_token_logps": "logps",
    "ref_log_prob": "ref_logps",
    "ref_log_probs": "ref_logps",
    "ref_per_token_logps": "ref_logps",
    "response_mask": "mask",
    "sampling_per_token_logps": "sampling_logps",
    "selected_token_ids": "targets",
    "teacher": "reference",
    "weight": "head",
}


def hint_for_keyword(name: str, call: Callable[..., Any]) -> str | None:
    """Returns what to pass instead of a keyword that a call does not have; None if unknown."""
    known, hint = [*inspect.signature(call).parameters], ELSEWHERE.get(name, "")
    text = hint[:1].lower() + hint[1:].rstrip(".")
    named = re.match(r"set (\w+)", text)
    option = named[1] if named else name
    if named and option in known:
        return text
    if ARGUMENTS.get(name) in known:
        return f"pass {ARGUMENTS[name]}"
    option = ARGUMENTS.get(name, option)
    for parameter, kind in _objects(call):
        if option in {x.name for x in fields(kind)}:
            first = "weight, " if kind.__name__ == "LMHead" else ""
            return f"pass {parameter}={kind.__name__}({first}{option}=...)"
    if option == "temperature":
        return "pass LMHead(weight, temperature=...) as the head of a call"
    if hint:
        return f"in a TrainingConfig {text}" if named else text
    near = get_close_matches(name, known)
    return f"did you mean {' or '.join(near)}?" if near else None


def hint_for_choice(value: object, choices: Iterable[object]) -> str:
    """Suggests the choice spelt most like the value; "" if there is none."""
    plain = {re.sub(r"[^a-z0-9+]", "", str(x).lower()): str(x) for x in choices}
    spelt = re.sub(r"[^a-z0-9+]", "", str(value).lower())
    near = [spelt] if spelt in plain else get_close_matches(spelt, plain, cutoff=0.75)
    return f": did you mean {' or '.join(plain[x] for x in near)}?" if near else ""


def _objects(call: Callable[..., Any]) -> list[tuple[str, type]]:
    """The parameters of a function that take an object of options, with its class."""
    hints = {} if isinstance(call, type) else get_type_hints(call)
    return [
        (parameter, kind)
        for parameter, hint in hints.items()
        for kind in get_args(hint) or (hint,)
        if is_dataclass(kind) and isinstance(kind, type)
    ]

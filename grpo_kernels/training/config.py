"""`TrainingConfig`: all options of a run in one dataclass."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from ..base.checks import convert_numbers, suggests_names
from ..loss.config import GRPOLossConfig
from ..loss.losses import LOSSES, Loss, OwnLoss

# Dtypes of weights, as torch calls them.
DTYPES = {"mixed": "float32", "fp32": "float32", "bf16": "bfloat16"}


@suggests_names
@dataclass(frozen=True, kw_only=True)
class TrainingConfig(GRPOLossConfig):
    """A training run and its loss, validated when made, before anything is loaded.

    `python -m grpo_kernels.training --help` lists every option with its unit and default. In Python
    `loss_type` may also be an instance of a loss class, or a callable; `config.json` and
    checkpoints have its `repr`.

    Raises:
        ValueError, TypeError: naming the option, what was expected and what came.
    """

    # Model
    model: str = ""
    """Causal language model: a folder, or a name on the hub, OWNER/NAME."""
    dtype: Literal["mixed", "fp32", "bf16"] = "mixed"
    """Dtype of weights and GEMMs: fp32, bf16, or mixed (weights fp32; GEMMs bf16 on a GPU with
    bf16 cores, fp16 on other GPUs, fp32 on a CPU)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory, more time."""
    lora_rank: int = 0
    """Rank of LoRA adapters, which alone are trained; 0: no adapters."""
    lora_alpha: int = 32
    """Scale of the adapters: lora_alpha / lora_rank."""
    lora_target: str = "all-linear"
    """Modules that get adapters: a regular expression, or all-linear."""

    # Data and rewards
    dataset: str = ""
    """Problems: a file (.jsonl, .json, .parquet, .csv) or a folder; else module:function, which
    returns problems to train on and held-out ones; else a name on the hub, OWNER/NAME."""
    dataset_config: str = ""
    """Configuration of a dataset on the hub that has several (main of openai/gsm8k)."""
    train_size: int = 1000
    """Largest number of problems to train on; 0: all."""
    eval_size: int = 64
    """Largest number of held-out problems, evaluated before and after training; 0: none."""
    eval_max_completion_length: int | None = None
    """Largest number of tokens per completion in evaluations; None: max_completion_length."""
    eval_temperature: float = 0.0
    """Sampling temperature of evaluations; 0: greedy."""
    chat: bool = False
    """Apply the tokenizer's chat template to prompts."""
    system_prompt: str = ""
    """Instruction before every question; with chat, the system message. Empty: the trainer's own,
    which asks for the tags of the reward format."""
    max_prompt_length: int = 512
    """Largest number of tokens per prompt; problems with longer prompts are dropped."""
    rewards: list[str] = field(default_factory=lambda: ["answer", "format"])
    """Reward functions: answer, format, or module:function."""
    reward_weights: list[float] = field(default_factory=list)
    """Weight of each reward function; empty: 1 each."""

    # Sampling
    steps: int = 100
    """Training steps; each samples a rollout and trains on it."""
    prompts_per_step: int = 4
    """Prompts in a rollout, over all processes."""
    num_generations: int = 8
    """Completions per prompt (the group size)."""
    max_completion_length: int = 256
    """Largest number of tokens per completion."""
    temperature: float = 1.0
    """Sampling temperature, > 0; the loss uses it, too."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities add up to this; 1: from all."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the highest probability; 0: from all."""
    replay_support: bool = True
    """With top_k, top_p or min_p, train the truncated distribution, as sampled; off: the full
    softmax."""
    stop: list[str] = field(default_factory=list)
    """Strings after which a completion ends; none: only at an end token."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut at max_completion_length out of the loss."""
    rollout: Literal["generate", "vllm"] = "generate"
    """Sampler: generate (the model itself), or vllm."""
    vllm_gpu_memory_utilization: float = 0.3
    """Share of each GPU's memory for vLLM, weights included."""
    vllm_enable_sleep_mode: bool = False
    """Free vLLM's GPU memory during updates."""

    # Loss
    loss_type: str | Callable[[Any], Any] = "dapo"
    """Name of the loss: grpo, bnpo, dr_grpo, dapo, luspo, gspo, gspo_token, gmpo, cispo, sapo,
    vespo, reinforce, dppo_tv, dppo_kl (docs/objectives.md); or your own, module:Class."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Options of the loss class (docs/objectives.md): in YAML a mapping, as flags
    --loss_options.NAME VALUE."""
    ref_model: str | None = None
    """Reference of the KL, named like model; None: the model before training."""
    sync_ref_every: int = 0
    """Steps after which the reference becomes a copy of the policy again; 0: never."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group or of the batch, or not at all."""

    # Updates
    epochs_per_rollout: int = 1
    """Passes over each rollout."""
    minibatches: int = 1
    """Optimizer steps per pass."""
    micro_batch_size: int = 16
    """Completions in a forward and backward, per process; changes memory, not gradients."""
    share_prompts: bool = True
    """Encode the prompt of a group once, if the model allows it; not with
    gradient_checkpointing."""
    skip_untrained: bool = True
    """Skip groups with equal rewards, if beta and entropy_coef are 0; metrics of the loss leave
    them out, too."""
    learning_rate: float = 1e-6
    """Learning rate of AdamW."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate: constant, or linear or cosine decay to 0."""
    warmup_steps: int = 0
    """Optimizer steps of linear warmup from 0."""
    max_grad_norm: float = 1.0
    """Largest gradient norm; larger gradients are clipped."""

    # Logs and checkpoints
    output: str = "runs/grpo"
    """Folder of the run; its last part is the name of the run in trackers."""
    eval_every: int = 0
    """Steps between evaluations; 0: only before and after."""
    explain_every: int = 0
    """Steps between pages that explain the loss per token; 0: only at spikes."""
    show_every: int = 10
    """Steps between printed completions."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end and after the best evaluation; -1: never."""
    save_model: bool = True
    """Write the trained model into the run's folder at the end."""
    resume: bool = False
    """Continue from the last checkpoint in output, if there is one."""
    trackers: list[str] = field(default_factory=list)
    """Trackers of accelerate: tensorboard, wandb, trackio, ..."""
    seed: int = 0
    """Seed of all random numbers."""

    def __post_init__(self) -> None:
        convert_numbers(self)
        self._take_shorthand()
        loss_options = {*GRPOLossConfig.__dataclass_fields__} - {"max_completion_length"}
        for name, hint in get_type_hints(type(self)).items():
            if name in loss_options:  # `loss_config` checks them
                continue
            value, all_items = getattr(self, name), CollectionCheckStrategy.ALL_ITEMS
            try:
                check_type(value, hint, collection_check_strategy=all_items)
            except TypeCheckError as error:
                expected = re.sub(r"Literal\[(.*)\]", r"one of \1", inspect.formatannotation(hint))
                raise TypeError(f"{name}: expected {expected}; got {value!r}") from error
        self._check_values()
        self.loss_config()
        self._check_together()
        self._check_used()

    @cached_property
    def loss(self) -> Loss:
        """The loss of `loss_type`, with `loss_options`."""
        name = self.loss_type
        if not isinstance(name, str) or (":" not in name and not self.loss_options):
            if self.loss_options:
                raise ValueError(
                    f"loss_options={self.loss_options} does not work with an instance as "
                    f"loss_type: set the options on {name!r}"
                )
            return super().loss
        kind, preset = LOSSES.get(name) or (imported("loss_type", name), {})
        if not isinstance(kind, type) and not self.loss_options:
            return OwnLoss(kind)
        options = self.loss_options
        known = sorted(x.name for x in fields(kind)) if is_dataclass(kind) else list[str]()
        if not set(options) <= set(known):
            raise ValueError(
                "loss_options: expected options of "
                f"{kind.__name__} ({', '.join(known) or 'none'}); got "
                f"{', '.join(sorted(set(options) - set(known)))}"
            )
        loss = kind(**{**preset, **options})
        if not isinstance(loss, Loss):
            raise ValueError(f"loss_type: expected a subclass of Loss; got {name} = {kind!r}")
        return loss

    def loss_config(self) -> GRPOLossConfig:
        options = {option.name: getattr(self, option.name) for option in fields(GRPOLossConfig)}
        if isinstance(self.loss_type, str) and (":" in self.loss_type or self.loss_options):
            options["loss_type"] = self.loss
        if self.effective_aggregation != "dr_grpo":
            options["max_completion_length"] = None
        return GRPOLossConfig(**options)

    def as_json(self) -> dict[str, Any]:
        """The options by name, as JSON values."""
        return _through_json({option.name: getattr(self, option.name) for option in fields(self)})

    @classmethod
    def default_json(cls) -> dict[str, Any]:
        """The defaults of the options by name, as JSON values."""
        return _through_json(defaults_of(cls))

    @property
    def folder(self) -> Path:
        return Path(self.output)

    def in_new_folder(self) -> TrainingConfig:
        """The config with a folder that does not exist yet, such as `output-2`, unless resumed."""
        number, config = 1, self
        while not self.resume and config.folder.exists():
            number += 1
            config = replace(self, output=f"{self.folder}-{number}")
        return config

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per rollout."""
        return self.epochs_per_rollout * self.minibatches

    def learning_rate_at(self, update: int) -> float:
        """The learning rate of an optimizer step, counted from 0."""
        total = self.steps * self.updates_per_step
        warm = min(1.0, (update + 1) / (self.warmup_steps + 1))
        done = max(0.0, (update - self.warmup_steps) / max(1, total - self.warmup_steps))
        cosine = 0.5 + 0.5 * math.cos(math.pi * done)
        falls = {"constant": 1.0, "linear": 1 - done, "cosine": cosine}
        return self.learning_rate * warm * falls[self.schedule]

    @property
    def longest_completion(self) -> int:
        """The largest number of tokens in a completion, evaluations included."""
        return max(self.max_completion_length, self.eval_max_completion_length or 0)

    @property
    def truncates(self) -> bool:
        """True if `top_k`, `top_p` or `min_p` truncate the sampled distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def records_support(self) -> bool:
        """True if rollouts have to return the kept set of each token."""
        return self.truncates and self.replay_support

    def require(self, name: str, holds: object, expected: str) -> None:
        """Refuses an option's value unless it `holds`."""
        if not holds:
            raise ValueError(f"{name}: expected {expected}; got {getattr(self, name)!r}")

    def _take_shorthand(self) -> None:
        """Expands `~` in paths; makes one value of a list option a list of one."""
        for name in ("model", "ref_model", "dataset", "output"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, os.path.expanduser(value))
        for name in lists_of(type(self)):
            object.__setattr__(self, name, as_list(getattr(self, name)))

    def _check_values(self) -> None:
        require, n = self.require, vars(self)
        require("model", self.model, "a hub name or a folder")
        require("output", self.folder.name not in ("", ".."), "a folder with a name")
        require("rewards", self.rewards, "at least one reward function")
        weights, rewards = self.reward_weights, self.rewards
        as_many = not weights or len(weights) == len(rewards)
        finite = as_many and all(map(math.isfinite, weights))
        require("reward_weights", finite, f"a finite number for each of {rewards}")
        require("stop", all(self.stop), "strings that are not empty, or an empty list for none")
        for name in ("steps", "prompts_per_step", "minibatches", "max_prompt_length",
                     "max_completion_length", "epochs_per_rollout", "micro_batch_size",
                     "show_every"):  # fmt: skip
            require(name, n[name] >= 1, "at least 1")
        length = self.eval_max_completion_length
        require("eval_max_completion_length", length is None or length >= 1, "at least 1")
        for name in ("train_size", "eval_size", "eval_every", "explain_every", "eval_temperature",
                     "lora_rank", "sync_ref_every", "top_k", "warmup_steps",
                     "weight_decay"):  # fmt: skip
            require(name, 0 <= n[name] < math.inf, "at least 0")
        require("save_every", self.save_every >= -1, "at least -1")
        require("seed", 0 <= self.seed < 2**32, "a number from 0 to 2^32 - 1")
        for name in ("learning_rate", "max_grad_norm", "lora_alpha", "temperature"):
            require(name, 0 < n[name] < math.inf, "a number > 0")
        for name in ("top_p", "vllm_gpu_memory_utilization"):
            require(name, 0 < n[name] <= 1, "a number in (0, 1]")
        require("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]")
        require("num_generations", self.num_generations >= 2, "at least 2, to compare completions")
        divides = self.prompts_per_step % self.minibatches == 0
        require("minibatches", divides, f"a divisor of prompts_per_step = {self.prompts_per_step}")

    def _check_used(self) -> None:
        """Refuses options that would have no effect."""
        vllm_options = [name for name in DEFAULTS if name.startswith("vllm_")]
        for needed, is_set, names in (
            ("beta", self.beta, ["kl_estimator", "kl_clamp", "use_bias_correction_kl", "ref_model",
                                 "sync_ref_every"]),
            ("lora_rank", self.lora_rank, ["lora_alpha", "lora_target"]),
            ("eval_size", self.eval_size, ["eval_every"]),
            ("rollout vllm", self.rollout == "vllm", vllm_options),
        ):  # fmt: skip
            for name in names:
                if not is_set and getattr(self, name) != DEFAULTS[name]:
                    self._refuse(name, f"has no effect without {needed}: set both, or neither")

    def _check_together(self) -> None:
        for name, other, is_set, why in (
            ("sync_ref_every", "lora_rank", self.lora_rank,
             "has the model without adapters as its reference"),
            ("sync_ref_every", "ref_model", self.ref_model, "never changes"),
            ("entropy_coef", "top_entropy_quantile", self.top_entropy_quantile < 1,
             "would make the bonus depend on micro_batch_size"),
        ):  # fmt: skip
            if is_set and getattr(self, name):
                self._refuse(name, f"does not work with {other}, which {why}: pass one of the two")
        if self.kl_estimator == "exact" and self.records_support:
            self._refuse("kl_estimator", "needs the full softmax and does not work with replay_"
                         "support: pass --no_replay_support or another kl_estimator")  # fmt: skip

    def _refuse(self, name: str, why: str) -> None:
        raise ValueError(f"{name}={getattr(self, name)!r} {why}")


def defaults_of(kind: type[TrainingConfig]) -> dict[str, Any]:
    return {
        option.name: option.default if option.default_factory is MISSING
        else option.default_factory()
        for option in fields(kind)
    }  # fmt: skip


DEFAULTS = defaults_of(TrainingConfig)


def lists_of(kind: type[TrainingConfig]) -> list[str]:
    return [name for name, hint in get_type_hints(kind).items() if get_origin(hint) is list]


def as_list(value: Any) -> Any:
    """Makes a text or a number a list of one; returns anything else as it is."""
    return [value] if isinstance(value, str | int | float) else value


def imported(option: str, name: str) -> Callable[..., Any]:
    """The function of `module:function`, from a module in this folder or an installed module.

    Raises:
        ValueError: there is no such module, it failed, or has no such function.
    """
    module, _, attribute = name.partition(":")
    if sys.path[0] not in ("", os.getcwd()):
        sys.path.insert(0, "")  # as `python -m` has it, not a script
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{option}: expected module:function; got {name!r} ({why})") from error
    if not callable(function):
        raise ValueError(f"{option}: expected a function; got {name} = {function!r}")
    return function


def _through_json(options: dict[str, Any]) -> dict[str, Any]:
    """The options after a round trip through JSON: a tuple becomes a list."""
    as_read: dict[str, Any] = json.loads(json.dumps(options, default=_as_text))
    return as_read


def _as_text(value: Any) -> str:
    """The text of a value that JSON does not support, without addresses, which differ per run."""
    text = str(value) if isinstance(value, Path) else repr(value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)

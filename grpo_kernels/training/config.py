"""`TrainingConfig`: everything a run is made of, in one dataclass, from flags or a YAML file."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..inputs import DEFAULT_TOLERANCE
from ..config import GRPOLossConfig, check_choice, check_number

PRECISIONS = ("auto", "no", "bf16")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SCHEDULES = ("constant", "linear", "cosine")
BACKWARDS = ("exact", "sampled")
ROLLOUTS = ("generate", "continuous_batching")
# Of the loss config, what has another meaning here: completions have a length in every run.
_NOT_OF_THE_LOSS = {"max_completion_length"}


def _option(default: Any, text: str) -> Any:
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


def _of_loss(name: str) -> Any:
    """An option of `GRPOLossConfig`, with its default and what its docstring says of it."""
    default = next(f.default for f in fields(GRPOLossConfig) if f.name == name)
    lines = (GRPOLossConfig.__doc__ or "").split("Args:")[1].split("Raises:")[0]
    found = re.search(rf"^ {{8}}{name}: (.*?)(?=^ {{8}}\w+: |\Z)", lines, re.M | re.S)
    text = " ".join(found[1].split()) if found else ""
    return field(default=default, metadata={"help": text.replace("`", "").replace("%", "%%")})


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """A training run. Validated when made, before anything is loaded.

    `--help` of whoever parses it (`examples/train_gsm8k.py`) lists every option with its unit and
    default; the options of the loss are those of `GRPOLossConfig`.

    Raises:
        ValueError, TypeError: naming the option, what was expected and what came.
    """

    # What is trained
    model: str = _option("", "hub name or folder of a causal language model")
    dtype: str = _option("fp32", "of the weights: fp32 or bf16")
    precision: str = _option(
        "auto", "of the products: bf16 (autocast), no, or auto: bf16 on a GPU that has it"
    )
    trainable: str | None = _option(
        None, "regular expression of the names of the parameters that are trained; none: all"
    )
    gradient_checkpointing: bool = _option(
        False, "recompute activations in the backward; prompts are then not shared"
    )
    lora_rank: int = _option(0, "rank of LoRA adapters, which alone are trained then; 0: none")
    lora_alpha: int = _option(32, "adapters are scaled by lora_alpha / lora_rank")
    lora_target: str = _option(
        "all-linear", "modules that get adapters: a regular expression or all-linear"
    )

    # What it is trained on
    dataset: str = _option(
        "gsm_symbolic",
        "gsm8k (from the hub), additions, a task of reasoning-gym, a .jsonl or .parquet file, or a "
        "folder of save_to_disk",
    )
    train_size: int = _option(1000, "problems to train on, at most")
    eval_size: int = _option(64, "held-out problems, at most; 0: no evaluation")
    chat: bool = _option(False, "put prompts into the tokenizer's chat template")
    max_prompt_length: int = _option(512, "tokens; problems with a longer prompt are left out")
    rewards: list[str] = _option(("answer", "format"), "names of reward functions")
    reward_weights: list[float] = _option((), "one a reward function; none: 1 each")

    # Rollouts
    steps: int = _option(100, "rollouts")
    num_iterations: int = _option(
        1, "parts of equal length that the steps fall into; at the start of each the reference "
        "becomes the policy of that moment"
    )  # fmt: skip
    prompts_per_step: int = _option(4, "different prompts in a rollout, over all processes")
    num_generations: int = _option(8, "completions of each prompt, which advantages compare")
    max_completion_length: int = _option(256, "tokens a completion may have")
    top_k: int = _option(
        0, "sample from the k likeliest words only; 0: from all. The loss is of the whole softmax "
        "all the same, as with top_p and min_p"
    )  # fmt: skip
    top_p: float = _option(1.0, "sample from the likeliest words that have this probability")
    min_p: float = _option(0.0, "sample from words of this share of the likeliest's probability")
    stop: list[str] = _option((), "strings that end a completion, as its last part")
    mask_truncated_completions: bool = _option(
        False, "completions that were cut at their greatest length do not train"
    )
    rollout: str = _option("generate", "who samples: generate, or continuous_batching")

    # The loss
    loss_type: str = _of_loss("loss_type")
    beta: float = _of_loss("beta")
    epsilon: float = _of_loss("epsilon")
    epsilon_high: float | None = _of_loss("epsilon_high")
    delta: float | None = _of_loss("delta")
    dual_clip: float | None = _of_loss("dual_clip")
    importance_sampling_level: str = _of_loss("importance_sampling_level")
    aggregation: str | None = _of_loss("aggregation")
    temperature: float = _of_loss("temperature")
    kl_estimator: str = _of_loss("kl_estimator")
    kl_clamp: float | None = _of_loss("kl_clamp")
    use_bias_correction_kl: bool = _of_loss("use_bias_correction_kl")
    entropy_coef: float = _of_loss("entropy_coef")
    top_entropy_quantile: float = _of_loss("top_entropy_quantile")
    is_correction: str = _of_loss("is_correction")
    is_clip_max: float | None = _of_loss("is_clip_max")
    is_clip_min: float | None = _of_loss("is_clip_min")
    off_policy_threshold: float | None = _of_loss("off_policy_threshold")
    sapo_temperature_pos: float = _of_loss("sapo_temperature_pos")
    sapo_temperature_neg: float = _of_loss("sapo_temperature_neg")
    vespo_k_pos: float = _of_loss("vespo_k_pos")
    vespo_lambda_pos: float = _of_loss("vespo_lambda_pos")
    vespo_k_neg: float = _of_loss("vespo_k_neg")
    vespo_lambda_neg: float = _of_loss("vespo_lambda_neg")
    dppo_ratio_max: float = _of_loss("dppo_ratio_max")
    scale_rewards: str = _option(
        "group", "what advantages are divided by: the deviation of the group, of the batch, or none"
    )
    backward: str = _option("exact", "of the head: exact, or sampled (docs/sampled_backward.md)")
    tolerance: float = _option(DEFAULT_TOLERANCE, "relative noise of a sampled backward")

    # Updates
    epochs_per_rollout: int = _option(1, "times that a rollout is trained on")
    minibatches: int = _option(1, "optimizer steps an epoch")
    micro_batch_size: int = _option(
        16, "completions in one forward and backward of a process; changes memory, not gradients"
    )
    share_prompts: bool = _option(
        True, "encode the prompt of a group once, where the model's cache allows it"
    )
    skip_untrained: bool = _option(
        True, "leave completions without gradient (groups of equal rewards, where beta and "
        "entropy_coef are 0) out; metrics are over the others"
    )  # fmt: skip
    learning_rate: float = _option(1e-6, "of AdamW")
    weight_decay: float = _option(0.0, "of AdamW")
    adam_beta2: float = _option(0.999, "of AdamW")
    schedule: str = _option("constant", "of the learning rate: constant, linear or cosine to 0")
    warmup_steps: int = _option(0, "optimizer steps over which the learning rate rises from 0")
    max_grad_norm: float = _option(1.0, "gradients are scaled down to this norm")

    # What is seen and kept
    name: str = _option("grpo", "of the run, and of its folder")
    output: str = _option("runs", "folder of runs")
    eval_every: int = _option(0, "steps between evaluations; 0: before and after only")
    eval_temperature: float = _option(0.0, "of evaluations; 0: the likeliest word")
    show_every: int = _option(10, "steps between printed completions")
    save_every: int = _option(
        0, "steps between checkpoints; 0: at the end and at the best evaluation only"
    )
    save_model: bool = _option(True, "write the trained model to the run's folder at the end")
    resume: bool = _option(False, "go on from the run's last checkpoint, if there is one")
    trackers: list[str] = _option((), "tensorboard, wandb, trackio, ...: accelerate's")
    seed: int = _option(0, "of everything that is drawn")

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("train_size", "steps", "num_iterations", "prompts_per_step", "minibatches",
                     "max_prompt_length", "max_completion_length", "epochs_per_rollout",
                     "micro_batch_size", "show_every"):  # fmt: skip
            self._check(name, "at least 1", lambda x: x >= 1)
        for name in ("eval_size", "eval_every", "save_every", "lora_rank", "top_k", "min_p",
                     "warmup_steps", "weight_decay", "eval_temperature"):  # fmt: skip
            self._check(name, "at least 0", lambda x: x >= 0)
        for name in ("learning_rate", "max_grad_norm", "tolerance", "lora_alpha"):
            self._check(name, "a number > 0", lambda x: x > 0)
        self._check("top_p", "a number in (0, 1]", lambda x: 0 < x <= 1)
        self._check("min_p", "a number in [0, 1]", lambda x: 0 <= x <= 1)
        self._check("adam_beta2", "a number in (0, 1)", lambda x: 0 < x < 1)
        self._check("num_generations", "at least 2, as advantages compare completions",
                    lambda x: x >= 2)  # fmt: skip
        check_choice("dtype", self.dtype, tuple(DTYPES))
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("backward", self.backward, BACKWARDS)
        check_choice("rollout", self.rollout, ROLLOUTS)
        check_choice("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        self._check_together()
        self.loss()  # its own checks

    def loss(self) -> GRPOLossConfig:
        """The options of the loss."""
        names = {f.name for f in fields(GRPOLossConfig)} - _NOT_OF_THE_LOSS
        options = {name: getattr(self, name) for name in names}
        if (self.aggregation or self.loss_type) == "dr_grpo":
            options["max_completion_length"] = self.max_completion_length
        return GRPOLossConfig(**options)

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    def unused(self) -> TrainingConfig:
        """With a number behind its name, if there is a run of that name and it is not resumed."""
        number, config = 1, self
        while not self.resume and config.folder.exists():
            number += 1
            config = replace(self, name=f"{self.name}-{number}")
        return config

    @property
    def updates_per_step(self) -> int:
        return self.epochs_per_rollout * self.minibatches

    def _check_types(self) -> None:
        for option in fields(self):
            value, kind = getattr(self, option.name), _KINDS[option.name]
            if value is None and "None" in kind:
                continue
            if kind.startswith("list"):
                inner = str if "str" in kind else (int, float)
                if not isinstance(value, list) or not all(isinstance(x, inner) for x in value):
                    raise TypeError(f"{option.name}: expected a {kind}; got {value!r}")
            elif kind == "bool":
                if not isinstance(value, bool):
                    raise TypeError(f"{option.name}: expected true or false; got {value!r}")
            elif kind.startswith("str"):
                if not isinstance(value, str):
                    raise TypeError(f"{option.name}: expected a string; got {value!r}")
            else:
                check_number(option.name, value)
                if kind.startswith("int") and not isinstance(value, int):
                    raise TypeError(f"{option.name}: expected a whole number; got {value!r}")

    def _check(self, name: str, expected: str, ok: Any) -> None:
        value = getattr(self, name)
        if not ok(value):
            raise ValueError(f"{name}: expected {expected}; got {value}")

    def _check_together(self) -> None:
        def refuse(name: str, expected: str) -> None:
            raise ValueError(f"{name}: expected {expected}; got {getattr(self, name)!r}")

        if not self.model:
            refuse("model", "a hub name or a folder")
        if not self.name or Path(self.name).name != self.name:
            refuse("name", "the name of a folder inside output")
        if not self.rewards:
            refuse("rewards", "at least one reward function")
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            refuse("reward_weights", f"one for each of {self.rewards}")
        if self.num_iterations > self.steps:
            refuse("num_iterations", f"at most steps = {self.steps}")
        if self.num_iterations > 1 and not self.beta:
            refuse("num_iterations", "1 where beta is 0, as there is no reference to refresh")
        if self.num_iterations > 1 and self.lora_rank:
            refuse("num_iterations", "1 with lora_rank, whose reference is the model without it")
        if self.prompts_per_step % self.minibatches:
            refuse("minibatches", f"a divisor of prompts_per_step = {self.prompts_per_step}")
        if self.trainable is not None and self.lora_rank:
            refuse("trainable", "none with lora_rank, which says what is trained")
        if self.trainable is not None:
            try:
                re.compile(self.trainable)
            except re.error as error:
                raise ValueError(
                    f"trainable: expected a regular expression; got {self.trainable!r} ({error})"
                ) from None
        if self.backward == "exact" and self.tolerance != DEFAULT_TOLERANCE:
            refuse("tolerance", f"{DEFAULT_TOLERANCE} with backward='exact', which has no noise")
        if self.eval_every and not self.eval_size:
            refuse("eval_every", "0 where eval_size is 0")
        if self.top_entropy_quantile < 1 and self.entropy_coef:
            refuse(
                "entropy_coef", "0 with top_entropy_quantile, whose tokens each part has its own of"
            )
        for name in ("kl_estimator", "kl_clamp", "use_bias_correction_kl"):
            if not self.beta and getattr(self, name) != getattr(GRPOLossConfig(), name):
                refuse(name, f"{getattr(GRPOLossConfig(), name)!r} where beta is 0")
        for name in ("lora_alpha", "lora_target"):
            if not self.lora_rank and getattr(self, name) != _DEFAULTS[name]:
                refuse(name, f"{_DEFAULTS[name]!r} where lora_rank is 0")
        if self.eval_temperature and not self.eval_size:
            refuse("eval_temperature", "0 where eval_size is 0")
        if self.chat and self.dataset == "additions":
            refuse("chat", "false with additions, whose prompts are no chat")
        if self.rollout == "continuous_batching" and (self.stop or self.min_p):
            refuse("rollout", "generate with stop or min_p")


# As written: HfArgumentParser puts types in the place of the fields' own.
_KINDS: dict[str, str] = dict(TrainingConfig.__annotations__)
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(TrainingConfig)}


def parse_config(argv: Sequence[str] | None = None, **defaults: Any) -> TrainingConfig:
    """From flags, or from one YAML file and flags that override it; `defaults` come before both.

    Exits with the reason on standard error, as `argparse` does.
    """
    import argparse

    from transformers import HfArgumentParser

    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(
        TrainingConfig, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    if argv and argv[0].endswith((".yaml", ".yml")):
        import yaml

        path = Path(argv.pop(0))
        try:
            values = yaml.safe_load(path.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            parser.error(f"{path}: {error}")
        unknown = set(values) - {f.name for f in fields(TrainingConfig)}
        if unknown:
            parser.error(f"{path}: unknown options: {', '.join(sorted(unknown))}")
        # YAML reads 1e-6 as a string.
        for name, value in values.items():
            if isinstance(value, str) and _KINDS[name].startswith("float"):
                try:
                    values[name] = float(value)
                except ValueError:
                    parser.error(f"{path}: {name}: expected a number; got {value!r}")
        defaults |= values
    parser.set_defaults(**defaults)
    options, unknown_flags = parser.parse_known_args(argv)
    if unknown_flags:
        parser.error(f"unknown options: {' '.join(unknown_flags)}")
    try:
        return TrainingConfig(**vars(options))
    except (ValueError, TypeError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
        raise  # not reached

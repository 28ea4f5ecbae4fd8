"""`TrainingConfig`: all options of a run in one dataclass."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import GRPOLossConfig, check_choice, check_number
from ..execution import Execution
from ..head import LOGITS_DTYPES
from .word_problems import LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable

    _LossType = str | Callable[[Any], Any]
else:
    _LossType = str  # what the command line takes

PRECISIONS = ("auto", "no", "bf16")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SCHEDULES = ("constant", "linear", "cosine")
BACKWARDS = ("exact", "sampled")
HEADS = ("gathered", "sharded")
ROLLOUTS = ("generate", "continuous_batching", "vllm")
VLLM_MODES = ("colocate", "server")
# Of the loss's options one is of sampling here, as completions have a length in every run, and one
# is computed for each rollout.
_NOT_OF_THE_LOSS = {"max_completion_length", "entropy_threshold"}


def _option(default: Any, text: str) -> Any:
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


def _of_loss(name: str) -> Any:
    """An option of `GRPOLossConfig`, with its default, and its docstring as help."""
    default = next(f.default for f in fields(GRPOLossConfig) if f.name == name)
    lines = (getdoc(GRPOLossConfig) or "").partition("Args:")[2].partition("Raises:")[0]
    found = re.search(rf"^ {{4}}{name}: (.*?)(?=^ {{4}}\w+: |\Z)", lines, re.M | re.S)
    text = " ".join(found[1].split()) if found else ""
    return field(default=default, metadata={"help": text.replace("`", "").replace("%", "%%")})


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """A training run, validated when made, before anything is loaded.

    `python examples/train_gsm8k.py --help` lists every option with its unit and default; options of
    the loss are those of `GRPOLossConfig`. In Python `loss_type` may be an instance of a loss class
    as well, or a callable; `config.json` and checkpoints have its `repr`.

    Raises:
        ValueError, TypeError: names the option, what was expected and what came.
    """

    # The model
    model: str = _option(
        "", "hub name or folder of a causal language model, or smollm2-135m, which needs no hub"
    )
    revision: str | None = _option(
        None, "commit, tag or branch of a model on the hub; none: the newest"
    )
    dtype: str = _option("fp32", "dtype of the weights: fp32 or bf16")
    precision: str = _option(
        "auto", "precision of GEMMs: bf16 (autocast), no, or auto: bf16 on a GPU that has it"
    )
    trainable: str | None = _option(
        None, "regular expression that names of trained parameters match; none: all are trained"
    )
    gradient_checkpointing: bool = _option(
        False, "recompute activations in the backward; prompts are then not shared"
    )
    lora_rank: int = _option(0, "rank of LoRA adapters, which alone are then trained; 0: none")
    lora_alpha: int = _option(32, "adapters are scaled by lora_alpha / lora_rank")
    lora_target: str = _option(
        "all-linear", "modules that get adapters: a regular expression, or all-linear"
    )

    # Problems and rewards
    dataset: str = _option(
        "gsm_symbolic",
        "gsm8k (from the hub), word_problems, additions, a task of reasoning-gym, a .jsonl or "
        ".parquet file, or a folder made by save_to_disk",
    )
    dataset_revision: str | None = _option(
        None, "commit, tag or branch of gsm8k on the hub; none: the newest"
    )
    levels: list[int] = _option(
        (), "levels of word_problems: 1 a sum or a difference, 2 one step of any kind, 3 two "
        "steps; none: all of them"
    )  # fmt: skip
    train_size: int = _option(1000, "problems to train on, at most")
    eval_size: int = _option(64, "held-out problems, at most; 0: no evaluation")
    chat: bool = _option(False, "put prompts into the tokenizer's chat template")
    max_prompt_length: int = _option(512, "tokens; problems with a longer prompt are left out")
    rewards: list[str] = _option(("answer", "format"), "names of reward functions")
    reward_weights: list[float] = _option((), "one per reward function; none: 1 each")
    reward_timeout: float = _option(
        0.0,
        "seconds that a reward function, and is_correct, may take for the completions of a "
        "step; 0: any time",
    )

    # Rollouts
    steps: int = _option(100, "rollouts")
    num_iterations: int = _option(
        1, "equal parts that the steps fall into; at the start of each the reference becomes the "
        "policy of that moment (TRL's num_iterations is epochs_per_rollout here)"
    )  # fmt: skip
    prompts_per_step: int = _option(4, "prompts in a rollout, over all processes")
    num_generations: int = _option(8, "completions per prompt, which advantages compare")
    resample_equal_groups: int = _option(
        0, "times per step that prompts whose completions all have the same reward, from which "
        "nothing is learned, are replaced by others (DAPO's dynamic sampling); metrics of rewards "
        "are over the groups that are kept"
    )  # fmt: skip
    curriculum: float = _option(
        0.0, "begin with problems of the lowest level, and let those of the next join when the "
        "accuracy of samples of the highest reaches this share (mean of three steps); 0: all levels"
    )  # fmt: skip
    max_completion_length: int = _option(256, "tokens in a completion, at most")
    top_k: int = _option(0, "sample from the k likeliest tokens only; 0: from all")
    top_p: float = _option(1.0, "sample from the likeliest tokens that add up to this probability")
    min_p: float = _option(
        0.0, "sample from tokens with this share of the likeliest one's probability, at least"
    )
    replay_support: bool = _option(
        True, "train the policy that sampled: with top_k, top_p or min_p, log-probs and loss are "
        "over the tokens that these left; off: over the whole softmax, which is not what sampled"
    )  # fmt: skip
    stop: list[str] = _option((), "strings that end a completion, which keeps them")
    mask_truncated_completions: bool = _option(
        False, "leave completions that were cut at max_completion_length out of the loss"
    )
    rollout: str = _option("generate", "sampler: generate, continuous_batching, or vllm")
    vllm_mode: str = _option(
        "colocate", "vLLM in this process (in each, of several), or a server of its own"
    )
    vllm_dtype: str = _option(
        "auto", "dtype that vLLM computes in: fp32, bf16, or auto: that of the policy's GEMMs"
    )
    vllm_max_model_length: int | None = _option(
        None, "tokens that vLLM has room for in a sequence; none: max_prompt_length + "
        "max_completion_length"
    )  # fmt: skip
    vllm_lora: str = _option(
        "merged", "adapters are sent to vLLM merged into all the weights, or as an adapter, whose "
        "base weights stay those of the model's files"
    )  # fmt: skip
    vllm_gpu_memory_utilization: float = _option(
        0.3, "share of each GPU's memory that a colocated vLLM fills, weights included"
    )
    vllm_enable_sleep_mode: bool = _option(
        False, "a colocated vLLM gives the GPU's memory back while weights are trained"
    )
    vllm_server_base_url: str = _option("http://127.0.0.1:8000", "where the server listens")
    vllm_server_timeout: float = _option(
        240.0, "seconds to wait for a server that does not answer, at the start or later"
    )
    vllm_request_timeout: float = _option(
        1800.0, "seconds that a server may take for one prompt's completions, or for weights"
    )
    vllm_sync_dir: str = _option(
        "/dev/shm", "folder in which weights are handed to a server, and adapters to any vLLM"
    )

    # The loss
    loss_type: _LossType = _of_loss("loss_type")
    beta: float = _of_loss("beta")
    epsilon: float = _of_loss("epsilon")
    epsilon_high: float | None = _of_loss("epsilon_high")
    delta: float | None = _of_loss("delta")
    dual_clip: float | None = _of_loss("dual_clip")
    importance_sampling_level: str = _of_loss("importance_sampling_level")
    aggregation: str | None = _of_loss("aggregation")
    temperature: float = _option(
        1.0, "divisor of the logits, > 0, when completions are sampled and trained on"
    )
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
        "group", "divide advantages by the standard deviation of the group, of the batch, or none"
    )
    head: str = _option(
        "gathered", "with FSDP2, the LM head is gathered in every process, as layers are, or stays "
        "sharded while the processes' hidden states pass by (docs/distributed.md)"
    )  # fmt: skip
    logits_dtype: str = _option(
        "fp32", "logits stay in float32 (fp32), or are rounded to the model's dtype (model), as by "
        "a sampler whose head does so; the first step warns where the two differ"
    )  # fmt: skip
    batch_invariant: bool = _option(
        False,
        "the head makes the same log-prob of the same state, to the bit, whatever else is in "
        "the micro-batch",
    )
    backward: str = _option(
        "exact", "backward of the head: exact, or sampled (docs/sampled_backward.md)"
    )
    tolerance: float = _option(5e-3, "relative noise of a sampled backward")

    # Updates
    epochs_per_rollout: int = _option(1, "times that each rollout is trained on")
    minibatches: int = _option(1, "optimizer steps per epoch")
    micro_batch_size: int = _option(
        16, "completions in a forward and backward, per process; changes memory, not gradients"
    )
    share_prompts: bool = _option(
        True, "encode the prompt of a group once, where the model's cache allows it"
    )
    skip_untrained: bool = _option(
        True, "leave out completions without gradient (groups of equal rewards, where beta and "
        "entropy_coef are 0); metrics are over the others"
    )  # fmt: skip
    learning_rate: float = _option(1e-6, "learning rate of AdamW")
    weight_decay: float = _option(0.0, "weight decay of AdamW")
    adam_beta2: float = _option(0.999, "second beta of AdamW")
    schedule: str = _option(
        "constant", "learning rate over time: constant, or linear or cosine to 0"
    )
    warmup_steps: int = _option(0, "optimizer steps over which the learning rate rises from 0")
    max_memory_gib: float = _option(
        0.0, "memory that a process may take, on a GPU or of its own on a CPU; what needs more is "
        "made in smaller parts; 0: all there is"
    )  # fmt: skip
    max_grad_norm: float = _option(1.0, "scale larger gradients down to this norm")
    max_bad_updates: int = _option(
        10, "updates in a row whose gradient is NaN or inf, and which are left out, until the run "
        "ends"
    )  # fmt: skip

    # Logs and checkpoints
    name: str = _option("grpo", "name of the run and of its folder")
    output: str = _option("runs", "folder that runs are kept in")
    eval_every: int = _option(0, "steps between evaluations; 0: only before and after")
    eval_temperature: float = _option(0.0, "temperature of evaluations; 0: the likeliest token")
    show_every: int = _option(10, "steps between printed completions")
    save_every: int = _option(
        0, "steps between checkpoints; 0: only at the end and at the best evaluation; -1: none"
    )
    save_model: bool = _option(True, "write the trained model into the run's folder at the end")
    resume: bool = _option(False, "go on from the run's last checkpoint, if there is one")
    trackers: list[str] = _option((), "trackers of accelerate: tensorboard, wandb, trackio, ...")
    seed: int = _option(0, "seed of everything that is drawn")

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("train_size", "steps", "num_iterations", "prompts_per_step", "minibatches",
                     "max_prompt_length", "max_completion_length", "epochs_per_rollout",
                     "micro_batch_size", "show_every", "max_bad_updates"):  # fmt: skip
            self._check(name, "at least 1", lambda x: x >= 1)
        for name in ("eval_size", "eval_every", "lora_rank", "top_k", "min_p",
                     "resample_equal_groups", "reward_timeout", "max_memory_gib",
                     "warmup_steps", "weight_decay", "eval_temperature"):  # fmt: skip
            self._check(name, "at least 0", lambda x: x >= 0)
        for name in ("learning_rate", "max_grad_norm", "tolerance", "lora_alpha", "temperature",
                     "vllm_server_timeout", "vllm_request_timeout"):  # fmt: skip
            self._check(name, "a number > 0", lambda x: x > 0)
        self._check("save_every", "at least -1", lambda x: x >= -1)
        self._check("top_p", "a number in (0, 1]", lambda x: 0 < x <= 1)
        self._check("curriculum", "a number in [0, 1]", lambda x: 0 <= x <= 1)
        self._check("min_p", "a number in [0, 1]", lambda x: 0 <= x <= 1)
        self._check("adam_beta2", "a number in (0, 1)", lambda x: 0 < x < 1)
        self._check("num_generations", "at least 2, as advantages compare completions",
                    lambda x: x >= 2)  # fmt: skip
        check_choice("dtype", self.dtype, tuple(DTYPES))
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("backward", self.backward, BACKWARDS)
        check_choice("head", self.head, HEADS)
        check_choice("logits_dtype", self.logits_dtype, LOGITS_DTYPES)
        check_choice("rollout", self.rollout, ROLLOUTS)
        check_choice("vllm_mode", self.vllm_mode, VLLM_MODES)
        check_choice("vllm_dtype", self.vllm_dtype, ("auto", *DTYPES))
        check_choice("vllm_lora", self.vllm_lora, ("merged", "adapter"))
        self._check("vllm_gpu_memory_utilization", "a number in (0, 1]", lambda x: 0 < x <= 1)
        check_choice("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        self._check_together()
        self.loss()  # its own checks

    def loss(self) -> GRPOLossConfig:
        """The config of the loss."""
        names = {f.name for f in fields(GRPOLossConfig)} - _NOT_OF_THE_LOSS
        options = {name: getattr(self, name) for name in names}
        # An instance of a loss, or a callable, may say its own.
        own = getattr(self.loss_type, "aggregation", self.loss_type)
        if (self.aggregation or own) == "dr_grpo":
            options["max_completion_length"] = self.max_completion_length
        return GRPOLossConfig(**options)

    def execution(self) -> Execution:
        """The `Execution` of every call over the head, with the exact backward."""
        return Execution(batch_invariant=self.batch_invariant)

    def as_json(self) -> dict[str, Any]:
        """The options by name, as JSON takes them."""
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        if not isinstance(self.loss_type, str):
            # Without an address, which is another one when the run goes on.
            options["loss_type"] = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(self.loss_type))
        return options

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.output) / self.name

    def unused(self) -> TrainingConfig:
        """The config under a name that is not taken, `name-2` say, unless its run is resumed."""
        number, config = 1, self
        while not self.resume and config.folder.exists():
            number += 1
            config = replace(self, name=f"{self.name}-{number}")
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
    def truncates(self) -> bool:
        """True if `top_k`, `top_p` or `min_p` leave some tokens only to sample from."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def records_support(self) -> bool:
        """True if rollouts are to say which tokens these left."""
        return self.truncates and self.replay_support

    def starts_iteration(self, step: int) -> bool:
        """True for the first step of every iteration but the first; steps count from 1."""
        count = self.num_iterations
        return step - 1 in {round(i * self.steps / count) for i in range(1, count)}

    def _check_types(self) -> None:
        for option in fields(self):
            value, kind = getattr(self, option.name), KINDS[option.name]
            if (value is None and "None" in kind) or option.name == "loss_type":
                continue  # the loss's config checks that
            if kind.startswith("list"):
                inner: Any = {"list[str]": str, "list[int]": int}.get(kind, (int, float))
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
        if self.dataset_revision and self.dataset != "gsm8k":
            refuse("dataset_revision", "none where dataset is not gsm8k")
        if self.levels and self.dataset != "word_problems":
            refuse("levels", "none where dataset is not word_problems")
        if not set(self.levels) <= set(LEVELS):
            refuse("levels", f"some of {LEVELS}")
        if self.batch_invariant and self.backward == "sampled":
            refuse("batch_invariant", "false with backward sampled, which draws for a whole batch")
        if self.head == "sharded" and self.backward == "sampled":
            refuse("backward", "exact with a sharded head")
        if self.head == "sharded" and self.records_support:
            refuse("replay_support", "false with a sharded head and top_k, top_p or min_p")
        if self.curriculum and self.resample_equal_groups:
            refuse(
                "curriculum",
                "0 with resample_equal_groups, which leaves out groups that are all right",
            )
        if self.num_iterations > self.steps:
            refuse("num_iterations", f"at most steps = {self.steps}")
        if self.num_iterations > 1 and not self.beta:
            refuse(
                "num_iterations",
                "1 where beta is 0, as there is no reference to refresh "
                "(TRL's num_iterations is epochs_per_rollout here)",
            )
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
        if self.backward == "exact" and self.tolerance != DEFAULTS["tolerance"]:
            refuse("tolerance", f"{DEFAULTS['tolerance']} with backward='exact', without noise")
        if self.eval_every and not self.eval_size:
            refuse("eval_every", "0 where eval_size is 0")
        if self.top_entropy_quantile < 1 and self.entropy_coef:
            refuse(
                "entropy_coef",
                "0 with top_entropy_quantile, as micro-batches differ in their tokens",
            )
        for name in ("kl_estimator", "kl_clamp", "use_bias_correction_kl"):
            if not self.beta and getattr(self, name) != getattr(GRPOLossConfig(), name):
                refuse(name, f"{getattr(GRPOLossConfig(), name)!r} where beta is 0")
        for name in ("lora_alpha", "lora_target"):
            if not self.lora_rank and getattr(self, name) != DEFAULTS[name]:
                refuse(name, f"{DEFAULTS[name]!r} where lora_rank is 0")
        if self.eval_temperature and not self.eval_size:
            refuse("eval_temperature", "0 where eval_size is 0")
        if self.chat and self.dataset == "additions":
            refuse("chat", "false with additions, whose prompts are no chat")
        for name in (name for name in KINDS if name.startswith("vllm_")):
            given = getattr(self, name) != DEFAULTS[name]
            if given and self.rollout != "vllm":
                refuse(name, f"{DEFAULTS[name]!r} with rollout {self.rollout}")
            if given and self.vllm_mode not in _VLLM_MODES_OF.get(name, VLLM_MODES):
                refuse(name, f"{DEFAULTS[name]!r} with vllm_mode {self.vllm_mode}")
        in_place = self.vllm_mode == "colocate" and self.vllm_lora == "merged"
        if in_place and self.vllm_sync_dir != DEFAULTS["vllm_sync_dir"]:
            default = DEFAULTS["vllm_sync_dir"]
            refuse(
                "vllm_sync_dir",
                f"{default!r} with vllm_mode colocate and vllm_lora merged, which write no files",
            )
        need = self.max_prompt_length + self.max_completion_length
        if self.vllm_max_model_length is not None and self.vllm_max_model_length < need:
            refuse(
                "vllm_max_model_length",
                f"at least max_prompt_length + max_completion_length = {need}",
            )
        if self.vllm_lora == "adapter" and not 0 < self.lora_rank <= 512:
            refuse("vllm_lora", f"merged with lora_rank {self.lora_rank}")
        if not re.fullmatch(r"https?://[^/]+:\d+/?", self.vllm_server_base_url):
            refuse("vllm_server_base_url", "one like http://127.0.0.1:8000")
        if self.rollout == "continuous_batching" and (self.stop or self.min_p):
            refuse("rollout", "generate with stop or min_p")
        if self.rollout == "continuous_batching" and self.records_support:
            refuse(
                "replay_support",
                "false with continuous_batching and top_k or top_p, as it does not say which "
                "tokens these left; or take rollout generate",
            )


# The modes of vLLM in which an option acts, where it is not all of them.
_VLLM_MODES_OF = {
    "vllm_gpu_memory_utilization": ("colocate",), "vllm_enable_sleep_mode": ("colocate",),
    "vllm_server_base_url": ("server",), "vllm_server_timeout": ("server",),
    "vllm_request_timeout": ("server",),
}  # fmt: skip
# Types as written: HfArgumentParser replaces those of the fields.
KINDS: dict[str, str] = dict(TrainingConfig.__annotations__)
DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(TrainingConfig)}

"""Processes: setting them up, and exchanging values between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    gather_object,
    parse_flag_from_env,
)
from torch import Tensor

from ..config import DTYPES, TrainingConfig

_T = TypeVar("_T")
# Seconds after which a collective fails by itself in a run with vLLM.
_SAMPLING_S = 2640.0
# The environment that `accelerate` reads. Some variables are refused: these flags, which enable
# DEEPSPEED_*, FSDP_*, MEGATRON_LM_* and PARALLELISM_CONFIG_*, and a backend of fp8.
_SHARDING = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
_SHARDED_TYPES = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM}
# Some are overridden: ACCELERATE_MIXED_PRECISION, by `dtype`, and these, which a run prints. The
# weights of a compiled model would be saved under other names.
_OVERRULED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "1", "set prompts_per_step (batch) and micro_batch_size (what fits in memory)"
    ),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "the policy is not compiled"),
}  # fmt: skip
# Others change neither gradients nor names: devices (ACCELERATE_USE_CPU, _TORCH_DEVICE,
# _CPU_AFFINITY, _BYPASS_DEVICE_MAP, _USE_SAGEMAKER), output (_DEBUG_MODE, _LOG_LEVEL,
# _ENABLE_RICH), options of TPUs or DeepSpeed only (_DOWNCAST_BF16, _GRADIENT_CLIPPING).


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """Sets up the processes of a run, and checks that the options suit them.

    Raises:
        ImportError: a tracker that is not installed.
        ValueError: options that this number of processes cannot honor, or a launch that shards.
    """
    check_launch()
    if unknown := sorted({*config.trackers} - {"all", *map(str, LOGGER_TYPE_TO_CLASS)}):
        known = ", ".join(map(str, LOGGER_TYPE_TO_CLASS))
        raise ValueError(f"trackers: expected some of {known}; got {unknown[0]}")
    handlers = []
    if config.rollout == "vllm":
        # Processes wait for the one whose completions take longest.
        handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=_SAMPLING_S))]
    accelerator = Accelerator(
        mixed_precision=mixed_precision(config), log_with=config.trackers or None,
        project_dir=str(config.folder), kwargs_handlers=handlers, dynamo_backend="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
    )  # fmt: skip
    _check_state(accelerator)
    installed = {str(tracker) for tracker in accelerator.log_with}
    missing = [name for name in config.trackers if name not in installed | {"all"}]
    if missing:
        raise ImportError(f"trackers: {missing[0]} is not installed: pip install {missing[0]}")
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if accelerator.num_processes == 1 and launched > 1:
        raise ValueError(
            f"WORLD_SIZE={launched}, but accelerate sees one process: each process would train a "
            "separate model. On CPUs set ACCELERATE_USE_CPU=true"
        )
    return accelerator


def is_first_process() -> bool:
    """True in the first process of a launch, also before accelerate has set them up."""
    return os.environ.get("RANK", "0") == "0"


def check_launch() -> None:
    """Refuses a launch that shards the weights or changes layers.

    Raises:
        ValueError: the message names the launch's option, and the way out.
    """
    for kind in _SHARDING:
        if parse_flag_from_env(f"ACCELERATE_USE_{kind}"):
            raise ValueError(
                f"ACCELERATE_USE_{kind} does not work with this trainer, whose processes hold all "
                "weights: launch with examples/configs/ddp.yaml (DDP), or train with TRL and "
                "grpo_kernels.integrations.trl.FusedGRPOTrainer, as examples/trl_gsm8k.py does"
            )
    fp8 = os.environ.get("ACCELERATE_FP8_BACKEND", "no")
    if fp8.lower() != "no":
        raise ValueError(
            f"ACCELERATE_FP8_BACKEND={fp8} does not work with this trainer, which has no fp8: "
            "launch without it, and set dtype"
        )


def overruled() -> list[str]:
    """Returns a line for each option of `accelerate launch` that a run overrides."""
    values = {name: os.environ.get(name, usual).lower() for name, (usual, _) in _OVERRULED.items()}
    return [
        f"{name}={values[name]} is not used: {instead}"
        for name, (usual, instead) in _OVERRULED.items() if values[name] != usual
    ]  # fmt: skip


def _check_state(accelerator: Accelerator) -> None:
    """Refuses settings of an `Accelerator` made before, as all share one state."""
    state = accelerator.state
    left = {
        "parallelism_config": state.parallelism_config is not None,
        "torch.compile": state.dynamo_plugin.backend != DynamoBackend.NO,
        str(state.distributed_type.value): state.distributed_type in _SHARDED_TYPES,
    }
    for what, is_set in left.items():
        if is_set:
            raise ValueError(
                f"accelerator: an Accelerator was made with {what} before this trainer, which "
                "does without: make none before it"
            )


def reduce(accelerator: Accelerator, value: _T, function: Callable[[list[_T]], Any]) -> Any:
    """Applies `function` to the list of all processes' values; a single process needs no gather."""
    if accelerator.num_processes == 1:
        return value
    return function(gather_object([value]))


def finite(accelerator: Accelerator, tensors: Iterable[Tensor]) -> bool:
    """True if all numbers of all processes are finite."""
    return bool(reduce(accelerator, all(bool(x.isfinite().all()) for x in tensors), all))


@contextmanager
def raise_on_all_ranks(
    accelerator: Accelerator, kind: type[Exception], others: str | None = None
) -> Iterator[None]:
    """If one rank's block raises an error of this kind, every rank raises the same error.

    `others`: also raises errors of other kinds, with this text before their names; None: not.
    """
    error: Exception | None = None
    try:
        yield
    except kind as raised:
        error = raised
    except Exception as raised:
        if others is None:
            raise
        error = kind(f"{others}{type(raised).__name__}: {raised}")
        error.__cause__ = raised
    message = reduce(accelerator, None if error is None else str(error), _first)
    if message is not None:
        raise kind(message) from error


def _first(values: list[_T | None]) -> _T | None:
    return next((x for x in values if x is not None), None)


def largest(accelerator: Accelerator, numbers: list[int]) -> list[int]:
    """The elementwise maximum of all processes' numbers."""
    if accelerator.num_processes == 1:
        return numbers
    worst = torch.tensor(numbers, dtype=torch.int64, device=accelerator.device)
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    return worst.tolist()


def join(accelerator: Accelerator, x: Tensor) -> Tensor:
    """Joins the tensors `[K, B, T]` of all processes along `B`, padded with 0 to the longest."""
    if accelerator.num_processes == 1:
        return x
    sizes: list[tuple[int, int]] = gather_object([tuple(x.shape[1:])])
    B, T = (max(numbers) for numbers in zip(*sizes, strict=True))
    padded = x.new_zeros(len(x), B, T)
    padded[:, : x.shape[1], : x.shape[2]] = x
    every = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(every, padded)
    return torch.cat([one[:, :b] for one, (b, _) in zip(every, sizes, strict=True)], 1)


def mixed_precision(config: TrainingConfig) -> str:
    """The precision of autocast: `"bf16"`, `"fp16"` or `"no"`."""
    if config.dtype == "fp32" or not _on_cuda():
        return "no"
    # Before Ampere bf16 is emulated, slower than float32.
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16" if config.dtype == "mixed" else "no"


def gemm_dtype(config: TrainingConfig) -> str:
    """The dtype of the policy's GEMMs, as torch calls it."""
    if config.dtype == "bf16":
        return DTYPES["bf16"]
    return {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}[mixed_precision(config)]


def _on_cuda() -> bool:
    """True if accelerate chooses a CUDA device, which the environment may prevent."""
    device = os.environ.get("ACCELERATE_TORCH_DEVICE")
    if device is not None:
        return torch.device(device).type == "cuda"
    return torch.cuda.is_available() and not parse_flag_from_env("ACCELERATE_USE_CPU")

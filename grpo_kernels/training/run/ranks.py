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
from accelerate.utils import InitProcessGroupKwargs, gather_object, parse_flag_from_env
from torch import Tensor

from ..config import DTYPES, TrainingConfig

_T = TypeVar("_T")
# Seconds after which a collective beside vLLM fails by itself.
_SAMPLING_S = 2640.0


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
        # The others wait for a process whose completions take long.
        handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=_SAMPLING_S))]
    accelerator = Accelerator(
        mixed_precision=mixed_precision(config), log_with=config.trackers or None,
        project_dir=str(config.folder), kwargs_handlers=handlers,
    )  # fmt: skip
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
    """Refuses a launch that shards the weights, which this loop does not.

    Raises:
        ValueError: names what `accelerate launch` was told to do, and the way out.
    """
    for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if parse_flag_from_env(f"ACCELERATE_USE_{kind}"):
            raise ValueError(
                f"ACCELERATE_USE_{kind} does not work with this trainer, whose processes hold all "
                "weights: launch with examples/configs/ddp.yaml (DDP), or train with TRL and "
                "grpo_kernels.integrations.trl.FusedGRPOTrainer, as examples/trl_gsm8k.py does"
            )


def reduce(accelerator: Accelerator, value: _T, function: Callable[[list[_T]], Any]) -> Any:
    """Applies `function` to the list of all processes' values; one process keeps its value."""
    if accelerator.num_processes == 1:
        return value
    return function(gather_object([value]))


def finite(accelerator: Accelerator, tensors: Iterable[Tensor]) -> bool:
    """True if no number, of any process, is NaN or inf."""
    return bool(reduce(accelerator, all(bool(x.isfinite().all()) for x in tensors), all))


@contextmanager
def raise_on_all_ranks(
    accelerator: Accelerator, kind: type[Exception], others: str | None = None
) -> Iterator[None]:
    """If one rank's block raises an error of this kind, every rank raises the same error.

    `others`: errors of other kinds, too, with their names after this text; None: not those.
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
    """The first that is not None."""
    return next((x for x in values if x is not None), None)


def largest(accelerator: Accelerator, numbers: list[int]) -> list[int]:
    """The largest of all processes' numbers, place by place."""
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
    """The precision of autocast: `"bf16"` or `"no"`."""
    low = config.dtype != "fp32" and torch.cuda.is_available()
    # Before Ampere bf16 is emulated, slower than float32.
    low = low and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if low else "no"


def gemm_dtype(config: TrainingConfig) -> str:
    """The dtype of the policy's GEMMs, as torch calls it."""
    low = config.dtype == "bf16" or mixed_precision(config) == "bf16"
    return DTYPES["bf16" if low else "fp32"]

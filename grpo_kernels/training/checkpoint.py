"""Checkpoints that are whole or not there.

Written into a folder of another name, flushed to the disk and renamed at the end, so that neither a
kill nor a full disk leaves half of one or takes the one before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

# What a run may change when it goes on: how long, how often something is told or kept, and how the
# work is cut into pieces.
MAY_CHANGE = {
    "steps", "output", "name", "resume", "eval_every", "save_every", "show_every", "save_model",
    "trackers", "micro_batch_size",
}  # fmt: skip
_STATE, _REFERENCE, _WEIGHTS = "state.json", "reference.pt", "trained.pt"


def trained_weights_only(accelerator: Accelerator) -> None:
    """Keeps frozen weights out of checkpoints: they come with the model.

    Where weights are sharded (FSDP, ZeRO-3) accelerate writes the shards itself, all of them.
    """

    def keep(models: list[Any], weights: list[Any], folder: str) -> None:
        if not weights:
            return
        if accelerator.is_main_process:
            trained = {n: p.detach() for n, p in _named(accelerator, models[0]) if p.requires_grad}
            torch.save(trained, Path(folder) / _WEIGHTS)
        weights.clear()

    def load(models: list[Any], folder: str) -> None:
        path = Path(folder) / _WEIGHTS
        if not path.exists():
            return
        saved = torch.load(path, map_location="cpu", weights_only=True)
        with torch.no_grad():
            for name, parameter in _named(accelerator, models[0]):
                if parameter.requires_grad:
                    parameter.copy_(saved[name])
        models.clear()

    accelerator.register_save_state_pre_hook(keep)
    accelerator.register_load_state_pre_hook(load)


def _named(accelerator: Accelerator, model: Any) -> Any:
    return accelerator.unwrap_model(model).named_parameters()


def save(
    accelerator: Accelerator, folder: Path, state: Mapping[str, Any], reference: Any = None
) -> str | None:
    """Writes the checkpoint of `state["step"]`; what went wrong, or None."""
    checkpoints = folder / "checkpoints"
    final = checkpoints / _name(state["step"])
    scratch = checkpoints / f".{final.name}.tmp"
    weights = None if reference is None else accelerator.get_state_dict(reference)

    def start() -> None:
        if accelerator.is_main_process:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)

    def write() -> None:
        accelerator.save_state(str(scratch))
        if accelerator.is_main_process:
            if weights is not None:
                torch.save(weights, scratch / _REFERENCE)
            (scratch / _STATE).write_text(json.dumps(state))

    problem = _problem(accelerator, start) or _problem(accelerator, write)
    if accelerator.is_main_process:
        if problem is None:
            problem = _put(scratch, final)
        if problem is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    accelerator.wait_for_everyone()
    return problem


def _problem(accelerator: Accelerator, work: Callable[[], None]) -> str | None:
    """What went wrong in any of the processes, the same for all of them; None: nothing."""
    problem: str | None = None
    try:
        work()
    # A full disk is an OSError to Python, a RuntimeError to torch, another error to safetensors.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if accelerator.num_processes > 1:
        problem = next((p for p in gather_object([problem]) if p is not None), None)
    return problem


def _put(scratch: Path, final: Path) -> str | None:
    """Flushes the files and gives their folder its name."""
    try:
        for path in scratch.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        scratch.rename(final)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def latest(folder: Path) -> Path | None:
    """The last whole checkpoint of a run."""
    whole = _whole(folder)
    return whole[max(whole)] if whole else None


def state_of(path: Path) -> dict[str, Any]:
    """What was saved beside the tensors."""
    return json.loads((path / _STATE).read_text())


def load(accelerator: Accelerator, path: Path, reference: Any = None) -> None:
    """Puts the tensors and the random states back."""
    accelerator.load_state(str(path))
    if reference is not None and (path / _REFERENCE).exists():
        saved = torch.load(path / _REFERENCE, map_location="cpu", weights_only=True)
        set_model_state_dict(reference, saved, options=StateDictOptions(full_state_dict=True))


def check_same(state: Mapping[str, Any], config: Mapping[str, Any], processes: int) -> None:
    """Refuses to go on with other options than the checkpoint was made with.

    Raises:
        ValueError: naming each, with both values.
    """
    before = state["config"]
    names = [n for n in config if n not in MAY_CHANGE and config[n] != before.get(n)]
    if names:
        told = "; ".join(f"{n}: was {before.get(n)!r}, is {config[n]!r}" for n in names)
        raise ValueError(f"resume: expected the options of the checkpoint; got others: {told}")
    # Where something depends on it, the number of steps is more than where to stop.
    by_steps = [
        name for name, ends in (("schedule", "constant"), ("num_iterations", 1))
        if config[name] != ends
    ]  # fmt: skip
    if by_steps and config["steps"] != before["steps"]:
        raise ValueError(
            f"steps: expected {before['steps']}, which {by_steps[0]} = {config[by_steps[0]]!r} "
            f"goes by; got {config['steps']}"
        )
    if state["processes"] != processes:
        raise ValueError(
            f"resume: expected {state['processes']} processes, as the checkpoint has; "
            f"got {processes}"
        )


def prune(accelerator: Accelerator, folder: Path, keep: set[int]) -> None:
    """Deletes all checkpoints but these."""
    if accelerator.is_main_process:
        for step, path in _whole(folder).items():
            if step not in keep:
                shutil.rmtree(path, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _whole(folder: Path) -> dict[int, Path]:
    paths = (folder / "checkpoints").glob("step-*")
    found = {path: re.fullmatch(r"step-(\d+)", path.name) for path in paths}
    return {
        int(match[1]): path for path, match in found.items() if match and (path / _STATE).exists()
    }

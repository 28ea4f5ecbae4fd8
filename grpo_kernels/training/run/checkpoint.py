"""Checkpoints: one file each, written completely or not at all.

A checkpoint is written under another name, flushed to the disk, and renamed at the end: after a
kill or on a full disk the one before stays. It has what training changes: the trained weights, the
optimizer, a moving reference, and the run's state. Frozen weights come with the model. Random
numbers need no state, as each step has a seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import TrainingConfig
from . import ranks

# Options that may change when a run is resumed: its length, intervals of logs and checkpoints, and
# the size of micro-batches.
MAY_CHANGE = {
    "steps", "output", "resume", "eval_every", "save_every", "show_every", "explain_every",
    "save_model", "trackers", "micro_batch_size", "vllm_gpu_memory_utilization",
    "vllm_enable_sleep_mode",
}  # fmt: skip
_STATE = {
    "step": int, "config": dict, "processes": int, "micro_batch_size": int,
    "inputs": dict,
}  # fmt: skip
# Elements of each weight that enter a digest.
_SAMPLED = 4096


class TrainedState:
    """Everything that training changes: the trained weights, and parts with a state.

    `policy`: not wrapped. `parts`: by name, each with `state_dict` and `load_state_dict`, or None.
    """

    def __init__(self, policy: nn.Module, **parts: Any) -> None:
        self.policy = policy
        self.parts = {name: part for name, part in parts.items() if part is not None}

    @property
    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self.policy.named_parameters() if p.requires_grad}

    def state_dict(self) -> dict[str, Any]:
        """The tensors of a checkpoint."""
        return {"trained": self.weights} | {n: x.state_dict() for n, x in self.parts.items()}

    def load_state_dict(self, tensors: Mapping[str, Any]) -> None:
        """Restores the tensors of a checkpoint, which has no scaler if its device needed none."""
        for name, weight in self.weights.items():
            weight.copy_(tensors["trained"][name])
        for name in self.parts.keys() & tensors.keys():
            self.parts[name].load_state_dict(tensors[name])


# Files


def save(
    accelerator: Accelerator, folder: Path, state: Mapping[str, Any], tensors: Mapping[str, Any]
) -> str | None:
    """Writes the checkpoint of `state["step"]`; returns the error, in all processes, or None.

    `state`: values for JSON. `tensors`: state dicts by name.
    """
    error = None
    if accelerator.is_main_process:
        path = folder / "checkpoints" / f"step-{state['step']:06d}.pt"
        scratch = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                torch.save({"state": json.dumps(state), **tensors}, file)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        except (OSError, RuntimeError) as failed:
            scratch.unlink(missing_ok=True)
            # torch may fail to close a file for which the disk had no room.
            cause = failed.__context__ if isinstance(failed.__context__, OSError) else failed
            error = f"{type(cause).__name__}: {cause}"
    return ranks.reduce(accelerator, error, itemgetter(0))


def state_of(path: Path) -> dict[str, Any]:
    """Reads a checkpoint's state without its tensors.

    Raises:
        ValueError: it is not a checkpoint of this library. No code in it is run.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        state = json.loads(saved["state"])
        known = all(isinstance(state[name], kind) for name, kind in _STATE.items())
    except Exception as error:
        raise ValueError(
            f"resume: expected a checkpoint of this library; got {path} "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). Delete it to go on "
            "from the one before"
        ) from error
    if not known:
        raise ValueError(f"resume: expected a checkpoint with {', '.join(_STATE)}; got {path}")
    return dict(state)


def tensors_of(path: Path) -> dict[str, Any]:
    """Reads the tensors of a checkpoint, to the CPU, under the names passed to `save`."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    return {name: value for name, value in saved.items() if name != "state"}


def latest(folder: Path) -> Path | None:
    """Returns a run's last checkpoint.

    Raises:
        ValueError: the run's checkpoints are of an earlier form.
    """
    paths = _by_step(folder)
    older = next((folder / "checkpoints").glob("step-*/state.json"), None)
    if older is not None and not paths:
        raise ValueError(
            f"output: {older.parent} is a checkpoint of an earlier version, which this one does "
            "not read: pass another output, or go on with the version that wrote it"
        )
    return paths[max(paths)] if paths else None


def prune(folder: Path, best: int) -> None:
    """Keeps the best step's and the last two checkpoints; deletes others and unfinished files."""
    paths = _by_step(folder)
    for step in set(paths) - {best, *sorted(paths)[-2:]}:
        paths[step].unlink(missing_ok=True)
    for scratch in (folder / "checkpoints").glob("step-*.tmp"):
        scratch.unlink(missing_ok=True)


def _by_step(folder: Path) -> dict[int, Path]:
    paths = (folder / "checkpoints").glob("step-*.pt")
    return {int(path.stem[5:]): path for path in paths if path.stem[5:].isdigit()}


# Checks of a resumed run


def inputs_of(
    train: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]], tokenizer: Any,
    model: nn.Module, frozen: Sequence[nn.Module] = (),
) -> dict[str, str]:  # fmt: skip
    """Makes digests, by name, of a run's inputs besides its options.

    Problems count with all of their columns, models with some numbers of each weight that no
    checkpoint has: frozen weights of `model`, all weights of the models `frozen`.
    """
    problems = [*train, *held_out]
    # Without the chat template, which may print the date.
    tokens = (str(tokenizer(str(problem["prompt"])).input_ids) for problem in problems)
    template = str(getattr(tokenizer, "chat_template", None))
    trained = [name for name, x in model.named_parameters() if x.requires_grad]
    weights = (
        f"{name} {x.dtype} {list(x.shape)} {_sampled_bytes(x.data)}"
        for one in dict.fromkeys((model, *frozen))
        for name, x in one.state_dict(keep_vars=True).items()
        if isinstance(x, Tensor) and (one in frozen or not x.requires_grad)
    )
    return {
        "problems": f"{len(train)} + {len(held_out)}, {_digest(map(_as_text, problems))}",
        "tokens of the prompts": _digest((template, *tokens)),
        "trained parameters": f"{len(trained)}, {_digest(trained)}",
        "weights that are not trained": _digest(weights),
    }


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)} {text}".encode(errors="replace"))
    return f"sha256 {digest.hexdigest()[:12]}"


def _as_text(problem: Mapping[str, Any]) -> str:
    """A text of the problem, the same in every process."""
    return json.dumps(problem, skipkeys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):  # their order changes
        return sorted(map(repr, value))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # an address, which changes


def _sampled_bytes(x: Tensor) -> str:
    """The bytes of some elements of a weight, as hex; "" for a sharded or quantized weight."""
    if type(x) is not Tensor or x.is_meta:
        return ""
    step = x.numel() // _SAMPLED | 1  # odd, or it might see a single column
    return x.flatten()[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes().hex()


def check_options(state: Mapping[str, Any], config: TrainingConfig) -> None:
    """Refuses to resume with other options than the checkpoint's.

    An option newer than the checkpoint's version was at its default.

    Raises:
        ValueError: the message names each change, with both values.
    """
    now, before = config.as_json(), config.default_json() | state["config"]
    names = [n for n in now if n not in MAY_CHANGE and now[n] != before[n]]
    if names:
        changed = "; ".join(f"{n}: was {before[n]!r}, is {now[n]!r}" for n in names)
        raise ValueError(
            f"resume: options differ from the checkpoint's: {changed}. Set them back, or pass "
            "another output"
        )
    if config.schedule != "constant" and config.steps != before["steps"]:
        raise ValueError(
            f"steps: expected {before['steps']} as before, because schedule={config.schedule!r} "
            f"depends on it; got {config.steps}"
        )


def check_processes(state: Mapping[str, Any], processes: int) -> None:
    """Refuses to resume with another number of processes than the checkpoint's."""
    if state["processes"] != processes:
        raise ValueError(
            f"resume: expected as many processes as the checkpoint has, {state['processes']}; got "
            f"{processes}"
        )


def check_inputs(state: Mapping[str, Any], inputs: Mapping[str, str]) -> None:
    """Refuses to resume with other inputs than the checkpoint's.

    Raises:
        ValueError: the message names each change, with both values.
    """
    before: Mapping[str, str] = state["inputs"]
    names = [n for n in {**before, **inputs} if before.get(n) != inputs.get(n)]
    if names:
        changed = "; ".join(f"{n}: was {before.get(n)}, is {inputs.get(n)}" for n in names)
        raise ValueError(f"resume: problems or models differ from the checkpoint's: {changed}")


def save_model(accelerator: Accelerator, policy: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the model inside the policy, and its tokenizer, into a run's folder."""
    folder = folder / "model"
    model = accelerator.unwrap_model(policy).model
    state = accelerator.get_state_dict(policy)
    if accelerator.is_main_process:
        state = {name.removeprefix("model."): value for name, value in state.items()}
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)

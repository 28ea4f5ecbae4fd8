"""Checkpoints that are whole or not there.

Each is written to a folder with another name, flushed to the disk, and renamed at the end: neither
a kill nor a full disk leaves half of one, or takes the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import TrainingConfig
from ..problems.data import Problem
from . import ranks

# Options that may change when a run goes on: how long, how often something is logged or saved, and
# how the work is cut into pieces.
MAY_CHANGE = {
    "steps", "output", "resume", "eval_every", "save_every", "show_every", "explain_every",
    "save_model", "trackers", "micro_batch_size", "vllm_gpu_memory_utilization",
    "vllm_enable_sleep_mode",
}  # fmt: skip
_STATE, _WEIGHTS, _REFERENCE = "state.json", "trained.pt", "reference.pt"
# Numbers of each weight that its digest is of.
_SAMPLED = 4096


def weights_that_move(accelerator: Accelerator, reference: Any = None) -> None:
    """Has checkpoints keep the trained weights, and those of a reference that follows the policy.

    Frozen weights come with the model. All are read by `weights_only`: accelerate would run the
    code in an object that is registered with it.

    Args:
        accelerator: writes and reads the checkpoints.
        reference: has `state_dict` and `load_state_dict`; None: it never changes.
    """

    def keep(models: list[Any], weights: list[Any], folder: str) -> None:
        if accelerator.is_main_process:
            trained = {n: p.detach() for n, p in _named(accelerator, models[0]) if p.requires_grad}
            torch.save(trained, Path(folder) / _WEIGHTS)
            if reference is not None:
                torch.save(reference.state_dict(), Path(folder) / _REFERENCE)
        weights.clear()

    def load(models: list[Any], folder: str) -> None:
        saved = _tensors(Path(folder) / _WEIGHTS)
        if reference is not None:
            reference.load_state_dict(_tensors(Path(folder) / _REFERENCE))
        with torch.no_grad():
            for name, parameter in _named(accelerator, models[0]):
                if parameter.requires_grad:
                    parameter.copy_(saved[name])
        models.clear()

    accelerator.register_save_state_pre_hook(keep)
    accelerator.register_load_state_pre_hook(load)


def _tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return tensors


def _named(accelerator: Accelerator, model: Any) -> Any:
    return accelerator.unwrap_model(model).named_parameters()


def fingerprint(
    train: Sequence[Problem], held_out: Sequence[Problem], tokenizer: Any,
    weights: Mapping[str, tuple[nn.Module, bool]],
) -> dict[str, str]:  # fmt: skip
    """Digests, by name, of a run's inputs besides its options, which a resumed run has to have.

    Args:
        train: problems; like `held_out`, with all of their columns.
        held_out: problems of the evaluations.
        tokenizer: the policy's; it tokenizes all prompts.
        weights: models by name, and for each whether weights that are trained count. They do not
            where the checkpoint has them. Of each weight some numbers are read.
    """
    parts = {"train": train, "held_out": held_out}
    digests = {
        name: f"{len(problems)} problems, sha256 {_digest(map(_as_text, problems))}"
        for name, problems in parts.items()
    }
    # Not the prompts as encoded: a chat template may print the date.
    prompts = (problem["prompt"] for problems in parts.values() for problem in problems)
    ids = (str(tokenizer(str(prompt)).input_ids) for prompt in prompts)
    template = str(getattr(tokenizer, "chat_template", None))
    digests["tokens of the prompts"] = f"sha256 {_digest((template, *ids))}"
    for name, (model, with_trained) in weights.items():
        texts = (
            f"{key} {x.dtype} {list(x.shape)} {_some_numbers(x.data)}"
            for key, x in model.state_dict(keep_vars=True).items()
            if isinstance(x, Tensor) and (with_trained or not x.requires_grad)
        )
        digests[name] = f"sha256 {_digest(texts)}"
    return digests


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)} {text}".encode(errors="replace"))
    return digest.hexdigest()[:12]


def _as_text(problem: Problem) -> str:
    """A text that is the same in every process, whatever the problem has in its columns."""
    return repr([(name, _plain(problem[name])) for name in sorted(problem)])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted((repr(key), repr(_plain(x))) for key, x in value.items())
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, (set, frozenset)):  # whose order changes
        return sorted(repr(_plain(x)) for x in value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))  # an address, which changes


def _some_numbers(x: Tensor) -> str:
    """The bytes of some numbers of a weight; nothing of one that is elsewhere, or no plain one."""
    if type(x) is not Tensor or x.is_meta:
        return ""
    step = x.numel() // _SAMPLED | 1  # odd, or it might see a single column
    return x.flatten()[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes().hex()


class _Failed(Exception):
    """An error of a process that could not write."""


def save(accelerator: Accelerator, folder: Path, state: Mapping[str, Any]) -> str | None:
    """Writes the checkpoint of `state["step"]`; returns the first process's error, or None."""
    final = folder / "checkpoints" / f"step-{state['step']:06d}"
    scratch = final.with_name(f".{final.name}.tmp")
    main = accelerator.is_main_process
    # A full disk is an OSError to Python, a RuntimeError to torch, another one to safetensors.
    together = partial(ranks.raise_on_all_ranks, accelerator, _Failed, others="")
    try:
        with together():
            if main:
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir(parents=True)
        with together():
            accelerator.save_state(str(scratch))
            if main:
                (scratch / _STATE).write_text(json.dumps(state))
        with together():
            if main:
                _commit(scratch, final)
    except _Failed as error:
        if main:
            shutil.rmtree(scratch, ignore_errors=True)
        return str(error)
    return None


def _commit(scratch: Path, final: Path) -> None:
    """Flushes the files and gives their folder its final name."""
    for path in scratch.rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:  # Windows flushes none that is open for reading
                os.fsync(file.fileno())
    # One of the same step is renamed until then; after a kill `latest` names it again.
    before = final.with_name(f".{final.name}.before")
    if final.exists():
        shutil.rmtree(before, ignore_errors=True)
        final.rename(before)
    scratch.rename(final)
    shutil.rmtree(before, ignore_errors=True)


def latest(folder: Path) -> Path | None:
    """The folder of a run's last whole checkpoint."""
    for before in (folder / "checkpoints").glob(".step-*.before"):
        with suppress(OSError):  # the one that was to replace it is there
            before.rename(before.with_name(before.name[1:].removesuffix(".before")))
    whole = _whole(folder)
    return whole[max(whole)] if whole else None


def state_of(path: Path) -> dict[str, Any]:
    """The state that was saved beside the tensors.

    Raises:
        ValueError: it is none of this library's.
    """
    text = (path / _STATE).read_text(errors="replace")
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        state = None
    kinds = {"step": int, "config": dict, "processes": int, "micro_batch_size": int,
             "fingerprint": dict}  # fmt: skip
    if not isinstance(state, dict) or not all(
        isinstance(state.get(k), t) for k, t in kinds.items()
    ):
        raise ValueError(
            f"resume: expected a checkpoint of this library, with {', '.join(kinds)} in {_STATE}; "
            f"got {text[:80]!r} in {path}"
        )
    return state


def check_options(state: Mapping[str, Any], config: TrainingConfig) -> None:
    """Refuses to go on with other options than the checkpoint's.

    An option that the checkpoint's version did not have yet was at its default.

    Raises:
        ValueError: names each that has changed, with both values.
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


def check_same(state: Mapping[str, Any], processes: int, fingerprint: Mapping[str, str]) -> None:
    """Refuses to go on with other problems, tokens, weights or processes than the checkpoint's.

    Raises:
        ValueError: names each that has changed, with both values.
    """
    if state["processes"] != processes:
        raise ValueError(
            f"resume: expected as many processes as the checkpoint has, {state['processes']}; got "
            f"{processes}"
        )
    before: Mapping[str, str] = state["fingerprint"]
    names = [n for n in {**before, **fingerprint} if before.get(n) != fingerprint.get(n)]
    if names:
        changed = "; ".join(f"{n}: was {before.get(n)}, is {fingerprint.get(n)}" for n in names)
        raise ValueError(f"resume: problems or models differ from the checkpoint's: {changed}")


def prune(folder: Path, best: int) -> None:
    """Deletes all checkpoints but that of the best step and the last two, one for the other."""
    for pattern in (".step-*.gone", ".step-*.before"):  # by a kill
        for path in (folder / "checkpoints").glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    whole = _whole(folder)
    for step in set(whole) - {best, *sorted(whole)[-2:]}:
        # Renamed first: a kill leaves no half of it under its name.
        gone = whole[step].with_name(f".{whole[step].name}.gone")
        with suppress(OSError):
            whole[step].rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _whole(folder: Path) -> dict[int, Path]:
    paths = (folder / "checkpoints").glob("step-*")
    matches = {path: re.fullmatch(r"step-(\d+)", path.name) for path in paths}
    return {
        int(match[1]): path for path, match in matches.items() if match and (path / _STATE).exists()
    }


def save_model(accelerator: Accelerator, policy: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the model inside the policy, and its tokenizer, for `from_pretrained`."""
    model = accelerator.unwrap_model(policy).model
    state = accelerator.get_state_dict(policy)
    if accelerator.is_main_process:
        state = {name.removeprefix("model."): value for name, value in state.items()}
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)

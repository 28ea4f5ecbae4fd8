"""The files of a run, in JSON: options, environment, and logs that grow by a line."""

from __future__ import annotations

import json
import math
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

_PACKAGES = (
    "grpo_kernels", "torch", "triton", "transformers", "accelerate", "peft", "datasets", "vllm",
)  # fmt: skip
NAMES = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "answers.jsonl")


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Writes a row at the end of a file.

    Raises:
        OSError: the disk is full, say; half a row is left out when the run goes on.
    """
    try:
        with path.open("a") as file:
            file.write(json.dumps(_json_safe(row), default=_plain) + "\n")
    except OSError as error:
        error.filename = str(path)  # which that of a write does not have
        raise


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, without lines that are none: a last one that was not finished, damage."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def open_folder(folder: Path, options: Mapping[str, Any], step: int) -> None:
    """Makes a run's folder; removes the rows of steps after `step`, and what was not finished."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("config", options), ("environment", environment())):
        (folder / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")
    for name in NAMES:
        path = folder / name
        if path.exists():
            kept = [json.dumps(row) + "\n" for row in read(path) if row["step"] <= step]
            scratch = path.with_suffix(".tmp")
            scratch.write_text("".join(kept))
            scratch.replace(path)


def environment() -> dict[str, str]:
    """Returns device, versions, and the commit where the package is in a git checkout."""
    state, found = PartialState(), {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    commit = {"grpo_kernels' commit": text} if (text := _commit()) else {}
    device = f"{state.num_processes} x {_name_of(state.device)}"
    return {"processes x device": device, **commit, **found}


def environment_of(folder: Path) -> dict[str, Any]:
    """Returns the environment that a run's folder says it was last started in."""
    path = folder / "environment.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _name_of(device: torch.device) -> str:
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "CPU")
    return f"{name}, {torch.get_num_threads()} threads"


def _commit() -> str | None:
    here = Path(__file__)
    try:
        for command in (f"ls-files --error-unmatch {here.name}", "describe --always --dirty"):
            git = ["git", "-C", str(here.parent), *command.split()]
            done = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return None
    return done.stdout.strip()


def _plain(x: Any) -> Any:
    """Returns the number or the list that a value of NumPy or torch is, else its text."""
    return x.tolist() if hasattr(x, "tolist") else str(x)


def _json_safe(x: Any) -> Any:
    """Replaces NaN and inf by null, as JSON has neither."""
    if isinstance(x, Mapping):
        return {key: _json_safe(value) for key, value in x.items()}
    return None if isinstance(x, float) and not math.isfinite(x) else x

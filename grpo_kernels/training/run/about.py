"""`about.json` of a run: defaults, versions and the user's metrics, for the run's page."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from accelerate import PartialState

from ..config import TrainingConfig
from . import logs
from .metrics import Metrics

_PACKAGES = (
    "grpo_kernels", "torch", "triton", "transformers", "accelerate", "peft", "datasets", "vllm",
)  # fmt: skip


def write(
    folder: Path, config: TrainingConfig, versions: Mapping[str, str], metrics: Metrics
) -> None:
    """Writes `about.json` in the folder of a run with these options."""
    values = {
        "defaults": config.default_json(), "versions": dict(versions), "metrics": metrics.by_user(),
    }  # fmt: skip
    logs.write_json(folder / "about.json", values)


def versions() -> dict[str, str]:
    """Returns the devices, the package's commit in a git checkout, and the packages' versions."""
    state = PartialState()
    texts = {"processes x device": f"{state.num_processes} x {_name_of(state.device)}"}
    if commit := _commit():
        texts["grpo_kernels' commit"] = commit
    texts["Python"] = platform.python_version()
    for name in _PACKAGES:
        try:
            texts[name] = version(name)
        except PackageNotFoundError:
            continue
    return texts


def _name_of(device: torch.device) -> str:
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(device))
    if device.type != "cpu":
        return device.type  # Apple's module has no names
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "CPU")
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads != 1)}"


def _commit() -> str | None:
    here = Path(__file__)
    try:
        for command in (f"ls-files --error-unmatch {here.name}", "describe --always --dirty"):
            git = ["git", "-C", str(here.parent), *command.split()]
            done = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return None
    return done.stdout.strip()

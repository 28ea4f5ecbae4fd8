"""Skips the tests of this folder where vLLM is not installed."""

import importlib.util
import sys
from pathlib import Path

import pytest

# The environments of `make vllm`: there a test without vLLM fails.
HAS_TO_BE_THERE = Path(sys.prefix).name.startswith(".venv-vllm")


class WithoutVLLM(pytest.Module):
    """A module that is not imported."""

    def collect(self):
        pytest.skip("vllm is not installed: make test-with FRAMEWORK=vllm")


def pytest_pycollect_makemodule(module_path, parent):
    if importlib.util.find_spec("vllm") is None and not HAS_TO_BE_THERE:
        return WithoutVLLM.from_parent(parent, path=module_path)
    return None

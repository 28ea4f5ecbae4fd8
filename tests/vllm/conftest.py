"""Skips the tests of this folder where vLLM is not installed."""

import importlib.util

import pytest


class WithoutVLLM(pytest.Module):
    """A module that is not imported."""

    def collect(self):
        pytest.skip("vllm is not installed: make test-with FRAMEWORK=vllm")


def pytest_pycollect_makemodule(module_path, parent):
    if importlib.util.find_spec("vllm") is None:
        return WithoutVLLM.from_parent(parent, path=module_path)
    return None

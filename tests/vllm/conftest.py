"""Skips the tests of this folder where vLLM is not installed; a process with a vLLM of its own."""

import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.helpers.vllm_masks import set_up_vllm


@pytest.fixture(autouse=True, scope="session")
def vllm_is_installed():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: make test-with FRAMEWORK=vllm")


@pytest.fixture(scope="module")
def vllm_process():
    """A process whose vLLM returns sampling masks, unless `why_no_masks`."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, set_up_vllm) as pool:
        yield pool

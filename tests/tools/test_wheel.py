"""The built wheel, installed into an environment that has nothing else."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from grpo_kernels import __version__

ROOT = Path(__file__).parents[2]
NEEDS = {  # what each of these says it needs, where it cannot work without
    "training": r"pip install 'grpo_kernels\[train\]'",
    "integrations.transformers": r"pip install 'grpo_kernels\[train\]'",
    "integrations.trl": r"pip install 'trl>=",
}


def _run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def _done(*command: object) -> str:
    done = _run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    _done(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", ROOT, "-w", folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel) -> Path:
    """The interpreter of an environment into which the wheel was installed, as README says."""
    folder = wheel.parent / "bare"
    _done(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    _done(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    return python


def test_contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("grpo_kernels/**/*.py")}
    about = f"grpo_kernels-{__version__}.dist-info/"
    assert {name for name in names if not name.startswith(about)} == {
        *package,
        "grpo_kernels/py.typed",
    }
    assert f"{about}licenses/LICENSE" in names


def test_quickstart(python):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert "torch.Size([8, 32])" in _done(python, "-c", code[1])


def test_doctor(python):
    assert "all is well" in _done(python, "-m", "grpo_kernels.doctor")


@pytest.mark.parametrize("module", NEEDS)
def test_what_is_missing_is_named(python, module):
    done = _run(python, "-c", f"import grpo_kernels.{module}")
    assert re.search(NEEDS[module], done.stderr.splitlines()[-1])

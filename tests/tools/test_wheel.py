"""The built wheel, installed into an environment that has nothing else."""

import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo_kernels import __version__

ROOT = Path(__file__).parents[2]
NEEDS = {  # what each of these says it needs, where it cannot work without
    "training": r"pip install -e '\.\[train\]' in the checkout",
    "integrations.transformers": r"pip install 'transformers>=",
    "integrations.trl": r"pip install 'trl>=",
}


def _run(*command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def _done(*command):
    done = _run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    _done(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", ROOT, "-w", folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel):
    """The interpreter of an environment into which the wheel was installed, as README says.

    With torch, which takes half a minute.
    """
    folder = wheel.parent / "bare"
    _done(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    _done(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints/default.txt", wheel)
    return python


def test_contents(wheel, tmp_path):
    """The sdist has what a wheel is built from, the tests, and nothing that is not committed."""
    _done(sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path, ROOT)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        source = {name.split("/", 1)[1] for name in archive.getnames()}
        text = archive.extractfile(f"grpo_kernels-{__version__}/PKG-INFO").read()
    package = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("grpo_kernels/**/*.py")}
    pages = ("curves.js", "page.html", "step.html", "run.html")
    package |= {"grpo_kernels/py.typed", *(f"grpo_kernels/explain/{name}" for name in pages)}
    assert package | {"LICENSE", "README.md", "pyproject.toml", "tests/conftest.py"} <= source
    assert {name.split("/")[0] for name in source if "/" in name} == {
        "grpo_kernels", "tests", "examples", "docs", "benchmarks", "packaging", "constraints",
    }  # fmt: skip
    # As `twine check --strict` does, which brings twenty packages.
    metadata = Metadata.from_email(text, validate=True)
    shown = metadata.description
    main = r"https://github\.com/[\w-]+/grpo_kernels/(?:blob|raw)/main/"
    paths = re.findall(rf'{main}([^)#"]*)', shown)
    assert len(paths) > 10 and [path for path in paths if not (ROOT / path).exists()] == []
    assert re.findall(r'\]\((?!https://|#).*?\)|src(?:set)?="(?!https://).*?"', shown) == []
    texts = [re.sub(main, "", text) for text in (shown, (ROOT / "README.md").read_text())]
    assert texts[0] == texts[1]
    about = f"grpo_kernels-{__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        plugins = archive.read(f"{about}entry_points.txt").decode()
    assert {name for name in names if not name.startswith(about)} == package
    assert "grpo_kernels = grpo_kernels.integrations.verl_plugin" in plugins


def test_the_hub_has_every_file_of_the_core(wheel, tmp_path):
    _done(sys.executable, ROOT / "packaging/kernel_package.py", tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name) for name in archive.namelist()}
    package = {x.relative_to(x.parts[0]) for x in names if x.parts[0] == "grpo_kernels"}
    core = {x for x in package if x.parts[0] not in ("integrations", "training")}
    variants = [*(tmp_path / "build").iterdir()]
    assert {x.name for x in variants} == {"torch-cpu", "torch-cuda", "torch-rocm"}
    for folder in (*variants, tmp_path / "torch-ext/grpo_kernels"):
        there = {x.relative_to(folder) for x in folder.rglob("*") if x.is_file()}
        assert there - {Path("metadata.json")} == core, folder


def test_the_hub_s_folder_is_replaced_and_others_are_not(tmp_path):
    command = sys.executable, ROOT / "packaging/kernel_package.py", tmp_path / "kernel"
    _done(*command)
    (left := tmp_path / "kernel/build/torch-old").mkdir()
    _done(*command)
    assert not left.exists()
    own = [tmp_path / "mine" / name for name in ("build/own.o", "LICENSE")]
    own[0].parent.mkdir(parents=True)
    for path in own:
        path.write_text("mine")
    done = _run(*command[:2], tmp_path / "mine")
    assert done.returncode == 1 and "FOLDER: expected a new folder, or one of an" in done.stderr
    assert [path.read_text() for path in own] == ["mine"] * 2


def test_an_environment_without_anything_else(python):
    """The guide's first code runs there, the doctor says so, and what is missing is named."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), re.S)
    seeded, names = f"import torch; torch.manual_seed(0)\n{code[1]}", {}
    exec(seeded, names)
    loss = float(_done(python, "-c", f"{seeded}\nprint(out.loss.item())"))
    assert abs(loss - names["out"].loss.item()) < 1e-5
    assert "all is well" in _done(python, "-m", "grpo_kernels.doctor")
    _done(python, "-c", "import grpo_kernels.integrations.liger, grpo_kernels.integrations.verl")
    for module, expected in NEEDS.items():
        done = _run(python, "-c", f"import grpo_kernels.{module}")
        assert re.search(expected, done.stderr.splitlines()[-1])


# An extra, and what can be imported with it.
EXTRAS = {
    "train": ("grpo_kernels.training", "grpo_kernels.integrations.transformers"),
    "demo": ("grpo_kernels.training", "gguf", "safetensors", "reasoning_gym"),
    "lightning": ("grpo_kernels.training", "lightning"),
    "peers": ("grpo_kernels.integrations.trl", "liger_kernel.chunked_loss"),
}


def test_pins_install_on_the_oldest_python():
    """A pin of a release that has left Python 3.10 stops `make` there, but for its marker."""
    lines = (ROOT / "constraints/default.txt").read_text().splitlines()
    pins, seen = [Requirement(line) for line in lines if "==" in line], []
    for pin in pins:
        if pin.marker is None or pin.marker.evaluate({"python_version": "3.10"}):
            for installed in distributions(name=pin.name):
                if installed.version in pin.specifier:
                    seen.append(pin.name)
                    assert "3.10" in SpecifierSet(installed.metadata["Requires-Python"] or ""), pin
    assert seen


@pytest.mark.nightly
@pytest.mark.parametrize("extra", EXTRAS)
def test_extras(extra, wheel, tmp_path):
    """Each in an environment of its own."""
    _done(sys.executable, "-m", "venv", tmp_path)
    python, pins = tmp_path / "bin/python", ROOT / "constraints/default.txt"
    _done(python, "-m", "pip", "install", "-q", "-c", pins, f"{wheel}[{extra}]")
    for module in EXTRAS[extra]:
        _done(python, "-c", f"import {module}")

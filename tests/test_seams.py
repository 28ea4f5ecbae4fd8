"""Seams: the main path knows of each capability only its one file."""

import ast
import inspect
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import grpo_kernels
from grpo_kernels import Execution, LMHead, reference

PACKAGE = Path(grpo_kernels.__file__).parent
CALLS = ("fused_grpo_loss", "linear_logprobs", "grpo_loss")
DROP_INS = {
    "transformers": ("attach_fused_head", "Objective"),
    "liger": ("FusedLinearGRPOLoss", "patch_liger"),
    "verl": ("linear_cross_entropy", "patch_verl"),
    "trl": ("FusedGRPOTrainer", "patch_trl"),
}


def test_the_plan_alone_knows_the_capabilities():
    """Only the plan imports capabilities, and only inside of functions."""
    optional = {"support", "shards", "many_targets", "two_heads"}
    for path in [*PACKAGE.glob("*.py"), *(PACKAGE / "head").glob("*.py")]:
        if path.stem in (*optional, "doctor"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            if (node.module or "").split(".")[-1] in optional:
                # The package's `__getattr__` asks for what is public.
                assert path.stem in ("plan", "__init__"), path
                assert node.col_offset > 0, path


@pytest.mark.parametrize("call", CALLS)
def test_the_reference_takes_what_the_call_takes(call):
    """But for how it is computed, and for the dtype that a rounding has."""
    ours, theirs = (
        set(inspect.signature(getattr(x, call)).parameters) for x in (grpo_kernels, reference)
    )
    if "loss_args" in theirs:  # the reference passes two of them
        forwarded = set(inspect.signature(reference.grpo_loss).parameters) - {"logps", "entropy"}
        theirs = theirs - {"loss_args"} | forwarded
    assert ours - theirs <= {"execution", "backend", "entropy"}
    assert theirs - ours <= {"rounded_to", "kl"}  # the exact one, of two models' logits


@pytest.mark.parametrize("package", DROP_INS)
def test_drop_ins_hand_on_an_execution(package):
    """No list of its fields is written a second time."""
    if package == "trl":
        pytest.importorskip("trl", reason="TRL has left Python 3.10")
    module = import_module(f"grpo_kernels.integrations.{package}")
    for name in DROP_INS[package]:
        parameters = set(inspect.signature(getattr(module, name)).parameters)
        assert "execution" in parameters, name
        assert not parameters & {field.name for field in fields(Execution)}, name


@pytest.mark.parametrize(
    ("described", "names"),
    (
        *((cls, [field.name for field in fields(cls)]) for cls in (LMHead, Execution)),
        *((f, [*inspect.signature(f).parameters]) for f in map(vars(grpo_kernels).get, CALLS)),
    ),
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_every_argument_is_described(described, names):
    args = (inspect.getdoc(described) or "").split("Args:")[1]
    args = re.split("Raises:|Returns:", args)[0]
    assert re.findall(r"^    (\w+): ", args, re.MULTILINE) == names

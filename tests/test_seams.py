"""Seams: the main path knows of each capability only its one file."""

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

import grpo_kernels
from grpo_kernels import Execution, LMHead, reference
from grpo_kernels.integrations.liger import FusedLinearGRPOLoss, patch_liger
from grpo_kernels.integrations.transformers import Objective, attach_fused_head
from grpo_kernels.integrations.verl import linear_cross_entropy, patch_verl

PACKAGE = Path(grpo_kernels.__file__).parent
OPTIONAL = re.compile(r"support|shards|many|sampler|training|integrations|reference|explain")
# An exact call, with whatever is loaded along the way.
EXACT_CALL = """
import sys, torch
from grpo_kernels import fused_grpo_loss, linear_logprobs
h, w = (torch.randn(n, 8, requires_grad=True) for n in (6, 50))
fused_grpo_loss(h, w, torch.arange(6), torch.randn(6)).loss.backward()
linear_logprobs(h, w, torch.arange(6)).logps.sum().backward()
print(*[m for m in sys.modules if m.startswith("grpo_kernels")])
"""


def test_an_exact_call_loads_nothing_else():
    done = subprocess.run(
        [sys.executable, "-c", EXACT_CALL], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert "grpo_kernels.head.chunked_head" in loaded
    assert [name for name in loaded if OPTIONAL.search(name.removeprefix("grpo_kernels"))] == []


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


@pytest.mark.parametrize("call", ("fused_grpo_loss", "linear_logprobs", "grpo_loss"))
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


@pytest.mark.parametrize(
    "drop_in",
    (attach_fused_head, Objective, FusedLinearGRPOLoss, patch_liger, linear_cross_entropy,
     patch_verl, "FusedGRPOTrainer", "patch_trl"),
    ids=lambda x: getattr(x, "__name__", x),
)  # fmt: skip
def test_a_drop_in_hands_on_an_execution(drop_in):
    """No list of its fields is written a second time."""
    if isinstance(drop_in, str):
        pytest.importorskip("trl", reason="TRL has left Python 3.10")
        drop_in = getattr(import_module("grpo_kernels.integrations.trl"), drop_in)
    parameters = set(inspect.signature(drop_in).parameters)
    assert "execution" in parameters
    assert not parameters & {field.name for field in fields(Execution)}


@pytest.mark.parametrize("described", (LMHead, Execution), ids=lambda x: x.__name__)
def test_every_field_is_described(described):
    args = (inspect.getdoc(described) or "").split("Args:")[1].split("Raises:")[0]
    named = re.findall(r"^    (\w+): ", args, re.MULTILINE)
    assert named == [field.name for field in fields(described)]


@pytest.mark.parametrize("call", ("fused_grpo_loss", "linear_logprobs", "grpo_loss"))
def test_every_parameter_is_described(call):
    function = getattr(grpo_kernels, call)
    args = (inspect.getdoc(function) or "").split("Args:")[1].split("Returns:")[0]
    named = re.findall(r"^    (\w+): ", args, re.MULTILINE)
    assert named == list(inspect.signature(function).parameters)

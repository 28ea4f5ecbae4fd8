"""What importing the package costs, and what it must not drag in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("transformers", "datasets", "accelerate", "triton", "torch._dynamo", "peft", "trl")


def python(code: str) -> str:
    # A plain checkout: nothing but the repository root on the path, from another folder.
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_is_light():
    code = f"""
import sys
import grpo_kernels
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert python(code).strip() == "[]"


def test_a_cpu_call_needs_neither_triton_nor_transformers():
    code = """
import sys, torch
sys.modules["triton"] = sys.modules["datasets"] = sys.modules["transformers"] = None
from grpo_kernels import fused_grpo_loss
h, w = torch.randn(2, 3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
fused_grpo_loss(h, w, torch.zeros(2, 3, dtype=torch.long), torch.ones(2)).loss.backward()
print(w.grad.norm() > 0)
"""
    assert python(code).strip() == "tensor(True)"


def test_without_the_peers_integrations_say_what_to_install():
    code = """
import sys
for name in ("transformers", "accelerate", "datasets", "peft", "trl", "liger_kernel"):
    sys.modules[name] = None
import grpo_kernels.integrations.liger, grpo_kernels.integrations.verl, grpo_kernels.doctor
try:
    import grpo_kernels.integrations.transformers
except ImportError as error:
    print(error)
"""
    assert "pip install 'grpo_kernels[train]'" in python(code)


def test_the_head_of_the_integrations_has_moved():
    code = "import grpo_kernels.integrations.head as head; print(head.evaluating)"
    assert "evaluating" in python(code)
    with pytest.raises(AssertionError, match="has moved to grpo_kernels"):
        python(f"import warnings; warnings.simplefilter('error'); {code}")


def test_every_public_name_has_a_docstring():
    import grpo_kernels

    for name in grpo_kernels.__all__:
        assert getattr(grpo_kernels, name).__doc__, name

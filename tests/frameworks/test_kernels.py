"""What `packaging/kernel_package.py` lays out, loaded as Hugging Face's `kernels` loads it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel
sys.modules["grpo_kernels"] = None  # an installed one does not help
kernel = get_local_kernel(Path(sys.argv[1]))
print(kernel.__file__)
h, w = torch.randn(2, 3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
ids, ones = torch.zeros(2, 3, dtype=torch.long), torch.ones(2)
call = lambda h, w: kernel.fused_grpo_loss(h, kernel.LMHead(w), ids, ones).loss
call(h, w).backward()
compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
print(w.grad.norm() > 0, compiled(h, w) == call(h, w))
support = kernel.Support(ids.view(-1).int(), torch.arange(7))
print(kernel.fused_grpo_loss(h, w, ids, ones, support=support).metrics["support/mean"])
print(kernel.topk_kl, kernel.check_sampler)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel") / "kernel"
    subprocess.run([sys.executable, ROOT / "packaging/kernel_package.py", folder], check=True)
    return folder


def test_loaded_from_a_folder(folder):
    pytest.importorskip("kernels", reason="`make test-with FRAMEWORK=kernels` has it")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder], text=True, capture_output=True, cwd="/",
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}, timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    where, results, entries, _ = run.stdout.strip().splitlines()
    assert where == str(folder / "build/torch-cpu/__init__.py")
    assert results == "tensor(True) tensor(True)" and entries.startswith("tensor(1.")


def test_the_core_alone(folder):
    for backend in ("cpu", "cuda"):
        variant = folder / f"build/torch-{backend}"
        assert not {"integrations", "training"} & {x.name for x in variant.iterdir()}
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend} and backend in metadata["id"]
        for path in variant.rglob("*.py"):
            # Under another name nothing else would be found.
            assert not re.search(r"^\s*(from|import) grpo_kernels", path.read_text(), re.M), path
    assert "get_kernel(" in (folder / "README.md").read_text()

"""The folder of `packaging/kernel_package.py`, loaded as Hugging Face's `kernels` loads it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADED = """
import re, sys
from pathlib import Path
import kernels, torch
from kernels._rust import Build, Digest, Metadata
sys.modules["grpo_kernels"] = None  # an installed one does not help
folder = Path(sys.argv[1])
Build.open(folder)  # tells on stderr of an old edition
for variant in (folder / "build").iterdir():
    digest = Metadata.read_from_file(variant / "metadata.json").digest
    digest.validate(Digest.hash_variant(digest.algorithm, variant))
kernel = kernels.get_local_kernel(folder)
print(kernel.__file__)
h, w = torch.randn(2, 3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
ids, ones = torch.zeros(2, 3, dtype=torch.long), torch.ones(2)
call = lambda h, w: kernel.fused_grpo_loss(h, kernel.LMHead(w), ids, ones).loss
call(h, w).backward()
compiled = torch.compile(call, backend="aot_eager")
print(w.grad.norm() > 0, compiled(h, w) == call(h, w))
support = kernel.Support(ids.view(-1).int(), torch.arange(7))
print(kernel.fused_grpo_loss(h, w, ids, ones, support=support).metrics["support/mean"])
print(kernel.topk_kl, kernel.check_sampler)
kernels.get_kernel = lambda repo_id, version: {"a/b": kernel}[repo_id]
card = (folder / "CARD.md").read_text().replace("{{ repo_id }}", "a/b")
exec(re.search(r"```python\\n(.*?)```", card.replace("{{ version }}", "0"), re.S)[1])
print(out.loss.item(), weight.grad.norm().item())
"""
# The calls of a bf16 head on an H200 without memory, by a module of the name that `kernels` uses.
ON_CUDA = """
import importlib.util, json, sys
from pathlib import Path
from tests.helpers.fake_cuda import CountedCUDA
import torch
sys.modules["grpo_kernels"] = None
variant = Path(sys.argv[1])
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(
    name, variant / "__init__.py", submodule_search_locations=[str(variant)]
)
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
with CountedCUDA([512]) as gpu:
    empty = lambda *shape, dtype=torch.bfloat16, train=True: torch.empty(
        shape, dtype=dtype, device="cuda", requires_grad=train
    )
    h, w = empty(2, 256, 64), empty(4096, 64)
    ids, advantages = empty(2, 256, dtype=torch.long, train=False), empty(2, train=False)
    kernel.fused_grpo_loss(h, w, ids, advantages.float()).loss.backward()
    kernel.linear_logprobs(h, w, ids).logps.sum().backward()
print(*gpu.launches)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel") / "kernel"
    subprocess.run([sys.executable, ROOT / "packaging/kernel_package.py", folder], check=True)
    return folder


def _run(script, *arguments, **env):
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], text=True, capture_output=True, cwd="/",
        env={**os.environ, "HF_HUB_OFFLINE": "1", **env}, timeout=200,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run


def test_loaded_from_a_folder(folder):
    pytest.importorskip("kernels", reason="`make test-with FRAMEWORK=kernels` has it")
    run = _run(LOADED, folder, PYTHONPATH="")
    where, results, entries, _, quickstart = run.stdout.strip().splitlines()
    assert where == str(folder / "build/torch-cpu/__init__.py")
    assert results == "tensor(True) tensor(True)" and entries.startswith("tensor(1.")
    loss, norm = map(float, quickstart.split())
    assert abs(loss) < 10 and norm > 0 and "build.toml" not in run.stderr


def test_calls_on_a_gpu_find_what_they_need(folder):
    launched = _run(ON_CUDA, folder / "build/torch-cuda", PYTHONPATH=str(ROOT)).stdout.split()
    assert {"token_stats_kernel", "policy_loss_kernel"} <= {*launched}


def test_the_core_alone(folder):
    for backend in ("cpu", "cuda", "rocm"):
        variant = folder / f"build/torch-{backend}"
        assert not {"integrations", "training"} & {x.name for x in variant.iterdir()}
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend} and backend in metadata["id"]
        assert metadata["version"] == 0
        for path in variant.rglob("*.py"):
            # Under another name nothing else would be found.
            assert not re.search(r"^\s*(from|import) grpo_kernels", path.read_text(), re.M), path
    assert len([*(folder / "build").iterdir()]) == 3

"""Kernels of packages that are not installed here, found in a folder on PYTHONPATH, else skipped.

pip install --no-deps --target FOLDER fla-core einops unsloth unsloth_zoo
"""

import importlib
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from triton.runtime.autotuner import Autotuner

from grpo_kernels import GRPOLossConfig, grpo_loss, reference
from tests.helpers.batches import relative_error
from tests.helpers.peers import (  # noqa: F401
    WITHOUT_OTHER,
    B,
    V,
    batch,
    compare,
    lenient,
    logps_of,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("lenient")
ROWS = (9, 200)


# flash-linear-attention


@pytest.fixture
def fla(monkeypatch):
    """Imports its modules, which ask for a GPU's name; kernels have the first of their configs."""
    if not (PathFinder.find_spec("fla") and PathFinder.find_spec("einops")):
        pytest.skip("no fla")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))

    def load(name):
        module = importlib.import_module(f"fla.modules.{name}")
        for kernel in vars(module).values():
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = vars(kernel).get("fn") if hasattr(kernel, "__dict__") else None
            if kernel is not None:
                monkeypatch.setattr(kernel, "configs", kernel.configs[:1])
        return module

    return load


@pytest.mark.parametrize("inplace", (False, True), ids=("apart", "in_place"))
def test_fla_grpo_is_ours(fla, inplace):
    logits, ids, mask, _, ref, A = batch()
    cfg = GRPOLossConfig(beta=0.1, use_bias_correction_kl=False)
    tokens, loss_of = torch.cat((torch.randint(V, (B, 3)), ids), 1), fla("grpo.ops").fused_grpo_loss

    def theirs(x):
        return loss_of(x * 1, ref, tokens, A, 0.1, mask, False, inplace).sum() / mask.sum()

    def ours(x, call=grpo_loss):
        return call(logps_of(x, ids, 1.0), A, mask, ref_logps=ref, config=cfg).loss

    def plain(x):
        return ours(x, reference.grpo_loss)

    actual, our_results = compare(theirs, plain, logits), compare(ours, plain, logits)
    assert all(relative_error(a, b) <= 3e-6 for a, b in zip(actual, our_results, strict=True))


def test_fla_cross_entropy(fla):
    targets, module = torch.randint(V, (7,)), fla("fused_cross_entropy.ops")
    targets[2] = -100

    def plain(x):
        return F.cross_entropy(x, targets, reduction="none")

    compare(lambda x: module.cross_entropy_loss(x, targets)[0], plain, torch.randn(7, V))


def test_fla_l2norm(fla):
    l2norm = fla("norm.l2norm").l2norm
    compare(l2norm, lambda x: x * (x.square().sum(-1, True) + 1e-6).rsqrt(), torch.randn(ROWS))


def test_fla_layer_norm(fla):
    layer_norm = fla("norm.layernorm").layer_norm
    operands = (torch.randn(ROWS), torch.randn(200), torch.randn(200))
    known = {(WITHOUT_OTHER, f"layer_norm_{way}_kernel") for way in ("fwd", "bwd")}
    compare(layer_norm, lambda x, w, b: F.layer_norm(x, (200,), w, b), *operands, known=known)


def test_fla_swiglu(fla):
    swiglu = fla("activations.ops").swiglu
    compare(swiglu, lambda x, y: F.silu(x) * y, torch.randn(ROWS), torch.randn(ROWS))


# Unsloth


@pytest.fixture
def unsloth(monkeypatch, tmp_path):
    """Imports its kernels alone: the package patches models when it is imported, on a GPU."""
    spec = PathFinder.find_spec("unsloth")
    if not spec or not PathFinder.find_spec("unsloth_zoo"):
        pytest.skip("no unsloth")
    for name, value in (("ALLOW_CPU", "1"), ("IS_PRESENT", "1"), ("COMPILE_LOCATION", tmp_path)):
        monkeypatch.setenv(f"UNSLOTH_{name}", str(value))
    folder = Path(spec.origin).parent
    for name, path in (("unsloth", folder), ("unsloth.kernels", folder / "kernels")):
        package = ModuleType(name)
        package.__path__, package.__spec__ = [str(path)], ModuleSpec(name, None, is_package=True)
        sys.modules.setdefault(name, package)

    def load(name):
        module = importlib.import_module(f"unsloth.kernels.{name}")
        monkeypatch.setattr(module, "torch_gpu_device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        return module

    return load


@pytest.mark.parametrize("softcap", (0, 30.0), ids=("plain", "softcap"))
@pytest.mark.parametrize("columns", (V, 66_001))
def test_unsloth_cross_entropy(unsloth, columns, softcap):
    module, targets = unsloth("cross_entropy_loss"), torch.randint(columns, (1, 3))
    targets[0, 1] = -100

    def plain(x):
        x = softcap * (x / softcap).tanh() if softcap else x
        return F.cross_entropy(x[0], targets[0])

    def theirs(x):
        return module.fast_cross_entropy_loss(x, targets, softcap)

    compare(theirs, plain, 5 * torch.randn(1, 3, columns))


@pytest.mark.parametrize("gemma", (False, True), ids=("llama", "gemma"))
@pytest.mark.parametrize("columns", (96, 200), ids=("rows_together", "row"))
def test_unsloth_rms_norm(unsloth, columns, gemma):
    apply = unsloth("rms_layernorm").Fast_RMS_Layernorm.apply

    def plain(x, w):
        return F.rms_norm(x, (columns,), w + gemma, 1e-6)

    operands = (torch.randn(9, columns), torch.randn(columns))
    compare(lambda x, w: apply(x, w, 1e-6, gemma, False, False), plain, *operands)


def test_unsloth_layer_norm(unsloth):
    apply = unsloth("layernorm").Fast_Layernorm.apply
    operands = (torch.randn(ROWS), torch.randn(200), torch.randn(200))
    plain = lambda x, w, b: F.layer_norm(x, (200,), w, b, 1e-5)  # noqa: E731
    compare(lambda *args: apply(*args, 1e-5), plain, *operands)


GATES = {
    "swiglu": (F.silu, "swiglu_fg_kernel", "swiglu_DWf_DW_dfg_kernel"),
    "geglu_exact": (F.gelu, "geglu_exact_forward_kernel", "geglu_exact_backward_kernel"),
    "geglu_approx": (
        lambda x: F.gelu(x, approximate="tanh"),
        "geglu_approx_forward_kernel", "geglu_approx_backward_kernel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", GATES)
def test_unsloth_gates(unsloth, kind):
    module, (activation, forward, backward) = unsloth(kind.split("_")[0]), GATES[kind]

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, e, g):
            ctx.save_for_backward(e, g)
            return getattr(module, forward)(e[None], g[None])[0]

        @staticmethod
        def backward(ctx, d):
            # In place: the product, and the gradients of g and of e.
            args = (d.clone(), *(x.clone() for x in ctx.saved_tensors))
            _, d_g, d_e = getattr(module, backward)(*args)
            return d_e, d_g

    compare(Gate.apply, lambda e, g: activation(e) * g, torch.randn(ROWS), torch.randn(ROWS))


def test_unsloth_rope(unsloth):
    module, angles = unsloth("rope_embedding"), torch.rand(12, 16).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def rotated(x):
        a, b = x.chunk(2, -1)
        return x * cos.double() + torch.cat((-b, a), -1) * sin.double()

    def plain(q, k):
        return torch.cat((rotated(q), rotated(k)), 1)

    def theirs(q, k):
        return torch.cat(module.fast_rope_embedding(q, k, cos, sin), 1)

    # In place, with more threads than elements: nothing is made of what the copies read.
    known = {("race: write after read", "_rope_embedding_QK")}
    compare(theirs, plain, torch.randn(2, 3, 12, 32), torch.randn(2, 1, 12, 32), known=known)

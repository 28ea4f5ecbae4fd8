"""The Triton kernels against the torch tiles, at the sizes that bite; compiled for real GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from batches import config, relative_error

from grpo_kernels.objective import TokenInputs
from grpo_kernels.tiles import LogitGradInputs, LogitTransform, torch_tiles, triton_tiles

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
TRANSFORMS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 8.0},
    "scale_temperature": {"logit_scale": 0.6, "temperature": 1.4},
    "everything": {"bias": True, "softcap": 8.0, "logit_scale": 1.2, "temperature": True},
}


def tile(C, V, device, *, offset=0.0, pad=0, options=()):
    g = torch.Generator().manual_seed(V)
    buffer = torch.full((C, V + pad), float("nan"))
    buffer[:, :V] = 2 * torch.randn(C, V, generator=g) + offset
    targets = torch.randint(0, V, (C,), generator=g)
    targets[0] = V - 1
    buffer.scatter_add_(1, targets[:, None], torch.full((C, 1), 10.0))
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = torch.randn(V, generator=g).to(device)
    if options.get("temperature") is True:
        options["temperature"] = (0.5 + torch.rand(C, generator=g)).to(device)
    return buffer.to(device)[:, :V], targets.to(device), LogitTransform(**options)


def assert_tiles_agree(logits, targets, transform, *, entropy):
    stats = [
        tiles.token_stats(logits, targets, transform, entropy=True)
        for tiles in (torch_tiles, triton_tiles)
    ]
    truth = torch_tiles.token_stats(logits.clone(), targets, transform, entropy=True)
    for a, b in zip(*stats, strict=True):
        assert (a - b).abs().max() <= 2e-5 * max(1.0, float(a.abs().max()))
    g = torch.Generator().manual_seed(0)
    d_logps, d_entropy = torch.randn(2, logits.shape[0], generator=g).to(logits.device)
    d_logps[::3] = 0.0
    grads = LogitGradInputs(
        truth.logps,
        truth.logsumexp,
        d_logps,
        d_logps - 0.1,
        truth.entropy if entropy else None,
        d_entropy if entropy else None,
    )
    outs = []
    for tiles in (torch_tiles, triton_tiles):
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        tiles.logit_grads_(logits, targets, transform, grads, out)
        outs.append(out)
    assert outs[0].norm() > 0 and relative_error(outs[1], outs[0]) <= 2e-5
    return grads, outs[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entropy", (False, True), ids=("plain", "entropy"))
@pytest.mark.parametrize("option", TRANSFORMS)
@pytest.mark.parametrize("V", (5, 128, 1003, 4096, 8193))
def test_transforms(V, option, entropy, device):
    assert_tiles_agree(*tile(6, V, device, options=TRANSFORMS[option]), entropy=entropy)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("option", ("plain", "everything"))
def test_full_vocabulary(option, device):
    """V = 151,936 is no multiple of the block: 3,712 columns past its end must not count."""
    logits, targets, transform = tile(5, 151_936, device, options=TRANSFORMS[option])
    assert_tiles_agree(logits, targets, transform, entropy=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", (-80.0, -1000.0, 80.0))
def test_no_logit_near_zero(offset, device):
    """A maximum started at 0, or a column past V read as 0, shows where all logits are negative."""
    logits, targets, transform = tile(4, 5003, device, offset=offset)
    expected = logits.double().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    for tiles in (torch_tiles, triton_tiles):
        stats = tiles.token_stats(logits, targets, transform, entropy=True)
        assert (stats.logps - expected).abs().max() <= 1e-4
        assert (stats.entropy > 0).all() and stats.entropy.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("tiles", (torch_tiles, triton_tiles), ids=("torch", "triton"))
def test_in_place(tiles, dtype, device):
    """On the memory of the logits, also in a narrower dtype, with NaN in the rows' padding."""
    V, pad = 9001, 7
    logits, targets, transform = tile(5, V, device, pad=pad + V % 2)
    grads, expected = assert_tiles_agree(logits, targets, transform, entropy=False)
    padded = torch.as_strided(logits, (5, logits.stride(0)), (logits.stride(0), 1))
    out = padded.view(dtype)[:, :V]
    assert out.data_ptr() == logits.data_ptr()
    tiles.logit_grads_(logits, targets, transform, grads, out)
    assert relative_error(out, expected) <= (2e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", (0, 1, 255, 256, 257, 1000))
def test_policy_loss(tokens, device):
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(6, tokens, generator=g).to(device)
    inputs = TokenInputs(
        advantages=x[0], weights=x[1].abs(), count=torch.tensor(float(tokens), device=device),
        mask=x[2] > -1, old_logps=0.3 * x[3], ref_logps=x[4],
    )  # fmt: skip
    cfg = config(beta=0.1, delta=1.7, entropy_coef=0.3, epsilon_high=0.4)
    results = [
        tiles.policy_loss(cfg, inputs, 0.2 * x[5], x[5].abs(), grad=True)
        for tiles in (torch_tiles, triton_tiles)
    ]
    for a, b in zip(*(r.totals for r in results), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-4)
    torch.testing.assert_close(results[0].d_logps, results[1].d_logps, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(results[0].d_entropy, results[1].d_entropy)


COMPILE = """
import itertools, os, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from grpo_kernels.tiles import triton_tiles as t

def compile_for(arch, kernel, warps, flags, types=()):
    types = {"targets_ptr": "*i64", "mask_ptr": "*i1", **dict(types)}
    signature = {}
    for name in kernel.arg_names:
        kind = "*fp32" if name.endswith("_ptr") else "fp32"
        if name in ("V", "N") or name.startswith("stride"):
            kind = "i32"
        signature[name] = "constexpr" if name in flags else types.get(name, kind)
    # As launched on aligned memory and on any other, which needs more registers.
    whole = [i for i, n in enumerate(kernel.arg_names) if n not in flags and signature[n] != "fp32"]
    for attrs in ({(i,): [["tt.divisibility", 16]] for i in whole}, {}):
        source = ASTSource(fn=kernel, signature=signature, constexprs=flags, attrs=attrs)
        target = GPUTarget("cuda", arch, 32)
        built = triton.compile(source, target=target, options={"num_warps": warps})
        cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            command = [cuobjdump, "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True).stdout
        stack, local = re.search(r"STACK:(\\d+).*LOCAL:(\\d+)", usage).groups()
        assert stack == local == "0", f"sm_{arch} {kernel.__name__} {flags} spills: {usage}"

for arch in (80, 90, 100):
    for on in (False, True):
        flags = dict(HAS_BIAS=on, HAS_SOFTCAP=on, HAS_TEMPERATURE=on, HAS_ENTROPY=on)
        compile_for(arch, t.token_stats_kernel, 8, flags | {"BLOCK_V": t._STATS_BLOCK_V})
        flags["BLOCK_V"] = t._GRADS_BLOCK_V
        # In place from float32, and out of place as selective_log_softmax has it.
        for logits, out in (("fp32", "bf16"), ("fp32", "fp16"), ("fp32", "fp32"), ("bf16", "bf16")):
            types = {"logits_ptr": "*" + logits, "out_ptr": "*" + out}
            compile_for(arch, t.logit_grads_kernel, 8, flags | {"NARROWS": logits != out}, types)
        flags = dict(HAS_MASK=on, HAS_OLD=on, HAS_REF=on, HAS_ENTROPY=on, HAS_GRAD=on)
        flags |= {"NUM_SUMS": 6, "BLOCK_N": t._BLOCK_N}
        compile_for(arch, t.policy_loss_kernel, 4, flags)
print("compiled")
"""


def test_kernels_compile_without_spills_for_gpus_that_are_not_there():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-"],
        input=COMPILE,
        env=env,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0 and "compiled" in run.stdout, run.stderr[-2000:]

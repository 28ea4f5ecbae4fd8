"""What is installed, what will run here and whether it is right: for a bug report.

    python -m grpo_kernels.doctor

Compares the calls with their float64 reference on this machine, on each device and in each dtype.
The exit code is 1 when one of them is off, or when something installed is out of its range.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from importlib import metadata

import torch
from torch import Tensor

from . import GRPOLossConfig, __version__, fused_grpo_loss, linear_logprobs, reference
from .backends import select_backend

# Needed, and what a part of the package needs; as in pyproject.toml.
NEEDED = {"torch": "2.10"}
PARTS = {
    "triton": ("3.6", "the kernels on a GPU"),
    "transformers": ("5.0", "attach_fused_head, the trainer"),
    "accelerate": ("1.0", "the trainer"),
    "datasets": ("3.0", "the trainer"),
    "peft": ("0.15", "LoRA"),
    "lightning": ("2.4", "examples/lightning_grpo.py"),
}
# The only ones they are tested with; TRL is driven from inside.
EXACTLY = {"trl": ("1.16", "FusedGRPOTrainer, patch_trl")}
# Whatever version: seen by those who read a bug report.
OTHERS = {
    "liger-kernel": "FusedLinearGRPOLoss goes by its 0.8.5, and does without",
    "deepspeed": "ZeRO-3",
    "vllm": "sampling, by TRL",
}
# Relative errors of gradients, and absolute ones of log-probs, as the tests have them.
GRADIENT = {torch.float32: 1e-4, torch.bfloat16: 2.5e-3, torch.float16: 2.5e-3}
# There the gradient of the logits is rounded, too.
CUDA_BF16 = 6e-3
LOGPS = 1e-4
# So much that columns are drawn, at this small size; what is drawn may be noisier than that.
TOLERANCE = 0.1
SAMPLED = 2.5 * TOLERANCE


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:2])


def versions() -> Iterator[tuple[bool, str]]:
    """A line a package, and whether it is as it should be."""
    for package, least in NEEDED.items():
        found = installed(package) or torch.__version__
        fine = numbers(found) >= numbers(least)
        yield fine, f"{package:14}{found:16}{'' if fine else f'expected >= {least}'}"
    for package, (version, what) in (PARTS | EXACTLY).items():
        exactly = package in EXACTLY
        there = installed(package)
        mine, wanted = numbers(there or version), numbers(version)
        fine = mine == wanted if exactly else mine >= wanted
        told = f"{'==' if exactly else '>='} {version}"
        told += (
            f", for {what}"
            if fine
            else f" expected: pip install '{package}{told.replace(' ', '')}'"
        )
        yield fine, f"{package:14}{there or 'absent':16}{told}"
    for package, what in OTHERS.items():
        yield True, f"{package:14}{installed(package) or 'absent':16}{what}"


def devices() -> list[torch.device]:
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        found.append(torch.device("cuda"))
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found.append(torch.device("xpu"))
    return found


def described(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return str(torch.get_device_module(device).get_device_name(device))


def backend(device: torch.device) -> str:
    """Which one runs there, and why."""
    if select_tiles("auto", device).__name__.endswith("triton_tiles"):  # type: ignore[attr-defined]
        return "triton, as there is a GPU and the package"
    if device.type == "cpu":
        return "torch, as Triton compiles for GPUs alone"
    if importlib.util.find_spec("triton") is None:
        return "torch, which is slower: the package triton is not installed"
    return f"torch, as {device.type} is not known to have Triton"


def batch(dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Peaked, as a language model's: likely targets and surprising ones, some masked, with NaN."""
    B, T, V, H = 6, 24, 5003, 64
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(V, H, generator=g)
    likely = torch.randint(0, V, (B, T), generator=g)
    hidden = (7.0 / H) * weight[likely] + (1.7 / H**0.5) * torch.randn(B, T, H, generator=g)
    other = torch.rand(B, T, generator=g) < 0.3
    targets = torch.where(other, torch.randint(0, V, (B, T), generator=g), likely)
    mask = torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=g)
    logps = reference.linear_logprobs(hidden.double(), weight.double(), targets).logps.float()
    old_logps = logps + 0.25 * torch.randn(B, T, generator=g)
    made = {
        "hidden": hidden.masked_fill(~mask[..., None], torch.nan).to(dtype),
        "weight": weight.to(dtype),
        "targets": targets.masked_fill(~mask, -100),
        "advantages": torch.randn(B, generator=g),
        "mask": mask,
        "old_logps": old_logps.masked_fill(~mask, torch.nan),
    }
    return {name: x.to(device) for name, x in made.items()}


def check(call: str, dtype: torch.dtype, device: torch.device) -> tuple[bool, str]:
    """One of the calls against its reference: whether it is right, and the line that says so."""
    given = batch(dtype, device)
    exact = {k: x.double() if x.is_floating_point() else x for k, x in given.items()}
    options = (
        {"backward": "sampled", "tolerance": TOLERANCE, "seed": 0} if call == "sampled" else {}
    )
    config = GRPOLossConfig(loss_type="gspo" if call == "two passes" else "dapo")
    start = time.perf_counter()
    mine = outcome(fused_grpo_loss, given, config, **options)
    taken = time.perf_counter() - start
    right = outcome(reference.fused_grpo_loss, exact, config)
    # In one call's own words: log-probs by themselves, too.
    alone = linear_logprobs(
        given["hidden"], given["weight"], given["targets"], mask=given["mask"]
    ).logps
    wrong_logps = max(float((x - right[0]).abs().max()) for x in (mine[0], alone))
    wrong = [float((m - r).norm() / r.norm()) for m, r in zip(mine[1:], right[1:], strict=True)]
    allowed = SAMPLED if call == "sampled" else GRADIENT[dtype]
    if device.type == "cuda" and dtype == torch.bfloat16:
        allowed = max(allowed, CUDA_BF16)
    # A NaN is not less than anything.
    fine = wrong_logps <= LOGPS and all(error <= allowed for error in wrong)
    line = (
        f"{device.type:6}{str(dtype).removeprefix('torch.'):10}{call:12}"
        f"log-probs {wrong_logps:7.1e}  dH {wrong[0]:7.1e}  dW {wrong[1]:7.1e}  {taken:6.2f} s"
    )
    return fine, line + ("" if fine else f"  WRONG: expected {LOGPS:.0e}, {allowed:.1e} at most")


def outcome(
    call: object, given: dict[str, Tensor], config: GRPOLossConfig, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, and the gradients of hidden and weight, in float64."""
    hidden, weight = (given[k].detach().requires_grad_() for k in ("hidden", "weight"))
    out = call(  # type: ignore[operator]
        hidden, weight, given["targets"], given["advantages"], given["mask"],
        old_logps=given["old_logps"], config=config, **options,
    )  # fmt: skip
    out.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return out.logps.double(), hidden.grad.double(), weight.grad.double()


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(
        prog="python -m grpo_kernels.doctor", description=(__doc__ or "").split("\n")[0]
    ).parse_args(argv)
    wrong = 0
    print(f"grpo_kernels  {__version__}")
    print(f"python        {platform.python_version()}, {platform.platform()}")
    for fine, line in versions():
        wrong += not fine
        print(line)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1: Triton kernels are interpreted, slowly, on a CPU")
    for device in devices():
        print(f"\n{device.type}: {described(device)}\nbackend: {backend(device)}")
        for dtype in GRADIENT:
            for call in ("one pass", "two passes", "sampled"):
                try:
                    fine, line = check(call, dtype, device)
                except Exception as error:  # a compiler that is not there, or anything else
                    fine, line = False, f"{device} {dtype} {call}: {type(error).__name__}: {error}"
                wrong += not fine
                print(line, flush=True)
    print(f"\n{wrong} of this is wrong" if wrong else "\nAll as it should be")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Reports what is installed, what runs on this machine, and whether its results are right.

    python -m grpo_kernels.doctor

Compares the calls with their float64 reference on each device and in each dtype, and ends with a
verdict. The exit status is 1 if a result is wrong, or if an installed package has a version that is
not supported. Optional packages may be absent. Paste the output into bug reports.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from . import GRPOLossConfig, __version__, reference
from .base.checks import dtype_name, version_numbers
from .fused_grpo_loss import fused_grpo_loss
from .head.budget import gpu
from .head.linear_logprobs import linear_logprobs
from .head.lm_head import Reference, Support
from .kernels import select_backend


class Package(NamedTuple):
    """A package and the versions that are supported: ">=X.Y", or "" (any)."""

    name: str
    versions: str
    purpose: str

    @property
    def install(self) -> str:
        return f"pip install '{self.name}{self.versions}'"


# Versions as in pyproject.toml.
PACKAGES = (
    Package("torch", ">=2.10", "everything"),
    Package("triton", ">=3.6", "kernels on a GPU"),
    Package("transformers", ">=5.0", "attach_fused_head, training"),
    Package("accelerate", ">=1.10", "training"),
    Package("datasets", ">=3.0", "training"),
    Package("peft", ">=0.15", "LoRA"),
    Package("trl", ">=1.15", "FusedGRPOTrainer, patch_trl"),
    Package("lightning", ">=2.4", "examples/lightning_grpo.py"),
    Package("deepspeed", "", "ZeRO-3"),
    Package("vllm", ">=0.28", "training with --rollout vllm, sampling in TRL's trainer"),
    Package("liger-kernel", "", "comparisons only; FusedLinearGRPOLoss works without it"),
)
CALLS = ("one pass", "two passes", "support", "exact KL")
# Allowed errors, as in the tests: relative for gradients, absolute for log-probs.
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2.5e-3, torch.float16: 2.5e-3}
# On CUDA the gradient of the logits is rounded to bf16, too.
CUDA_BF16_TOLERANCE = 6e-3
LOGPS_TOLERANCE = 1e-4
# The arguments of a call over a head, from a batch.
_head_arguments = itemgetter("hidden", "weight", "targets", "mask")


def installed_version(package: str) -> str | None:
    """Returns the installed version of a package, None if there is none."""
    # vLLM's build for CPUs is a distribution of its own.
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def check_package(package: Package) -> tuple[str, str | None]:
    """Returns a line of the table, and the fault of the installed version or None."""
    version = installed_version(package.name)
    if version is None and package.name == "torch":
        version = torch.__version__  # built from source, without metadata
    line = (
        f"  {package.name:14}{version or 'absent':16}{package.versions or 'any':8}{package.purpose}"
    )
    if version is None or not package.versions:
        return line, None
    if version_numbers(version) >= version_numbers(package.versions):
        return line, None
    return line, f"{package.name} {version}: expected {package.versions}: {package.install}"


def devices() -> list[torch.device]:
    kinds = ("cuda", "xpu", "mps")
    gpus = (kind for kind in kinds if torch.get_device_module(kind).is_available())
    return [torch.device(kind) for kind in ("cpu", *gpus)]


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(device))
    return platform.processor() or platform.machine()  # Apple's GPU, which has no name


def half_precision(device: torch.device) -> str:
    """Returns the dtypes that a GPU multiplies fast, "" where the library multiplies float32."""
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    fast = "bfloat16, float16" if gpu(device).major >= 8 else "float16 (bfloat16 is emulated)"
    return f"; half precision: {fast}"


def backend_of(device: torch.device) -> str:
    """Returns the backend that runs on the device, with the reason if it is not Triton."""
    if select_backend("auto", device).policy_loss is not None:
        return "triton"
    if device.type == "cpu":
        return "torch (Triton compiles for GPUs only)"
    if device.type == "mps":
        return "torch, which is slower (Triton does not compile for it)"
    return "torch, which is slower (the package triton is not installed)"


def make_batch(dtype: torch.dtype) -> dict[str, Tensor]:
    """Makes inputs with peaked logits, likely and surprising targets, and NaN where masked."""
    B, T, V, H = 6, 24, 5003, 64
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float32)

    weight = normal(V, H)
    likely = torch.randint(0, V, (B, T), generator=g)
    hidden = (9.0 / H) * weight[likely] + (1.7 / H**0.5) * normal(B, T, H)
    surprising = torch.rand(B, T, generator=g, dtype=torch.float32) < 0.3
    targets = torch.where(surprising, torch.randint(0, V, (B, T), generator=g), likely)
    mask = torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=g)
    return {
        "hidden": hidden.masked_fill(~mask[..., None], torch.nan).to(dtype),
        "weight": weight.to(dtype),
        "targets": targets.masked_fill(~mask, -100),
        "advantages": normal(B),
        "mask": mask,
        "drift": (0.25 * normal(B, T)).masked_fill(~mask, torch.nan),
    }


def make_support(batch: dict[str, Tensor]) -> Support:
    """Makes sets of 1 to 8 ids with the target among them; every ninth token has none."""
    targets, V = batch["targets"].reshape(-1), len(batch["weight"])
    position = torch.arange(len(targets), device=targets.device)
    counts = position % 9 * batch["mask"].reshape(-1)
    steps = torch.arange(8, device=targets.device)
    # The target's neighbours by steps of 31; V is no multiple of it.
    ids = (targets[:, None] + 31 * (steps - position[:, None] % 3 * (counts[:, None] > 2))) % V
    token_ids = ids[steps < counts[:, None]]
    return Support(token_ids, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))


class Errors(NamedTuple):
    """Largest absolute error of log-probs; relative errors of the gradients; seconds taken."""

    logps: float
    d_hidden: float
    d_weight: float
    seconds: float


def measure_errors(call: str, dtype: torch.dtype, device: torch.device) -> Errors:
    """Compares one of `CALLS` with the float64 reference on the same inputs, on the CPU."""
    made = make_batch(dtype)
    batch = {name: x.to(device) for name, x in made.items()}
    exact = {k: x.double() if x.is_floating_point() else x for k, x in made.items()}
    config = GRPOLossConfig(loss_type="gspo" if call == "two passes" else "dapo")
    support = make_support(exact) if call == "support" else None
    exact_kwargs: dict[str, Any] = {"config": config, "support": support}
    old_logps = reference.linear_logprobs(*_head_arguments(exact), support=support).logps
    exact_kwargs["old_logps"] = (old_logps + exact["drift"]).float()
    kwargs = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, exact_kwargs)
    if call == "exact KL":
        kwargs["config"] = exact_kwargs["config"] = GRPOLossConfig(beta=0.1, kl_estimator="exact")
        kwargs["reference"], exact_kwargs["reference"] = (
            Reference(0.9 * x["hidden"], x["weight"]) for x in (batch, exact)
        )
    start = time.perf_counter()
    logps, *gradients = _run(fused_grpo_loss, batch, **kwargs)
    seconds = time.perf_counter() - start
    expected_logps, *expected = _run(reference.fused_grpo_loss, exact, **exact_kwargs)
    without_loss = linear_logprobs(*_head_arguments(batch), support=kwargs["support"]).logps
    scored = torch.stack([logps, without_loss.cpu().double()])
    logps_error = float(scored.sub(expected_logps).abs().max())
    d_hidden, d_weight = (
        float((x - y).norm() / y.norm()) for x, y in zip(gradients, expected, strict=True)
    )
    return Errors(logps_error, d_hidden, d_weight, seconds)


def _run(call: Any, batch: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probs and gradients of hidden states and weight, in float64 on the CPU."""
    hidden, weight, targets, mask = _head_arguments(batch)
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    out = call(hidden, weight, targets, batch["advantages"], mask, **options)
    out.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    logps, d_hidden, d_weight = (
        x.detach().cpu().double() for x in (out.logps, hidden.grad, weight.grad)
    )
    return logps, d_hidden, d_weight


def check_call(call: str, dtype: torch.dtype, device: torch.device) -> tuple[str, str | None]:
    """Returns a line of the table, and the fault of the results or None."""
    label = f"{device.type:8}{dtype_name(dtype):10}{call:12}"
    try:
        errors = measure_errors(call, dtype, device)
    except Exception as error:  # a compiler that is missing, for example
        return f"  {label}FAILED", f"{label.rstrip()}: {type(error).__name__}: {error}"
    allowed = GRADIENT_TOLERANCE[dtype]
    if device.type == "cuda" and dtype == torch.bfloat16:
        allowed = max(allowed, CUDA_BF16_TOLERANCE)
    gradients = (errors.d_hidden, errors.d_weight)
    # Written so that NaN is not right.
    right = errors.logps <= LOGPS_TOLERANCE and all(error <= allowed for error in gradients)
    line = f"  {label}{errors.logps:9.1e}{errors.d_hidden:9.1e}{errors.d_weight:9.1e}"
    line += f"{errors.seconds:9.2f} s  {'ok' if right else 'WRONG'}"
    if right:
        return line, None
    return line, (
        f"{label.rstrip()}: expected errors of at most {LOGPS_TOLERANCE:.0e} (log-probs) and "
        f"{allowed:.1e} (gradients); see the table"
    )


def _report(results: Iterator[tuple[str, str | None]]) -> list[str]:
    """Prints the lines as they come; returns the faults."""
    problems = []
    for line, problem in results:
        print(line, flush=True)
        problems += [problem] if problem else []
    return problems


def print_verdict(packages: list[str], calls: list[str]) -> None:
    """Prints what works, what does not and what to do, from the problems that were found."""
    kinds = [device.type for device in devices()]
    if calls:
        print(f"\nVERDICT: {len(calls)} checks failed. Do not train on this machine.")
    elif packages:
        print("\nVERDICT: all results are right, but a package has an unsupported version.")
    else:
        print(f"\nVERDICT: all is well. All results are right on {' and '.join(kinds)}.")
    for problem in (*calls, *packages):
        print(f"  - {problem}")
    if calls:
        print("  Please report this, with all of the output.")
    if kinds == ["cpu"]:
        print("  No GPU was found: the library runs on the CPU, with torch operations.")
    absent = [x for x in PACKAGES[1:] if x.versions and installed_version(x.name) is None]
    if absent:
        print("  Not installed, and needed only for what is named:")
    for package in absent:
        print(f"    {package.name} ({package.purpose}): {package.install}")


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(
        prog="python -m grpo_kernels.doctor", description=(__doc__ or "").split("\n")[0]
    ).parse_args(argv)
    print(f"grpo_kernels {__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"\n  {'package':14}{'installed':16}{'needed':8}for what")
    packages = _report(check_package(package) for package in PACKAGES)
    print()
    for device in devices():
        backend = backend_of(device)
        half = half_precision(device)
        print(f"  {device.type}: {device_name(device)}; backend: {backend}{half}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("  TRITON_INTERPRET=1 is set: Triton kernels are interpreted on the CPU, slowly")
    print("\nErrors against the float64 reference: absolute for log-probs, relative for the")
    print("gradients of hidden states (dH) and weight (dW).")
    print(f"  {'device':8}{'dtype':10}{'call':12}{'log-probs':>9}{'dH':>9}{'dW':>9}{'time':>11}")
    calls = _report(
        check_call(call, dtype, device)
        for device in devices()
        for dtype in GRADIENT_TOLERANCE
        for call in CALLS
    )
    print_verdict(packages, calls)
    return int(bool(packages or calls))


if __name__ == "__main__":
    sys.exit(main())

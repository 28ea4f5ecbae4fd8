"""Compiles every Triton kernel for GPUs that are not there: registers, spills, shared memory.

    python -m benchmarks.compile_report [--arch sm_80 gfx942] [--check] [--markdown out.md]

The configurations are not listed here. The launchers are called with every combination of their
options, and what they would launch is recorded and compiled. The options of the policy loss
multiply to thousands; there, every surrogate meets every form of the KL, and the other options are
drawn at random once and once inverted, so that every pair of them occurs. Each kernel is compiled
twice: aligned, for memory and rows that divide by 16, and unaligned, for any.

The exit status is 1 for

- spills, stack, or more shared memory than a block can have;
- a kernel that no launch covers;
- an aligned kernel that does not load its rows in vectors;
- a minimum or maximum in the policy loss that hides NaN;
- with `--check`, a table that differs from the stored one, `benchmarks/results/compile.md`.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from grpo_kernels.backends import (
    LogitTransform,
    RowGrads,
    triton_backend,
    triton_logits,
    triton_policy_loss,
)
from grpo_kernels.config import KL_ESTIMATORS, GRPOLossConfig
from grpo_kernels.grpo_loss import policy_loss
from grpo_kernels.objective import LossInputs

STORED = Path(__file__).parent / "results/compile.md"
# The modules whose kernels are compiled.
MODULES = (triton_logits, triton_policy_loss)
# name: (Triton's target, shared memory per block in KiB)
ARCHITECTURES = {
    "sm_80": (("cuda", 80, 32), 163),
    "sm_90": (("cuda", 90, 32), 227),
    "sm_100": (("cuda", 100, 32), 227),
    "gfx942": (("hip", "gfx942", 64), 64),
}
DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.bool: "i1",
}
HALVES = (torch.bfloat16, torch.float16)
# Qwen's, GPT-2's, and less than a block.
VOCABULARIES = (151_936, 50_257, 1003)


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel with the arguments of its launcher."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    odd: tuple[str, ...]  # integer arguments that 16 does not divide
    constants: tuple[tuple[str, Any], ...]
    num_warps: int


@dataclass(frozen=True)
class Usage:
    """The resources of compiled code; `problem` says what is wrong with it, "" if nothing is."""

    registers: int
    spills: int
    stack: int
    shared: int
    warps: int | None = None  # resident per SM, of 64
    problem: str = ""


def recorded(calls: Callable[[], None]) -> set[KernelLaunch]:
    """Returns what `calls` would launch."""
    launches: set[KernelLaunch] = set()

    def record(
        self: Any, *args: Any, grid: Any, warmup: bool, num_warps: int, **flags: Any
    ) -> None:
        names = [p.name for p in self.params if not p.is_constexpr]
        kinds, odd = [], []
        for name, value in zip(names, args, strict=True):
            if isinstance(value, torch.Tensor):
                kinds.append((name, "*" + DTYPES[value.dtype]))
            else:
                kinds.append((name, "fp32" if isinstance(value, float) else "i32"))
                odd += [name] if isinstance(value, int) and value % 16 else []
        constants = tuple(sorted(flags.items()))
        launches.add(KernelLaunch(self.__name__, tuple(kinds), tuple(odd), constants, num_warps))

    original = JITFunction.run
    JITFunction.run = record
    try:
        calls()
    finally:
        JITFunction.run = original
    return launches


def head_launches() -> None:
    """Launches the kernels on logits with every transform that the public calls can ask for."""
    rows = 2
    targets, column = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    temperatures: tuple[float | torch.Tensor, ...] = (1.0, column)
    transforms = itertools.product(
        (None, torch.float32, *HALVES), (None, 30.0), temperatures, (False, True)
    )
    for bias, softcap, temperature, entropy in transforms:
        for V in VOCABULARIES[: 3 if bias in (None, torch.float32) else 1]:
            logits = _padded(rows, V, torch.float32)
            transform = LogitTransform(
                None if bias is None else torch.empty(V, dtype=bias), 1.0, softcap, temperature
            )
            triton_backend.token_stats(logits, targets, transform, entropy=entropy)
            grads = RowGrads(*[column] * (6 if entropy else 4))
            triton_backend.column_scores(logits, targets, transform, grads, [slice(0, rows)])
            for dtype in (torch.float32, *HALVES):
                out = _padded(rows, V, dtype)
                triton_backend.logit_grads_(logits, targets, transform, grads, out)
                # Sampled columns lie in a buffer of their own, of any width.
                if logits.stride(0) != V:
                    kept = torch.empty(rows, V)
                    narrow = kept.view(dtype)[:, :V]
                    triton_backend.logit_grads_(
                        kept, targets, transform, grads, narrow, column_weights=torch.empty(V)
                    )
    # selective_log_softmax gets the caller's logits, in any dtype; the gradients have the same.
    for dtype, temperature in itertools.product(HALVES, temperatures):
        logits = torch.empty(rows, VOCABULARIES[0], dtype=dtype)
        transform = LogitTransform(temperature=temperature)
        triton_backend.token_stats(logits, targets, transform, entropy=False)
        grads = RowGrads(*[column] * 4)
        triton_backend.logit_grads_(logits, targets, transform, grads, torch.empty_like(logits))


def _padded(rows: int, V: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns logits whose rows are padded as in the head's chunks."""
    return torch.empty(rows, -(-V // 64) * 64, dtype=dtype)[:, :V]


def policy_launches() -> None:
    """Launches the policy loss: every surrogate with every KL, and all pairs of other options."""
    draw = random.Random(0)
    surrogates: dict[str, dict[str, Any]] = {
        "dapo": {},
        "cispo": {"epsilon_high": 5.0},
        "sapo": {},
        "reinforce": {},
        "dppo_tv": {},
    }
    kls: list[dict[str, Any]] = [{}]
    for name, clamp, ratio in itertools.product(KL_ESTIMATORS, (None, 10.0), (False, True)):
        kl = {"kl_estimator": name, "kl_clamp": clamp, "use_bias_correction_kl": ratio}
        kls.append({"beta": 0.1, **kl})
    tokens = torch.ones(4)
    for loss_type, kl in itertools.product(surrogates, kls):
        drawn = [draw.random() < 0.5 for _ in range(5)]
        everything = [[True] * 5] if kl else []
        for flags in (drawn, [not flag for flag in drawn], *everything):
            masked, old, scaled, bonus, grad = flags
            config = GRPOLossConfig(
                loss_type=loss_type,
                entropy_coef=0.1 * bonus,
                **surrogates[loss_type],
                **kl,
                is_correction="token_mask" if scaled else "none",
            )
            inputs = LossInputs(
                advantages=tokens,
                weights=tokens,
                count=torch.tensor(4.0),
                mask=tokens > 0 if masked else None,
                old_logps=tokens if old else None,
                ref_logps=tokens if kl else None,
                sampling_logps=tokens,
            )
            policy_loss(config, inputs, tokens, tokens, triton_backend, grad=grad)


def all_launches() -> list[KernelLaunch]:
    launches = recorded(head_launches) | recorded(policy_launches)
    return sorted(launches, key=repr)


def kernels() -> dict[str, Any]:
    """Returns the kernels by name. Names with an underscore are helpers that kernels call."""
    return {
        name: x
        for module in MODULES
        for name, x in vars(module).items()
        if isinstance(x, JITFunction) and not name.startswith("_")
    }


def compiled(job: tuple[KernelLaunch, str, bool]) -> Usage:
    """Compiles a launch for an architecture, aligned or not, and judges the result."""
    launch, arch, aligned = job
    kernel = kernels()[launch.kernel]
    (backend, chip, warp_size), _ = ARCHITECTURES[arch]
    constants = dict(launch.constants)
    kinds = dict(launch.signature)
    signature = {n: "constexpr" if n in constants else kinds[n] for n in kernel.arg_names}
    divides = {n for n, kind in launch.signature if kind != "fp32"} - set(launch.odd)
    specialized = [
        p.num
        for p in kernel.params
        if p.name in divides and not (p.do_not_specialize or p.do_not_specialize_on_alignment)
    ]
    attrs = {(i,): [["tt.divisibility", 16]] for i in (specialized if aligned else ())}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    target = GPUTarget(backend, chip, warp_size)
    built = triton.compile(source, target=target, options={"num_warps": launch.num_warps})
    if backend == "hip":
        return judged(_amd_usage(built), arch, launch, aligned)
    usage = _nvidia_usage(built, launch.num_warps)
    return judged(usage, arch, launch, aligned, built.asm["ptx"])


def judged(
    usage: Usage, arch: str, launch: KernelLaunch, aligned: bool, ptx: str | None = None
) -> Usage:
    """Fills in `problem`. Without PTX (on AMD) loads and minima are not looked at."""
    limit = ARCHITECTURES[arch][1] * 1024
    problem = ""
    if usage.spills or usage.stack:
        problem = f"{usage.spills} spills, {usage.stack} bytes of stack"
    elif usage.shared > limit:
        problem = f"{usage.shared:,} bytes of shared memory, of {limit:,}"
    elif ptx is None:
        pass
    elif aligned and _rows_divide(launch) and not re.search(r"ld\.global\.v[248]", ptx):
        problem = "no vector loads"
    elif launch.kernel == "policy_loss_kernel" and re.search(r"\b(min|max)\.f32", ptx):
        # The plain instruction returns the number of a number and NaN; torch returns NaN.
        problem = "a minimum or maximum that hides NaN"
    return replace(usage, problem=problem)


def _rows_divide(launch: KernelLaunch) -> bool:
    """Returns True if the kernel reads rows and 16 divides all of its strides."""
    strides = {name for name, _ in launch.signature if name.startswith("stride")}
    return bool(strides) and not strides & set(launch.odd)


def _nvidia_usage(built: Any, num_warps: int) -> Usage:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump: expected the number of registers; got {text}")
    registers, stack, static, local = map(int, found.groups())
    # An SM has 65,536 registers and gives them out in units of 8 per thread.
    fitting = min(64, 65_536 // (32 * -(-registers // 8) * 8))
    shared = max(static, built.metadata.shared)
    return Usage(registers, local, stack, shared, fitting // num_warps * num_warps)


def _amd_usage(built: Any) -> Usage:
    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", built.asm["amdgcn"])[1])  # type: ignore[index]

    spills = number("vgpr_spill_count") + number("sgpr_spill_count")
    stack = number("private_segment_fixed_size")
    shared = max(number("group_segment_fixed_size"), built.metadata.shared)
    return Usage(number("vgpr_count"), spills, stack, shared)


def report(archs: list[str], launches: list[KernelLaunch]) -> tuple[list[str], list[str]]:
    """Returns the table, one line per kernel and architecture, and what is wrong."""
    jobs = list(itertools.product(launches, archs, (True, False)))
    problems = [
        f"{name}: no launch covered it" for name in kernels().keys() - {x.kernel for x in launches}
    ]
    table: dict[tuple[str, str], list[Usage]] = defaultdict(list)
    with ProcessPoolExecutor() as pool:
        builds = pool.map(compiled, jobs, chunksize=8)
        usages = tqdm(builds, total=len(jobs), desc="compiling", disable=None)
        for (launch, arch, aligned), usage in zip(jobs, usages, strict=True):
            table[launch.kernel, arch].append(usage)
            if usage.problem:
                where = "aligned" if aligned else "unaligned"
                problems.append(
                    f"{launch.kernel} on {arch}, {where}: {usage.problem}; {launch.constants}, "
                    f"odd: {launch.odd}"
                )
    lines = [
        "| kernel | architecture | builds | registers | warps an SM holds | spills | stack "
        "| shared memory, bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (kernel, arch), usages_of in sorted(table.items()):
        registers = [usage.registers for usage in usages_of]
        warps = [usage.warps for usage in usages_of if usage.warps is not None]
        resident = f"{min(warps)}-{max(warps)} of 64" if warps else ""
        lines.append(
            f"| {kernel} | {arch} | {len(usages_of)} | {min(registers)}-{max(registers)}"
            f" | {resident} | {max(u.spills for u in usages_of)}"
            f" | {max(u.stack for u in usages_of)} | {max(u.shared for u in usages_of):,} |"
        )
    return lines, problems


def differences(stored: str, lines: list[str], archs: list[str]) -> list[str]:
    """Compares the rows of a stored table, those of `archs`, with the table `lines`."""
    rows = [row for row in stored.splitlines() if any(f" | {arch} | " in row for arch in archs)]
    return [line for line in difflib.ndiff(rows, lines[2:]) if line.startswith(("+", "-"))]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=ARCHITECTURES,
        default=list(ARCHITECTURES),
        help="architectures to compile for (default: all)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"fail if the table differs from {STORED.name}, which --markdown can write anew",
    )
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: the interpreter compiles nothing")
    launches = all_launches()
    lines, problems = report(args.arch, launches)
    text = "\n".join(
        [
            f"{len(launches)} configurations, each on memory and rows that divide by 16 and on "
            f"any; triton {triton.__version__}, torch {torch.__version__}",
            "",
            *lines,
        ]
    )
    print(text)
    if args.check:
        changed = differences(STORED.read_text(), lines, args.arch)
        problems += [f"not as in {STORED.name}: {line}" for line in changed]
    if args.markdown:
        title = "# Registers and memory of every kernel, compiled without a GPU"
        command = "`python -m benchmarks.compile_report`"
        args.markdown.write_text(f"{title}\n\n{command}: {text}\n")
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

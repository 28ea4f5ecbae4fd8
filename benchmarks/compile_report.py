"""Compiles every Triton kernel for GPUs that are not there: registers, spills, loops.

    python -m benchmarks.compile_report [--arch sm_80 gfx942] [--full] [--check] [--markdown FILE]

`compile_launches` has the configurations. Each kernel is compiled aligned, for memory and rows that
divide by 16, unaligned, for any, and mixed, with one of its strides of any size, where Triton tells
these apart. This is done for a sample:
every pair of options that occurs at all, and the configurations that take the most registers; on
sm_75 without mixed ones. With `--full` it is done for every configuration on sm_90 and gfx942, of
the policy loss on sm_90 alone.

The exit status is 1 for

- spills: stack beyond 40 bytes, or of which innermost loops use more than one value; more shared
  memory or threads than a block can have;
- a kernel that no launch covers, or with `--full` a sample that takes fewer registers than all
  configurations of the kernel do, by more than the 8 in which a GPU gives them out;
- a launch that leaves to Triton whether a product and a sum are one instruction;
- an aligned kernel that does not load its rows in vectors;
- a minimum or maximum in the policy loss that hides NaN;
- an innermost loop over logits or rows with more instructions than its budget, with a barrier, a
  shuffle, or logits that are not moved in vectors (`compile_sass`);
- with `--check`, tables that differ from those stored for this version of Triton in
  `benchmarks/results/compile.md`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks import compile_sass
from benchmarks.compile_launches import KernelLaunch, all_launches, functions, kernels, sample

STORED = Path(__file__).parent / "results/compile.md"
_TITLE = """# Registers, memory and loops of every kernel, compiled without a GPU

What `make compile-report` compiles, on memory and rows that divide by 16 and on any: a sample in
which every pair of options occurs, and the configurations that take the most registers.

Loops are those of Qwen's vocabulary and a half-precision head without options (bf16, on sm_75
float16), and for entries of 4,096 columns; instructions are counted in the machine code, per logit
that one thread handles, or per element of a row that it multiplies. What fails is in
`benchmarks/compile_report.py`.
"""


@dataclass(frozen=True)
class Architecture:
    """A GPU to compile for, and what a block and an SM of it can have."""

    backend: str
    chip: int | str
    warp_size: int
    shared_kib: int  # per block
    warps: int | None = None  # per SM
    half: torch.dtype = torch.bfloat16  # the half precision that its tensor cores multiply


ARCHITECTURES = {
    "sm_75": Architecture("cuda", 75, 32, 64, 32, torch.float16),
    "sm_80": Architecture("cuda", 80, 32, 163, 64),
    "sm_86": Architecture("cuda", 86, 32, 99, 48),
    "sm_89": Architecture("cuda", 89, 32, 99, 48),
    "sm_90": Architecture("cuda", 90, 32, 227, 64),
    "sm_100": Architecture("cuda", 100, 32, 227, 64),
    "sm_120": Architecture("cuda", 120, 32, 99, 48),
    "gfx942": Architecture("hip", "gfx942", 64, 64),
}
# In bytes: ptxas keeps a few values of a row on the stack if that lets an SM hold more warps. Of
# them an innermost loop may use one, once.
MOST_STACK = 40
MOST_SPILLED_IN_LOOPS = 2
# Compiled in every configuration with `--full`, otherwise in a sample.
IN_FULL = {"policy_loss_kernel": ("sm_90",)}
IN_FULL_OTHERWISE = ("sm_90", "gfx942")
# Triton compiles for it, and claims to from sm_80 on: a shorter look.
WITHOUT_MIXED = ("sm_75",)
# Steps that are rounded to half precision differ by the vendor and by the instructions of sm_90.
ROUNDED = ("sm_80", "sm_90", "gfx942")


@dataclass(frozen=True)
class Usage:
    """The resources of compiled code; `problem` says what is wrong with it, "" if nothing is."""

    registers: int
    spills: int
    stack: int
    shared: int
    warps: int | None = None  # resident per SM
    spilled_in_loops: int = 0  # uses of the stack in the innermost loop with the most
    problem: str = ""


def compiled(launch: KernelLaunch, arch: str) -> Any:
    """Compiles a launch for an architecture."""
    kernel, chip = kernels()[launch.kernel], ARCHITECTURES[arch]
    constants = {n: functions().get(x, x) for n, x in launch.constants}
    kinds = dict(launch.signature)
    signature = {n: "constexpr" if n in constants else kinds[n] for n in kernel.arg_names}
    places = [p.num for p in kernel.params if p.name in launch.divisible]
    attrs = {(i,): [["tt.divisibility", 16]] for i in places}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    target = GPUTarget(chip.backend, chip.chip, chip.warp_size)
    options: dict[str, Any] = {"num_warps": launch.num_warps}
    if launch.fp_fusion is not None:
        options["enable_fp_fusion"] = launch.fp_fusion
    if launch.maxnreg is not None and chip.backend == "cuda":
        options["maxnreg"] = launch.maxnreg
    return triton.compile(source, target=target, options=options)


def used(job: tuple[KernelLaunch, str]) -> Usage:
    """Compiles a launch for an architecture and judges the result."""
    launch, arch = job
    built = compiled(launch, arch)
    if ARCHITECTURES[arch].backend == "hip":
        return judged(_amd_usage(built), arch, launch)
    return judged(_nvidia_usage(built, arch, launch.num_warps), arch, launch, built.asm["ptx"])


def loops_of(job: tuple[KernelLaunch, str]) -> list[compile_sass.Loop]:
    """Compiles a launch for an architecture of NVIDIA and reads its innermost loops."""
    return compile_sass.innermost_loops(_cuobjdump(compiled(*job), "-sass"))


def judged(usage: Usage, arch: str, launch: KernelLaunch, ptx: str | None = None) -> Usage:
    """Fills in `problem`. Without PTX (on AMD) loads and minima are not looked at."""
    limit = ARCHITECTURES[arch].shared_kib * 1024
    threads = launch.num_warps * ARCHITECTURES[arch].warp_size
    problem, in_loops = "", usage.spilled_in_loops
    if usage.spills or usage.stack > MOST_STACK or in_loops > MOST_SPILLED_IN_LOOPS:
        problem = (
            f"{usage.spills} spills, {usage.stack} bytes of stack, "
            f"{in_loops} times used in an innermost loop"
        )
    elif usage.shared > limit:
        problem = f"{usage.shared:,} bytes of shared memory, of {limit:,}"
    elif threads > 1024:
        problem = f"{threads:,} threads per block, of 1,024"
    elif ptx is None:
        pass
    elif _rows_divide(launch) and not re.search(r"ld\.global\.v[248]|cp\.async", ptx):
        problem = "no vector loads"
    elif launch.kernel == "policy_loss_kernel" and _hides_nan(ptx):
        problem = "a minimum or maximum that hides NaN"
    return replace(usage, problem=problem)


def _hides_nan(ptx: str) -> bool:
    """Returns True if a minimum or maximum of a number and NaN is the number; torch's is NaN.

    The plain instruction returns the number. Before sm_80 there is no other, and Triton selects NaN
    where an operand is NaN.
    """
    selects = set(re.findall(r"selp\.f32\s+%\w+, 0f7FC00000, %\w+, (%\w+);", ptx))
    comparisons = re.findall(r"setp\.nan\.f32\s+(%\w+), (%\w+), (%\w+);", ptx)
    compared = [{a, b} for predicate, a, b in comparisons if predicate in selects]
    plain = re.findall(r"\b(?:min|max)\.f32\s+%\w+([^;]*)", ptx)
    return any(set(re.findall(r"%\w+", operands)) not in compared for operands in plain)


def _rows_divide(launch: KernelLaunch) -> bool:
    """Returns True if the kernel reads rows and is compiled for strides that 16 divides."""
    strides = {name for name, _ in launch.signature if name.startswith("stride")}
    # `exp_stats_kernel` stores each row's entry at the target, and reads no row.
    reads = bool(strides) and launch.kernel != "exp_stats_kernel"
    return reads and strides <= set(launch.divisible)


def _cuobjdump(built: Any, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [str(tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _nvidia_usage(built: Any, arch: str, num_warps: int) -> Usage:
    text = _cuobjdump(built, "-res-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if match is None:
        raise RuntimeError(f"cuobjdump: expected the number of registers; got {text}")
    registers, stack, static, local = map(int, match.groups())
    # An SM has 65,536 registers and gives them out in units of 8 per thread.
    fitting = min(ARCHITECTURES[arch].warps or 64, 65_536 // (32 * -(-registers // 8) * 8))
    shared = max(static, built.metadata.shared)
    spilled = 0
    if stack:
        loops = compile_sass.innermost_loops(_cuobjdump(built, "-sass"))
        spilled = max((loop.spilled for loop in loops), default=0)
    return Usage(registers, local, stack, shared, fitting // num_warps * num_warps, spilled)


def _amd_usage(built: Any) -> Usage:
    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", built.asm["amdgcn"])[1])  # type: ignore[index]

    spills = number("vgpr_spill_count") + number("sgpr_spill_count")
    stack = number("private_segment_fixed_size")
    shared = max(number("group_segment_fixed_size"), built.metadata.shared)
    return Usage(number("vgpr_count"), spills, stack, shared)


def builds(
    launches: list[KernelLaunch], archs: list[str], *, in_full: bool
) -> dict[tuple[KernelLaunch, str], bool]:
    """Launches to be compiled, and whether each belongs to the sample."""
    jobs: dict[tuple[KernelLaunch, str], bool] = {}
    sampled = set(sample(launches))
    for launch in launches:
        full_archs = IN_FULL.get(launch.kernel, IN_FULL_OTHERWISE) if in_full else ()
        for arch in archs:
            if launch.archs:
                if arch in launch.archs:
                    jobs[launch, arch] = True
            elif arch not in ROUNDED and _rounds_steps(launch):
                continue
            elif launch in sampled or arch in full_archs:
                more = [] if arch in WITHOUT_MIXED else mixed(launch)
                for build in (launch, replace(launch, divisible=()), *more):
                    jobs[build, arch] = jobs.get((build, arch), False) or launch in sampled
    return jobs


def _rounds_steps(launch: KernelLaunch) -> bool:
    return any(name.endswith("STEPS") and value > 1 for name, value in launch.constants)


def mixed(launch: KernelLaunch) -> list[KernelLaunch]:
    """The launch with one of several strides not divisible: padded rows beside odd ones."""
    strides = [name for name in launch.divisible if name.startswith("stride")]
    if len(strides) < 2:
        return []
    rest = [tuple(n for n in launch.divisible if n != stride) for stride in strides]
    return [replace(launch, divisible=divisible) for divisible in rest]


def report(
    archs: list[str], launches: list[KernelLaunch], *, in_full: bool = False
) -> tuple[list[str], list[str]]:
    """Returns the tables, one line per kernel or loop and architecture, and what is wrong."""
    jobs = builds(launches, archs, in_full=in_full)
    problems = [
        f"{name}: no launch covered it" for name in kernels().keys() - {x.kernel for x in launches}
    ]
    problems += [
        f"{name}: a launch left to Triton whether products and sums are one instruction"
        for name in sorted({x.kernel for x in launches if x.fp_fusion is None})
    ]
    table: dict[tuple[str, str], list[Usage]] = defaultdict(list)
    most_sampled: dict[tuple[str, str], int] = defaultdict(int)
    with ProcessPoolExecutor() as pool:
        done = tqdm(
            pool.map(used, jobs, chunksize=8), total=len(jobs), desc="compiling", disable=None
        )
        for ((launch, arch), in_sample), usage in zip(jobs.items(), done, strict=True):
            key = launch.kernel, arch
            table[key].append(usage)
            most_sampled[key] = max(most_sampled[key], usage.registers * in_sample)
            if usage.problem:
                where = f"for {launch.divisible} that 16 divides" if launch.divisible else "for any"
                problems.append(
                    f"{launch.kernel} on {arch}: {usage.problem}; {launch.constants}, {where}"
                )
        nvidia = [arch for arch in archs if ARCHITECTURES[arch].backend == "cuda"]
        with_budget = [
            (name, launch, arch)
            for arch in nvidia
            for name, launch in compile_sass.budgeted(ARCHITECTURES[arch].half).items()
        ]
        with_budget.sort(key=lambda x: list(compile_sass.BUDGETS).index(x[0]))
        loops = pool.map(loops_of, [(launch, arch) for _, launch, arch in with_budget])
        rows = []
        for (name, launch, arch), loop in zip(with_budget, loops, strict=True):
            rows += compile_sass.rows_of(name, launch, loop, arch)
            problems += compile_sass.problems_of(name, launch, loop, arch)
    lines = [
        "| kernel | architecture | builds | registers | warps an SM holds | spills | stack "
        "| shared memory, bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (kernel, arch), usages in sorted(table.items()):
        lines.append(_row(kernel, arch, usages))
        most = max(usage.registers for usage in usages)
        if most_sampled[kernel, arch] + 8 < most:
            problems.append(
                f"{kernel} on {arch}: {most_sampled[kernel, arch]} registers in the sample, "
                f"{most} in all configurations"
            )
    return [*lines, "", *compile_sass.HEADER, *rows], problems


def _row(kernel: str, arch: str, usages: list[Usage]) -> str:
    registers = [usage.registers for usage in usages]
    warps = [usage.warps for usage in usages if usage.warps is not None]
    resident = f"{min(warps)}-{max(warps)} of {ARCHITECTURES[arch].warps}" if warps else ""
    return (
        f"| {kernel} | {arch} | {len(usages)} | {min(registers)}-{max(registers)}"
        f" | {resident} | {max(u.spills for u in usages)}"
        f" | {max(u.stack for u in usages)} | {max(u.shared for u in usages):,} |"
    )


def section_of(page: str, version: str) -> str:
    """Section of a page about one version of Triton, "" if there is none."""
    match = re.search(rf"^## Triton {re.escape(version)}\n.*?(?=^## |\Z)", page, re.M | re.S)
    return match[0] if match else ""


def with_section(page: str, version: str, text: str) -> str:
    """Returns the page with the text as its section about a version of Triton."""
    versions = set(re.findall(r"^## Triton (\S+)$", page, re.M)) | {version}
    sections = {v: section_of(page, v) for v in sorted(versions, reverse=True)}
    sections[version] = f"## Triton {version}\n\n{text}\n"
    return "\n".join([_TITLE, *(section.strip() + "\n" for section in sections.values())])


def differences(stored: str, lines: list[str], archs: list[str]) -> list[str]:
    """Compares the rows of stored tables, those of `archs`, with the rows of the tables `lines`."""

    def rows(lines: list[str]) -> list[str]:
        return [row for row in lines if any(f" | {arch} | " in row for arch in archs)]

    changes = difflib.ndiff(rows(stored.splitlines()), rows(lines))
    return [line for line in changes if line.startswith(("+", "-"))]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES),
                        help="architectures to compile for (default: all)")  # fmt: skip
    parser.add_argument("--full", action="store_true",
                        help="compile every configuration for sm_90 and gfx942")  # fmt: skip
    parser.add_argument("--check", action="store_true",
                        help=f"fail if the tables differ from {STORED.name}")  # fmt: skip
    parser.add_argument("--markdown", type=Path,
                        help="write the tables here, beside other versions'")  # fmt: skip
    args = parser.parse_args(argv)
    if args.full and (args.check or args.markdown):
        parser.error("--full: expected neither --check nor --markdown, as a sample is stored")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: the interpreter compiles nothing")
    launches = all_launches()
    lines, problems = report(args.arch, launches, in_full=args.full)
    version = triton.__version__
    portion = "" if args.full else "a sample of "
    text = "\n".join(
        [f"{portion}{len(launches)} configurations; torch {torch.__version__}", "", *lines]
    )
    print(f"Triton {version}: {text}")
    if args.check:
        changed = differences(section_of(STORED.read_text(), version), lines, args.arch)
        problems += [f"not as in {STORED.name}: {line}" for line in changed]
    if args.markdown:
        page = args.markdown.read_text() if args.markdown.exists() else ""
        args.markdown.write_text(with_section(page, version, text))
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

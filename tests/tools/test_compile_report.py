"""The gate for GPUs that are not there: it must see what it is there to see.

In processes of their own, as the kernels of this one are the interpreter's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from benchmarks import compile_sass
from benchmarks.compile_report import differences

SETUP = """
import sys
from dataclasses import replace
from benchmarks import compile_report as report, compile_sass as sass
from grpo_kernels.kernels import triton_backend
launches = report.all_launches()
few = {}
for launch in launches:
    few.setdefault(launch.kernel, launch)
few = list(few.values())
of = {launch.kernel.removesuffix("_kernel"): launch for launch in few}
report.all_launches = lambda: few
"""


def run(code, *args, status=0):
    """Returns what the code and then the report print, or their errors."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", f"{SETUP}\n{code}\nreport.main(sys.argv[1:])", *args]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def test_table(tmp_path):
    """Compiles one configuration per kernel; `make compile-report` compiles all."""
    out = tmp_path / "compile.md"
    table = run("", "--arch", "sm_75", "sm_80", "gfx942", "--markdown", str(out))
    # Aligned, unaligned, and with one of two strides of any size, which sm_75 does without; of the
    # policy loss nothing is compiled anew for what 16 divides.
    names = ("token_stats", "logit_grads", "entry_dots", "segment_sums", "part_sums")
    builds = dict.fromkeys(names, 4) | {"sum_parts": 2, "policy_loss": 1}
    for kernel, count in builds.items():
        for arch in ("sm_80", "gfx942"):
            assert f"| {kernel}_kernel | {arch} | {count} |" in table
        assert f"| {kernel}_kernel | sm_75 | {min(count, 2)} |" in table
    assert table.strip().split("\n", 1)[1] in out.read_text()


# A report that finds something wrong, and what it says.
FAILURES = {
    "problems(['policy_loss'])": "sum_parts_kernel: no launch covered it",
    "problems([replace(of['policy_loss'], fp_fusion=None)])":
        "policy_loss_kernel: a launch left to Triton whether products and sums are one instruction",
    "problems(['logit_grads'], items=(report.ARCHITECTURES, 'sm_90', tiny_chip))":
        "bytes of shared memory, of 0",
    # Loads of one element each.
    "problems(['token_stats'], names=(report, 'judged', without_vectors))":
        "token_stats_kernel on sm_90: no vector loads",
    "problems(budget='one sweep', items=(sass.BUDGETS, 'one sweep', 1.0))":
        "one sweep (token_stats_kernel): 9.",
    # Two bf16 of each product.
    "problems(budget='entry_dots', items=(sass.LOADED, 'entry_dots_kernel', 5))":
        "entry_dots (entry_dots_kernel): logits that are not loaded in vectors, on sm_90",
    "[judged(0, 0, 'min.f32 %f1')] * (not judged(0, 0, 'max.NaN.f32 %f1'))": "hides NaN",
    # Each of the selects that sm_75 has beside minima and maxima.
    "[min(judged(0, 0, old.replace(x, '')) for x in selects)] * (not judged(0, 0, old))":
        "hides NaN",
    "[judged(8, 3)] * (not (judged(0, 0) or judged(16, 2)))": "3 times used in an innermost",
}  # fmt: skip
FINDING = """
import json, re
from contextlib import ExitStack
from unittest import mock

budgets = sass.budgeted(report.ARCHITECTURES["sm_90"].half)
report_judged = report.judged
tiny_chip = replace(report.ARCHITECTURES["sm_90"], shared_kib=0)
old = report.compiled(of["policy_loss"], "sm_75").asm["ptx"]
selects = re.findall("selp.f32 .*7FC00000.*", old)

def judged(stack, in_loops, ptx=None):
    usage = report.Usage(8, 0, stack, 0, spilled_in_loops=in_loops)
    return report_judged(usage, "sm_90", of["policy_loss"], ptx).problem

def without_vectors(usage, arch, launch, ptx):
    return report_judged(usage, arch, launch, ptx.replace(".v4", ""))

def problems(launches=(), budget=None, names=None, items=None):
    launches = [of[x] if isinstance(x, str) else x for x in launches]
    budgeted = {budget: budgets[budget]} if budget else {}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sass, "budgeted", lambda half: budgeted))
        if names:
            stack.enter_context(mock.patch.object(*names))
        if items:
            stack.enter_context(mock.patch.dict(items[0], {items[1]: items[2]}))
        return report.report(["sm_90"], launches, in_full=True)[1]

print(json.dumps([eval(code) for code in json.loads(sys.argv[1])]))
sys.exit(0)
"""


def test_finds():
    """The problems of each report, all from one process: some thirty builds."""
    found = json.loads(run(FINDING, json.dumps([*FAILURES])))
    for problems, (code, expected) in zip(found, FAILURES.items(), strict=True):
        assert expected in "\n".join(problems), code
    errors = run(
        "few[:] = [of['policy_loss']]\nsass.budgeted = lambda half: {}", "--arch", "sm_90", status=1
    )
    assert "FAILED sum_parts_kernel: no launch covered" in errors


SASS = """
        /*0000*/  LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
        /*0010*/  BAR.SYNC.DEFER_BLOCKING 0x0 ;   /* 0x0 */
        /*0020*/  @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/  LDG.E.ENL2.256 R8, R4, desc[UR4][R2.64] ;
        /*0040*/  @P1 LDG.E.64 R2, desc[UR4][R2.64] ;
        /*0050*/  STG.E.64 desc[UR4][R2.64], R4 ;
        /*0060*/  SHFL.BFLY PT, R3, R2, 0x1, 0x1f ;
        /*0070*/  @P2 LDL.LU R1, [R1+0x8] ;
        /*0080*/  BRA.U UP0, 0x20 ;
        /*0090*/  @!P5 BRA 0x10 ?trans6 ;
        /*00a0*/  EXIT ;
        /*00b0*/  CALL.REL.NOINC 0x4e70 ;         /* threads that have parted */
        /*00c0*/  BRA 0x60 ;
        /*00d0*/  BRA 0xd0;
"""


def test_innermost_loops_are_read():
    (loop,) = compile_sass.innermost_loops(SASS)
    assert loop == compile_sass.Loop(
        instructions=7, barriers=0, shuffles=1, vector_loads=2, other_loads=1, vector_stores=0,
        other_stores=1, loaded_bytes=48, spilled=1,
    )  # fmt: skip
    launch = SimpleNamespace(kernel="", constants=[("BLOCK_V", 2048)], num_warps=8)
    problems = " ".join(compile_sass.problems_of("one sweep", launch, [loop], "sm_80"))
    assert "1 shuffles" in problems and "1 stores in its loop that are not vectors" in problems
    # Unrolled: twelve logits, where a block has eight per thread.
    assert compile_sass.logits_per_thread(launch, loop) == 12
    # sm_75 has budgets of its own, and so has the loop over the last blocks.
    slow, last = (loop._replace(instructions=n * 12, shuffles=0, other_stores=0) for n in (13, 15))
    assert compile_sass.problems_of("token_stats", launch, [slow, last], "sm_75") == []
    (problem,) = compile_sass.problems_of("token_stats", launch, [slow, last], "sm_80")
    assert "13.0 instructions per logit, of 12, on sm_80" in problem


def test_a_table_that_is_not_the_stored_one_is_seen():
    rows = [f"| {kernel} | {arch} | 2 | 8-9 |" for kernel in "ab" for arch in ("sm_80", "sm_90")]
    stored, few = "\n".join(["# Title", "", *rows]), [rows[0], rows[2].replace("9", "99")]
    assert differences(stored, ["", "", rows[0], rows[2]], ["sm_80"]) == []
    assert differences(stored, ["", "", *few], ["sm_80"]) == [f"- {rows[2]}", f"+ {few[1]}"]


def test_every_pair_of_options_of_the_kernels_is_launched():
    """Without a KL its own options have no effect; a sample has the same pairs."""
    code = """
from itertools import combinations, product
flags = {}
for launch in launches:
    for name, value in launch.constants:
        flags.setdefault((launch.kernel, name), set()).add(value)
drawn = [dict(x.constants) for x in launches if x.kernel == "policy_loss_kernel"]
for a, b in combinations([n for n in drawn[0] if n != "BLOCK_N"], 2):
    for u, v in product(flags["policy_loss_kernel", a], flags["policy_loss_kernel", b]):
        needs_kl = any(n.startswith(("HAS_KL_", "KL_")) for n in (a, b))
        if needs_kl and (("HAS_KL", False) in ((a, u), (b, v))):
            continue
        assert any(x[a] == u and x[b] == v for x in drawn), (a, u, b, v)

def pairs(launches):
    return {
        (x.kernel, *pair) for x in launches
        for pair in combinations((*x.constants, *x.signature, *x.divisible), 2)
    }
sample = report.sample(launches)
assert {x.kernel for x in sample} == report.kernels().keys() and pairs(sample) == pairs(launches)
assert len(sample) < len(launches) / 3
sys.exit(0)
"""
    run(code)

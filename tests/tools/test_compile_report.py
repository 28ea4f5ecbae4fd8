"""The gate for GPUs that are not there: it must see what it is there to see.

In processes of their own, as the kernels of this one are the interpreter's.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = """
import sys
from dataclasses import replace
from benchmarks import compile_report as report
from grpo_kernels.backends import triton_backend
launches = report.all_launches()
few = {}
for launch in launches:
    few.setdefault(launch.kernel, launch)
few = list(few.values())
report.all_launches = lambda: few
"""


def run(code, *args):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", f"{SETUP}\n{code}\nreport.main(sys.argv[1:])", *args]
    root = Path(__file__).parents[2]
    return subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=300)


def test_table(tmp_path):
    """One configuration of each kernel; all of them are what `make compile-report` is for."""
    out = tmp_path / "compile.md"
    result = run("", "--arch", "sm_80", "gfx942", "--markdown", str(out))
    assert result.returncode == 0, result.stderr
    for kernel in ("token_stats", "logit_grads", "column_scores", "policy_loss"):
        for arch in ("sm_80", "gfx942"):
            assert f"| {kernel}_kernel | {arch} | 2 |" in result.stdout
    assert result.stdout.strip() in out.read_text()


@pytest.mark.parametrize(
    ("damage", "message"),
    (
        ("few.pop(0)", "no launch covered it"),
        ("report.ARCHITECTURES['sm_90'] = (('cuda', 90, 32), 0)", "bytes of shared memory, of 0"),
        # Far more than the registers hold.
        (
            "x = next(x for x in few if x.kernel == 'logit_grads_kernel')\n"
            "constants = dict(x.constants) | {'BLOCK_V': 32768}\n"
            "few[few.index(x)] = replace(x, num_warps=4, constants=tuple(constants.items()))",
            "bytes of stack",
        ),
        # What comes of loads one by one.
        (
            "judged = report.judged\n"
            "report.judged = lambda usage, arch, launch, aligned, ptx: judged(usage, arch, launch,"
            " aligned, ptx.replace('.v4', ''))",
            "token_stats_kernel on sm_90, aligned: no vector loads",
        ),
    ),
    ids=("uncovered", "shared_memory", "spills", "vectors"),
)
def test_fails(damage, message):
    result = run(damage, "--arch", "sm_90")
    assert result.returncode == 1 and f"{message}" in result.stderr, result.stderr


def test_a_table_that_is_not_the_stored_one_is_seen():
    from benchmarks.compile_report import differences

    rows = [f"| {kernel} | {arch} | 2 | 8-9 |" for kernel in "ab" for arch in ("sm_80", "sm_90")]
    stored, few = "\n".join(["# Title", "", *rows]), [rows[0], rows[2].replace("9", "99")]
    assert differences(stored, ["", "", *rows], ["sm_80", "sm_90"]) == []
    assert differences(stored, ["", "", rows[0], rows[2]], ["sm_80"]) == []
    changed = differences(stored, ["", "", *few], ["sm_80"])
    assert changed == [f"- {rows[2]}", f"+ {few[1]}"]


def test_a_hidden_nan_is_seen():
    code = """
clean = report.Usage(8, 0, 0, 0)
policy = next(x for x in launches if x.kernel == "policy_loss_kernel")
for ptx, problem in (("min.f32 %f1", "hides NaN"), ("max.NaN.f32 %f1", "")):
    found = report.judged(clean, "sm_90", policy, True, ptx).problem
    assert problem in found and bool(problem) == bool(found)
sys.exit(0)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_every_option_of_the_kernels_is_launched_both_ways():
    code = """
flags = {}
for launch in launches:
    for name, value in launch.constants:
        flags.setdefault((launch.kernel, name), set()).add(value)
one_valued = [k for k, v in flags.items() if len(v) < 2 and not k[1].startswith("BLOCK")]
assert not one_valued, one_valued
assert flags["policy_loss_kernel", "SURROGATE"] == {"clip", "cispo", "sapo", "reinforce", "dppo_tv"}
assert len(flags["policy_loss_kernel", "KL_ESTIMATOR"]) == 6

# Of the policy loss every pair of options; without a KL its own options have no effect.
from itertools import combinations, product
drawn = [dict(x.constants) for x in launches if x.kernel == "policy_loss_kernel"]
for a, b in combinations([n for n in drawn[0] if n != "BLOCK_N"], 2):
    for u, v in product(flags["policy_loss_kernel", a], flags["policy_loss_kernel", b]):
        needs_kl = any(n.startswith(("HAS_KL_", "KL_")) for n in (a, b))
        if needs_kl and (("HAS_KL", False) in ((a, u), (b, v))):
            continue
        assert any(x[a] == u and x[b] == v for x in drawn), (a, u, b, v)
sys.exit(0)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_what_the_launch_does_not_specialize_is_not_compiled_as_aligned():
    code = """
class Seen(Exception):
    pass

def source(fn, attrs, **_):
    raise Seen({fn.arg_names[place] for place, in attrs})

report.ASTSource = source
stats = next(x for x in few if x.kernel == "token_stats_kernel")
try:
    report.compiled((stats, "sm_90", True))
except Seen as seen:
    aligned, = seen.args
assert "logits_ptr" in aligned and not aligned & {"targets_ptr", "logps_ptr", "N"}, aligned
sys.exit(0)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr

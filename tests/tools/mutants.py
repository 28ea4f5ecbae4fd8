"""Damages the sources, one line at a time, and expects the fast tier to object.

    python -m tests.tools.mutants                 every damage; exit status 1 if one goes unseen
    python -m tests.tools.mutants --only softcap  those whose description has the word
    python -m tests.tools.mutants --write         and put the table into docs/testing.md

Each damage is made in a copy of the tree. The tests that are named with it run first; those of the
whole fast tier, if these saw nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.tools.damages import DAMAGES, Damage
from tests.tools.tables import write_table

ROOT = Path(__file__).parents[2]
COPIED = ("grpo_kernels", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "README.md")
PYTEST = (
    "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:randomly",
)  # fmt: skip
TESTS_FAILED = 1  # pytest's exit status; 2 and above are errors of another kind


class Result(NamedTuple):
    damage: Damage
    seen_by: str  # the test that failed first, or ""
    seconds: float
    error: str = ""


def damaged(text: str, damage: Damage) -> str:
    """The source with the damage; refuses one that does not fit it exactly once."""
    found = text.count(damage.old)
    if found != 1:
        raise ValueError(f"{damage.path}: expected {damage.old!r} once; found {found} times")
    return text.replace(damage.old, damage.new)


def check(damages: list[Damage]) -> None:
    for damage in damages:
        changed = damaged((ROOT / "grpo_kernels" / damage.path).read_text(), damage)
        compile(changed, damage.path, "exec")
        for name in damage.tests:
            if not (ROOT / "tests" / f"{name.split('::')[0]}.py").exists():
                raise ValueError(f"{damage.what}: no tests/{name}.py")


def run(damage: Damage) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(ROOT / name, tree / name)
        source = tree / "grpo_kernels" / damage.path
        source.write_text(damaged(source.read_text(), damage))
        start = time.monotonic()
        first = [f"tests/{name}".replace("::", ".py::", 1) if "::" in name else f"tests/{name}.py"
                 for name in damage.tests]  # fmt: skip
        rest = sorted(str(p.relative_to(tree)) for p in (tree / "tests").glob("test_*.py"))
        for files in (first, rest):
            done = subprocess.run(
                [sys.executable, *PYTEST, *files], cwd=tree, capture_output=True, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)},
            )  # fmt: skip
            seconds = time.monotonic() - start
            if done.returncode > TESTS_FAILED:
                return Result(damage, "", seconds, done.stdout[-2000:] + done.stderr[-2000:])
            if done.returncode == TESTS_FAILED:
                failed = re.search(r"^FAILED tests/(\S+?)(?:\[.*)?( - |$)", done.stdout, re.M)
                errored = re.search(r"^ERROR tests/(\S+)", done.stdout, re.M)
                seen = failed or errored
                return Result(damage, seen.group(1) if seen else "?", seconds)
        return Result(damage, "", seconds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", help="a word of the description or of the path")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true", help="the table into docs/testing.md")
    args = parser.parse_args(argv)
    chosen = [d for d in DAMAGES if args.only in d.what or args.only in d.path]
    check(chosen)
    results = []
    with ThreadPoolExecutor(args.workers) as pool:
        for result in pool.map(run, chosen):
            results.append(result)
            told = result.seen_by or (f"BROKEN\n{result.error}" if result.error else "NOT SEEN")
            print(f"{result.seconds:6.1f} s  {result.damage.what}: {told}", flush=True)
    missed = [r for r in results if not r.seen_by]
    print(f"{len(results) - len(missed)} of {len(results)} damages were seen")
    if args.write and chosen == DAMAGES:
        rows = [(r.damage.what, f"`{r.damage.path}`", f"`{r.seen_by or 'NOT SEEN'}`")
                for r in results]  # fmt: skip
        write_table("mutants", ("damage", "in", "seen first by"), rows)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Damages the sources, one line at a time, and expects tests to object.

    python -m tests.tools.mutants                 every damage; exit status 1 if one goes unseen
    python -m tests.tools.mutants --only softcap  those with the word in description or path
    python -m tests.tools.mutants --kernels       those of the kernels, by tests that run their PTX

Each damage is made in a copy of the tree. The test modules that are named with it run first, those
of several ranks among them; the whole fast tier, if these saw nothing. Undamaged, the tests must be
green. Damages of the kernels are for the named modules alone, which run the kernels' PTX.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.tools.damages import DAMAGES, KERNEL_DAMAGES, Damage

ROOT = Path(__file__).parents[2]
COPIED = (
    "grpo_kernels", "tests", "benchmarks", "examples", "docs", "packaging", "pyproject.toml",
    "README.md", "CONTRIBUTING.md",
)  # fmt: skip
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
FAST = ("-m", "not slow")
PTX = ("-p", "tests.ptx.plugin", "--ptx-arch", "90")
PASSED, FAILED = 0, 1  # exit statuses of pytest; others are errors of its own
NOT_SEEN = "NOT SEEN"


class Result(NamedTuple):
    """The test that failed first, if one did; the end of pytest's output, if it broke."""

    damage: Damage
    seen_by: str
    seconds: float
    error: str = ""


def damaged(text: str, damage: Damage) -> str:
    """Returns the source with the damage, whose anchor must occur once in one function."""
    bodies = [body for name, body in functions_of(text) if name == damage.function]
    counts = [body.count(damage.old) for body in bodies]
    if counts != [1]:
        name = f"{damage.path}, {damage.function}"
        raise ValueError(f"{name}: expected one function with {damage.old!r} once; found {counts}")
    return text.replace(bodies[0], bodies[0].replace(damage.old, damage.new))


def functions_of(text: str) -> Iterator[tuple[str, str]]:
    """Yields the qualified names and sources of functions."""
    nodes = [("", node) for node in ast.parse(text).body]
    for scope, node in nodes:
        if isinstance(node, ast.FunctionDef):
            yield scope + node.name, ast.get_source_segment(text, node) or ""
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            nodes += [(f"{scope}{node.name}.", x) for x in node.body]


def check(damages: Iterable[Damage]) -> None:
    """Refuses damages that do not fit the sources or name no tests."""
    for damage in damages:
        source = (ROOT / "grpo_kernels" / damage.path).read_text()
        compile(damaged(source, damage), damage.path, "exec")
        for name in damage.tests:
            if not (ROOT / "tests" / f"{name}.py").exists():
                raise ValueError(f"{damage.what}: expected modules in tests/; got {name}")


def copy_to(tree: Path) -> None:
    """A copy of what the fast tier reads."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)


def fast_tier() -> list[str]:
    """The modules of the fast tier."""
    return sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py"))


def tests_of(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of tests on the sources of the tree."""
    return subprocess.run(
        [sys.executable, *PYTEST, *arguments], cwd=tree, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)},
    )  # fmt: skip


def runs_of(damage: Damage, kernels: bool) -> list[tuple[str, ...]]:
    """The runs of pytest of which one must see the damage."""
    named = [f"tests/{name}.py" for name in damage.tests]
    if kernels:
        return [(*PTX, *FAST, *named)]
    # Tests in folders are marked slow by their place.
    marks = ("-m", "not nightly") if any("/" in name for name in damage.tests) else FAST
    return [(*marks, *named), (*FAST, *fast_tier())]


def run(damage: Damage, kernels: bool = False) -> Result:
    """Makes the damage in a copy of the tree and runs the tests there."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_to(tree)
        source = tree / "grpo_kernels" / damage.path
        source.write_text(damaged(source.read_text(), damage))
        for arguments in runs_of(damage, kernels):
            done = tests_of(tree, *arguments)
            seconds = time.monotonic() - start
            if done.returncode == FAILED:
                first = re.search(r"^(?:FAILED|ERROR) tests/([^\s\[]+)", done.stdout, re.M)
                return Result(damage, first[1] if first else "?", seconds)
            if done.returncode != PASSED:
                return Result(damage, "", seconds, done.stdout[-2000:] + done.stderr[-2000:])
    return Result(damage, "", seconds)


def undamaged_is_green(workers: int, chosen: list[Damage], kernels: bool) -> bool:
    """True if the tests pass on an undamaged copy; one that never passes sees everything."""
    named = sorted({f"tests/{name}.py" for damage in chosen for name in damage.tests})
    arguments = (*PTX, *named) if kernels else fast_tier()
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        done = tests_of(Path(folder), *FAST, "-n", str(workers), *arguments)
    if done.returncode != PASSED:
        print(done.stdout[-4000:], done.stderr[-2000:])
    return done.returncode == PASSED


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.mutants", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", default="", help="a word of the description or of the path")
    parser.add_argument("--kernels", action="store_true", help="damages of the kernels instead")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    damages = KERNEL_DAMAGES if args.kernels else DAMAGES
    chosen = [damage for damage in damages if args.only in damage.what + damage.path]
    check(chosen)
    if not undamaged_is_green(args.workers, chosen, args.kernels):
        print("The tests fail without any damage.")
        return 1
    results = []
    with ThreadPoolExecutor(args.workers) as pool:
        for result in pool.map(partial(run, kernels=args.kernels), chosen):
            results.append(result)
            outcome = result.seen_by or (f"BROKEN\n{result.error}" if result.error else NOT_SEEN)
            print(f"{result.seconds:6.1f} s  {result.damage.what}: {outcome}", flush=True)
    seen = sum(bool(result.seen_by) for result in results)
    print(f"{seen} of {len(results)} damages were seen")
    return 0 if seen == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())

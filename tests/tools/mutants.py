"""Damages the sources, one line at a time, and expects tests to object.

    python -m tests.tools.mutants                 every damage; exit status 1 if one goes unseen
    python -m tests.tools.mutants --only softcap  those with the word in their line
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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
NOT_SEEN, BROKEN = "NOT SEEN", "BROKEN"


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
                raise ValueError(f"{damage}: expected modules in tests/; got {name}")


def fast_tier() -> list[str]:
    """The modules of the fast tier."""
    return sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py"))


def runs_of(damage: Damage, kernels: bool) -> list[tuple[str, ...]]:
    """The runs of pytest of which one must see the damage."""
    named = [f"tests/{name}.py" for name in damage.tests]
    if kernels:
        return [(*PTX, *FAST, *named)]
    # Tests in folders are marked slow by their place.
    marks = ("-m", "not nightly") if any("/" in name for name in damage.tests) else FAST
    return [(*marks, *named), (*FAST, *fast_tier())]


def first_failure(runs: Iterable[tuple[str, ...]], damage: Damage | None = None) -> str:
    """Runs tests in a copy of the tree; returns the first that fails, or how pytest broke."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "results")
                shutil.copytree(ROOT / name, tree / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, tree / name)
        if damage:
            source = tree / "grpo_kernels" / damage.path
            source.write_text(damaged(source.read_text(), damage))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
        for arguments in runs:
            command = [sys.executable, *PYTEST, *arguments]
            done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
            if done.returncode == FAILED:
                first = re.search(r"^(?:FAILED|ERROR) tests/([^\s\[]+)", done.stdout, re.M)
                return first[1] if first else "?"
            if done.returncode != PASSED:
                return f"{BROKEN}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.mutants", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", default="", help="a word of the line in damages.py")
    parser.add_argument("--kernels", action="store_true", help="damages of the kernels instead")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    damages = KERNEL_DAMAGES if args.kernels else DAMAGES
    chosen = [damage for damage in damages if args.only in str(damage)]
    check(chosen)
    named = sorted({f"tests/{name}.py" for damage in chosen for name in damage.tests})
    undamaged = (*PTX, *named) if args.kernels else fast_tier()
    # Tests that never pass would see everything.
    if failure := first_failure([(*FAST, "-n", str(args.workers), *undamaged)]):
        print(f"The tests fail without any damage: {failure}")
        return 1

    def is_seen(damage: Damage) -> bool:
        failure = first_failure(runs_of(damage, args.kernels), damage)
        print(f"{damage}: {failure or NOT_SEEN}", flush=True)
        return bool(failure) and not failure.startswith(BROKEN)

    with ThreadPoolExecutor(args.workers) as pool:
        seen = sum(pool.map(is_seen, chosen))
    print(f"{seen} of {len(chosen)} damages were seen")
    return 0 if seen == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())

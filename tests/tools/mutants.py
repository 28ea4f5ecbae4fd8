"""Damages the sources, one line at a time, and expects tests to object.

    python -m tests.tools.mutants                 every damage; exit status 1 if one goes unseen
    python -m tests.tools.mutants --only softcap  those with the word in their line
    python -m tests.tools.mutants --kernels       those of the kernels, by tests that run their PTX

Each damage is made in a copy of the tree. The test modules that are named with it run first, the
whole fast tier if these saw nothing. Undamaged, the tests must be green.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.tools.damages import DAMAGES, KERNEL_DAMAGES, Damage

ROOT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m")
PTX = ("-p", "tests.ptx.plugin", "--ptx-arch", "90")
FAST = [f"tests/{path.name}" for path in sorted((ROOT / "tests").glob("test_*.py"))]
NOT_SEEN, BROKEN = "NOT SEEN", "BROKEN"


def damaged(damage: Damage) -> str:
    """Returns a source with a damage, whose anchor must occur once in its function."""
    text = (ROOT / "grpo_kernels" / damage.path).read_text()
    bodies = [("", node) for node in ast.parse(text).body]
    for scope, node in bodies:  # which grows
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            bodies += [(f"{scope}{node.name}.", x) for x in node.body]
    functions = [x for scope, x in bodies if scope + getattr(x, "name", "") == damage.function]
    sources = [ast.get_source_segment(text, x) or "" for x in functions]
    if (counts := [source.count(damage.old) for source in sources]) != [1]:
        raise ValueError(f"{damage}: expected the text once; found {counts}")
    text = text.replace(sources[0], sources[0].replace(damage.old, damage.new))
    compile(text, damage.path, "exec")
    return text


def first_failure(runs: list[tuple[str, ...]], damage: Damage | None = None) -> str:
    """Runs tests in a copy of the tree; returns the first that fails, or how pytest broke."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "*.egg-info")
        shutil.copytree(ROOT, tree, ignore=ignored)
        if damage:
            (tree / "grpo_kernels" / damage.path).write_text(damaged(damage))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
        for run in runs:
            command = [*PYTEST, *run]
            done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
            if done.returncode == 1:
                first = re.search(r"^(?:FAILED|ERROR) tests/([^\s\[]+)", done.stdout, re.M)
                return first[1] if first else "?"
            if done.returncode:
                return f"{BROKEN}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutants")
    parser.add_argument("--only", default="", help="a word of the line in damages.py")
    parser.add_argument("--kernels", action="store_true", help="damages of the kernels instead")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    damages = KERNEL_DAMAGES if args.kernels else DAMAGES
    chosen = [damage for damage in damages if args.only in str(damage)]
    named = {x: [f"tests/{name}.py" for name in x.tests] for x in chosen}
    every = sorted({name for names in named.values() for name in names})
    undamaged = [*PTX, *every] if args.kernels else FAST
    # Tests that never pass would see everything.
    if failure := first_failure([("not slow", "-n", str(args.workers), *undamaged)]):
        print(f"The tests fail without any damage: {failure}")
        return 1

    def is_seen(damage: Damage) -> bool:
        # Tests in folders are marked slow by their place.
        runs = [("not nightly", *named[damage]), ("not slow", *FAST)]
        runs = [("not slow", *PTX, *named[damage])] if args.kernels else runs
        failure = first_failure(runs, damage)
        print(f"{damage}: {failure or NOT_SEEN}", flush=True)
        return bool(failure) and not failure.startswith(BROKEN)

    with ThreadPoolExecutor(args.workers) as pool:
        seen = sum(pool.map(is_seen, chosen))
    print(f"{seen} of {len(chosen)} damages were seen")
    return 0 if seen == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())

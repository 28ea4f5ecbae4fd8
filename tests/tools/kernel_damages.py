"""Damages the Triton kernels, or their PTX, and shows who sees it.

    python -m tests.tools.kernel_damages                all; exit status 1 if one goes unseen
    python -m tests.tools.kernel_damages --only mask    those with the word in description or path
    python -m tests.tools.kernel_damages --write        puts who saw how many into docs/testing.md

Each damage is made in a copy of the tree, or where a kernel's PTX is handed to the emulator. One
small check of `kernel_checks` then runs from PTX and interpreted, and launches of the damaged
kernel are compiled as `benchmarks.compile_report` does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.tools.damages import Damage
from tests.tools.kernel_damages_table import DAMAGES, UNSEEN, KernelDamage
from tests.tools.mutants import ROOT, copy_to, damaged
from tests.tools.tables import write_table

# Imports once what no damage is in, and forks to run a module in a folder.
_WORKER = """
import json, os, runpy, signal, sys, torch, triton
for line in sys.stdin:
    folder, *sys.argv = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        signal.alarm(300)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        sys.stdout.flush()
        os._exit(0)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
NOTHING, NOT_ASKED, TOO_LARGE = "nothing", "-", "not at this size"


class Result(NamedTuple):
    """What each of the three says of a damage."""

    damage: KernelDamage
    emulated: str
    interpreted: str
    compiled: str

    @property
    def as_expected(self) -> bool:
        return (self.emulated == NOTHING) == (self.damage.what in UNSEEN)


class Worker:
    """Runs modules in processes of their own that begin with torch and Triton imported."""

    def __init__(self, **env: str) -> None:
        inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER], env=inherited | {"OMP_NUM_THREADS": "1"} | env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd="/",
        )  # fmt: skip

    def run(self, tree: Path, *arguments: str) -> str:
        """The last line of a module's output, or how it ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([str(tree), *arguments]), file=self.process.stdin, flush=True)
        last = ""
        for line in self.process.stdout:
            if line.startswith("ended "):
                code = int(line.split()[1])
                break
            last = line.strip()
        else:
            raise RuntimeError(f"{arguments}: the worker ended")
        if code > 0:
            raise RuntimeError(f"{arguments}: ended with {code}")
        ended = {0: "", -signal.SIGALRM: "does not end"}.get(code, "the process crashes")
        return json.dumps({"ended": ended}) if ended else last


def gate(names: list[str]) -> str:
    """What is wrong with one launch of each kernel, and with those that have a budget."""
    from benchmarks import compile_report, compile_sass

    few: dict[str, Any] = {}
    for launch in compile_report.all_launches():
        few.setdefault(launch.kernel, launch)
    problems = [compile_report.used((few[name], "sm_90")).problem for name in names]
    for name, launch in compile_sass.budgeted().items():
        if launch.kernel in names:
            loops = compile_report.loops_of((launch, "sm_90"))
            problems += compile_sass.problems_of(name, launch, loops)
    return "; ".join(sorted({problem.split(": ")[-1] for problem in problems if problem}))


def told(line: str) -> str:
    """The outcome of a check, in words."""
    outcome = json.loads(line)
    if "ended" in outcome:
        return str(outcome["ended"])
    wrong, raised, found = outcome["off"], outcome["raised"], outcome["found"]
    numbers = ["raises " + raised] if raised else []
    if wrong:
        numbers.append(f"off by {wrong:.0e}" if wrong < float("inf") else "not finite")
    return "; ".join([*numbers, *found]) or NOTHING


class Judges:
    """The emulator, the interpreter and the compile gate."""

    def __init__(self) -> None:
        self.compiled, self.interpreted = Worker(), Worker(TRITON_INTERPRET="1")

    def emulate(self, tree: Path, *arguments: str) -> str:
        return told(self.compiled.run(tree, "tests.tools.kernel_checks", *arguments))

    def interpret(self, tree: Path, name: str) -> str:
        if name.startswith("real_"):
            return TOO_LARGE
        return told(self.interpreted.run(tree, "tests.tools.kernel_checks", name))

    def compile(self, tree: Path, names: str) -> str:
        found = self.compiled.run(tree, "tests.tools.kernel_damages", "--gate", *names.split())
        return found or NOTHING

    def of(self, damage: KernelDamage) -> Result:
        if damage.edit:
            said = self.emulate(ROOT, damage.check, "--edit", damage.edit, "--at", str(damage.at))
            return Result(damage, said, NOT_ASKED, NOT_ASKED)
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            copy_to(tree)
            for old, new in damage.changes:
                source = tree / "grpo_kernels" / damage.path
                change = Damage(damage.what, damage.path, old, new, ())
                source.write_text(damaged(source.read_text(), change))
            emulated = self.emulate(tree, damage.check)
            interpreted = self.interpret(tree, damage.check)
            compiled = self.compile(tree, damage.kernels) if damage.kernels else NOT_ASKED
        return Result(damage, emulated, interpreted, compiled)

    def see_nothing(self, names: set[str]) -> bool:
        """True if nothing is seen of checks without a damage; else prints what."""
        clean = True
        for name in sorted(names):
            for said in (self.emulate(ROOT, name), self.interpret(ROOT, name)):
                if said not in (NOTHING, TOO_LARGE):
                    print(f"{name}, undamaged: {said}")
                    clean = False
        return clean


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.kernel_damages", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", default="", help="a word of the description or of the path")
    parser.add_argument("--write", action="store_true", help="the counts into docs/testing.md")
    parser.add_argument("--gate", nargs="+", help="compiles these kernels, and no more")
    args = parser.parse_args(argv)
    chosen = [damage for damage in DAMAGES if args.only in damage.what + damage.path]
    if args.gate:
        print(gate(args.gate))
        return 0
    judges = Judges()
    if not judges.see_nothing({d.check for d in chosen if d.changes or d.edit}):
        return 1
    head = ("damage", "in", "emulator", "interpreter", "compile gate")
    print(*("| " + " | ".join(head) + " |", "|---" * len(head) + "|"), sep="\n", flush=True)
    results, counts = [], []
    for damage in chosen:
        result = judges.of(damage)
        results.append(result)
        print("| " + " | ".join((damage.what, damage.path, *result[1:])) + " |", flush=True)
    for place, who in enumerate(head[2:], 1):
        asked = [r[place] for r in results if r[place] not in (NOT_ASKED, TOO_LARGE)]
        counts.append((who, str(sum(said != NOTHING for said in asked)), str(len(asked))))
        print(f"{who}: {counts[-1][1]} of {len(asked)}")
    if args.write:
        write_table("kernel damages", ("who looks", "sees", "of"), counts)
    return 0 if all(result.as_expected for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())

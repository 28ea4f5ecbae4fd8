"""Tables of what the package refuses: calls, changes of their good arguments, and messages.

A message is the beginning of the error's text; "..." in it stands for anything. Each table is run
by `test_refusals.py` or `peers/test_refusals.py`, and has to reach every check in its folders:
`checks_of` finds these in the source, and `refusal_of` those that a row passes.
"""

import ast
import contextlib
import functools
import io
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import grpo_kernels
from grpo_kernels.base.checks import ValueChecks

PACKAGE = Path(grpo_kernels.__file__).parent
# Functions that raise for their caller, besides those whose names begin with check.
HELPERS = {"scalar", "require", "_refuse", "_expect", "one_per_token"}
# Errors that say what to change: those of a command, a run's sampler or reward function, too.
_OF_A_USER = (ValueError, TypeError, OSError, ImportError, RuntimeError, SystemExit)
Site = tuple[str, int]  # a file of the package, and a line


@dataclass(frozen=True, eq=False)
class Row:
    """A call of good arguments but for `changes`, and the error."""

    call: Callable[..., object]
    message: str
    changes: dict[str, Any]


@dataclass
class Refusal:
    """The error of a row, None for none; and the places in the package that it passed."""

    error: type[BaseException] | None = None
    text: str = ""
    sites: set[Site] = field(default_factory=set)


def table(call: Callable[..., object], *rows: tuple[str, dict[str, Any]]) -> list[Row]:
    """Rows `(message, changes)` of one call."""
    return [Row(call, message, changes) for message, changes in rows]


def fits(message: str, text: str) -> bool:
    pattern = ".*".join(map(re.escape, message.split("...")))
    return re.match(pattern, text, re.DOTALL) is not None


def check(row: Row) -> None:
    """Asserts that a row is refused, and how."""
    refusal = refusal_of(row)
    assert refusal.error is not None, "nothing was raised"
    if refusal.error in (ValueError, TypeError):
        of_a_type = re.search("expected (dtype|a tensor;|a dense|a bool)", refusal.text)
        of_a_value = re.search("expected (shape|a finite|ids)", refusal.text)
        assert refusal.error is not (ValueError if of_a_type else TypeError if of_a_value else None)
    assert fits(row.message, refusal.text), refusal.text


@functools.cache
def refusal_of(row: Row) -> Refusal:
    """Makes the row's call, in a folder of its own."""
    added: dict[str, Site] = {}
    add = ValueChecks.add

    def noted(self: ValueChecks, offenders: object, message: str) -> None:
        caller = sys._getframe(1)
        added[message] = (_name(caller.f_code.co_filename), caller.f_lineno)
        add(self, offenders, message)

    printed = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stderr(printed),
    ):
        patch.chdir(folder)
        patch.setattr(ValueChecks, "add", noted)
        try:
            row.call(**row.changes)
        except _OF_A_USER as error:
            text = str(error)
            if isinstance(error, SystemExit):  # of a command, which says why in a few lines
                text = printed.getvalue().partition("error: ")[2]
                assert error.code == 2 and "Traceback" not in text and text.count("\n") < 25
            sites = {site for e in _chain(error) for site in _passed(e)}
            sites |= {site for message, site in added.items() if message in text}
            return Refusal(type(error), text, sites)
    return Refusal()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error, and those of which it came."""
    while error is not None:
        if isinstance(error, (ValueError, TypeError)):
            yield error
        error = error.__cause__ or error.__context__


def _passed(error: BaseException) -> Iterator[Site]:
    """Yields the lines of the package that the error passed on its way."""
    frame = error.__traceback__
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        if path.startswith(str(PACKAGE)):
            yield _name(path), frame.tb_lineno
        frame = frame.tb_next


def _name(path: str) -> str:
    return str(Path(path).relative_to(PACKAGE)) if path.startswith(str(PACKAGE)) else path


def checks_of(*places: str) -> list[tuple[str, str, range]]:
    """Finds raises of ValueError and TypeError in these folders, and calls of checks.

    Each as `file: function`, its code, and its lines.
    """
    found, helpers = [], HELPERS | _checks()
    for path in (PACKAGE / place for place in places):
        for file in sorted(path.rglob("*.py") if path.is_dir() else [path]):
            for function, node in _nodes(ast.parse(file.read_text()), ""):
                if _raises(node) or _called(node) in helpers or _adds(node):
                    lines = range(node.lineno, node.end_lineno + 1)
                    found.append((f"{_name(str(file))}: {function}", ast.unparse(node), lines))
    return found


def missed(rows: list[Row], *places: str) -> dict[str, str]:
    """The checks in these folders that no row passes: their code by `file: function`."""
    passed = {site for row in rows for site in refusal_of(row).sites}
    return {
        where: code
        for where, code, lines in checks_of(*places)
        if passed.isdisjoint((where.partition(":")[0], line) for line in lines)
    }


def _nodes(tree: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    """Yields all nodes, with the name of the function around each."""
    for node in ast.iter_child_nodes(tree):
        yield function, node
        inside = node.name if isinstance(node, ast.FunctionDef) else function
        yield from _nodes(node, inside)


def _raises(node: ast.AST) -> bool:
    error = node.exc if isinstance(node, ast.Raise) else None
    return isinstance(error, ast.Call) and _called(error) in ("ValueError", "TypeError")


def _called(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "id", None) or getattr(node.func, "attr", None)


def _adds(node: ast.AST) -> bool:
    """True for a `checks.add(...)`."""
    if _called(node) != "add" or not isinstance(node.func, ast.Attribute):
        return False
    return "checks" in ast.unparse(node.func.value)


@functools.cache
def _checks() -> frozenset[str]:
    """The package's functions named check... that raise these errors, or whose checks do."""
    functions = {
        node.name: node
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and re.match("_?check_", node.name)
    }
    names: set[str] = set()
    while True:
        more = {
            name
            for name, function in functions.items()
            if any(_raises(x) or _called(x) in HELPERS | names for x in ast.walk(function))
        }
        if more <= names:
            return frozenset(names)
        names |= more

"""Tables of what the package refuses: calls, changes of their good arguments, and messages.

A message is the beginning of the error's text; "..." in it stands for anything. `check` runs the
table of some folders, which has to reach every check in these: `_checks_of` finds them in the
source, and `_refusal_of` those that a row passes.
"""

import ast
import contextlib
import io
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import grpo_kernels
from grpo_kernels.base.checks import ValueChecks

PACKAGE = Path(grpo_kernels.__file__).parent
# Functions that raise for their caller, besides those whose names begin with check_.
HELPERS = {"scalar", "require", "_refuse", "_expect", "one_per_token"}
# Functions with such names that raise none or other errors, or only add to value checks.
NO_HELPERS = {
    "check_agreement", "check_call", "check_has", "check_ids", "check_is_due", "check_package",
    "check_same_support", "check_target_ids", "check_took_part", "check_type", "check_version",
}  # fmt: skip
# Errors that say what to change: those of a command, a run's sampler or reward function, too.
_OF_A_USER = (ValueError, TypeError, OSError, ImportError, RuntimeError, SystemExit)
Site = tuple[str, int]  # a file and a line


@dataclass(frozen=True, eq=False)
class Row:
    """A call of good arguments but for `changes`, and the error."""

    call: Callable[..., object]
    message: str
    changes: dict[str, Any]


def table(call: Callable[..., object], *rows: tuple[str, dict[str, Any]]) -> list[Row]:
    """Rows `(message, changes)` of one call."""
    return [Row(call, message, changes) for message, changes in rows]


def check(rows: list[Row], places: Collection[str], unreached: Collection[str] = ()) -> None:
    """Asserts that each row is refused as it says, and that no check is missed but `unreached`."""
    wrong, passed = [], set()
    for row in rows:
        error, text, sites = _refusal_of(row)
        passed |= sites
        pattern = ".*".join(map(re.escape, row.message.split("...")))
        of_a_type = re.search("expected (dtype|a tensor;|a dense|a bool)", text)
        of_a_value = re.search("expected (shape|a finite|ids)", text)
        other = ValueError if of_a_type else TypeError if of_a_value else None
        if not isinstance(error, _OF_A_USER) or type(error) is other:
            wrong.append(f"{row.message}: raised {error!r}")
        elif not re.match(pattern, text, re.DOTALL):
            wrong.append(f"{row.message}: said {text}")
    assert not wrong, "\n".join(wrong)
    missed = {where for where, sites in _checks_of(*places) if passed.isdisjoint(sites)}
    assert missed == {*unreached}


def _refusal_of(row: Row) -> tuple[BaseException | None, str, set[Site]]:
    """Makes the row's call in a folder of its own; returns its error, and what this passed."""
    added: dict[str, Site] = {}
    add = ValueChecks.add

    def noted(self: ValueChecks, offenders: object, message: str) -> None:
        caller = sys._getframe(1)
        added[message] = caller.f_code.co_filename, caller.f_lineno
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
        except (Exception, SystemExit) as error:
            text = str(error)
            if isinstance(error, SystemExit):  # of a command, which says why in a few lines
                text = printed.getvalue().partition("error: ")[2]
                assert error.code == 2 and "Traceback" not in text and text.count("\n") < 25
            values = {site for message, site in added.items() if message in text}
            return error, text, {*_passed(error), *values}
    return None, "", set()


def _passed(error: BaseException | None) -> Iterator[Site]:
    """Yields the lines that the error passed on its way, and those of which it came."""
    while error is not None:
        if isinstance(error, (ValueError, TypeError)):
            for frame, line in traceback.walk_tb(error.__traceback__):
                yield frame.f_code.co_filename, line
        error = error.__cause__ or error.__context__


def _checks_of(*places: str) -> Iterator[tuple[str, set[Site]]]:
    """Yields raises of ValueError and TypeError in these folders, and calls of checks.

    Each as `file: function`, and its lines.
    """
    for path in (PACKAGE / place for place in places):
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            name, tree = file.relative_to(PACKAGE), ast.parse(file.read_text())
            for function, node in _nodes(tree, ""):
                if _is_check(node):
                    lines = range(node.lineno, node.end_lineno + 1)
                    yield f"{name}: {function}", {(str(file), line) for line in lines}


def _nodes(tree: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    """Yields all nodes, with the name of the function around each."""
    for node in ast.iter_child_nodes(tree):
        yield function, node
        inside = node.name if isinstance(node, ast.FunctionDef) else function
        yield from _nodes(node, inside)


def _is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):
        return _called(node.exc) in ("ValueError", "TypeError")
    called = _called(node) or ""
    if called == "add" and isinstance(node.func, ast.Attribute):
        return "checks" in ast.unparse(node.func.value)
    return called in HELPERS or bool(re.match("_?check_", called) and called not in NO_HELPERS)


def _called(node: ast.AST | None) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "id", None) or getattr(node.func, "attr", None)

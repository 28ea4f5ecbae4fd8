"""`Patch`: replaces names of a framework, and restores them; and checks before a patch."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from types import TracebackType
from typing import Any

import torch

from ..base.checks import version_numbers
from ..head.execution import Execution, check_execution
from ..head.lm_head import LMHead

_MARK = "_of_grpo_kernels"
# An owner (a module or a class), one of its names, and the replacement.
Replacement = tuple[Any, str, Any]


class Patch:
    """Replaces names of other packages until `undo()`, or the end of a `with` block.

    Raises:
        RuntimeError: a name is replaced already; then nothing is replaced.
    """

    def __init__(self, replacements: Iterable[Replacement]) -> None:
        self._own: list[Replacement] = []
        new = list(replacements)
        for owner, name, _ in new:
            if is_ours(vars(owner)[name]):
                raise RuntimeError(
                    f"{type(self).__name__}: {owner.__name__}.{name} is patched already: call "
                    "undo() on the first patch"
                )
        for owner, name, ours in new:
            self._own.append((owner, name, vars(owner)[name]))
            setattr(ours, _MARK, True)
            setattr(owner, name, ours)

    def undo(self) -> None:
        """Restores the replaced names; a second call does nothing."""
        while self._own:
            setattr(*self._own.pop())

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


def is_ours(replaced: Any) -> bool:
    """Returns True if a `Patch` has put this object in place of another."""
    return _MARK in getattr(replaced, "__dict__", {})


def check_version(package: str, oldest: str, before: str | None = None) -> None:
    """Checks that a framework is installed, and neither too old nor too new.

    `oldest` is the first version that works, `before` the first newer one that does not, if known.

    Raises:
        ImportError: naming the expected versions and the installed one.
    """
    requirement = f"{package}>={oldest}" + (f",<{before}" if before else "")
    try:
        got = metadata.version(package)
    except metadata.PackageNotFoundError:
        got = "none"
    ok = got != "none" and version_numbers(oldest) <= version_numbers(got)
    if not ok or (before and version_numbers(got) >= version_numbers(before)):
        raise ImportError(f"expected {requirement}; got {got}: pip install '{requirement}'")


def check_head_options(execution: Execution, **head_options: Any) -> None:
    """Checks options of later calls over heads, now; `head_options` are of `LMHead`.

    Raises:
        TypeError, ValueError: naming the option, what was expected and what came.
    """
    LMHead(torch.zeros(1, 1, dtype=torch.float32, device="cpu"), **head_options)
    check_execution(execution)

"""The kinds of values that options may have, and values that a text names."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..base.checks import check_choice, check_number

_KINDS: dict[Any, tuple[type, ...]] = {
    bool: (bool,), str: (str,), int: (int,), float: (int, float),
}  # fmt: skip


def kinds_of(config: type[Any]) -> dict[str, tuple[Any, ...]]:
    """The types that each option may have: those of a union, or one."""
    hints = get_type_hints(config)
    unions = (Union, UnionType)
    return {
        name: get_args(hint) if get_origin(hint) in unions else (hint,)
        for name, hint in hints.items()
    }


def check_types(config: Any, left_out: Collection[str]) -> None:
    """Refuses an option of another kind.

    Raises:
        TypeError, ValueError: names the option, what was expected and what came.
    """
    kinds_by_name = kinds_of(type(config))
    for its in fields(config):
        if its.name in left_out:
            continue
        value, kinds = getattr(config, its.name), kinds_by_name[its.name]
        if (value is None and NoneType in kinds) or len({*kinds} - {NoneType}) != 1:
            continue
        kind = next(kind for kind in kinds if kind is not NoneType)
        if get_origin(kind) is Literal:
            check_choice(its.name, value, get_args(kind))
        elif kind in (int, float):
            check_number(its.name, value)
            if kind is int and not isinstance(value, int):
                raise TypeError(f"{its.name}: expected a whole number; got {value!r}")
        elif not _is_a(value, kind):
            expected = {bool: "true or false", str: "a string"}.get(kind, f"a {kind}")
            raise TypeError(f"{its.name}: expected {expected}; got {value!r}")


def imported(option: str, name: str) -> Callable[..., Any]:
    """The function of `module:function`, of a module here or installed.

    Raises:
        ValueError: there is no such module, or no such function in it.
    """
    module, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # as `python -m` has it, not a script
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option}: expected module:function; got {name!r} ({error})") from error
    if not callable(found):
        raise ValueError(f"{option}: expected a function; got {name} = {found!r}")
    return found


def value_of(text: Any) -> Any:
    """The number or bool that a text is; other texts as they are, and what is no text."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError, TypeError):
        return text


def _is_a(value: Any, kind: Any) -> bool:
    """False if a value is not of a kind that is known; an option of one's own may have others."""
    if get_origin(kind) is dict:
        return isinstance(value, dict)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_a(x, *get_args(kind)) for x in value)
    return isinstance(value, _KINDS.get(kind, (object,)))

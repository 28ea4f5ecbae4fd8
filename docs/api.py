"""Writes docs/api.md from the signatures and docstrings of the public names: `make api`.

The source is parsed, not imported, so that the page needs no peer installed and is the same for
every version of Python. A name that a package imports is followed to where it is defined.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
# Each module and its public names; None: those in `__all__`.
MODULES: dict[str, tuple[str, ...] | None] = {
    "grpo_kernels": None,
    "grpo_kernels.experimental": None,
    "grpo_kernels.losses": ("Loss",),
    "grpo_kernels.tokens": ("Tokens",),
    "grpo_kernels.integrations.transformers": (
        "attach_fused_head", "detach_fused_head", "Objective", "FusedHeadOutput",
    ),
    "grpo_kernels.integrations.generation": ("SupportRecorder",),
    "grpo_kernels.integrations.trl": ("FusedGRPOTrainer", "patch_trl"),
    "grpo_kernels.integrations.liger": ("FusedLinearGRPOLoss",),
    "grpo_kernels.integrations.verl": ("linear_cross_entropy",),
    "grpo_kernels.training": None,
    "grpo_kernels.reference": (
        "linear_logits", "selective_log_softmax", "linear_logprobs", "grpo_loss", "fused_grpo_loss",
    ),
}  # fmt: skip
INTRO = """# API

Every public name, from its docstring. Written by `make api`; do not edit this page.

"""
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises):$")
_ITEM = re.compile(r"(`?[\w*]+`?(?:, `?[\w*]+`?)*): (.*)", re.DOTALL)


@dataclass(frozen=True)
class Definition:
    """A function or a class, with the source it was parsed from."""

    node: ast.FunctionDef | ast.ClassDef
    source: str

    def text(self, node: ast.expr) -> str:
        """The source of an expression, on one line."""
        return " ".join((ast.get_source_segment(self.source, node) or "").split())

    def doc(self, node: ast.FunctionDef | ast.ClassDef | None = None) -> str:
        """The docstring of the definition, or of a node inside it."""
        return cleandoc(ast.get_docstring(node or self.node) or "")


def find(module: str, name: str) -> Definition:
    """The definition of `name`, followed through `from .x import name [as name]`."""
    source, is_package = _source(module)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return Definition(node, source)
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    parts = module.split(".")
                    parts = parts[: len(parts) + is_package - node.level]
                    return find(".".join([*parts, *filter(None, [node.module])]), alias.name)
    raise LookupError(f"{module}: expected a definition or an import of {name!r}; got none")


def public_names(module: str) -> list[str]:
    """The names in the `__all__` of a package."""
    for node in ast.parse(_source(module)[0]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{module}: expected an __all__; got none")


def _source(module: str) -> tuple[str, bool]:
    path = ROOT.joinpath(*module.split("."))
    is_package = path.is_dir()
    return (path / "__init__.py" if is_package else path.with_suffix(".py")).read_text(), is_package


def signature(name: str, of: Definition, function: ast.FunctionDef, *, skip: int = 0) -> str:
    """`name(arguments) -> result` without the first `skip` arguments."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    parts = [argument(of, *x) for x in zip(positional, defaults, strict=True)][skip:]
    if given.vararg or given.kwonlyargs:
        parts.append("*" + (argument(of, given.vararg) if given.vararg else ""))
    parts += [argument(of, *x) for x in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        parts.append("**" + argument(of, given.kwarg))
    result = of.text(function.returns) if function.returns else "None"
    return call(name, parts) + (f" -> {result}" if result != "None" else "")


def argument(of: Definition, given: ast.arg, default: ast.expr | None = None) -> str:
    """`name: type = default`, as far as there are any."""
    text = given.arg + (f": {of.text(given.annotation)}" if given.annotation else "")
    return text if default is None else f"{text} = {of.text(default)}"


def call(name: str, parts: list[str]) -> str:
    """`name(parts)` on one line if it fits, else with one line per part."""
    line = f"{name}({', '.join(parts)})"
    if len(line) <= 80:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), ")"])


def fields(of: Definition) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and text of each field of a dataclass or named tuple.

    The text is the string below the field, or what the call that makes it says. `*` stands before
    those that are to be named.
    """
    if "kw_only=True" in "".join(map(ast.unparse, of.node.decorator_list)):
        yield "*", "", "", ""
    for node, below in zip(of.node.body, [*of.node.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        value, text = node.value, ""
        if of.text(node.annotation) == "KW_ONLY":
            yield "*", "", "", ""
            continue
        if isinstance(value, ast.Call) and value.args:
            # `option(default, text)`, or `option_of_the_loss(name)`.
            text = (
                str(ast.literal_eval(value.args[1])) if value.args[1:] else "as in `GRPOLossConfig`"
            )
            value = value.args[0] if value.args[1:] else None
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = str(below.value.value)
        default = of.text(value) if value else ""
        yield node.target.id, of.text(node.annotation), default, one_line(text)


def class_text(name: str, of: Definition) -> str:
    """How the class is made, its docstring, and its fields and methods that have a text."""
    methods = [x for x in of.node.body if isinstance(x, ast.FunctionDef)]
    made = [x for x in methods if x.name == "__init__"]
    own = list(fields(of))
    told = [f"- `{n}: {kind}{d and ' = '}{d}`: {text}" for n, kind, d, text in own if text]
    if made:
        head = signature(name, of, made[0], skip=1)
    elif own and not told:
        head = call(name, [f"{n}{kind and ': '}{kind}{d and ' = '}{d}" for n, kind, d, _ in own])
    else:
        head = name
    for method in methods:
        if not method.name.startswith("_") or method.name == "__call__":
            decorators = " ".join(ast.unparse(x) for x in method.decorator_list)
            shown = method.name
            if "property" not in decorators:
                shown = signature(method.name, of, method, skip="static" not in decorators)
            summary = one_line(of.doc(method).split("\n\n")[0])
            shown = one_line(shown).replace("( ", "(").replace(", )", ")")
            told += [f"- `{shown}`: {summary}"] if summary else []
    docs = [of.doc(), *map(of.doc, made)]
    text = "\n\n".join([f"```python\nclass {head}\n```", *(markdown(x) for x in docs if x)])
    return text + ("\n\n**Members**\n\n" + "\n".join(told) if told else "")


def markdown(doc: str) -> str:
    """A docstring with its sections as lists."""
    out: list[str] = []
    lines = doc.splitlines()
    while lines:
        line = lines.pop(0)
        section = _SECTION.match(line)
        if not section:
            out.append(line)
            continue
        items: list[str] = []
        while lines and (not lines[0] or lines[0].startswith(" ")):
            line = lines.pop(0)[4:]
            if line.startswith(" ") and items:
                items[-1] += " " + line.strip()
            elif line:
                items.append(line)
        if section[1] == "Returns" and not all(map(_ITEM.match, items)):
            items = [" ".join(items)]
        out += [f"**{section[1]}**", "", *map(_item, items), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def _item(text: str) -> str:
    found = _ITEM.match(text)
    if found:
        names = ", ".join(f"`{name}`" for name in found[1].replace("`", "").split(", "))
        text = f"- {names}: {found[2]}"
    return textwrap.fill(
        text, 100, subsequent_indent="  " if found else "", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def one_line(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())


def render() -> str:
    """The whole page."""
    tables, bodies = [], []
    for module, listed in MODULES.items():
        rows = []
        bodies.append(f"## `{module}`")
        for name in listed or public_names(module):
            of = find(module, name)
            anchor = f"{module.rsplit('.', 1)[-1]}-{name}".lower()
            summary = one_line(of.doc().split("\n\n")[0]).replace("|", r"\|")
            rows.append(f"| [`{name}`](#{anchor}) | {summary} |")
            if isinstance(of.node, ast.ClassDef):
                text = class_text(name, of)
            else:
                text = f"```python\n{signature(name, of, of.node)}\n```\n\n{markdown(of.doc())}"
            bodies.append(f'<a id="{anchor}"></a>\n\n### `{name}`\n\n{text}')
        tables.append("\n".join([f"| `{module}` | |", "|---|---|", *rows]))
    return INTRO + "\n\n".join([*tables, *bodies]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
    print(f"wrote {PAGE.relative_to(ROOT)}")

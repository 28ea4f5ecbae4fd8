"""Variables carried by Triton's loops, which the interpreter, plain Python, cannot check.

A loop carries the names whose value differs, as a value, from what it was before the loop. If
`b = a` stands before a loop that assigns both, one of them is not carried: after the loop it is
what it was before.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = sorted((ROOT / "grpo_kernels").glob("*/triton_*.py"))


def aliases(source: str) -> list[str]:
    """Names that begin as another one's alias before a loop that assigns both."""
    lines = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        pairs = [
            (node.lineno, node.targets[0].id, node.value.id)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and {type(node.targets[0]), type(node.value)} == {ast.Name}
        ]
        for loop in ast.walk(function):
            if isinstance(loop, ast.For | ast.While):
                inside = [x for statement in loop.body for x in ast.walk(statement)]
                names = [x for x in inside if isinstance(x, ast.Name)]
                stored = {x.id for x in names if isinstance(x.ctx, ast.Store)}
                lines += [f"{function.name}:{line}: {a} = {b}" for line, a, b in pairs
                          if line < loop.lineno and {a, b} <= stored]  # fmt: skip
    return lines


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_no_name_begins_as_an_alias(path):
    assert aliases(path.read_text()) == []


def test_an_alias_is_seen():
    loop = "def f(a):\n    b = a\n    while c:\n        a = b\n        b = a + 1\n"
    assert aliases(loop) == ["f:2: b = a"]
    assert aliases(loop.replace("        a = b\n", "")) == []

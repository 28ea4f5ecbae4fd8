"""The cost of importing the package, and the rules about who may import whom."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("transformers", "datasets", "accelerate", "triton", "torch._dynamo", "peft", "trl")


def python(code: str) -> str:
    # A plain checkout: nothing but the repository root on the path, from another folder.
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_import_is_light():
    code = f"""
import sys
import grpo_kernels
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert python(code).strip() == "[]"


def test_a_cpu_call_needs_neither_triton_nor_transformers():
    code = """
import sys, torch
sys.modules["triton"] = sys.modules["datasets"] = sys.modules["transformers"] = None
from grpo_kernels import fused_grpo_loss
h, w = torch.randn(2, 3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
fused_grpo_loss(h, w, torch.zeros(2, 3, dtype=torch.long), torch.ones(2)).loss.backward()
print(w.grad.norm() > 0)
"""
    assert python(code).strip() == "tensor(True)"


def test_without_the_peers_integrations_say_what_to_install():
    code = """
import sys
for name in ("transformers", "accelerate", "datasets", "peft", "trl", "liger_kernel"):
    sys.modules[name] = None
import grpo_kernels.integrations.liger, grpo_kernels.integrations.verl, grpo_kernels.doctor
try:
    import grpo_kernels.integrations.transformers
except ImportError as error:
    print(error)
"""
    assert "pip install 'grpo_kernels[train]'" in python(code)


def test_every_public_name_has_a_docstring():
    import grpo_kernels

    for name in grpo_kernels.__all__:
        assert getattr(grpo_kernels, name).__doc__, name


PACKAGE = ROOT / "grpo_kernels"
FILES = sorted(PACKAGE.rglob("*.py"))
# These may import what their extras install.
WITH_EXTRAS = ("hf_head", "integrations", "training")


def parts():
    """Part to its modules, and part to the parts it may import: the table of docs/design.md."""
    section = (ROOT / "docs" / "design.md").read_text().split("## Parts\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    cells = [[re.findall("`(.*?)`", cell) for cell in row] for row in rows]
    modules = {module: part for (part,), names, _ in cells for module in names}
    return modules, {part: {part, *allowed} for (part,), _, allowed in cells}


def imports_of(path):
    """Names of modules and packages, and whether they are of this package.

    Imports for type checkers alone are left out.
    """
    tree = ast.parse(path.read_text())
    for_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    depth = len(path.relative_to(PACKAGE).parts)
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = node.module.split(".")
            yield (names[1] if names[0] == "grpo_kernels" else names[0]), names[0] == "grpo_kernels"
        elif isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                name = name.split(".")[0]
                is_module = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
                yield (name if is_module else "__init__"), True


def test_every_module_is_in_the_table_of_parts():
    assert set(parts()[0]) == {path.relative_to(PACKAGE).parts[0].split(".")[0] for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_what_its_part_may(path):
    modules, allowed = parts()
    part = modules[path.relative_to(PACKAGE).parts[0].split(".")[0]]
    for name, own in imports_of(path):
        if own:
            assert modules[name] in allowed[part], f"{part} imports {name}"
        elif part not in WITH_EXTRAS:
            kernels = part == "backends" or path.stem.startswith("triton_")
            known = {"torch", *(["triton"] if kernels else []), *sys.stdlib_module_names}
            assert name in known, f"{part} imports {name}"

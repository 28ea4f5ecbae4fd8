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


# Words that need a heading, or the sentence before, as their subject.
FIRST_WORDS = re.compile(
    r"\W*(as|by|he|her|his|how|its?|of|one|our|she|that|their|these|they|this|those|we|what|when|where"
    r"|whether|which|who|whose|your)\b",
    re.IGNORECASE,
)


FOLDERS = ("grpo_kernels", "benchmarks", "examples", "packaging", "tests")


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    refused = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                if FIRST_WORDS.match(text):
                    refused.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not refused, "\n".join(refused)


def test_every_public_name_has_a_docstring():
    import grpo_kernels

    for name in grpo_kernels.__all__:
        assert getattr(grpo_kernels, name).__doc__, name


PACKAGE = ROOT / "grpo_kernels"
FILES = sorted(PACKAGE.rglob("*.py"))
# Parts that may import packages of their extras.
WITH_EXTRAS = ("explain", "integrations", "training")


def part_of(module):
    """The file or folder of the package that a module, `head.chunked_head`, is in."""
    return module.split(".")[0]


def allowed_imports():
    """Part to the parts, and single modules, that it may import: the table of docs/design.md."""
    section = (ROOT / "docs" / "design.md").read_text().split("## Parts\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    cells = [[re.findall("`(.*?)`", cell) for cell in row] for row in rows]
    return {part: {part, *allowed} for (part,), _, allowed in cells}


def module_of(path):
    """The module's name below the package, that of a folder `head.__init__`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_of(path) for path in FILES}


def imports_of(path):
    """Modules of this package, and packages from outside, each with whether it is of this package.

    Imports for type checkers alone are left out.
    """
    tree = ast.parse(path.read_text())
    for_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    folders = path.relative_to(PACKAGE).parts[:-1]
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            below = node.module.split(".") if node.module else []
            if node.level == 0 and below[0] != "grpo_kernels":
                yield below[0], False
                continue
            above = folders[: len(folders) + 1 - node.level] if node.level else ()
            place = [*above, *(below if node.level else below[1:])]
            for alias in node.names:
                module = [*place, alias.name]
                names = (module, [*module, "__init__"], place, [*place, "__init__"])
                yield next(x for x in map(".".join, names) if x in MODULES), True


def test_every_module_is_in_the_table_of_parts():
    assert set(allowed_imports()) == {part_of(module) for module in MODULES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_what_its_part_may(path):
    part = part_of(module_of(path))
    allowed = allowed_imports()[part]
    for name, ours in imports_of(path):
        if ours:
            assert {name, part_of(name)} & allowed, f"{part} imports {name}"
        elif part not in WITH_EXTRAS:
            known = {"torch", *(["triton"] if part == "kernels" else []), *sys.stdlib_module_names}
            assert name in known, f"{part} imports {name}"


def test_loss_and_head_never_import_each_other():
    """Nor is it written in the table that they may."""
    allowed = allowed_imports()
    assert not allowed["loss"] & {"head"} and not allowed["head"] & {"loss"}
    assert not (allowed["base"] | allowed["kernels"]) & {"loss", "head"}


def test_no_module_imports_itself_by_way_of_others():
    """At the head of its file or inside of a function."""
    imported = {module_of(path): {x for x, ours in imports_of(path) if ours} for path in FILES}
    while leaves := {name for name, needs in imported.items() if not needs & set(imported)}:
        imported = {name: needs for name, needs in imported.items() if name not in leaves}
    assert not imported, f"in or behind a circle: {sorted(imported)}"

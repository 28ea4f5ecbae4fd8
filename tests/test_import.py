"""The cost of an import, the rules about who may import whom, and lists that are written once."""

import ast
import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib.util import resolve_name
from pathlib import Path

import pytest

import grpo_kernels
from grpo_kernels import Execution, LMHead

ROOT = Path(__file__).parents[1]


def python(code: str, *args: str) -> list[str]:
    """The lines that the code prints, from a plain checkout in another folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code, *args], env=env, cwd="/", capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


CPU_CALLS = """
import sys
import grpo_kernels
heavy = "transformers", "datasets", "accelerate", "triton", "torch._dynamo", "peft", "trl"
print([name for name in heavy if name in sys.modules])

import torch
sys.modules |= dict.fromkeys(("triton", "transformers", "datasets"))
h, w = (torch.randn(n, 8, requires_grad=True) for n in (6, 50))
grpo_kernels.fused_grpo_loss(h, w, torch.arange(6), torch.randn(6)).loss.backward()
grpo_kernels.linear_logprobs(h, w, torch.arange(6)).logps.sum().backward()
print(w.grad.norm() > 0)
print(*[name for name in sys.modules if name.startswith("grpo_kernels")])
"""
OPTIONAL = re.compile(r"hints|support|shards|many|sampler|training|integrations|reference|explain")


def test_exact_calls_on_a_cpu_load_nothing_else():
    """Neither heavy packages nor the files of options that they do not use."""
    heavy, has_gradient, loaded = python(CPU_CALLS)
    assert (heavy, has_gradient) == ("[]", "tensor(True)")
    assert "grpo_kernels.head.chunked_head" in loaded.split()
    assert not [x for x in loaded.split() if OPTIONAL.search(x.removeprefix("grpo_kernels"))]


# A machine with macOS or Windows, as far as a Linux can be one: what is imported from here on finds
# neither Triton nor what POSIX or Linux alone has. The standard library keeps what it has.
ELSEWHERE = """
import os, signal, subprocess, sys, types
import torch, torch._dynamo
{imports}
absent = "triton", "resource", "fcntl", "pwd", "grp", "termios"
for name in [x for x in sys.modules if x.split(".")[0] in absent]:
    del sys.modules[name]
sys.modules |= dict.fromkeys(absent)
subprocess.signal = types.SimpleNamespace(**vars(signal))
calls = "fork", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "killpg", "setsid"
signals = "KILL", "PROF", "ALRM", "HUP", "USR1", "USR2", "CHLD", "PIPE"
timers = "setitimer", "getitimer", "alarm", "pthread_sigmask"
for module, names in ((os, calls), (signal, timers), (signal, ["SIG" + x for x in signals])):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""
# And a torch that was built without `torch.distributed`.
CORE_ELSEWHERE = """
for name in [x for x in sys.modules if x.startswith("torch.distributed")]:
    del sys.modules[name]
sys.modules["torch.distributed"] = torch.distributed = types.SimpleNamespace(
    is_available=lambda: False, ProcessGroup=type("ProcessGroup", (), {})
)
import grpo_kernels, grpo_kernels.explain, grpo_kernels.reference
from grpo_kernels import doctor
for name in grpo_kernels.__all__:
    getattr(grpo_kernels, name)
sys.exit(doctor.main([]))
"""


def test_the_core_runs_without_triton_and_posix():
    """The doctor compares its calls with the reference."""
    report = python(ELSEWHERE.format(imports="") + CORE_ELSEWHERE)
    assert any(line.startswith("VERDICT: all is well") for line in report)


PEERS = "accelerate, datasets, filelock, peft, psutil, tqdm, transformers"
TRAINER_ELSEWHERE = """
import importlib, pathlib, pkgutil, warnings
import grpo_kernels
warnings.simplefilter("ignore")
for module in pkgutil.walk_packages(grpo_kernels.__path__, "grpo_kernels."):
    if not module.name.endswith(("__main__", "axolotl")) and ".kernels.triton" not in module.name:
        importlib.import_module(module.name)
from tests.helpers.tiny_models import make_model, make_tokenizer
from tests.helpers.trainer_runs import trainer_with

folder = pathlib.Path(sys.argv[1])
make_model("llama").save_pretrained(folder / "tiny")
make_tokenizer().save_pretrained(folder / "tiny")
trainer_with(folder / "tiny", folder, steps=1, save_every=1).train()
"""


@pytest.mark.slow
def test_the_trainer_steps_without_triton_and_posix(tmp_path):
    """A step is saved; every module is imported, with those for other packages."""
    pytest.importorskip("trl", reason="TRL has left Python 3.10")
    code = ELSEWHERE.format(imports=f"import {PEERS}, trl.trainer.grpo_trainer")
    python(code + TRAINER_ELSEWHERE, str(tmp_path))
    (page,) = tmp_path.glob("*/report.html")
    assert (page.parent / "checkpoints" / "step-000001.pt").is_file()


# Words that need a heading, or the sentence before, as their subject.
FIRST_WORDS = re.compile(
    r"\W*(as|by|he|her|his|how|its?|of|one|our|she|that|their|these|they|this|those|we|what|when|where"
    r"|whether|which|who|whose|your)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize("folder", ("grpo_kernels", "benchmarks", "examples", "packaging", "tests"))
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
    assert [name for name in grpo_kernels.__all__ if not getattr(grpo_kernels, name).__doc__] == []


PACKAGE = ROOT / "grpo_kernels"
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# Parts that may import packages of their extras.
WITH_EXTRAS = ("explain", "integrations", "training")


def part_of(module):
    """The file or folder of the package that a module, `head.chunked_head`, is in."""
    return module.split(".")[0]


def allowed_imports(heading="Parts"):
    """Part to the parts, and single modules, that it may import: the table of docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    cells = [[re.findall("`(.*?)`", cell) for cell in row] for row in rows]
    return {part: {part, *allowed} for (part,), _, allowed in cells}


def imports_of(module, *, types=False):
    """Modules of this package that a module imports, and packages from outside.

    `types`: those for type checkers alone, too.
    """
    path, ours, others = FILES[module], set(), set()
    tree = ast.parse(path.read_text())
    for_types = {
        node
        for block in ast.walk(tree)
        if not types and isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    parent = ".".join(("grpo_kernels", *path.relative_to(PACKAGE).parts[:-1]))
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            place = resolve_name("." * node.level + (node.module or ""), parent)
            if part_of(place) != "grpo_kernels":
                others.add(part_of(place))
                continue
            place = place.removeprefix("grpo_kernels").removeprefix(".")
            names = (f"{place}.{alias.name}".removeprefix(".") for alias in node.names)
            ours |= {name if name in FILES else place or "__init__" for name in names}
    return ours, others


def test_the_table_of_parts_has_every_module_and_keeps_loss_and_head_apart():
    allowed = allowed_imports()
    assert set(allowed) == {part_of(module) for module in FILES}
    assert not allowed["loss"] & {"head"} and not allowed["head"] & {"loss"}
    assert not (allowed["base"] | allowed["kernels"]) & {"loss", "head"}


@pytest.mark.parametrize("module", FILES)
def test_imports_what_its_part_may(module):
    """In a room of the trainer also for type checkers alone, and inside of functions."""
    part = part_of(module)
    allowed = allowed_imports()[part]
    ours, others = imports_of(module)
    assert [x for x in ours if not {x, part_of(x)} & allowed] == []
    if part not in WITH_EXTRAS:
        known = {"torch", *(["triton"] if part == "kernels" else []), *sys.stdlib_module_names}
        assert others <= known
    if re.match(r"training\.\w+\.", module):
        allowed = allowed_imports("Rooms of the trainer")[module.split(".")[1]]
        ours, _ = imports_of(module, types=True)
        inside = {x.removeprefix("training.") for x in ours if part_of(x) == "training"}
        assert [x for x in sorted(inside) if not {x, x.split(".")[0]} & allowed] == []


@pytest.mark.parametrize("part", ("", "training"))
def test_no_module_imports_itself_by_way_of_others(part):
    """At the head of its file or inside of a function; in the trainer also for type checkers."""
    modules = [module for module in FILES if module.startswith(part)]
    imported = {module: imports_of(module, types=bool(part))[0] for module in modules}
    while leaves := {name for name, needs in imported.items() if not needs & set(imported)}:
        imported = {name: needs for name, needs in imported.items() if name not in leaves}
    assert not imported, f"in or behind a circle: {sorted(imported)}"


# What is written once

CALLS = ("fused_grpo_loss", "linear_logprobs", "grpo_loss")


def test_the_plan_alone_knows_the_capabilities():
    """Only the plan imports capabilities, and only inside of functions."""
    optional = {"support", "shards", "many_targets", "two_heads"}
    for path in [*PACKAGE.glob("*.py"), *(PACKAGE / "head").glob("*.py")]:
        if path.stem in (*optional, "doctor"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            if (node.module or "").split(".")[-1] in optional:
                # The package's `__getattr__` asks for what is public.
                assert path.stem in ("plan", "__init__"), path
                assert node.col_offset > 0, path


# What is written once

CALLS = ("fused_grpo_loss", "linear_logprobs", "grpo_loss")


@pytest.mark.parametrize(
    ("described", "names"),
    (
        *((cls, [field.name for field in fields(cls)]) for cls in (LMHead, Execution)),
        *((f, [*inspect.signature(f).parameters]) for f in map(vars(grpo_kernels).get, CALLS)),
    ),
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_every_argument_is_described(described, names):
    args = (inspect.getdoc(described) or "").split("Args:")[1]
    args = re.split("Raises:|Returns:", args)[0]
    assert re.findall(r"^    (\w+): ", args, re.MULTILINE) == names


def test_a_name_that_the_package_lacks():
    with pytest.raises(AttributeError, match="no attribute 'fused_loss'"):
        _ = grpo_kernels.fused_loss

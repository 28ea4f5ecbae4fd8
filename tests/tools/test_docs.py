"""The docs' code runs, their tables say what the code does, and their links lead somewhere."""

import json
import re
from pathlib import Path
from statistics import median

import pytest
import torch

from benchmarks import chart
from grpo_kernels import GRPOLossConfig
from grpo_kernels.base.checks import version_numbers
from grpo_kernels.integrations import private
from grpo_kernels.loss.losses import LOSS_TYPES
from tests.helpers.batches import OBJECTIVES, config, make_batch, run_fused, with_cross_entropy
from tests.helpers.tiny_models import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = [Path(name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted(path.relative_to(ROOT) for path in (ROOT / "docs").glob("*.md"))
PAGES += [Path("benchmarks/results") / name for name in ("predicted.md",)]
TEXT = (ROOT / "docs" / "objectives.md").read_text()


def rows_of(heading):
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def code_blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.fixture
def small_models(monkeypatch):
    """Names of the hub get a tiny model and a tokenizer of bytes."""
    import transformers

    for kind, make in (
        ("AutoModelForCausalLM", lambda _: make_model("qwen2")),
        ("AutoTokenizer", lambda _: make_tokenizer()),
    ):
        monkeypatch.setattr(getattr(transformers, kind), "from_pretrained", make)


@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page)], ids=str)
def test_code_runs(page, small_models):
    if torch.distributed.is_initialized():  # by another test of this process
        torch.distributed.destroy_process_group()
    exec("\n".join(code_blocks(page)), {"__name__": "docs"})


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_imports_exist(page):
    """Imports in tables and diffs count, too, though they are not run."""
    text = (ROOT / page).read_text()
    for module, name in re.findall(r"from (grpo_kernels[\w.]*) import (\w+)", text):
        source = ROOT.joinpath(*module.split("."))
        path = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
        # Read, not imported, as some need a peer.
        assert re.search(rf"\b{name}\b", path.read_text()), f"{module} has no {name}"


def anchors(page):
    text = (ROOT / page).read_text()
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="(.*?)">', text))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES[:2] + PAGES[3:], ids=str)
def test_files_exist(page):
    """But for those of the changelog, some of which are gone."""
    text, folders = (ROOT / page).read_text(), "grpo_kernels|tests|benchmarks|examples|docs"
    for name in re.findall(rf"`((?:{folders})/[\w/.-]+\.\w+)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_make_targets_exist(page):
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = (ROOT / page).read_text()
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)) <= known


def table_of_versions():
    """The lowest and the highest version of each package, as `docs/testing.md` has them."""
    text = (ROOT / "docs" / "testing.md").read_text().split("## Versions\n")[1]
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+)(?: to ([\d.]+))?", text, re.M)
    return {name: (low, high or low) for name, low, high in rows}


VERSIONS = table_of_versions()
PINS = [ROOT / "noxfile.py", *sorted((ROOT / "constraints").glob("*.txt"))]


@pytest.mark.parametrize("path", PINS, ids=lambda path: path.stem)
def test_versions_are_those_that_are_installed(path):
    for name, pin in re.findall(r"\b([a-z][\w-]*)==([\d.]+)", path.read_text()):
        package = name.removesuffix("-cpu")
        has_own_needs = path.stem not in ("noxfile", "default", "lowest", "vllm", package)
        if package not in VERSIONS or has_own_needs:
            continue
        low, high = map(version_numbers, VERSIONS[package])
        installed = version_numbers(pin)
        assert low <= installed <= high, f"{name}=={pin}"
        if path.stem == "lowest":
            assert installed == low, f"{name}=={pin}"
        # A workflow has the newest of these two, whose builds for a CPU not every index has.
        elif path.stem in ("default", package) and package not in ("torch", "triton"):
            assert installed == high, f"{name}=={pin}"


def test_sessions_of_versions_begin_with_the_lowest():
    text = (ROOT / "noxfile.py").read_text()
    for package in ("trl", "liger-kernel"):
        name = package.removesuffix("-kernel")
        first = re.search(rf'\("version", \("([\d.]+)".*\ndef {name}\(', text)[1]
        assert version_numbers(first) == version_numbers(VERSIONS[package][0])


def test_versions_are_those_that_errors_name():
    expected = {name: " to ".join(VERSIONS[name]) for name in private.TESTED_VERSIONS}
    assert expected == private.TESTED_VERSIONS


@pytest.mark.parametrize("page", PAGES[:2] + PAGES[3:], ids=str)
def test_versions_stand_in_one_table(page):
    text = (ROOT / page).read_text()
    rows = re.findall(rf"\b({'|'.join(VERSIONS)})[ ,]+(\d+\.[\d.]+) to (\d+\.[\d.]*\d)", text, re.I)
    assert all(VERSIONS[name.lower()] == tuple(versions) for name, *versions in rows), rows


def test_the_readme_s_first_screen():
    """Short, and its chart and numbers are those of the stored run."""
    text = " ".join((ROOT / "README.md").read_text().split())
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    stored = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text())["rows"]
    assert chart.drawn(stored) == (ROOT / "docs" / "head.svg").read_text()
    for workload in ("rollout", "smollm"):
        row = next(x for x in stored if x.get("workload", "").startswith(workload))
        assert row["name"] == chart.BASELINE
        seconds, mib = median(row["seconds"]), row["extra_bytes"] / 2**20
        assert f"{seconds:.2f} s, {mib:,.0f} MiB" in text


def test_every_loss_type_is_told():
    assert {row[0].strip("`") for row in rows_of("Loss types")} == set(LOSS_TYPES)
    listed = (GRPOLossConfig.__doc__ or "").split("loss_type: ")[1].split(". Or an instance")[0]
    assert set(re.findall('"(.*?)"', listed)) == set(LOSS_TYPES)
    assert f"{len(LOSS_TYPES)} loss\ntypes" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("row", list(rows_of("Loss types")), ids=lambda row: row[0])
def test_table(row):
    name, _, aggregation, passes, options, _ = row
    name = name.strip("`")
    needed = {"cispo": {"epsilon_high": 5.0}, "dr_grpo": {"max_completion_length": 8}}
    cfg = GRPOLossConfig(loss_type=name, **needed.get(name, {}))
    assert cfg.one_pass == (passes == "one")
    assert aggregation.strip("`¹") == cfg.effective_aggregation
    accepted = set(re.findall(r"`(\w+)`", options)) - {"max_completion_length"}
    if options.startswith("the same"):
        accepted |= GRPOLossConfig(loss_type="grpo").specific_options
    assert accepted == cfg.specific_options
    assert ("aggregation" in accepted) == aggregation.endswith("¹")


def test_every_metric_is_explained():
    explained = {name for row in rows_of("Metrics") for name in re.findall("`(.*?)`", row[0])}
    calls = [{"config": config(**options), **dict.fromkeys(tensors, True)}
             for options, tensors in OBJECTIVES.values()]  # fmt: skip
    calls.append({"ce_weights": True})
    batch = with_cross_entropy(make_batch())
    assert {name for call in calls for name in run_fused(batch, exact=False, **call).metrics} == (
        explained
    )

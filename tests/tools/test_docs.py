"""The docs' code runs, their tables say what the code does, and their links lead somewhere."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from statistics import median

import pytest
import torch

import grpo_kernels
from benchmarks import chart
from grpo_kernels.base.checks import version_numbers
from grpo_kernels.integrations import private
from grpo_kernels.loss.losses import LOSS_TYPES
from tests.helpers.batches import OBJECTIVES, config, make_batch, run_fused, with_cross_entropy
from tests.helpers.tiny_models import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = [Path(name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES += sorted(path.relative_to(ROOT) for path in (ROOT / "docs").glob("*.md"))
PAGES += [Path("benchmarks/results/predicted.md")]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
CODE = {page: re.findall(r"```python\n(.*?)```", text, re.S) for page, text in TEXTS.items()}
OBJECTIVES_PAGE = TEXTS[Path("docs/objectives.md")]


@pytest.fixture
def small_models(monkeypatch):
    """Names of the hub get a tiny model and a tokenizer of bytes."""
    import transformers

    for kind, make in (
        ("AutoModelForCausalLM", lambda _, **options: make_model("qwen2")),
        ("AutoTokenizer", lambda _: make_tokenizer()),
    ):
        monkeypatch.setattr(getattr(transformers, kind), "from_pretrained", make)


@pytest.mark.parametrize("page", [page for page in PAGES if CODE[page]], ids=str)
def test_code_runs(page, small_models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where what it writes goes
    if torch.distributed.is_initialized():  # by another test of this process
        torch.distributed.destroy_process_group()
    exec("\n".join(CODE[page]), {"__name__": "docs"})


@pytest.mark.parametrize("pad", ("<eos>", "A", None), ids=("the end", "another", "none"))
def test_the_quickstart_trains_the_end_of_each_completion(pad, small_models, monkeypatch, capsys):
    """With any pad token; what it prints is not 0."""
    import transformers

    model, tokenizer = make_model("qwen2"), make_tokenizer()
    tokenizer.pad_token = pad
    end, filler = tokenizer.eos_token_id, tokenizer.pad_token_id or 0
    digits = tokenizer("1234").input_ids
    rows = [[*digits[:2], end], [*digits[:1], 9, 9, 9], [end], [9] * 4]
    sampled = torch.tensor([row + [filler] * (4 - len(row)) for row in rows])
    monkeypatch.setattr(model, "generate", lambda input_ids, **_: torch.cat(
        [input_ids.expand(4, -1), sampled], 1
    ))  # fmt: skip
    for kind, made in (("AutoModelForCausalLM", model), ("AutoTokenizer", tokenizer)):
        monkeypatch.setattr(
            getattr(transformers, kind), "from_pretrained", lambda _, made=made, **options: made
        )
    exec("\n".join(CODE[Path("README.md")]), names := {"__name__": "docs"})
    assert names["mask"].tolist() == [[1, 1, 1, 0], [1] * 4, [1, 0, 0, 0], [1] * 4]
    lines = re.findall(r"gradient norm (.*), .* completion (.*)", capsys.readouterr().out)
    (norm, before), (_, after) = [[float(x) for x in line] for line in lines]
    assert norm > 0 and after > before


def test_advantages_of_one_s_own_are_right():
    page, names = Path("docs/objectives.md"), {"torch": torch}
    exec(next(code for code in CODE[page] if "over_mean" in code), names)
    for name, expected in {
        "by_tokens": [[0.75, -0.25, 0.0], [-1.05, 0.95, -0.55], [0.0] * 3],
        "over_mean": [[1.4, -1.0, -0.4], [-1.0, 1.4, -0.4], [0.0] * 3],
        "lead": [[0.75, 0.0, 0.0], [0.0, 1.5, 0.0], [0.0] * 3],
    }.items():
        torch.testing.assert_close(names[name], torch.tensor(expected), msg=name)
        assert not names[name][2].any(), name


def anchors(text):
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="(.*?)">', text))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_what_a_page_names_is_there(page):
    """Links and their anchors, imports (also in tables), files, targets of make."""
    text = TEXTS[page]
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert "://" in target or file.exists(), target
        assert "://" in target or not anchor or anchor in anchors(file.read_text()), target
    for module, name in re.findall(r"from (grpo_kernels[\w.]*) import (\w+)", text):
        source = ROOT.joinpath(*module.split("."))
        path = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
        # Read, not imported, as some need a peer.
        assert re.search(rf"\b{name}\b", path.read_text()), f"{module} has no {name}"
    folders = "grpo_kernels|tests|benchmarks|examples|docs"
    for name in re.findall(rf"`((?:{folders})/[\w/.-]+\.\w+)`", text):
        # Of those that the changelog names some are gone.
        assert page.name == "CHANGELOG.md" or (ROOT / name).exists(), name
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)) <= known


# The lowest and the highest version of each package.
ROWS = re.findall(
    r"^\| ([\w-]+) \| ([\d.]+)(?: to ([\d.]+))?",
    TEXTS[Path("docs/testing.md")].split("## Versions\n")[1], re.M,
)  # fmt: skip
VERSIONS = {name: (low, high or low) for name, low, high in ROWS}


PINS = [ROOT / "noxfile.py", *sorted((ROOT / "constraints").glob("*.txt"))]


@pytest.mark.parametrize("path", PINS, ids=lambda path: path.stem)
def test_versions_are_those_that_are_installed_and_that_errors_name(path):
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
    expected = {name: " to ".join(VERSIONS[name]) for name in private.TESTED_VERSIONS}
    assert expected == private.TESTED_VERSIONS


def test_the_chart_and_its_numbers_are_those_of_the_stored_run():
    text = " ".join(TEXTS[Path("docs/benchmarks.md")].split())
    stored = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text())["rows"]
    assert chart.drawn(stored) == (ROOT / "docs" / "head.svg").read_text()
    for workload in ("rollout", "smollm"):
        row = next(x for x in stored if x.get("workload", "").startswith(workload))
        assert row["name"] == chart.BASELINE
        seconds, mib = median(row["seconds"]), row["extra_bytes"] / 2**20
        assert f"{seconds:.2f} s, {mib:,.0f} MiB" in text


def rows_of(heading):
    section = OBJECTIVES_PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_loss_type_is_told_as_it_is():
    assert {row[0].strip("`") for row in rows_of("Loss types")} == set(LOSS_TYPES)
    for name, _, aggregation, passes, options, _ in rows_of("Loss types"):
        cfg = config(loss_type=name.strip("`"))
        assert cfg.one_pass == (passes == "one"), name
        assert aggregation.strip("`¹") == cfg.effective_aggregation, name
        accepted = set(re.findall(r"`(\w+)`", options)) - {"max_completion_length"}
        if options.startswith("the same"):
            accepted |= config(loss_type="grpo").specific_options
        assert accepted == cfg.specific_options, name
        assert ("aggregation" in accepted) == aggregation.endswith("¹"), name


def test_every_metric_is_explained():
    explained = {name for row in rows_of("Metrics") for name in re.findall("`(.*?)`", row[0])}
    calls = [{"config": config(**options), **dict.fromkeys(tensors, True)}
             for options, tensors in OBJECTIVES.values()]  # fmt: skip
    calls.append({"ce_weights": True})
    batch = with_cross_entropy(make_batch())
    named = {name for call in calls for name in run_fused(batch, exact=False, **call).metrics}
    assert named == explained


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Html(HTMLParser):
    """Ids of a page, and what it links or shows."""

    def __init__(self, page):
        super().__init__()
        self.ids, self.targets = set(), set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.add(values.get("id"))
        self.targets |= {values[name] for name in ("href", "src") if values.get(name)}


def test_the_site_has_every_public_name(site):
    ids = Html(site / "reference" / "index.html").ids
    modules = re.findall("^## (.*)$", TEXTS[Path("docs/reference.md")], re.M)
    # Its module has the name of this function, too.
    names = {*grpo_kernels.__all__, "fused_grpo_loss.fused_grpo_loss"} - {"fused_grpo_loss"}
    assert {f"grpo_kernels.{name}" for name in names} <= ids
    assert [name for name in modules if not any(str(x).startswith(f"{name}.") for x in ids)] == []


def test_links_of_the_site_lead_to_its_files_or_the_repository_s(site):
    """Pages of docs/, others that are on the site, and files that are not."""
    (address,) = re.findall("^repo_url: (.*)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    repository = f"{address}/blob/main/"
    seen = set()
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # whose links are from the root of the server
            continue
        for target in Html(page).targets:
            path = target.partition("#")[0].partition("?")[0]
            if path.startswith(repository):
                seen.add(path.removeprefix(repository))
            elif path and "://" not in path:
                assert (page.parent / path).exists(), f"{page.relative_to(site)}: {target}"
    assert {"benchmarks/LOG.md", "examples/distill.py"} <= seen
    assert [path for path in seen if not (ROOT / path).exists()] == []
    assert not [path for path in seen if path.startswith("docs/") or path == "CHANGELOG.md"]
    front, page = Html(site / "index.html").targets, Html(site / "explain" / "index.html").targets
    for theme in ("light", "dark"):
        assert f"explain-{theme}.png#only-{theme}" in front
        assert f"../explain-{theme}.png#only-{theme}" in page


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_lists_in_lists_are_indented_by_four(page):
    """The site needs four spaces; GitHub takes fewer, too."""
    assert re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*", TEXTS[page], re.M) == []


def test_one_command_puts_the_owner_into_every_address(tmp_path):
    """Names of datasets, OWNER/NAME, stay; so does what an owner has put in before."""
    if not (ROOT / ".git").exists():
        pytest.skip("not in a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    before = {}
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if b"OWNER" in (content := (ROOT / name).read_bytes()) or name == "mkdocs.yml":
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
            before[name] = content.decode()
    commands = re.findall(r"^git grep .*", TEXTS[Path("docs/release.md")], re.M)
    for command in ("git init -q", "git add .", *commands):
        subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    for name, text in before.items():
        after = (tmp_path / name).read_text()
        assert re.findall(r"OWNER[/.](?!NAME\b).*", after) == [], name
        assert after.count("OWNER/NAME") == text.count("OWNER/NAME"), name
        assert after == text or "octocat" in after
    assert any("OWNER/NAME" in text for text in before.values())
    for address in (r"://([\w-]+)\.github\.io/grpo_kernels", r"github\.com/([\w-]+)/grpo_kernels"):
        (owner,) = re.findall(address, (tmp_path / "mkdocs.yml").read_text())
        assert owner != "OWNER"

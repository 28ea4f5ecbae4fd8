"""The notebook for a T4, run as it is stored, with a small model, few steps and no network."""

import json
import math
import os
import re
from html import unescape

import nbformat
import pytest

from examples.demo_model import model_path
from tests.helpers.ranks import ROOT

pytest.importorskip("trl", reason="needs the extra 'peers'")
nbclient = pytest.importorskip("nbclient", reason="needs the extra 'test'")

PATH = ROOT / "examples" / "grpo_t4.ipynb"
SMALL = {
    "DATA": "sums", "STEPS": 3, "PROMPTS": 2, "COMPLETIONS": 3, "MICRO_BATCH": 3, "TOKENS": 20,
    "HELD_OUT": 4,
}  # fmt: skip


def test_it_is_stored_without_outputs():
    """In the form in which nbformat writes it, so that a change's diff is that change."""
    book = nbformat.read(PATH, as_version=4)
    nbformat.validate(book)
    assert nbformat.writes(book) + "\n" == PATH.read_text()
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert len(code) > 10
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def outputs(folder):
    """The outputs of each cell, by its id, after a run from the first cell to the last."""
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "GRPO_MODEL": str(model_path()),
        **{f"GRPO_{name}": str(value) for name, value in SMALL.items()},
    }  # fmt: skip
    env.pop("TRITON_INTERPRET", None)
    book = nbformat.read(PATH, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(book, timeout=900, resources=resources)
    client.execute(env=env)
    return {cell.id: cell.outputs for cell in book.cells if cell.cell_type == "code"}


def text_of(outputs):
    """What a cell printed."""
    return "".join(x.text for x in outputs if x.output_type == "stream" and x.name == "stdout")


def test_no_cell_fails_and_the_doctor_is_content(outputs):
    kinds = {x.output_type for several in outputs.values() for x in several}
    assert "error" not in kinds
    assert text_of(outputs["install"]) == ""
    assert "all is well" in text_of(outputs["doctor"])


def test_the_step_by_hand(outputs):
    rows = re.findall(r"^reward (\S+)   advantage (\S+)", text_of(outputs["step"]), re.M)
    assert [row[0] for row in rows] == ["1.4", "0.4", "0.2", "0.0"]
    advantages = [float(row[1]) for row in rows]
    assert advantages == sorted(advantages, reverse=True) and advantages[0] > 1
    assert sum(advantages) == pytest.approx(0.0, abs=0.02)


def test_three_steps_by_our_trainer(outputs):
    assert text_of(outputs["trainer"]).startswith("FusedGRPOTrainer\ntrainable params: ")
    head, *rows = (line.split() for line in text_of(outputs["curves"]).splitlines())
    assert head == ["step", "loss", "grad_norm", "reward"]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    values = [[float(x) for x in row] for row in rows]
    assert all(math.isfinite(x) for row in values for x in row)
    assert any(row[2] > 1e-3 for row in values)  # gradient norm
    assert any(row[3] > 0 for row in values)  # reward
    pictures = [x.data for x in outputs["curves"] if x.output_type == "display_data"]
    assert len(pictures) == 1 and len(pictures[0]["image/png"]) > 10_000


def test_accuracy_before_and_after(outputs):
    line = r"Right (before|after) training: +(\d+) of 4 \((\S+)% ± 49.0%\)"
    (before,) = re.findall(line, text_of(outputs["before"]))
    again, after = re.findall(line, text_of(outputs["after"]))
    assert before == again and [before[0], after[0]] == ["before", "after"]
    assert float(before[2]) == pytest.approx(100 * int(before[1]) / 4, abs=0.05)
    assert int(before[1]) > 0  # the demo's model can add
    gained, lost, chance = re.search(
        r"(\d+) turned right, (\d+) turned wrong. By luck alone: (\S+)", text_of(outputs["after"])
    ).groups()
    assert int(after[1]) - int(before[1]) == int(gained) - int(lost)
    assert 0 < float(chance) <= 1


def test_a_step_is_explained_in_the_notebook(outputs, folder):
    """The page stands in the output itself, as Colab does not serve files to a frame."""
    (result,) = outputs["explain"]
    shown = result.data["text/html"]
    pages = folder / "grpo_t4" / "explanations"
    assert shown.startswith("<p>grpo_t4/explanations/step-000001.html</p><iframe ")
    page = unescape(shown.split('srcdoc="')[1].split('"')[0])
    assert page == (pages / "step-000001.html").read_text()
    rows = [json.loads(line) for line in (pages / "step-000001.jsonl").read_text().splitlines()]
    assert len(rows) in (3, 6)  # groups with equal rewards are left out
    assert sum(row["gradient_share"] for row in rows) == pytest.approx(1.0)
    # Steps without a gradient have a page, too.
    assert sorted(path.name for path in pages.glob("*.html")) == [
        f"step-00000{step}.html" for step in (1, 2, 3)
    ]


def test_the_settings_are_those_of_the_environment():
    """Each one that the test sets is one that the notebook reads."""
    (settings,) = (x for x in json.loads(PATH.read_text())["cells"] if x["id"] == "settings")
    read = re.findall(r'setting\("(\w+)"', "".join(settings["source"]))
    assert set(SMALL) | {"MODEL"} <= set(read)

"""The notebook for a T4, run as it is stored, with a small model, few steps and no network."""

import json
import math
import os
import re
from html import unescape

import datasets
import nbclient
import nbformat
import pytest
from datasets import Dataset, DatasetDict

from examples.demo_model import model_path
from grpo_kernels.training import memory, parse_config
from tests.helpers.ranks import ROOT
from tests.test_memory import shape_of

pytest.importorskip("trl", reason="needs the extra 'peers'")
pytestmark = pytest.mark.usefixtures("real_memory")

PATH = ROOT / "examples" / "grpo_t4.ipynb"
SMALL = {
    "DATA": "sums", "STEPS": 3, "PROMPTS": 2, "COMPLETIONS": 3, "MICRO_BATCH": 3, "TOKENS": 20,
    "HELD_OUT": 8,
}  # fmt: skip


def test_it_is_stored_without_outputs():
    """In the form in which nbformat writes it, so that a change's diff is that change."""
    book = nbformat.read(PATH, as_version=4)
    nbformat.validate(book)
    assert nbformat.writes(book) + "\n" == PATH.read_text()
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert len(code) > 10
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def source_of(cell):
    (source,) = (x["source"] for x in json.loads(PATH.read_text())["cells"] if x["id"] == cell)
    return "".join(source)


def test_its_settings_and_links_exist():
    """Each setting that the run below replaces is read; each file of the repository is there."""
    assert set(SMALL) | {"MODEL"} <= set(re.findall(r'setting\("(\w+)"', source_of("settings")))
    links = re.findall(r"github\.com/OWNER/grpo_kernels/\w+/main/([\w./-]+)", PATH.read_text())
    links += re.findall(r"/github/OWNER/grpo_kernels/blob/main/([\w./-]+)", PATH.read_text())
    assert len(links) > 5 and all((ROOT / link).exists() for link in links)


@pytest.mark.nightly
def test_its_memory_and_minutes_are_those_of_the_forecast():
    settings = {}
    exec(source_of("settings"), settings)
    config = parse_config(
        [], model=settings["MODEL"], dataset="d", lora_rank=16, gradient_checkpointing=True,
        steps=settings["STEPS"], prompts_per_step=settings["PROMPTS"],
        num_generations=settings["COMPLETIONS"], micro_batch_size=settings["MICRO_BATCH"],
        max_completion_length=settings["TOKENS"], max_prompt_length=320,
    )  # fmt: skip
    expected = memory.predict(config, shape_of(config.model), card=memory.CARDS["t4"])
    seconds = expected.work.seconds(memory.CARDS["t4"])
    minutes = [config.steps * x / 60 for x in (sum(seconds.values()), seconds["sampling"])]
    gib, total, sampling = re.search(
        r"peak of (\S+) of its 15 GiB, and at least (\d+) minutes for 100 steps, (\d+) of them",
        source_of("trainer-text"),
    ).groups()
    assert float(gib) == pytest.approx(expected.peak / 2**30, abs=0.06)
    assert [int(total), int(sampling)] == [int(x) for x in minutes]


def test_rows_of_gsm8k_and_answers(monkeypatch):
    """GSM8K's columns become a prompt and a number; a number alone between tags is an answer."""
    rows = [{"question": f"{i}?", "answer": f"So <<1+1=2>>2.\n#### {i},000"} for i in range(1, 9)]
    splits = {"train": Dataset.from_list(rows), "test": Dataset.from_list(rows)}
    monkeypatch.setattr(datasets, "load_dataset", lambda *name: DatasetDict(splits))
    cells = {"DATA": "openai/gsm8k", "HELD_OUT": 3}
    exec(source_of("data"), cells)
    assert len(cells["train"]) == 8 and len(cells["held_out"]) == 3
    (first, *_) = cells["train"]
    assert first.keys() == {"prompt", "answer"} and first["answer"] == "1000"
    assert first["prompt"][-1] == {"role": "user", "content": "1?"}
    exec(source_of("rewards"), cells)
    texts = ["<answer>1,000</answer>", "<answer> 1000\n</answer>", "<answer>$1000</answer>",
             "<answer>-1000</answer>", "<answer>1000", "1000"]  # fmt: skip
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    by_name = {"completions": completions, "answer": ["1000"] * 6, "prompts": None}
    assert cells["right"](**by_name) == [1, 1, 0, 0, 0, 0]
    assert cells["tags"](**by_name) == [0.2, 0.2, 0.2, 0.2, 0.1, 0]
    assert cells["number"](**by_name) == [0.2, 0.2, 0, 0.2, 0, 0]


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
    """Text that a cell printed."""
    return "".join(x.text for x in outputs if x.output_type == "stream" and x.name == "stdout")


def test_nothing_is_installed_and_the_doctor_is_content(outputs):
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
    line = r"Right (before|after) training: +(\d+) of 8 \((\S+)% ± 34.6%\)"
    (before,) = re.findall(line, text_of(outputs["before"]))
    again, after = re.findall(line, text_of(outputs["after"]))
    assert before == again and [before[0], after[0]] == ["before", "after"]
    assert float(before[2]) == pytest.approx(100 * int(before[1]) / 8, abs=0.05)
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
    steps = [
        [json.loads(line)["gradient_share"] for line in path.read_text().splitlines()]
        for path in pages.glob("*.jsonl")
    ]
    # Groups with equal rewards are left out; three steps in which all are do not happen.
    graded = [step for step in steps if any(step)]
    assert graded
    assert all(len(step) in (3, 6) and sum(step) == pytest.approx(1.0) for step in graded)
    # Steps without a gradient have a page, too.
    assert sorted(path.name for path in pages.glob("*.html")) == [
        f"step-00000{step}.html" for step in (1, 2, 3)
    ]

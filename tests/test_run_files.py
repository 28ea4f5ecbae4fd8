"""Files of a run besides its rows, and its lines in the terminal."""

import json
from pathlib import Path

import pytest
import torch

from grpo_kernels.explain.records import read_rows, read_values
from grpo_kernels.training import Metric, TrainingConfig
from grpo_kernels.training.checks import check_folder
from grpo_kernels.training.run import about
from grpo_kernels.training.run.observers import print_above, sample_table
from tests.helpers.trainer_runs import config_of, rows_of


@pytest.mark.usefixtures("real_memory")
def test_a_folder_says_what_its_page_needs(make):
    """Metrics that were registered during the run, too; without them the page can be made again."""
    trainer, metric = make(), Metric("letters", merge="max", chart="letters of one", unit="%")
    trainer.metrics.register(Metric("own"))
    folder = trainer.train(lambda *_: trainer.metrics.register(metric))
    values = json.loads((folder / "about.json").read_text())
    assert values["metrics"] == {
        "own": {"chart": None, "unit": ""}, "letters": {"chart": "letters of one", "unit": "%"},
    }  # fmt: skip
    assert values["defaults"] == TrainingConfig.default_json()
    assert {"torch", "Python", "processes x device"} <= values["versions"].keys()
    assert {path.name for path in folder.glob("*.json")} == {
        "about.json", "config.json", "trained_on.json"
    }  # fmt: skip


@pytest.mark.usefixtures("real_memory")
def test_steps_with_a_warning_or_a_page_show_their_completions(make, capsys):
    """A warning's text is printed; in the row it has its rule, too."""
    trainer = make(steps=4, explain_every=3)
    after_step, sign = trainer.run.watch.after_step, {"rule": "odd", "text": "an odd step"}
    trainer.run.watch.after_step = lambda row: after_step(row) or [sign] * (row["step"] == 2)
    folder = trainer.train()
    assert {row["step"] for row in read_rows(folder / "samples.jsonl")} == {1, 2, 3}
    rows, said = rows_of(folder), capsys.readouterr().out
    assert [row.get("warnings", []) for row in rows] == [[], [sign], [], []]
    assert said.count("      warning: an odd step\n") == said.count("warning: ") == 1
    assert "explained" not in rows[1] and said.count("step 3 explained") == 1
    assert rows[2]["explained"].keys() == {"why", "spike", "cause", "text"}
    assert rows[2]["explained"]["why"] == "every 3 steps" and not rows[2]["explained"]["spike"]


@pytest.mark.usefixtures("real_memory")
def test_a_run_in_bf16_says_first_that_weights_may_not_move(make, capsys):
    make(dtype="bf16", learning_rate=1e-6, steps=1).train()
    said = capsys.readouterr().out
    assert said.count("warning: ") == said.count("warning: learning_rate is 1e-06 at most") == 1


def test_the_terminal_gets_no_control_characters(capsys):
    row = {"prompt": "Q \x1b[2J", "answer": "1\x1b]0;owned\x07", "reward": 1.0, "advantage": 0.5,
           "ended": True, "completion": "ä \x1b[31mb\x08c\x9b1A\u202e"}  # fmt: skip
    text = sample_table([row])
    assert "ä \\x1b[31mb\\x08c\\x9b1A\\u202e" in text and r"1\x1b]0;owned\x07" in text
    assert all(c.isprintable() for c in text.replace("\n", ""))
    print_above("one\x1b[2J\ntwo")
    assert capsys.readouterr().out == "one\\x1b[2J\ntwo\n"


@pytest.mark.parametrize("mode", (None, 0o500), ids=("a file", "closed"))
def test_a_folder_that_cannot_be_written_to_is_refused(mode, tmp_path, monkeypatch):
    taken = tmp_path / "taken"
    taken.touch() if mode is None else taken.mkdir(mode)
    monkeypatch.setattr("os.access", lambda path, _: Path(path).stat().st_mode & 0o200 > 0)
    with pytest.raises(PermissionError, match=r"output: .*taken is not a folder that can be writ"):
        check_folder(config_of("m", taken / "run"))


def test_devices_have_names(monkeypatch):
    """Apple's module has none; a CPU's has its threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert about._name_of(torch.device("mps")) == "mps"
    assert about._name_of(torch.device("cpu")).endswith(", 2 threads")


def test_a_damaged_file_of_values_has_none(tmp_path):
    (tmp_path / "about.json").write_text("{")
    assert read_values(tmp_path / "about.json") == read_values(tmp_path / "missing.json") == {}

"""Files of a run besides its rows, and its lines in the terminal."""

import json
import subprocess
import time
from dataclasses import dataclass

import pytest
import torch

from grpo_kernels.explain import runs
from grpo_kernels.explain.records import read_rows
from grpo_kernels.training import Metric, TrainingConfig
from grpo_kernels.training.run import about, logs
from grpo_kernels.training.run.metrics import Metrics
from grpo_kernels.training.run.observers import Observer, line_of, print_above, sample_table
from tests.helpers.trainer_runs import rows_of


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
    (folder / "about.json").unlink()
    (folder / "report.html").unlink()
    runs.write([folder], folder / "report.html")
    assert (folder / "report.html").exists()


def test_a_default_is_that_of_the_user_s_own_option(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Own(TrainingConfig):
        mine: int = 3

    about.write(tmp_path, Own(model="m", mine=4), {}, Metrics())
    assert json.loads((tmp_path / "about.json").read_text())["defaults"]["mine"] == 3


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
def test_seconds_of_files_and_observers_are_in_the_next_row(make, monkeypatch):
    def wait(row):
        time.sleep(0.4 * (row["step"] == 1))

    class Slow(Observer):
        def step(self, row, samples):
            wait(row)

    append = logs.append
    monkeypatch.setattr(logs, "append", lambda path, row: (
        append(path, row), path.stem == "metrics" and wait(row)
    ))  # fmt: skip
    trainer = make(steps=3)
    trainer.run.observers.append(Slow(trainer.config))
    folder = trainer.train()
    first, second, third = read_rows(folder / "metrics.jsonl")
    assert second["seconds/page"] > 0.8 > max(first["seconds/page"], third["seconds/page"])


@pytest.mark.usefixtures("real_memory")
def test_a_folder_of_an_earlier_version_goes_on(make, capsys):
    """Later steps are compared with its rows, for warnings and for pages."""
    folder = make(save_every=1).train()
    old = [{**row, "warnings": ["a text"], "explained": None} for row in rows_of(folder)]
    logs.write_rows(folder / "metrics.jsonl", old)
    (folder / "about.json").rename(folder / "environment.json")
    trainer = make(save_every=1, steps=3, resume=True)
    trainer.train()
    assert [row["step"] for row in trainer.run.watch.rows] == [1, 2, 3]
    assert len(trainer.explanations.steps.seen["grad_norm"]) == 3
    assert [row.get("warnings") for row in rows_of(folder)] == [["a text"]] * 2 + [None]
    assert "failed (" not in capsys.readouterr().out and (folder / "about.json").exists()


@pytest.mark.usefixtures("real_memory")
def test_a_run_in_bf16_says_first_that_weights_may_not_move(make, capsys):
    make(dtype="bf16", learning_rate=1e-6, steps=1).train()
    said = capsys.readouterr().out
    assert said.count("warning: ") == said.count("warning: learning_rate is 1e-06 at most") == 1


def test_a_commit_is_that_of_the_package_s_own_checkout(tmp_path, monkeypatch):
    def commit():
        return about.versions().get("grpo_kernels' commit")

    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    monkeypatch.setattr(about, "__file__", str(tmp_path / "about.py"))
    assert commit() is None
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "m"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "about.py").touch()
    assert commit() is None  # installed into another project's folder
    subprocess.run([*git, "add", "about.py"], check=True)
    assert commit().endswith("-dirty")


def test_a_gpu_without_a_name_has_that_of_its_kind():
    assert about._name_of(torch.device("mps")) == "mps"


@pytest.mark.parametrize(("threads", "end"), ((1, ", 1 thread"), (2, ", 2 threads")))
def test_a_cpu_has_its_threads(monkeypatch, threads, end):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert about._name_of(torch.device("cpu")).endswith(end)


def test_the_terminal_tells_prompt_completion_and_answer_apart():
    """A prompt with an example in it, too."""
    row = {"prompt": "Q: 1 + 1?\nA: 2\n\nQ: 2 + 2?", "answer": "4", "ended": True, "advantage": 1}
    rows = [{**row, "completion": text, "reward": 0.5} for text in ("4", "five")]
    other = {**rows[0], "prompt": [{"role": "user", "content": "3 + 3?"}], "ended": False}
    assert sample_table([*rows, other]).splitlines() == [
        "      prompt: Q: 2 + 2?  (right answer: 4)",
        "        reward 0.50, advantage +1.00: 4",
        "        reward 0.50, advantage +1.00: five",
        "      prompt: 3 + 3?  (right answer: 4)",
        "        reward 0.50, advantage +1.00: 4 [cut]",
    ]
    line = line_of({"step": 3, "reward": 0.5, "accuracy": 0.25, "seconds": 2})
    assert "reward 0.500  sampled accuracy 25%  2.0 s" in line


def test_the_terminal_gets_no_control_characters(capsys):
    row = {"prompt": "Q \x1b[2J", "answer": "1\x1b]0;owned\x07", "reward": 1.0, "advantage": 0.5,
           "ended": True, "completion": "ä \x1b[31mb\x08c\x9b1A\u202e"}  # fmt: skip
    text = sample_table([row])
    assert "ä \\x1b[31mb\\x08c\\x9b1A\\u202e" in text and r"1\x1b]0;owned\x07" in text
    assert all(c.isprintable() for c in text.replace("\n", ""))
    print_above("one\x1b[2J\ntwo")
    assert capsys.readouterr().out == "one\\x1b[2J\ntwo\n"

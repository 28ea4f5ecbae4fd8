"""Texts of a run for people: summary, page, completions in the terminal."""

import json
import subprocess

import pytest

from grpo_kernels.training import TrainingConfig
from grpo_kernels.training.run import logs, report
from grpo_kernels.training.run.observers import line_of, print_above, sample_table


def rows_of(*rewards):
    return [
        {"step": i + 1, "reward": reward, "seconds": 2.0, "peak_memory_gib": 1.0}
        for i, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("rewards", "text"),
    (
        ((0.25,), "1 step of 2.0 s; reward 0.250; peak"),
        ((0.25, 0.5), "2 steps of 2.0 s; reward 0.250 (first step) -> 0.500 (last step); peak"),
        ((0.25, 9.0, 0.5), "3 steps of 2.0 s; reward 0.250 (first step) -> 0.500 (last step);"),
        ((0.0, 1.0, 9.0, 1.0, 2.0), "reward 0.500 (first 2 steps) -> 1.500 (last 2 steps);"),
        (range(20), "reward 2.000 (first 5 steps) -> 17.000 (last 5 steps);"),
        ((None, 0.5, None), "3 steps of 2.0 s; reward 0.500; peak"),
        ((None,), "1 step of 2.0 s; peak memory 1.00 GiB"),
    ),
)
def test_a_summary_compares_steps_that_do_not_overlap(rewards, text):
    assert text in report.summary(rows_of(*rewards), [])


BEFORE = {"step": 0, "accuracy": 0.25, "low": 0.13, "high": 0.45, "problems": 27}
HELD_OUT = "(27 problems that were not trained on; 95 % interval:"


@pytest.mark.parametrize(
    ("after", "text"),
    (
        ((0, 0.25, 0.13, 0.45), f"accuracy is 25.0% {HELD_OUT} 13.0% to 45.0%)"),
        ((9, 0.96, 0.82, 0.99), f"rose from 25.0% to 96.0% {HELD_OUT} 82.0% to 99.0%)"),
        ((9, 0.04, 0.01, 0.12), f"fell from 25.0% to 4.0% {HELD_OUT} 1.0% to 12.0%)"),
        ((9, 0.52, 0.34, 0.69), f"rose from 25.0% to 52.0% {HELD_OUT} 34.0% to 69.0%)"),
        ((9, 0.50, 0.32, 0.67), f"went from 25.0% to 50.0%, a difference within chance {HELD_OUT}"),
        ((9, 0.25, 0.13, 0.45), f"stayed at 25.0% {HELD_OUT}"),
        ((9, 0.07, 0.02, 0.24), f"went from 25.0% to 7.0%, a difference within chance {HELD_OUT}"),
    ),
)
def test_a_summary_says_whether_held_out_accuracy_changed(after, text):
    after = dict(zip(("step", "accuracy", "low", "high"), after, strict=True))
    assert text in report.summary([], [BEFORE, {**BEFORE, **after}])


def test_a_summary_begins_with_both_accuracies():
    rows = [{**row, "accuracy": row["reward"] / 2} for row in rows_of(0.5, 1.0)]
    first, second = report.summary(rows, [BEFORE]).split(".\n")
    ending = "; accuracy of the completions trained on 25% (first step) -> 50% (last step)"
    assert first.startswith("Held-out accuracy is 25.0%") and first.endswith(ending)
    assert second.startswith("2 steps of 2.0 s; reward 0.500 (first step)")


@pytest.mark.usefixtures("curves")
def test_a_page_has_what_was_changed_and_where_it_ran(tmp_path):
    config = TrainingConfig(model="m", dataset="d", steps=7, learning_rate=1e-6)
    logs.open_folder(tmp_path, config.as_json(), -1)
    assert "Device" not in report.write(tmp_path)[0].read_text()
    report.write_environment(tmp_path)
    shown = {"prompt": "1 + 1?", "completion": "<answer>3", "answer": "2", "ended": False}
    logs.append(tmp_path / "metrics.jsonl", rows_of(0.5)[0])
    logs.append(tmp_path / "samples.jsonl", {"step": 1, **shown, "reward": 0.2, "advantage": -1.0})
    page = report.write(tmp_path)[0].read_text()
    changed, rest = page.split("Options that differ")[1].split("Options at their defaults")
    changed, environment = changed.split("Device and versions")
    header = "<th>option</th><th>here</th><th>default</th>"
    assert header in changed and "<td>steps</td><td>7</td><td>100</td>" in changed
    assert "learning_rate" not in changed and "<td>learning_rate</td><td>1e-06</td>" in rest
    assert all(f"<td>{x}</td>" in environment for x in ("torch", "Python", "processes x device"))
    heads = "<th>prompt (its end)</th><th>completion</th><th>right answer</th><th>reward</th>"
    cells = "<td>1 + 1?</td><td>&lt;answer&gt;3 [cut]</td><td>2</td><td>0.20</td>"
    assert heads in page and cells in page


def test_curves_of_one_short_name_are_told_apart(monkeypatch):
    drawn = {}
    monkeypatch.setattr(report, "_svg", lambda title, lines: drawn.update({title: [*lines]}) or "")
    row = {"step": 1, "reward": 3.0, "reward/reward": 1.0, "a/x": 1.0, "b/x": 2.0, "n[0]": 0.5}
    report._pictures([row], [], {"own": ["a/x", "b/x", "n[0]"]})
    assert drawn == {"reward, mean of 5 steps": ["reward", "reward/reward"],
                     "own": ["x", "b/x", "n[0]"]}  # fmt: skip


@pytest.mark.parametrize("name", ("_brief", "brief", "$x$", "a_$b$"))
def test_a_curve_has_its_name(name):
    page = report._svg("$t$", {"reward": [(1, 0.0)], name: [(1, 0.0), (2, 1.0)]})
    assert all(f"<!-- {text} -->" in page for text in ("reward", name, "$t$"))


def test_a_commit_is_that_of_the_package_s_own_checkout(tmp_path, monkeypatch):
    def commit():
        report.write_environment(tmp_path)
        return json.loads((tmp_path / "environment.json").read_text()).get("grpo_kernels' commit")

    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))
    assert commit() is None
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "m"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "report.py").touch()
    assert commit() is None  # installed into another project's folder
    subprocess.run([*git, "add", "report.py"], check=True)
    assert commit().endswith("-dirty")


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

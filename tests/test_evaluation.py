"""Accuracy by groups of problems, of several samples, and from the command line."""

import json
from dataclasses import replace

import pytest

from grpo_kernels.training import evaluate, report, rewards
from grpo_kernels.training.evaluate import of_samples
from grpo_kernels.training.metrics import accuracy_of
from tests.helpers.trainer_runs import config_of, rows_of, trainer_of

pytestmark = pytest.mark.usefixtures("real_memory", "curves")


def answer(correct, completion="<answer>1</answer>", **columns):
    return {"correct": correct, "reward": 1.0 * correct, "completion": completion, **columns}


@pytest.mark.parametrize(
    ("text", "marked"),
    (
        ("<answer> 7 </answer>", "7"),
        ("so #### 7", "7"),
        (r"so \boxed{7}", "7"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("no mark: 7", None),
        # Of several there is none that counts.
        ("<answer>7</answer> #### 7", None),
        ("#### 7\n#### 8", None),
        ("<answer>7</answer><answer>7</answer>", None),
        ("<answer>7", None),
        (r"\boxed{7", None),
        (r"\boxed{" + "1" * 200 + "}", None),
    ),
)
def test_marked_answers(text, marked):
    assert rewards.marked_answer(text) == marked


@pytest.mark.parametrize(
    ("given", "right", "expected"),
    (
        ("7", "7", True),
        ("7.0", "7", True),
        ("$1,234", "1234", True),
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", "0.5", True),
        ("8", "7", False),
        ("7 apples and 8", "7", False),
        ("-7", "7", False),
    ),
)
def test_all_marks_are_judged_alike(given, right, expected):
    for text in (f"<answer>{given}</answer>", f"x\n#### {given}", rf"\boxed{{{given}}}"):
        assert rewards.is_marked_correct(text, right) is expected, text


def test_accuracy_by_groups():
    answers = [
        answer(i % 2 == 0, level=1 + i % 3, held_out="new" if i < 10 else "seen") for i in range(30)
    ]
    found = accuracy_of(answers)
    assert found.accuracy == 0.5 and set(found.parts) == {"held_out", "level"}
    for column, parts in found.parts.items():
        for value, part in parts.items():
            own = [a["correct"] for a in answers if str(a[column]) == value]
            assert part.accuracy == sum(own) / len(own) and len(part.answers) == len(own)
            assert part.low < part.accuracy < part.high
    assert "held_out: new 50.0%, seen 50.0%; level: 1 50.0%, 2 50.0%, 3 50.0%" in str(found)
    assert found.summary(3)["by"]["level"]["2"]["problems"] == 10
    # One value tells nothing apart.
    assert accuracy_of([answer(True, level=1)] * 3).parts == {}
    assert "by" not in accuracy_of([answer(True)]).summary(0)


def test_several_samples():
    right, wrong = "<answer>4</answer>", "<answer>5</answer>"
    groups = (
        [answer(True, right)] * 3 + [answer(False, wrong)],  # all three measures
        [answer(True, "#### 4.0")] + [answer(False, wrong)] * 2 + [answer(False, "nothing")],
        [answer(False, "nothing")] * 4,
    )
    found = of_samples([a for group in groups for a in group], 4)
    assert set(found) == {"accuracy", "pass@2", "pass@4", "majority@4"}
    assert found["accuracy"][0] == pytest.approx((3 / 4 + 1 / 4) / 3)
    assert found["pass@4"][0] == pytest.approx(2 / 3)
    # Two of four, both wrong: 0 ways of 6, 3 ways of 6.
    assert found["pass@2"][0] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert found["majority@4"][0] == pytest.approx(1 / 3)
    for mean, low, high in found.values():
        assert 0 <= low <= mean <= high <= 1 and low < high
    # The same number in two ways is one answer.
    votes = [answer(True, "#### 4"), answer(True, r"\boxed{4.0}"), answer(False, wrong)]
    assert of_samples(votes, 3)["majority@3"][0] == 1.0
    zeros = [answer(False, wrong)] + [answer(True, f"#### {zero}") for zero in ("0", "0.0")]
    assert of_samples(zeros, 3)["majority@3"][0] == 1.0


LEVELS = {"dataset": "examples.word_problems:all_levels", "eval_size": 6, "max_prompt_length": 1000}


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    options = {"rewards": ["answer", "format"], "train_size": 40, "save_model": True}
    config = config_of(tiny_model, tmp_path_factory.mktemp("runs"), **LEVELS, **options)
    return trainer_of(replace(config, eval_every=1)).train()


def test_a_run_reports_by_groups(trained):
    rows = [json.loads(line) for line in (trained / "evaluations.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert set(row["by"]) == {"held_out", "level"} and set(row["by"]["level"]) == set("123")
        assert sum(part["problems"] for part in row["by"]["held_out"].values()) == 6
    page = (trained / "report.html").read_text()
    assert "held_out: seen template" in page and "level: 3" in page


def test_the_command(trained, tmp_path, capsys):
    flags = {"model": trained / "model", **LEVELS, "num_generations": 4, "output": tmp_path}
    flags["max_completion_length"] = 6
    for _ in range(2):  # a second one gets a folder of its own
        evaluate.main([f"--{name}={value}" for name, value in flags.items()])
    told = capsys.readouterr().out
    assert "held-out accuracy" in told and "pass@4:" in told and "majority@4:" in told
    folders = [tmp_path / "evaluation", tmp_path / "evaluation-2"]
    texts = [(folder / "answers.jsonl").read_text() for folder in folders]
    assert texts[0] == texts[1]
    answers = [json.loads(line) for line in texts[0].splitlines()]
    assert len(answers) == 6 + 24 and sum("sample" in a for a in answers) == 24
    (row,) = [json.loads(line) for line in (folders[0] / "evaluations.jsonl").open()]
    assert set(row["samples"]) == {"accuracy", "pass@2", "pass@4", "majority@4"}
    page = (folders[0] / "report.html").read_text()
    assert "pass@4" in page and "6 of 6 answers" in page


def test_runs_are_compared(trained, tiny_model, tmp_path, capsys):
    other = trainer_of(config_of(tiny_model, tmp_path, name="<other>", eval_size=4)).train()
    report.main([str(other), str(trained)])
    path = tmp_path / "compare.html"
    assert capsys.readouterr().out.strip().endswith(f"\n{path}")
    page = path.read_text()
    assert "&lt;other&gt;" in page and "<other>" not in page
    assert (
        "<td>dataset</td><td>examples.problems:additions</td><td>examples.word_problems:all_levels</td>"
        in page
    )
    assert "<td>learning_rate</td>" not in page and page.count("seconds per step") >= 2
    assert len(rows_of(other)) == 2
    with pytest.raises(SystemExit):
        report.main([str(other), str(tmp_path)])

"""Accuracy by groups of problems and of several samples, from the command line; warnings."""

import json
import math

import numpy
import pytest

from grpo_kernels.training import TrainingConfig, evaluate
from grpo_kernels.training.evaluate import accuracy_of, wilson_interval
from grpo_kernels.training.run import logs
from grpo_kernels.training.run.observers import Observer
from grpo_kernels.training.run.watch import WINDOW, Watch
from tests.helpers.tiny_models import make_model, make_tokenizer
from tests.helpers.trainer_runs import trainer_with

pytestmark = pytest.mark.usefixtures("real_memory", "curves")


def answer(correct, completion="<answer>1</answer>", **columns):
    return {"correct": correct, "reward": 1.0 * correct, "completion": completion, **columns}


def test_the_interval_is_wilsons():
    # Newcombe (1998), table I.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0, 0.1611), abs=1e-4)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)
    assert wilson_interval(5, 5)[1] == 1.0


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
    # One value tells nothing apart; nor is there a word of comparisons that all had a result.
    assert accuracy_of([answer(True, level=1)] * 3).parts == {}
    assert not {"by", "timed_out"} & accuracy_of([answer(True)]).summary(0).keys()
    late = accuracy_of([answer(False)] * 2, late=2)
    assert late.summary(1)["timed_out"] == 2 and "2 comparisons had no result" in str(late)


def test_several_samples():
    """The interval is over problems: that of the mean, or Wilson's where all are 0 or 1."""
    groups = [[answer(True)] * 3 + [answer(False)], [answer(True)] + [answer(False)] * 3,
              [answer(False)] * 4]  # fmt: skip
    groups[0][0] = answer(True) | {"reward": math.nan}  # which no function scored
    found = accuracy_of([a for group in groups for a in group], 4)
    half = 1.96 * math.sqrt((0.75 - 1 / 3) ** 2 / 2 + (0.25 - 1 / 3) ** 2 / 2 + (1 / 3) ** 2 / 2)
    assert found.accuracy == pytest.approx(1 / 3) and found.low == 0.0
    assert found.high == pytest.approx(1 / 3 + half / math.sqrt(3))
    assert found.reward == pytest.approx(3 / 11) and found.summary(0)["problems"] == 3
    assert "accuracy 33.3% (95 %: 0.0% to 76.5%) of 3, reward 0.27" in str(found)
    alike = accuracy_of([answer(True)] * 4 + [answer(False)] * 4, 4)
    assert (alike.low, alike.high) == wilson_interval(1, 2)
    assert (accuracy_of(groups[0], 4).low, accuracy_of(groups[0], 4).high) == (0.0, 1.0)
    parts = accuracy_of([answer(True, level=1)] * 2 + [answer(False, level=2)] * 2, 2).parts
    assert [part.accuracy for part in parts["level"].values()] == [1.0, 0.0]
    assert [part.summary(0)["problems"] for part in parts["level"].values()] == [1, 1]


LEVELS = {"dataset": "examples.word_problems:all_levels", "eval_size": 6, "max_prompt_length": 1000}


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    options = {"rewards": ["answer", "format"], "train_size": 40, "save_model": True}
    folder = tmp_path_factory.mktemp("runs")
    return trainer_with(tiny_model, folder, eval_every=1, **LEVELS, **options).train()


def test_a_run_reports_by_groups(trained):
    rows = logs.read(trained / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert set(row["by"]) == {"held_out", "level"} and set(row["by"]["level"]) == set("123")
        assert sum(part["problems"] for part in row["by"]["held_out"].values()) == 6
    page = (trained / "report.html").read_text()
    assert "held_out: seen template" in page and "level: 3" in page


def test_the_command(trained, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}", "answer": i}) + "\n" for i in range(7)))
    flags = {"model": trained / "model", "num_generations": 4, "max_completion_length": 6,
             "output": tmp_path / "evaluation"}  # fmt: skip
    found = []
    for name, options in (
        ("evaluation", LEVELS), ("evaluation-2", LEVELS), ("evaluation-3", {"eval_dataset": path}),
    ):  # fmt: skip
        evaluate.main([f"--{name}={value}" for name, value in {**flags, **options}.items()])
        found.append(logs.read(tmp_path / name / "answers.jsonl"))
    printed = capsys.readouterr().out
    assert printed.count("held-out accuracy") == 6
    assert printed.count(", 4 samples per problem") == 3
    assert found[0] == found[1]
    assert len(found[0]) == 6 + 24 and sum("sample" in a for a in found[0]) == 24
    (row,) = logs.read(tmp_path / "evaluation" / "evaluations.jsonl")
    assert row["samples"].keys() == {"count", "accuracy", "low", "high", "reward", "problems"}
    assert (row["samples"]["count"], row["samples"]["problems"]) == (4, 6)
    assert "4 samples each" in (tmp_path / "evaluation" / "report.html").read_text()
    # A file is answered whole.
    assert "All 7 problems of" in printed
    assert [a["answer"] for a in found[2] if "sample" not in a] == [str(i) for i in range(7)]


def test_the_file_of_a_run_is_evaluated(trained, tmp_path, capsys):
    """Evaluates as the run would: on its held-out dataset, with the model's adapters merged."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name, "answer": 1}))
    folder, options = tmp_path / "run", {
        "model": "of-the-run", "dataset": f"{tmp_path}/train.jsonl", "eval_every": 10,
        "eval_dataset": f"{tmp_path}/test.jsonl", "output": f"{tmp_path}/run", "resume": True,
        "lora_rank": 32, "lora_alpha": 64, "gradient_checkpointing": True, "num_generations": 2,
        "max_completion_length": 3,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(options))
    folder.mkdir()  # which is not touched
    evaluate.main([str(tmp_path / "run.yaml"), "--model", str(trained / "model")])
    assert "All 1 problems of" in capsys.readouterr().out and not list(folder.iterdir())
    answers = logs.read(tmp_path / "run-2" / "answers.jsonl")
    assert [a["prompt"] for a in answers] == ["test"] * 3
    used = json.loads((tmp_path / "run-2" / "config.json").read_text())
    assert used["lora_rank"] == 0 and used["gradient_checkpointing"] is False
    row = {"prompt": "a", "answer": 1, "rewards": "breif"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"the column `rewards` of .*test.jsonl\[0\] is"):
        evaluate.main([str(tmp_path / "run.yaml"), "--model", str(trained / "model")])


def test_no_problem_that_a_run_trained_on_is_evaluated(tiny_model, tmp_path, capsys):
    """The run holds out a fifth of its file, and writes it for the command."""
    path, shown = tmp_path / "train.jsonl", set()
    rows = [{"question": f"{i} + 1?", "answer": i + 1, "level": i % 2} for i in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = {"dataset": str(path), "eval_size": 4, "prompts_per_step": 8, "rewards": ["format"]}
    trainer = trainer_with(tiny_model, tmp_path, max_prompt_length=1000, **options)
    folder = trainer.train(lambda _, samples: shown.update(p["prompt"] for p in samples.problems))
    config = str(folder / "config.json")
    for more in ([], [f"--eval_dataset={path}"], [f"--eval_dataset={tmp_path}/./train.jsonl"]):
        with pytest.raises(SystemExit, match=r"^dataset=.*train.jsonl: a run with these options"):
            evaluate.main([config, *more])
    assert not (tmp_path / "t-2").exists()
    evaluate.main([config, f"--eval_dataset={folder}/held_out.jsonl"])
    assert "held-out accuracy" in capsys.readouterr().out
    asked = {row["prompt"]: row for row in logs.read(tmp_path / "t-2" / "answers.jsonl")}
    assert len(shown) == 16 and len(asked) == 4 and not shown & asked.keys()
    own = {row["prompt"]: row for row in logs.read(folder / "answers.jsonl")}
    for prompt, row in asked.items():
        assert (row["answer"], row["level"]) == (own[prompt]["answer"], own[prompt]["level"])


@pytest.mark.parametrize("value", ({(0, 0): 1}, {1, 2}, float("nan"), (1, 2)))
def test_held_out_problems_that_json_does_not_hold(value, tmp_path):
    """A run goes on without the file, which would have other problems in it."""
    path = tmp_path / "held_out.jsonl"
    assert not logs.write_if_exact(path, [{"prompt": "1 + 1?", "extra": value}])
    assert not path.exists()
    assert logs.write_if_exact(path, rows := [{"prompt": "1 + 1?", "extra": [1, None]}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows


PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}"
    "{% endfor %}"
)


def test_prompts_in_parts_and_numbers_of_numpy(make):
    """Are shown, written and counted as text and numbers are, whatever an observer does to them."""

    class Changes(Observer):
        def evaluation(self, step, evaluation):
            for row in evaluation.answers:
                row["prompt"][0]["content"].clear()

    problems = [
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": text}]}], "answer": "1",
         "level": level}
        for level, text in zip(numpy.arange(2), ("one and one", "two"), strict=True)
    ]  # fmt: skip

    def some(prompts, completions):
        return [float(i % 2) if chat[0]["content"][0]["text"] == "two" else None
                for i, chat in enumerate(prompts)]  # fmt: skip

    model, tokenizer = make_model("llama"), make_tokenizer()
    tokenizer.chat_template = PARTS
    trainer = make(
        model, tokenizer, steps=1, num_generations=2, prompts_per_step=2, show_every=1,
        rewards={"noise": some}, problems=(problems, problems),
    )  # fmt: skip
    trainer.run.observers.append(Changes(trainer.config))
    folder = trainer.train()
    assert [p["prompt"][0]["content"][0]["text"] for p in problems] == ["one and one", "two"]
    assert [a["level"] for a in logs.read(folder / "answers.jsonl")] == [0, 1, 0, 1]
    page = (folder / "report.html").read_text()
    assert "<td>one and one</td>" in page and "not scored" in page and "<td>1.00</td>" in page


def test_evaluations_have_a_length_and_a_temperature_of_their_own(make):
    options = {"eval_max_completion_length": 9, "eval_temperature": 0.7, "eval_size": 6}
    trainer, asked = make(max_completion_length=4, steps=1, **options), []
    own = trainer.rollout

    def rollout(prompts, count, sampling):
        asked.append((sampling.max_new_tokens, sampling.temperature))
        return own(prompts, count, sampling)

    trainer.rollout = rollout
    answers = logs.read(trainer.train() / "answers.jsonl")
    assert asked == [(9, 0.7), (4, 1.0), (9, 0.7)]
    assert len(answers) == 12 and all("answered" in row for row in answers)


# Warnings


ROW = {"reward": 0.5, "grad_norm": 1.0, "groups_equal": 0.0, "truncated": 0.0, "entropy": 2.0}


@pytest.mark.parametrize(
    ("values", "message"),
    (
        ({"groups_equal": 1.0}, "every group had equal rewards"),
        ({"truncated": 1.0}, "every completion was cut at max_completion_length = 256"),
        ({"answers_timed_out": 2.0}, "2 comparisons of answers had no result in 5 s"),
        ({"entropy": 0.01}, "entropy fell from 2.00 to 0.010"),
        ({"ratio_max": 50.0}, "ratio_max is 50. Lower learning_rate, or bound the ratio"),
        ({"kl_max": 50.0}, "kl_max is 50. Lower learning_rate, or bound the KL"),
        ({"grad_norm": math.nan}, "the gradient norm is nan: the update was skipped"),
        ({}, None),
    ),
)
def test_warnings_name_the_cause(values, message):
    watch = Watch(TrainingConfig(model="m"))
    assert watch.after_step({"step": 0, **ROW}) == []
    rows = [{"step": i, **ROW, **values} for i in range(1, WINDOW + 1)]
    warnings = [warning for row in rows for warning in watch.after_step(row)]
    # The same again only after a while; but an update left out is always told.
    assert len(warnings) == (0 if message is None else WINDOW if "gradient" in message else 1)
    assert message is None or message in warnings[0]

"""Accuracy, of a run and from the command line; warnings."""

import json
import math
import shutil

import pytest
import torch

from grpo_kernels.explain.records import read_rows
from grpo_kernels.training import evaluate
from grpo_kernels.training.run import logs
from grpo_kernels.training.run.accuracy import accuracy_of, wilson_interval
from tests.helpers.trainer_runs import noise, trainer_with

pytestmark = pytest.mark.usefixtures("real_memory")


def answer(correct, completion="<answer>1</answer>", **columns):
    return {"correct": correct, "reward": 1.0 * correct, "completion": completion, **columns}


def test_the_interval_is_wilsons():
    # Newcombe (1998), table I.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0, 0.1611), abs=1e-4)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)
    assert wilson_interval(5, 5)[1] == 1.0


def test_comparisons_without_a_result_are_told():
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


# The command


SUMS = [{"prompt": f"{i} + 1 = ", "answer": i + 1} for i in range(20)]
# Options that an evaluation reads nothing of, or could not honor.
OTHERS = {
    "is_correction": "token_truncate", "rollout": "vllm", "trackers": ["clearml"], "lora_rank": 4,
    "resume": True, "gradient_checkpointing": True, "beta": 0.1, "ref_model": "gone",
    "loss_type": "<an object of Python>", "an_option_that_is_gone": 1,
}  # fmt: skip


def rows_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """A run of two steps on a file, of which it holds out a fifth, and the prompts it showed."""
    folder, shown = tmp_path_factory.mktemp("runs"), set()
    options = {"rewards": ["answer", "format"], "save_model": True, "eval_size": 4, "top_k": 50,
               "dataset": write_rows(folder / "train.jsonl", SUMS)}  # fmt: skip
    trainer = trainer_with(tiny_model, folder, steps=4, num_generations=2, **options)
    trainer.train(lambda _, samples: shown.update(p["prompt"] for p in samples.problems))
    return folder / "t", shown


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run."""
    return shutil.copytree(trained[0], tmp_path / "run")


def answers_of(folder):
    return [row for row in read_rows(folder / "answers.jsonl") if "sample" not in row]


def test_an_evaluation_repeats_the_run_s_last(trained, run, capsys):
    """The same problems, prompts, weights, rewards and length, of which none was trained on."""
    first = evaluate.main([str(run)])
    assert first == run / "evaluations" / "1"
    printed = capsys.readouterr().out
    assert printed.count("held-out accuracy") == 2 and ", 2 samples per problem" in printed
    own = [row for row in answers_of(run) if row["step"] == 4]
    assert [{**row, "step": 4} for row in answers_of(first)] == own
    prompts = {row["prompt"] for row in own}
    assert len(trained[1]) == 16 and len(prompts) == 4 and not trained[1] & prompts
    samples = [row for row in read_rows(first / "answers.jsonl") if "sample" in row]
    assert len(samples) == 8 and [row["sample"] for row in samples] == [0, 1] * 4
    (row,) = read_rows(first / "evaluations.jsonl")
    assert row["samples"].keys() == {"count", "accuracy", "low", "high", "reward", "problems"}
    assert (row["samples"]["count"], row["samples"]["problems"]) == (2, 4)
    assert {"about.json", "report.html"} <= {path.name for path in first.iterdir()}
    assert evaluate._new_folder(run, None) == run / "evaluations" / "2"
    # What is asked for is in a folder of its own, and no run is touched.
    before = rows_in(run / "metrics.jsonl")
    second = evaluate.main([
        str(run), "--num_samples", "3", "--temperature", "0.5", "--max-completion-length", "2",
        "--output", str(run.parent / "new" / "one"),
    ])  # fmt: skip
    assert second == run.parent / "new" / "one" and rows_in(run / "metrics.jsonl") == before
    used = logs.read_json(second / "config.json")
    assert (used["temperature"], used["max_completion_length"], used["top_k"]) == (0.5, 2, 50)
    assert read_rows(second / "evaluations.jsonl")[0]["samples"]["count"] == 3


def test_options_that_an_evaluation_does_not_need_are_not_read(run, capsys):
    expected = answers_of(evaluate.main([str(run), "--num_samples", "0"]))
    options = logs.read_json(run / "config.json")
    logs.write_json(run / "config.json", options | OTHERS)
    assert answers_of(evaluate.main([str(run), "--num_samples", "0"])) == expected
    assert "vLLM does not sample here" in capsys.readouterr().out


def test_what_was_trained_on_is_not_answered(trained, run, tmp_path, capsys):
    """Whatever the file is called, and the columns are."""
    new = [{"question": "9 + 9?", "answer": "9\n#### 18"}]
    spaced = [problem | {"prompt": f"{problem['prompt']} "} for problem in SUMS]
    path = write_rows(tmp_path / "a.jsonl", spaced + new)
    folder = evaluate.main([str(run), "--problems", path, "--num_samples", "0"])
    assert f"16 of 21 problems of {path} are left out" in capsys.readouterr().out
    answers = answers_of(folder)
    assert len(answers) == 5 and answers[-1]["answer"] == "18"
    assert "9 + 9?" in answers[-1]["prompt"] and not trained[1] & {x["prompt"] for x in answers}
    # Also among those that a run calls held out.
    write_rows(run / "held_out.jsonl", SUMS)
    assert len(answers_of(evaluate.main([str(run), "--num_samples", "0"]))) == 4


def test_adapters_of_a_run_are_evaluated_as_they_are(tiny_model, tmp_path, monkeypatch):
    options = {"lora_rank": 4, "learning_rate": 0.1, "save_model": True, "eval_size": 4,
               "dataset": write_rows(tmp_path / "train.jsonl", SUMS)}  # fmt: skip
    trainer = trainer_with(tiny_model, tmp_path, **options)
    folder, used, load = trainer.train(), [], evaluate.load_for_inference
    monkeypatch.setattr(
        evaluate, "load_for_inference", lambda *what: used.append(load(*what)) or used[-1]
    )
    assert len(answers_of(evaluate.main([str(folder)]))) == 4
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        logits = used[0](ids).logits
        torch.testing.assert_close(logits, trainer.policy.model(ids).logits)
        with used[0].disable_adapter():
            assert float((used[0](ids).logits - logits).abs().max()) > 0.01


def test_a_run_from_python_is_evaluated(tiny_model, tmp_path, capsys):
    """With its functions; without them they are not scored, and answers are compared as texts."""
    rows = [{"prompt": f"{i}", "answer": "a", "rewards": ["noise"]} for i in range(8)]

    def contains(completion, answer):
        return True

    folder = trainer_with(
        tiny_model, tmp_path, save_model=True, problems=(rows[:4], rows[4:]), is_correct=contains
    ).train()
    (row,) = read_rows(evaluate.main([str(folder)]) / "evaluations.jsonl")
    printed = capsys.readouterr().out
    assert "Reward noise is not scored" in printed and "by its own contains" in printed
    assert row["accuracy"] == 0.0 and row["reward"] is None
    functions = {"rewards": {"noise": noise}, "is_correct": contains}
    (row,) = read_rows(evaluate.main([str(folder)], **functions) / "evaluations.jsonl")
    assert row["accuracy"] == 1.0 and row["reward"] > 0
    assert "not scored" not in capsys.readouterr().out


@pytest.mark.parametrize("value", ({(0, 0): 1}, {1, 2}, float("nan"), (1, 2)))
def test_held_out_problems_that_json_does_not_hold(value, tmp_path):
    """A run goes on without the file, which would have other problems in it."""
    path = tmp_path / "held_out.jsonl"
    assert not logs.write_if_exact(path, [{"prompt": "1 + 1?", "extra": value}])
    assert not path.exists()
    assert logs.write_if_exact(path, rows := [{"prompt": "1 + 1?", "extra": [1, None]}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows

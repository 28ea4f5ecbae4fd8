"""Reward functions: how they are called, what they may not return, and those of the examples."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from examples import gsm8k_from_scratch, problems
from grpo_kernels.training.problems import rewards
from grpo_kernels.training.problems.rewards import RewardFunction, check_rewards, reward_table
from grpo_kernels.training.run.interruptions import StepError
from tests.helpers.trainer_runs import FakeRollout, rows_of

CHAT = [{"role": "user", "content": "a"}]
SUMS = [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(8)]


def functions_of(**functions):
    return [RewardFunction(name, name, function) for name, function in functions.items()]


# Functions of the library and of the examples

correctness = gsm8k_from_scratch.correctness
SCRATCH = "<reasoning>a</reasoning><answer>1</answer><answer>2</answer>"
LONG = "1" * 5000


@pytest.mark.parametrize(
    ("function", "text", "right", "paid"),
    (
        (rewards.answer, "<think>a</think><answer>1234.5</answer>", "1234.5", 2.0),
        (rewards.answer, "<answer>$1,234.50</answer>", "1234.5", 2.0),
        # Paid for is what counts as correct.
        (rewards.answer, r"<answer>\frac{1}{2}</answer>", "1/2", 2.0),
        (rewards.answer, r"\boxed{7.0}", 7, 2.0),
        (rewards.format, "<think>a</think><answer>1234.5</answer>", None, 0.8),
        (rewards.format, "<answer>2</answer><answer>1234.5</answer>", None, 0.0),
        (problems.addition, "<answer>13</answer>", "12", 0.5),
        (problems.addition, "The sum is <answer>12</answer>", "12", 0.4),
        # The tutorial's, which compares numbers exactly.
        (correctness, "<answer>12.0</answer>", "12", 1.5),
        (correctness, "<answer>3 * 4 = 12</answer>", "12", 0.0),  # several numbers
        (correctness, "<answer>It is $10,000.</answer>", "10000", 1.5),
        (correctness, "<answer>\u22123</answer>", "-3", 1.5),
        (correctness, "<answer>9007199254740993</answer>", "9007199254740992", 0.0),
        (correctness, f"<answer>{LONG}</answer>", f"{LONG}2", 1.5),  # the numbers that begin both
        (gsm8k_from_scratch.format, SCRATCH, None, 0.8),
    ),
)
def test_what_is_paid(function, text, right, paid):
    columns = {} if right is None else {"answer": [right]}
    assert function(["q"], [text], **columns) == [pytest.approx(paid)]


# Tables


def test_some_rewards_apply_to_some_problems():
    functions = functions_of(
        one=lambda completions: torch.ones(len(completions)),
        maybe=lambda level: [x or None for x in level],
    )
    rows = [
        {"prompt": "a", "level": 3, "rewards": ["one", "maybe"]},
        {"prompt": "b", "level": 0, "rewards": ["maybe"]},
        {"prompt": "c", "level": 3, "rewards": "one"},
    ]
    table = torch.tensor(reward_table(functions, rows, ["x", "y", "z"]))
    expected = torch.tensor([[1.0, 3.0], [math.nan, math.nan], [1.0, math.nan]])
    torch.testing.assert_close(table, expected, equal_nan=True)
    sums = rewards.weighted_sum(table, [0.5, 2.0]).tolist()
    assert sums[0] == 6.5 and math.isnan(sums[1]) and sums[2] == 0.5
    assert rewards.weighted_sum(table[::2], []).tolist() == [4.0, 1.0]
    # What nobody asks a function for, it does not see.
    others = [{"prompt": "a", "answer": "Paris", "rewards": ["one"]}, {"prompt": "b", "answer": 2}]
    functions = [functions[0], *functions_of(addition=problems.addition)]
    assert math.isnan(reward_table(functions, others, ["x", "y"])[0][1])


def test_functions_of_one_name_all_count(monkeypatch):
    for name, value in (("rewards_a", 1.0), ("rewards_b", 10.0)):
        score = SimpleNamespace(score=lambda completions, _x=value: [_x] * len(completions))
        monkeypatch.setitem(sys.modules, name, score)
    functions = rewards.resolve_rewards(["rewards_a:score", "rewards_b:score", "format", "format"])
    assert [x.label for x in functions] == ["score", "score-2", "format", "format-2"]
    # By either name, in the column of a problem.
    for named, paid in (
        (None, [1.0, 10.0, 0.4, 0.4]),
        (["rewards_b:score"], [10.0]),
        (["score"], [1.0, 10.0]),
    ):
        problem = {"prompt": "Q", "rewards": named}
        check_rewards(functions, [problem], "train")
        (row,) = reward_table(functions, [problem], ["<answer></answer>"])
        assert [x for x in row if not math.isnan(x)] == paid


# Calls


class Judge:
    def __call__(self, completions, answer):
        return [f"{x}{y}" for x, y in zip(completions, answer, strict=True)]


ALL = {"prompts", "completions", "completion_ids", "transcripts", "answer", "level"}


@pytest.mark.parametrize(
    ("function", "expected"),
    (
        (lambda **columns: [columns.keys() == ALL] * 2, [1, 1]),
        (lambda completions, **columns: [columns.keys() == ALL - {"completions"}] * 2, [1, 1]),
        (lambda *, prompts, completions, answer, **_: map(
            "".join, zip(prompts, completions, answer, strict=True)), [135, 246]),
        (Judge(), [35, 46]),
        (lambda answer, completions, prompts: completions, [3, 4]),
        (lambda prompts, completions, transcripts: transcripts, [36, 46]),
        (lambda completion_ids: map(sum, completion_ids), [3, 7]),
        (lambda level=None, other=7: [other + (x or 0) for x in level], [7, 10]),
    ),
)  # fmt: skip
def test_functions_get_the_keywords_that_they_name(function, expected):
    rows = [{"prompt": "1", "answer": "5"}, {"prompt": "2", "answer": "6", "level": 3}]
    more = {"completion_ids": [[1, 2], [3, 4]], "transcripts": ["36", "46"]}
    functions = functions_of(f=function)
    check_rewards(functions, rows, "train")
    assert [value for (value,) in reward_table(functions, rows, ["3", "4"], more=more)] == expected


# Metrics of a function


def wordy(completions, metrics):
    """A reward function as a file names it."""
    words = [float(len(text)) for text in completions]
    metrics.add("words", words)
    metrics.add("some", [None, math.nan, *words[2:]])
    metrics.add("calls", 1)
    return words


def test_a_function_named_in_a_file_adds_metrics(make):
    """Values added in an evaluation are in no row."""
    trainer = make(
        rewards=[f"{__name__}:wordy"], eval_size=2, eval_every=1,
        rollout=lambda _: FakeRollout((6, 1, 3)), problems=(SUMS[:4], SUMS[4:6]),
    )  # fmt: skip
    for row in rows_of(trainer.train()):
        assert row["words"] == row["reward"] == row["reward/wordy"] and row["calls"] == 1
        assert row["some"] > 0


def test_messages_are_answered_by_messages():
    rows = [{"prompt": CHAT, "answer": "6"}, {"prompt": "b", "answer": "6"}]
    texts, seen = ["<answer>6</answer>", "<answer>6</answer>"], []

    def note(completions, transcripts):
        seen.extend([*completions, *transcripts])
        return [0.0, 0.0]

    functions = functions_of(**rewards.REWARDS, note=note)
    table = reward_table(functions, rows, texts, more={"transcripts": texts})
    assert table == [[2.0, pytest.approx(0.4), 0.0]] * 2
    assert seen == [[{"role": "assistant", "content": texts[0]}], texts[1], *texts]


def test_functions_get_copies():
    """Also of each other's completions: those of one problem share its objects."""
    problem = {"prompt": [*CHAT], "tests": [1], "answer": "6"}

    def greedy(prompts, completions, tests):
        for chat, completion, of_problem in zip(prompts, completions, tests, strict=True):
            chat += completion
            of_problem.append(2)
        assert [len(chat) for chat in prompts] == [2, 2] and tests == [[1, 2], [1, 2]]
        return [0.0, 0.0]

    reward_table(functions_of(greedy=greedy), [problem] * 2, ["x", "y"])
    assert problem == {"prompt": CHAT, "tests": [1], "answer": "6"}


@pytest.mark.usefixtures("real_memory")
def test_what_no_function_scores_is_in_no_figure(make):
    """A group whose scored completions are equal teaches nothing; observers get copies."""
    problem, scores = {"prompt": "Q", "tests": [1]}, [None, 1.0, 1.0, None, None, 1.0, 0.0, 1.0]
    trainer = make(
        prompts_per_step=2, problems=([problem] * 2, ()), rollout=lambda _: FakeRollout(),
        rewards={"noise": lambda completions: scores},
    )  # fmt: skip
    row, samples = trainer.train_step(trainer.train_problems)
    assert row["reward"] == row["reward/noise"] == pytest.approx(4 / 5)
    assert row["groups_equal"] == 0.5
    assert row["reward_std"] == pytest.approx((0 + math.sqrt(1 / 3)) / 2)
    assert [x is None for x in scores] == samples.rewards_total.isnan().tolist()
    samples.problems[0]["tests"].append(2)
    assert trainer.train_problems == [{"prompt": "Q", "tests": [1]}] * 2
    scores[:4] = [None] * 4
    row, _ = trainer.train_step(trainer.train_problems)
    assert row["groups_equal"] == 0.5 and row["reward_std"] == pytest.approx(math.sqrt(1 / 3))
    scores[:] = [None] * 8
    with pytest.raises(StepError, match="no completion of this step has a reward"):
        trainer.train_step(trainer.train_problems)


def test_each_completion_is_paid_for_itself():
    texts = ["<think>", "<think>a</think><answer>12</answer>", "<answer>13</answer>"]
    for function, paid in (
        (rewards.format, [0.2, 0.8, 0.4]), (rewards.answer, [0.0, 2.0, 0.0]),
    ):  # fmt: skip
        assert function(["q"] * 3, texts, answer=["12"] * 3) == pytest.approx(paid)

"""What a completion is worth: answers, numbers, and tables of rewards."""

import math
from fractions import Fraction

import pytest
import torch

from examples import problems
from grpo_kernels.training import rewards


@pytest.mark.parametrize(
    ("text", "tagged", "marked"),
    (
        ("so <answer>\n 12 \n</answer> it is", "12", "12"),
        ("<answer></answer>", "", ""),
        ("<answer>1</answer><answer>2</answer>", None, None),
        ("</answer>12<answer>", None, None),
        ("<answer>12", None, None),
        ("<answer>7 #### 7", None, None),
        ("so #### 7", None, "7"),
        (r"so \boxed{\frac{1}{2}} it is", None, r"\frac{1}{2}"),
        # Of several there is none that counts.
        ("<answer>7</answer> #### 7", "7", None),
        ("#### 7\n#### 8", None, None),
        (r"\boxed{7", None, None),
        (r"\boxed{" + "1" * 200 + "}", None, None),
    ),
)
def test_answers_that_are_marked(text, tagged, marked):
    assert rewards.answer_of(text) == tagged and rewards.marked_answer(text) == marked


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        ("12", 12), ("-3", -3), ("\u22123", -3), ("+4", 4), ("$1,234.50", Fraction("1234.5")),
        ("-$5", -5), ("$-5", -5), ("-$-5", None), ("50%", 50), ("1/2", Fraction(1, 2)),
        ("-1/2", Fraction(-1, 2)), ("3.", 3), (".5", Fraction(1, 2)), (" 7 ", 7),
        ("1,000,000", 10**6), ("0.50", Fraction(1, 2)), ("1/0", None), ("1/2/3", None),
        ("1,23", None), ("12,", None), ("--3", None), ("", None), (".", None), ("-", None),
        ("1e9", None), ("1e999999999", None), ("nan", None), ("inf", None), ("twelve", None),
        ("12 apples", None), ("1 2", None), ("\u0663", None), ("\u00b2", None),
        ("\uff17", None), ("0x10", None), ("1_000", None), ("9" * 101, None),
    ),
)  # fmt: skip
def test_number_of(text, expected):
    assert rewards.number_of(text) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    (("7", True), ("7.0", True), ("$7", True), (r"\frac{14}{2}", True), ("8", False),
     ("7 apples and 8", False), ("-7", False)),
)  # fmt: skip
def test_all_marks_are_judged_alike(given, expected):
    for text in (f"<answer>{given}</answer>", f"x\n#### {given}", rf"\boxed{{{given}}}"):
        assert rewards.is_marked_correct(text, "7") is expected, text


def test_rewards_of_gsm8k():
    texts = [
        "<think>a</think><answer>1234.5</answer>", "<answer>$1,234.50</answer>",
        "<answer>1235</answer>", "1234.5", "<answer>1234.5</answer><answer>2</answer>",
    ]  # fmt: skip
    assert rewards.answer([], texts, answer=["1234.5"] * 5) == [2.0, 1.5, 0.0, 0.0, 0.0]
    assert rewards.format([], texts) == pytest.approx([0.8, 0.4, 0.4, 0.0, 0.0])
    texts = [f"<answer>{x}</answer>" for x in (r"\frac{1}{2}", "0.5", "1/3", r"\sqrt{")]
    assert rewards.math_equal([], texts, answer=["1/2"] * 4) == [2.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "reward", "right"),
    (
        ("<answer>12</answer>", 1.0, True),
        ("<answer>13</answer>", 0.5, False),
        ("The sum is <answer>12</answer>", 0.4, True),
        ("<answer>12</answer><answer>12</answer>", 0.6, False),
        ("<answer>twelve</answer>", 0.4, False),
    ),
)
def test_addition(text, reward, right):
    assert problems.addition([], [text], answer=["12"]) == [pytest.approx(reward)]
    assert rewards.is_correct(text, "12") == right


def test_some_rewards_apply_to_some_problems():
    functions = {
        "one": lambda prompts, completions, **_: torch.ones(len(completions)),
        "maybe": lambda prompts, completions, level, **_: [x or None for x in level],
    }
    rows = [
        {"prompt": "a", "level": 3, "rewards": ["one", "maybe"]},
        {"prompt": "b", "level": 0, "rewards": ["one", "maybe"]},
        {"prompt": "c", "level": 3, "rewards": "one"},
    ]
    table = torch.tensor(rewards.reward_table(functions, rows, ["x", "y", "z"]))
    expected = torch.tensor([[1.0, 3.0], [1.0, math.nan], [1.0, math.nan]])
    torch.testing.assert_close(table, expected, equal_nan=True)
    assert rewards.weighted_sum(table, [0.5, 2.0]).tolist() == [6.5, 0.5, 0.5]
    assert rewards.weighted_sum(table, []).tolist() == [4.0, 1.0, 1.0]


def test_functions_get_the_columns_they_can_take():
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2", "level": 3}]
    functions = {
        "plain": lambda prompts, completions: [1.0] * len(prompts),
        "levels": lambda prompts, completions, level: level,
    }
    table = rewards.reward_table(functions, rows, ["x", "y"])
    assert table[1] == [1.0, 3.0] and table[0][0] == 1.0 and math.isnan(table[0][1])
    # What nobody asks a function for, it does not see.
    others = [{**rows[0], "answer": "Paris", "rewards": ["plain"]}, rows[1]]
    functions = {"plain": functions["plain"], "addition": problems.addition}
    assert math.isnan(rewards.reward_table(functions, others, ["x", "y"])[0][1])
    with pytest.raises(ValueError, match=r"columns \['entry', 'task'\] for score; got"):
        rewards.reward_table({"score": problems.score}, rows, ["x", "y"])

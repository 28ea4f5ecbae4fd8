"""The trainer's parts: rewards, data, logs, warnings."""

import json
import math
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples import problems
from grpo_kernels.training import (
    TrainingConfig,
    data,
    load_problems,
    logs,
    metrics,
    rewards,
)
from grpo_kernels.training.metrics import accuracy_of, wilson_interval
from grpo_kernels.training.watch import WINDOW, Watch

pytestmark = pytest.mark.usefixtures("real_memory")


def config_of(**options):
    return TrainingConfig(**{"model": "m", **options})


# Rewards


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        ("<answer>12</answer>", "12"),
        ("so <answer>\n 12 \n</answer> it is", "12"),
        ("<answer></answer>", ""),
        ("<answer>1</answer><answer>2</answer>", None),
        ("<answer><answer>1</answer></answer>", None),
        ("</answer>12<answer>", None),
        ("<answer>12", None),
        ("<ANSWER>12</ANSWER>", None),
        ("", None),
    ),
)
def test_answer_of(text, expected):
    assert rewards.answer_of(text) == expected


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


def test_rewards_of_gsm8k():
    texts = [
        "<think>a</think><answer>1234.5</answer>", "<answer>$1,234.50</answer>",
        "<answer>1235</answer>", "1234.5", "<answer>1234.5</answer><answer>2</answer>",
    ]  # fmt: skip
    assert rewards.answer([], texts, answer=["1234.5"] * 5) == [2.0, 1.5, 0.0, 0.0, 0.0]
    assert rewards.format([], texts) == pytest.approx([0.8, 0.4, 0.4, 0.0, 0.0])


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


def test_math_equal_knows_expressions():
    texts = [f"<answer>{x}</answer>" for x in (r"\frac{1}{2}", "0.5", "2/4", "1/3", r"\sqrt{")]
    assert rewards.math_equal([], texts, answer=["1/2"] * 5) == [2.0, 2.0, 2.0, 0.0, 0.0]


def chain_sum(config):
    return problems.of_reasoning_gym("chain_sum", config)


def test_the_tasks_own_judge():
    train, _ = load_problems(config_of(dataset=f"{__name__}:chain_sum", train_size=2, eval_size=1))
    texts = [f"<answer>{train[0]['answer']}</answer>", "<answer>no</answer>"]
    functions = rewards.resolve_rewards(["examples.problems:score"])
    table = rewards.reward_table(functions, train, texts)
    assert list(functions) == ["score"] and table[0] == [2.0] and table[1][0] < 2.0


@pytest.mark.parametrize("name", ("examples.problems:nothing", "no.such:thing", "json:__doc__"))
def test_what_cannot_be_imported(name):
    with pytest.raises(ValueError, match=r"rewards: expected (module:function|a function); got"):
        rewards.resolve_rewards([name])
    with pytest.raises(ValueError, match=r"dataset: expected (module:function|a function); got"):
        load_problems(config_of(dataset=name))


def test_some_rewards_apply_to_some_problems():
    functions = {
        "one": lambda prompts, completions, **_: [1.0] * len(completions),
        "maybe": lambda prompts, completions, level, **_: [x or None for x in level],
    }
    problems = [
        {"prompt": "a", "level": 3, "rewards": ["one", "maybe"]},
        {"prompt": "b", "level": 0, "rewards": ["one", "maybe"]},
        {"prompt": "c", "level": 3, "rewards": "one"},
    ]
    table = rewards.reward_table(functions, problems, ["x", "y", "z"])
    assert table[0] == [1.0, 3.0]
    assert table[1][0] == table[2][0] == 1.0 and math.isnan(table[1][1] + table[2][1])
    with pytest.raises(ValueError, match="reward function one: expected 1 values"):
        rewards.reward_table({"one": lambda *_, **__: [1, 2]}, problems[:1], ["x"])


def test_functions_get_the_columns_they_can_take():
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2", "level": 3}]

    def plain(prompts, completions):
        return [1.0] * len(prompts)

    def levels(prompts, completions, level):
        return level

    table = rewards.reward_table({"plain": plain, "levels": levels}, rows, ["x", "y"])
    assert table[1] == [1.0, 3.0] and table[0][0] == 1.0 and math.isnan(table[0][1])
    # What nobody asks a function for, it does not see.
    others = [{**rows[0], "answer": "Paris", "rewards": ["plain"]}, rows[1]]
    functions = {"plain": plain, "addition": problems.addition}
    assert math.isnan(rewards.reward_table(functions, others, ["x", "y"])[0][1])
    with pytest.raises(ValueError, match=r"columns \['entry', 'task'\] for score; got"):
        rewards.reward_table({"score": problems.score}, rows, ["x", "y"])


def test_rewards_are_weighed():
    table = torch.tensor([[1.0, 2.0], [3.0, math.nan]], dtype=torch.float64)
    assert rewards.weighted_sum(table, [0.5, 2.0]).tolist() == [4.5, 1.5]
    assert rewards.weighted_sum(table, []).tolist() == [3.0, 3.0]


# Metrics and logs


def test_what_some_updates_do_not_have_is_of_the_others():
    row = metrics.merge_updates(
        [{"loss": 1.0, "tokens": 2}, {"loss": 3.0, "tokens": 3, "kl_max": 7.0}]
    )
    assert row == {"loss": 2.0, "tokens": 5, "kl_max": 7.0}


def test_rows_wait_for_room_on_the_disk(tmp_path, monkeypatch):
    log = logs.Logs(tmp_path)
    assert log.append("metrics.jsonl", {"step": 1, "loss": math.nan}) is None
    real = Path.open

    @contextmanager
    def full(self, mode="r", *args, **options):
        """Files take their first bytes and then no more."""
        with real(self, mode, *args, **options) as file:
            write = file.write
            if mode == "a":
                file = SimpleNamespace(write=lambda text: (write(text[:5]), fail()))
            yield file

    def fail():
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        assert "No space left" in log.append("metrics.jsonl", {"step": 2})
        assert logs.read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None}]
    assert log.append("metrics.jsonl", {"step": 3}) is None
    assert [row["step"] for row in logs.read(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    logs.truncate(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in logs.read(tmp_path / "metrics.jsonl")] == [1, 2]


# Data


@pytest.mark.parametrize(
    ("name", "sizes"), (("additions", (54, 27)), ("gsm_symbolic", (20, 5)), ("chain_sum", (20, 5)))
)
def test_made_problems_are_held_out(name, sizes):
    where = __name__ if name == "chain_sum" else "examples.problems"
    given = {} if name == "additions" else {"train_size": 20, "eval_size": 5}
    train, held_out = load_problems(config_of(dataset=f"{where}:{name}", **given))
    prompts = [{p["prompt"] for p in some} for some in (train, held_out)]
    assert len(held_out) == sizes[1] and sizes[0] / 2 < len(train) <= sizes[0]
    assert not prompts[0] & prompts[1]
    assert all(rewards.number_of(p["answer"]) is not None for p in (*train, *held_out))
    chat = load_problems(config_of(dataset=f"{where}:{name}", **given, chat=True))[0][0]
    if name == "gsm_symbolic":
        assert data.EXAMPLE in train[0]["prompt"]
        assert [m["role"] for m in chat["prompt"]] == ["user"]


def test_files(tmp_path):
    import datasets

    rows = [{"question": f"{i}?", "answer": f"so\n#### {i}", "level": i} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found = datasets.Dataset.from_list(rows)
    found.to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        train, held_out = load_problems(config_of(dataset=str(tmp_path / name)))
        answers = [[p["answer"] for p in part] for part in (train, held_out)]
        assert [len(part) for part in answers] == [16, 4], name
        assert sorted(int(x) for part in answers for x in part) == [*range(20)]
        assert all(p["level"] == int(p["answer"]) for p in (*train, *held_out))
        assert train[3]["prompt"].endswith(f"Question: {train[3]['level']}?\n")


def test_a_problem_is_not_in_both_parts(tmp_path):
    """Files may have rows twice, and be sorted."""
    rows = [{"prompt": f"{i // 2}?", "answer": str(i // 2)} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train, held_out = load_problems(config_of(dataset=str(tmp_path / "a.jsonl"), eval_size=4))
    prompts = [{p["prompt"] for p in part} for part in (train, held_out)]
    assert len(prompts[0]) == 16 and len(prompts[1]) == 4 and not prompts[0] & prompts[1]
    assert max(int(p["answer"]) for p in train) > 16 > min(int(p["answer"]) for p in held_out)


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ('{"question": "a", "answer": "b"}\n{', "expected rows of json in .*a.jsonl"),
        ('{"text": "a"}', r"expected problems with a question .* got \['text'\]"),
        ("", "expected rows of json in .*a.jsonl"),
        (None, "expected a file; .*a.jsonl does not exist"),
    ),
)
def test_files_that_are_no_problems(text, message, tmp_path):
    if text is not None:
        (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_problems(config_of(dataset=str(tmp_path / "a.jsonl"), eval_size=0))


def test_every_problem_once_an_epoch():
    from itertools import islice

    order = list(islice(data.shuffled_epochs(7, seed=3), 21))
    assert [sorted(order[i : i + 7]) for i in (0, 7, 14)] == [list(range(7))] * 3
    assert order[:7] != order[7:14] and order == list(islice(data.shuffled_epochs(7, seed=3), 21))


# Evaluations and warnings


def test_the_interval_is_wilsons():
    # Newcombe (1998), table I.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0, 0.1611), abs=1e-4)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)
    assert wilson_interval(5, 5)[1] == 1.0


def row_of(step, **values):
    return {
        "step": step, "reward": 0.5, "grad_norm": 1.0, "groups_equal": 0.0, "truncated": 0.0,
        "entropy": 2.0, **values,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "told"),
    (
        ({"groups_equal": 1.0}, "every group had equal rewards"),
        ({"truncated": 1.0}, "every completion was cut at max_completion_length = 256"),
        ({"entropy": 0.01}, "entropy fell from 2.00 to 0.010"),
        ({"ratio_max": 50.0}, "ratio_max 50; token 3 'x'"),
        ({"kl_max": 50.0}, "kl_max 50; token 3 'x'"),
        ({"grad_norm": math.nan}, "the gradient's norm is nan: the update was left out"),
        ({}, None),
    ),
)
def test_warnings_name_the_cause(values, told):
    watch = Watch(config_of())
    assert watch.after_step(row_of(0)) == []
    warnings = [
        w
        for i in range(1, WINDOW + 1)
        for w in watch.after_step(row_of(i, **values), "token 3 'x'")
    ]
    if told is None:
        assert warnings == []
    else:
        assert told in warnings[0]
        # The same again only after a while; but an update left out is always told.
        assert len(warnings) == (WINDOW if "gradient" in told else 1)


def test_a_reward_that_is_gamed_is_told():
    def evaluation(right):
        answers = [{"correct": i < right, "reward": 1.0} for i in range(100)]
        return accuracy_of(answers)

    watch = Watch(config_of())
    assert watch.after_evaluation(evaluation(60)) is None
    for step in range(20):
        watch.after_step(row_of(step, reward=step / 20))
        if step == 5:
            assert watch.after_evaluation(evaluation(58)) is None
    assert "the reward rose from" in watch.after_evaluation(evaluation(20))
    assert watch.after_evaluation(evaluation(61)) is None

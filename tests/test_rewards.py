"""What a completion is worth: answers, numbers, and tables of rewards."""

import contextlib
import inspect
import math
import signal
import threading
import time
from fractions import Fraction

import pytest
import torch

from examples import problems
from grpo_kernels.training import Trainer, judging, rewards
from grpo_kernels.training.bounded import Late, TimedOut, at_most
from tests.helpers.trainer_runs import config_of


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
        # Tags count before other marks, of several of which there is none that counts.
        ("<answer>7</answer> #### 8", "7", "7"),
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
        ("1,000,000", 10**6), ("1/0", None), ("1/2/3", None), ("1,23", None), ("12,", None),
        ("", None), (".", None), ("-", None), ("1e9", None), ("nan", None), ("12 apples", None),
        ("1 2", None), ("\u0663", None), ("\u00b2", None), ("0x10", None), ("1_000", None),
        ("9" * 101, None),
    ),
)  # fmt: skip
def test_number_of(text, expected):
    assert rewards.number_of(text) == expected


@pytest.mark.parametrize(
    ("given", "right"),
    (
        ("12", "12"), ("12.0", "12"), ("$1,234.50", "1234.5"), ("50%", "50"), ("x+1", "1+x"),
        (r"\frac{3}{4}", "3/4"), (r"\sqrt{2}/2", r"\frac{\sqrt{2}}{2}"), (r"\$18", "18"),
    ),
)  # fmt: skip
def test_what_is_paid_in_full_is_counted(given, right):
    """By a run of the trainer and by an evaluation, however marked; nothing is, for another."""
    counts = inspect.signature(Trainer).parameters["is_correct"].default
    tagged = f"<answer>{given}</answer>"
    for answer, paid in ((right, 2.0), ("-77777", 0.0), ("7 apples and 8", 0.0)):
        assert rewards.math_equal(["q"], [tagged], [answer]) == [paid]
        assert rewards.answer(["q"], [tagged], [answer])[0] <= paid
        for text in (tagged, f"{tagged} #### 8", f"x\n#### {given}", rf"\boxed{{{given}}}"):
            assert counts(text, answer) is (paid > 0), text


@pytest.mark.parametrize("text", ("<answer></answer>", "<answer> </answer>", "#### ", r"\boxed{}"))
@pytest.mark.parametrize("right", ("", " ", "0"))
def test_no_answer_is_never_right(text, right):
    assert rewards.answer(["q"], [text], [right]) == rewards.math_equal(["q"], [text], [right])
    assert rewards.answer(["q"], [text], [right]) == [0.0]
    assert not rewards.is_correct(text, right) and not rewards.is_marked_correct(text, right)
    assert not rewards.is_marked_correct("#### x", right)


def test_rewards_of_gsm8k():
    texts = [
        "<think>a</think><answer>1234.5</answer>", "<answer>$1,234.50</answer>",
        "<answer>1235</answer>", "1234.5", "<answer>1234.5</answer><answer>2</answer>",
    ]  # fmt: skip
    assert rewards.answer([], texts, answer=["1234.5"] * 5) == [2.0, 1.5, 0.0, 0.0, 0.0]
    assert rewards.format([], texts) == pytest.approx([0.8, 0.4, 0.4, 0.0, 0.0])
    texts = [f"<answer>{x}</answer>" for x in (r"\frac{1}{2}", "0.5", "1/3", r"\sqrt{")]
    assert rewards.math_equal([], texts, answer=["1/2"] * 4) == [2.0, 2.0, 0.0, 0.0]


def test_addition():
    for text, reward, right in (
        ("<answer>12</answer>", 1.0, True),
        ("<answer>13</answer>", 0.5, False),
        ("The sum is <answer>12</answer>", 0.4, True),
        ("<answer>12</answer><answer>12</answer>", 0.6, False),
        ("<answer>twelve</answer>", 0.4, False),
    ):
        assert problems.addition([], [text], answer=["12"]) == [pytest.approx(reward)], text
        assert rewards.is_correct(text, "12") == right, text


# Tables


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
    table = torch.tensor(judging.reward_table(functions, rows, ["x", "y", "z"]))
    expected = torch.tensor([[1.0, 3.0], [1.0, math.nan], [1.0, math.nan]])
    torch.testing.assert_close(table, expected, equal_nan=True)
    assert judging.weighted_sum(table, [0.5, 2.0]).tolist() == [6.5, 0.5, 0.5]
    assert judging.weighted_sum(table, []).tolist() == [4.0, 1.0, 1.0]
    # What nobody asks a function for, it does not see.
    others = [{"prompt": "a", "answer": "Paris", "rewards": ["one"]}, {"prompt": "b", "answer": 2}]
    functions = {"one": functions["one"], "addition": problems.addition}
    assert math.isnan(judging.reward_table(functions, others, ["x", "y"])[0][1])


class Judge:
    def __call__(self, completions, answer):
        return [f"{x}{y}" for x, y in zip(completions, answer, strict=True)]


NAMED = {"answer", "level", "prompts"}


@pytest.mark.parametrize(
    ("function", "expected"),
    (
        (lambda completions, **more: [more.keys() == NAMED] * 2, [1, 1]),
        (lambda completion_ids, **more: [more.keys() == NAMED | {"completions"}] * 2, [1, 1]),
        (lambda *, prompts, completions, answer, **_: map(
            "".join, zip(prompts, completions, answer, strict=True)), [135, 246]),
        (Judge(), [35, 46]),
        (lambda **given: given["completions"], [3, 4]),
        (lambda completions, prompts: completions, [3, 4]),
        (lambda p, c: c, [3, 4]),
        (lambda p, c, /, **columns: c, [3, 4]),
        (lambda *both: both[1], [3, 4]),
        (lambda *both, answer: both[1], [3, 4]),
        (lambda prompts, texts, **columns: texts, [3, 4]),
        (lambda prompts, completions, transcripts, answer: transcripts, [36, 46]),
        (lambda p, c, level=None, other=7: [other + (x or 0) for x in level], [7, 10]),
    ),
)  # fmt: skip
def test_functions_are_called_as_they_are_written(function, expected):
    rows = [{"prompt": "1", "answer": "5"}, {"prompt": "2", "answer": "6", "level": 3}]
    more = {"completion_ids": [[1, 2], [3, 4]], "transcripts": ["36", "46"]}
    table = judging.reward_table({"f": function}, rows, ["3", "4"], more=more)
    assert [value for (value,) in table] == expected


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"columns \['entry', 'task'\] for score; got"):
        judging.reward_table({"score": problems.score}, [{"prompt": "a"}], ["x"])


def test_messages_are_answered_by_messages():
    rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": "6"},
            {"prompt": "b", "answer": "6"}]  # fmt: skip
    texts, seen = ["<answer>6</answer>", "<answer>6</answer>"], []

    def note(prompts, completions, transcripts):
        seen.extend([*completions, *transcripts])
        return [0.0, 0.0]

    functions = {**rewards.REWARDS, "note": note}
    table = judging.reward_table(functions, rows, texts, more={"transcripts": texts})
    assert table == [[2.0, 2.0, pytest.approx(0.4), 2.0, 0.0]] * 2
    assert seen == [[{"role": "assistant", "content": texts[0]}], texts[1], *texts]


# As a run's options say


@pytest.mark.parametrize(
    ("text", "paid"),
    (
        ("<answer>12</answer>", 2.0),
        ("<answer>1</answer> no, <answer> 12\n</answer>", 2.0),
        ("<answer>12.0</answer>", 1.5),
        ("<answer>It is 12 eggs.</answer>", 1.5),
        ("<answer>3 * 4 = 12</answer>", 0.0),  # several numbers
        ("<answer>12", 0.0),
        ("<answer>...</answer>", 0.0),
        ("<answer>-12</answer>", 0.0),
    ),
)
def test_correctness_as_from_scratch_pays_it(text, paid):
    assert rewards.correctness(["q"], [text], answer=["12"]) == [paid]
    assert rewards.correctness(["q"], [[{"content": text}]], answer=["12"]) == [paid]


def test_answers_and_tags_are_looked_for_as_the_options_say():
    twice = "<reasoning>a</reasoning><answer>1</answer><answer>2</answer>"
    for options, paid in (
        ({"think_tag": "reasoning"}, (0.0, 0.4, 0.0)),
        ({"think_tag": "reasoning", "last_answer": True}, (2.0, 0.8, 2.0)),
        ({"last_answer": True}, (2.0, 0.4, 2.0)),
    ):
        ours = rewards.of_options(config_of("m", "runs", **options))
        given = {"prompts": ["q"], "completions": [twice], "answer": ["2"]}
        found = [ours[name](**given)[0] for name in ("answer", "format", "math_equal")]
        assert found == pytest.approx(paid), options
    for text in (twice, "#### 1\n#### 2"):
        assert rewards.is_marked_correct(text, "2", last=True)
        assert not rewards.is_marked_correct(text, "2")


# Time


def in_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


HARD = r"\binom{10^9}{5\cdot 10^8}"


@pytest.mark.parametrize("where", (lambda work: work(), in_thread))
def test_expressions_are_compared_in_any_thread(where, monkeypatch):
    monkeypatch.setattr(rewards, "_SECONDS", 0.3)
    texts = [f"<answer>{x}</answer>" for x in (r"\frac{3}{4}", r"\frac{3}{5}", HARD)]
    start = time.monotonic()
    found = where(lambda: rewards.math_equal(["q"] * 3, texts, [r"\dfrac{6}{8}"] * 3))
    assert found == [2.0, 0.0, 0.0] and time.monotonic() - start < 5


def test_a_long_comparison_is_bounded_by_the_rewards_time():
    rows, functions = [{"prompt": "p", "answer": "7"}], {"math_equal": rewards.math_equal}
    start = time.monotonic()
    with pytest.raises(judging.RewardError, match=r"math_equal: .* within reward_timeout = 0\.3"):
        judging.reward_table(functions, rows, [f"<answer>{HARD}</answer>"], timeout=0.3)
    assert time.monotonic() - start < 4


def busy(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(100))


@pytest.mark.slow
@pytest.mark.nightly  # measures: 0.2 s without a processor change what happens first
@pytest.mark.parametrize("where", (lambda work: work(), in_thread))
@pytest.mark.parametrize("inner", (0.1, 5.0))
def test_a_block_in_a_bounded_block(inner, where):
    """Each says that it was too long where it was; outside the main thread the outermost alone."""

    def work():
        late = [Late(), Late()]
        with pytest.raises(TimedOut), at_most(0.3, late[0]), at_most(inner, late[1]):
            busy(3)
        with at_most(0.3, Late()):
            pass
        busy(0.4)
        return [one.rang for one in late]

    alone = where is in_thread or inner > 0.3
    assert where(work) == ([True, False] if alone else [False, True])


def test_many_blocks_in_a_bounded_block_of_a_thread():
    """The end comes while one begins, too."""

    def work():
        late = Late()
        with pytest.raises(TimedOut), at_most(0.2, late):
            while True:
                with at_most(5.0, Late()):
                    pass
        return late.rang

    assert all(in_thread(work) for _ in range(3))


@pytest.fixture
def rang():
    """When the alarm of a caller rang."""
    rewards.equal("x+1", "1+x")  # the first time imports what takes seconds
    found = []
    before = signal.signal(signal.SIGALRM, lambda *_: found.append(time.monotonic()))
    yield found
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.nightly  # measures
@pytest.mark.parametrize(("seconds", "every"), ((0.0, 0.3), (0.2, 0.0), (0.2, 0.3), (5.0, 0.3)))
def test_an_alarm_of_the_caller_rings_when_it_is_due(seconds, every, rang):
    """Before the block ends, in it, and after it."""
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.4, every)
    with contextlib.suppress(judging.RewardError):
        judging.reward_table(
            {"f": lambda p, c: [busy(0.6)]}, [{"prompt": "p"}], ["x"], timeout=seconds
        )
    assert rewards.math_equal(["q"], [r"<answer>\frac{3}{4}</answer>"], ["0.75"]) == [2.0]
    busy(max(0, start + 0.9 - time.monotonic()))
    due = [0.4, 0.7] if every else [0.4]
    assert [x - start for x in rang] == pytest.approx(due, abs=0.12)

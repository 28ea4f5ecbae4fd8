"""Texts that want more than to be read, in parsers, logs and options."""

import contextlib
import io
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.gsm8k_from_scratch import correctness
from examples.problems import addition
from grpo_kernels.explain import __main__ as explain
from grpo_kernels.explain.records import read_rows
from grpo_kernels.training import command_line
from grpo_kernels.training.config import TrainingConfig
from grpo_kernels.training.problems import answers, rewards
from grpo_kernels.training.run import checkpoint, logs

LONG = 100_000
NUMBERS = (
    "1" * LONG, "1," * LONG, "9" * 4000 + "/" + "7" * 4000, "\u0663" * LONG, "(" * 900,
    "2^" * 400 + "2", "10^10^10^10", "9**9**9**9", "factorial(10**9)",
    "\\binom{10^9}{5\\cdot 10^8}", "\\sqrt{" * 120 + "2" + "}" * 120,
)  # fmt: skip
ADVERSARIAL = (
    *(f"<answer>{text}</answer>" for text in NUMBERS), "<think>" * LONG + "<answer>1</answer>",
    "<answer>-" + "\n" * LONG + "5</answer>", "<answer>" + " " * LONG, "<answer>\\frac{" * LONG,
    "\\boxed{" + "{" * LONG,
    *(x * LONG for x in ("<answer>", "</answer>", "\x00", "\\boxed{", "}", "#### ", "-")),
)  # fmt: skip


def marked(prompts, completions, answer):
    answers.number_of(completions[0])
    return [float(answers.is_correct(completions[0], answer[0]))]


PARSERS = {
    **rewards.REWARDS, "addition": addition, "correctness": correctness, "marked": marked
}  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
def test_parsers_are_bounded(name):
    """Seconds for texts that a model under training may well write; none of them is right."""
    for text in ADVERSARIAL:
        start = time.monotonic()
        (value,) = PARSERS[name](["p"], [text], answer=["12345"])
        assert value <= 0.8 if name == "format" else value < 0.6
        assert time.monotonic() - start < 30, text[:40]


def read_answer(text, folder):
    for function in (rewards.answer, rewards.format, addition, marked):
        function(["p"], [text], answer=["42"])


def written(text, path):
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


def read_log(text, folder):
    read_rows(written(text, folder / "metrics.jsonl"))
    logs.open_folder(folder, {}, 3)


def read_others(text, folder):
    """Logs of other trainers."""
    for name in ("log.txt", "log.json", "log.csv", "log.jsonl"):
        with contextlib.suppress(SystemExit):
            explain.main([str(written(text, folder / name))])


def read_state(text, folder):
    """A checkpoint's: of other options, or of none."""
    state = checkpoint.state_of(written(text, folder / "state.json").parent)
    checkpoint.check_options(state, TrainingConfig(model="m"))
    checkpoint.check_inputs(state, {})


# What reads texts, and some that it reads as a rule.
READERS = {
    "answer": (read_answer, (
        "<think>6 * 7</think><answer>42</answer>", "so #### 1,042.50", "\\boxed{\\frac{1}{2}}",
        "<answer>-3/4</answer>", "<answer>$42.0</answer>",
    )),
    "yaml": (lambda text, folder: command_line.parse_config(
        ["--config", str(written(text, folder / "run.yaml"))]), (
        "model: m\nsteps: 3\nrewards: [answer]\nlearning_rate: 1e-6\nlora_rank: null\n",
    )),
    "log": (read_log, (
        '{"step": 1, "reward": 0.5}\n{"step": 2, "reward": NaN}\n{"step"', '{"reward": 1}\n[1]\n3',
    )),
    "others": (read_others, (
        "{'loss': 0.0, 'kl': nan}\n{'loss': '1e-05', 'epoch': '0.1'}", "step:1 - actor/lr:1e-06",
        '{"log_history": [{"step": 1, "kl": null, "grad_norm": NaN}]}', "Step | kl\n1 | 0.5",
        '"Step","a - train/kl"\n"1","2"', '{"step": 1, "data": {"actor/entropy": 0.1}}',
    )),
    "state": (read_state, (
        '{"step": 1, "best": {}, "config": {"model": "m"}, "processes": 1, "watch": {}}',
    )),
}  # fmt: skip


def texts_like(seeds):
    """Other orders of what the seeds consist of, with any text between, and seeds with an edit."""
    parts = sorted({part for seed in seeds for part in re.findall(r"\w+|\W", seed)})
    places = st.integers(0, max(map(len, seeds)))
    edited = st.builds(
        lambda seed, at, gone, new: seed[:at] + new + seed[at + gone :],
        st.sampled_from(seeds), places, st.integers(0, 6),
        st.sampled_from(parts) | st.text(max_size=4),
    )  # fmt: skip
    shuffled = st.lists(st.sampled_from(parts) | st.text(max_size=8), max_size=40).map("".join)
    return shuffled | edited | st.text()


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_any_text_is_read_or_refused_in_words(name, data, tmp_path_factory):
    read, seeds = READERS[name]
    text, said = data.draw(texts_like(seeds)), io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            read(text, tmp_path_factory.getbasetemp())
    except (ValueError, TypeError) as error:
        assert str(error)
    except SystemExit as error:
        assert error.code in (0, 2) and said.getvalue()

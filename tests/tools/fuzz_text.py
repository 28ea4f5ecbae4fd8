"""Coverage-guided fuzzing of what reads text: answers, YAML, JSON lines, options, checkpoints.

    pip install atheris && python -m tests.tools.fuzz_text -max_total_time=300

Each may refuse its input in words (a ValueError, TypeError or SystemExit 2 with a message); it may
not raise anything else, hang, or take memory without end. Options are libFuzzer's; a finding is
written to a file, which is then given as an argument to see it again.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

from examples.problems import addition

with atheris.instrument_imports(include=["grpo_kernels.training"]):
    from grpo_kernels.training import checkpoint, command_line, logs, rewards
    from grpo_kernels.training.config import TrainingConfig

FOLDER = Path(tempfile.mkdtemp())


def written(name: str, text: str) -> Path:
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


def answers(text: str) -> None:
    """The parsers that judge completions; those of math-verify have an alarm of their own."""
    rewards.is_correct(text, "42")
    rewards.marked_answer(text)
    rewards.number_of(text)
    for function in (rewards.answer, rewards.format, addition):
        function(["p"], [text], answer=["42"])


def yaml(text: str) -> None:
    """A file of options."""
    command_line.parse_config(["--config", str(written("run.yaml", text))])


def arguments(text: str) -> None:
    """A command line."""
    command_line.parse_config(text.split("\n")[:20])


def rows(text: str) -> None:
    """A log, as a run leaves it or a full disk does."""
    logs.read(written("metrics.jsonl", text))
    logs.truncate(FOLDER, 3)


def state(text: str) -> None:
    """A checkpoint's state: of other options, or of none."""
    given = checkpoint.state_of(written("checkpoints/step-000001/state.json", text).parent)
    checkpoint.check_same(given, json.loads(json.dumps(vars(TrainingConfig(model="m")))), 1)


READERS: tuple[Callable[[str], None], ...] = (answers, yaml, arguments, rows, state)
# What each reads as a rule: a place in `READERS`, then the text.
SEEDS = (
    (0, "<think>6 * 7</think><answer>42</answer>"), (0, "so #### 1,042.50"),
    (0, "\\boxed{\\frac{1}{2}}"), (0, "<answer>-3/4</answer>"), (0, "<answer>$42.0</answer>"),
    (1, "model: m\nsteps: 3\nrewards: [answer]\nlearning_rate: 1e-6\nlora_rank: null\n"),
    (2, "--model\nm\n--steps\n3\n--rewards\nanswer\n--beta=0.1\n--chat"),
    (3, '{"step": 1, "reward": 0.5}\n{"step": 2, "reward": NaN}\n{"step"'),
    (4, '{"step": 1, "best": {}, "config": {"model": "m"}, "processes": 1, "watch": {}}'),
)  # fmt: skip


def one(data: bytes) -> None:
    reader = READERS[data[0] % len(READERS) if data else 0]
    text = data[1:].decode("utf-8", "surrogateescape")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            reader(text)
    except (ValueError, TypeError) as error:
        assert str(error), f"{reader.__name__}: {type(error).__name__} without a word"
    except SystemExit as error:
        assert error.code in (0, 2) and said.getvalue(), (
            f"{reader.__name__}: ended with {error.code}"
        )


if __name__ == "__main__":
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    for number, (place, seed) in enumerate(SEEDS):
        (corpus / str(number)).write_bytes(bytes([place]) + seed.encode())
    files = any(not argument.startswith("-") for argument in sys.argv[1:])
    atheris.Setup([*sys.argv, *([] if files else [str(corpus)])], one)
    atheris.Fuzz()

"""Held-out problems: written by a run, read by an evaluation of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..config import TrainingConfig
from ..run import logs
from ..run.logs import HELD_OUT, TRAINED_ON
from .answers import is_correct as answer_is_correct
from .data import Problem, problems_of, prompt_key


def write_problems(
    folder: Path, train: Sequence[Problem], held_out: Sequence[Problem],
    is_correct: Callable[[str, Any], bool], say: Callable[[str], None],
) -> None:  # fmt: skip
    """Writes digests of the prompts that a run trains on, and its held-out problems."""
    own = None if is_correct is answer_is_correct else getattr(is_correct, "__name__", "is_correct")
    prompts = sorted({_digest(problem) for problem in train})
    logs.write_json(folder / TRAINED_ON, {"is_correct": own, "prompts": prompts})
    if held_out and not logs.write_if_exact(folder / HELD_OUT, held_out):
        say(f"{folder / HELD_OUT} is not written: a column holds no values of JSON")


def problems_to_answer(
    folder: Path, file: Path | None, config: TrainingConfig, say: Callable[[str], None]
) -> list[Problem]:
    """The problems of `file`, or a run's held-out problems, without any that it trains on.

    Raises:
        ValueError: there are none.
    """
    path, problems = file or folder / HELD_OUT, list[Problem]()
    if file is not None:
        problems = problems_of(str(file), config)
    elif path.exists():
        problems = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        raise ValueError(
            f"{path} does not exist: the run held out no problems (eval_size 0), or such as JSON "
            "cannot hold: pass --problems FILE"
        )
    trained = {*logs.read_json(folder / TRAINED_ON)["prompts"]}
    new = [problem for problem in problems if _digest(problem) not in trained]
    if len(new) < len(problems):
        say(f"{len(problems) - len(new)} of {len(problems)} problems of {path} are left out: the "
            "run trains on them")  # fmt: skip
    if not new:
        raise ValueError(
            f"{path} has no problem that the run does not train on: pass --problems FILE with "
            "others"
        )
    return new


def _digest(problem: Problem) -> str:
    """Twelve hex digits of a problem's prompt."""
    return hashlib.sha256(prompt_key(problem).encode()).hexdigest()[:12]

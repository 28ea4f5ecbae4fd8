"""Problems: dicts with a `prompt`, an `answer`, and further columns for reward functions."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

from ..config import TrainingConfig, imported
from ..run import user_code
from .files import FORMATS, Rows, numbered, rows_of_file, splits_of_folder
from .prompts import build_prompt

Problem = Mapping[str, Any]
_log = logging.getLogger(__name__)

# Splits to hold out; the first that exists is taken.
_HELD_OUT = ("test", "validation")
_FUNCTION = re.compile(r"[\w.]+:\w+")
_ON_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")


class DatasetError(ValueError):
    """Error of a dataset function: it raised, or did not return two lists of problems."""


def load(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on, and the held-out ones; no prompt is in both.

    Raises:
        ValueError: there is no such dataset, no problem to train on, or a row without a needed
            column.
        ConnectionError: the hub was not reached; the message says what works without it.
    """
    name, unanswered = config.dataset, list[Problem]()
    if _is_function(name):
        train, held_out = _from_function(config)
    else:
        splits = _splits(config)
        split = "" if "" in splits else "train"
        if split not in splits:
            raise ValueError(
                f"dataset: expected a split train to train on; got {sorted(splits)} in {name}"
            )
        test = next((x for x in _HELD_OUT if x in splits), None)
        # Without a test split any row may be held out, and needs an answer.
        needs_answer = test is None and config.eval_size > 0
        most = None
        if split and config.train_size:  # `_split` holds out a fifth at most
            most = max(config.train_size + config.eval_size, 5 * config.eval_size)
        train = _problems(islice(splits[split], most), config, needs_answer)
        if test is None:
            train, held_out = _split(train, config.eval_size)
        else:
            rows = iter(splits[test])
            held_out = _problems(islice(rows, config.eval_size), config, True)
            # Other rows are never evaluated and need no answer.
            questions = ({key: row.get(key) for key in ("prompt", "question")} for _, row in rows)
            unanswered = [problem_of(question, config) for question in questions]
    if not train:
        raise ValueError(f"dataset: expected at least one problem to train on; got none in {name}")
    train = not_held_out(train, [*held_out, *unanswered], _log.warning)
    return train[: config.train_size or None], held_out[: config.eval_size]


def problems_of(path: str, config: TrainingConfig) -> list[Problem]:
    """The problems of a file, each with an answer.

    Raises:
        ValueError: there is no such file, or a row lacks a needed column.
    """
    return _problems(rows_of_file(path), config, True)


def not_held_out(
    train: Sequence[Problem], held_out: Iterable[Problem], say: Callable[[str], object]
) -> list[Problem]:
    """The problems to train on, without held-out prompts; prints how many are dropped.

    Raises:
        ValueError: no problem is left.
    """
    prompts = {prompt_key(problem) for problem in held_out}
    unseen = [problem for problem in train if prompt_key(problem) not in prompts]
    if not unseen:
        raise ValueError(
            f"train: the prompts of all {len(train)} problems are held out, too: hold out other "
            "problems"
        )
    if len(unseen) < len(train):
        say(
            f"{len(train) - len(unseen)} of {len(train)} problems to train on are left out: their "
            "prompts are held out, too"
        )
    return unseen


def prompt_key(problem: Problem) -> str:
    """A text equal for prompts that differ only in white space and the order of keys."""
    return json.dumps(_normalized(problem.get("prompt")), sort_keys=True, default=repr)


def _normalized(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return " ".join(prompt.split())
    if isinstance(prompt, Mapping):
        return {key: _normalized(value) for key, value in prompt.items()}
    return [_normalized(part) for part in prompt] if isinstance(prompt, list | tuple) else prompt


def text_of(column: str, value: Any) -> str:
    """Returns the text of a prompt, a question or an answer, which may be an integer.

    Raises:
        ValueError: another type; 1.5, for example, can be written in many ways.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    raise ValueError(
        f"dataset: expected text or a whole number as {column}; got {value!r:.80}: write it as "
        "text; reward functions get columns of other names as they are"
    )


def problem_of(row: Mapping[str, Any], config: TrainingConfig) -> Problem:
    """Makes a problem of a row: its prompt, built from its question if needed, and its answer."""
    texts = ("prompt", "question", "answer")
    problem = {key: x for key, x in row.items() if key not in texts or not _is_missing(x)}
    if "prompt" not in problem and "question" in problem:
        problem["prompt"] = build_prompt(text_of("question", problem["question"]), config)
    elif not isinstance(problem.get("prompt", []), list | tuple):
        problem["prompt"] = text_of("prompt", problem["prompt"])
    if "answer" in problem:
        # GSM8K has solutions, with the answer last.
        problem["answer"] = text_of("answer", problem["answer"]).rsplit("####", 1)[-1].strip()
    return problem


def applies(reward: str, problem: Problem) -> bool:
    """True if the reward function of this name, or of its last part, judges the problem."""
    names = names_rewards(problem)
    return names is None or not {reward, reward.rpartition(":")[2]}.isdisjoint(names)


def names_rewards(problem: Problem) -> list[str] | None:
    """Returns the reward functions that a problem names in its column `rewards`; None: all."""
    names = problem.get("rewards")
    if names is None:
        return None
    several = isinstance(names, Iterable) and not isinstance(names, str)
    return [str(name) for name in (names if several else [names])]


def _is_missing(value: Any) -> bool:
    """True for None, and for NaN, which some files have instead."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_function(name: str) -> bool:
    """True for `module:function`, unless a file or folder has this name."""
    return _FUNCTION.fullmatch(name) is not None and not _is_file(name)


def _is_file(name: str) -> bool:
    """True for the name of a file or folder, which need not exist."""
    separators = name.count("/") + name.count(os.sep) * (os.sep != "/")
    looks = Path(name).suffix.lower() in FORMATS or separators > 1 or name.startswith((".", "/"))
    return bool(name) and (looks or Path(name).exists())


def _from_function(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    name = config.dataset
    try:
        function = imported("dataset", name)
    except ValueError as error:
        raise ValueError(
            f"{error}; a dataset on the hub is OWNER/NAME, its configuration dataset_config"
        ) from error
    call = partial(user_code.call, f"dataset: {name}", kind=DatasetError)
    returned = call(partial(function, config))
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise DatasetError(
            f"dataset: expected the problems to train on and those held out, two lists, of {name}; "
            f"got {returned!r:.80}"
        )
    parts: list[list[Any]] = [call(partial(list, problems)) for problems in returned]
    train, held_out = parts
    for i, problem in enumerate(train):
        _check(problem, f"problem {i} to train on of {name}", config, False)
    for i, problem in enumerate(held_out[: config.eval_size]):
        _check(problem, f"problem {i} held out of {name}", config, True)
    return train, held_out


def _splits(config: TrainingConfig) -> Mapping[str, Rows]:
    """The rows of a dataset by split; a file has one split, ""."""
    name, part = config.dataset, config.dataset_config
    if _is_file(name):
        if part:
            raise ValueError(
                f"dataset_config={part!r} has no effect with {name}: it is for datasets on the hub"
            )
        return splits_of_folder(name) if Path(name).is_dir() else {"": rows_of_file(name)}
    if not _ON_HUB.fullmatch(name):
        raise ValueError(
            f"dataset: {name!r} is no file or folder here, no module:function, and no name on the "
            "hub, OWNER/NAME (its configuration is dataset_config; of a revision pass the folder "
            "that `hf download --repo-type dataset` makes)"
        )
    import datasets

    try:
        loaded = datasets.load_dataset(name, part or None)
    except Exception as error:  # the hub, the cache and the network each raise their own
        raise ConnectionError(
            f"dataset: {name} is no file or folder here, and was neither cached nor downloaded: "
            f"{why_not_downloaded(error)}. Without the hub: a .jsonl or .parquet file, or "
            "module:function"
        ) from error
    return {split: numbered(loaded[split], f"split {split} of {name}") for split in loaded}


def _problems(rows: Rows, config: TrainingConfig, needs_answer: bool) -> list[Problem]:
    """The problems of rows, after a check."""
    problems = []
    for where, row in rows:
        try:
            problem = problem_of(row, config)
        except ValueError as error:
            raise ValueError(f"{error} ({where})") from error
        _check(problem, where, config, needs_answer)
        problems.append(problem)
    return problems


def _check(problem: Problem, where: str, config: TrainingConfig, needs_answer: bool) -> None:
    """Refuses a problem without a prompt, the system prompt, or a needed answer."""
    if not isinstance(problem, Mapping):
        raise ValueError(f"dataset: expected a dict; got {problem!r:.80} in {where}")
    columns = sorted(key for key, value in problem.items() if value is not None)
    judged = "answer" in config.rewards and applies("answer", problem)
    if "prompt" not in columns or ("answer" not in columns and (needs_answer or judged)):
        why = ["the reward answer"] * judged + ["evaluation"] * needs_answer
        answer = f", and a column answer for {' and '.join(why)}" if why else ""
        # For a function's problems no prompt is built from a question.
        prompt = "prompt" if "question" in columns else "question (or prompt)"
        raise ValueError(
            f"dataset: expected a column {prompt}{answer}; got {columns} in {where}: "
            "rename the columns, or set dataset to module:function, which returns the problems"
        )
    said = json.dumps(problem["prompt"], default=repr)  # in a text, in messages, in their parts
    if json.dumps(config.system_prompt)[1:-1] not in said:
        raise ValueError(
            "system_prompt stands before a question, and has no effect on the column prompt in "
            f"{where}: write it into the prompts, or leave system_prompt out"
        )


def _split(problems: list[Problem], held_out: int) -> tuple[list[Problem], list[Problem]]:
    """Holds out at most a fifth of the problems, always the same; no prompt is in both parts."""
    by_prompt: dict[str, list[Problem]] = {}
    for problem in problems:
        by_prompt.setdefault(prompt_key(problem), []).append(problem)
    groups = list(by_prompt.values())
    random.Random(0).shuffle(groups)
    room = min(held_out, len(problems) // 5)
    train, test = list[Problem](), list[Problem]()
    for group in groups:
        (test if len(test) + len(group) <= room else train).extend(group)
    return train, test


def why_not_downloaded(error: BaseException | None) -> str:
    """Returns the cause of a failed download, and what to do about it."""
    from huggingface_hub import errors

    first: str | None = None
    while error is not None:
        text = " ".join(str(error).split())
        first = first or f"{type(error).__name__}: {text[:300]}"
        # datasets raises its own error for these two, without the hub's.
        lost = type(error).__name__ == "DatasetNotFoundError"
        if isinstance(error, errors.GatedRepoError) or (lost and "gated" in text):
            return "access is on request: accept the terms on its page, then `hf auth login`"
        if lost or isinstance(error, errors.RepositoryNotFoundError):
            return "nothing has this name, or it is private (`hf auth login`)"
        error = error.__cause__ or error.__context__
    return first or "no reason was given"

"""Problems: dicts with a `prompt`, an `answer`, and further columns for reward functions."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterable, Mapping
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

from ..config import TrainingConfig, imported
from .prompts import build_prompt

Problem = Mapping[str, Any]
_log = logging.getLogger(__name__)

# Rows, each with its place in messages.
_Rows = Iterable[tuple[str, Mapping[str, Any]]]

# Splits that are held out, the first that there is.
_HELD_OUT = ("test", "validation")


def load(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and those that are held out; of one dataset none is in both.

    Raises:
        ValueError: there is no such dataset, or none of it to train on, or a row lacks a column
            that is needed.
        ConnectionError: the hub was not reached; the message says what works without it.
    """
    name, unanswered = config.dataset, list[Problem]()
    # With an `eval_dataset` no problem of this dataset is held out.
    num_held_out = 0 if config.eval_dataset else config.eval_size
    if _is_function(name):
        train, held_out = _from_function(name, config)
    else:
        splits = _splits(name)
        split = "" if "" in splits else "train"
        if split not in splits:
            raise ValueError(
                f"dataset: expected a split train to train on; got {sorted(splits)} in {name}, "
                "which is for `python -m grpo_kernels.training.evaluate`"
            )
        test = next((x for x in _HELD_OUT if x in splits), None)
        # Without a test split any row may be held out, and needs an answer.
        compared = test is None and num_held_out > 0
        most = None
        if split and config.train_size:  # five times those that are held out, as `_split` does
            most = max(config.train_size + num_held_out, 5 * num_held_out)
        train = _problems(islice(splits[split], most), config, compared)
        if test is None:
            train, held_out = _split(train, num_held_out)
        else:
            rows = iter(splits[test])
            held_out = _problems(islice(rows, num_held_out), config, True)
            # No evaluation asks for the others, which need no answer.
            questions = ({key: row.get(key) for key in ("prompt", "question")} for _, row in rows)
            unanswered = [problem_of(question, config) for question in questions]
    if config.eval_dataset:
        held_out = load_to_answer(config)[0]
    train = _without(train, [*held_out, *unanswered], name)
    if not train:
        raise ValueError(f"dataset: expected at least one problem to train on; got none in {name}")
    return train[: config.train_size or None], held_out[: config.eval_size]


def _without(train: list[Problem], held_out: list[Problem], name: str) -> list[Problem]:
    """The problems to train on whose prompt is not held out, too."""
    prompts = {repr(problem.get("prompt")) for problem in held_out}
    unseen = [problem for problem in train if repr(problem["prompt"]) not in prompts]
    if len(unseen) < len(train):
        _log.warning(
            "%d of %d problems to train on are left out: %s has their prompts among those held out",
            len(train) - len(unseen), len(train), name,
        )  # fmt: skip
    return unseen


def load_to_answer(config: TrainingConfig, most: int | None = None) -> tuple[list[Problem], str]:
    """The problems that an evaluation answers, and a sentence that says which.

    They are the first `most` (None: all) of the split `test`, else of `validation`; of an
    `eval_dataset` else of `train`, else of the file, as no run with these options trains on it.

    Raises:
        ValueError, ConnectionError: as `load`; a run would train on the problems.
    """
    name = config.eval_dataset or config.dataset
    if _is_function(name):
        problems, source = _from_function(name, config)[1], f"held out by {name}"
    else:
        splits = _splits(name)
        split = next((x for x in (*_HELD_OUT, "train", "") if x in splits), None)
        if split is None:
            raise ValueError(
                f"dataset: expected a split test, validation or train; got {sorted(splits)} in "
                f"{name}"
            )
        if split not in _HELD_OUT and (not config.eval_dataset or _is_same(name, config.dataset)):
            raise ValueError(
                f"dataset={name}: a run with these options trains on it: pass --eval_dataset FILE; "
                "a run's held-out problems are in held_out.jsonl of its folder"
            )
        problems = _problems(islice(splits[split], most and most + 1), config, True)
        source = f"of split {split} of {name}" if split else f"of {name}"
    if most and len(problems) > most:
        return problems[:most], f"The first {most} problems {source}, as eval_size says"
    return problems, f"All {len(problems)} problems {source}"


def _is_same(name: str, other: str) -> bool:
    """True for two names of one file, folder or dataset."""
    return name == other or (Path(name).exists() and Path(name).resolve() == Path(other).resolve())


def problems_of(path: str, config: TrainingConfig) -> list[Problem]:
    """The problems of a file, each with an answer to compare with.

    Raises:
        ValueError: there is no such file, or a row lacks what it needs.
    """
    return _problems(_splits(_file(path))[""], config, True)


def final_answer(solution: str) -> str:
    """The part of a GSM8K solution after `####`."""
    return solution.rsplit("####", 1)[-1].strip()


def text_of(column: str, value: Any) -> str:
    """Returns the text of a prompt, a question or an answer, which may be a whole number.

    Raises:
        ValueError: it is anything else, which can be written in many ways.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    raise ValueError(
        f"dataset: {column} is neither text nor a whole number: write it as text, or give the "
        f"column another name, under which reward functions get it as it is; got {value!r:.80}"
    )


def problem_of(row: Mapping[str, Any], config: TrainingConfig) -> Problem:
    """Makes a problem of a row: its prompt, made from its question if need be, and its answer."""
    texts = ("prompt", "question", "answer")
    problem = {key: x for key, x in row.items() if key not in texts or not _is_missing(x)}
    if "prompt" not in problem and "question" in problem:
        problem["prompt"] = build_prompt(text_of("question", problem["question"]), config)
    elif not isinstance(problem.get("prompt", []), list | tuple):
        problem["prompt"] = text_of("prompt", problem["prompt"])
    if "answer" in problem:
        problem["answer"] = final_answer(text_of("answer", problem["answer"]))
    return problem


def applies(reward: str, problem: Problem) -> bool:
    """True if a problem is judged by the reward function of this name, or of its last part."""
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
    """True for None, and for the NaN that some files have in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_function(name: str) -> bool:
    return ":" in name and "/" not in name.partition(":")[0]


def _from_function(name: str, config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    try:
        function = imported("dataset", name)
    except ValueError as error:
        raise ValueError(f"{error}; a dataset on the hub is OWNER/NAME[:CONFIG]") from error
    train, held_out = function(config)
    for i, problem in enumerate(train):
        _check(problem, f"problem {i} to train on of {name}", config, False)
    for i, problem in enumerate(held_out[: config.eval_size]):
        _check(problem, f"problem {i} held out of {name}", config, True)
    return train, held_out


def _splits(name: str) -> Mapping[str, _Rows]:
    """The rows of a dataset by split; those of a file have no split's name, but ""."""
    if not name:
        raise ValueError("dataset: expected a name on the hub, a file, or module:function; got ''")
    if Path(name).suffix == ".jsonl":
        return {"": _lines(_file(name))}
    import datasets

    if Path(name).suffix == ".parquet":
        try:
            rows = datasets.load_dataset("parquet", data_files=_file(name), split="train")
        except Exception as error:  # the reader raises errors of its own
            raise ValueError(
                f"dataset: expected rows of parquet in {name}; {type(error).__name__}: {error}"
            ) from error
        return {"": _numbered(rows, name)}
    name, _, revision = name.partition("@")
    name, _, part = name.partition(":")
    try:
        loaded = datasets.load_dataset(name, part or None, revision=revision or None)
    except Exception as error:  # the hub, the cache and the network each raise their own
        raise ConnectionError(
            f"dataset: {name} was neither cached nor downloaded: {why_not_downloaded(error)}. "
            "Without the hub: a .jsonl or .parquet file, or module:function"
        ) from error

    return {split: _numbered(loaded[split], f"split {split} of {name}") for split in loaded}


def _numbered(rows: Iterable[Mapping[str, Any]], name: str) -> _Rows:
    return ((f"row {i} of {name}", row) for i, row in enumerate(rows, 1))


def _file(name: str) -> str:
    if not Path(name).is_file():
        raise ValueError(f"dataset: expected a file; {name} does not exist")
    return name


def _lines(name: str) -> _Rows:
    """The rows of a file with one object of JSON per line."""
    with open(name, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"line {number} of {name}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"dataset: expected JSON in {where}; {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"dataset: expected an object in {where}; got {row!r:.80}")
            yield where, row


def _problems(rows: _Rows, config: TrainingConfig, compared: bool) -> list[Problem]:
    """The problems of rows, each of which has what it needs; `compared`: with an answer."""
    problems = []
    for where, row in rows:
        try:
            problem = problem_of(row, config)
        except ValueError as error:
            raise ValueError(f"{error} in {where}") from error
        _check(problem, where, config, compared)
        problems.append(problem)
    return problems


def _check(problem: Problem, where: str, config: TrainingConfig, compared: bool) -> None:
    """Refuses a problem without a prompt, or without an answer that is compared with."""
    columns = sorted(key for key, value in problem.items() if value is not None)
    judged = "answer" in config.rewards and applies("answer", problem)
    if "prompt" in columns and ("answer" in columns or not (compared or judged)):
        return
    why = ["the reward answer"] * judged + ["evaluation"] * compared
    answer = f", and a column answer for {' and '.join(why)}" if why else ""
    raise ValueError(
        f"dataset: expected a column question (or prompt){answer}; got {columns} in {where}: "
        "rename the columns, or set dataset to module:function, which returns the problems"
    )


def _split(problems: list[Problem], held_out: int) -> tuple[list[Problem], list[Problem]]:
    """Holds out at most a fifth of the problems, always the same; all or none of a prompt's."""
    by_prompt: dict[str, list[Problem]] = {}
    for problem in problems:
        by_prompt.setdefault(repr(problem["prompt"]), []).append(problem)
    groups = list(by_prompt.values())
    random.Random(0).shuffle(groups)
    room = min(held_out, len(problems) // 5)
    train, test = list[Problem](), list[Problem]()
    for group in groups:
        (test if len(test) + len(group) <= room else train).extend(group)
    return train, test


def why_not_downloaded(error: BaseException | None) -> str:
    """Says what a failed download means, and what to do about it."""
    from huggingface_hub import errors

    first: str | None = None
    while error is not None:
        text = " ".join(str(error).split())
        first = first or f"{type(error).__name__}: {text[:300]}"
        # datasets says these two in words of its own, without the hub's error.
        lost = type(error).__name__ == "DatasetNotFoundError"
        if isinstance(error, errors.GatedRepoError) or (lost and "gated" in text):
            return "its owner lets in who asks: accept the terms on its page, then `hf auth login`"
        if isinstance(error, errors.RevisionNotFoundError):
            return "it has no such revision"
        if lost or isinstance(error, errors.RepositoryNotFoundError):
            return "there is none of this name, or it is private (`hf auth login`)"
        error = error.__cause__ or error.__context__
    return first or "no reason was given"

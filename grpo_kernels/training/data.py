"""Problems: dicts with a `prompt`, an `answer`, and further columns for reward functions."""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .config import TrainingConfig

Problem = Mapping[str, Any]

_FILES = {".jsonl": "json", ".parquet": "parquet"}

INSTRUCTION = (
    "Work the problem out between <think> and </think>, then give the answer, nothing else, "
    "between <answer> and </answer>."
)
EXAMPLE = (
    "Question: A box holds 4 rows of 6 eggs. Ann takes 5 eggs. How many are left?\n"
    "<think>4 * 6 = 24 eggs are in the box. 24 - 5 = 19 are left.</think>\n<answer>19</answer>"
)


def load(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and those that are held out; no problem is in both.

    Raises:
        ValueError: there is no such dataset, or it lacks a column that is needed.
        ConnectionError: the hub was not reached; the message says what works without it.
    """
    name = config.dataset
    if ":" in name and "/" not in name.partition(":")[0]:
        train, held_out = imported("dataset", name)(config)
    else:
        train, held_out = _split(*_parts(name, config), config.eval_size)
    train, held_out = train[: config.train_size], held_out[: config.eval_size]
    for problem in (*train[:1], *held_out[:1]):
        missing = {"prompt", "answer"} - set(problem)
        if missing:
            raise ValueError(
                f"dataset: expected problems with a question (or prompt) and an answer; got "
                f"{sorted(problem)} in {name}"
            )
    if not train:
        raise ValueError(f"dataset: expected at least one problem to train on; got none in {name}")
    return train, held_out


def imported(option: str, name: str) -> Callable[..., Any]:
    """The function of `module:function`, of a module here or installed.

    Raises:
        ValueError: there is no such module, or no such function in it.
    """
    module, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # as `python -m` has it, not a script
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option}: expected module:function; got {name!r} ({error})") from error
    if not callable(found):
        raise ValueError(f"{option}: expected a function; got {name} = {found!r}")
    return found


class PromptEncoder:
    """Tokenizes the prompts of problems, each once."""

    def __init__(self, tokenizer: Any, *, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat
        self._known: dict[str, list[int]] = {}

    def __call__(self, problem: Problem) -> list[int]:
        key = repr(problem["prompt"])
        if key not in self._known:
            self._known[key] = self._encode(problem["prompt"])
        return self._known[key]

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str) and not self.chat:
            return list(self.tokenizer(prompt).input_ids)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        return list(ids if isinstance(ids, list) else ids["input_ids"])


def short_enough(
    problems: Sequence[Problem], encode: PromptEncoder, longest: int, say: Callable[[str], None]
) -> list[Problem]:
    """The problems whose prompts have at most `longest` tokens; says how many have more.

    Raises:
        ValueError: all of them have more.
    """
    kept = [problem for problem in problems if len(encode(problem)) <= longest]
    if len(kept) < len(problems):
        say(
            f"{len(problems) - len(kept)} of {len(problems)} problems are left out: their prompts "
            f"have more than max_prompt_length = {longest} tokens"
        )
    if problems and not kept:
        raise ValueError(f"max_prompt_length: expected room for at least one prompt; got {longest}")
    return kept


class Order:
    """The order of problems: in every epoch all of them, newly shuffled."""

    done: int  # problems of the steps that are done
    _drawn: int

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        self.problems, self.seed = problems, seed
        self.restore(0)

    def next(self, count: int) -> list[Problem]:
        """The problems of a step."""
        self._drawn += count
        return [self.problems[next(self._order)] for _ in range(count)]

    def step_done(self) -> None:
        """Notes that the step with the last problems is done."""
        self.done = self._drawn

    def restore(self, done: int) -> None:
        """Goes on after so many problems."""
        self.done = self._drawn = done
        self._order = islice(shuffled_epochs(len(self.problems), self.seed), done, None)


def level_of(problem: Problem) -> float | None:
    """The level of a problem, if it is a number."""
    level = problem.get("level")
    if isinstance(level, bool) or not isinstance(level, int | float) or not math.isfinite(level):
        return None
    return float(level)


def shuffled_epochs(count: int, seed: int) -> Iterator[int]:
    """Yields indices below `count` without end: in every epoch all of them, newly shuffled."""
    epoch = 0
    while True:
        order = list(range(count))
        random.Random(f"{seed}-{epoch}").shuffle(order)
        yield from order
        epoch += 1


def prompt_of(question: str, chat: bool) -> str | list[dict[str, str]]:
    """The prompt of a question: text with an example, or the messages of a chat."""
    if chat:
        # Not a system message: some templates have none.
        return [{"role": "user", "content": f"{INSTRUCTION}\n\n{question}"}]
    return f"{INSTRUCTION}\n\n{EXAMPLE}\n\nQuestion: {question}\n"


def final_answer(solution: str) -> str:
    """The part of a GSM8K solution after `####`."""
    return solution.rsplit("####", 1)[-1].strip()


def _parts(name: str, config: TrainingConfig) -> tuple[list[Problem], list[Problem] | None]:
    """The problems of a file, or of a dataset on the hub with those of its test split."""
    import datasets

    if (kind := _FILES.get(Path(name).suffix)) is not None:
        if not Path(name).exists():
            raise ValueError(f"dataset: expected a file; {name} does not exist")
        try:
            rows = datasets.load_dataset(kind, data_files=name, split="train")
        except Exception as error:  # each reader raises its own, of an empty file StopIteration
            raise ValueError(
                f"dataset: expected rows of {kind} in {name}; {type(error).__name__}: {error}"
            ) from error
        return [problem_of(row, config) for row in rows], None
    name, _, revision = name.partition("@")
    name, _, part = name.partition(":")
    try:
        found = datasets.load_dataset(name, part or None, revision=revision or None)
    except Exception as error:  # the hub, the cache and the network each raise their own
        raise ConnectionError(
            f"dataset: {name} was neither cached nor downloaded: {why_not_downloaded(error)}. "
            "Without the hub: a .jsonl or .parquet file, or module:function"
        ) from error
    train, *test = (
        [problem_of(row, config) for row in found[split].select(range(min(n, len(found[split]))))]
        for split, n in (
            ("train", config.train_size + config.eval_size),
            ("test", config.eval_size),
        )
        if split in found
    )
    return train, test[0] if test else None


def problem_of(row: Mapping[str, Any], config: TrainingConfig) -> Problem:
    """A row with a prompt, made from its question if it has none."""
    problem = dict(row)
    if "prompt" not in problem and "question" in problem:
        problem["prompt"] = prompt_of(problem["question"], config.chat)
    if "answer" in problem:
        problem["answer"] = final_answer(str(problem["answer"]))
    return problem


def _split(
    problems: list[Problem], test: list[Problem] | None, held_out: int
) -> tuple[list[Problem], list[Problem]]:
    """Holds out some problems if there is no test split, at most a fifth; always the same ones."""
    if test is not None:
        return problems, test
    different = list({json.dumps(p["prompt"]): p for p in problems if "prompt" in p}.values())
    random.Random(0).shuffle(different)
    count = min(held_out, len(different) // 5)
    return different[count:] or problems, different[:count]


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

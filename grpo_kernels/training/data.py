"""Problems: dicts with a `prompt`, an `answer`, and further columns for reward functions."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .config import TrainingConfig
from .word_problems import KINDS, LEVELS, word_problems

Problem = Mapping[str, Any]

INSTRUCTION = (
    "Work the problem out between <think> and </think>, then give the answer, nothing else, "
    "between <answer> and </answer>."
)
EXAMPLE = (
    "Question: A box holds 4 rows of 6 eggs. Ann takes 5 eggs. How many are left?\n"
    "<think>4 * 6 = 24 eggs are in the box. 24 - 5 = 19 are left.</think>\n<answer>19</answer>"
)
# A small model follows examples rather than instructions: one with two steps, and one of each kind
# that it does not show.
WORD_PROBLEM = (
    "Question: A box holds 4 rows of 6 eggs. Ann takes 5 eggs. How many are left?\n"
    "<think>4 * 6 = 24, 24 - 5 = 19</think><answer>19</answer>\n\n"
    "Question: Bo has 7 stamps and finds 5 more. How many stamps does Bo have?\n"
    "<think>7 + 5 = 12</think><answer>12</answer>\n\n"
    "Question: 12 plums are shared by 3 children. How many plums does each child get?\n"
    "<think>12 / 3 = 4</think><answer>4</answer>\n\n"
    "Question: There are 15 cars. 8 drive away. How many cars are left?\n"
    "<think>15 - 8 = 7</think><answer>7</answer>\n\nQuestion: {}\n"
)
ADDITION = "Question: What is 31 + 45?\n<answer>76</answer>\n\nQuestion: What is {} + {}?\n"
OFFLINE = "word_problems, additions, a task of reasoning-gym, or a file of your own"


def load(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on and those that are held out; no problem is in both.

    Raises:
        ValueError: there is no such dataset, or it lacks a column that is needed.
        ConnectionError: the hub was not reached; the message says what works without it.
    """
    name, sizes = config.dataset, (config.train_size, config.eval_size)
    if name == "additions":
        train, held_out = _additions()
    elif name == "word_problems":
        train, held_out = _word_problems(config)
    elif name == "gsm8k":
        train, held_out = _gsm8k(config)
    elif name.endswith((".jsonl", ".parquet")) or Path(name).is_dir():
        train, held_out = _split(_from_path(Path(name), config), sizes[1])
    else:
        train, held_out = _reasoning_gym(config)
    train, held_out = train[: sizes[0]], held_out[: sizes[1]]
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


class Course:
    """The order of problems: in every epoch all of them, newly shuffled.

    With a threshold, problems of the lowest level come first. When the samples' accuracy at the
    highest level that is open reaches it, as a mean of `WINDOW` steps, the next level opens.

    Args:
        problems: to train on; with a threshold each has a number as its `level`.
        seed: of the shuffles.
        threshold: an accuracy in (0, 1]; 0: all levels are open.
    """

    WINDOW = 3
    # Problems of the order, those of closed levels included: drawn, and of steps that are done.
    _drawn: int
    _done: int
    _recent: list[float]  # accuracies at the highest level that is open
    _highest: int  # its index

    def __init__(self, problems: Sequence[Problem], seed: int, threshold: float) -> None:
        self.problems, self.seed, self.threshold = problems, seed, threshold
        levels: set[float] = set()
        for problem in problems if threshold else ():
            level = level_of(problem)
            if level is None or "answer" not in problem:
                raise ValueError(
                    "curriculum: expected a number as the level of every problem, and an answer; "
                    f"got {problem.get('level')!r} and {problem.get('answer')!r}"
                )
            levels.add(level)
        self._levels = sorted(levels)
        self.restore({"drawn": 0})

    @property
    def level(self) -> float | None:
        """The highest level that is open; None where problems are in no order of levels."""
        return self._levels[self._highest] if self._levels else None

    @property
    def metrics(self) -> dict[str, float]:
        """The highest level that is open, where there are levels."""
        return {} if self.level is None else {"level": self.level}

    @property
    def open(self) -> list[Problem]:
        """The problems of levels that are open."""
        return [problem for problem in self.problems if self._is_open(problem)]

    def next(self, count: int) -> list[Problem]:
        """The problems of a step."""
        found: list[Problem] = []
        while len(found) < count:
            problem = self.problems[next(self._order)]
            self._drawn += 1
            if self._is_open(problem):
                found.append(problem)
        return found

    def after_step(self, row: Mapping[str, Any]) -> None:
        """Takes the metrics of the step that `next` was for; they may open a level."""
        self._done = self._drawn
        if self._highest + 1 >= len(self._levels):
            return
        accuracy = row.get(f"accuracy/level_{self._levels[self._highest]:g}")
        if accuracy is not None:  # a step may have no problem of this level
            self._recent = [*self._recent, accuracy][-self.WINDOW :]
        enough = sum(self._recent) >= self.threshold * self.WINDOW
        if enough and len(self._recent) == self.WINDOW:
            self._highest, self._recent = self._highest + 1, []

    def _is_open(self, problem: Problem) -> bool:
        return not self._levels or problem["level"] <= self._levels[self._highest]

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON takes it."""
        return {"drawn": self._done, "recent": self._recent, "highest": self._highest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state."""
        self._drawn = self._done = int(state["drawn"])
        self._recent = list(state.get("recent", ()))
        self._highest = int(state.get("highest", 0))
        self._order = islice(shuffled_epochs(len(self.problems), self.seed), self._drawn, None)


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


def _additions() -> tuple[list[Problem], list[Problem]]:
    """All sums of two digits from 1 to 9, two thirds to train on and a third held out."""
    digits = range(1, 10)
    problems: list[Problem] = [
        {"prompt": ADDITION.format(a, b), "answer": str(a + b)} for a in digits for b in digits
    ]
    random.Random(0).shuffle(problems)
    return problems[27:], problems[:27]


def _word_problems(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    """Of those held out, half are of templates that are trained on and half are not."""
    levels = sorted(config.levels) or LEVELS
    half, rest = config.eval_size // 2, config.eval_size % 2
    # The same problems for every seed, so that runs can be compared.
    train = word_problems(config.train_size, 0, levels)
    seen = word_problems(half + rest, 0, levels, held_out=KINDS[0])
    new = word_problems(half, 0, levels, held_out=KINDS[1])
    for row in (*train, *seen, *new):
        if not config.chat:
            row["prompt"] = WORD_PROBLEM.format(row["question"])
    return [_problem(row, config) for row in train], [_problem(row, config) for row in seen + new]


def _gsm8k(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    import datasets

    from .loading import why_not_downloaded

    try:
        found = datasets.load_dataset("openai/gsm8k", "main", revision=config.dataset_revision)
    except Exception as error:  # the hub, the cache and the network each raise their own
        raise ConnectionError(
            f"dataset: gsm8k was neither cached nor downloaded: {why_not_downloaded(error)}. "
            f"Without the hub: {OFFLINE}"
        ) from error
    train, test = (
        [_problem(row, config) for row in found[split].select(range(min(n, len(found[split]))))]
        for split, n in (("train", config.train_size), ("test", config.eval_size))
    )
    return train, test


def _from_path(path: Path, config: TrainingConfig) -> list[Problem]:
    if not path.exists():
        raise ValueError(f"dataset: expected a file; {path} does not exist")
    if path.suffix == ".jsonl":
        rows: Any = [*_json_lines(path)]
    else:
        import datasets

        if path.suffix == ".parquet":
            rows = datasets.Dataset.from_parquet(str(path))
        else:
            rows = datasets.load_from_disk(str(path))
            if isinstance(rows, datasets.DatasetDict):
                if "train" not in rows:
                    raise ValueError(f"dataset: expected a split 'train' in {path}; got {[*rows]}")
                rows = rows["train"]
    return [_problem(row, config) for row in rows]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"dataset: expected JSON in every line of {path}; line {number}: {error}"
                ) from None


def _problem(row: Mapping[str, Any], config: TrainingConfig) -> Problem:
    """A row with a prompt, made from its question if it has none."""
    problem = dict(row)
    if "prompt" not in problem and "question" in problem:
        problem["prompt"] = prompt_of(problem["question"], config.chat)
    if "answer" in problem:
        problem["answer"] = final_answer(str(problem["answer"]))
    return problem


def _split(problems: list[Problem], held_out: int) -> tuple[list[Problem], list[Problem]]:
    """Holds out some problems, at most a fifth of them; always the same ones."""
    different = list({json.dumps(p["prompt"]): p for p in problems if "prompt" in p}.values())
    random.Random(0).shuffle(different)
    count = min(held_out, len(different) // 5)
    return different[count:] or problems, different[:count]


def _reasoning_gym(config: TrainingConfig) -> tuple[list[Problem], list[Problem]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            f"dataset: {config.dataset!r} is no file, and tasks of reasoning-gym need that "
            "package: pip install 'grpo_kernels[train]'"
        ) from error
    if config.dataset not in reasoning_gym.factory.DATASETS:
        raise ValueError(
            f"dataset: expected gsm8k, word_problems, additions, a .jsonl or .parquet file, a "
            f"folder of save_to_disk, or a task of reasoning-gym (gsm_symbolic, chain_sum, ...); "
            f"got {config.dataset!r}"
        )
    wanted = config.train_size + config.eval_size
    # The same problems for every seed, so that runs can be compared.
    entries = reasoning_gym.create_dataset(config.dataset, size=wanted, seed=0)
    seen: set[str] = set()
    problems: list[Problem] = []
    for entry in entries:
        if entry["question"] in seen:
            continue
        seen.add(entry["question"])
        problem = {"question": entry["question"], "answer": entry["answer"]}
        problems.append({**_problem(problem, config), "task": config.dataset, "entry": entry})
    held_out = problems[: config.eval_size]
    return problems[config.eval_size :], held_out

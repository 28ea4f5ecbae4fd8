"""Observers of a run: terminal, completions, trackers, page.

Observers do not change training, even if they fail. They run in the main process only, and see a
row after it is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from ...base.text import printable
from ...explain import runs
from ...explain.records import prompt_text
from ...explain.rules import verdicts
from ..config import DTYPES, TrainingConfig
from . import about, logs, ranks
from .accuracy import Evaluation
from .metrics import Metrics

# The metrics of a step that the terminal shows.
_LINE = {
    "reward": "reward {:.3f}", "accuracy": "sampled accuracy {:.0%}", "kl": "kl {:.4f}",
    "entropy": "entropy {:.2f}", "completion_length": "length {:.1f}",
    "loss": "loss {:+.4f}", "grad_norm": "grad norm {:.3g}",
}  # fmt: skip


class HasEnded(Protocol):
    """A completion that was cut or not."""

    @property
    def ended(self) -> bool: ...


class Samples(Protocol):
    """The completions of a step, as `training.step.samples` has them, sorted by prompt."""

    @property
    def problems(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def prompt_of(self) -> Sequence[int]: ...
    @property
    def completions(self) -> Sequence[HasEnded]: ...
    @property
    def transcripts(self) -> Sequence[str]: ...
    @property
    def rewards_total(self) -> Tensor: ...
    @property
    def advantages(self) -> Tensor: ...


class Observer:
    """Methods called at a run's start after some step, every step and evaluation, and its end.

    An evaluation is of the weights after the step. A row is a copy. By default they do nothing.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config

    def start(self, step: int) -> None: ...
    def step(self, row: dict[str, Any], samples: Samples) -> None: ...
    def evaluation(self, step: int, evaluation: Evaluation) -> None: ...
    def end(self) -> None: ...

    def shows_samples(self, step: int) -> bool:
        """True for the steps whose completions are shown."""
        return step == 1 or step % self.config.show_every == 0


class Completions(Observer):
    """Writes completions to `samples.jsonl`: of some steps, and of steps with a warning or page."""

    def step(self, row: dict[str, Any], samples: Samples) -> None:
        if self.shows_samples(row["step"]) or row.keys() & {"warnings", "explained"}:
            for shown in sample_rows(samples, self.config.num_generations):
                logs.append(self.config.folder / "samples.jsonl", {"step": row["step"], **shown})


class Terminal(Observer):
    """Shows a progress bar, a line per step, and completions now and then."""

    def start(self, step: int) -> None:
        self.progress = tqdm(
            total=self.config.steps, initial=step, desc=self.config.folder.name, dynamic_ncols=True
        )

    def step(self, row: dict[str, Any], samples: Samples) -> None:
        self.progress.update()
        for warning in row.get("warnings", []):
            print_above(f"      warning: {warning['text']}")
        print_above(line_of(row))
        if self.shows_samples(row["step"]):
            rows = sample_rows(samples, self.config.num_generations)
            print_above(sample_table(rows))

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        print_above(f"{step:5d}  {evaluation}")

    def end(self) -> None:
        self.progress.close()


class Trackers(Observer):
    """Sends accelerate's trackers the numbers of every step and evaluation."""

    def __init__(self, config: TrainingConfig, accelerator: Accelerator) -> None:
        super().__init__(config)
        self.accelerator = accelerator

    def start(self, step: int) -> None:
        options = {name: _plain(value) for name, value in self.config.as_json().items()}
        self.accelerator.init_trackers(self.config.folder.name, config=options)

    def step(self, row: dict[str, Any], samples: Samples) -> None:
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        self.accelerator.log(numbers, step=row["step"])

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.accelerator.log({"held_out_accuracy": evaluation.accuracy}, step=step)

    def end(self) -> None:
        for tracker in self.accelerator.trackers:
            tracker.finish()


class Page(Observer):
    """Writes `report.html`, and prints the run's result at the end."""

    def __init__(self, config: TrainingConfig, metrics: Metrics) -> None:
        super().__init__(config)
        self.metrics, self.versions = metrics, dict[str, str]()

    def start(self, step: int) -> None:
        self.versions = about.versions()
        self._write_about()

    def step(self, row: dict[str, Any], samples: Samples) -> None:
        if self.shows_samples(row["step"]):
            self._write()

    def end(self) -> None:
        print_above(f"{self._write()}\nLook at {self.config.folder / 'report.html'}")

    def _write(self) -> str:
        self._write_about()
        return runs.write([self.config.folder], self.config.folder / "report.html")

    def _write_about(self) -> None:
        about.write(self.config.folder, self.config, self.versions, self.metrics)


def _plain(value: Any) -> Any:
    """Returns an option as trackers take it: a number, a bool or text."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return value if isinstance(value, (int, float, str, type(None))) else json.dumps(value)


def print_above(text: str) -> None:
    """Prints above the progress bar, without control characters; ignores a closed terminal."""
    with suppress(Exception, SystemExit):
        tqdm.write(printable(text))


def observers_of(
    config: TrainingConfig, accelerator: Accelerator, metrics: Metrics
) -> list[Observer]:
    """Returns the observers of a run; `metrics` are the run's."""
    if not accelerator.is_main_process:
        return []
    observers = [Completions(config), Terminal(config), Page(config, metrics)]
    return observers + [Trackers(config, accelerator)] * bool(config.trackers)


def introduction(
    config: TrainingConfig, accelerator: Accelerator, policy: Any, problems: int, held_out: int
) -> Iterator[str]:  # fmt: skip
    """A run's first lines: the model, the problems, the hardware."""
    policy = accelerator.unwrap_model(policy)
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    weights, gemms = DTYPES[config.dtype], ranks.gemm_dtype(config)
    yield (
        f"{config.model} on {accelerator.num_processes} x {accelerator.device.type}: "
        f"{trained / 1e6:,.1f}M trained parameters in {weights}, GEMMs in {gemms}; {problems:,} "
        f"problems to train on, {held_out:,} held out; results in {config.folder}/"
    )
    yield from ranks.overruled()
    if held_out:
        how = f"at temperature {config.eval_temperature:g}" if config.eval_temperature else "greedy"
        yield (
            "sampled accuracy: completions trained on, sampled at temperature "
            f"{config.temperature:g}; held-out accuracy: problems not trained on, {how}"
        )
    rate = {"learning_rate": config.learning_rate}
    yield from (f"warning: {x}" for x in verdicts([rate], config.as_json()))
    if config.share_prompts and not policy.shares_prompts:
        yield f"Prompts are encoded with each completion: {policy.why_not_shared}"


def line_of(row: Mapping[str, Any]) -> str:
    texts = [form.format(row[k]) for k, form in _LINE.items() if k in row]
    return f"{row['step']:5d}  {'  '.join(texts)}  {row['seconds']:.1f} s"


def sample_rows(samples: Samples, group_size: int) -> list[dict[str, Any]]:
    """Rows of `samples.jsonl`: the best and the worst completion of the first two groups."""
    shown = []
    for start in range(0, min(len(samples.prompt_of), 2 * group_size), group_size):
        by_advantage = samples.advantages[start : start + group_size].argsort().tolist()
        problem = samples.problems[samples.prompt_of[start]]
        for i in (start + by_advantage[-1], start + by_advantage[0]):
            shown.append({
                "prompt": problem["prompt"], "completion": samples.transcripts[i],
                "answer": problem.get("answer"), "reward": float(samples.rewards_total[i]),
                "advantage": float(samples.advantages[i]), "ended": samples.completions[i].ended,
            })  # fmt: skip
    return shown


def sample_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `samples.jsonl` as text: a line per prompt, and below it one per completion."""
    lines = []
    for i, row in enumerate(rows):
        if i == 0 or row["prompt"] != rows[i - 1]["prompt"]:
            prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1:]
            *_, last = prompt_text(prompt).strip().split("\n\n")  # without examples
            answer = _in_one_line(str(row["answer"]))[:20]
            lines.append(f"      prompt: {_in_one_line(last)[-90:]}  (right answer: {answer})")
        lines.append(
            f"        reward {row['reward']:.2f}, advantage {row['advantage']:+.2f}: "
            f"{_in_one_line(row['completion'])[:90]}{'' if row['ended'] else ' [cut]'}"
        )
    return "\n".join(lines)


def _in_one_line(text: str) -> str:
    return printable(" ".join(text.split()))

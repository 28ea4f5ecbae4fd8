"""Who looks on while a run trains: files, terminal, trackers, page, pruning of checkpoints.

A run without any of them trains the same. All of them are in the main process alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from . import checkpoint, logs, report
from .config import TrainingConfig
from .evaluate import Evaluation
from .samples import Samples
from .watch import Watch


class Observer:
    """Is told what happens in a run; here, nothing comes of it."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config

    def start(self, step: int) -> None:
        """Training begins, or goes on after this step."""

    def step(self, row: dict[str, Any], samples: Samples) -> None:
        """A step is done, with this row of metrics."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Held-out problems were answered, by the weights after this step."""

    def saved(self, best: int) -> None:
        """There is a new checkpoint; that of the step `best` has the best accuracy."""

    def end(self) -> None:
        """Training ends, whole or as it was asked to."""

    def shows_samples(self, step: int) -> bool:
        """True for the steps whose completions are shown."""
        return step == 1 or step % self.config.show_every == 0


class Warnings(Observer):
    """Adds warnings to a step's row; comes before those who write it."""

    def start(self, step: int) -> None:
        self.watch = Watch(self.config)
        for row in logs.read(self.config.folder / "metrics.jsonl"):  # of a run that goes on
            self.watch.after_step(row)

    def step(self, row: dict[str, Any], samples: Samples) -> None:
        warnings = self.watch.after_step(row)
        if warnings:
            row["warnings"] = warnings


class Files(Observer):
    """Writes the run's files of one row per step, completion, evaluation and answer."""

    def step(self, row: dict[str, Any], samples: Samples) -> None:
        logs.append(self.config.folder / "metrics.jsonl", row)
        if self.shows_samples(row["step"]):
            for shown in report.sample_rows(samples, self.config.num_generations):
                row_of_it = {"step": row["step"], **shown}
                logs.append(self.config.folder / "samples.jsonl", row_of_it)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        evaluation.write(self.config.folder, step)


class Terminal(Observer):
    """Shows a progress bar, a line per step, and completions now and then."""

    def start(self, step: int) -> None:
        self.progress = tqdm(
            total=self.config.steps, initial=step, desc=self.config.name, dynamic_ncols=True
        )

    def step(self, row: dict[str, Any], samples: Samples) -> None:
        self.progress.update()
        for warning in row.get("warnings", []):
            tqdm.write(f"      warning: {warning}")
        tqdm.write(report.line(row))
        if self.shows_samples(row["step"]):
            rows = report.sample_rows(samples, self.config.num_generations)
            tqdm.write(report.sample_table(rows))

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        tqdm.write(f"{step:5d}  {evaluation}")

    def end(self) -> None:
        self.progress.close()


class Trackers(Observer):
    """Tells accelerate's trackers the numbers of every step and evaluation."""

    def __init__(self, config: TrainingConfig, accelerator: Accelerator) -> None:
        super().__init__(config)
        self.accelerator = accelerator

    def start(self, step: int) -> None:
        of_lists = {k: ", ".join(map(str, v)) if isinstance(v, list) else v
                    for k, v in self.config.as_json().items()}  # fmt: skip
        self.accelerator.init_trackers(self.config.name, config=of_lists)

    def step(self, row: dict[str, Any], samples: Samples) -> None:
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        self.accelerator.log(numbers, step=row["step"])

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.accelerator.log({"held_out_accuracy": evaluation.accuracy}, step=step)

    def end(self) -> None:
        for tracker in self.accelerator.trackers:
            tracker.finish()


class Page(Observer):
    """Draws `report.html`, and says at the end what came of the run."""

    def step(self, row: dict[str, Any], samples: Samples) -> None:
        if self.shows_samples(row["step"]):
            self._write()

    def end(self) -> None:
        self._write()
        tqdm.write(report.summary(self.config.folder))

    def _write(self) -> None:
        try:
            report.write(self.config.folder)
        except OSError as error:
            tqdm.write(f"      warning: no report ({type(error).__name__}: {error})")


class Pruning(Observer):
    """Deletes all checkpoints but that of the best step and the last two, one for the other."""

    def saved(self, best: int) -> None:
        checkpoint.prune(self.config.folder, best)


def observers_of(config: TrainingConfig, accelerator: Accelerator) -> list[Observer]:
    """Those of a run."""
    if not accelerator.is_main_process:
        return []
    of_all = [kind(config) for kind in (Warnings, Files, Terminal, Page, Pruning)]
    return of_all + [Trackers(config, accelerator)] * bool(config.trackers)


def introduction(
    config: TrainingConfig, accelerator: Accelerator, policy: Any, problems: int, held_out: int
) -> Iterator[str]:  # fmt: skip
    """A run's first lines: what is trained, on how many problems, and where."""
    policy = accelerator.unwrap_model(policy)
    # ZeRO-3 leaves parameters of 0 numbers, and says how many there are.
    parameters = [p for p in policy.parameters() if p.requires_grad]
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    yield (
        f"{config.model} on {accelerator.device}, {accelerator.num_processes} process(es): "
        f"{trained / 1e6:,.1f}M parameters trained; {problems:,} problems, {held_out:,} held "
        f"out; results in {config.folder}/"
    )
    if config.dtype == "bf16" and not config.lora_rank:
        yield (
            "warning: bf16 weights move by 1/256 of themselves or not at all: use dtype fp32 "
            "(its GEMMs are bf16 with precision), lora_rank, or a large learning_rate"
        )
    if config.share_prompts and not policy.shares_prompts:
        yield f"Prompts are encoded with each completion: {policy.why_not_shared}"

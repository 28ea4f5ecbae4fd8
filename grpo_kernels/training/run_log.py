"""`RunLog`: output of a run, to the terminal, to its folder and to trackers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate import Accelerator
from filelock import FileLock, Timeout
from tqdm import tqdm

from . import logs, ranks, report
from .config import TrainingConfig
from .metrics import Evaluation
from .samples import Samples
from .watch import Watch, worst_token


class RunLog:
    """Prints and writes, in the main process; every process makes the same calls."""

    def __init__(self, config: TrainingConfig, accelerator: Accelerator, tokenizer: Any) -> None:
        self.config, self.accelerator, self.tokenizer = config, accelerator, tokenizer
        self.main = accelerator.is_main_process
        self.watch = Watch(config)
        self.progress: Any = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs from training in the run's folder inside the block.

        Raises:
            RuntimeError: another one does.
        """
        folder, taken = self.config.folder, False
        with ExitStack() as lock:
            if self.main:
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    lock.enter_context(FileLock(folder / ".lock", timeout=0))
                except Timeout:
                    taken = True
                except (OSError, NotImplementedError) as error:  # file systems without locks
                    self.warn(f"{folder} cannot be locked ({error}): train one run in it alone")
            if ranks.reduce(self.accelerator, taken, any):
                raise RuntimeError(
                    f"name: expected a folder in which no other process trains; got {folder}"
                )
            yield

    def open(self, last_step: int) -> None:
        """Makes the run's folder; removes rows of steps after `last_step`."""
        config = self.config
        if self.main:
            config.folder.mkdir(parents=True, exist_ok=True)
            logs.truncate(config.folder, last_step)
            text = json.dumps(config.as_json(), indent=1)
            (config.folder / "config.json").write_text(text + "\n")
        if config.trackers:
            self.accelerator.init_trackers(config.name, config=report.flat(config))

    def introduce(
        self, policy: Any, problems: int, held_out: int, sampler: str | None = None
    ) -> None:
        """Prints the run's first lines: what is trained, on how many problems, where.

        Args:
            policy: the wrapped policy.
            problems: how many are trained on.
            held_out: how many are not.
            sampler: describes who samples, if not this library.
        """
        config, accelerator = self.config, self.accelerator
        policy = accelerator.unwrap_model(policy)
        # ZeRO-3 leaves parameters of 0 numbers, and says how many there are.
        parameters = [p for p in policy.parameters() if p.requires_grad]
        trained = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
        self.say(
            f"{config.model} on {accelerator.device}, {accelerator.num_processes} process(es): "
            f"{trained / 1e6:,.1f}M parameters trained; {problems:,} problems, {held_out:,} held "
            f"out; results in {config.folder}/"
        )
        if sampler is not None:
            self.say(f"Completions by {sampler}")
        if config.dtype == "bf16" and not config.lora_rank:
            self.say(
                "warning: bf16 weights move by 1/256 of themselves or not at all: use dtype fp32 "
                "(its GEMMs are bf16 with precision), lora_rank, or a large learning_rate"
            )
        if config.share_prompts and not policy.shares_prompts:
            self.say(f"Prompts are encoded with each completion: {policy.why_not_shared}")

    def start(self, step: int) -> None:
        """Shows the progress bar, at this step."""
        self.progress = tqdm(
            total=self.config.steps, initial=step, desc=self.config.name, disable=not self.main,
            dynamic_ncols=True,
        )  # fmt: skip

    def step(self, row: dict[str, Any], samples: Samples) -> None:
        """Writes and prints a step's row, after adding warnings to it."""
        warnings = self.watch.after_step(row, self._worst_token(row, samples))
        if warnings:
            row["warnings"] = warnings
        if not self.main:
            return
        self.append("metrics.jsonl", row)
        self._track({k: v for k, v in row.items() if isinstance(v, (int, float))}, row["step"])
        self.progress.update()
        for warning in warnings:
            self.warn(warning)
        self.say(report.line(row))
        if row["step"] == 1 or row["step"] % self.config.show_every == 0:
            shown = report.sample_rows(samples, self.config.num_generations)
            for sample in shown:
                self.append("samples.jsonl", {"step": row["step"], **sample})
            self.say(report.sample_table(shown))
            self._write_report()

    def evaluation(
        self, step: int, evaluation: Evaluation, samples: Mapping[str, Any] | None = None
    ) -> None:
        """Writes and prints an evaluation and its answers.

        Args:
            step: the evaluated weights are those after it.
            evaluation: of one answer per problem.
            samples: what several per problem show, if they were asked for.
        """
        warning = self.watch.after_evaluation(evaluation)
        if not self.main:
            return
        more = {"samples": samples} if samples else {}
        self.append("evaluations.jsonl", {**evaluation.summary(step), **more})
        for answer in evaluation.answers:
            self.append("answers.jsonl", {"step": step, **answer})
        self.say(f"{step:5d}  {evaluation}")
        if warning:
            self.warn(warning)
        self._track({"held_out_accuracy": evaluation.accuracy}, step)

    def finish(self) -> None:
        """Writes the report and the picture, and says how the run ended."""
        self.progress.close()
        if self.main:
            self._write_report()
            self.say(report.summary(self.config.folder))
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def say(self, text: str) -> None:
        """Prints above the progress bar."""
        if self.main:
            tqdm.write(text)

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self.say(f"      warning: {text}")

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Writes a row of one of the run's files."""
        logs.append(self.config.folder / name, row)

    def _track(self, values: Mapping[str, float], step: int) -> None:
        if self.config.trackers:
            self.accelerator.log(values, step=step)

    def _write_report(self) -> None:
        try:
            report.write(self.config.folder)
        except OSError as error:
            self.warn(f"no report ({type(error).__name__}: {error})")

    def _worst_token(self, row: Mapping[str, Any], samples: Samples) -> str | None:
        """Describes the token, of all processes, that made the ratio or the KL spike."""
        spike = self.watch.spike(row)
        against = {"ratio_max": samples.old_logps, "kl_max": samples.ref_logps}.get(spike or "")
        if against is None:
            return None
        found = worst_token(samples, against, self.tokenizer)
        worst: tuple[float, str] = ranks.reduce(self.accelerator, found, max)
        return worst[1]

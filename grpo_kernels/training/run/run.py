"""`Run`: the progress of a run, its state in a checkpoint, and its folder."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache

from ...explain.records import read_rows
from ...explain.rules import Watch
from ..config import TrainingConfig
from . import checkpoint, logs, ranks, user_code
from .accuracy import Evaluation
from .interruptions import BadUpdates, Interruptions, Preempted, StepError
from .metrics import Clock, Metrics
from .observers import Samples, observers_of, print_above
from .schedule import every

# The number of updates in a row without a finite gradient that ends a run.
MOST_BAD = 10

_T = TypeVar("_T")


class _ObserverError(Exception):
    """Error of an observer."""


class Run:
    """The state of a run apart from weights and optimizer.

    All processes make the same calls. `inputs`: digests from `checkpoint.inputs_of`. `changing`:
    weights, the optimizer and other tensors of a checkpoint.

    Raises:
        ValueError: the run to resume had other inputs.
    """

    def __init__(
        self, config: TrainingConfig, accelerator: Accelerator, inputs: Mapping[str, str],
        changing: checkpoint.TrainedState,
    ) -> None:  # fmt: skip
        self.config, self.accelerator = config, accelerator
        self.inputs, self.changing = inputs, changing
        self.interruptions = Interruptions(accelerator)
        self.metrics, self.clock = Metrics(), Clock(accelerator.device)  # of the step
        self.observers = observers_of(config, accelerator, self.metrics)
        self._seconds_of_page = 0.0  # since the last row
        self.failed: set[str] = set()  # observers and files whose error was printed
        self.waiting: dict[str, list[Mapping[str, Any]]] = {}  # rows not written yet, by file
        self.watch = Watch(config.as_json())
        self.step = 0  # the current step, or the last
        self.trained = 0  # the last step whose updates were all made
        self.saved = 0  # the last step with a checkpoint
        self.updates_begun = False  # whether weights have moved since the step that is trained
        self.evaluated = True  # False where an evaluation of the step is due
        self.best: dict[str, Any] = {}  # step and accuracy of the best evaluation of the training
        self.bad_updates = 0  # the number of last updates in a row without a finite gradient
        self.micro_batch_size = config.micro_batch_size  # halved when memory runs out
        self.first_gap: float | None = None  # to the sampler's log-probs, in the first step
        path = checkpoint.latest(config.folder) if config.resume else None
        if path is not None:
            main_inputs = ranks.reduce(accelerator, inputs, itemgetter(0))
            checkpoint.check_inputs(checkpoint.state_of(path), main_inputs)

    def seed_of(self, what: str) -> int:
        """The seed of draws for `what`, different in every step and process."""
        text = f"{self.config.seed}-{self.step}-{self.accelerator.process_index}-{what}"
        return random.Random(text).getrandbits(31)

    def print_main(self, text: str) -> None:
        """Prints in the main process, above the progress bar; ignores a closed terminal."""
        if self.accelerator.is_main_process:
            print_above(text)

    def warn(self, text: str) -> None:
        self.print_main(f"      warning: {text}")

    def write_step(self, row: dict[str, Any], samples: Samples) -> None:
        """Writes a step's row, with its warnings; then observers see it."""
        if self.accelerator.is_main_process:
            if warnings := self.call_observer("warnings", self.watch.after_step, row):
                row["warnings"] = warnings
            self.write("metrics.jsonl", [row])
        self.notify("step", row, samples)

    def write(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows to a file of the folder, in the main process; warns if the disk is full.

        Unwritten rows are written with the next ones.
        """
        if not self.accelerator.is_main_process:
            return
        waiting = self.waiting.setdefault(name, [])
        waiting += rows
        try:
            with self._page_time():
                while waiting:
                    logs.append(self.config.folder / name, waiting[0])
                    del waiting[0]
        except OSError as error:
            if name not in self.failed:
                self.failed.add(name)
                self.warn(
                    f"{name} cannot be written ({error}): its rows wait until there is room, and "
                    f"training goes on. Make room in {self.config.folder}"
                )
        else:
            self.failed.discard(name)

    def write_waiting(self) -> None:
        """Writes the rows that failed to be written before."""
        for name in self.waiting:
            self.write(name, [])

    def notify(self, event: str, *news: Any) -> None:
        """Calls this method of every `Observer`; see `call_observer`."""
        for observer in self.observers:
            # Copies, as an observer may change a row.
            copies = [deepcopy(x) if isinstance(x, dict) else x for x in news]
            self.call_observer(type(observer).__name__, getattr(observer, event), *copies)

    def call_observer(self, name: str, look: Callable[..., _T], *news: Any) -> _T | None:
        """Calls an observer; returns its result, or None if it failed.

        Its errors never end a run; the first is printed.
        """
        try:
            with self._page_time():
                return user_code.call(name, partial(look, *news), _ObserverError)
        except _ObserverError as error:
            if name not in self.failed:
                self.failed.add(name)
                cause = error.__cause__
                print_above(
                    f"      warning: {name} failed ({type(cause).__name__}: {cause}); training "
                    "goes on, and its later errors are not printed"
                )
        return None

    @contextmanager
    def _page_time(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds_of_page += time.perf_counter() - start

    def seconds_of_page(self) -> float:
        """Returns the seconds that files and observers took since the last call."""
        seconds, self._seconds_of_page = self._seconds_of_page, 0.0
        return seconds

    def halve_micro_batches(self) -> None:
        """Halves micro-batches after memory ran out, which does not change gradients.

        Raises:
            StepError: they have one completion, or there are other processes, which may have gone
                on and must stop, too.
        """
        size = self.micro_batch_size
        lower = "max_completion_length" if size == 1 else "micro_batch_size"
        if size == 1 or self.accelerator.num_processes > 1:
            raise StepError(
                f"memory ran out with micro_batch_size={size}: lower {lower}, or set "
                "gradient_checkpointing, lora_rank or dtype bf16"
            )
        self.micro_batch_size //= 2
        clear_device_cache(garbage_collection=True)
        self.warn(
            f"memory ran out: from now on micro_batch_size is {self.micro_batch_size}; the "
            "gradients are the same"
        )

    # A step

    def begin_step(self) -> None:
        self.trained = self.step
        self.step += 1

    def begin_update(self, grad_norm: float, scale: float = 1.0) -> bool:
        """Notes an update before it is made; returns False if it must be skipped.

        `scale`: of the loss, where GEMMs are in float16. A large scale may make the gradient
        infinite, as in the first updates.

        Raises:
            BadUpdates: too many in a row had no finite gradient.
        """
        if math.isfinite(grad_norm):
            self.updates_begun, self.bad_updates = True, 0
            return True
        self.bad_updates += scale <= 1
        if self.bad_updates >= MOST_BAD:
            raise BadUpdates(self.bad_updates, checkpoint.latest(self.config.folder))
        return False

    def end_updates(self) -> None:
        """Notes that the step's updates were all made."""
        self.trained, self.updates_begun = self.step, False
        self.evaluated = not self.evaluates(self.step)

    def keep_first_gap(self, gap: float) -> float:
        """Returns the gap to the sampler's log-probs in the first step that had one."""
        if self.first_gap is None:
            self.first_gap = gap
        return self.first_gap

    # The folder

    def open(self) -> Path | None:
        """Makes the run's folder, or resumes the run in it and returns its checkpoint."""
        config, state = self.config, dict[str, Any]()
        path = checkpoint.latest(config.folder) if config.resume else None
        if path is not None:
            state = checkpoint.state_of(path)
            if gone := sorted(state["config"].keys() - config.as_json().keys()):
                values = ", ".join(f"{name}={state['config'][name]!r}" for name in gone)
                self.warn(f"options of the checkpoint that no longer exist are left out: {values}")
            self._restore(state)
            self.changing.load_state_dict(checkpoint.tensors_of(path))
        elif config.resume and not self.step:
            self.print_main(f"resume: no checkpoint in {config.folder}: begins at step 1")
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            known = self.step if path is not None or self.step else -1  # a run may go on in place
            logs.open_folder(config.folder, config.as_json(), known)
            for row in read_rows(config.folder / "metrics.jsonl"):  # of a run that goes on
                self.call_observer("warnings", self.watch.after_step, row)
        self._see_evaluations()
        return path

    def write_evaluation(self, evaluation: Evaluation) -> bool:
        """Writes an evaluation after the step; returns True for the best of the training."""
        row = evaluation.summary(self.step)
        better = evaluation.accuracy > self.best.get("accuracy", -1.0)
        if better:
            self.best = {name: row[name] for name in ("step", "accuracy")}
        # The row comes last: a resumed run takes an evaluation with a row as complete.
        self.write("answers.jsonl", ({"step": self.step, **x} for x in evaluation.answers))
        self.write("evaluations.jsonl", [row])
        self.evaluated = True
        self.notify("evaluation", self.step, evaluation)
        return better and self.step > 0

    def evaluates(self, step: int) -> bool:
        """True for the steps followed by an evaluation."""
        return step in (0, self.config.steps) or every(self.config.eval_every, step)

    def _see_evaluations(self) -> None:
        """Reads the best evaluation, and whether the last step has one, from the file."""
        rows = read_rows(self.config.folder / "evaluations.jsonl")
        # The main process's file: other hosts may have none.
        rows = ranks.reduce(self.accelerator, rows, itemgetter(0))
        made = {row["step"] for row in rows}
        self.evaluated = not self.evaluates(self.step) or self.step in made
        first, *_ = sorted(rows, key=lambda row: -row["accuracy"]) or [{}]
        self.best = {name: first[name] for name in ("step", "accuracy") if name in first}

    def save(self) -> None:
        """Writes a checkpoint unless `save_every` is -1; if that fails, warns and goes on.

        Weights that are not finite are not saved.
        """
        if self.config.save_every < 0:
            return
        if self.saved == self.step:
            self.prune()  # by an evaluation since then
            return
        if self.bad_updates or not ranks.finite(self.accelerator, self.changing.weights.values()):
            self.warn(f"no checkpoint of step {self.step}: gradients or weights are not finite")
            return
        tensors = self.changing.state_dict()
        error = checkpoint.save(self.accelerator, self.config.folder, self._state(), tensors)
        if error is not None:
            self.warn(
                f"no checkpoint of step {self.step} ({error}); the last one is untouched and "
                f"training goes on. Make room in {self.config.folder}"
            )
            return
        self.saved = self.step
        self.prune()

    def prune(self) -> None:
        """Deletes all checkpoints except the best and the last two."""
        if self.accelerator.is_main_process:
            best = self.best.get("step", self.step)
            self.call_observer("pruning", checkpoint.prune, self.config.folder, best)

    def stop(self, error: BaseException) -> None:
        """Saves the weights of the step before a failed step, unless they have changed since."""
        self.step = self.trained
        if self.accelerator.num_processes > 1 and not isinstance(error, (StepError, Preempted)):
            return  # the other processes wait in another collective
        if self.saved < self.step and not self.updates_begun:
            self.save()
        then = f"resume goes on after step {self.saved}" if self.saved else "no checkpoint was kept"
        self.write_waiting()
        self.print_main(f"Stopped: {then}")
        if self.step and isinstance(error, Preempted):
            self.notify("end")
        self.accelerator.wait_for_everyone()

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step, "config": self.config.as_json(),
            "processes": self.accelerator.num_processes, "inputs": self.inputs,
            "first_gap": self.first_gap, "micro_batch_size": self.micro_batch_size,
        }  # fmt: skip

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.step = self.trained = self.saved = state["step"]
        self.first_gap, self.updates_begun = state["first_gap"], False
        # The run's reduced size, unless the option has changed.
        if state["config"]["micro_batch_size"] == self.config.micro_batch_size:
            self.micro_batch_size = state["micro_batch_size"]

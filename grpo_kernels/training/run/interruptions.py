"""Interruptions of a step, in all processes: signals, and memory that runs out."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate import Accelerator

from ...base.memory import ran_out_of_memory
from . import ranks

# The exit status of a run stopped by a signal, to continue with --resume (EX_TEMPFAIL).
RESUME = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StepError(RuntimeError):
    """Error of a step; the trainer writes a checkpoint of the step before and ends."""


class BadUpdates(RuntimeError):
    """Error of `count` updates in a row without a finite gradient; names the last `checkpoint`."""

    def __init__(self, count: int, checkpoint: Path | None) -> None:
        super().__init__(
            f"{count} updates in a row had a gradient of NaN or inf and were left out. The last "
            f"checkpoint: {checkpoint}. Look at what grew before it (ratio_max, grad_norm, entropy "
            "on its page); a lower learning_rate may get past it"
        )


class OutOfMemory(Exception):
    """A process had too little memory for a micro-batch; raised in all of them."""


class Preempted(SystemExit):
    """A signal asked the run to stop; the exit status is `RESUME`."""


class Interruptions:
    """Notes signals inside a `with` block; `check` raises one process's signal or error in all.

    The first signal waits for the next check; a second signal acts as before the block. Only a
    process's main thread gets signals: in other threads there is no handler.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruptions:
        self.signal = 0
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def check(self, error: Exception | None = None, *, may_stop: bool = True) -> None:
        """Raises in all processes if one of them got a signal or an error.

        `error`: this process's, a `StepError` or out of memory. `may_stop`: nothing is lost if the
        step ends here; else a signal waits.
        """
        step_error = error if isinstance(error, StepError) else None
        met = 2 if step_error is not None else int(error is not None)
        worst, number = ranks.largest(self.accelerator, [met, self.signal])
        if worst == 2:
            raise step_error or StepError("another process failed, with the error that it prints")
        if worst == 1:
            raise OutOfMemory
        if number and may_stop:
            raise Preempted(RESUME)

    @contextmanager
    def guard(self, *, may_stop: bool = False) -> Iterator[None]:
        """Calls `check` after the block, in which no process may wait for another.

        The block may run out of memory, and the user's loss may fail in it.
        """
        met: Exception | None = None
        try:
            yield
        except Exception as error:
            if not (isinstance(error, StepError) or ran_out_of_memory(error)):
                raise
            met = error
        self.check(met, may_stop=may_stop)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        self._restore()
        if self.accelerator.is_main_process:  # print is not safe in a handler
            name = signal.Signals(number).name
            with suppress(OSError):  # the terminal may be closed
                os.write(2, f"\n{name}: ends as soon as nothing is lost; again: at once\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

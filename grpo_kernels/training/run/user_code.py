"""Calls of the user's functions: dataset, rewards, `is_correct`, rollout, loss, `on_step`..."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...base.memory import ran_out_of_memory
from .interruptions import Preempted

_T = TypeVar("_T")


def call(
    name: str, work: Callable[[], _T], kind: type[Exception],
    hint: Callable[[BaseException], str] = lambda _: "", *, retried: bool = False,
) -> _T:  # fmt: skip
    """Returns the result of `work`; raises its errors as `kind`, with `name` before the message.

    `exit()` in generated code, the timeouts of some packages and the outcomes of pytest derive
    from BaseException alone. A second signal, which raises KeyboardInterrupt, ends the run.

    Errors of `kind` pass unchanged; if `retried`, also out of memory, as the caller retries with
    smaller parts. `hint` makes the end of the message from the error.
    """
    try:
        return work()
    except (KeyboardInterrupt, Preempted, kind):
        raise
    except BaseException as error:
        if retried and ran_out_of_memory(error):
            raise
        raise kind(f"{name}: {type(error).__name__}: {error}{hint(error)}") from error

"""`at_most`: bounds the time of a block, in any thread, beside alarms of other code."""

from __future__ import annotations

import ctypes
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_IN_BLOCK = threading.local()  # `any`: of a thread that is not the main one


class TimedOut(BaseException):
    """Not an Exception, which the code in the block may catch."""


class Late:
    """Says whether a block took too long, where one is inside another."""

    rang = False


@contextmanager
def at_most(seconds: float, late: Late) -> Iterator[None]:
    """Raises `TimedOut` in the block after so many seconds, and says so in `late`; 0: never.

    In the main thread by an alarm, which ends a call that waits, too; elsewhere between two
    instructions of Python, and of blocks inside one another by the outermost alone.
    """
    main = threading.current_thread() is threading.main_thread()
    if not seconds or getattr(_IN_BLOCK, "any", False):
        yield
    elif main and hasattr(signal, "setitimer"):
        with _by_alarm(seconds, late):
            yield
    else:
        with _from_a_thread(seconds, late):
            yield


@contextmanager
def _by_alarm(seconds: float, late: Late) -> Iterator[None]:
    """An alarm of the caller's rings when it is due, in the block or after it."""
    end, due, every = time.monotonic() + seconds, math.inf, 0.0

    def note() -> None:
        """Notes when the caller's alarm is due."""
        nonlocal due, every
        left, every = signal.getitimer(signal.ITIMER_REAL)
        due = time.monotonic() + left if left else math.inf

    def arm() -> None:
        left = min(due, end) - time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(1e-6, left) if left < math.inf else 0.0, every)

    def ring(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now >= end:
            late.rang = True
            raise TimedOut
        if now >= due:
            signal.setitimer(signal.ITIMER_REAL, every, every)
            try:
                if callable(before):
                    before(number, frame)  # which may set the next one
                elif before == signal.SIG_DFL:
                    signal.signal(signal.SIGALRM, before)
                    signal.raise_signal(signal.SIGALRM)
            finally:
                note()
        arm()

    note()
    before = signal.signal(signal.SIGALRM, ring) or signal.SIG_DFL
    arm()
    try:
        yield
    finally:
        end = math.inf
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        arm()


@contextmanager
def _from_a_thread(seconds: float, late: Late) -> Iterator[None]:
    me, lock, over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def ring() -> None:
        with lock:
            if not over:
                late.rang = True
                raise_in(me, ctypes.py_object(TimedOut))

    timer = threading.Timer(seconds, ring)
    timer.daemon = True
    timer.start()
    # An exception that is due while another timer starts would reach that one's thread.
    _IN_BLOCK.any = True
    try:
        yield
    finally:
        _IN_BLOCK.any = False
        with lock:
            over = True
            raise_in(me, None)  # takes back what was not raised yet
        timer.cancel()

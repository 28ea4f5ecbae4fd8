"""`at_most`: bounds the time of a block, in any thread, beside alarms of other code."""

from __future__ import annotations

import ctypes
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
    """Limits by an alarm; one of the caller's that is due first rings instead."""
    over, start = False, time.monotonic()

    def ring(number: int, frame: FrameType | None) -> None:
        if not over:
            late.rang = True
            raise TimedOut

    left, every = signal.getitimer(signal.ITIMER_REAL)
    if 0 < left <= seconds:
        yield
        return
    before = signal.signal(signal.SIGALRM, ring) or signal.SIG_DFL
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            left = max(1e-6, left - (time.monotonic() - start))
            signal.setitimer(signal.ITIMER_REAL, left, every)


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

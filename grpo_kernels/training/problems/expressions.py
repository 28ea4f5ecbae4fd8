"""Comparing expressions by math-verify, in one process with limits of time and memory.

The process runs this file as a script, which imports nothing else of the library.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache, lru_cache

# Limits of a comparison. The time is CPU time, so that a busy machine changes no reward; on Windows
# wall time. Windows and macOS do not limit memory.
SECONDS = 5.0
BYTES = 2 << 30
# Spellings of code and their LaTeX, in which `10^-3` would be 10 to the minus, times 3.
_LATEX = (
    (r"\*\*", "^"), (r"\^(-?\d+)", r"^{\1}"), (r"(?<![\\a-zA-Z])(pi|sqrt)(?![a-zA-Z])", r"\\\1"),
    (r"\\sqrt\(([^()]*)\)", r"\\sqrt{\1}"),
)  # fmt: skip


class MathVerify:
    """math-verify in a process that a timer ends when a comparison takes too long.

    It works in any thread and uses none of the caller's alarms. `timed_out` counts all calls
    without a result, cached ones included.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds, self.timed_out = seconds, 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        # A reward and accuracy compare the same pair, as do equal completions.
        self._compare = lru_cache(4096)(self._ask)

    def equal(self, answer: str, right: str) -> bool:
        """Returns whether two expressions are equal; False if there is no result in time."""
        with self._lock:
            try:
                same = self._compare(answer, right)
            except ChildProcessError:
                same = None
            self.timed_out += same is None
        return bool(same)

    def _ask(self, answer: str, right: str) -> bool | None:
        process = self._process = self._process or self._start()
        timer = threading.Timer(self.seconds, process.kill)
        if not hasattr(signal, "setitimer"):  # elsewhere the process ends itself
            timer.start()
        try:
            reply = _exchange(process, json.dumps([right, answer]))
        except BaseException:
            self.close()  # or the next comparison would get the reply to this one
            raise
        finally:
            timer.cancel()
        if reply:
            return reply == "True"
        self.close()
        if process.returncode == -9:  # SIGKILL, which Windows does not name
            raise ChildProcessError("somebody else ended the process")  # retrying may work
        return None

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, __file__, str(self.seconds)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,  # Ctrl-C is for the trainer
        )  # fmt: skip
        if not _exchange(process):
            raise ImportError(
                "answers that are expressions need math-verify: pip install 'grpo_kernels[train]' "
                f"({sys.executable} could not import it)"
            )
        return process

    def close(self) -> None:
        """Ends the process; the next comparison starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _exchange(process: subprocess.Popen[str], line: str = "") -> str:
    """Sends a line, and returns the reply; "" if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        if line:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return process.stdout.readline().strip()
    except OSError:  # BrokenPipeError; on Windows any
        return ""


def same_expression(answer: str, right: str) -> bool:
    """Returns whether math-verify finds two expressions equal; False without a result in time."""
    return _math_verify().equal(answer, right)


def timed_out() -> int:
    """Returns the number of this process's comparisons without a result so far."""
    return _math_verify().timed_out


@cache
def _math_verify() -> MathVerify:
    return MathVerify()


if hasattr(os, "register_at_fork"):  # a forked process starts a worker of its own
    os.register_at_fork(after_in_child=_math_verify.cache_clear)


def _latex(expression: str) -> str:
    for code, latex in _LATEX:
        expression = re.sub(code, latex, expression)
    return expression


def _serve(seconds: float) -> None:
    """Compares the pairs of expressions on standard input, one per line."""
    del sys.path[0]  # this folder, which math-verify must not import from
    import math_verify

    def same(right: str, answer: str) -> bool:
        sides = [math_verify.parse(f"${_latex(x)}$", parsing_timeout=None) for x in (right, answer)]
        return bool(math_verify.verify(*sides, timeout_seconds=None))

    replies, sys.stdout = sys.stdout, sys.stderr
    with suppress(ImportError, OSError, ValueError):  # Windows; macOS, which maps more than that
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    same("x+1", "1+x")  # the first time loads a parser
    has_timer = hasattr(signal, "setitimer")
    if has_timer:  # its signal ends the process, whatever its parent does with it
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        if has_timer:
            signal.setitimer(signal.ITIMER_PROF, seconds)
        is_same = same(*json.loads(line))
        if has_timer:
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(is_same, file=replies, flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))

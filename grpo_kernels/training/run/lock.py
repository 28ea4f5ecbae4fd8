"""The lock of a run's folder: one run at a time trains in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accelerate import Accelerator
from filelock import FileLock, Timeout

from . import ranks

# Errors of file systems without locks.
_NO_LOCKS = (OSError, NotImplementedError)


@contextmanager
def locked(accelerator: Accelerator, folder: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Makes a run's folder, and keeps other runs from training in it inside the block.

    Raises:
        RuntimeError: another run trains in it.
    """
    taken = False
    with ExitStack() as lock:
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.enter_context(_lock_of(folder))
            except Timeout:
                taken = True
            except _NO_LOCKS as error:
                warn(f"{folder} cannot be locked ({error}): train one run in it alone")
        if ranks.reduce(accelerator, taken, any):
            raise RuntimeError(in_use_message(folder))
        yield


def is_locked(folder: Path) -> bool:
    """True if a process trains in the folder; False if its file system has no locks."""
    lock = _lock_of(folder)
    if not Path(lock.lock_file).exists():
        return False
    try:
        with lock:
            return False
    except Timeout:
        return True
    except _NO_LOCKS:
        return False


def in_use_message(folder: Path) -> str:
    """The error message of a folder in which another run trains."""
    return f"output: another process trains in {folder}: pass another output"


def _lock_of(folder: Path) -> FileLock:
    return FileLock(folder / ".lock", timeout=0)

"""Processes, mostly two, that run jobs together by gloo, and the one place where they end.

A job is a function of an importable module. Both ranks call it with the same arguments, in a
process group that is made for it and destroyed after it, and what each returns comes back:

    first, second = ranks("tests.ranks.head_jobs:gradients_of_half", "ddp")

The ranks are started once and run one job after the other, as most of a job's time would be its
imports. Nothing of one job is left to the next: neither the group, nor accelerate's state, nor the
environment. After a job that failed or hung, the next one gets new ranks.

No port is used: the ranks meet in a file and hear from the test through a pipe.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORLD = 2
# A collective that one rank does not enter; all of a job, its imports included.
COLLECTIVE_S, JOB_S = 120, 300


class RankFailed(AssertionError):
    """A rank that raised, died or hung, with what it printed."""


class Ranks:
    """`world` processes, started when the first job comes."""

    def __init__(self, folder: Path, world: int = WORLD) -> None:
        self.folder, self.world = folder, world
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[connection.Connection] = []
        self.logs: list[Path] = []
        self.jobs = self.starts = 0

    def __call__(self, job: str, *args: Any, environment: dict[str, str] | None = None) -> list:
        """The job's result on each rank."""
        if not self.processes:
            self._start()
        self.jobs += 1
        store = str(self.folder / f"store-{self.jobs}")
        try:
            for pipe in self.pipes:
                pipe.send_bytes(pickle.dumps((job, args, environment or {}, store, self.world)))
            return self._answers(time.monotonic() + JOB_S)
        except BaseException:
            self._kill()
            raise

    def close(self) -> list[int]:
        """Lets them leave; their exit statuses, which must be 0."""
        for pipe in self.pipes:
            pipe.close()
        try:
            return [process.wait(COLLECTIVE_S) for process in self.processes]
        except subprocess.TimeoutExpired as hung:
            raise RankFailed(f"a rank does not leave{self.printed()}") from hung
        finally:
            self._kill()

    def _start(self) -> None:
        self.starts += 1
        self.logs = [self.folder / f"rank-{self.starts}-{rank}.log" for rank in range(self.world)]
        for rank, log in enumerate(self.logs):
            ours, theirs = connection.Pipe()
            command = [sys.executable, "-m", "tests.helpers.ranks", str(theirs.fileno()), str(rank)]
            with log.open("wb") as file, theirs:
                process = subprocess.Popen(
                    command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()], env={**os.environ, "OMP_NUM_THREADS": "1"},
                )  # fmt: skip
            self.processes.append(process)
            self.pipes.append(ours)

    def _answers(self, deadline: float) -> list:
        answers: dict[int, Any] = {}
        while len(answers) < self.world:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(waiting.values())} hang{self.printed()}")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    error, answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError) as died:
                    status = self.processes[rank].wait()
                    raise RankFailed(f"rank {rank} died, {status}{self.printed()}") from died
                if error:
                    raise RankFailed(f"rank {rank}: {error}{self.printed()}")
        return [answers[rank] for rank in range(self.world)]

    def printed(self) -> str:
        """The end of what each rank has printed."""
        texts = (log.read_text(errors="replace")[-4000:] for log in self.logs)
        return "".join(f"\n--- printed by rank {rank}\n{text}" for rank, text in enumerate(texts))

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


def serve(pipe: connection.Connection, rank: int) -> None:
    """A rank: runs jobs until the other end of the pipe is closed."""
    while True:
        try:
            job, args, environment, store, world = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = None, run(job, args, environment, store, rank, world)
        except BaseException:
            answer = traceback.format_exc(), None
        pipe.send_bytes(pickle.dumps(answer))


def run(
    job: str, args: tuple, environment: dict[str, str], store: str, rank: int, world: int
) -> Any:
    """The job in a group of its own."""
    import torch.distributed as dist

    module, name = job.split(":")
    before = dict(os.environ)
    # Launchers set these. Nobody listens at the port: accelerate uses the existing group.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="localhost", MASTER_PORT="1", **environment,
    )  # fmt: skip
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )  # fmt: skip
    try:
        call = getattr(importlib.import_module(module), name)
        gc.freeze()  # what is imported, which `end_group` then need not look at
        answer = call(*args)
        end_group()
        return answer
    finally:
        os.environ.clear()
        os.environ.update(before)


def end_group() -> None:
    """Ends the process group: wrappers first, as they use it; then both ranks at once.

    A DDP module that outlives its group may wait, in its destructor, for a thread of the group.
    And a rank that is gone while the other is in its last collective breaks the other's connection.
    """
    import torch.distributed as dist

    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    gc.collect()
    dist.barrier()
    theirs = sys.modules.get("deepspeed.comm")
    if theirs is not None and theirs.is_initialized():
        theirs.destroy_process_group()  # and forgets the groups that it has made
        theirs.comm.cdb = None
    else:
        dist.destroy_process_group()


def leave(status: int) -> None:
    """Ends this process here and now, without the interpreter's own end.

    A thread of gloo that needs the interpreter's lock while the interpreter ends (for the callback
    of a collective, or to let go of a Python object) is ended inside C++ code, and the process
    aborts: "terminate called without an active exception". Destroying the group waits for its
    threads, but only if nothing else refers to it: a device mesh or a wrapper in a cycle of
    references does. Without the interpreter's end there is nothing to trip over, and what a rank
    had to say it has said.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(connection.Connection(int(sys.argv[1])), int(sys.argv[2]))
    leave(0)

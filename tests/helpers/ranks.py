"""Processes, mostly two, that run jobs together by gloo, and the one place where they end.

A job is a function, or `module:name` of one. All ranks call it with the same arguments, in a
process group that is made for it and destroyed after it, and what each returns comes back:

    first, second = ranks(gradients_of_half, "ddp")

The ranks are started once and run one job after the other, as most of a job's time would be its
imports. Nothing of one job is left to the next: neither the group, nor accelerate's state, nor the
environment. After a job that failed or hung, the next one gets new ranks. No port is used.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORLD = 2
# A collective that one rank does not enter; all of a job, its imports included.
COLLECTIVE_S, JOB_S = 120, 300
# Imported once, by the process that all ranks, and the runs of `faulty_runs`, are forked from.
PRELOAD = ["tests.helpers.trainer_runs", "transformers.generation", "peft"]


class RankFailed(AssertionError):
    """A rank that raised, died or hung."""


class Ranks:
    """`world` processes, started when the first job comes."""

    def __init__(self, folder: Path, world: int = WORLD) -> None:
        self.folder, self.world = folder, world
        self.pools: list[ProcessPoolExecutor] = []
        self.process_ids: list[int] = []
        self.jobs = 0

    def __call__(
        self, job: Callable | str, *args: Any, environment: dict[str, str] | None = None
    ) -> list:
        """The job's result on each rank."""
        if not self.pools:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOAD)
            self.pools = [ProcessPoolExecutor(1, context, set_up) for _ in range(self.world)]
            started = [pool.submit(os.getpid) for pool in self.pools]
            self.process_ids = [future.result() for future in started]
        self.jobs += 1
        # As bytes, which are imports and tensors of the rank alone.
        work = pickle.dumps((job, args, environment or {}))
        store = str(self.folder / f"store-{self.world}-{self.jobs}")
        results = [
            pool.submit(run, work, store, rank, self.world) for rank, pool in enumerate(self.pools)
        ]
        done, hung = wait(results, JOB_S, FIRST_EXCEPTION)
        errors = {results.index(x): error for x in done if (error := x.exception())}
        if errors or hung:
            self.close()
            raise RankFailed(f"by rank: {errors or 'it hangs'}") from next(
                iter(errors.values()), None
            )
        return [pickle.loads(result.result()) for result in results]

    def close(self) -> None:
        """Ends them here and now, without the interpreter's own end.

        A thread of gloo that needs the interpreter's lock while the interpreter ends would abort:
        destroying the group waits for its threads only if nothing else refers to it.
        """
        for process_id in self.process_ids:
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        for pool in self.pools:
            pool.shutdown()
        self.pools, self.process_ids = [], []


def set_up() -> None:
    """Has a rank compute with one thread, and leave when the tests are gone."""
    import torch

    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()

    def leave() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()


def run(work: bytes, store: str, rank: int, world: int) -> bytes:
    """Runs the job in a group of its own."""
    import torch.distributed as dist

    job, args, environment = pickle.loads(work)
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
        call = pkgutil.resolve_name(job) if isinstance(job, str) else job
        gc.freeze()  # what is imported, which `end_group` then need not look at
        answer = call(*args)
        end_group()
        return pickle.dumps(answer)
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

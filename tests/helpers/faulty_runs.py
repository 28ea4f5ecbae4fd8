"""Runs of the trainer that meet faults, and are started again until they come to their end.

- `kill`: kill -9 at a moment that is drawn, in the step or in what follows it;
- `rename`: kill -9 right before or right after a checkpoint gets its name;
- `signal`: SIGTERM in a backward;
- `reward`: a reward function raises;
- `disk`: no room for a checkpoint, after which the run goes on.
"""

import errno
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from grpo_kernels.training import TrainingConfig
from tests.helpers import fake_vllm
from tests.helpers.trainer_runs import noise, trainer_of

KINDS = ("kill", "rename", "signal", "reward", "disk")


def faults_at(steps, every, kinds=KINDS, seed=0):
    """The fault of each step that has one."""
    draw, places = random.Random(seed), range(every, steps, every)
    drawn = draw.sample([kinds[i % len(kinds)] for i in range(len(places))], len(places))
    return dict(zip(places, drawn, strict=True))


class Faulty:
    """A trainer that meets each fault once, however often its run is started again."""

    def __init__(self, trainer, faults, met):
        self.trainer, self.faults, self.met = trainer, faults, met
        self.draw, self.seconds, self.killer = random.Random(os.getpid()), 1.0, None
        self.own_step, self.own_backward = trainer.train_step, trainer.accelerator.backward
        self.own_replace, self.own_sync = Path.replace, os.fsync
        trainer.train_step, trainer.accelerator.backward = self.train_step, self.backward
        Path.replace = lambda path, target: self.replace(path, target)
        os.fsync = self.sync

    def now(self, kind):
        """Notes a fault down if it is due. Faults of saving come with the next save."""
        done = {fault["step"] for fault in faults_met(self.met)}
        due = [step for step, its in self.faults.items() if its == kind and step not in done]
        here = [step for step in due if step <= self.trainer.run.step]
        if not here:
            return False
        with self.met.open("a") as file:
            print(json.dumps({"step": here[0], "kind": kind}), file=file, flush=True)
            self.own_sync(file.fileno())
        return True

    def train_step(self, problems):
        start = time.perf_counter()
        if self.killer is not None:
            self.killer.join()  # not later than here
        if self.now("kill"):
            self.killer = threading.Timer(self.draw.uniform(0, 1.5 * self.seconds), kill)
            self.killer.start()
        done = self.own_step(problems)
        self.seconds = time.perf_counter() - start
        return done

    def backward(self, loss, **options):
        if self.now("signal"):
            os.kill(os.getpid(), signal.SIGTERM)
        self.own_backward(loss, **options)

    def replace(self, path, target):
        if target.suffix != ".pt" or not self.now("rename"):
            return self.own_replace(path, target)
        if self.draw.random() < 0.5:
            self.own_replace(path, target)
        return kill()

    def sync(self, file):
        if self.now("disk"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.own_sync(file)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def faults_met(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start(options, faults, met):
    """Starts a run once, in a process of its own."""

    def judge(*args, **columns):
        if trainer.now("reward"):
            raise ConnectionError("the judge is gone")
        return noise(*args, **columns)

    if options.get("rollout") == "vllm":
        fake_vllm.install(pytest.MonkeyPatch())
    trainer = Faulty(trainer_of(TrainingConfig(**options), rewards={"noise": judge}), faults, met)
    trainer.trainer.train()


def run_through(options, faults, met):
    """Starts a run again until it comes to its end; the exit codes of all starts."""
    codes = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.faulty_runs", "transformers.generation", "peft"])
    while not codes or codes[-1]:
        process = context.Process(target=start, args=(options | {"resume": True}, faults, met))
        process.start()
        process.join()
        codes.append(process.exitcode)
        assert len(codes) <= 2 * len(faults) + 2, codes
    return codes

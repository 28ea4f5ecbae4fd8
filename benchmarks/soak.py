"""Trains through faults, and compares with a run that meets none.

    python -m benchmarks.soak --steps 500 --every 20

Both runs are of the demo's task at its smallest setting, from the same seed. In the second one a
fault comes every so many steps, and the run is started again with `resume` whenever it has ended:

- `kill`: kill -9 at a moment that is drawn, in the step or in what follows it;
- `rename`: kill -9 right before or right after a checkpoint gets its name;
- `signal`: SIGTERM in a backward;
- `reward`: a reward function raises;
- `disk`: no room for a checkpoint, after which the run goes on.

Rows of metrics and the weights at the end have to be the same bits. The first run is looked at for
what grows: resident memory, open files, threads. Linux alone.
"""

from __future__ import annotations

import argparse
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import header, write_json
from examples.demo_model import model_path
from grpo_kernels.training import Trainer, TrainingConfig, checkpoint, load_model, load_problems

KINDS = ("kill", "rename", "signal", "reward", "disk")
# Steps after which nothing may grow any more.
WARM = 50


def options_of(model: str, steps: int) -> dict[str, Any]:
    """The demo's task at its smallest."""
    return {
        "model": model, "dataset": "examples.problems:additions", "rewards": ["noise"],
        "steps": steps, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4,
        "micro_batch_size": 2, "epochs_per_rollout": 2, "eval_size": 4, "eval_every": 25,
        "save_every": 10, "learning_rate": 1e-6, "save_model": False, "show_every": 10**6,
    }  # fmt: skip


def faults_at(
    steps: int, every: int, kinds: tuple[str, ...] = KINDS, seed: int = 0
) -> dict[int, str]:
    """The fault of each step that has one."""
    draw = random.Random(seed)
    places = range(every, steps, every)
    kinds = tuple(kinds[i % len(kinds)] for i in range(len(places)))
    return dict(zip(places, draw.sample(kinds, len(kinds)), strict=True))


class Faulty:
    """A trainer that meets each fault once, however often its run is started again."""

    def __init__(self, trainer: Trainer, faults: Mapping[int, str], met: Path) -> None:
        self.trainer, self.faults, self.met = trainer, faults, met
        self.draw, self.seconds = random.Random(os.getpid()), 1.0
        self.killer: threading.Timer | None = None
        own_step, own_backward = trainer.train_step, trainer.accelerator.backward
        own_rename, own_sync = Path.rename, os.fsync

        def train_step(problems: Any) -> Any:
            start = time.perf_counter()
            if self.killer is not None:
                self.killer.join()  # not later than here
            if self.now("kill"):
                self.killer = threading.Timer(self.draw.uniform(0, 1.5 * self.seconds), self.kill)
                self.killer.start()
            done = own_step(problems)
            self.seconds = time.perf_counter() - start
            return done

        def backward(loss: torch.Tensor, **options: Any) -> None:
            if self.now("signal"):
                os.kill(os.getpid(), signal.SIGTERM)
            own_backward(loss, **options)

        def rename(path: Path, target: Path) -> Path:
            if not self.now("rename"):
                return own_rename(path, target)
            if self.draw.random() < 0.5:
                own_rename(path, target)
            self.kill()
            raise AssertionError

        def sync(file: Any) -> None:
            if self.now("disk"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            own_sync(file)

        trainer.train_step = train_step  # type: ignore[method-assign]
        trainer.accelerator.backward = backward
        Path.rename = rename  # type: ignore[method-assign,assignment]
        os.fsync = sync  # type: ignore[assignment]

    def now(self, kind: str) -> bool:
        """Whether that is due; notes it down first. Faults of saving come with the next save."""
        done = {row["step"] for row in rows_of(self.met)}
        due = [s for s, k in self.faults.items() if k == kind and s not in done]
        here = [s for s in due if s <= self.trainer.run.step]
        if not here:
            return False
        with self.met.open("a") as file:
            print(json.dumps({"step": here[0], "kind": kind}), file=file, flush=True)
            os.fsync(file.fileno())
        return True

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def reward(self, prompts: Any, completions: list[str], **_: Any) -> list[float]:
        """Changes with any token."""
        if self.now("reward"):
            raise ConnectionError("the judge is gone")
        return noise(prompts, completions)


def noise(_: Any, completions: list[str], **columns: Any) -> list[float]:
    return [sum(map(ord, text)) % 17 / 17 for text in completions]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def grown() -> dict[str, int]:
    """What this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        "files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
    }  # fmt: skip


def train(options: dict[str, Any], faults: Mapping[int, str], told: Path) -> None:
    """One start of a run; a process of its own."""
    config = TrainingConfig(**options)
    problems, held_out = load_problems(config)
    holder: list[Faulty] = []

    def judge(*args: Any, **columns: Any) -> list[float]:
        return holder[0].reward(*args, **columns)

    trainer = Trainer(config, *load_model(config), problems, held_out, rewards={"noise": judge})
    holder.append(Faulty(trainer, faults, told / "faults.jsonl"))

    def on_step(row: dict[str, Any], _: Any) -> None:
        with (told / "held.jsonl").open("a") as file:
            print(json.dumps({"step": row["step"], **grown()}), file=file)

    trainer.train(on_step)


def soak(options: dict[str, Any], faults: Mapping[int, str], folder: Path) -> list[int]:
    """Starts a run again until it comes to its end; the exit codes of all starts."""
    codes: list[int] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.soak", "transformers.generation", "peft"])
    told = folder / options["name"]
    told.mkdir(parents=True, exist_ok=True)
    while not codes or codes[-1]:
        given = options | {"output": str(folder), "resume": True}
        process = context.Process(target=train, args=(given, faults, told))
        process.start()
        process.join()
        assert process.exitcode is not None
        codes.append(process.exitcode)
        if len(codes) > 2 * len(faults) + 2:
            raise RuntimeError(f"expected no more ends than faults; got exit codes {codes}")
    return codes


def compare(whole: Path, faulty: Path) -> dict[str, bool]:
    """Whether the rows and the last weights of two runs are the same bits."""
    own, other = (
        [
            {k: v for k, v in row.items() if not k.startswith(("seconds", "peak_memory"))}
            for row in rows_of(folder / "metrics.jsonl")
        ]
        for folder in (whole, faulty)
    )
    weights = [checkpoint.latest(folder) for folder in (whole, faulty)]
    one, two = (torch.load(x / "trained.pt", weights_only=True) for x in weights if x is not None)
    same = one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    return {"rows": own == other and bool(own), "weights": same}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=20, help="steps from one fault to the next")
    parser.add_argument("--model", default=str(model_path()))
    parser.add_argument("--trainable", default=None, help="a regular expression; none: all weights")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="is emptied first")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    args = parser.parse_args(argv)
    shutil.rmtree(args.folder, ignore_errors=True)
    options = options_of(args.model, args.steps) | {"trainable": args.trainable}
    faults = faults_at(args.steps, args.every)
    started = time.perf_counter()
    soak(options | {"name": "whole"}, {}, args.folder)
    between = time.perf_counter()
    codes = soak(options | {"name": "faulty"}, faults, args.folder)
    met = Counter(row["kind"] for row in rows_of(args.folder / "faulty" / "faults.jsonl"))
    held = rows_of(args.folder / "whole" / "held.jsonl")
    warm, later = held[min(WARM, len(held)) - 1], held[min(WARM, len(held)) - 1 :]
    ended = time.perf_counter()
    result = {
        **header("cpu"), "steps": args.steps, "model": args.model, "faults": dict(met),
        "starts": len(codes),
        "same": compare(args.folder / "whole", args.folder / "faulty"),
        "at_step": warm, "most_after": {k: max(row[k] for row in later) for k in warm},
        "last": held[-1],
        "minutes": [round(s / 60, 1) for s in (between - started, ended - between)],
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    write_json(args.out, result)
    if sum(met.values()) != len(faults):
        raise SystemExit(f"expected {len(faults)} faults; got {dict(met)}")
    if not all(result["same"].values()):
        raise SystemExit(f"expected the same run with and without faults; got {result['same']}")
    return result


if __name__ == "__main__":
    main()

"""A run that is killed goes on as if it had not been."""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from grpo_kernels.training import checkpoint
from tests.helpers import faulty_runs
from tests.helpers.trainer_runs import config_of, no_curves, rows_of, trainer_of

pytestmark = pytest.mark.usefixtures("real_memory")


ROOT = Path(__file__).parents[2]
# Waits to be killed where it is ahead of the test, which may get no time on a busy machine.
RUN = """
import time
from pathlib import Path
from tests.ranks.test_killed_run import count
from tests.helpers.trainer_runs import config_of, no_curves, noise, trainer_of

def patient(*args, **columns):
    while count(Path({output!r}, "t")) >= {patience!r}:
        time.sleep(0.01)
    return noise(*args, **columns)

with no_curves():
    config = config_of({model!r}, {output!r}, **{options!r})
    trainer_of(config, rewards={{"noise": patient}}).train()
"""
NEVER = 10**9


def launch(tiny_model, output, patience, **options):
    code = RUN.format(model=str(tiny_model), output=str(output), patience=patience, options=options)
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_killed_run_goes_on_as_if_it_had_not_been(tiny_model, tmp_path):
    options = {
        "steps": 14, "save_every": 1, "beta": 0.05, "eval_size": 3,
        "eval_every": 4, "epochs_per_rollout": 2, "schedule": "linear",
    }  # fmt: skip
    config = config_of(tiny_model, tmp_path / "whole", **options)
    with no_curves():
        expected = trainer_of(config).train()
    draw, kills = random.Random(0), 0
    folder = tmp_path / "killed" / "t"
    while True:
        goal = count(folder) + draw.randrange(2, 4) if kills < 3 else NEVER
        process = launch(tiny_model, tmp_path / "killed", goal + 2, resume=True, **options)
        while process.poll() is None and count(folder) < goal:
            time.sleep(0.005)
        if process.poll() is not None:
            assert process.returncode == 0, process.stderr.read().decode()
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills == 3
    assert rows_of(folder) == rows_of(expected)
    for log in ("evaluations.jsonl", "answers.jsonl"):
        assert (folder / log).read_text() == (expected / log).read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="forks the runs' processes")
def test_faults_of_every_kind(tiny_model, tmp_path):
    """Kills at moments that are drawn and while a checkpoint gets its name, signals, errors."""
    faults, met = faulty_runs.faults_at(24, 2), tmp_path / "met.jsonl"
    options = {
        "model": str(tiny_model), "output": str(tmp_path), "dataset": "examples.problems:additions",
        "rewards": ["noise"], "steps": 24, "prompts_per_step": 2, "num_generations": 2,
        "max_completion_length": 4, "micro_batch_size": 2, "epochs_per_rollout": 2, "eval_size": 4,
        "eval_every": 15, "save_every": 1, "learning_rate": 1e-3, "save_model": False,
        "show_every": 10**6,
    }  # fmt: skip
    assert faulty_runs.run_through(options | {"name": "whole"}, {}, met) == [0]
    codes = faulty_runs.run_through(options | {"name": "faulty"}, faults, met)
    found = Counter(fault["kind"] for fault in faulty_runs.faults_met(met))
    assert found == Counter(faults.values()) and len(faults) == 11
    assert codes.count(-signal.SIGKILL) == found["kill"] + found["rename"]
    whole, faulty = tmp_path / "whole", tmp_path / "faulty"
    assert rows_of(whole) == rows_of(faulty)
    own, other = (
        torch.load(checkpoint.latest(x) / "trained.pt", weights_only=True) for x in (whole, faulty)
    )
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


def count(folder):
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0

"""A run of the trainer in a process of its own, which a test kills."""

import subprocess
import sys

from tests.helpers.ranks import ROOT

# Waits to be killed where it is ahead of the test, which may get no time on a busy machine.
RUN = """
import time
from pathlib import Path
from tests.helpers.killed_runs import count
from tests.helpers.trainer_runs import config_of, noise, trainer_of

def patient(*args, **columns):
    while count(Path({output!r}, "t")) >= {patience!r}:
        time.sleep(0.01)
    return noise(*args, **columns)

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


def count(folder):
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0

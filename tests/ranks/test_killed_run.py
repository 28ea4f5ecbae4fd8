"""A run that is killed goes on as if it had not been."""

import signal
import sys
from collections import Counter

import pytest
import torch

from grpo_kernels.training.run import checkpoint
from tests.helpers import faulty_runs
from tests.helpers.trainer_runs import rows_of

pytestmark = pytest.mark.usefixtures("real_memory")


@pytest.mark.skipif(sys.platform != "linux", reason="forks the runs' processes")
@pytest.mark.parametrize("rollout", ("generate", "vllm"))
def test_a_run_with_faults_goes_on_as_if_it_had_none(rollout, tiny_model, tmp_path):
    """Kills at moments that are drawn and while a checkpoint gets its name, signals, errors.

    In the place of vLLM is a small engine, which has the model's weights until it is sent others.
    """
    faults, met = faulty_runs.faults_at(24, 2), tmp_path / "met.jsonl"
    options = {
        "model": str(tiny_model), "dataset": "examples.problems:additions",
        "rewards": ["noise"], "steps": 24, "prompts_per_step": 2, "num_generations": 2,
        "max_completion_length": 4, "micro_batch_size": 2, "epochs_per_rollout": 2, "eval_size": 4,
        "eval_every": 15, "save_every": 1, "learning_rate": 1e-3, "save_model": False, "beta": 0.05,
        "schedule": "linear",
        "show_every": 10**6, "rollout": rollout,
    }  # fmt: skip
    assert faulty_runs.run_through(options | {"output": str(tmp_path / "whole")}, {}, met) == [0]
    codes = faulty_runs.run_through(options | {"output": str(tmp_path / "faulty")}, faults, met)
    found = Counter(fault["kind"] for fault in faulty_runs.faults_met(met))
    assert found == Counter(faults.values()) and len(faults) == 11
    assert codes.count(-signal.SIGKILL) == found["kill"] + found["rename"]
    whole, faulty = tmp_path / "whole", tmp_path / "faulty"
    assert rows_of(whole) == rows_of(faulty)
    own, other = (checkpoint.tensors_of(checkpoint.latest(x))["trained"] for x in (whole, faulty))
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
    for log in ("evaluations.jsonl", "answers.jsonl"):
        assert (faulty / log).read_text() == (whole / log).read_text()

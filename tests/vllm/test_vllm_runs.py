"""Runs of the trainer that sample by the real vLLM."""

import signal
import subprocess
import sys
import time

import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_kernels.training.run.interruptions import RESUME
from tests.helpers.ranks import ROOT, Ranks
from tests.helpers.trainer_runs import rows_of, trainer_of, untimed
from tests.helpers.vllm_masks import why_no_masks
from tests.helpers.vllm_runs import vllm_config, vllm_model

pytestmark = pytest.mark.usefixtures("real_memory")
# Of log-probs in float32, of a model as small as these.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return vllm_model(tmp_path_factory.mktemp("model"))


def run(model, output, **options):
    AcceleratorState._reset_state(reset_partial_state=True)
    return trainer_of(vllm_config(model, output, **options)).train()


def test_an_interrupt_leaves_no_process(model, tmp_path):
    options = {"rollout": "vllm", "eval_size": 3, "save_every": 1, "steps": 10_000}
    rows = tmp_path / "t" / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c",
         "from tests.vllm.test_vllm_runs import run\n"
         f"run({str(model)!r}, {str(tmp_path)!r}, **{options!r})"],
        cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        # Heard even if the tests run in the background of a shell.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while process.poll() is None and not (rows.exists() and rows.read_text()):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == RESUME, error.decode()
    left = subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True, text=True)
    assert left.stdout == ""


@pytest.mark.skipif(bool(why_no_masks()), reason=why_no_masks())
def test_the_policy_that_sampled_is_trained(vllm_process, model, tmp_path):
    """Over the ids of vLLM's masks; over others log-probs would differ."""
    options = {"eval_size": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7,
               "is_correction": "token_truncate"}  # fmt: skip
    rows = rows_of(vllm_process.submit(run, model, tmp_path, **options).result())
    assert len(rows) == 2
    for row in rows:
        assert 0 < row["sampler_gap_max"] < CLOSE and 1 < row["support/mean"] < 257
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=CLOSE)


def train_on_ranks(model, output, options):
    """The rows of a run."""
    trainer = trainer_of(vllm_config(model, output, **options))
    assert trainer.accelerator.distributed_type.value == "MULTI_CPU"
    assert torch.distributed.get_world_size() == 2
    rows = []
    trainer.train(lambda row, samples: rows.append(untimed(row)))
    return rows


@pytest.fixture
def ranks(tmp_path):
    """Ranks of this test alone: vLLM keeps a job's process group, which ends with the job."""
    session = Ranks(tmp_path)
    yield session
    session.close()


@pytest.mark.parametrize("lora_rank", (0, 4))
def test_two_ranks_sample_with_the_weights_of_both(lora_rank, model, ranks, tmp_path):
    options = {"rollout": "vllm", "steps": 3, "save_every": -1, "lora_rank": lora_rank}
    first, second = ranks(
        train_on_ranks, model, tmp_path, options, environment={"ACCELERATE_USE_CPU": "true"}
    )
    assert first == second and len(first) == 3
    assert all(0 < row["sampler_gap_max"] < CLOSE for row in first)

"""A run's weights and completions by a real server, which is lost and found again."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_kernels.training.checkpoint import latest
from grpo_kernels.training.rollout import RolloutError
from tests.helpers.trainer_runs import rows_of, trainer_of
from tests.helpers.vllm_runs import (
    gap,
    hears_interrupts,
    rollout_of,
    sample,
    shake,
    vllm_config,
    vllm_model,
)
from tests.ranks.test_killed_run import ROOT

pytestmark = [pytest.mark.usefixtures("real_memory"), pytest.mark.nightly]
MOVE, CLOSE = 0.02, 2e-4


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return vllm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def options():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    return {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 200.0}


@pytest.fixture(scope="module")
def start(model_folder, options, tmp_path_factory):
    """Starts a server as the docs say; returns its process, which leads a group of its own."""
    started, log = [], tmp_path_factory.mktemp("server") / "log"

    def start():
        flags = [f"--model={model_folder}", "--max_prompt_length=160", "--prompts_per_step=2"]
        flags += ["--num_generations=4", "--max_completion_length=8"]
        flags += [f"--vllm_server_base_url={options['vllm_server_base_url']}"]
        with log.open("ab") as file:
            started.append(subprocess.Popen(
                [sys.executable, "-m", "grpo_kernels.training.vllm_server", *flags], cwd=ROOT,
                stdout=file, stderr=file, start_new_session=True, preexec_fn=hears_interrupts,
            ))  # fmt: skip
        return started[-1]

    yield start
    print(log.read_text()[-4000:])
    for process in started:
        stop(process, signal.SIGKILL)


def stop(process, how):
    try:
        os.killpg(process.pid, how)
    except ProcessLookupError:
        return
    process.wait(timeout=100)


def test_a_server_has_the_weights_and_is_found_again(model_folder, options, start, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    server = start()
    rollout = rollout_of(vllm_config(model_folder, tmp_path, **options), model)
    rollout.update_weights()
    assert gap(rollout, model) < CLOSE
    shake(model, MOVE)
    assert gap(rollout, model) > 0.01
    rollout.update_weights()
    assert gap(rollout, model) < CLOSE

    # The same as in this process.
    alone = rollout_of(vllm_config(model_folder, tmp_path), model)
    alone.update_weights()
    torch.manual_seed(3)
    by_server = sample(rollout)
    torch.manual_seed(3)
    for mine, theirs in zip(by_server, sample(alone), strict=True):
        assert mine.token_ids == theirs.token_ids and mine.ended == theirs.ended
        assert mine.logps == pytest.approx(theirs.logps, abs=CLOSE)

    # As by Ctrl-C in its terminal: nothing of it is left.
    stop(server, signal.SIGINT)
    deadline = time.monotonic() + 60
    while subprocess.run(["pgrep", "-s", str(server.pid)]).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    server = start()
    # It has the weights of the files now; nobody but the rollout knows of others.
    assert gap(rollout, model) < CLOSE

    # A worker that dies takes the server with it. Nobody starts it again: the run ends, and
    # keeps its last step.
    def after(row, samples):
        if row["step"] == 2:
            worker = subprocess.check_output(["pgrep", "-f", "EngineCore", "-s", str(server.pid)])
            os.kill(int(worker.split()[0]), signal.SIGKILL)

    options = {**options, "vllm_server_timeout": 1.0, "steps": 4, "save_every": 100}
    config = vllm_config(model_folder, tmp_path, **options)
    with pytest.raises(RolloutError, match=r"(?s)vllm_server_timeout.*Start one with\n  env VLLM_"):
        trainer_of(config).train(after)
    rows = rows_of(config.folder)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["sampler_gap_max"] < CLOSE for row in rows)
    assert latest(config.folder).name == "step-000002"

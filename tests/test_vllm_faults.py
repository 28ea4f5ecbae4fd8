"""Faults of a vLLM server, as real ones had them, and what a run makes of them."""

import resource
import threading
import time
from types import SimpleNamespace

import pytest

from grpo_kernels.integrations import vllm as extension
from grpo_kernels.training import vllm_server
from grpo_kernels.training.rollout import RolloutError
from tests.helpers.record_vllm import SAMPLING, prompts_of, rollout_of, sample
from tests.helpers.recorded_vllm import SAMPLES as BOTH
from tests.helpers.recorded_vllm import recorded

pytestmark = pytest.mark.usefixtures("real_memory")
SAMPLES = BOTH[0]


def test_a_server_that_is_down(serve, served_config, monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    server = serve()
    server.stop()
    monkeypatch.setattr(vllm_server, "time", clock)
    with pytest.raises(RolloutError) as error:
        rollout_of(served_config(server, vllm_server_timeout=20.0))
    assert 20 <= now[0] <= 21
    text = str(error.value)
    assert text.startswith(f"vllm_server_base_url: {server.url}/health does not answer (")
    assert "not in vllm_server_timeout = 20 s. Start one with\n  env " in text
    assert f"--host 127.0.0.1 --port {server.port}" in text


def test_a_slow_answer_is_asked_for_again(ready, capsys):
    server, rollout = ready(vllm_request_timeout=0.3)
    expected = sample(rollout)
    server.delays[SAMPLES] = [0.6]
    assert sample(rollout) == expected
    text = capsys.readouterr().out
    assert "/v1/completions did not answer in 0.3 s (vllm_request_timeout). Looking for it" in text
    assert len(server.loads) == 2 and rollout.engine.at_once == 1
    server.delays[SAMPLES] = [0.6] * 9
    with pytest.raises(RolloutError, match=r"did not answer in 0\.3 s .* \(3 times in a row\)"):
        sample(rollout)


def test_a_server_that_was_started_again(ready, capsys):
    server, rollout = ready()
    expected = sample(rollout)
    seeds = {body["seed"] for body in server.asked(SAMPLES)}
    server.restarts = 2
    assert sample(rollout) == expected
    assert len(server.loads) == 3 and server.sent == rollout.tag
    assert {body["seed"] for body in server.asked(SAMPLES)} == seeds
    told = capsys.readouterr().out
    assert told.count("has other weights than it was sent: it was started again") == 2
    server.restarts = 3
    with pytest.raises(RolloutError, match=r"other weights than it was sent.*\(3 times in a row\)"):
        sample(rollout)


def test_a_server_that_is_away_for_a_while(ready):
    server, rollout = ready(vllm_server_timeout=100.0)
    expected = sample(rollout)
    server.stop()
    threading.Timer(0.1, server.start).start()
    assert sample(rollout) == expected and len(server.loads) == 2
    server.stop()
    threading.Timer(0.1, server.start).start()
    rollout.update_weights()
    assert server.sent == rollout.tag


def test_a_server_that_does_not_come_back(ready):
    server, rollout = ready(vllm_server_timeout=3.0)
    server.stop()
    for call in (rollout.update_weights, lambda: sample(rollout)):
        with pytest.raises(RolloutError, match=r"vllm_server_base_url: .*/health does not answer"):
            call()


def test_a_server_whose_engine_died(ready):
    """It answers 500 and ends."""
    server, rollout = ready(vllm_server_timeout=100.0)
    expected = sample(rollout)
    server.dies = True
    threading.Timer(0.3, server.start).start()
    assert sample(rollout) == expected and len(server.loads) == 2


def test_an_engine_that_died_while_it_was_asked(ready, monkeypatch, capsys):
    """Such a question is never answered, and the server does not end."""
    server, rollout = ready()
    expected = sample(rollout)
    monkeypatch.setattr(vllm_server, "_SOON", 0.2)
    server.delays["/collective_rpc"] = [0.5]
    assert sample(rollout) == expected and len(server.loads) == 2
    assert "/collective_rpc did not answer in 0.2 s. Looking for it" in capsys.readouterr().out


@pytest.mark.parametrize("path", (SAMPLES, "/collective_rpc"))
def test_an_engine_that_died_while_it_worked(path, ready, monkeypatch):
    """Requests stay without an answer, and then the server refuses connections."""
    server, rollout = ready(vllm_server_timeout=100.0, vllm_request_timeout=100.0)
    expected = sample(rollout)
    monkeypatch.setattr(vllm_server, "_SOON", 0.3)
    server.delays[path] = [30.0]
    threading.Timer(0.5, server.stop).start()
    threading.Timer(1.0, server.start).start()
    begun = time.monotonic()
    if path == SAMPLES:
        assert sample(rollout) == expected
    else:
        rollout.update_weights()  # whose first request it is
    assert time.monotonic() - begun < 20 and server.sent == rollout.tag


def test_a_run_that_takes_the_others_server(ready):
    server, first = ready()
    second = rollout_of(first.config)
    second.update_weights()
    expected = sample(second)
    # Each notices before it trains on the other's samples.
    assert sample(first) == expected and server.sent == first.tag
    assert sample(second) == expected and server.sent == second.tag
    assert len(server.loads) == 4


@pytest.mark.parametrize("name", ("wrong count", "wrong shape", "after wrong shape", "sampling"))
def test_what_the_server_says_is_told(name, ready, tmp_path):
    """It is not asked again, and nothing is left of the weights that it did not take."""
    server, rollout = ready()
    path, call = "/collective_rpc", rollout.update_weights
    if name == "sampling":
        name, path, call = "wrong count", SAMPLES, lambda: sample(rollout)
    server.refuses[path] = [name] * 3
    said = recorded("default", name)[0]["answer"]["error"]["message"].split("'")[1]
    with pytest.raises(RolloutError) as error:
        call()
    assert f"{path} answers 500" in str(error.value) and said in str(error.value)
    assert list(tmp_path.iterdir()) == [] and len(server.loads) == 1


def test_a_prefix_cache_that_is_in_use(ready):
    server, rollout = ready()
    server.refuses["/reset_prefix_cache"] = ["busy"] * 2
    rollout.update_weights()  # requests that were given up end in a moment
    rollout.engine.patience = 0.0
    server.refuses["/reset_prefix_cache"] = ["busy"]
    with pytest.raises(RolloutError, match="expected no request while weights are sent; got some"):
        rollout.update_weights()


def test_a_full_folder_is_left_empty(ready, tmp_path, monkeypatch):
    server, rollout = ready()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    write = extension.write

    def full(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
        try:
            write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(extension, "write", full)
    with pytest.raises(
        RolloutError, match=r"vllm_sync_dir: weights cannot be written there: .*too"
    ):
        rollout.update_weights()
    assert list(tmp_path.iterdir()) == [] and len(server.loads) == 1
    monkeypatch.undo()


def test_fewer_requests_at_a_time_after_a_loss(ready):
    server, rollout = ready(vllm_request_timeout=0.5)
    server.any_seed = True
    prompts = [prompt for prompt in prompts_of(rollout) for _ in range(2)]
    server.delays[SAMPLES] = [0.1] * 6
    rollout(prompts, 4, SAMPLING)
    assert server.most_at_once == 6
    server.restarts, server.delays[SAMPLES] = 1, []
    rollout(prompts, 4, SAMPLING)
    assert rollout.engine.at_once == 256
    server.delays[SAMPLES] = [1.0]
    rollout(prompts, 4, SAMPLING)
    assert rollout.engine.at_once == 3
    time.sleep(0.6)  # until the answer that nobody waits for
    server.most_at_once, server.delays[SAMPLES] = 0, [0.05] * 6
    rollout(prompts, 4, SAMPLING)
    assert server.most_at_once == 3

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


PATIENT = {"vllm_server_timeout": 100.0, "vllm_request_timeout": 100.0}


def hangs(path):
    """Requests stay without an answer, and then the server refuses connections."""

    def fault(server):
        server.delays[path] = [30.0]
        threading.Timer(0.5, server.stop).start()

    return fault


# Options of the run; seconds until a question is given up; what goes wrong; seconds until the
# server is there again; what is told; how often it was sent weights.
FAULTS = {
    "slow": (
        {"vllm_request_timeout": 0.3}, 30, lambda s: s.delays.update({SAMPLES: [0.6]}), None,
        "/v1/completions did not answer in 0.3 s (vllm_request_timeout). Looking for it", 2,
    ),
    "started again": (
        {}, 30, lambda s: setattr(s, "restarts", 2), None,
        "has other weights than it was sent: it was started again", 3,
    ),
    "away": (PATIENT, 30, lambda s: s.stop(), 0.1, "does not answer", 2),
    # It answers 500 and ends.
    "engine died": (PATIENT, 30, lambda s: setattr(s, "dies", True), 0.3, "does not answer", 2),
    # Such a question is never answered, and the server does not end.
    "died while asked": (
        {}, 0.2, lambda s: s.delays.update({"/collective_rpc": [0.5]}), None,
        "/collective_rpc did not answer in 0.2 s. Looking for it", 2,
    ),
    "died while sampling": (PATIENT, 0.3, hangs(SAMPLES), 1.0, "does not answer", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_lost_server_is_sent_the_weights_and_asked_again(name, ready, monkeypatch, capsys):
    options, soon, fault, back, told, loads = FAULTS[name]
    server, rollout = ready(**options)
    expected = sample(rollout)
    seeds = {body["seed"] for body in server.asked(SAMPLES)}
    monkeypatch.setattr(vllm_server, "_SOON", soon)
    fault(server)
    if back:
        threading.Timer(back, server.start).start()
    begun = time.monotonic()
    assert sample(rollout) == expected
    assert time.monotonic() - begun < 20  # before an answer that comes too late
    assert len(server.loads) == loads and server.sent == rollout.tag
    assert {body["seed"] for body in server.asked(SAMPLES)} == seeds
    assert told in capsys.readouterr().out
    while_it_sampled = name in ("slow", "engine died", "died while sampling")
    assert rollout.engine.at_once == (1 if while_it_sampled else 256)


@pytest.mark.parametrize(
    ("soon", "fault"), ((30, lambda s: s.stop()), (0.3, hangs("/collective_rpc")))
)
def test_weights_are_sent_to_a_server_that_was_lost_meanwhile(soon, fault, ready, monkeypatch):
    server, rollout = ready(**PATIENT)
    monkeypatch.setattr(vllm_server, "_SOON", soon)
    fault(server)
    threading.Timer(1.0, server.start).start()
    begun = time.monotonic()
    rollout.update_weights()
    assert time.monotonic() - begun < 20 and server.sent == rollout.tag


@pytest.mark.parametrize("fault", ("slow", "started again"))
def test_a_server_that_is_lost_three_times_ends_the_run(fault, ready):
    server, rollout = ready(vllm_request_timeout=0.05 if fault == "slow" else 5.0)
    server.delays[SAMPLES] = [0.2] * 9 if fault == "slow" else []
    server.restarts = 3 if fault == "started again" else 0
    said = r"did not answer in 0\.05 s" if fault == "slow" else "other weights than it was sent"
    with pytest.raises(RolloutError, match=rf"{said}.*\(3 times in a row\)"):
        sample(rollout)


def test_a_server_that_does_not_come_back(ready):
    server, rollout = ready(vllm_server_timeout=3.0)
    server.stop()
    for call in (rollout.update_weights, lambda: sample(rollout)):
        with pytest.raises(RolloutError, match=r"vllm_server_base_url: .*/health does not answer"):
            call()


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
    server.delays[SAMPLES] = [1.0]
    rollout(prompts, 4, SAMPLING)
    assert rollout.engine.at_once == 3
    time.sleep(0.6)  # until the answer that nobody waits for
    server.most_at_once, server.delays[SAMPLES] = 0, [0.05] * 6
    rollout(prompts, 4, SAMPLING)
    assert server.most_at_once == 3

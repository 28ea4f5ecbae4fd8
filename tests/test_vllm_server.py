"""The client of vLLM's server, against answers that a real one gave, and its faults."""

import json
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from grpo_kernels.integrations import vllm as extension
from grpo_kernels.training import load_model, vllm_server
from grpo_kernels.training.rollout import RolloutError
from grpo_kernels.training.vllm_rollout import VLLMRollout
from grpo_kernels.training.vllm_server import Sampled, server_command
from tests.helpers.recorded_vllm import (
    COMPLETIONS,
    MASKED,
    MASKS,
    RECORDING,
    SAMPLING,
    RecordedServer,
    config_for,
    make_folder,
    prompts_of,
    rollout_of,
    sample,
)

pytestmark = pytest.mark.usefixtures("real_memory")


@pytest.fixture(scope="module")
def served_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    make_folder(folder)
    return folder


@pytest.fixture
def serve(served_model, tmp_path, monkeypatch):
    """Starts recorded servers, and makes configs; seconds of waiting for them are hundredths."""
    started = []
    quick = SimpleNamespace(
        monotonic=lambda: 100 * time.monotonic(), sleep=lambda s: time.sleep(s / 100)
    )
    monkeypatch.setattr(vllm_server, "time", quick)

    def start(name="default", about=None, **options):
        started.append(RecordedServer(name, **(about or {})))
        options = {"vllm_server_timeout": 5.0, "vllm_request_timeout": 5.0, **options}
        where = {"vllm_sync_dir": str(tmp_path), "vllm_server_base_url": started[-1].url}
        return started[-1], config_for(served_model, **where, **options)

    yield start
    for server in started:
        server.stop()
        # Any other seed or parameter than in the recording would be.
        assert server.unknown == []


@pytest.fixture
def ready(serve):
    """Makes a recorded server, and a rollout that has sent it its weights."""

    def make(name="default", **options):
        server, config = serve(name, **options)
        rollout = rollout_of(config)
        rollout.update_weights()
        return server, rollout

    return make


def logits_of(rollout, prompt, ids):
    """[T, V], of the policy."""
    with torch.no_grad():
        logits = rollout.model(torch.tensor([[*prompt, *ids]])).logits[0]
    return logits[len(prompt) - 1 : -1].float()


# What comes back


def test_log_probs_are_those_of_the_policy(ready):
    """Recorded from vLLM: float32, another implementation of the same model."""
    _, rollout = ready()
    done = sample(rollout)
    assert len({tuple(one.token_ids) for one in done}) == 12
    for i, one in enumerate(done):
        prompt = prompts_of(rollout)[i // 4]
        assert one.ended is (one.token_ids[-1] == 0) and one.support is None
        logps = logits_of(rollout, prompt, one.token_ids).log_softmax(-1)
        mine = logps.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.logps), mine, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "sampling", "options"), (("default", SAMPLING, {}), ("masks", MASKED, MASKS))
)
def test_the_likeliest_completion_is_repeated(kind, sampling, options, ready):
    """A server that returns masks wants a temperature above 0: one token is left then."""
    _, rollout = ready(kind, **options)
    done = sample(rollout, replace(sampling, temperature=0.0, record_support=False), count=2)
    assert len(done) == 6 and done[::2] == done[1::2]
    assert all(one.logps is None and one.support is None for one in done)
    for prompt, one in zip(prompts_of(rollout), done[::2], strict=True):
        assert one.token_ids == logits_of(rollout, prompt, one.token_ids).argmax(-1).tolist()


def test_stop_strings_cut_log_probs_too(ready):
    server, rollout = ready()
    whole = sample(rollout)
    (stop,) = {
        s for x in server.exchanges if x["path"] == COMPLETIONS for s in x["request"]["stop"]
    }
    done = sample(rollout, replace(SAMPLING, stop=(stop,)))
    assert sum(len(one.token_ids) for one in done) < sum(len(one.token_ids) for one in whole)
    for full, one in zip(whole, done, strict=True):
        length = len(one.token_ids)
        assert one.token_ids == full.token_ids[:length] and len(one.logps) == length
        stopped = stop in rollout.tokenizer.decode(one.token_ids)
        assert one.ended == (stopped or one.token_ids[-1] == 0)
    # An engine that goes on is cut here.
    one = vllm_server.Sampled(whole[0].token_ids, whole[0].logps, None)
    text = rollout.tokenizer.decode(one.token_ids[2:3])
    cut = rollout._completion(one, replace(SAMPLING, stop=(text,)))
    n = len(cut.token_ids)
    assert n <= 3 and cut.ended and (cut.token_ids, cut.logps) == (one[0][:n], one[1][:n])


def test_completions_end_at_the_tokenizers_end_too(serve):
    _, config = serve()
    model, tokenizer = load_model(config)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(40)
    rollout = VLLMRollout(config, model, tokenizer, Accelerator())
    assert rollout._request(4, SAMPLING)["stop_token_ids"] == [0, 40]
    one = rollout._completion(Sampled([9, 40, 8], [-1.0, -2.0, -3.0], None), SAMPLING)
    assert (one.token_ids, one.ended, one.logps) == ([9, 40], True, [-1.0, -2.0])


def test_kept_sets_reach_the_completions(ready):
    _, rollout = ready("masks", **MASKS)
    for i, one in enumerate(sample(rollout, MASKED)):
        prompt = prompts_of(rollout)[i // 4]
        logits, ids, offsets = logits_of(rollout, prompt, one.token_ids), *one.support
        assert len(offsets) == len(one.token_ids) + 1 and len(one.logps) == len(one.token_ids)
        for t, token in enumerate(one.token_ids):
            kept = ids[offsets[t] : offsets[t + 1]].long()
            assert token in kept and 1 <= len(set(kept.tolist())) == len(kept) <= 20
            logp = float(logits[t, kept].log_softmax(-1)[kept == token])
            assert one.logps[t] == pytest.approx(logp, abs=1e-4)


def test_weights_are_sent_by_files_that_are_gone_afterwards(ready, tmp_path):
    server, rollout = ready()
    expected = dict(extension.names_and_weights(rollout.model))
    assert server.loads == [{name: list(w.shape) for name, w in expected.items()}]
    asked = [body for path, body in server.requests if path == "/collective_rpc"]
    folder, count, tag = next(x["args"] for x in asked if x["method"] == "grpo_kernels_load")
    mine = f"grpo_kernels-{socket.gethostname()}-{os.getpid()}-"
    assert folder == str(tmp_path / f"{mine}{tag}") and count == str(len(expected))
    assert list(tmp_path.iterdir()) == []
    # Prompts would go on from states of the weights before.
    assert server.requests[-1][0] == "/reset_prefix_cache"
    # What a killed run left is deleted, what a living one has is not.
    (tmp_path / f"{mine}other").mkdir()
    (tmp_path / f"grpo_kernels-{socket.gethostname()}-{2**22 + 1}-gone").mkdir()  # above pid_max
    rollout.update_weights()
    assert list(tmp_path.iterdir()) == [tmp_path / f"{mine}other"]
    assert len(server.loads) == 2 and server.sent == rollout.tag != tag


# A server that is not the run's


@pytest.mark.parametrize(
    ("about", "options", "message"),
    (
        ({"hidden_size": 576}, {}, "hidden_size 32; got 576"),
        ({"protocol": 2}, {}, "protocol 1; got 2"),
        ({"logprobs_mode": "raw"}, {}, "logprobs_mode 'processed_logprobs'; got 'raw'"),
        ({"dtype": "bfloat16"}, {}, "dtype 'float32'; got 'bfloat16'"),
        ({"max_model_len": 39}, {}, "max_model_len 40 at least, .*; got 39"),
        ({}, MASKS, "sampling_mask True; got False"),
    ),
)
def test_another_engine_is_refused(about, options, message, serve):
    server, config = serve("default", about, **options)
    with pytest.raises(RolloutError, match=rf"vLLM: expected {message}(?s:.*)Start one with\n"):
        rollout_of(config)
    assert server.loads == []
    if options:
        assert rollout_of(replace(config, replay_support=False)).why_gap is None


def test_adapters_that_vllm_cannot_have_are_refused_before_it_is_asked(serve):
    server, config = serve(lora_rank=2, lora_target=r".*(q_proj|lm_head)")
    with pytest.raises(ValueError, match="model: expected no adapter on a tied output layer"):
        rollout_of(config)
    assert server.requests == []


def test_a_server_without_the_extension_is_refused(serve):
    server, config = serve()
    server.faults["/collective_rpc"] = [lambda _: (404, "Not Found")]
    with pytest.raises(RolloutError, match=r"extension; .* answers 404(?s:.*)--worker-extension"):
        rollout_of(config)


@pytest.mark.parametrize(
    ("version", "warned"),
    (("0.28.0", False), ("0.32.1", False), ("0.27.4", True), ("0.33.0", True), ("1.0.0", True)),
)
def test_an_untried_version_is_told(version, warned, serve, capsys):
    rollout_of(serve("default", {"vllm": version})[1])
    assert (f"vLLM {version} has not been tried" in capsys.readouterr().out) is warned


def test_the_recording_is_of_the_command_that_starts_one(serve, monkeypatch):
    """Record again (tests/helpers/record_vllm.py) where the options have changed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    commands = json.loads(RECORDING.read_text())["header"]["commands"]
    for name, options in (("default", {}), ("masks", MASKS)):
        command = server_command(serve(name, **options)[1])
        then = commands[name].split()
        now = [x for x in command if x.startswith("--")]
        assert [x for x in then if x.startswith("--") and x != "--served-model-name"] == now
        assert {x for x in then if "=" in x} == {x for x in command if "=" in x}


# Faults, as real servers had them


def test_a_server_that_is_down(serve, monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    server, config = serve(vllm_server_timeout=20.0)
    server.stop()
    monkeypatch.setattr(vllm_server, "time", clock)
    with pytest.raises(RolloutError) as error:
        rollout_of(config)
    assert 20 <= now[0] <= 21
    text = str(error.value)
    assert text.startswith(f"vllm_server_base_url: {server.url}/health does not answer (")
    assert f"--host 127.0.0.1 --port {server.port}" in text


def dies(server):
    """Answers 500, as do those that are asked at the same time, and ends."""
    time.sleep(0.1)
    server.stop()
    return 500, "EngineCore encountered an issue"


def hangs(server):
    """Leaves the request without an answer, and refuses connections after a while."""
    threading.Timer(0.5, server.stop).start()
    time.sleep(30)


def starts_again(server):
    server.sent = ""


PATIENT = {"vllm_server_timeout": 100.0, "vllm_request_timeout": 100.0}
# Options of the run; the request that meets a fault; seconds until a question is given up; seconds
# until the server is there again; what is told.
FAULTS = {
    "slow": (
        {"vllm_request_timeout": 0.3}, COMPLETIONS, lambda _: time.sleep(0.6), 30, None,
        "/v1/completions did not answer in 0.3 s (vllm_request_timeout). Looking for it",
    ),
    "started again": ({}, COMPLETIONS, starts_again, 30, None, "has other weights than it was"),
    "engine died": (PATIENT, COMPLETIONS, dies, 30, 1.0, "does not answer"),
    "hung while sampling": (PATIENT, COMPLETIONS, hangs, 0.3, 1.0, "does not answer"),
    "hung while asked": (
        {}, "/collective_rpc", lambda _: time.sleep(0.5), 0.2, None,
        "/collective_rpc did not answer in 0.2 s. Looking for it",
    ),
    "hung while loading": (PATIENT, "/collective_rpc", hangs, 0.3, 1.0, "does not answer"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_lost_server_is_sent_the_weights_and_asked_again(name, ready, monkeypatch, capsys):
    options, path, fault, soon, back, told = FAULTS[name]
    server, rollout = ready(**options)
    expected = sample(rollout)
    monkeypatch.setattr(vllm_server, "_SOON", soon)
    server.faults[path] = [fault] * (3 if fault is dies else 1)
    if back:
        threading.Timer(back, server.start).start()
    begun = time.monotonic()
    if "loading" in name:
        rollout.update_weights()
    assert sample(rollout) == expected
    assert time.monotonic() - begun < 20  # before an answer that comes too late
    assert len(server.loads) == 2 and server.sent == rollout.tag
    assert told in capsys.readouterr().out
    # Fewer requests at a time, as it may have run out of memory.
    while_it_sampled = name in ("slow", "engine died", "hung while sampling")
    assert rollout.engine.at_once == (1 if while_it_sampled else 256)


def test_a_server_that_is_lost_three_times_ends_the_run(ready):
    server, rollout = ready()
    server.faults[COMPLETIONS] = [starts_again] * 9
    with pytest.raises(RolloutError, match=r"other weights .*\(3 times in a row\)"):
        sample(rollout)


def test_so_many_requests_at_a_time(ready):
    server, rollout = ready()
    for most in (3, 2):
        server.faults[COMPLETIONS] = [lambda _: time.sleep(0.1)] * 3
        rollout.engine.at_once, server.most_at_once = most, 0
        sample(rollout)
        assert server.most_at_once == most


def is_full(weights, folder, dtype):
    Path(folder, "half").write_text("x")
    raise OSError(28, "No space left on device")


REFUSED = {
    "/collective_rpc": ((500, "expected 21 tensors"), "/collective_rpc answers 500 .*21 tensors"),
    "/reset_prefix_cache": ((200, {"success": False}), "expected no request while .*; got some"),
    "write": (is_full, "vllm_sync_dir: weights cannot be written .*No space"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_cannot_be_sent(name, ready, tmp_path, monkeypatch):
    """The server is not asked again, and nothing is left of them."""
    fault, message = REFUSED[name]
    server, rollout = ready()
    rollout.engine.patience = 0.0
    if name == "write":
        monkeypatch.setattr(extension, "write", fault)
    else:
        server.faults[name] = [lambda _: fault] * 3
    with pytest.raises(RolloutError, match=message):
        rollout.update_weights()
    assert list(tmp_path.iterdir()) == []
    assert len(server.loads) == (2 if name == "/reset_prefix_cache" else 1)


def test_requests_that_are_refused_or_that_go_on(ready):
    server, rollout = ready()
    server.faults[COMPLETIONS] = [lambda _: (500, "expected a prompt")] * 3
    with pytest.raises(RolloutError, match=r"/v1/completions answers 500 .*expected a prompt"):
        sample(rollout)
    # Those that were given up end in a moment, before the cache of prompts can be reset.
    server.faults["/reset_prefix_cache"] = [lambda _: (200, {"success": False})] * 2
    rollout.update_weights()

"""The client of vLLM's server, against answers that a real one gave."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_kernels.integrations import vllm as extension
from grpo_kernels.training import vllm_server
from grpo_kernels.training.rollout import RolloutError
from grpo_kernels.training.vllm_server import server_command
from tests.helpers.record_vllm import (
    MASKED,
    MASKS,
    RECORDING,
    SAMPLING,
    prompts_of,
    rollout_of,
    sample,
)
from tests.helpers.recorded_vllm import SAMPLES, recorded

pytestmark = pytest.mark.usefixtures("real_memory")
COMPLETIONS, GENERATE = SAMPLES


def choices_of(server, name, path=COMPLETIONS):
    """What was recorded for the prompts, in their order."""
    key = "prompt" if path == COMPLETIONS else "token_ids"
    answers = {}
    for one in recorded(server, name):
        if one["path"] == path:
            answers[tuple(one["request"][key])] = one["answer"]["choices"]
    return answers


def logits_of(rollout, prompt, ids):
    """[T, V], of the policy."""
    with torch.no_grad():
        logits = rollout.model(torch.tensor([[*prompt, *ids]])).logits[0]
    return logits[len(prompt) - 1 : -1].float()


# What is asked for, and what comes back


def test_every_parameter_is_sent(ready):
    server, rollout = ready()
    sample(rollout)
    bodies = {tuple(body.pop("prompt")): body for body in server.asked(COMPLETIONS)}
    seeds = [body.pop("seed") for body in bodies.values()]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**31 for seed in seeds)
    assert list(bodies) and all(body == {
        "model": "tiny", "n": 4, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "min_tokens": 0, "max_tokens": 8, "logprobs": 0, "stop_token_ids": [0], "ignore_eos": True,
        "stop": [], "skip_special_tokens": False, "return_token_ids": True,
    } for body in bodies.values())  # fmt: skip
    assert set(bodies) == {tuple(prompt) for prompt in prompts_of(rollout)}


def test_seeds_are_drawn_from_torchs_generator(ready):
    """A prompt's is by its place, and not by which thread was first."""
    server, rollout = ready()
    server.any_seed = True
    prompts = prompts_of(rollout)
    for seed, order in ((0, 1), (0, -1), (1, 1)):
        torch.manual_seed(seed)
        drawn = torch.randint(2**31 - 1, (3,)).tolist()
        torch.manual_seed(seed)
        server.requests.clear()
        rollout(prompts[::order], 4, SAMPLING)
        found = {tuple(body["prompt"]): body["seed"] for body in server.asked(COMPLETIONS)}
        assert [found[tuple(prompt)] for prompt in prompts[::order]] == drawn


def test_log_probs_are_those_of_the_policy(ready):
    """Recorded from vLLM: float32, another implementation of the same model."""
    _, rollout = ready()
    done = sample(rollout)
    assert len(done) == 12
    answers = choices_of("default", "sample")
    for i, one in enumerate(done):
        prompt = prompts_of(rollout)[i // 4]
        choice = answers[tuple(prompt)][i % 4]
        assert choice["index"] == i % 4 and one.token_ids == choice["token_ids"]
        assert one.logps == choice["logprobs"]["token_logprobs"]
        assert one.ended is (one.token_ids[-1] == 0) and one.support is None
        logps = logits_of(rollout, prompt, one.token_ids).log_softmax(-1)
        mine = logps.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.logps), mine, rtol=0, atol=1e-4)
    assert len({tuple(one.token_ids) for one in done}) == 12


@pytest.mark.parametrize("kind", ("default", "masks"))
def test_the_likeliest_completion_is_repeated(kind, ready):
    """A server that returns masks wants a temperature above 0: one token is left then."""
    server, rollout = ready(kind, **(MASKS if kind == "masks" else {}))
    sampling = MASKED if kind == "masks" else SAMPLING
    done = sample(rollout, replace(sampling, temperature=0.0, record_support=False), count=2)
    for body in server.asked(GENERATE if kind == "masks" else COMPLETIONS):
        params = body.get("sampling_params", body)
        expected = (1, 1, 1.0) if kind == "masks" else (1, 0, 0.0)
        assert (params["n"], params["top_k"], params["temperature"]) == expected
    assert len(done) == 6 and done[::2] == done[1::2]
    assert all(one.logps is None and one.support is None for one in done)
    for prompt, one in zip(prompts_of(rollout), done[::2], strict=True):
        assert one.token_ids == logits_of(rollout, prompt, one.token_ids).argmax(-1).tolist()


def test_stop_strings_cut_log_probs_too(ready):
    server, rollout = ready()
    asked = next(x["request"] for x in recorded("default", "stop") if x["path"] == COMPLETIONS)
    (stop,) = asked["stop"]
    done = sample(rollout, replace(SAMPLING, stop=(stop,)))
    stopped = 0
    for whole, one in zip(sample(rollout), done, strict=True):
        text = rollout.tokenizer.decode(one.token_ids)
        length = len(one.token_ids)
        assert one.token_ids == whole.token_ids[:length] and len(one.logps) == length
        assert one.logps == pytest.approx(whole.logps[:length], abs=1e-4)
        if stop in text:
            assert one.ended and stop not in rollout.tokenizer.decode(one.token_ids[:-1])
            stopped += length < len(whole.token_ids)
        else:
            assert length == len(whole.token_ids)
    assert stopped
    assert all(body["stop"] == [stop] for body in server.asked(COMPLETIONS)[:3])


def test_what_comes_after_a_stop_string_is_cut_off(ready):
    """An engine that goes on is cut here, with its log-probs."""
    _, rollout = ready()
    whole = sample(rollout)[0]
    one = vllm_server.Sampled(whole.token_ids, whole.logps, None)
    text = rollout.tokenizer.decode(whole.token_ids[2:3])
    cut = rollout._completion(one, replace(SAMPLING, stop=(text,)))
    n = len(cut.token_ids)
    assert 1 <= n <= 3 and cut.ended
    assert (cut.token_ids, cut.logps) == (whole.token_ids[:n], whole.logps[:n])


def test_words_that_were_kept_reach_the_completions(ready):
    server, rollout = ready("masks", **MASKS)
    done = sample(rollout, MASKED)
    body = server.asked(GENERATE)[0]
    assert set(body) == {"model", "token_ids", "sampling_params"}
    assert (body["sampling_params"]["top_k"], body["sampling_params"]["top_p"]) == (20, 0.9)
    for i, one in enumerate(done):
        prompt = prompts_of(rollout)[i // 4]
        logits, ids, offsets = logits_of(rollout, prompt, one.token_ids), *one.support
        assert len(offsets) == len(one.token_ids) + 1 and len(one.logps) == len(one.token_ids)
        for t, token in enumerate(one.token_ids):
            kept = ids[offsets[t] : offsets[t + 1]].long()
            assert token in kept and 1 <= len(set(kept.tolist())) == len(kept) <= 20
            # Over the words that were kept.
            logp = float(logits[t, kept].log_softmax(-1)[kept == token])
            assert one.logps[t] == pytest.approx(logp, abs=1e-4)


def folder_of(tmp_path, tag):
    return str(tmp_path / f"grpo_kernels-{socket.gethostname()}-{os.getpid()}-{tag}")


def test_what_a_killed_run_left_is_deleted(ready, tmp_path):
    _, rollout = ready()
    mine, gone = Path(folder_of(tmp_path, "other")), Path(folder_of(tmp_path, "gone"))
    gone = gone.with_name(gone.name.replace(str(os.getpid()), str(2**22 + 1)))  # above pid_max
    mine.mkdir()
    gone.mkdir()
    rollout.update_weights()
    assert list(tmp_path.iterdir()) == [mine]


def test_weights_are_sent_by_files_that_are_gone_afterwards(ready, tmp_path):
    server, rollout = ready()
    expected = dict(extension.names_and_weights(rollout.model))
    assert server.loads == [{name: list(w.shape) for name, w in expected.items()}]
    load = [b for b in server.asked("/collective_rpc") if b["method"] == "grpo_kernels_load"]
    folder, count, tag = load[0]["args"]
    assert folder == folder_of(tmp_path, tag) and count == str(len(expected))
    assert list(tmp_path.iterdir()) == []
    where = [path for path, _ in server.requests]
    assert where.index("/reset_prefix_cache") == len(where) - 1
    rollout.update_weights()
    assert len(server.loads) == 2 and server.sent == rollout.tag != tag


# A server that is not the run's


@pytest.mark.parametrize(
    ("about", "message"),
    (
        ({"hidden_size": 576}, "expected hidden_size 32; got 576"),
        ({"vocab_size": 5}, "expected vocab_size 257; got 5"),
        ({"num_hidden_layers": 30}, "expected num_hidden_layers 2; got 30"),
        ({"model_type": "qwen2"}, "expected model_type 'llama'; got 'qwen2'"),
        ({"protocol": 2}, "expected protocol 1; got 2"),
        ({"logprobs_mode": "raw_logprobs"}, "expected logprobs_mode 'processed_logprobs'; got"),
        ({"max_model_len": 39}, "expected max_model_len 40 at least, .*; got 39"),
    ),
)
def test_another_engine_is_refused(about, message, serve, served_config):
    server = serve("default", **about)
    with pytest.raises(RolloutError, match=f"vLLM: {message}") as error:
        rollout_of(served_config(server))
    assert "Start one with\n  env " in str(error.value) and server.loads == []


@pytest.mark.parametrize(
    ("name", "options", "message", "flags"),
    (
        ("default", MASKS, "vLLM: expected sampling_mask True; got False",
         ("--return-sampling-mask", "--enable-scale-out")),
        ("no dev mode", {}, "this library's extension; .* answers 404",
         ("VLLM_SERVER_DEV_MODE=1", "--worker-extension-cls grpo_kernels.integrations.vllm.")),
        ("no extension", {}, "this library's extension; .* answers 500",
         ("VLLM_SERVER_DEV_MODE=1", "--worker-extension-cls grpo_kernels.integrations.vllm.")),
    ),
)  # fmt: skip
def test_a_server_without_what_a_run_needs_is_refused(
    name, options, message, flags, serve, served_config
):
    server = serve(name)
    with pytest.raises(RolloutError, match=message) as error:
        rollout_of(served_config(server, **options))
    assert all(f" {flag}" in str(error.value) for flag in flags)
    if options:
        assert rollout_of(served_config(server, **options, replay_support=False)).why_gap is None


def test_masks_without_their_endpoint(ready):
    """A server with masks that was started without --enable-scale-out."""
    server, rollout = ready("masks", **MASKS)
    server.refuses[GENERATE] = ["generate"] * 3
    server.exchanges += recorded("default", "generate")
    with pytest.raises(RolloutError, match=r"answers 403 .*--enable-scale-out"):
        sample(rollout, MASKED)


@pytest.mark.parametrize(
    ("version", "warned"),
    (("0.28.0", False), ("0.32.1", False), ("0.27.4", True), ("0.33.0", True), ("1.0.0", True)),
)
def test_an_untried_version_is_told(version, warned, serve, served_config, capsys):
    rollout_of(served_config(serve("default", vllm=version)))
    text = f"warning: vLLM {version} has not been tried, 0.28 to 0.32 have"
    assert (text in capsys.readouterr().out) is warned


def test_the_recording_is_of_the_command_that_starts_one(serve, served_config, monkeypatch):
    """Record again (tests/helpers/record_vllm.py) where the options have changed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    header = json.loads(RECORDING.read_text())["header"]
    for name, options in (("default", {}), ("masks", MASKS)):
        command = server_command(served_config(serve(name), **options))
        then = header["commands"][name].split()
        assert [x for x in then if x.startswith("--") and x != "--served-model-name"] == [
            x for x in command if x.startswith("--")
        ]
        assert {x for x in then if "=" in x} == {x for x in command if "=" in x}

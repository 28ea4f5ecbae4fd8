r"""vLLM as a server: starting one for a run, and its client.

    python -m grpo_kernels.training.vllm_server run.yaml [--model MODEL ...] [-- --vllms-own ...]

becomes the server that a run with these options and `--rollout vllm --vllm_mode server` expects, on
this host, at the port of `vllm_server_base_url`; CUDA_VISIBLE_DEVICES says on which GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor

from ..integrations import vllm as extension
from . import ranks
from .command_line import parse_config
from .config import DTYPES, TrainingConfig
from .rollout import RolloutError

# Tokens in a block of vLLM's cache on a CPU, the fewest that its kernel takes. Completions share
# the full blocks of their prompt; of vLLM's own 128 tokens, a short prompt fills one or none.
_CPU_BLOCK_SIZE = 32
# Requests that wait for a server at the same time, at most.
_CONCURRENT = 256
# Seconds in which a server that lives says so.
_SOON = 30.0
# Set unless they are set.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


class Sampled(NamedTuple):
    """One completion as an engine returns it."""

    token_ids: list[int]
    logps: list[float] | None
    kept: list[list[int]] | None  # the set that each token was sampled from


class ServerLost(Exception):
    """A server that does not answer, or that has other weights than it was sent."""


class Server:
    """vLLM's HTTP server with its development endpoints.

    Raises:
        RolloutError: none answers, or one without this library's extension.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config, self.at_once, self.patience = config, _CONCURRENT, _SOON
        self.url = config.vllm_server_base_url.rstrip("/")
        # Of no proxy, which may not know this host by the same name.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self.wait()
        self.name = self._call("/v1/models")["data"][0]["id"]
        self.about = self._about()

    def load(self, weights: Iterator[tuple[str, Tensor]], count: int, tag: str) -> None:
        """Replaces the weights, by way of files that the server reads."""
        folder = sync_folder(self.config, tag)
        try:
            folder.mkdir()
            extension.write(weights, folder, getattr(torch, self.about["dtype"]))
            with ThreadPool(1) as pool:
                args = "grpo_kernels_load", str(folder), str(count), tag
                self._while_it_lives(pool.apply_async(self._rpc, args))
        except OSError as error:
            raise RolloutError(
                f"vllm_sync_dir: weights cannot be written there: {error}"
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._reset_cache()

    def _reset_cache(self) -> None:
        # Requests that were given up may still be running for a moment.
        end = time.monotonic() + self.patience
        while not (self._call("/reset_prefix_cache", {}) or {}).get("success", True):
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            raise RuntimeError(
                f"vLLM at {self.url}: expected no request while weights are sent; got some. Does "
                "another run sample from it?"
            )

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], request: dict[str, Any],
        tag: str,
    ) -> list[Sampled]:  # fmt: skip
        """Samples `request["n"]` completions per prompt.

        Raises:
            ServerLost: it does not answer, or its weights are not those of the tag.
        """
        lost: list[ServerLost] = []

        def one(prompt: Sequence[int], seed: int) -> list[Sampled]:
            if lost:  # those that wait for a thread need not find out, too
                raise lost[0]
            try:
                return ask(prompt, seed)
            except ServerLost as error:
                lost.append(error)
                raise

        def ask(prompt: Sequence[int], seed: int) -> list[Sampled]:
            body = {"model": self.name, "seed": seed, **request}
            if self.about["sampling_mask"]:
                params = {"seed": seed, "detokenize": bool(request["stop"]), **request}
                body = {"model": self.name, "token_ids": list(prompt), "sampling_params": params}
                choices = self._call("/inference/v1/generate", body)["choices"]
            else:
                body |= {"prompt": list(prompt), "return_token_ids": True}
                choices = self._call("/v1/completions", body)["choices"]
            return [_of_choice(choice) for choice in sorted(choices, key=lambda c: c["index"])]

        self._check_sent(tag)
        try:
            # An interrupt ends the threads, and with their connections vLLM drops the requests.
            with ThreadPool(max(1, min(self.at_once, len(prompts)))) as pool:
                asked = zip(prompts, seeds, strict=True)
                answers = self._while_it_lives(pool.starmap_async(one, asked, chunksize=1))
        except ServerLost:
            # It may have run out of memory, and would again.
            self.at_once = max(1, min(self.at_once, len(prompts)) // 2)
            raise
        self._check_sent(tag)
        return [sampled for answer in answers for sampled in answer]

    def _while_it_lives(self, result: Any) -> Any:
        """What threads return; an engine that dies may leave requests without an answer.

        Raises:
            ServerLost: the server no longer says that it lives.
        """
        while True:
            try:
                return result.get(_SOON)
            except multiprocessing.TimeoutError:
                self._call("/health", timeout=_SOON)

    def _check_sent(self, tag: str) -> None:
        if self._about()["sent"] != tag:
            raise ServerLost(
                f"vLLM at {self.url} has other weights than it was sent: it was started again, or "
                "another run uses it"
            )

    def wait(self) -> None:
        """Waits until the server answers.

        Raises:
            RolloutError: after `vllm_server_timeout` seconds.
        """
        end = time.monotonic() + self.config.vllm_server_timeout
        while True:
            try:
                return self._call("/health", timeout=_SOON)
            except ServerLost as error:
                if time.monotonic() > end:
                    raise RolloutError(
                        f"vllm_server_base_url: {error}, not in vllm_server_timeout = "
                        f"{self.config.vllm_server_timeout:g} s{how_to_start(self.config)}"
                    ) from error
            time.sleep(1)

    def _about(self) -> dict[str, Any]:
        try:
            # Of an engine that died this very moment there is no answer at all.
            return self._rpc("grpo_kernels_about", timeout=_SOON)
        except RuntimeError as error:
            raise RolloutError(
                f"vLLM: expected one with this library's extension; {error}"
                f"{how_to_start(self.config)}"
            ) from error

    def _rpc(self, method: str, *args: str, timeout: float | None = None) -> Any:
        body = {"method": method, "args": args}
        return self._call("/collective_rpc", body, timeout)["results"][0]

    def _call(self, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """The answer to a GET, or to a POST of a body, as JSON.

        Raises:
            ServerLost: no answer.
            RuntimeError: the server says that something is wrong.
        """
        url, option = self.url + path, "" if timeout else " (vllm_request_timeout)"
        timeout = timeout or self.config.vllm_request_timeout
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with self._open(request, timeout=timeout) as answer:
                text = answer.read()
            return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            said = f"{url} answers {error.code} {error.read().decode(errors='replace')[:500]}"
            if path == "/health":
                raise ServerLost(said) from error
            # A worker that died, or a request that was wrong?
            self._call("/health", timeout=_SOON)
            raise RuntimeError(said) from error
        except TimeoutError as error:
            raise ServerLost(f"{url} did not answer in {timeout:g} s{option}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise ServerLost(f"{url} does not answer ({error})") from error


def _of_choice(choice: dict[str, Any]) -> Sampled:
    told = choice.get("logprobs") or {}
    logps = told.get("token_logprobs")
    if told.get("content"):
        # Of /inference; before 0.32 the log-prob is beside the candidates, the token the first.
        rows = ({**row, **(row.get("top_logprobs") or [{}])[0]} for row in told["content"])
        logps = [row["logprob"] for row in rows]
    return Sampled(choice["token_ids"], logps, choice.get("sampling_mask"))


def sync_folder(config: TrainingConfig, tag: str) -> Path:
    """The folder that weights are handed over in; those of processes that are gone are deleted."""
    base, host = Path(config.vllm_sync_dir), socket.gethostname()
    for left in base.glob(f"grpo_kernels-{host}-*"):
        process = left.name.removeprefix(f"grpo_kernels-{host}-").split("-")[0]
        if not Path("/proc", process).exists():
            shutil.rmtree(left, ignore_errors=True)
    return base / f"grpo_kernels-{host}-{os.getpid()}-{tag}"


def engine_dtype(config: TrainingConfig) -> str:
    """The dtype that vLLM is to compute in, as torch calls it."""
    return ranks.gemm_dtype(config) if config.vllm_dtype == "auto" else DTYPES[config.vllm_dtype]


def engine_options(config: TrainingConfig, rows: int, on_gpu: bool) -> dict[str, Any]:
    """Options of vLLM by the names of `LLM`, which a server has as flags."""
    model, length = config.model, max_model_length(config)
    options: dict[str, Any] = {
        "model": model, "dtype": engine_dtype(config), "max_model_len": length,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{extension.__name__}.{extension.WorkerExtension.__name__}",
    }  # fmt: skip
    revision = {"revision": config.revision} if config.revision else {}
    options |= revision
    if config.records_support:
        options["return_sampling_mask"] = True
    if not on_gpu:
        import psutil
        from transformers import AutoConfig

        # Compiling takes a minute and saves 8 %. With less cache than all rows need, rows wait.
        text = AutoConfig.from_pretrained(model, **revision).get_text_config()
        wanted = cpu_cache_bytes(text, rows, length, getattr(torch, options["dtype"]).itemsize)
        room = psutil.virtual_memory().available // 2
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": min(wanted, room)}
        # A prompt that is read in parts has its generator's offset set back, and torch's on a CPU
        # has none: the engine would end ("CPU Generator does not use offset").
        options["enable_chunked_prefill"] = False
        options["block_size"] = _CPU_BLOCK_SIZE
    return options


def max_model_length(config: TrainingConfig) -> int:
    """Tokens that vLLM has room for in a sequence."""
    return config.max_prompt_length + config.max_completion_length


def cpu_cache_bytes(text_config: Any, rows: int, length: int, width: int) -> int:
    """Bytes of the cache that vLLM gets on a CPU, in whose blocks of tokens all rows fit."""
    blocks = (rows + 1) * (-(-length // _CPU_BLOCK_SIZE) + 1)
    return kv_cache_bytes(text_config, blocks * _CPU_BLOCK_SIZE, width)


def kv_cache_bytes(text_config: Any, tokens: int, width: int) -> int:
    """Bytes of the keys and values of tokens, `width` bytes per number."""
    c = text_config
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * c.num_hidden_layers * heads * size * tokens * width


def server_command(config: TrainingConfig) -> list[str]:
    """The command that starts a server for a run with these options, environment first."""
    on_gpu, url = torch.cuda.is_available(), urlsplit(config.vllm_server_base_url)
    options = engine_options(config, config.prompts_per_step * config.num_generations, on_gpu)
    options |= {"host": url.hostname, "port": url.port}
    environment = {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
    if config.records_support:
        options["enable_scale_out"] = True  # the endpoint that returns masks
    if not on_gpu:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else it reserves a core
    command = ["env", *(f"{name}={value}" for name, value in environment.items())]
    # Not `vllm serve`, which asks for the version of a distribution vllm; a CPU's is vllm-cpu. 0.32
    # deprecates this module for vllm.entrypoints.launchers.api_server.entry, which 0.28 has not.
    command += [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        command += [f"--no-{flag}"] if value is False else [f"--{flag}"]
        command += [] if isinstance(value, bool) else [str(value)]
    return command


def how_to_start(config: TrainingConfig) -> str:
    if config.vllm_mode == "colocate":
        return ""
    try:
        return f". Start one with\n  {shlex.join(server_command(config))}"
    except OSError:  # no files of the model here
        return ". Start one with the run's options by python -m grpo_kernels.training.vllm_server"


def main(argv: Sequence[str] | None = None) -> None:
    """Becomes the server of a run; what follows `--` goes to vLLM as it is."""
    argv = list(sys.argv[1:] if argv is None else argv)
    end = argv.index("--") if "--" in argv else len(argv)
    config = parse_config(argv[:end], rollout="vllm", vllm_mode="server")
    command = [*server_command(config), *argv[end + 1 :]]
    print(shlex.join(command), file=sys.stderr, flush=True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

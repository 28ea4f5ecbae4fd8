"""`VLLMRollout`: completions by vLLM in this process, with the policy's weights.

For vLLM as a server use TRL or verl, with this library's head.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from tqdm import tqdm

from ...base.checks import version_numbers
from ...integrations import vllm as extension
from ...integrations.generation import support_of
from ..config import TrainingConfig
from ..run import ranks
from .completions import Completion, RolloutError, SamplingParams, cut_completion, end_tokens

# Versions that the tests have run with.
TESTED = ((0, 28), (0, 32))
# Tokens in a block of vLLM's cache on a CPU, the fewest that its kernel takes. Completions share
# the full blocks of their prompt; a short prompt fills hardly one block of vLLM's default 128.
_CPU_BLOCK_SIZE = 32
# Environment variables to set unless the caller has set them.
_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


class VLLMRollout:
    """`Rollout` by vLLM, with the log-probs that it sampled with; one engine per process.

    Raises:
        RolloutError: no engine, or an engine that would not sample from this policy.
        ValueError: the model has adapters that cannot be merged for vLLM.
    """

    def __init__(
        self, config: TrainingConfig, model: Any, tokenizer: Any, accelerator: Accelerator
    ) -> None:
        extension.check_can_be_sent(model)
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.accelerator = accelerator
        self.eos = end_tokens(model, tokenizer)
        on_gpu = accelerator.device.type == "cuda"
        self.sleeps = on_gpu and config.vllm_enable_sleep_mode
        with self._in_all_processes():
            self.llm = self._start(on_gpu)
            self.about: dict[str, Any] = self.llm.collective_rpc("grpo_kernels_about")[0]
            self._check()
        if accelerator.is_main_process:
            tqdm.write(
                f"Completions by vLLM {self.about['vllm']} in this process, {self.about['dtype']}"
            )

    def _start(self, on_gpu: bool) -> Any:
        config, processes = self.config, self.accelerator.num_processes
        prompts = -(-config.prompts_per_step // processes)
        options = engine_options(config, prompts * config.num_generations, on_gpu)
        if on_gpu:
            options["gpu_memory_utilization"] = config.vllm_gpu_memory_utilization
            options["enable_sleep_mode"] = config.vllm_enable_sleep_mode
        if processes > 1:
            options["distributed_executor_backend"] = "external_launcher"
        os.environ |= {**_ENVIRONMENT, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with _restore_process():
            from vllm import LLM

            try:
                return LLM(**options, seed=0)
            except (ValueError, TypeError, RuntimeError) as error:
                raise RolloutError(_start_advice(error, config)) from error

    @property
    def sampler_dtype(self) -> str | None:
        """The dtype whose rounding explains a gap between the log-probs of vLLM and policy.

        None if truncation explains it, as only one of the two is over the full vocabulary.
        """
        if self.config.truncates and not self.config.replay_support:
            return None
        used = self.about["dtype"], ranks.gemm_dtype(self.config)
        return next(dtype for dtype in ("bfloat16", "float16", "float32") if dtype in used)

    def update_weights(self) -> None:
        """Sends vLLM the policy's weights; every process calls it."""
        weights = extension.names_and_weights(self.model)
        count = len(extension.names_of(self.model))
        with torch.no_grad(), self._without_autocast(), self._in_all_processes():
            if self.sleeps:
                self.llm.wake_up(tags=["weights"])
            self.llm.collective_rpc("grpo_kernels_load", args=(weights, count))
            # Cached prefixes have keys and values of the old weights.
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM: expected no request while weights are sent; got some")

    def __call__(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams
    ) -> list[Completion]:
        # By the step's generator: a resumed run draws the same.
        seeds = torch.randint(2**31 - 1, (len(prompts),), device="cpu").tolist()
        request = self._request(count, sampling)
        with self._without_autocast(), self._in_all_processes():
            outputs = self._generate(prompts, seeds, request)
        # Greedy sampling makes one completion, which is repeated.
        repeats = count // request["n"]
        return [c for x in outputs for c in [self._completion(x, sampling)] * repeats]

    def _generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], request: dict[str, Any]
    ) -> list[Any]:
        """Samples `request["n"]` completions per prompt."""
        from vllm import SamplingParams as Params

        if self.sleeps:
            self.llm.wake_up()
        text = bool(request["stop"])
        params = [Params(seed=seed, detokenize=text, **request) for seed in seeds]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        done = self.llm.generate(inputs, params, use_tqdm=False)
        if self.sleeps:
            self.llm.sleep(level=1)
        return [output for answer in done for output in answer.outputs]

    def _without_autocast(self) -> Any:
        """A block without the trainer's autocast, for vLLM's and a merged adapter's products."""
        return torch.autocast(self.accelerator.device.type, enabled=False)

    def _in_all_processes(self) -> Any:
        """Raises one process's error of the block as a `RolloutError` in all."""
        return ranks.raise_on_all_ranks(self.accelerator, RolloutError, others="")

    def _request(self, count: int, sampling: SamplingParams) -> dict[str, Any]:
        """All sampling parameters by vLLM's names, as the model's would be the defaults."""
        greedy = sampling.temperature == 0
        temperature, top_k = sampling.temperature, sampling.top_k
        if self.about["sampling_mask"]:
            # vLLM returns sampling masks only if temperature and top_k are above 0.
            temperature = 1.0 if greedy else temperature
            top_k = 1 if greedy else top_k or self.about["vocab_size"]
        return {
            "n": 1 if greedy else count, "temperature": temperature, "top_k": top_k,
            "top_p": sampling.top_p, "min_p": sampling.min_p, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0,
            "max_tokens": sampling.max_new_tokens,
            "logprobs": None if greedy else 0,
            # Only at these: vLLM's end token may be another.
            "stop_token_ids": self.eos, "ignore_eos": True, "stop": list(sampling.stop),
            "skip_special_tokens": False,
        }  # fmt: skip

    def _completion(self, output: Any, sampling: SamplingParams) -> Completion:
        """Makes a completion of the engine's output, which may go on after a stop string."""
        # The reason is a stop string, or the id of an end token.
        stopped = isinstance(output.stop_reason, str)
        cut = cut_completion(output.token_ids, self.eos, sampling, self.tokenizer, stopped=stopped)
        logps = output.logprobs and [
            row[token].logprob for token, row in zip(cut.token_ids, output.logprobs, strict=False)
        ]
        mask, support = getattr(output, "sampling_mask", None), None
        if sampling.record_support and mask is not None:
            support = support_of(mask.token_ids[: len(cut.token_ids)])
        return replace(cut, logps=logps, support=support)

    def _check(self) -> None:
        """Refuses an engine that would sample from another policy."""
        config, about = self.config, self.about
        text = self.model.config.get_text_config()
        expected = {name: getattr(text, name) for name in extension.SHAPE}
        expected |= {"logprobs_mode": "processed_logprobs"}
        expected |= {"sampling_mask": True} if config.records_support else {}
        expected["dtype"] = ranks.gemm_dtype(config)
        for name, value in expected.items():
            if about.get(name) != value:
                raise RolloutError(f"vLLM: expected {name} {value!r}; got {about.get(name)!r}")
        is_tested = TESTED[0] <= version_numbers(about["vllm"]) <= TESTED[1]
        if not is_tested and self.accelerator.is_main_process:
            low, high = (".".join(map(str, version)) for version in TESTED)
            tqdm.write(
                f"warning: vLLM {about['vllm']} is not tested ({low} to {high} are); "
                "sampler_gap tells whether its log-probs are the policy's"
            )


def engine_options(config: TrainingConfig, rows: int, on_gpu: bool) -> dict[str, Any]:
    """Options of vLLM by the names of `LLM`."""
    length = config.max_prompt_length + config.longest_completion
    options: dict[str, Any] = {
        "model": config.model, "dtype": ranks.gemm_dtype(config), "max_model_len": length,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{extension.__name__}.{extension.WorkerExtension.__name__}",
    }  # fmt: skip
    if config.records_support:
        options["return_sampling_mask"] = True
    if not on_gpu:
        import psutil
        from transformers import AutoConfig

        # Compiling takes a minute and saves 8 %. With less cache than all rows need, rows wait.
        text = AutoConfig.from_pretrained(config.model).get_text_config()
        # Blocks for all rows, each of the largest length.
        blocks = (rows + 1) * (-(-length // _CPU_BLOCK_SIZE) + 1)
        width = getattr(torch, options["dtype"]).itemsize
        needed = kv_cache_bytes(text, blocks * _CPU_BLOCK_SIZE, width)
        room = psutil.virtual_memory().available // 2
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": min(needed, room)}
        # Prefilling a prompt in chunks resets its generator's offset, which a CPU generator does
        # not support: the engine would end ("CPU Generator does not use offset").
        options["enable_chunked_prefill"] = False
        options["block_size"] = _CPU_BLOCK_SIZE
    return options


def kv_cache_bytes(text_config: Any, tokens: int, width: int) -> int:
    """Bytes of the keys and values of tokens, `width` bytes per number."""
    c = text_config
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * c.num_hidden_layers * heads * size * tokens * width


def _start_advice(error: Exception, config: TrainingConfig) -> str:
    """Returns what to do if vLLM does not start."""
    text = f"vLLM does not start: {error}"
    if config.records_support and "sampling" in str(error):
        text += (
            "\nreplay_support wants the sets that top_k, top_p or min_p keep, which this vLLM "
            "does not return: --no_replay_support trains over the whole softmax, --rollout "
            "generate records them"
        )
    elif "memory" in str(error):
        text += "\nvllm_gpu_memory_utilization is the share of a GPU that it may fill"
    return text


@contextmanager
def _restore_process() -> Iterator[None]:
    """Restores process settings that vLLM changes while it starts.

    Its CPU worker sets one thread, disables `torch.set_num_threads`, sets LD_PRELOAD,
    LOCAL_WORLD_SIZE and others for later processes, and seeds every generator.
    """
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    threads, affinity = torch.get_num_threads(), os.sched_getaffinity(0)
    precision = torch.get_float32_matmul_precision()
    states = torch.random.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        os.sched_setaffinity(0, affinity)
        torch.random.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
        for name in os.environ.keys() - environment.keys():
            if not name.startswith("VLLM_"):  # vLLM reads these later
                del os.environ[name]
        os.environ |= environment

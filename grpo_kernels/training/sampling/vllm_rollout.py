"""`VLLMRollout`: completions by vLLM in this process, which gets the weights.

For vLLM as a server take TRL or verl, which can use this library's head.
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
# the full blocks of their prompt; of vLLM's own 128 tokens, a short prompt fills one or none.
_CPU_BLOCK_SIZE = 32
# Environment variables that are set unless the caller has set them.
_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


class VLLMRollout:
    """`Rollout` by vLLM, with the log-probs that it sampled with; every process has its own.

    Args:
        config: the run's; its `vllm_*` options say how.
        model: inside the policy.
        tokenizer: the model's.
        accelerator: of the run; every process samples for its own prompts.

    Raises:
        RolloutError: no engine, or one that would not sample from this policy.
        ValueError: the model has adapters that vLLM cannot have.
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
                raise RolloutError(_explain(error, config)) from error

    @property
    def sampler_dtype(self) -> str | None:
        """The dtype whose rounding a gap between the log-probs of vLLM and policy may come from.

        None where truncation explains it, as one of the two is over the whole vocabulary.
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
            # Prompts would go on from states of the weights before.
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM: expected no request while weights are sent; got some")

    def __call__(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams
    ) -> list[Completion]:
        # By the step's generator: a run that goes on from a checkpoint draws the same.
        seeds = torch.randint(2**31 - 1, (len(prompts),), device="cpu").tolist()
        request = self._request(count, sampling)
        with self._without_autocast(), self._in_all_processes():
            outputs = self._generate(prompts, seeds, request)
        # The likeliest completion is asked for once, and repeated.
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
        """Raises an error of the block, in one process, as a `RolloutError` in all."""
        return ranks.raise_on_all_ranks(self.accelerator, RolloutError, others="")

    def _request(self, count: int, sampling: SamplingParams) -> dict[str, Any]:
        """Sampling parameters by vLLM's names, all of them: a model's own would be the default."""
        greedy = sampling.temperature == 0
        temperature, top_k = sampling.temperature, sampling.top_k
        if self.about["sampling_mask"]:
            # vLLM returns masks where both are above 0, and refuses the rest.
            temperature = 1.0 if greedy else temperature
            top_k = 1 if greedy else top_k or self.about["vocab_size"]
        return {
            "n": 1 if greedy else count, "temperature": temperature, "top_k": top_k,
            "top_p": sampling.top_p, "min_p": sampling.min_p, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0,
            "max_tokens": sampling.max_new_tokens,
            "logprobs": None if greedy else 0,
            # At these alone: what vLLM takes for the end may be another token.
            "stop_token_ids": self.eos, "ignore_eos": True, "stop": list(sampling.stop),
            "skip_special_tokens": False,
        }  # fmt: skip

    def _completion(self, output: Any, sampling: SamplingParams) -> Completion:
        """Makes a completion of the engine's output, which may go on after a stop string."""
        # The reason is a string where a stop string was, a token's id where an end token was.
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
        """Refuses an engine that would sample from another policy than this one."""
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
        # Blocks in which all rows fit, each with the tokens of the longest.
        blocks = (rows + 1) * (-(-length // _CPU_BLOCK_SIZE) + 1)
        width = getattr(torch, options["dtype"]).itemsize
        needed = kv_cache_bytes(text, blocks * _CPU_BLOCK_SIZE, width)
        room = psutil.virtual_memory().available // 2
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": min(needed, room)}
        # A prompt that is read in parts has its generator's offset set back, and torch's on a CPU
        # has none: the engine would end ("CPU Generator does not use offset").
        options["enable_chunked_prefill"] = False
        options["block_size"] = _CPU_BLOCK_SIZE
    return options


def kv_cache_bytes(text_config: Any, tokens: int, width: int) -> int:
    """Bytes of the keys and values of tokens, `width` bytes per number."""
    c = text_config
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * c.num_hidden_layers * heads * size * tokens * width


def _explain(error: Exception, config: TrainingConfig) -> str:
    """Says what to do about a vLLM that does not start."""
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
    """Restores what vLLM changes while it starts.

    Its CPU worker sets one thread, makes `torch.set_num_threads` do nothing, sets LD_PRELOAD,
    LOCAL_WORLD_SIZE and others for processes to come, and seeds every generator.
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
            if not name.startswith("VLLM_"):  # which it reads as it goes
                del os.environ[name]
        os.environ |= environment

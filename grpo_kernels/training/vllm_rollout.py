"""`VLLMRollout`: completions by vLLM, in this process or by a server, which is sent the weights."""

from __future__ import annotations

import os
import random
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from ..integrations import vllm as extension
from ..integrations.generation import support_of
from . import ranks
from .config import TrainingConfig
from .rollout import Completion, RolloutError, SamplingParams, completion, end_tokens
from .vllm_server import (
    ENVIRONMENT,
    Sampled,
    Server,
    ServerLost,
    engine_dtype,
    engine_options,
    how_to_start,
)

# Versions that the tests have run with.
TESTED = ((0, 28), (0, 32))
# Times that weights or prompts are sent to a server that was lost meanwhile.
_ATTEMPTS = 3


class VLLMRollout:
    """`Rollout` by vLLM, with the log-probs that it sampled with.

    Args:
        config: the run's; its `vllm_*` options say which engine, and how.
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
        self.eos, self.tag = end_tokens(model, tokenizer), ""
        main, colocated = accelerator.is_main_process, config.vllm_mode == "colocate"
        self.say: Callable[[str], None] = tqdm.write if main else lambda text: None
        # Who hands over weights: every process to its own engine, or the first one to the server.
        self.sends = colocated or main

        def start() -> None:
            self.engine: Colocated | Server = (
                Colocated(config, accelerator) if colocated else Server(config)
            )
            self._check()

        lost = self._in_all_processes(start)
        if lost:
            raise RolloutError(lost)

    @property
    def why_gap(self) -> str | None:
        """The dtype that explains a gap between the log-probs of vLLM and of the policy.

        None where truncation explains it, as one of the two is over the whole vocabulary.
        """
        if self.config.truncates and not self.config.replay_support:
            return None
        low = "bfloat16" in (self.engine.about["dtype"], ranks.gemm_dtype(self.config))
        return "bfloat16" if low else "float32"

    @property
    def description(self) -> str:
        """The engine that samples, and its dtype."""
        about, config = self.engine.about, self.config
        colocated = config.vllm_mode == "colocate"
        where = "in this process" if colocated else f"at {config.vllm_server_base_url}"
        return f"vLLM {about['vllm']} {where}, {about['dtype']}"

    def update_weights(self) -> None:
        """Sends the policy's weights; every process calls it."""

        def attempt() -> str:
            self.tag = ranks.reduce(self.accelerator, uuid.uuid4().hex, lambda tags: tags[0])
            return self._send_weights()

        with torch.no_grad(), self._own_precision():
            self._try(attempt)

    def __call__(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams
    ) -> list[Completion]:
        # Of the step's generator: a run that goes on from a checkpoint draws the same.
        seeds = torch.randint(2**31 - 1, (len(prompts),)).tolist()
        request = self._request(count, sampling)
        sampled: list[Sampled] = []

        def sample() -> None:
            sampled[:] = self.engine.generate(prompts, seeds, request, self.tag)

        with self._own_precision():
            self._try(lambda: self._in_all_processes(sample), before_again=self.update_weights)
        # The likeliest completion is asked for once, and repeated.
        repeats = count // request["n"]
        return [c for one in sampled for c in [self._completion(one, sampling)] * repeats]

    def _own_precision(self) -> Any:
        """Outside of the trainer's autocast: neither vLLM's nor a merged adapter's products."""
        return torch.autocast(self.accelerator.device.type, enabled=False)

    def _request(self, count: int, sampling: SamplingParams) -> dict[str, Any]:
        """Sampling parameters by vLLM's names, all of them: a model's own would be the default."""
        greedy = sampling.temperature == 0
        temperature, top_k = sampling.temperature, sampling.top_k
        if self.engine.about["sampling_mask"]:
            # vLLM returns masks where both are above 0, and refuses the rest.
            temperature = 1.0 if greedy else temperature
            top_k = 1 if greedy else top_k or self.engine.about["vocab_size"]
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

    def _completion(self, one: Sampled, sampling: SamplingParams) -> Completion:
        cut = completion(one.token_ids, self.eos, sampling, self.tokenizer)
        n = len(cut.token_ids)
        support = None
        if sampling.record_support and one.kept is not None:
            support = support_of(one.kept[:n])
        return Completion(cut.token_ids, cut.ended, one.logps and one.logps[:n], support)

    def _send_weights(self) -> str:
        weights = extension.names_and_weights(self.model)

        def send() -> None:
            try:
                if self.sends:
                    self.engine.load(weights, len(extension.names_of(self.model)), self.tag)
            finally:
                # Every process takes part in the gathering, to its end.
                for _ in weights:
                    pass

        return self._in_all_processes(send)

    def _try(
        self, work: Callable[[], str], before_again: Callable[[], object] = lambda: None
    ) -> None:
        """Runs work that returns how the server was lost, or '', until it was not.

        Raises:
            RolloutError: it is lost every time, or does not come back.
        """
        for _ in range(_ATTEMPTS):
            lost = work()
            if not lost:
                return
            self.say(f"warning: {lost}. Looking for it, to send it the weights again")
            self._in_all_processes(self.engine.wait)
            before_again()
        raise RolloutError(f"{lost} ({_ATTEMPTS} times in a row)")

    def _in_all_processes(self, work: Callable[[], object]) -> str:
        """Runs `work` on every rank; returns the first rank's `ServerLost` message, or ''.

        Raises:
            RolloutError: in every process, where another error came in one.
        """
        lost = ""
        with ranks.raise_on_all_ranks(self.accelerator, RolloutError, others=""):
            try:
                work()
            except ServerLost as found:
                lost = str(found)
        return ranks.reduce(self.accelerator, lost, lambda texts: next(filter(None, texts), ""))

    def _check(self) -> None:
        """Refuses an engine that would sample from another policy than this one."""
        config, about = self.config, self.engine.about
        text = self.model.config.get_text_config()
        expected = {name: getattr(text, name) for name in extension.SHAPE}
        expected |= {"protocol": extension.PROTOCOL, "logprobs_mode": "processed_logprobs"}
        expected |= {"sampling_mask": True} if config.records_support else {}
        expected["dtype"] = engine_dtype(config)
        wrong = [
            f"{k} {v!r}; got {about.get(k)!r}" for k, v in expected.items() if about.get(k) != v
        ]
        need = config.max_prompt_length + config.max_completion_length
        if about["max_model_len"] < need:
            wrong.append(
                f"max_model_len {need} at least, for max_prompt_length + max_completion_length; "
                f"got {about['max_model_len']}"
            )
        if wrong:
            raise RolloutError(f"vLLM: expected {wrong[0]}{how_to_start(config)}")
        version = tuple(int(x) for x in re.findall(r"\d+", about["vllm"])[:2])
        if not TESTED[0] <= version <= TESTED[1]:
            low, high = (".".join(map(str, version)) for version in TESTED)
            self.say(
                f"warning: vLLM {about['vllm']} has not been tried, {low} to {high} have; "
                "sampler_gap tells whether its log-probs are the policy's"
            )


class Colocated:
    """vLLM in this process; each of several processes has its own.

    Args:
        config: the run's.
        accelerator: of the run.
    """

    def __init__(self, config: TrainingConfig, accelerator: Accelerator) -> None:
        on_gpu = accelerator.device.type == "cuda"
        prompts = -(-config.prompts_per_step // accelerator.num_processes)
        options = engine_options(config, prompts * config.num_generations, on_gpu)
        if on_gpu:
            options["gpu_memory_utilization"] = config.vllm_gpu_memory_utilization
            options["enable_sleep_mode"] = config.vllm_enable_sleep_mode
        if accelerator.num_processes > 1:
            options["distributed_executor_backend"] = "external_launcher"
        os.environ |= {**ENVIRONMENT, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with _process_as_it_was():
            from vllm import LLM

            try:
                self.llm = LLM(**options, seed=0)
            except (ValueError, TypeError, RuntimeError) as error:
                raise RolloutError(_explain(error, config)) from error
        self.about = self.llm.collective_rpc("grpo_kernels_about")[0]
        self.sleeps = on_gpu and config.vllm_enable_sleep_mode

    def load(self, weights: Iterator[tuple[str, Tensor]], count: int, tag: str) -> None:
        """Replaces the weights."""
        if self.sleeps:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("grpo_kernels_load", args=(weights, str(count), tag))
        # Prompts would go on from states of the weights before.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM: expected no request while weights are sent; got some")

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], request: dict[str, Any],
        tag: str,
    ) -> list[Sampled]:  # fmt: skip
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
        return [_of_output(output) for answer in done for output in answer.outputs]

    def wait(self) -> None:
        """Waits for nothing: this engine is lost with its process alone."""


def _of_output(output: Any) -> Sampled:
    ids = list(output.token_ids)
    logps = output.logprobs and [
        row[token].logprob for token, row in zip(ids, output.logprobs, strict=True)
    ]
    mask = getattr(output, "sampling_mask", None)
    return Sampled(ids, logps, None if mask is None else mask.token_ids)


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
def _process_as_it_was() -> Iterator[None]:
    """Puts back what vLLM changes while it starts.

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

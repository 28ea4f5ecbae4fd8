"""The words that sampling kept, from TRL's generation to the calls of the model that score them.

Generation notes them per completion (`SupportReplay`). A list of them travels in TRL's batch, which
is shuffled, split and used several times. `batch_support` joins those of a micro-batch for a call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .generation import SupportRecorder

# The words kept for each token of a completion: token_ids [K], offsets [length + 1].
Support = tuple[Tensor, Tensor]
# The key of TRL's batch under which a list of supports travels, one per completion.
KEY = "support"
# Options of generation that truncate after the recorder, or that change scores otherwise than by
# forbidding words, and what they are when off.
_OFF = {
    "do_sample": True,
    "num_beams": 1,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
    "watermarking_config": None,
}


class SupportReplay:
    """Records the supports of the completions that a trainer of TRL samples.

    Raises:
        ValueError: sampling without truncation, or of a kind that cannot be recorded.
    """

    def __init__(self, trainer: Any) -> None:
        _check_source(trainer)
        self._options = _sampling_options(trainer)
        # Of the batch that is being generated and scored, one per completion; else None.
        self._rows: list[Support] | None = None

    def generate(self, own: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns what TRL's `_generate_single_turn` returns, and keeps the supports."""
        recorder = SupportRecorder(**self._options)
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        with _recording(model, recorder):
            completion_ids, logps = own(*args, **kwargs)
        self._rows = recorder.supports([len(ids) for ids in completion_ids])
        return completion_ids, logps

    def score(self, own: Callable[..., Any], inputs: Any) -> dict[str, Any]:
        """Returns TRL's generation batch with the supports of its completions in it."""
        try:
            return own(inputs) | {KEY: self.scored_rows()}
        finally:
            self._rows = None

    def scored_rows(self) -> list[Support]:
        """Returns the supports of the batch that TRL is scoring."""
        if self._rows is None:
            raise RuntimeError(
                "replay_support: expected log-probs of completions that _generate_single_turn has "
                "just sampled; got others, from a subclass of TRL's trainer"
            )
        return self._rows


def batch_support(rows: Sequence[Support], length: int) -> Support:
    """Joins the supports of completions for a call on `[B, length]` tokens; padding has none."""
    counts = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, (_, offsets) in zip(counts, rows, strict=True):
        row[: len(offsets) - 1] = offsets.diff()
    offsets = torch.cat([counts.new_zeros(1), counts.flatten().cumsum(0)])
    return torch.cat([token_ids for token_ids, _ in rows]), offsets


@contextmanager
def _recording(model: Any, recorder: SupportRecorder) -> Iterator[None]:
    """Lets the recorder truncate in place of `model.generate`, within a block."""
    own, in_instance = model.generate, "generate" in vars(model)

    def generate(*args: Any, generation_config: Any, **kwargs: Any) -> Any:
        config = copy.deepcopy(generation_config)
        config.update(**recorder.generate_options())
        return own(*args, generation_config=config, logits_processor=[recorder], **kwargs)

    model.generate = generate
    try:
        yield
    finally:
        del model.generate
        if in_instance:
            model.generate = own


def _check_source(trainer: Any) -> None:
    """Refuses completions that are not sampled in one call of `generate`."""
    because = "with replay_support=True, which records one call of generate"
    refused = {
        "use_vllm": trainer.use_vllm,
        "use_transformers_continuous_batching": trainer.use_transformers_continuous_batching,
        "rollout_func": trainer.rollout_func,
        "environment_factory": trainer.environment_factories,
        "tools": trainer.tools,
    }
    for name, value in refused.items():
        if value:
            expected = False if isinstance(value, bool) else None
            raise ValueError(f"{name}: expected {expected} {because}; got {value!r}")


def _sampling_options(trainer: Any) -> dict[str, Any]:
    """Returns the recorder's options, as `generate` would take them, or refuses them."""
    config, defaults = trainer.generation_config, trainer.model.generation_config

    def option(name: str) -> Any:
        value = getattr(config, name, None)
        return getattr(defaults, name, None) if value is None else value

    for name, off in _OFF.items():
        value = option(name)
        if value is not None and value != off:
            raise ValueError(
                f"{name}: expected {off!r} with replay_support=True, which replays temperature, "
                f"top_k, top_p and min_p alone; got {value!r}"
            )
    options = {name: option(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    if options["temperature"] != trainer.temperature:
        raise ValueError(
            f"temperature: expected GRPOConfig's, {trainer.temperature}, by which log-probs are "
            f"scaled; got {options['temperature']} from generation_kwargs"
        )
    if not (options["top_k"] or options["top_p"] != 1.0 or options["min_p"]):
        raise ValueError(
            "replay_support: expected top_p < 1, top_k > 0 or min_p > 0 in GRPOConfig; got none, "
            "so that sampling truncates nothing: leave it False"
        )
    return options

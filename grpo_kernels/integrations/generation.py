"""Parts of transformers' `generate`: a record of the ids that sampling kept, and stop strings.

With the record a loss can be over the truncated policy that sampled:

    recorder = SupportRecorder(temperature=0.7, top_p=0.9)
    options = recorder.generate_options(model)
    out = model.generate(ids, logits_processor=[recorder], **options)
    supports = recorder.supports(lengths)       # a Support per row
    support = batch_support(supports, out.shape[1] - ids.shape[1])      # of grpo_kernels

transformers runs the caller's processors before its warpers. So the recorder applies the warpers
itself, in the order of `generate`, whose truncation is turned off. Options that change scores other
than by forbidding tokens are turned off or refused (`refuse_processors`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..base.checks import as_number
from ..head.lm_head import Support
from .private import logits_processors

try:
    from transformers import (
        EncoderNoRepeatNGramLogitsProcessor,
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        LogitNormalization,
        LogitsProcessor,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        MinPLogitsWarper,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
        StoppingCriteria,
        StopStringCriteria,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )
    from transformers.generation import GenerationMode
except ImportError as error:
    raise ImportError(
        f"{__name__}: expected the package transformers, 5.0 or newer; got: {error}. "
        "Install it with: pip install 'transformers>=5.0'"
    ) from error

# Processors of `generate` that work with a recorder: they forbid tokens before it, or change no
# probability; the recorder applies the last four itself.
_REPLAYED = (
    EncoderNoRepeatNGramLogitsProcessor, ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor, LogitNormalization, MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor, NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor, SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper,
)  # fmt: skip


class SupportRecorder(LogitsProcessor):
    """Truncates as `generate` does, and records the remaining ids for each sampled token.

    Use one recorder per call of `generate`. It stores int32 ids on the CPU, not scores.

    Args:
        temperature: divides the logits, > 0.
        top_k: the number of tokens to keep; 0 keeps all.
        top_p: the probability to keep; 1 keeps all.
        min_p: the least probability to keep, as a share of the largest; None or 0 keeps all.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int | None = 0,
        top_p: float | None = 1.0,
        min_p: float | None = None,
    ) -> None:
        temperature, top_k, top_p, min_p = map(as_number, (temperature, top_k, top_p, min_p))
        self._warpers: list[Any] = []
        if temperature != 1.0:
            self._warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            self._warpers.append(TopKLogitsWarper(top_k))
        if top_p is not None and top_p != 1.0:
            self._warpers.append(TopPLogitsWarper(top_p))
        if min_p:
            self._warpers.append(MinPLogitsWarper(min_p))
        self._steps: list[tuple[Tensor, Tensor]] = []  # token_ids [K], counts [B]
        self._next_shape = (0, 0)

    @staticmethod
    def generate_options(model: Any = None) -> dict[str, Any]:
        """Returns arguments with which `generate` samples from the recorder's scores.

        They turn off the truncation and the penalties of the model's `GenerationConfig`. Options
        that only forbid tokens stay, such as `suppress_tokens`. Pass them as keywords: in a
        `GenerationConfig`, None stands for the model's value.

        Args:
            model: the one that samples; None leaves its `GenerationConfig` unchecked.

        Raises:
            ValueError: the model's `GenerationConfig` has another option that changes scores.
        """
        options = {
            "do_sample": True, "num_beams": 1, "prompt_lookup_num_tokens": None,
            "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_h": None,
            "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "guidance_scale": 1.0,
            "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "sequence_bias": None,
            "exponential_decay_length_penalty": None, "remove_invalid_values": False,
            "watermarking_config": None,
        }  # fmt: skip
        if model is not None:
            refuse_processors(model, "SupportRecorder", **options)
        return options

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the truncated scores, `[B, V]`."""
        shape = tuple(input_ids.shape)
        if self._steps and shape != self._next_shape:
            raise ValueError(
                f"input_ids: expected shape {list(self._next_shape)}, one token more than before; "
                f"got {list(shape)}: make a new recorder for each call of generate"
            )
        self._next_shape = (shape[0], shape[1] + 1)
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        is_kept = scores > -torch.inf
        token_ids = is_kept.nonzero()[:, 1].int().cpu()
        self._steps.append((token_ids, is_kept.sum(1).cpu()))
        return scores

    def supports(self, lengths: Sequence[int]) -> list[Support]:
        """Returns the support of each row, on the CPU.

        Args:
            lengths: the number of tokens of each row; later tokens are dropped.

        Returns:
            A `Support` per row: int32 `token_ids [K]` and int64 `offsets [length + 1]`.

        Raises:
            ValueError: lengths that do not match the recorded tokens.
        """
        rows = len(self._steps[0][1]) if self._steps else len(lengths)
        if len(lengths) != rows or max(lengths, default=0) > len(self._steps):
            raise ValueError(
                f"lengths: expected {rows} numbers up to {len(self._steps)}, one per recorded row; "
                f"got {len(lengths)}, up to {max(lengths, default=0)}"
            )
        steps = [token_ids.split(counts.tolist()) for token_ids, counts in self._steps]
        counts = [step_counts for _, step_counts in self._steps]
        empty = torch.empty(0, dtype=torch.int32, device="cpu")
        zero = torch.zeros((), dtype=torch.int64, device="cpu")
        return [
            Support(
                torch.cat([empty, *(step[row] for step in steps[:length])]),
                torch.stack([zero, *(step[row] for step in counts[:length])]).cumsum(0),
            )
            for row, length in enumerate(lengths)
        ]


def refuse_processors(model: Any, name: str, **options: Any) -> Any:
    """Refuses options of `generate` that change scores in a way that a recorder does not see.

    Asks `generate` itself which processors it makes of them; samples nothing. `name`: what needs
    the recorder, for the error. Returns the `GenerationConfig` that `generate` makes of `options`.

    Raises:
        ValueError: an option changes scores other than by forbidding tokens, or searches.
    """
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    if "generation_config" not in options:
        # generate warns without a length, and asks for a tokenizer of stop strings.
        options = {"max_new_tokens": 1, "stop_strings": None} | options
    config, refused = model.generate(
        ids, attention_mask=torch.ones_like(ids), custom_generate=_without_sampling, **options
    )
    mode = config.get_generation_mode()
    if mode != GenerationMode.SAMPLE:
        raise ValueError(
            f"generation by {mode.value} does not work with {name}: pass do_sample=True, "
            "num_beams=1 and no other strategy"
        )
    if refused is not None:
        raise ValueError(
            f"{refused}={getattr(config, refused, None)!r} does not work with {name}, which "
            f"replays temperature, top_k, top_p and min_p: leave {refused} out, or set it to None "
            "in the model's generation_config"
        )
    return config


def _without_sampling(
    model: Any, input_ids: Tensor, logits_processor: Any, generation_config: Any, **_: Any
) -> tuple[Any, str | None]:
    """Replaces the loop of `generate`; returns its config and an option that is refused."""
    other = next((type(p) for p in logits_processor if type(p) not in _REPLAYED), None)
    if other is None:
        return generation_config, None
    for option, value in vars(generation_config).items():
        if value is not None and option != "do_sample" and not option.startswith("_"):
            without = copy(generation_config)
            setattr(without, option, None)  # off, whatever the option is
            if other not in map(type, logits_processors(model, without, input_ids)):
                return generation_config, option
    return generation_config, other.__name__


class StopStrings(StoppingCriteria):
    """Ends rows whose completion has a stop string, and counts the tokens up to it.

    transformers' `stop_strings` look at prompt and completion together: a stop string that begins
    in the prompt would end a completion that does not have it. They do not say how many tokens of a
    row are sampled and how many are padding. `prompt_length` includes padding.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], prompt_length: int) -> None:
        self._ends_with_stop = StopStringCriteria(tokenizer, list(stop))
        self._prompt_length = prompt_length
        self._lengths: Tensor | None = None  # [B]

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Returns True for each row that ends here: bool `[B]`."""
        completions = input_ids[:, self._prompt_length :]
        stopped = self._ends_with_stop(completions, scores)
        if self._lengths is None:
            self._lengths = torch.zeros_like(stopped, dtype=torch.int64)
        is_first = stopped & (self._lengths == 0)
        self._lengths = self._lengths.masked_fill(is_first, completions.shape[1])
        return stopped

    def lengths(self) -> list[int]:
        """Returns the tokens of each row up to its first stop string; 0 where it has none."""
        return [] if self._lengths is None else self._lengths.tolist()


def support_of(kept_sets: Sequence[Sequence[int]]) -> Support:
    """The support of tokens with these kept sets, as an engine reports them."""
    sizes = torch.tensor([0, *map(len, kept_sets)], dtype=torch.int64, device="cpu")
    token_ids = torch.tensor([*chain.from_iterable(kept_sets)], dtype=torch.int32, device="cpu")
    return Support(token_ids, sizes.cumsum(0))

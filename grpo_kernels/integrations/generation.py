"""Parts of transformers' `generate`: a record of what sampling kept, and stop strings.

With the record a loss can be over the policy that acted:

    recorder = SupportRecorder(temperature=0.7, top_p=0.9)
    out = model.generate(ids, logits_processor=[recorder], **recorder.generate_options())
    supports = recorder.supports(lengths)       # a Support per row
    support = batch_support(supports, out.shape[1] - ids.shape[1])      # of grpo_kernels

transformers runs processors of the caller before its own warpers. So the recorder applies the
warpers itself, in the order of `generate`, which is then told to truncate nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..base.checks import as_number
from ..head.lm_head import Support

try:
    from transformers import (
        LogitsProcessor,
        MinPLogitsWarper,
        StoppingCriteria,
        StopStringCriteria,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )
except ImportError as error:
    raise ImportError(
        f"{__name__}: expected the package transformers, 5.0 or newer; got: {error}. "
        "Install it with: pip install 'grpo_kernels[train]'"
    ) from error


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
    def generate_options() -> dict[str, Any]:
        """Returns arguments with which `generate` samples from unchanged scores.

        They also turn off penalties and other cutoffs that a model's own `GenerationConfig` may
        have. `min_p` is 0, because None would mean the model's own default.
        """
        off = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
        off |= {"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0}
        return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | off

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
        empty, zero = torch.empty(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        return [
            Support(
                torch.cat([empty, *(step[row] for step in steps[:length])]),
                torch.stack([zero[0], *(step[row] for step in counts[:length])]).cumsum(0),
            )
            for row, length in enumerate(lengths)
        ]


class StopStrings(StoppingCriteria):
    """Ends rows whose completion has a stop string, and counts the tokens up to it.

    transformers' own `stop_strings` look at prompt and completion together. A stop string that
    begins in the prompt would end a completion that does not have it; and as `generate` then pads
    the row, its text alone would not say how many of its tokens were sampled.

    Args:
        tokenizer: the model's.
        stop: strings, any of which ends a completion.
        prompt_length: the number of tokens before the completions, with padding.
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
    """The support of tokens with these kept sets, as an engine that reports them has them."""
    token_ids = torch.tensor([*chain.from_iterable(kept_sets)], dtype=torch.int32)
    return Support(token_ids, torch.tensor([0, *map(len, kept_sets)], dtype=torch.int64).cumsum(0))

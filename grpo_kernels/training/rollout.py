"""Who samples completions: a protocol, and transformers' `generate` behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..layout import to_device as placed
from ..integrations.head import evaluating


@dataclass(frozen=True)
class Sampling:
    """How to sample: `temperature` 0 takes the likeliest word, `top_k` 0 considers all."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """The tokens sampled, up to and including the one that ended it."""

    token_ids: list[int]
    ended: bool  # by an end-of-sequence token or a stop string; else it was cut
    logps: list[float] | None = None  # of the tokens, as the sampler saw them


class Rollout(Protocol):
    """Samples from the policy as it is now: in this process, or on a server.

    A server's implementation sends it the weights first, where they have changed: a step makes one
    call, an evaluation several.
    """

    def __call__(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling
    ) -> list[Completion]:
        """`count` completions of each prompt of token ids, those of a prompt one after another."""
        ...


def pad(
    rows: Sequence[Sequence[int]], value: int, *, left: bool = False, device: Any = None
) -> tuple[Tensor, Tensor]:
    """`[B, longest]` ids and their mask, both int64, padded on the right or on the left."""
    longest = max(map(len, rows), default=0)
    ids = torch.full((len(rows), longest), value, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(len(row))
        ids[i, place] = torch.tensor(row, dtype=torch.int64)
        mask[i, place] = 1
    return placed(ids, device), placed(mask, device)


class GenerateRollout:
    """`model.generate`, with the prompt of a group encoded once where the cache allows it.

    `policy` is the wrapped `Policy`: to generate inside its forward is what lets FSDP and ZeRO-3
    gather the weights.
    """

    def __init__(self, policy: Any, tokenizer: Any, *, synced: bool = False) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        # Under sharded weights every process takes part until the last is done.
        self.synced = synced

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling
    ) -> list[Completion]:
        device = next(self.policy.parameters()).device
        ids, mask = pad(prompts, self.tokenizer.pad_token_id, left=True, device=device)
        options: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "pad_token_id": self.tokenizer.pad_token_id,
            # A model's own default may differ; then the samples would not be the policy's.
            "repetition_penalty": 1.0,
            "do_sample": sampling.temperature > 0,
            "synced_gpus": self.synced,
        }
        if sampling.temperature > 0:
            options |= {"temperature": sampling.temperature, "top_k": sampling.top_k}
            options |= {"top_p": sampling.top_p, "min_p": sampling.min_p or None}
        if sampling.stop:
            options |= {"stop_strings": list(sampling.stop), "tokenizer": self.tokenizer}
        with evaluating(self.policy):
            output, eos = self.policy("generate", ids, mask, count, options)
        rows = output[:, ids.shape[1] :].tolist()
        return [completion(row, eos, sampling, self.tokenizer) for row in rows]


# Prompts that are encoded together, in continuous batching.
_LEAST_BATCH_TOKENS = 512


class ContinuousBatchingRollout:
    """transformers' continuous batching: rows that end make room for others at once."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if not hasattr(model, "generate_batch"):
            raise ValueError(
                "rollout: expected generate, as this version of transformers has no continuous "
                "batching for this model; got continuous_batching"
            )
        self.model = model
        self.tokenizer = tokenizer

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling
    ) -> list[Completion]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        eos = end_tokens(self.model)
        options: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if sampling.temperature > 0:
            options |= {"temperature": sampling.temperature, "top_k": sampling.top_k}
            options |= {"top_p": sampling.top_p}
        generation = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens, eos_token_id=eos,
            pad_token_id=self.tokenizer.pad_token_id, **options,
        )  # fmt: skip
        inputs = [list(prompt) for prompt in prompts for _ in range(count)]
        # Room for all of them: else it would take what memory there is, which training needs.
        longest = max(map(len, inputs)) + sampling.max_new_tokens
        batching = ContinuousBatchingConfig()
        # Shapes change from step to step, and what graphs hold training needs.
        batching.use_cuda_graph = False
        # What versions before 5.23 call its size.
        page = getattr(batching, "page_size", None) or batching.block_size
        batching.num_blocks = len(inputs) * (-(-longest // page) + 1)
        batching.max_batch_tokens = max(_LEAST_BATCH_TOKENS, len(inputs))
        with evaluating(self.model):
            results = self.model.generate_batch(
                inputs, generation_config=generation, continuous_batching_config=batching
            )
        # By request, in the order of their numbers.
        ordered = sorted(results.items(), key=lambda item: int(item[0].rsplit("_", 1)[-1]))
        if len(ordered) != len(inputs):
            raise RuntimeError(f"expected {len(inputs)} completions; got {len(ordered)}")
        return [
            completion(list(result.generated_tokens), eos, sampling, self.tokenizer)
            for _, result in ordered
        ]


def end_tokens(model: Any) -> list[int]:
    """The tokens that end a completion; a model may have several."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def completion(
    row: Sequence[int], eos: Sequence[int], sampling: Sampling, tokenizer: Any
) -> Completion:
    """What counts of a row that may be padded: up to the first end, be it a token or a string."""
    ends = set(eos)
    length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
    ended = length > 0 and row[length - 1] in ends
    if sampling.stop:
        stopped = _stopped_after(row[:length], sampling.stop, tokenizer)
        if stopped is not None:
            length, ended = stopped, True
    return Completion(list(row[:length]), ended)


def _stopped_after(row: Sequence[int], stop: Sequence[str], tokenizer: Any) -> int | None:
    """The smallest number of tokens whose text has a stop string; by halving, as texts grow."""

    def stops(length: int) -> bool:
        text = tokenizer.decode(row[:length], skip_special_tokens=False)
        return any(string in text for string in stop)

    if not stops(len(row)):
        return None
    low, high = 0, len(row)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stops(middle) else (middle, high)
    return high

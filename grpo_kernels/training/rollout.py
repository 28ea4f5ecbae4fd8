"""Sampling of completions: the `Rollout` protocol, and one by `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from ..base.layout import to_device
from ..base.memory import ran_out_of_memory
from ..head.lm_head import Support
from ..integrations.hf_head import evaluating
from .interruptions import StepError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options: `temperature` 0 takes the likeliest token, `top_k` 0 considers all."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    record_support: bool = False  # whether `Completion.support` is wanted


@dataclass(frozen=True)
class Completion:
    """The tokens after a prompt, up to and including the one that ended them.

    With `sampled`, some are not the policy's: what a tool answered, say. The model sees them, and
    nothing else does: they are in no loss, and in no metric of the policy.
    """

    token_ids: list[int]
    ended: bool  # by an end-of-sequence token or a stop string; else it was cut
    logps: list[float] | None = None  # one per token, under the policy that sampled
    # What `top_k`, `top_p` and `min_p` kept of each token, on a CPU; None: the whole vocabulary.
    # Tensors have no == to one bool.
    support: Support | None = field(default=None, compare=False)
    sampled: list[bool] | None = None  # one per token: whether the policy sampled it; None: all
    # Weights of a cross-entropy on tokens, one per token: loss -= sum(weight * log-prob) over the
    # number of the update's sampled tokens. None: 0 each.
    ce_weights: list[float] | None = None


class RolloutError(StepError, ValueError):
    """A rollout that cannot go on, or that returned what are no completions."""


class Rollout(Protocol):
    """Samples from the policy as it is now, in this process or on a server."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams
    ) -> list[Completion]:
        """`count` completions per prompt, given as token ids; those of a prompt are neighbors."""
        ...


class KeepsWeights(Rollout, Protocol):
    """A rollout with a copy of the weights."""

    def update_weights(self) -> None:
        """Takes the policy's.

        The trainer calls it, in every process, after the weights have changed and before
        completions are sampled.
        """


class ExplainsGap(Rollout, Protocol):
    """A rollout whose log-probs are to be the policy's, or nothing is trained on its samples."""

    @property
    def why_gap(self) -> str | None:
        """The dtype that explains a gap, as torch calls it; None: any gap is explained."""
        ...


def keeps_weights(rollout: Rollout) -> TypeGuard[KeepsWeights]:
    """True if it does, or hands on the parts of one that does."""
    return hasattr(rollout, "update_weights")


def explains_gap(rollout: Rollout) -> TypeGuard[ExplainsGap]:
    """True if it does, or hands on the parts of one that does."""
    return hasattr(rollout, "why_gap")


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
    return to_device(ids, device), to_device(mask, device)


class GenerateRollout:
    """`model.generate`, which encodes the prompt of a group once where the cache allows it."""

    def __init__(self, policy: Any, tokenizer: Any) -> None:
        self.policy, self.tokenizer = policy, tokenizer

    def __call__(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams
    ) -> list[Completion]:
        try:
            return self._sample(prompts, count, sampling)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            raise RolloutError(
                f"memory ran out while sampling {len(prompts) * count} completions: lower "
                "prompts_per_step, num_generations or max_completion_length"
            ) from error

    @torch.no_grad()
    def _sample(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams
    ) -> list[Completion]:
        device = next(self.policy.parameters()).device
        ids, mask = pad(prompts, self.tokenizer.pad_token_id, left=True, device=device)
        options: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "pad_token_id": self.tokenizer.pad_token_id,
            "do_sample": sampling.temperature > 0,
        }
        if sampling.temperature > 0:
            options |= {"temperature": sampling.temperature, "top_k": sampling.top_k}
            options |= {"top_p": sampling.top_p, "min_p": sampling.min_p or None}
        if sampling.stop:
            options |= {"stop_strings": list(sampling.stop), "tokenizer": self.tokenizer}
        recorder = None
        if sampling.record_support:
            from ..integrations.generation import SupportRecorder

            recorder = SupportRecorder(
                sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
            )
            options |= recorder.generate_options() | {"logits_processor": [recorder]}
        with evaluating(self.policy):
            output, eos = self.policy("generate", ids, mask, count, options, self.tokenizer)
        rows = output[:, ids.shape[1] :].tolist()
        done = [completion(row, eos, sampling, self.tokenizer) for row in rows]
        if recorder is None:
            return done
        supports = recorder.supports([len(c.token_ids) for c in done])
        return [replace(c, support=s) for c, s in zip(done, supports, strict=True)]


def sampled_ids(one: Completion) -> list[int]:
    """The tokens of a completion that the policy sampled."""
    if one.sampled is None:
        return one.token_ids
    return [token for token, own in zip(one.token_ids, one.sampled, strict=True) if own]


def vocabulary_of(model: Any) -> int:
    """The size of the model's vocabulary."""
    embeddings = model.get_input_embeddings()
    return int(getattr(embeddings, "base_layer", embeddings).num_embeddings)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a completion: the model's, which may have several, and the tokenizer's.

    A chat template may end a turn with a token that the model's `generation_config` lacks.
    """
    found: list[int] = []
    for eos in (model.generation_config.eos_token_id, getattr(tokenizer, "eos_token_id", None)):
        found += [] if eos is None else [eos] if isinstance(eos, int) else eos
    return [*dict.fromkeys(found)]


def completion(
    row: Sequence[int], eos: Sequence[int], sampling: SamplingParams, tokenizer: Any
) -> Completion:
    """Cuts a row, which may be padded, after its first end: a token, or a stop string."""
    ends = set(eos)
    length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
    ended = length > 0 and row[length - 1] in ends
    if sampling.stop:
        stopped = _stopped_after(row[:length], sampling.stop, tokenizer)
        if stopped is not None:
            length, ended = stopped, True
    return Completion(list(row[:length]), ended)


def _stopped_after(row: Sequence[int], stop: Sequence[str], tokenizer: Any) -> int | None:
    """The smallest number of tokens whose text has a stop string, by bisection."""

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

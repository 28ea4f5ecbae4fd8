"""Records of sampling, `SamplingParams` and `Completion`, and checks of completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor

from ...base.layout import to_device
from ...head.lm_head import Support
from ...head.support import check_support
from ..config import TrainingConfig
from ..run.interruptions import StepError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options: `temperature` 0 takes the likeliest token, `top_k` 0 considers all."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()  # searched in the completion, not in the prompt
    record_support: bool = False  # asks for `Completion.support`


@dataclass(frozen=True)
class Completion:
    """The tokens after a prompt, up to and including the end token.

    With `sampled`, some are not the policy's, such as a tool's output. They are inputs of the
    model, but in no loss and in no metric of the policy.
    """

    token_ids: list[int]
    ended: bool  # by an end-of-sequence token or a stop string; else it was cut
    logps: list[float] | None = None  # one per token, under the policy that sampled
    # The ids that `top_k`, `top_p` and `min_p` kept for each token, on a CPU; None: all ids.
    # Not compared, as == of tensors is no bool.
    support: Support | None = field(default=None, compare=False)
    sampled: list[bool] | None = None  # one per token: whether the policy sampled it; None: all
    # Weights of a cross-entropy on tokens, one per token: loss -= sum(weight * log-prob) over the
    # number of the update's sampled tokens. None: 0 each.
    ce_weights: list[float] | None = None

    @property
    def sampled_flags(self) -> list[bool]:
        """True for each token that the policy sampled."""
        return [True] * len(self.token_ids) if self.sampled is None else self.sampled

    @property
    def sampled_ids(self) -> list[int]:
        pairs = zip(self.token_ids, self.sampled_flags, strict=True)
        return [token for token, sampled in pairs if sampled]

    def joined(self, written: Sequence[int], more: Completion) -> Completion:
        """Returns this completion, then tokens of a tool, then the completion `more`.

        Log-probs and supports are set if both completions have them; `ce_weights` are not set.
        """
        gap, support = len(written), None
        logps = self.logps and more.logps and [*self.logps, *[0.0] * gap, *more.logps]
        if self.support is not None and more.support is not None:
            (kept, offsets), (last_kept, last) = self.support, more.support
            no_set = offsets[-1:].expand(gap)
            offsets = torch.cat([offsets, no_set, offsets[-1] + last[1:]])
            support = Support(torch.cat([kept, last_kept]), offsets)
        return Completion(
            [*self.token_ids, *written, *more.token_ids], more.ended, logps, support,
            [*self.sampled_flags, *[False] * gap, *more.sampled_flags],
        )  # fmt: skip


class RolloutError(StepError, ValueError):
    """Error of a rollout: it raised, or did not return valid completions."""


def check_completion(name: str, one: object, vocabulary: int, longest: int) -> None:
    """Checks that an object is a completion of 1 to `longest` tokens below `vocabulary`.

    Raises:
        RolloutError: it is not; the message begins with `name`.
    """
    if not isinstance(one, Completion) or not one.token_ids:
        raise RolloutError(f"{name}: expected a Completion with a token; got {one!r}")
    T = len(one.token_ids)
    is_id = partial(_passes, lambda token: 0 <= index(token) < vocabulary)
    if unknown := [token for token in one.token_ids if not is_id(token)]:
        raise RolloutError(
            f"{name}.token_ids: expected ints from 0 to {vocabulary - 1}; got {unknown[0]!r}"
        )
    if longest < T:
        raise RolloutError(
            f"{name}.token_ids: expected at most max_completion_length = {longest} tokens, "
            f"tool output included; got {T}"
        )
    for what, numbers in (("logps", one.logps), ("ce_weights", one.ce_weights)):
        bad = [x for x in numbers or () if not _passes(math.isfinite, x)]
        if numbers is not None and (len(numbers) != T or bad):
            raise RolloutError(
                f"{name}.{what}: expected {T} finite numbers, one per token; got "
                f"{bad[:5] or numbers[:5]}, {len(numbers)} in all"
            )
    flags = one.sampled_flags
    if len(flags) != T or not any(flags) or not {*map(type, flags)} <= {bool}:
        raise RolloutError(
            f"{name}.sampled: expected {T} bools, one per token, at least one True; got "
            f"{list(flags)[:5]}, {len(flags)} in all"
        )
    if one.support is not None:
        try:
            _check_offsets(f"{name}.support", one.support, T)
        except (ValueError, TypeError) as error:
            raise RolloutError(str(error)) from error


def _check_offsets(name: str, support: object, T: int) -> None:
    """Checks that a support is one of `T` tokens, on a CPU."""
    ids, offsets = check_support(support, T, torch.device("cpu"), name)
    first, last, K = int(offsets[0]), int(offsets[-1]), len(ids)
    if first or last != K or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"{name}.offsets: expected to start at 0, never to decrease, and to end at the number "
            f"of token_ids = {K}; got {first} to {last}"
        )


def _passes(check: Callable[[Any], bool], number: Any) -> bool:
    """True for a number that passes a check; False for a bool or anything else."""
    try:
        return not isinstance(number, bool) and check(number)
    except (TypeError, ValueError):
        return False


def pad(
    rows: Sequence[Sequence[int]], value: int, *, left: bool = False, device: Any = None
) -> tuple[Tensor, Tensor]:
    """Pads rows to `[B, longest]` ids and their mask, both int64, on the right or on the left."""
    longest = max(map(len, rows), default=0)
    ids = torch.full((len(rows), longest), value, dtype=torch.int64, device="cpu")
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(len(row))
        ids[i, place] = ids.new_tensor(row)
        mask[i, place] = 1
    return to_device(ids, device), to_device(mask, device)


def check_has_logps(config: TrainingConfig, has_logps: bool) -> None:
    """Refuses a correction that needs log-probs which the rollout does not report."""
    if config.is_correction != "none" and not has_logps:
        raise ValueError(
            f"is_correction={config.is_correction!r} needs log-probs of the sampler, and this "
            "rollout returns none: set is_correction to none"
        )


def vocabulary_of(model: Any) -> int:
    embeddings = model.get_input_embeddings()
    return int(getattr(embeddings, "base_layer", embeddings).num_embeddings)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Returns the tokens that end a completion: the model's, one or several, and the tokenizer's.

    A chat template may end a turn with a token that the model's `generation_config` lacks.
    """
    ends: list[int] = []
    for eos in (model.generation_config.eos_token_id, getattr(tokenizer, "eos_token_id", None)):
        ends += [] if eos is None else [eos] if isinstance(eos, int) else eos
    return [*dict.fromkeys(ends)]


def cut_completion(
    row: Sequence[int], eos: Sequence[int], sampling: SamplingParams, tokenizer: Any, *,
    stopped: bool = False,
) -> Completion:  # fmt: skip
    """Cuts a row after the first end token or stop string.

    `stopped`: the sampler ended the row at a stop string, which the decoded row may lack.
    """
    ends = set(eos)
    length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
    ended = stopped or (length > 0 and row[length - 1] in ends)
    if sampling.stop:
        cut = _stopped_after(row[:length], sampling.stop, tokenizer)
        if cut is not None:
            length, ended = cut, True
    return Completion(list(row[:length]), ended)


def _stopped_after(row: Sequence[int], stop: Sequence[str], tokenizer: Any) -> int | None:
    """Finds the smallest number of tokens whose text has a stop string, by bisection."""

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

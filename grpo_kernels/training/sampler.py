"""`Sampler`: completions of problems by a rollout, checked, and as texts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from accelerate import Accelerator

from ..head.support import check_support
from . import ranks
from .config import TrainingConfig
from .data import Problem, PromptEncoder
from .rollout import (
    Completion,
    Rollout,
    RolloutError,
    SamplingParams,
    explains_gap,
    keeps_weights,
    sampled_ids,
)


class Sampler:
    """Samples completions of problems by a rollout, and checks what comes back.

    `vocabulary`: its size, below which a token's id is. `ends`: the policy's end tokens.
    """

    ends: Sequence[int] = ()

    def __init__(
        self, rollout: Rollout, encode: PromptEncoder, config: TrainingConfig,
        accelerator: Accelerator, vocabulary: int, ends: Sequence[int],
    ) -> None:  # fmt: skip
        self.rollout, self.encode, self.config = rollout, encode, config
        self.accelerator, self.vocabulary, self.ends = accelerator, vocabulary, ends
        self._sync_seconds = 0.0
        self._stale = True

    def weights_changed(self) -> None:
        """Notes that a rollout with a copy of the weights needs them again."""
        self._stale = True

    def update_weights(self) -> None:
        """Has the rollout take the weights if they have changed; every process calls it."""
        if self._stale and keeps_weights(self.rollout):
            start = time.perf_counter()
            self.rollout.update_weights()
            self._sync_seconds += time.perf_counter() - start
        self._stale = False

    @property
    def why_gap(self) -> str | None:
        """The dtype that explains a gap to the rollout's log-probs; None: any gap is explained."""
        return self.rollout.why_gap if explains_gap(self.rollout) else None

    def take_sync_seconds(self) -> float:
        """Seconds that the rollout took for weights since this was last asked for."""
        seconds, self._sync_seconds = self._sync_seconds, 0.0
        return seconds

    def __call__(
        self, problems: Sequence[Problem], count: int, temperature: float, *,
        record_support: bool = False, length: int | None = None,
    ) -> list[Completion]:  # fmt: skip
        """`count` completions per problem; those of a problem are neighbors.

        `length`: tokens of each, at most; None: `max_completion_length`.

        Raises:
            RolloutError: in all processes, whatever the rollout raised or returned in one.
        """
        c = self.config
        length = length or c.max_completion_length
        sampling = SamplingParams(
            length, temperature, c.top_k, c.top_p, c.min_p, tuple(c.stop),
            record_support=record_support,
        )  # fmt: skip
        self.update_weights()
        prompts = [self.encode(problem) for problem in problems]
        with ranks.raise_on_all_ranks(self.accelerator, RolloutError, others="rollout: "):
            with self.accelerator.autocast():
                done = list(self.rollout(prompts, count, sampling))
            self._check(done, len(prompts), count, length)
        return done

    def _check(self, done: Sequence[Completion], prompts: int, count: int, most: int) -> None:
        """Refuses what are not `count` completions of each of so many prompts."""
        if len(done) != prompts * count:
            raise RolloutError(
                f"rollout: expected {count * prompts} completions in one list, {count} of each "
                f"of {prompts} prompts; got {len(done)}"
            )
        for i, one in enumerate(done):
            name, ids = f"rollout: completions[{i}]", getattr(one, "token_ids", None)
            if not isinstance(one, Completion) or not ids:
                raise RolloutError(f"{name}: expected a Completion with a token; got {one!r}")
            wrong = next((x for x in ids if not _is_below(x, self.vocabulary)), None)
            if wrong is not None:
                raise RolloutError(
                    f"{name}.token_ids: expected ints from 0 to {self.vocabulary - 1}; got "
                    f"{wrong!r}"
                )
            if len(ids) > most:
                raise RolloutError(
                    f"{name}.token_ids: expected at most max_completion_length = {most}, whoever "
                    f"they are from; got {len(ids)}"
                )
            for what, numbers in (("logps", one.logps), ("ce_weights", one.ce_weights)):
                if numbers is not None and (
                    len(numbers) != len(ids) or not all(map(_is_finite, numbers))
                ):
                    raise RolloutError(
                        f"{name}.{what}: expected {len(ids)} finite numbers, one per token; got "
                        f"{[x for x in numbers if not _is_finite(x)][:5] or numbers[:5]}, "
                        f"{len(numbers)} in all"
                    )
            flags = one.sampled
            if flags is not None and (
                len(flags) != len(ids) or not any(flags) or not {*map(type, flags)} <= {bool}
            ):
                raise RolloutError(
                    f"{name}.sampled: expected {len(ids)} bools, one per token, and one that is "
                    f"true; got {list(flags)[:5]}, {len(flags)} in all"
                )
            if one.support is not None:
                try:
                    _check_support(f"{name}.support", one.support, len(ids))
                except (ValueError, TypeError) as error:
                    raise RolloutError(str(error)) from error

    def texts(self, completions: Sequence[Completion], *, whole: bool = False) -> list[str]:
        """Decodes what the policy wrote, with `whole` what it was given between, too.

        Without special tokens that end, begin or pad it. Others are text: a tokenizer may have
        `<think>` among them.
        """
        tokenizer = self.encode.tokenizer
        known = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, *self.ends)
        left_out = {
            x
            for x in known
            if x is not None and not tokenizer.decode([x], skip_special_tokens=True)
        }
        rows = [c.token_ids if whole else sampled_ids(c) for c in completions]
        return list(tokenizer.batch_decode([[x for x in row if x not in left_out] for row in rows]))

    def beside(self, completions: Sequence[Completion], texts: list[str]) -> dict[str, list[Any]]:
        """Arguments that a reward function may name beside the texts of completions."""
        whole = any(c.sampled is not None for c in completions)
        return {
            "transcripts": self.texts(completions, whole=True) if whole else texts,
            "completion_ids": [sampled_ids(c) for c in completions],
        }


def _check_support(name: str, support: object, T: int) -> None:
    """Refuses what are not the supports of `T` tokens, on a CPU."""
    ids, offsets = check_support(support, T, torch.device("cpu"), name)
    first, last, K = int(offsets[0]), int(offsets[-1]), len(ids)
    if first or last != K or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"{name}.offsets: expected to start at 0, never to decrease, and to end at the number "
            f"of token_ids = {K}; got {first} to {last}"
        )


def _is_below(token: Any, count: int) -> bool:
    try:
        return not isinstance(token, bool) and 0 <= index(token) < count
    except TypeError:
        return False


def _is_finite(number: Any) -> bool:
    try:
        return not isinstance(number, bool) and math.isfinite(number)
    except (TypeError, ValueError):
        return False

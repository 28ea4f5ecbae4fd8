"""Sampling of completions: the `Rollout` protocol, and one by `model.generate`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Protocol, TypeGuard

import torch
from accelerate import Accelerator
from torch import Tensor

from ..base.checks import check_tensor
from ..base.layout import to_device
from ..head.lm_head import Support
from ..head.plan import ran_out_of_memory
from ..integrations.hf_head import evaluating
from . import ranks
from .config import TrainingConfig
from .data import Problem, PromptEncoder
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
    """`model.generate`, which encodes the prompt of a group once where the cache allows it.

    `policy` is the wrapped `Policy`: FSDP and ZeRO-3 gather weights around its forward only, so
    generation happens inside it.
    """

    def __init__(self, policy: Any, tokenizer: Any, *, synced: bool = False) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        # With sharded weights every process takes part until the last is done.
        self.synced = synced

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
            "synced_gpus": self.synced,
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
                f"rollout: expected {count} completions of {prompts} prompts; got {len(done)}"
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
                    check_support(f"{name}.support", one.support, len(ids))
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
        """What a reward function may name beside the texts of completions."""
        whole = any(c.sampled is not None for c in completions)
        return {
            "transcripts": self.texts(completions, whole=True) if whole else texts,
            "completion_ids": [sampled_ids(c) for c in completions],
        }


def sampled_ids(one: Completion) -> list[int]:
    """The tokens of a completion that the policy sampled."""
    if one.sampled is None:
        return one.token_ids
    return [token for token, own in zip(one.token_ids, one.sampled, strict=True) if own]


def check_support(name: str, support: object, T: int) -> None:
    """Refuses what are not the supports of `T` tokens.

    Raises:
        ValueError, TypeError: names what was expected and what came.
    """
    if not isinstance(support, Support):
        raise TypeError(f"{name}: expected a Support; got {type(support).__name__}")
    integers, cpu = (torch.int32, torch.int64), torch.device("cpu")
    ids = check_tensor(f"{name}.token_ids", support.token_ids, dtypes=integers, device=cpu)
    if ids.ndim != 1:
        raise ValueError(f"{name}.token_ids: expected shape [K]; got {list(ids.shape)}")
    offsets = check_tensor(
        f"{name}.offsets", support.offsets, shape=[T + 1], dtypes=integers, device=cpu
    )
    first, last, K = int(offsets[0]), int(offsets[-1]), len(ids)
    if first or last != K or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"{name}.offsets: expected to start at 0, never to decrease, and to end at the number "
            f"of token_ids = {K}; got {first} to {last}"
        )


def vocabulary_of(model: Any) -> int:
    """The size of the model's vocabulary."""
    embeddings = model.get_input_embeddings()
    return int(getattr(embeddings, "base_layer", embeddings).num_embeddings)


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

"""Rollouts: the protocol, one by `model.generate`, and the checks of completions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from operator import index
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from ...base.layout import to_device
from ...base.memory import ran_out_of_memory
from ...head.lm_head import Support
from ...head.support import check_support
from ...integrations.generation import StopStrings, SupportRecorder
from ...integrations.hf_head import evaluating
from ..config import TrainingConfig
from ..problems.data import Problem
from ..problems.prompts import PromptEncoder
from ..run import ranks, user_code
from ..run.interruptions import StepError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options: `temperature` 0 takes the likeliest token, `top_k` 0 considers all."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()  # looked for in the completion alone
    record_support: bool = False  # asks for `Completion.support`


@dataclass(frozen=True)
class Completion:
    """The tokens after a prompt, up to and including the one that ended them.

    With `sampled`, some are not the policy's: what a tool answered, say. The model sees them, and
    nothing else does: they are in no loss, and in no metric of the policy.
    """

    token_ids: list[int]
    ended: bool  # by an end-of-sequence token or a stop string; else it was cut
    logps: list[float] | None = None  # one per token, under the policy that sampled
    # The ids that `top_k`, `top_p` and `min_p` left for each token, on a CPU; None: all ids.
    # Tensors have no == to one bool.
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
        """The tokens that the policy sampled."""
        pairs = zip(self.token_ids, self.sampled_flags, strict=True)
        return [token for token, sampled in pairs if sampled]


class RolloutError(StepError, ValueError):
    """Error of a rollout that cannot go on, or that returned something else than completions."""


class Rollout(Protocol):
    """Samples from the policy as it is now, in this process or on a server.

    A rollout may have two more attributes, or hand on those of the rollout that it wraps:

    - `update_weights()`, if it keeps a copy of the weights: takes the policy's. The trainer calls
      it, in every process, after the weights have changed and before completions are sampled.
    - `why_gap`, if nothing is to be trained on samples whose log-probs are not the policy's: the
      dtype that explains a gap, as torch calls it. None: any gap is explained.
    """

    def __call__(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams
    ) -> list[Completion]:
        """Returns `count` completions per prompt, in one list; those of a prompt are neighbors.

        Prompts are token ids. A rollout with a parameter `problems` gets the problems of the
        prompts by this keyword, as copies.
        """
        ...


class GenerateRollout:
    """Samples by `model.generate`; encodes the prompt of a group once, if the cache allows it."""

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
        truncation = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p or None
        if sampling.temperature > 0:
            options |= zip(("temperature", "top_k", "top_p", "min_p"), truncation, strict=True)
        stop = StopStrings(self.tokenizer, sampling.stop, ids.shape[1]) if sampling.stop else None
        if stop is not None:
            options["stopping_criteria"] = [stop]
        recorder = SupportRecorder(*truncation) if sampling.record_support else None
        if recorder is not None:
            options |= recorder.generate_options() | {"logits_processor": [recorder]}
        with evaluating(self.policy):
            output, eos = self.policy("generate", ids, mask, count, options, self.tokenizer)
        rows = output[:, ids.shape[1] :].tolist()
        lengths = [0] * len(rows) if stop is None else stop.lengths()
        done = [
            # Rows that stop before others are padded.
            cut_completion(row[: n or None], eos, sampling, self.tokenizer, stopped=n > 0)
            for row, n in zip(rows, lengths, strict=True)
        ]
        if recorder is None:
            return done
        supports = recorder.supports([len(c.token_ids) for c in done])
        return [replace(c, support=s) for c, s in zip(done, supports, strict=True)]


class Sampler:
    """Samples completions of problems by a rollout, and checks what comes back.

    Args:
        rollout: may be replaced by another one.
        model: the policy's; says which tokens there are, and which of them end a completion.
        encode: makes the prompts.
        config: has the sampling options.
        accelerator: of the run; every process samples for its own problems.
    """

    def __init__(
        self, rollout: Rollout, model: Any, encode: PromptEncoder, config: TrainingConfig,
        accelerator: Accelerator,
    ) -> None:  # fmt: skip
        self.rollout: Any = rollout
        self.encode, self.config, self.accelerator = encode, config, accelerator
        self.vocabulary = vocabulary_of(model)
        tokenizer = encode.tokenizer
        special = (tokenizer.bos_token_id, tokenizer.pad_token_id, *end_tokens(model, tokenizer))
        self._no_text = {
            x for x in special
            if x is not None and not tokenizer.decode([x], skip_special_tokens=True)
        }  # fmt: skip
        self._stale = True

    def weights_changed(self) -> None:
        """Notes that a rollout with a copy of the weights needs them again."""
        self._stale = True

    def update_weights(self) -> None:
        """Has the rollout take the weights if they have changed; every process calls it."""
        if self._stale and hasattr(self.rollout, "update_weights"):
            with ranks.raise_on_all_ranks(self.accelerator, RolloutError, others="rollout: "):
                user_code.call("rollout", self.rollout.update_weights, RolloutError)
        self._stale = False

    @property
    def why_gap(self) -> str | None:
        """The dtype that explains a gap to the rollout's log-probs; None: any gap is explained."""
        return getattr(self.rollout, "why_gap", None)

    def __call__(
        self, problems: Sequence[Problem], count: int, temperature: float, *,
        record_support: bool = False, length: int | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Returns `count` completions per problem; those of a problem are neighbors.

        `length`: tokens of each, at most; None: `max_completion_length`.

        Raises:
            RolloutError: in all processes, whatever the rollout raised or returned in one.
        """
        c = self.config
        sampling = SamplingParams(
            length or c.max_completion_length, temperature, c.top_k, c.top_p, c.min_p,
            tuple(c.stop), record_support=record_support,
        )  # fmt: skip
        self.update_weights()
        prompts = [self.encode(problem) for problem in problems]
        with ranks.raise_on_all_ranks(self.accelerator, RolloutError, others="rollout: "):
            more: dict[str, Any] = {}
            if "problems" in inspect.signature(self.rollout).parameters:
                more["problems"] = deepcopy(list(problems))
            with self.accelerator.autocast():
                done = user_code.call(
                    "rollout", lambda: list(self.rollout(prompts, count, sampling, **more)),
                    RolloutError,
                )  # fmt: skip
            if len(done) != len(prompts) * count:
                raise RolloutError(
                    f"rollout: expected {count * len(prompts)} completions in one list, {count} of "
                    f"each of {len(prompts)} prompts; got {len(done)}"
                )
            for i, one in enumerate(done):
                name = f"rollout: completions[{i}]"
                check_completion(name, one, self.vocabulary, sampling.max_new_tokens)
        return done

    def texts(self, completions: Sequence[Completion], *, transcripts: bool = False) -> list[str]:
        """Decodes the sampled tokens; for `transcripts` the tokens of tools, too.

        Special tokens that begin, end or pad a completion are left out. Others are text: a
        tokenizer may have `<think>` among them.
        """
        rows = [c.token_ids if transcripts else c.sampled_ids for c in completions]
        rows = [[token for token in row if token not in self._no_text] for row in rows]
        return list(self.encode.tokenizer.batch_decode(rows))


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
            f"those of tools included; got {T}"
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
    """True for a number that passes a check; False for a bool and for what is no number."""
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


def vocabulary_of(model: Any) -> int:
    """Returns the size of the model's vocabulary."""
    embeddings = model.get_input_embeddings()
    return int(getattr(embeddings, "base_layer", embeddings).num_embeddings)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Returns the tokens that end a completion: the model's, which may be several, the tokenizer's.

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

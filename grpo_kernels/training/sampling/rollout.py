"""Rollouts: the protocol, a rollout by `model.generate`, and the sampler of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from ...base.memory import ran_out_of_memory
from ...integrations.generation import StopStrings, SupportRecorder
from ...integrations.hf_head import evaluating
from ..config import TrainingConfig
from ..run import ranks, user_code
from .completions import (
    Completion,
    RolloutError,
    SamplingParams,
    check_completion,
    cut_completion,
    end_tokens,
    pad,
    vocabulary_of,
)


class Rollout(Protocol):
    """Samples from the current policy, in this process or on a server.

    A rollout may have two more attributes, or a wrapped rollout's:

    - `update_weights()`, for a rollout with a copy of the weights: copies the policy's. The trainer
      calls it, in every process, after the weights have changed and before sampling.
    - `sampler_dtype`: the dtype that it samples in, as torch calls it. The run then stops if the
      rollout's log-probs differ from the policy's by more than this dtype's rounding. None: never.
    """

    def __call__(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams
    ) -> list[Completion]:
        """Returns `count` completions per prompt, in one list sorted by prompt.

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
    """Samples completions of a process's problems by a rollout, and checks them.

    `rollout` may be replaced later. `encode` makes the token ids of a problem's prompt.
    """

    def __init__(
        self, rollout: Rollout, model: Any, tokenizer: Any,
        encode: Callable[[Mapping[str, Any]], list[int]], config: TrainingConfig,
        accelerator: Accelerator,
    ) -> None:  # fmt: skip
        self.rollout: Any = rollout
        self.tokenizer, self.encode = tokenizer, encode
        self.config, self.accelerator = config, accelerator
        self.vocabulary = vocabulary_of(model)
        special = (tokenizer.bos_token_id, tokenizer.pad_token_id, *end_tokens(model, tokenizer))
        self._no_text = {
            x for x in special
            if x is not None and not tokenizer.decode([x], skip_special_tokens=True)
        }  # fmt: skip
        self._stale = True

    def weights_changed(self) -> None:
        """Notes that a rollout's copy of the weights is out of date."""
        self._stale = True

    def update_weights(self) -> None:
        """Updates the rollout's copy of the weights if they have changed; all processes call it."""
        if self._stale and hasattr(self.rollout, "update_weights"):
            with ranks.raise_on_all_ranks(self.accelerator, RolloutError):
                user_code.call("rollout", self.rollout.update_weights, RolloutError)
        self._stale = False

    @property
    def sampler_dtype(self) -> str | None:
        """The rollout's dtype, whose rounding explains a gap; None: any gap is allowed."""
        return getattr(self.rollout, "sampler_dtype", None)

    def __call__(
        self, problems: Sequence[Mapping[str, Any]], count: int, temperature: float, *,
        record_support: bool = False, length: int | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Returns `count` completions per problem, sorted by problem.

        `length`: the largest number of tokens of each; None: `max_completion_length`.

        Raises:
            RolloutError: the rollout failed in one process; raised in all.
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

    def decoded(self, completions: Sequence[Completion]) -> dict[str, list[Any]]:
        """The keyword arguments of `judge` for these completions."""
        texts = transcripts = self.texts(completions)
        if any(c.sampled is not None for c in completions):
            transcripts = self.texts(completions, transcripts=True)
        ids = [c.sampled_ids for c in completions]
        return {"texts": texts, "transcripts": transcripts, "completion_ids": ids}

    def texts(self, completions: Sequence[Completion], *, transcripts: bool = False) -> list[str]:
        """Decodes the sampled tokens; for `transcripts` the tokens of tools, too.

        Special tokens that begin, end or pad a completion are dropped. Others are text, as a
        tokenizer may have `<think>` among them.
        """
        rows = [c.token_ids if transcripts else c.sampled_ids for c in completions]
        rows = [[token for token in row if token not in self._no_text] for row in rows]
        return list(self.tokenizer.batch_decode(rows))

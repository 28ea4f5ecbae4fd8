"""Deals completions to the micro-batches of TRL, and skips some in the model's calls.

A completion of advantage 0 has no gradient if only the advantages make one. TRL samples, rewards
and splits as before. Once per generation batch the `Dealer` then rewrites the micro-batches of each
optimizer step: it sorts their completions, the trained ones first, the longest of these before the
others; masks the rest; and cuts each micro-batch to its longest completion. TRL pads every
micro-batch to the longest completion of the generation batch.

TRL's loss still gets all rows, so that denominators, collectives and metrics per row stay the same.
Only the call of the model gets fewer rows (`_SmallerCall`).

**Why it is exact.** Completions may be exchanged within an optimizer step if their weight is the
same in all its micro-batches. That holds for every loss of TRL except `bnpo`, which divides by the
tokens of a micro-batch. `gcd(gradient_accumulation_steps, steps_per_generation)` micro-batches, a
window, are always of one optimizer step: both numbers are multiples of it, and so is the number of
micro-batches of an epoch, after which an optimizer step ends early.

**When a micro-batch has nothing to compute.** DDP sends buffers in the first forward of a step,
FSDP gathers weights in each forward, and the last backward reduces gradients: a process without
these calls would hang the others. So the model is called, with one masked row, unless no process
has anything to compute and no gradients are to be reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from ...loss.losses import Loss
from ..private import trl_part
from .loss import config_of
from .micro_batch import ModelCall, TRLLoss, loss_of
from .replay import KEY as SUPPORT
from .state import options_of

# The key of a micro-batch under which its `ComputedRows` travel.
_COMPUTED = "grpo_kernels_computed_rows"
_PROMPT = ("prompt_ids", "prompt_mask")
# Tensors of models of images and text that have no row per completion.
_IMAGES = {"pixel_values", "num_images", "image_grid_thw", "token_type_ids", "mm_token_type_ids"}


class _Row(NamedTuple):
    """Numbers of a completion, read from the device."""

    trained: int  # 1 with a gradient, else 0
    length: int  # up to the last token that is attended to
    tokens: int  # that are unmasked


@dataclass
class ComputedRows:
    """The rows of a micro-batch that go through the model; all others are masked."""

    rows: list[int]  # the first, masked row if there is no other
    index: Tensor  # `rows` on the device
    batch_size: int
    empty: bool
    needs_call: bool  # even if it is empty
    by_tokens: bool  # the loss divides by the tokens of the micro-batch
    share: float  # of the rows, or of the tokens, that the loss divides by
    in_no_process: bool  # the micro-batches of all processes are empty

    def of(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The values of these rows alone."""
        return {name: _select(x, self.rows, self.index) for name, x in inputs.items()}

    def spread(self, x: Tensor, others: Tensor) -> Tensor:
        """Puts the rows' values `[n, T]` into the other rows' values, `[B, T]`."""
        return others.index_copy(0, self.index, x)


class _SmallerCall(ModelCall):
    """Calls the model with some of the rows that TRL passes, and returns values for all."""

    def __init__(self, call: Any, computed: ComputedRows, old_logps: Tensor) -> None:
        self.call, self.computed, self.old_logps = call, computed, old_logps

    def __call__(self, **inputs: Any) -> Any:
        computed, length = self.computed, self.old_logps.shape[1]
        inputs = computed.of(inputs)
        if computed.empty:  # one token of the prompt is enough
            inputs = {
                name: x[:, -length - 1 :] if isinstance(x, Tensor) else x
                for name, x in inputs.items()
            }
        out = self.call(**inputs)
        return SimpleNamespace(
            log_probs=computed.spread(out.log_probs, self.old_logps),
            entropy=computed.spread(out.entropy, torch.zeros_like(self.old_logps)),
        )


class _NoCall(ModelCall):
    """Returns values for rows that are all masked, whose backward reaches no weight."""

    def __init__(self, old_logps: Tensor) -> None:
        self.old_logps = old_logps

    def __call__(self, **_: Any) -> Any:
        zeros = torch.zeros_like(self.old_logps)
        return SimpleNamespace(log_probs=self.old_logps.clone().requires_grad_(), entropy=zeros)


class Dealer:
    """Deals the completions of a trainer's generation batches to micro-batches.

    Fully masked completions are skipped; with `skips`, also completions of advantage 0.
    """

    def __init__(self, skips: bool) -> None:
        self.skips, self.option = skips, "skip_untrained=True" if skips else "sort_by_length=True"
        self._dealt: list[dict[str, Any]] | None = None  # the last generation batch

    def check(self, trainer: Any) -> None:
        """Raises ValueError for a loss whose gradient exchanging or skipping rows changes."""
        user_loss, cls = options_of(trainer).loss, _class_with_own_loss(trainer)
        loss = None if user_loss is None else config_of(trainer, 1).loss
        name = "" if cls is None else cls.__name__
        reasons = [
            (trl_part(trainer, "_entropy_bonus_enabled"),
             "an entropy bonus, a mean over the tokens of a micro-batch: set entropy_coef=0.0"),
            (trainer.aux_loss_enabled, "the load-balancing loss of a mixture of experts, which "
             "is over all tokens of a micro-batch: set router_aux_loss_coef=0.0"),
            (trainer.top_entropy_quantile < 1, "top_entropy_quantile < 1, which looks at all "
             "completions of a micro-batch: set top_entropy_quantile=1.0"),
            (loss is not None and not (loss.token_local or loss.needs_sequences),
             "a loss that may look at other completions: declare token_local or needs_sequences"),
            (cls is not None and not getattr(cls, "gradient_needs_advantage", False),
             f"{name}, whose loss may use the completions that are left out or moved: set "
             f"gradient_needs_advantage = True on {name} if it does not"),
            (self.skips and trainer.beta, "beta > 0, as a KL has a gradient for every token: set "
             "beta=0.0, or pass sort_by_length=True instead"),
            (self.skips and loss is not None and not loss.gradient_needs_advantage,
             "a loss that may have a gradient where the advantage is 0: declare "
             "gradient_needs_advantage"),
            (not self.skips and _divides_by_tokens_of_micro_batch(trainer),
             "bnpo, which divides by the tokens of a micro-batch: pass another loss_type"),
        ]  # fmt: skip
        for wrong, what in reasons:
            if wrong:
                raise ValueError(f"{self.option} does not work with {what}")

    def next_micro_batch(self, inner: Any, trainer: Any, generation_batch: Any) -> dict[str, Any]:
        """Returns TRL's next micro-batch; deals the micro-batches of a new generation batch."""
        inputs: dict[str, Any] = inner(generation_batch)
        batches = trl_part(trainer, "_buffered_inputs")
        if not trainer.model.training or batches is self._dealt:
            return inputs
        batches = self._dealt = trainer._buffered_inputs = self.deal(trainer, batches)
        return batches[trainer._step % trainer.args.steps_per_generation]

    def deal(self, trainer: Any, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        accelerator, count = trainer.accelerator, len(batches)
        if images := _IMAGES & batches[0].keys():
            raise ValueError(
                f"{self.option} does not work with {min(images)}, which has no row per completion: "
                "leave the option out, or for text pass a tokenizer as processing_class"
            )
        by_tokens = _divides_by_tokens_of_micro_batch(trainer)
        window = math.gcd(trainer.args.gradient_accumulation_steps, count)
        size = 1 if by_tokens else window
        numbers = torch.stack([self._numbers(batch) for batch in batches])[None]
        # One transfer to the host: three numbers per completion of all processes.
        hands = [_dealt(process, size) for process in accelerator.gather(numbers).tolist()]
        empty = [[not any(row.trained for _, row in hand) for hand in hands_] for hands_ in hands]
        in_no_process = [all(process[i] for process in empty) for i in range(count)]
        local_hands, parts = hands[accelerator.process_index], []
        for i, hand in enumerate(local_hands):
            rows = [k for k, (_, row) in enumerate(hand) if row.trained]
            share = max(1, len(rows)) / len(hand)
            if by_tokens:
                tokens = sum(row.tokens for _, row in hand)
                share = sum(row.tokens for _, row in hand if row.trained) / max(1, tokens)
            start = i // window * window
            nothing = all(empty[accelerator.process_index][start : start + window])
            needs_call = _needs_call(accelerator, in_no_process[i], nothing and i == start)
            parts.append(ComputedRows(
                rows or [0], _index(rows or [0], accelerator.device), len(hand), not rows,
                needs_call, by_tokens, share, in_no_process[i],
            ))  # fmt: skip
        joined = [_joined(batches[start : start + size]) for start in range(0, count, size)]
        pad_to = trainer.pad_to_multiple_of or 1
        return [
            _micro_batch(joined[i // size], hand, pad_to) | {_COMPUTED: parts[i]}
            for i, hand in enumerate(local_hands)
        ]

    def loss(self, inner: TRLLoss, trainer: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Returns TRL's loss of a micro-batch, calling the model with some of its rows."""
        if not trainer.model.training:
            return loss_of(inner, trainer, model, inputs)
        self.check(trainer)  # a callback may have changed an option
        computed: ComputedRows | None = inputs.get(_COMPUTED)
        if computed is None:
            raise ValueError(
                f"{self.option} does not work with a trainer that makes micro-batches itself: "
                f"leave it out, or keep inputs[{_COMPUTED!r}]"
            )
        if computed.by_tokens != _divides_by_tokens_of_micro_batch(trainer):
            raise ValueError(
                f"{self.option} does not work with a loss_type that changes from bnpo, or to it, "
                "between the updates of a generation batch: change it with the next batch"
            )
        inputs = {name: x for name, x in inputs.items() if name != _COMPUTED}
        old_logps = inputs.get("old_per_token_logps")
        if old_logps is None:
            old_logps = torch.zeros_like(inputs["completion_ids"], dtype=torch.float32)
        old_logps = old_logps.float()

        def inner_of_all_rows(call: Any, _: dict[str, Any]) -> Tensor:
            loss = inner(_SmallerCall(call, computed, old_logps), inputs)
            # TRL's denominator lacks the tokens that are masked here.
            return loss * computed.share if computed.by_tokens else loss

        with _metrics_of(trainer, computed):
            if computed.empty and not (computed.needs_call or _reduces(trainer.accelerator)):
                return inner(_NoCall(old_logps), inputs)
            return loss_of(inner_of_all_rows, trainer, model, computed.of(inputs), computed.share)

    def _numbers(self, batch: dict[str, Any]) -> Tensor:
        """The numbers of each completion's `_Row`, `[B, 3]`."""
        attended = batch["completion_mask"]
        mask = attended * batch["tool_mask"] if "tool_mask" in batch else attended
        place = torch.arange(1, attended.shape[1] + 1, device=attended.device)
        tokens = mask.sum(1)
        trained = tokens > 0
        if self.skips:
            trained &= (batch["advantages"] != 0).view(len(tokens), -1).any(1)
        return torch.stack([trained, (attended * place).amax(1), tokens], 1).to(torch.int64)


def zero_equal_groups(trainer: Any, rewards: Tensor, batch: dict[str, Any]) -> dict[str, Any]:
    """Makes the advantages of groups whose rewards are all equal exactly 0.

    The mean of equal rewards may differ from them by rounding; TRL divides the difference by 1e-4.

    `rewards`: by function, of all processes; NaN where one did not apply. `batch`: TRL's generation
    batch of this process.
    """
    x, size = rewards * trainer.reward_weights.to(rewards.device), trainer.num_generations
    if not trainer.model.training:
        size = trainer.num_generations_eval
    if trainer.multi_objective_aggregation == "sum_then_normalize":
        no_reward = x.isnan().all(1, keepdim=True)
        x = x.nansum(1, keepdim=True).masked_fill(no_reward, torch.nan)
    x = x.view(-1, size, x.shape[1])
    highest, lowest = (
        (sign * x).masked_fill(x.isnan(), -torch.inf).amax(1) * sign for sign in (1, -1)
    )
    equal = (highest <= lowest).all(1).repeat_interleave(size)
    advantages = batch["advantages"]
    first = trainer.accelerator.process_index * len(advantages)
    local_equal = equal[first : first + len(advantages)]
    local_equal = local_equal.view(-1, *[1] * (advantages.ndim - 1))
    return batch | {"advantages": advantages.masked_fill(local_equal, 0.0)}


def _class_with_own_loss(trainer: Any) -> type | None:
    """The user's class that overrides the loss, if any."""
    known = ("grpo_kernels.", "trl.trainer.", "transformers.")
    for cls in type(trainer).__mro__:
        overrides = {"_compute_loss", "compute_loss"} & vars(cls).keys()
        if overrides and not cls.__module__.startswith(known):
            return cls
    return None


def _divides_by_tokens_of_micro_batch(trainer: Any) -> bool:
    """True if a token's weight in the loss depends on the other tokens of its micro-batch."""
    loss = options_of(trainer).loss
    name = trainer.loss_type if loss is None else getattr(loss, "aggregation", Loss.aggregation)
    return bool(name == "bnpo")


def _needs_call(accelerator: Any, in_no_process: bool, alone_in_window: bool) -> bool:
    """True if a micro-batch without rows needs a call of the model for the other processes."""
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        # Weights then have gradients of 0: an optimizer skips weights whose gradient is None.
        return alone_in_window
    return not in_no_process or kind == DistributedType.DEEPSPEED  # which counts the backwards


def _reduces(accelerator: Any) -> bool:
    """True in the last micro-batch of an optimizer step of several processes."""
    alone = accelerator.distributed_type == DistributedType.NO
    return bool(accelerator.sync_gradients and not alone)


def _dealt(numbers: list[list[list[int]]], window: int) -> list[list[tuple[int, _Row]]]:
    """The rows of each micro-batch of one process, each with its index in its window."""
    hands, size = [], len(numbers[0])
    for start in range(0, len(numbers), window):
        rows = [_Row(*row) for batch in numbers[start : start + window] for row in batch]
        order = list(enumerate(rows))
        if window > 1:
            order.sort(key=lambda x: (-x[1].trained, -x[1].length))
        hands += [order[k : k + size] for k in range(0, len(order), size)]
    return hands


def _joined(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Puts micro-batches of one generation batch together again."""

    def join(values: Sequence[Any]) -> Any:
        head = values[0]
        if isinstance(head, Tensor):
            return torch.cat(list(values)) if head.ndim else head
        return [x for value in values for x in value] if isinstance(head, list) else head

    return {name: join([batch[name] for batch in batches]) for name in batches[0]}


def _micro_batch(
    window: dict[str, Any], hand: Sequence[tuple[int, _Row]], pad_to: int
) -> dict[str, Any]:
    """Returns these rows of a window, cut to the longest trained one, with the others masked."""
    full, device = window["completion_ids"].shape[1], window["completion_ids"].device
    # TRL takes a width of 1 for one value per sequence.
    longest = max([2, *(row.length for _, row in hand if row.trained)])
    width = math.ceil(longest / pad_to) * pad_to
    rows = [place for place, _ in hand]
    index = _index(rows, device)
    batch = {name: _select(x, rows, index) for name, x in window.items()}
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == full and name not in _PROMPT:
            batch[name] = x[:, :width]
    left_out = _index([not row.trained for _, row in hand], device).bool()
    batch["completion_mask"] = batch["completion_mask"].masked_fill(left_out[:, None], 0)
    if SUPPORT in batch:  # a set that is not read may be longer than the rows are now
        sets = zip(batch[SUPPORT], hand, strict=True)
        batch[SUPPORT] = [x if row.trained else None for x, (_, row) in sets]
    return batch


def _index(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _select(x: Any, rows: Sequence[int], index: Tensor) -> Any:
    """Returns these rows of one of a batch's values; a value without rows as it is."""
    if isinstance(x, list):
        return [x[i] for i in rows]
    return x[index] if isinstance(x, Tensor) and x.ndim else x


@contextmanager
def _metrics_of(trainer: Any, computed: ComputedRows) -> Iterator[None]:
    """Sets TRL's metrics to NaN, which it ignores, if no process has a token in the micro-batch."""
    metrics = trl_part(trainer, "_metrics")["train"]
    before = {name: len(values) for name, values in metrics.items()}
    yield
    if computed.in_no_process:
        for name, values in metrics.items():
            count = len(values) - before.get(name, 0)
            values[len(values) - count :] = [math.nan] * count

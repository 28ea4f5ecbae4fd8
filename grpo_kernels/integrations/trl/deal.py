"""Deals completions to the micro-batches of TRL, and leaves some out of the model's calls.

A completion whose advantage is 0 has no gradient if nothing but the advantages gives it one. TRL
samples, rewards and splits as ever. Once per generation batch the `Dealer` then rewrites TRL's
micro-batches: it exchanges completions between those of one optimizer step, the trained ones first
and the longest of them before the others, masks the rest, and cuts each micro-batch to its longest
completion. TRL pads all of them to the longest one of the generation batch.

TRL's loss still gets all rows, so that its denominators, its collectives and what it gathers per
row stay its own. Only the call of the model gets fewer rows (`_ComputedRows`).

**Why it is exact.** A completion may be exchanged within an optimizer step if its weight is the
same in all micro-batches of that step. Every loss of TRL but `bnpo`, which divides by the tokens
of a micro-batch, has that. `gcd(gradient_accumulation_steps, steps_per_generation)` micro-batches
are always of one optimizer step: both numbers are multiples of it, and so is the number of
micro-batches of an epoch, after which an optimizer step ends early.
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

# The key of a micro-batch under which its `Part` travels.
_PART = "grpo_kernels_part"
_PROMPT = ("prompt_ids", "prompt_mask")
# Each process has all weights.
_DDP = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class _Row(NamedTuple):
    """A completion, as read from the device."""

    trained: int  # 1: it has a gradient
    length: int
    tokens: int  # unmasked ones


@dataclass
class Part:
    """The rows of a micro-batch that go through the model; the others are masked."""

    places: list[int]  # of a micro-batch without any: the first row, which is masked as well
    index: Tensor  # `places` on the device
    rows: int  # of the micro-batch
    empty: bool
    needs_call: bool  # even if it is empty
    in_no_process: bool  # True if the micro-batches of all processes are empty
    share: float  # of the rows, or of the tokens, that the loss divides by

    def of(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The rows' own share of TRL's micro-batch."""
        return {name: _taken(x, self.places, self.index) for name, x in inputs.items()}

    def spread(self, x: Tensor, others: Tensor | None) -> Tensor:
        """Puts the rows' values `[n, T]` among `others`, or among zeros, for all rows."""
        full = x.new_zeros(self.rows, x.shape[1]) if others is None else others.to(x.dtype)
        return full.index_copy(0, self.index, x)


class _ComputedRows(ModelCall):
    """Calls the model with some rows of what TRL calls it with, and returns values for all."""

    def __init__(self, call: Any, part: Part, others: Tensor | None, length: int) -> None:
        self.call, self.part, self.others, self.length = call, part, others, length

    def __call__(self, **inputs: Any) -> Any:
        part = self.part
        inputs = part.of(inputs)
        if part.empty:  # of the prompt one token is enough
            inputs = {
                k: x[:, -self.length - 1 :] if isinstance(x, Tensor) else x
                for k, x in inputs.items()
            }
        out = self.call(**inputs)
        return SimpleNamespace(
            log_probs=part.spread(out.log_probs, self.others),
            entropy=part.spread(out.entropy, None),
        )


class _NoCall(ModelCall):
    """Values for rows that are all masked: zeros, whose backward reaches no weight."""

    def __init__(self) -> None:
        pass

    def __call__(self, **inputs: Any) -> Any:
        labels = inputs["labels"]
        zeros = torch.zeros(labels.shape, device=labels.device, dtype=torch.float32)
        return SimpleNamespace(log_probs=zeros.clone().requires_grad_(), entropy=zeros)


class Dealer:
    """Deals the completions of a trainer's generation batches to micro-batches.

    Args:
        skips: completions of advantage 0 are left out; else only those that are wholly masked.
    """

    def __init__(self, skips: bool) -> None:
        self.skips = skips
        self._dealt: list[dict[str, Any]] | None = None  # the last generation batch

    @property
    def option(self) -> str:
        return "skip_untrained=True" if self.skips else "sort_by_length=True"

    def check(self, trainer: Any) -> None:
        """Raises ValueError for a loss whose gradient another deal, or a smaller one, changes."""
        own = options_of(trainer).loss
        config = None if own is None else config_of(trainer, 1)
        neighbours = "looks at all completions of a micro-batch: "
        reasons = [
            (trl_part(trainer, "_entropy_bonus_enabled"),
             "an entropy bonus, a mean over the tokens of a micro-batch: set entropy_coef=0.0"),
            (trainer.aux_loss_enabled, "the load-balancing loss of a mixture of experts, which "
             f"{neighbours}set router_aux_loss_coef=0.0"),
            (trainer.top_entropy_quantile < 1,
             f"top_entropy_quantile < 1, which {neighbours}set top_entropy_quantile=1.0"),
            (trl_part(trainer, "_is_vlm"), "images, whose tensors have no row per completion"),
            (config is not None and not (config.loss.token_local or config.loss.needs_sequences),
             "a loss that may look at other completions: declare token_local or needs_sequences"),
        ]  # fmt: skip
        if self.skips:
            reasons += [
                (trainer.beta, "beta > 0, as a KL has a gradient for every token: set beta=0.0, or "
                 "pass sort_by_length=True instead"),
                (config is not None and not config.loss.gradient_needs_advantage,
                 "a loss that may have a gradient where the advantage is 0: declare "
                 "gradient_needs_advantage"),
            ]  # fmt: skip
        elif _divides_by_neighbours(trainer):
            reasons.append((True, "bnpo, which divides by the tokens of a micro-batch"))
        cls = _overriding(trainer)
        if cls is not None and not getattr(cls, "gradient_needs_advantage", False):
            reasons.append((True, f"{cls.__name__}._compute_loss, which may use the completions "
                            "that are left out or moved: set gradient_needs_advantage = True on "
                            f"{cls.__name__} if it does not"))  # fmt: skip
        for wrong, what in reasons:
            if wrong:
                raise ValueError(f"{self.option} does not work with {what}")

    def next_micro_batch(self, own: Any, trainer: Any, generation_batch: Any) -> dict[str, Any]:
        """Returns TRL's next micro-batch, and deals those of a new generation batch."""
        before = trl_part(trainer, "_buffered_inputs")
        inputs = own(generation_batch)
        batches = trainer._buffered_inputs
        if not trainer.model.training:
            return inputs
        if batches is not before and batches is not self._dealt:
            self.check(trainer)  # a callback may have changed an option
            batches = self._dealt = trainer._buffered_inputs = self.deal(trainer, batches)
        return batches[trainer._step % trainer.args.steps_per_generation]

    def deal(self, trainer: Any, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the micro-batches of a generation batch, dealt anew, each with its `Part`."""
        accelerator, count = trainer.accelerator, len(batches)
        # So many micro-batches are always of one optimizer step.
        window = math.gcd(trainer.args.gradient_accumulation_steps, count)
        mine = torch.stack([self._facts(batch) for batch in batches])[None]  # [1, count, B, 3]
        # One transfer to the host: three numbers per completion of all processes.
        processes = accelerator.gather(mine).tolist()
        dealt = [self._orders(trainer, facts, window) for facts in processes]
        tokens = [[sum(x.tokens for x in rows if x.trained) for _, rows in deal] for deal in dealt]
        mine_dealt, mine_tokens = (x[accelerator.process_index] for x in (dealt, tokens))
        somewhere = [any(process[i] for process in tokens) for i in range(count)]
        first = _first_calls(somewhere, window)
        by_tokens, device = _divides_by_neighbours(trainer), accelerator.device
        parts = []
        for i, (_, rows) in enumerate(mine_dealt):
            places = [k for k, row in enumerate(rows) if row.trained]
            share = max(1, len(places)) / len(rows)
            if by_tokens:
                share = max(1, mine_tokens[i]) / max(1, sum(row.tokens for row in rows))
            parts.append(Part(
                places or [0], _index(places or [0], device), len(rows), not places,
                _needs_call(accelerator, i in first, somewhere[i]),
                not somewhere[i], share,
            ))  # fmt: skip
        joined = [_joined(batches[start : start + window]) for start in range(0, count, window)]
        return [
            _cut(joined[i // window], places, rows, trainer.pad_to_multiple_of or 1)
            | {_PART: parts[i]}
            for i, (places, rows) in enumerate(mine_dealt)
        ]

    def loss(self, own: TRLLoss, trainer: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Returns TRL's loss of a micro-batch, of which the model is called with some rows."""
        part: Part | None = inputs.get(_PART)
        if part is None:  # an evaluation
            return loss_of(own, trainer, model, inputs)
        inputs = {name: x for name, x in inputs.items() if name != _PART}
        others, length = inputs.get("old_per_token_logps"), inputs["completion_ids"].shape[1]
        by_tokens = _divides_by_neighbours(trainer)

        def own_of_all_rows(call: Any, _: dict[str, Any]) -> Tensor:
            loss = own(_ComputedRows(call, part, others, length), inputs)
            # What TRL divided by is without the tokens that are masked here.
            return loss * part.share if by_tokens else loss

        with _metrics_of(trainer, part):
            if part.empty and not (part.needs_call or _reduces_gradients(trainer.accelerator)):
                return own(_NoCall(), inputs)
            return loss_of(own_of_all_rows, trainer, model, part.of(inputs), part.share)

    def _facts(self, batch: dict[str, Any]) -> Tensor:
        """The numbers of `_Row` of each completion, `[B, 3]`."""
        attended = batch["completion_mask"]
        mask = attended * batch["tool_mask"] if "tool_mask" in batch else attended
        tokens = mask.sum(1)
        trained = tokens > 0
        if self.skips:
            trained &= (batch["advantages"] != 0).view(len(tokens), -1).any(1)
        return torch.stack([trained, attended.sum(1), tokens], 1).to(torch.int64)

    def _orders(
        self, trainer: Any, facts: list[list[list[int]]], window: int
    ) -> list[tuple[list[int], list[_Row]]]:
        """The rows of each micro-batch of one process: places in their window, and facts."""
        dealt, size = [], len(facts[0])
        for start in range(0, len(facts), window):
            rows = [_Row(*row) for batch in facts[start : start + window] for row in batch]
            order = list(range(len(rows)))
            if not _divides_by_neighbours(trainer):
                order.sort(key=lambda i: (-rows[i].trained, -rows[i].length))
            for first in range(0, len(order), size):
                places = order[first : first + size]
                dealt.append((places, [rows[i] for i in places]))
        return dealt


def zero_equal_groups(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Makes the advantages of groups whose rewards are all equal exactly 0.

    The mean of equal rewards differs from them by rounding, which TRL divides by a standard
    deviation of 0 plus 1e-4. Advantages of a group whose rewards differ have both signs; those of
    equal rewards are all one number, or 0 where no reward function scored a completion.
    """
    advantages = batch["advantages"]
    if advantages.ndim != 1:  # not TRL's own
        return batch
    size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    # A group may be on several processes.
    groups = trainer.accelerator.gather(advantages).view(-1, size)
    ends = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    equal = torch.stack([((groups == x) | (groups == 0)).all(1) for x in ends]).any(0)
    first = trainer.accelerator.process_index * len(advantages)
    mine = equal.repeat_interleave(size)[first : first + len(advantages)]
    return batch | {"advantages": advantages.masked_fill(mine, 0.0)}


def _overriding(trainer: Any) -> type | None:
    """The user's class that overrides `_compute_loss`, if any."""
    for cls in type(trainer).__mro__:
        if "_compute_loss" in vars(cls):
            ours_or_trl = cls.__module__.startswith(("grpo_kernels.", "trl.trainer."))
            return None if ours_or_trl else cls
    return None


def _divides_by_neighbours(trainer: Any) -> bool:
    """True if a token's weight in the loss depends on the other tokens of its micro-batch."""
    own = options_of(trainer).loss
    name = trainer.loss_type if own is None else getattr(own, "aggregation", Loss.aggregation)
    return bool(name == "bnpo")


def _first_calls(somewhere: Sequence[bool], window: int) -> set[int]:
    """In each window the first micro-batch that any process computes, or the first of all."""
    starts = range(0, len(somewhere), window)
    return {max(range(s, s + window), key=lambda i: (somewhere[i], -i)) for s in starts}


def _needs_call(accelerator: Any, first: bool, somewhere: bool) -> bool:
    """True if even a process without rows calls the model in this micro-batch.

    `first`: it is the first one in its window that any process computes, or the first of all;
    `somewhere`: a process computes it.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        return first  # so that weights have gradients, if of 0, as an optimizer skips None
    if kind in _DDP:
        return first and somewhere  # the first forward of a step sends buffers
    # The forward gathers weights. DeepSpeed counts the backwards, too.
    return somewhere or kind != DistributedType.FSDP


def _reduces_gradients(accelerator: Any) -> bool:
    """True in the last micro-batch of an optimizer step of several processes."""
    alone = accelerator.distributed_type == DistributedType.NO
    return bool(accelerator.sync_gradients and not alone)


def _joined(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Puts micro-batches of one generation batch together again."""

    def join(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            return torch.cat(list(values)) if first.ndim else first
        return [x for value in values for x in value] if isinstance(first, list) else first

    return {name: join([batch[name] for batch in batches]) for name in batches[0]}


def _cut(
    batch: dict[str, Any], places: Sequence[int], rows: Sequence[_Row], pad_to: int
) -> dict[str, Any]:
    """Returns these rows, cut to the longest trained completion, with the others masked."""
    full, device = batch["completion_ids"].shape[1], batch["completion_ids"].device
    # TRL takes a width of 1 for one value per sequence.
    longest = max([2, *(row.length for row in rows if row.trained)])
    width, index = math.ceil(longest / pad_to) * pad_to, _index(places, device)
    cut = {name: _taken(x, places, index) for name, x in batch.items()}
    for name, x in cut.items():
        if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == full and name not in _PROMPT:
            cut[name] = x[:, :width]
    left_out = torch.tensor([not row.trained for row in rows], dtype=torch.bool, device=device)
    cut["completion_mask"] = cut["completion_mask"].masked_fill(left_out[:, None], 0)
    if SUPPORT in cut:  # a set that is not read may be longer than the rows are now
        sets = zip(cut[SUPPORT], rows, strict=True)
        cut[SUPPORT] = [x if row.trained else None for x, row in sets]
    return cut


def _index(places: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(places, dtype=torch.int64, device=device)


def _taken(x: Any, places: Sequence[int], index: Tensor) -> Any:
    """Returns these rows of one of a batch's values; a value without rows as it is."""
    if isinstance(x, list):
        return [x[i] for i in places]
    return x[index] if isinstance(x, Tensor) and x.ndim else x


@contextmanager
def _metrics_of(trainer: Any, part: Part) -> Iterator[None]:
    """Makes what TRL logs of a micro-batch without a token in any process NaN, which it ignores."""
    metrics = trl_part(trainer, "_metrics")["train"]
    before = {name: len(values) for name, values in metrics.items()}
    yield
    if part.in_no_process:
        for name, values in metrics.items():
            first = before.get(name, 0)
            values[first:] = [math.nan] * (len(values) - first)

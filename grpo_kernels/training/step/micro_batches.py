"""Micro-batches: the parts of a batch, and the weights of their losses.

The parts' gradients add up to the update's, for any parts and any number of processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ...loss.config import TOKEN_MEANS, GRPOLossConfig

Plan = list[list[int]]


class Size(NamedTuple):
    """The size of a batch: completions, and unmasked tokens."""

    rows: int
    tokens: int


def equal_parts(count: int, parts: int) -> Plan:
    """Splits the numbers below `count`, a multiple of `parts`, into equal parts."""
    size = count // parts
    return [list(range(start, start + size)) for start in range(0, count, size)]


def plan_micro_batches(
    rows: Sequence[int], size: int, prompt_of: Sequence[int], prompt_lengths: Sequence[int],
    lengths: Sequence[int], *, shared: bool,
) -> Plan:  # fmt: skip
    """Splits rows into parts of at most `size`, sorted by length or by prompt.

    Equal lengths save padding; equal prompts save encoding, if prompts are `shared`. The order with
    fewer tokens wins.

    `prompt_of` and `lengths` are of all completions, not of `rows` alone.
    """
    group_length: dict[int, int] = defaultdict(int)
    for i in rows:
        group_length[prompt_of[i]] = max(group_length[prompt_of[i]], lengths[i])

    def tokens(part: Sequence[int]) -> int:
        prompts = {prompt_of[i] for i in part}
        encoded = len(prompts) if shared else len(part)
        longest = max(prompt_lengths[p] for p in prompts)
        return encoded * longest + len(part) * max(lengths[i] for i in part)

    orders = (
        sorted(rows, key=lambda i: (lengths[i], prompt_of[i], i)),
        sorted(rows, key=lambda i: (group_length[prompt_of[i]], prompt_of[i], lengths[i], i)),
    )
    plans = [[list(o[i : i + size]) for i in range(0, len(o), size)] for o in orders]
    return min(plans, key=lambda plan: sum(map(tokens, plan)))


def pad_plan(plan: Plan, count: int) -> Plan:
    """Adds empty parts up to `count`, at least one in all.

    Every rank needs as many as the rank with most parts: each part is a collective call.
    """
    return [*plan, *([] for _ in range(max(1, count) - len(plan)))]


def num_items(config: GRPOLossConfig, update: Size, world: int) -> float:
    """Returns the denominator of every part's loss with which the gradients add up to the update's.

    `update`: its size, over all `world` processes, over which gradients are averaged.
    """
    by_tokens = config.effective_aggregation in TOKEN_MEANS
    return (update.tokens if by_tokens else update.rows) / world


def config_of_part(config: GRPOLossConfig, part: Size, update: Size, world: int) -> GRPOLossConfig:
    """Returns the config of a part: its entropy bonus is a mean over the part's tokens.

    A part without tokens has a bonus, too, so that all processes compute entropies, or none.
    """
    if not config.entropy_coef:
        return config
    share = world * max(part.tokens, 1) / max(update.tokens, 1)
    return replace(config, entropy_coef=config.entropy_coef * share)

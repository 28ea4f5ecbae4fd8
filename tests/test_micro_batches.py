"""Micro-batches: every row once, and parts whose losses add up to that of the whole."""

import random

import pytest
import torch

from grpo_kernels import GRPOLossConfig, grpo_loss
from grpo_kernels.config import AGGREGATIONS
from grpo_kernels.training.micro_batches import (
    Size,
    config_of_part,
    equal_parts,
    num_items,
    pad_plan,
    plan_micro_batches,
)

LENGTHS = [5, 1, 4, 4, 2, 6, 3, 5]
B, T = len(LENGTHS), max(LENGTHS)


def random_batch():
    draw = torch.Generator().manual_seed(0)
    logps, entropy = torch.rand(2, B, T, generator=draw)
    advantages = torch.randn(B, generator=draw)
    mask = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    return -logps, advantages, mask, entropy


def gradient(rows, config, num_items):
    """The gradient of these rows' loss, for all log-probs and entropies."""
    logps, advantages, mask, entropy = random_batch()
    logps.requires_grad_()
    entropy.requires_grad_()
    loss = grpo_loss(
        logps[rows], advantages[rows], mask[rows], entropy=entropy[rows], config=config,
        num_items=num_items,
    ).loss  # fmt: skip
    loss.backward()
    given = (x.grad if x.grad is not None else torch.zeros(B, T) for x in (logps, entropy))
    return torch.stack(list(given))


def config_of(aggregation, entropy_coef):
    length = {"max_completion_length": 9} if aggregation == "dr_grpo" else {}
    return GRPOLossConfig(loss_type=aggregation, entropy_coef=entropy_coef, **length)


@pytest.mark.parametrize("entropy_coef", (0.0, 0.3))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("world", (1, 2))
def test_shares_add_up_to_the_whole(aggregation, entropy_coef, world):
    """Any cut, on one process or two: no trainer, no model, no processes."""
    config = config_of(aggregation, entropy_coef)
    expected = gradient(list(range(B)), config, None)
    assert expected[0].abs().max() > 0 and bool(entropy_coef) == bool(expected[1].abs().max() > 0)
    whole = Size(B, sum(LENGTHS))
    for parts in ([[0], [1, 2], [3, 4, 5], [6, 7]], [[7, 0, 3], [1, 2, 4, 5, 6]]):
        total = torch.zeros_like(expected)
        for rows in parts:
            part = Size(len(rows), sum(LENGTHS[i] for i in rows))
            part_config = config_of_part(config, part, whole, world)
            # Gradients are averaged over processes, wherever each part is.
            total += gradient(rows, part_config, num_items(config, whole, world)) / world
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_empty_part_counts_for_nothing(aggregation):
    """And an empty whole: no denominator is 0."""
    logps, advantages, mask, entropy = random_batch()
    for whole in (Size(8, 30), Size(8, 0)):
        config = config_of_part(config_of(aggregation, 0.1), Size(0, 0), whole, 2)
        assert config.entropy_coef > 0  # entropies are wanted, as in the other processes
        loss = grpo_loss(
            logps, advantages, mask & False, entropy=entropy, config=config,
            num_items=num_items(config, whole, 2),
        ).loss  # fmt: skip
        assert loss == 0


@pytest.mark.parametrize("shared", (True, False))
@pytest.mark.parametrize("size", (1, 3, 8, 100))
def test_every_row_is_in_one_part(shared, size):
    draw = random.Random(0)
    rows = draw.sample(range(24), 17)
    lengths = [draw.randrange(1, 100) for _ in range(24)]
    prompt_of = [i // 4 for i in range(24)]
    plan = plan_micro_batches(rows, size, prompt_of, [9] * 6, lengths, shared=shared)
    assert sorted(i for part in plan for i in part) == sorted(rows)
    assert len(plan) == -(-17 // size) and all(0 < len(part) <= size for part in plan)


def test_the_order_with_fewer_tokens_is_taken():
    lengths, prompt_of = [1, 9, 1, 9], [0, 0, 1, 1]

    def parts(prompt_length, shared):
        plan = plan_micro_batches(
            range(4), 2, prompt_of, [prompt_length] * 2, lengths, shared=shared
        )
        return {frozenset(part) for part in plan}

    by_prompt = {frozenset({0, 1}), frozenset({2, 3})}
    by_length = {frozenset({0, 2}), frozenset({1, 3})}
    assert parts(100, shared=True) == by_prompt
    assert parts(1, shared=True) == by_length == parts(100, shared=False)


def test_no_rows_no_parts_but_the_empty_ones():
    assert plan_micro_batches([], 4, [], [], [], shared=True) == []
    assert pad_plan([], 0) == [[]]
    assert pad_plan([[1], [2]], 4) == [[1], [2], [], []]
    assert pad_plan([[1], [2]], 2) == [[1], [2]]


def test_equal_parts():
    assert equal_parts(8, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert equal_parts(3, 1) == [[0, 1, 2]]

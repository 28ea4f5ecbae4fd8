"""Micro-batches: how losses of parts add up, and how a batch is cut.

The gradients and metrics of cut batches are those of `test_training_matrix.py`.
"""

import sys

import pytest
import torch

from grpo_kernels import GRPOLossConfig, grpo_loss
from grpo_kernels.loss.config import AGGREGATIONS
from grpo_kernels.training.step.micro_batches import (
    Size,
    config_of_part,
    equal_parts,
    num_items,
    pad_plan,
    plan_micro_batches,
)
from tests.helpers.trainer_runs import FakeRollout, assert_same_weights, rows_of, weights_of

pytestmark = pytest.mark.usefixtures("real_memory")


def test_metrics_are_computed_once_after_the_last_micro_batch(make, monkeypatch):
    """Between forwards a GPU waits for none."""
    events = []

    def noted(name, work):
        return lambda *args, **how: events.append(name) or work(*args, **how)

    for module, name in (("fused_grpo_loss", "loss_inputs"), ("loss.metrics", "loss_metrics")):
        module = sys.modules[f"grpo_kernels.{module}"]
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    make(steps=1, micro_batch_size=4, skip_untrained=False).train()
    assert events == ["loss_inputs"] * 4 + ["loss_metrics"]


def test_a_part_without_rows_changes_nothing(make):
    """A process has one where others have more micro-batches."""

    def trained(name, *more):
        rollout = FakeRollout((6, 1, 3), turns=True, ce_weight=0.5)
        trainer = make(name=name, steps=1, beta=0.1, entropy_coef=0.1, rollout=lambda _: rollout)
        plan = trainer.scorer.plan
        trainer.scorer.plan = lambda *args: [*plan(*args), *more]
        return rows_of(trainer.train()), weights_of(trainer)

    (row,), weights = trained("whole")
    (other,), others = trained("padded", [])
    assert other == pytest.approx(row, rel=1e-5)
    assert_same_weights(others, weights, 1e-5, 1e-7)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("entropy_coef", (0.0, 0.1))
def test_losses_of_parts_add_up(entropy_coef, aggregation):
    """In one process, or as the mean of two; those without a token count for nothing."""
    length = {"max_completion_length": 9} if aggregation == "dr_grpo" else {}
    config = GRPOLossConfig(loss_type=aggregation, entropy_coef=entropy_coef, **length)
    g = torch.Generator().manual_seed(0)
    logps, entropy, drawn = torch.randn(3, 8, 6, generator=g)
    advantages = torch.randn(8, generator=g)

    def loss(rows, mask, whole, world):
        part = config_of_part(config, Size(len(rows), int(mask[rows].sum())), whole, world)
        assert (part.entropy_coef > 0) == (entropy_coef > 0)  # wanted in all processes or in none
        return grpo_loss(
            logps[rows], advantages[rows], mask[rows], entropy=entropy[rows], config=part,
            num_items=num_items(config, whole, world),
        ).loss  # fmt: skip

    mask = drawn > -0.5
    whole, halves = Size(8, int(mask.sum())), (range(3), range(3, 8))
    expected = grpo_loss(logps, advantages, mask, entropy=entropy, config=config).loss
    for world in (1, 2):
        found = sum(loss([*rows], mask, whole, world) for rows in halves) / world
        torch.testing.assert_close(found, expected)
        for size in (whole, Size(8, 0)):
            assert loss([0, 1], mask & False, size, world) == 0


# Plans


@pytest.mark.parametrize(
    ("prompt_length", "shared", "by_prompt"), ((100, True, True), (1, True, False), (100, 0, 0))
)
def test_the_order_with_fewer_tokens_is_taken(prompt_length, shared, by_prompt):
    plan = plan_micro_batches(
        range(4), 2, [0, 0, 1, 1], [prompt_length] * 2, [1, 9, 1, 9], shared=shared
    )
    assert sorted(map(sorted, plan)) == ([[0, 1], [2, 3]] if by_prompt else [[0, 2], [1, 3]])


def test_plans_of_equal_length():
    assert equal_parts(8, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert plan_micro_batches([], 4, [], [], [], shared=True) == []
    assert pad_plan([], 0) == [[]]
    assert pad_plan([[1], [2]], 4) == [[1], [2], [], []]
    assert pad_plan([[1], [2]], 2) == [[1], [2]]

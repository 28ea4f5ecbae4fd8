"""Gradients of the trainer: those of one call, however a batch is cut and among processes."""

import random
import sys
from dataclasses import replace

import pytest
import torch

from grpo_kernels import GRPOLossConfig, grpo_loss, reference
from grpo_kernels.integrations.hf_head import head_of
from grpo_kernels.loss.config import AGGREGATIONS
from grpo_kernels.training import load_model
from grpo_kernels.training.step.micro_batches import (
    Size,
    config_of_part,
    equal_parts,
    num_items,
    pad_plan,
    plan_micro_batches,
)
from grpo_kernels.training.step.policy import Batch, position_ids_of
from tests.helpers.trainer_runs import FakeRollout, assert_same_grads, first_samples

pytestmark = pytest.mark.usefixtures("real_memory")


def gradient_of(trainer, samples, scores, parts):
    """The gradient of one update, cut into micro-batches of so many; and its metrics."""
    trainer.run.micro_batch_size, grads = parts, {}

    def keep(*_, **__):
        grads.update({n: p.grad.clone() for n, p in trainer.policy.named_parameters()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.optimizer, "step", keep)
        metrics = trainer.update(samples, scores, 0, list(range(len(samples.texts)))).metrics
    return grads, metrics


def test_metrics_are_computed_once_after_the_last_micro_batch(sampled, monkeypatch):
    """Between forwards a GPU waits for none."""
    trainer, samples, scores = sampled("", {})
    events = []
    for module, name in (("fused_grpo_loss", "loss_inputs"), ("loss.metrics", "loss_metrics")):
        function = getattr(sys.modules[f"grpo_kernels.{module}"], name)
        monkeypatch.setattr(
            sys.modules[f"grpo_kernels.{module}"],
            name,
            lambda *args, f=function, name=name, **how: events.append(name) or f(*args, **how),
        )
    _, metrics = gradient_of(trainer, samples, scores, 2)
    parts = len(events) - 1
    assert parts > 1 and events == ["loss_inputs"] * parts + ["loss_metrics"]
    assert metrics["tokens"] > 0


@pytest.fixture
def sampled(make):
    """Makes a trainer in its first step, with scored completions of several lengths.

    Another policy had sampled them: ratios are not 1, and some are clipped.
    """

    def sampled(name, options):
        rollout = FakeRollout((6, 1, 3, 5, 2), **ROLLOUTS.get(name, {}))
        trainer = make(max_grad_norm=1e9, rollout=lambda _: rollout, **options)
        samples, scores = first_samples(trainer)
        logps = trainer.scorer.logps(samples)
        moved = 0.3 * torch.arange(logps.numel()).view_as(logps).sin()
        return trainer, samples, replace(scores, old_logps=logps + moved)

    return sampled


# What a rollout puts between the tokens that it samples, and reports of these.
ROLLOUTS = {
    "turns": {"turns": True},
    "turns apart": {"turns": True},
    "predicted": {"turns": True, "ce_weight": 0.5},
    "weights of sequences": {"logps": -5.5},
}
CUTS = {
    **{name: {"loss_type": name} for name in AGGREGATIONS},
    "kl": {"loss_type": "grpo", "beta": 0.1},
    "entropy": {"loss_type": "grpo", "entropy_coef": 0.1},
    "gspo": {"loss_type": "gspo", "epochs_per_rollout": 2},
    # The threshold lies between two of the tokens: one on it would go either way by an ulp.
    "top entropy": {"top_entropy_quantile": 0.4},
    "truncated": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "replayed": {"top_k": 20, "epochs_per_rollout": 2},
    "turns": {"loss_type": "grpo"},
    "predicted": {"loss_type": "bnpo", "beta": 0.1, "skip_untrained": False},
    "weights of sequences": {"is_correction": "sequence_truncate"},
}


@pytest.mark.parametrize("name", CUTS)
def test_any_cut_gives_the_gradient_and_the_metrics_of_the_whole(name, sampled):
    trainer, samples, scores = sampled(name, CUTS[name])
    whole, metrics = gradient_of(trainer, samples, scores, 16)
    assert len(set(samples.lengths)) > 2 and 0 < metrics["clip_low"] + metrics["clip_high"] < 1
    for size in (1, 3):
        grads, parts = gradient_of(trainer, samples, scores, size)
        assert_same_grads(grads, whole, 2e-6 if size > 1 else 5e-6)
        if "beta" in CUTS[name]:  # that of a KL to the policy itself is 0 but for its rounding
            parts["zero_gradient"] = metrics["zero_gradient"]
        assert parts == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    # A process has a part without rows where others have more micro-batches.
    plan = trainer.scorer.plan
    trainer.scorer.plan = lambda *args: [*plan(*args), []]
    assert_same_grads(gradient_of(trainer, samples, scores, 16)[0], whole, 1e-6)


ONE_CALL = {
    **{name: {"loss_type": name, "entropy_coef": 0.1} for name in AGGREGATIONS},
    "turns": {"skip_untrained": False},
    "turns apart": {"skip_untrained": False, "share_prompts": False},
    "predicted": {"skip_untrained": False},
}


@pytest.mark.parametrize("name", ONE_CALL)
def test_the_gradient_is_that_of_one_call_of_the_loss(name, sampled):
    """Gradient of all completions, on the plain model in float64, tokens of tools included."""
    trainer, samples, scores = sampled(name, ONE_CALL[name])
    grads, metrics = gradient_of(trainer, samples, scores, 5)
    model = load_model(trainer.config)[0].double()
    batch = Batch.from_rows(
        samples.prompts, samples.prompt_of, [c.token_ids for c in samples.completions],
        trainer.tokenizer.pad_token_id,
    )  # fmt: skip
    own, ce = torch.zeros(2, *batch.mask.shape)
    for i, one in enumerate(samples.completions):
        own[i, : len(one.token_ids)] = torch.tensor(one.sampled or [True]).float()
    if name == "predicted":
        ce = 0.5 * (batch.mask - own) / own.sum()
    ids = torch.cat([batch.prompts[batch.prompt_of], batch.completions], 1)
    attention = torch.cat([batch.prompt_mask[batch.prompt_of], batch.mask], 1)
    states = model.base_model(
        ids, attention_mask=attention, position_ids=position_ids_of(attention)
    )
    out = reference.fused_grpo_loss(
        states.last_hidden_state[:, -own.shape[1] - 1 : -1], head_of(model).weight,
        batch.completions, samples.advantages.double(), own, config=trainer.config.loss_config(),
        ce_weights=ce if name == "predicted" else None, old_logps=scores.old_logps.double(),
    )  # fmt: skip
    out.loss.backward()
    expected = {f"model.{n}": p.grad.float() for n, p in model.named_parameters()}
    assert_same_grads(grads, expected, 2e-5 if name in ROLLOUTS else 1e-5)
    assert metrics["loss"] == pytest.approx(out.loss.item(), rel=1e-4, abs=1e-6)
    assert metrics["tokens"] == own.sum()
    for key in out.metrics.keys() & metrics.keys():
        assert metrics[key] == pytest.approx(out.metrics[key].item(), rel=1e-3, abs=1e-4), key
    assert name != "predicted" or "ce_nll" in metrics


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

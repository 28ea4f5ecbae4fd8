"""Rollouts with weights of their own: when they get the policy's, and that the gap is checked."""

import copy
import math
import random

import pytest
import torch

from grpo_kernels.training import Completion
from grpo_kernels.training.run.checkpoint import latest
from grpo_kernels.training.run.run import Run
from grpo_kernels.training.sampling.rollout import RolloutError
from grpo_kernels.training.step.scoring import GAPS, checked_gap
from tests.helpers.trainer_runs import (
    assert_same_weights,
    config_of,
    rows_of,
    trainer_of,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("real_memory")


class CopyRollout:
    """Says the log-probs of tokens under a copy of the policy, renewed by `update_weights`."""

    sampler_dtype = "float32"

    def __init__(self, policy):
        self.model, self.copy = policy.model, copy.deepcopy(policy.model).requires_grad_(False)
        for parameter in self.copy.parameters():
            parameter.zero_()
        self.events, self.is_stale = [], False

    def update_weights(self):
        self.events.append("sync")
        if not self.is_stale:
            self.copy.load_state_dict(self.model.state_dict())

    def __call__(self, prompts, count, sampling):
        self.events.append("answer" if count == 1 else "sample")
        draw, done = random.Random(int(torch.randint(2**31, ()))), []
        for prompt in prompts:
            for i in range(count):
                ids = [draw.randrange(33, 90) for _ in range((6, 2, 4)[i % 3])]
                logps = None if sampling.temperature == 0 else self.logps(prompt, ids)
                done.append(Completion(ids, True, logps))
        return done

    @torch.no_grad()
    def logps(self, prompt, ids):
        logits = self.copy(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)[range(len(ids)), ids].tolist()


def with_copy(config, **options):
    """A trainer and its rollout."""
    trainer = trainer_of(config, rollout=CopyRollout, **options)
    return trainer, trainer.sampler.rollout


def test_weights_are_sent_once_before_the_next_completions(tiny_model, tmp_path):
    config = config_of(
        tiny_model, tmp_path, eval_size=4, eval_every=2, steps=3, minibatches=2,
        epochs_per_rollout=2,
    )  # fmt: skip
    trainer, rollout = with_copy(config)
    rows = rows_of(trainer.train())
    assert rollout.events == [
        "sync", "answer", "sample",
        "sync", "sample", "sync", "answer",
        "sample", "sync", "answer",
    ]  # fmt: skip
    assert all(row["sampler_gap"] < 1e-5 for row in rows)
    assert any(row["sampler_gap"] for row in rows)
    assert all(row["sampler_gap"] <= row["sampler_gap_max"] < 1e-4 for row in rows)


def test_weights_are_sent_after_a_checkpoint_was_loaded(tiny_model, tmp_path):
    """Also where the sampler had some, which are no longer those of the policy."""
    whole, _ = with_copy(config_of(tiny_model, tmp_path, name="whole", steps=3))
    with_copy(config_of(tiny_model, tmp_path, steps=2))[0].train()
    trainer, rollout = with_copy(config_of(tiny_model, tmp_path, steps=3, resume=True))
    trainer.sampler.update_weights()
    assert rows_of(trainer.train()) == rows_of(whole.train())
    assert rollout.events == ["sync", "sync", "sample"]


def test_a_rollout_that_takes_the_place_of_another_gets_the_weights(tiny_model, tmp_path):
    trainer, first = with_copy(config_of(tiny_model, tmp_path))
    trainer.sampler.update_weights()
    trainer.rollout = second = CopyRollout(trainer.policy)
    trainer.sampler.update_weights()
    assert first.events == second.events == ["sync"]


# The gap


@pytest.mark.parametrize("skip", (True, False), ids=("skipped", "trained"))
def test_steps_without_a_gradient_have_the_gap_too(skip, tiny_model, tmp_path):
    equal = {"noise": lambda prompts, completions, **_: [1.0] * len(completions)}
    config = config_of(tiny_model, tmp_path, skip_untrained=skip, micro_batch_size=5)
    trainer, _ = with_copy(config, rewards=equal)
    before = weights_of(trainer)
    rows = rows_of(trainer.train())
    assert all(row["groups_equal"] == 1 and row["sampler_gap"] < 1e-5 for row in rows)
    assert any(row["sampler_gap"] for row in rows)
    assert_same_weights(weights_of(trainer), before)


def test_a_stale_sampler_ends_the_run_before_its_update(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, steps=4)
    trainer, rollout = with_copy(config)
    kept = []

    def after(row, samples):
        kept.append(weights_of(trainer))
        rollout.is_stale = len(kept) == 2

    with pytest.raises(RolloutError, match=r"sampler_gap: .* on average.* explains 0\.0001 "):
        trainer.train(after)
    assert len(kept) == 2
    assert_same_weights(weights_of(trainer), kept[1])
    with pytest.raises(AssertionError):
        assert_same_weights(kept[0], kept[1])
    assert latest(config.folder).name == "step-000002.pt"


def run_without_gap():
    run = object.__new__(Run)
    run.first_gap = None
    return run


@pytest.mark.parametrize(
    ("dtype", "first", "inside", "outside"),
    (
        ("float32", 1e-5, 0.99e-4, 1.01e-4),  # what is always explained
        ("float32", 1e-3, 3.9e-3, 4.1e-3),  # four times the first step's
        ("float32", 0.02, 0.029, 0.031),  # what never is
        ("bfloat16", 0.2, 0.29, math.nan),
    ),
)
def test_limits_of_the_gap(dtype, first, inside, outside):
    def gap(mean, run, dtype=dtype):
        name = "sampling/sampling_logp_difference"
        return checked_gap({f"{name}/mean": mean, f"{name}/max": 1.25}, dtype, run)

    run = run_without_gap()
    assert gap(first, run) == {"sampler_gap": first, "sampler_gap_max": 1.25}
    assert gap(inside, run)["sampler_gap"] == inside
    with pytest.raises(RolloutError, match=f"by {outside:.2g} on average, 1.2 at most"):
        gap(outside, run)
    assert gap(9.0, run, None) and run.first_gap == first
    # That of the first step itself.
    most = GAPS[dtype][1]
    assert gap(0.99 * most, run_without_gap())
    with pytest.raises(RolloutError, match=f"explains {most:.2g} "):
        gap(1.01 * most, run_without_gap())

"""Rollouts with weights of their own: when they get the policy's, and that the gap is checked."""

import math

import pytest

from grpo_kernels.training.run.checkpoint import latest
from grpo_kernels.training.run.run import Run
from grpo_kernels.training.sampling.rollout import RolloutError
from grpo_kernels.training.step.scoring import GAPS, checked_gap
from tests.helpers.trainer_runs import FakeRollout, assert_same_weights, rows_of, weights_of

pytestmark = pytest.mark.usefixtures("real_memory")


class Sampler(FakeRollout):
    """Notes when it gets the policy's weights, and says that tokens have these log-probs."""

    def __init__(self, policy, logps=-5.5):
        super().__init__((6, 2, 4), logps=logps)
        self.events = []

    def update_weights(self):
        self.events.append("sync")

    def __call__(self, prompts, count, sampling):
        self.events.append("answer" if count == 1 else "sample")
        return super().__call__(prompts, count, sampling)


def test_weights_are_sent_once_before_the_next_completions(make):
    trainer = make(
        eval_size=4, eval_every=2, steps=3, minibatches=2, epochs_per_rollout=2, rollout=Sampler
    )
    events = trainer.sampler.rollout.events
    trainer.train()
    assert events == [
        "sync", "answer", "sample",
        "sync", "sample", "sync", "answer",
        "sample", "sync", "answer",
    ]  # fmt: skip


def test_weights_are_sent_after_a_checkpoint_was_loaded(make):
    """Also where the sampler had some, which are no longer those of the policy."""
    make(steps=2, rollout=Sampler).train()
    trainer = make(steps=3, resume=True, rollout=Sampler)
    trainer.sampler.update_weights()
    trainer.train()
    assert trainer.sampler.rollout.events == ["sync", "sync", "sample"]


def test_a_rollout_that_takes_the_place_of_another_gets_the_weights(make):
    trainer = make(rollout=Sampler)
    first, second = trainer.sampler.rollout, Sampler(trainer.policy)
    trainer.sampler.update_weights()
    trainer.rollout = second
    trainer.sampler.update_weights()
    assert first.events == second.events == ["sync"]


# The gap


@pytest.mark.parametrize("skip", (True, False), ids=("skipped", "trained"))
def test_steps_without_a_gradient_have_the_gap_too(skip, make):
    equal = {"noise": lambda prompts, completions, **_: [1.0] * len(completions)}
    trainer = make(skip_untrained=skip, micro_batch_size=5, rewards=equal, rollout=Sampler)
    before = weights_of(trainer)
    rows = rows_of(trainer.train())
    assert all(row["groups_equal"] == 1 and row["sampler_gap"] > 0 for row in rows)
    assert_same_weights(weights_of(trainer), before)


def test_a_stale_sampler_ends_the_run_before_its_update(make):
    """A sampler that says nothing of its numbers is not stopped, as in the first step."""
    trainer, kept = make(steps=4, rollout=Sampler), []

    def after(row, samples):
        kept.append(weights_of(trainer))
        trainer.sampler.rollout.sampler_dtype = "float32"

    with pytest.raises(RolloutError, match=r"sampler_gap: .* on average.* explains "):
        trainer.train(after)
    assert len(kept) == 1
    assert_same_weights(weights_of(trainer), kept[0])
    assert latest(trainer.config.folder).name == "step-000001.pt"


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

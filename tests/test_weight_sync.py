"""Rollouts with weights of their own: when they get the policy's, and that the gap is checked."""

import copy
import json
import math
import random
import re

import pytest
import torch

from grpo_kernels.training import Completion, TrainingConfig
from grpo_kernels.training.checkpoint import latest
from grpo_kernels.training.rollout import RolloutError
from grpo_kernels.training.watch import GAPS, Watch
from tests.helpers.trainer_runs import (
    assert_same_weights,
    config_of,
    rows_of,
    trainer_of,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("real_memory", "curves")


class CopyRollout:
    """Says the log-probs of tokens under a copy of the policy, which is renewed when told."""

    why_gap = "float32"

    def __init__(self, policy):
        self.model = policy.model
        self.copy = copy.deepcopy(self.model).requires_grad_(False)
        with torch.no_grad():
            for parameter in self.copy.parameters():
                parameter.zero_()
        self.events, self.deaf, self.fails_at = [], False, None

    def update_weights(self):
        self.events.append("sync")
        if not self.deaf:
            self.copy.load_state_dict(self.model.state_dict())

    def __call__(self, prompts, count, sampling):
        self.events.append("answer" if count == 1 else "sample")
        if len(self.events) == self.fails_at:
            raise RolloutError("the sampler went away")
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
        return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def of_copy(config, **options):
    """A trainer and its rollout."""
    trainer = trainer_of(config, rollout=CopyRollout, **options)
    return trainer, trainer.sampler.rollout


# When weights are sent


def test_weights_are_sent_once_before_the_next_completions(tiny_model, tmp_path):
    config = config_of(
        tiny_model, tmp_path, eval_size=4, eval_every=2, steps=3, minibatches=2,
        epochs_per_rollout=2,
    )  # fmt: skip
    trainer, rollout = of_copy(config)
    folder = trainer.train()
    assert rollout.events == [
        "sync", "answer", "sample",
        "sync", "sample", "sync", "answer",
        "sample", "sync", "answer",
    ]  # fmt: skip
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(0 < row["sampler_gap"] < 1e-5 for row in rows)
    assert all(row["sampler_gap"] <= row["sampler_gap_max"] < 1e-4 for row in rows)


def test_weights_are_sent_after_a_checkpoint_was_loaded(tiny_model, tmp_path):
    """Also where the sampler had some, which are no longer those of the policy."""
    whole, _ = of_copy(config_of(tiny_model, tmp_path, name="whole", steps=3))
    of_copy(config_of(tiny_model, tmp_path, steps=2))[0].train()
    trainer, rollout = of_copy(config_of(tiny_model, tmp_path, steps=3, resume=True))
    trainer.sampler.update_weights()
    assert rows_of(trainer.train()) == rows_of(whole.train())
    assert rollout.events == ["sync", "sync", "sample"]


def test_a_rollout_without_weights_of_its_own_needs_none(tiny_model, tmp_path):
    folder = trainer_of(config_of(tiny_model, tmp_path, steps=1)).train()
    assert not {"sampler_gap", "seconds/sync"} & set(rows_of(folder)[0])


# The gap


@pytest.mark.parametrize("skip", (True, False), ids=("skipped", "trained"))
def test_steps_without_a_gradient_have_the_gap_too(skip, tiny_model, tmp_path):
    equal = {"noise": lambda prompts, completions, **_: [1.0] * len(completions)}
    config = config_of(tiny_model, tmp_path, skip_untrained=skip, micro_batch_size=5)
    trainer, rollout = of_copy(config, rewards=equal)
    before = weights_of(trainer)
    rows = rows_of(trainer.train())
    assert all(row["groups_equal"] == 1 and 0 < row["sampler_gap"] < 1e-5 for row in rows)
    assert rollout.events == ["sync", "sample"] * 2
    assert_same_weights(weights_of(trainer), before)


def test_a_stale_sampler_ends_the_run_before_its_update(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, steps=4)
    trainer, rollout = of_copy(config)
    kept = []

    def after(row, samples):
        kept.append(weights_of(trainer))
        rollout.deaf = len(kept) == 2

    with pytest.raises(RolloutError, match="Nothing was trained on these samples") as error:
        trainer.train(after)
    numbers = r"to ([\d.e-]+) on average.*got ([\d.e-]+), and ([\d.e-]+) at most"
    limit, mean, largest = map(float, re.search(numbers, str(error.value)).groups())
    assert len(kept) == 2
    assert limit == pytest.approx(GAPS["float32"][0]) and limit < mean < largest
    assert_same_weights(weights_of(trainer), kept[1])
    with pytest.raises(AssertionError):
        assert_same_weights(kept[0], kept[1])
    # The steps before are kept, and the run goes on from them.
    assert [row["step"] for row in rows_of(config.folder)] == [1, 2]
    assert latest(config.folder).name == "step-000002"
    again, rollout = of_copy(config_of(tiny_model, tmp_path, steps=4, resume=True))
    whole, _ = of_copy(config_of(tiny_model, tmp_path, steps=4, name="whole"))
    assert rows_of(again.train()) == rows_of(whole.train())
    assert rollout.events[:2] == ["sync", "sample"]


def test_a_sampler_that_does_not_explain_itself_is_not_stopped(tiny_model, tmp_path):
    trainer, rollout = of_copy(config_of(tiny_model, tmp_path))
    rollout.deaf, rollout.why_gap = True, None
    rows = rows_of(trainer.train())
    assert all(row["sampler_gap_max"] > row["sampler_gap"] > 0.03 for row in rows)


# A rollout that cannot go on


def test_without_checkpoints_there_is_none(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, save_every=-1)
    trainer, rollout = of_copy(config)
    rollout.fails_at = 4
    with pytest.raises(RolloutError, match="the sampler went away"):
        trainer.train()
    assert latest(config.folder) is None


# Limits of the gap


@pytest.mark.parametrize(
    ("dtype", "first", "inside", "outside"),
    (
        ("float32", 1e-5, 0.99e-4, 1.01e-4),  # what is always explained
        ("float32", 1e-3, 3.9e-3, 4.1e-3),  # four times the first step's
        ("float32", 0.02, 0.029, 0.031),  # what never is
        ("bfloat16", 0.01, 0.099, 0.101),
        ("bfloat16", 0.05, 0.19, 0.21),
        ("bfloat16", 0.2, 0.29, 0.31),
        ("bfloat16", 0.2, 0.29, math.nan),
    ),
)
def test_limits_of_the_gap(dtype, first, inside, outside):
    config = TrainingConfig(model="m")
    watched, resumed = Watch(config), Watch(config)
    assert watched.unexplained_gap(first, 1.0, dtype) is None
    # A run that goes on from a checkpoint has the same limit.
    resumed.restore(json.loads(json.dumps(watched.state())))
    for one in (watched, resumed):
        assert one.unexplained_gap(inside, 1.0, dtype) is None
        error = one.unexplained_gap(outside, 1.25, dtype)
        assert f"got {outside:.2g}, and 1.2 at most" in error and dtype in error
        assert f"first step: {first:.2g}" in error
    most = GAPS[dtype][1]
    assert Watch(config).unexplained_gap(0.99 * most, 1.0, dtype) is None
    assert f"to {most:.2g} on" in Watch(config).unexplained_gap(1.01 * most, 1.0, dtype)
    for nothing in (math.nan, math.inf):
        assert "got" in Watch(config).unexplained_gap(nothing, nothing, dtype)

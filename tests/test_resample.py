"""Groups of equal rewards, which are replaced by those of other problems."""

import pytest
import torch

from grpo_kernels.training import TrainingConfig
from tests.helpers.trainer_runs import config_of, noise, rows_of, trainer_of

pytestmark = pytest.mark.usefixtures("real_memory", "curves")


def judge(prompts, completions, answer, **_):
    """The same for all completions of a sum below 10, as if they were solved."""
    return [
        0.5 if int(right) < 10 else value
        for right, value in zip(answer, noise(prompts, completions), strict=True)
    ]


def run(model, tmp_path, reward=judge, **options):
    kept = []
    trainer = trainer_of(config_of(model, tmp_path, **options), rewards={"noise": reward})
    folder = trainer.train(lambda row, samples: kept.append(samples))
    return rows_of(folder), kept, trainer


def test_groups_of_equal_rewards_are_replaced(tiny_model, tmp_path):
    rows, kept, trainer = run(tiny_model, tmp_path, steps=3, resample_equal_groups=20)
    assert sum(row["resampled"] for row in rows) > 0
    for row, samples in zip(rows, kept, strict=True):
        assert row["groups_equal"] == 0 and row["resampled"] == samples.resampled
        assert len(samples.problems) == 4 and len(samples.texts) == 16
        assert all(int(problem["answer"]) >= 10 for problem in samples.problems)
        # What belongs together still does.
        assert samples.prompts == [trainer.encode(problem) for problem in samples.problems]
        answers = [samples.problems[i]["answer"] for i in samples.prompt_of]
        assert samples.rewards[:, 0].tolist() == judge(None, samples.texts, answers)
        assert samples.texts == trainer.sampler.texts(samples.completions)
        assert samples.mask.sum(1).tolist() == samples.lengths
        means = samples.advantages.view(4, 4).mean(1)
        torch.testing.assert_close(means, torch.zeros_like(means), atol=1e-6, rtol=0)


def test_they_are_kept_where_nobody_asked(tiny_model, tmp_path):
    rows, _, _ = run(tiny_model, tmp_path, steps=3)
    assert any(row["groups_equal"] > 0 for row in rows)
    assert not any("resampled" in row for row in rows)


def test_it_ends(tiny_model, tmp_path):
    rows, _, _ = run(
        tiny_model, tmp_path, steps=2, resample_equal_groups=3,
        reward=lambda prompts, completions, **_: [1.0] * len(completions),
    )  # fmt: skip
    assert [row["resampled"] for row in rows] == [12, 12]
    assert [row["groups_equal"] for row in rows] == [1, 1]


def test_a_resumed_run_draws_the_same(tiny_model, tmp_path):
    options = {"resample_equal_groups": 20, "save_every": 1}
    whole, _, _ = run(tiny_model, tmp_path / "whole", steps=4, **options)
    run(tiny_model, tmp_path / "parts", steps=2, **options)
    parts, _, _ = run(tiny_model, tmp_path / "parts", steps=4, resume=True, **options)
    assert parts == whole


def test_less_than_none_is_refused():
    with pytest.raises(ValueError, match="resample_equal_groups: expected at least 0; got -1"):
        TrainingConfig(model="m", resample_equal_groups=-1)

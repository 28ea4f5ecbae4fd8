"""Runs of the trainer on the tiny model."""

import json
from contextlib import contextmanager

import pytest
import torch

from grpo_kernels.head import Support
from grpo_kernels.training import (
    Trainer,
    TrainingConfig,
    load_model,
    load_problems,
    report,
)
from grpo_kernels.training.metrics import Clock
from grpo_kernels.training.micro_batches import equal_parts
from tests.helpers.tiny_models import V


@contextmanager
def no_curves():
    """Reports without drawings, which take most of a small run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_svg", lambda title, draw: "<svg/>")
        yield patch


def noise(prompts, completions, **_):
    """A reward that any change of a token changes."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def support_around(ids, draw):
    """Up to 20 ids for each token, itself among them."""
    kept = [sorted({draw.randrange(V) for _ in range(draw.randrange(20))} | {i}) for i in ids]
    flat = torch.tensor([j for some in kept for j in some], dtype=torch.int32)
    return Support(flat, torch.tensor([0, *map(len, kept)]).cumsum(0))


def config_of(model, tmp_path, **options):
    defaults = dict(
        model=str(model), output=str(tmp_path), name="t", dataset="examples.problems:additions",
        steps=2, prompts_per_step=4, num_generations=4, max_completion_length=6, rewards=["noise"],
        eval_size=0, learning_rate=1e-2, save_model=False, show_every=1000, micro_batch_size=16,
    )  # fmt: skip
    return TrainingConfig(**{**defaults, **options})


def trainer_of(config, **options):
    train, held_out = load_problems(config)
    options = {"rewards": {"noise": noise}, **options}
    return Trainer(config, *load_model(config), train, held_out, **options)


# Two updates per step, of four micro-batches each.
STEPS = {
    "steps": 3, "epochs_per_rollout": 2, "micro_batch_size": 4, "save_every": 1,
    "skip_untrained": False, "learning_rate": 1e-3,
}  # fmt: skip


def run(config, **options):
    """Trains on completions that depend on their prompts alone; returns the trainer."""
    from tests.ranks.training_jobs import SameForAnyRanks

    trainer = trainer_of(config, rollout=lambda _: SameForAnyRanks(), **options)
    trainer.train()
    return trainer


def first_samples(trainer):
    """The samples of the first step, scored."""
    trainer.step, config = 1, trainer.config
    problems = trainer.train_problems[: config.prompts_per_step]
    samples = trainer.sampling(problems, 1, Clock(torch.device("cpu")))
    trainer.scorer.score(samples, equal_parts(len(samples.texts), config.minibatches))
    return samples


def weights_of(trainer):
    return {name: p.detach().clone() for name, p in trainer.policy.named_parameters()}


def assert_same_weights(mine, expected, rtol=0.0, atol=0.0):
    for name, weight in expected.items():
        torch.testing.assert_close(mine[name], weight, rtol=rtol, atol=atol, msg=name)


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [untimed(json.loads(line)) for line in lines]


def untimed(row):
    return {k: v for k, v in row.items() if not k.startswith(("seconds", "peak_memory"))}


def assert_same_grads(mine, expected, tolerance):
    largest = max(float(g.norm()) for g in expected.values())
    assert largest > 0
    for name, grad in expected.items():
        error = float((mine[name] - grad).norm())
        assert error <= tolerance * max(float(grad.norm()), 1e-3 * largest), (name, error)


LEFT_OF_MEMORY = {"micro_batch_size", "chunk_mib"}


def assert_same_rows(rows, expected):
    """Rows of metrics, but for what the machine measured, and what was left of its memory."""
    for mine, theirs in zip(rows, expected, strict=True):
        assert mine.keys() - LEFT_OF_MEMORY == theirs.keys() - LEFT_OF_MEMORY
        for key in theirs.keys() - LEFT_OF_MEMORY:
            value = theirs[key]
            assert mine[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key

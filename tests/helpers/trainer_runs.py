"""Runs of the trainer on the tiny model."""

import json
import random
from pathlib import Path

import pytest
import torch

from grpo_kernels.head.lm_head import Support
from grpo_kernels.training import Completion, Trainer, TrainingConfig, load_model, load_problems
from tests.helpers.tiny_models import V


def noise(prompts, completions, **_):
    """A reward that any change of a token changes."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def support_around(ids, draw):
    """Up to 20 ids for each token, itself among them."""
    kept = [sorted({draw.randrange(V) for _ in range(draw.randrange(20))} | {i}) for i in ids]
    flat = torch.tensor([j for some in kept for j in some], dtype=torch.int32)
    return Support(flat, torch.tensor([0, *map(len, kept)]).cumsum(0))


class FakeRollout:
    """A sampler that is no model here: it needs no weights, and says its own log-probs.

    With `turns` every third token and the one after it are not its own, and with `ce_weight` they
    are to be predicted.
    """

    def __init__(self, lengths=(4, 2), logps=None, turns=False, ce_weight=None):
        self.lengths, self.logps, self.turns, self.ce_weight = lengths, logps, turns, ce_weight
        self.calls = 0

    def __call__(self, prompts, count, sampling):
        self.calls += 1
        draw, done = random.Random(self.calls), []
        for i in range(len(prompts) * count):
            length = self.lengths[i % len(self.lengths)]
            ids = [draw.randrange(33, 90) for _ in range(length)]
            logps = None if self.logps is None else [self.logps] * length
            own = [t % 4 < 2 for t in range(length)] if self.turns else None
            predicted = own is not None and self.ce_weight is not None
            weights = [0.0 if x else self.ce_weight for x in own] if predicted else None
            done.append(Completion(ids, i % 3 > 0, logps, None, own, weights))
        return done


class SameForAnyRanks:
    """Completions that depend on their prompt alone, so that any number of ranks sees the same."""

    def __call__(self, prompts, count, sampling):
        done = []
        for prompt in prompts:
            draw = random.Random(str(prompt))
            for _ in range(count):
                length = draw.randrange(1, sampling.max_new_tokens + 1)
                ids = [draw.randrange(33, 90) for _ in range(length)]
                # Some from the whole vocabulary.
                says = sampling.record_support and draw.random() < 0.7
                support = support_around(ids, draw) if says else None
                done.append(Completion(ids, True, support=support))
        return done


def config_of(model, tmp_path, name="t", **options):
    defaults = dict(
        model=str(model), output=str(Path(tmp_path, name)), dataset="examples.problems:additions",
        steps=2, prompts_per_step=4, num_generations=4, max_completion_length=6, rewards=["noise"],
        eval_size=0, learning_rate=1e-2, save_model=False, show_every=1000, micro_batch_size=16,
    )  # fmt: skip
    return TrainingConfig(**{**defaults, **options})


def trainer_of(config, *loaded, problems=None, **options):
    """A trainer of the model, tokenizer and problems that the config names, or of others."""
    train, held_out = load_problems(config) if problems is None else problems
    options = {"rewards": {"noise": noise}, **options}
    return Trainer(config, *(loaded or load_model(config)), train, held_out, **options)


def trainer_with(model, tmp_path, /, *loaded, **options):
    """A trainer from options of its config, and from what is the trainer's alone.

    That are a rollout that is no name, a dict of rewards, `is_correct` and `problems`.
    """
    names = [n for n in ("rewards", "rollout", "is_correct", "problems") if n in options]
    own = {n: options.pop(n) for n in names if not isinstance(options[n], (str, list))}
    config = config_of(options.pop("model", model), tmp_path, **options)
    return trainer_of(config, *loaded, **own)


def same_for_any_ranks(policy):
    """A rollout whose completions depend on their prompts alone."""
    return SameForAnyRanks()


# Two updates per step, of four micro-batches each.
STEPS = {
    "steps": 3, "epochs_per_rollout": 2, "micro_batch_size": 4, "save_every": 1,
    "skip_untrained": False, "learning_rate": 1e-3, "rollout": same_for_any_ranks,
}  # fmt: skip


def freeze_all_but(model, part):
    """Freezes the parameters that have no such part in their name."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)


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


LEFT_OF_MEMORY = {"micro_batch_size"}


def assert_same_rows(rows, expected):
    """Rows of metrics, but for what the machine measured, and what was left of its memory."""
    for mine, theirs in zip(rows, expected, strict=True):
        assert mine.keys() - LEFT_OF_MEMORY == theirs.keys() - LEFT_OF_MEMORY
        for key in theirs.keys() - LEFT_OF_MEMORY:
            value = theirs[key]
            assert mine[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key

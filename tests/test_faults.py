"""Faults of what a run is given: reward functions, rollouts, gradients, checkpoints, folders."""

import contextlib
import itertools
import json
import math
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_kernels.training import checkpoint
from grpo_kernels.training.interruptions import BadUpdates, Preempted
from grpo_kernels.training.rewards import RewardError, reward_table
from grpo_kernels.training.rollout import RolloutError
from tests.helpers.trainer_runs import config_of, noise, rows_of, trainer_of
from tests.ranks.training_jobs import SameForAnyRanks
from tests.test_interruptions import STEPS, assert_same_weights, run, weights_of

pytestmark = pytest.mark.usefixtures("real_memory", "curves")

# Rewards

PROMPTS = [{"prompt": "p"}] * 3


@pytest.mark.parametrize(
    ("function", "error"),
    (
        (lambda p, c: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda p, c: [1.0] * 2, "expected 3 values, one per completion; got 2"),
        (lambda p, c: [1.0, float("nan"), 0.0], "expected finite numbers, .* got nan for 'b'"),
        (lambda p, c: [1.0, float("inf"), 0.0], "expected finite numbers, .* got inf for 'b'"),
        (lambda p, c: None, "TypeError"),
        (lambda p, c: torch.ones(3, device="meta"), "cannot be called on meta tensors"),
        (lambda p, c: ["a", "b", "c"], "ValueError: could not convert"),
        (lambda p, c: time.sleep(5), "expected an answer within reward_timeout = 0.2 seconds"),
    ),
)
def test_rewards_that_are_none(function, error):
    with pytest.raises(RewardError, match=f"reward function it: .*{error}"):
        reward_table({"it": function}, PROMPTS, ["a", "b", "c"], timeout=0.2)


def test_a_reward_function_cannot_swallow_its_end():
    def stubborn(prompts, completions):
        with contextlib.suppress(Exception):
            time.sleep(5)
        return [0.0] * 3

    start = time.monotonic()
    with pytest.raises(RewardError, match="within reward_timeout"):
        reward_table({"it": stubborn}, PROMPTS, ["a", "b", "c"], timeout=0.2)
    assert time.monotonic() - start < 4


def test_tensors_and_none_are_rewards():
    table = reward_table({"it": lambda p, c: torch.arange(3)}, PROMPTS, ["a", "b", "c"], timeout=9)
    assert table == [[0.0], [1.0], [2.0]]
    table = reward_table({"it": lambda p, c: [None, 1, 2]}, PROMPTS, ["a", "b", "c"])
    assert table[0][0] != table[0][0] and table[1:] == [[1.0], [2.0]]


def test_a_reward_function_that_fails_leaves_a_checkpoint(tiny_model, tmp_path):
    calls = []

    def fails_later(prompts, completions, **_):
        calls.append(1)
        if len(calls) == 3:
            raise ConnectionError("the judge is gone")
        return noise(prompts, completions)

    config = config_of(tiny_model, tmp_path, **STEPS | {"save_every": 0})
    with pytest.raises(RewardError, match="noise: ConnectionError: the judge is gone"):
        run(config, rewards={"noise": fails_later})
    assert checkpoint.latest(config.folder).name == "step-000002"


# Gradients, checkpoints, folders


def test_updates_without_a_finite_gradient_end_the_run(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, **STEPS | {"steps": 9, "max_bad_updates": 4})
    trainer = trainer_of(config, rollout=lambda _: SameForAnyRanks())
    clip, calls = trainer.accelerator.clip_grad_norm_, []

    def broken(*args):
        calls.append(1)
        norm = clip(*args)
        return norm if len(calls) <= 2 or len(calls) == 4 else norm * torch.nan

    trainer.accelerator.clip_grad_norm_ = broken
    with pytest.raises(RuntimeError, match=r"4 updates in a row .* checkpoint: .*step-000002"):
        trainer.train()
    assert len(calls) == 8  # two, one, one, and four in a row
    assert [row.get("bad_updates") for row in rows_of(config.folder)] == [None, None, 2]


@pytest.mark.parametrize("damage", ("truncated", "bit", "gone", "hashes"))
def test_a_damaged_checkpoint_is_told_with_the_one_before(damage, tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, **STEPS)
    expected = run(config)
    last = checkpoint.latest(config.folder)
    path = last / ("sha256.json" if damage == "hashes" else "trained.pt")
    content = path.read_bytes()
    if damage == "bit":
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"damaged: .* the one before is .*step-000002"):
        run(config_of(tiny_model, tmp_path, **STEPS, resume=True))
    last.rename(tmp_path / "aside")
    actual = run(config_of(tiny_model, tmp_path, **STEPS, resume=True))
    assert_same_weights(weights_of(expected), weights_of(actual), rtol=0, atol=0)


def test_hashes_are_of_every_file(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, **STEPS)
    run(config)
    folders = sorted((config.folder / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step-000002", "step-000003"]
    for folder in folders:
        files = {str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file()}
        assert json.loads((folder / "sha256.json").read_text()).keys() == files - {"sha256.json"}


def test_two_runs_in_one_folder(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, **STEPS)
    second = trainer_of(config, rollout=lambda _: SameForAnyRanks())

    def and_another(*_):
        with pytest.raises(RuntimeError, match="a folder in which no other process trains"):
            second.train()

    first = trainer_of(config, rollout=lambda _: SameForAnyRanks())
    first.train(and_another)
    assert [row["step"] for row in rows_of(config.folder)] == [1, 2, 3]


# Rollouts


def rubbish(what):
    def spoil(done):
        first = done[0]
        spoiled = {
            "fewer": done[1:],
            "none": None,
            "text": ["four", *done[1:]],
            "empty": [replace(first, token_ids=[]), *done[1:]],
            "word": [replace(first, token_ids=[10**6]), *done[1:]],
            "negative": [replace(first, token_ids=[-1]), *done[1:]],
            "fraction": [replace(first, token_ids=[0.5]), *done[1:]],
            "whole": [replace(first, token_ids=[5.0]), *done[1:]],
            "short": [replace(first, logps=[-1.0] * (len(first.token_ids) + 1)), *done[1:]],
            "nan": [replace(first, logps=[math.nan] * len(first.token_ids)), *done[1:]],
        }
        return spoiled[what]

    return spoil


def dies(_):
    raise ConnectionError("the sampler is gone")


@pytest.mark.parametrize(
    ("spoil", "message"),
    (
        (dies, "rollout: ConnectionError: the sampler is gone"),
        (rubbish("none"), "rollout: TypeError: 'NoneType' object is not iterable"),
        (rubbish("fewer"), "rollout: expected 4 completions of 4 prompts; got 15"),
        (rubbish("text"), r"completions\[0\]: expected a Completion with a token; got 'four'"),
        (rubbish("empty"), r"completions\[0\]: expected a Completion with a token; got Completion"),
        (rubbish("word"), r"\.token_ids: expected ints from 0 to 256; got 1000000"),
        (rubbish("negative"), r"\.token_ids: expected ints from 0 to 256; got -1"),
        (rubbish("fraction"), r"\.token_ids: expected ints from 0 to 256; got 0\.5"),
        (rubbish("whole"), r"\.token_ids: expected ints from 0 to 256; got 5\.0"),
        (rubbish("short"), r"\.logps: expected \d finite numbers, one per token; got \[-1"),
        (rubbish("nan"), r"\.logps: expected \d finite numbers, one per token; got \[nan"),
    ),
)
def test_a_rollout_that_dies_or_returns_rubbish(spoil, message, tiny_model, tmp_path):
    """Said at once, with a checkpoint of the step before."""
    own = SameForAnyRanks()

    def spoiled(*args):
        done = own(*args)
        return done if trainer.step < 2 else spoil(done)

    config = config_of(tiny_model, tmp_path, **STEPS | {"save_every": 0})
    trainer = trainer_of(config, rollout=lambda _: spoiled)
    with pytest.raises(RolloutError, match=message):
        trainer.train()
    assert checkpoint.latest(config.folder).name == "step-000001"


def test_weights_that_are_nan_end_the_run(tiny_model, tmp_path):
    """No update is made of them, and the checkpoint before them is named."""
    config = config_of(tiny_model, tmp_path, **STEPS | {"steps": 9, "max_bad_updates": 3})
    trainer = trainer_of(config, rollout=lambda _: SameForAnyRanks())

    def spoil(row, _):
        if row["step"] == 2:
            with torch.no_grad():
                trainer.policy.model.model.norm.weight[0] = math.nan

    with pytest.raises(BadUpdates, match=r"3 updates in a row .* checkpoint: .*step-000001"):
        trainer.train(spoil)


class Opens:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("file", ("trained.pt", "optimizer.bin", "random_states_0.pkl"))
def test_a_foreign_checkpoint_runs_no_code(file, tiny_model, tmp_path):
    """Its hashes are right, and what it wants to open is not opened."""
    config = config_of(tiny_model, tmp_path, **STEPS)
    run(config)
    last, made = checkpoint.latest(config.folder), tmp_path / "made"
    assert (last / file).exists()
    torch.save({"model": Opens(made)}, last / file)
    hashes = json.loads((last / "sha256.json").read_text())
    hashes[file] = checkpoint._hash(last / file)
    (last / "sha256.json").write_text(json.dumps(hashes))
    with contextlib.suppress(Exception):
        run(config_of(tiny_model, tmp_path, **STEPS, resume=True))
    assert not made.exists()


def test_a_clock_that_jumps(tiny_model, tmp_path, monkeypatch):
    """Seconds are of a clock that does not; nothing but the report's date is of the other."""
    config = config_of(tiny_model, tmp_path / "a", **STEPS)
    expected = run(config)
    jumps = itertools.cycle((1e9, 0.0, 2e9, -5.0))
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    again = config_of(tiny_model, tmp_path / "b", **STEPS)
    actual = run(again)
    assert_same_weights(weights_of(expected), weights_of(actual), rtol=0, atol=0)
    for line in (again.folder / "metrics.jsonl").read_text().splitlines():
        assert 0 <= json.loads(line)["seconds"] < 600


@pytest.mark.skipif(sys.platform != "linux", reason="folders of Linux")
def test_a_folder_that_cannot_be_written(tiny_model, tmp_path):
    tmp_path.chmod(0o500)
    folder = tmp_path if os.geteuid() else Path("/sys")  # root may write anywhere else
    with pytest.raises(PermissionError, match=str(folder)):
        run(config_of(tiny_model, folder, **STEPS))


def test_is_correct_that_raises_leaves_a_checkpoint(tiny_model, tmp_path):
    calls = []

    def fails_later(text, answer):
        calls.append(1)
        return 1 / 0 if len(calls) > 20 else True

    config = config_of(tiny_model, tmp_path, **STEPS | {"save_every": 0})
    with pytest.raises(RewardError, match="is_correct: ZeroDivisionError"):
        run(config, is_correct=fails_later)
    assert checkpoint.latest(config.folder) is not None


def test_an_evaluation_that_failed_is_made_up_for_once(tiny_model, tmp_path):
    """By the run that goes on, whatever that one meets then."""
    calls = []

    def faulty(prompts, completions, **_):
        calls.append(1)
        if len(calls) == 3:  # those of step 0, of the first step, and of its evaluation
            raise ConnectionError("the judge is gone")
        if len(calls) == 5:  # of the second step, after that evaluation was made up for
            os.kill(os.getpid(), signal.SIGTERM)
        return noise(prompts, completions)

    options = STEPS | {"eval_size": 2, "eval_every": 1, "resume": True}
    config = config_of(tiny_model, tmp_path, **options)
    for error in (RewardError, Preempted):
        with pytest.raises(error):
            run(config, rewards={"noise": faulty})
    run(config, rewards={"noise": faulty})
    lines = (config.folder / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
    assert [row["step"] for row in rows_of(config.folder)] == [1, 2, 3]


def test_what_a_killed_deletion_left_is_deleted(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, **STEPS)
    left = config.folder / "checkpoints" / ".step-000000.gone"
    left.mkdir(parents=True)
    (left / "trained.pt").write_text("half")
    run(config)
    assert not left.exists()

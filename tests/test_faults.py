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

from grpo_kernels.training import checkpoint, updates
from grpo_kernels.training.interruptions import BadUpdates, Preempted
from grpo_kernels.training.rewards import RewardError, reward_table
from grpo_kernels.training.rollout import RolloutError
from tests.helpers.trainer_runs import (
    STEPS,
    assert_same_weights,
    config_of,
    noise,
    rows_of,
    run,
    trainer_of,
    weights_of,
)
from tests.ranks.training_jobs import SameForAnyRanks

pytestmark = pytest.mark.usefixtures("real_memory", "curves")

# Rewards

PROMPTS = [{"prompt": "p"}] * 3


def stubborn(prompts, completions):
    """Takes long, and swallows what is to end it."""
    with contextlib.suppress(Exception):
        time.sleep(5)
    return [0.0] * 3


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
        (stubborn, "expected an answer within reward_timeout = 0.2 seconds"),
    ),
)
def test_rewards_that_are_none(function, error):
    with pytest.raises(RewardError, match=f"reward function it: .*{error}"):
        reward_table({"it": function}, PROMPTS, ["a", "b", "c"], timeout=0.2)


def test_tensors_and_none_are_rewards():
    table = reward_table({"it": lambda p, c: torch.arange(3)}, PROMPTS, ["a", "b", "c"], timeout=9)
    assert table == [[0.0], [1.0], [2.0]]
    table = reward_table({"it": lambda p, c: [None, 1, 2]}, PROMPTS, ["a", "b", "c"])
    assert table[0][0] != table[0][0] and table[1:] == [[1.0], [2.0]]


@pytest.mark.parametrize("name", ("noise", "is_correct"))
def test_a_reward_function_that_fails_leaves_a_checkpoint(name, tiny_model, tmp_path):
    calls = []

    def fails_later(*args, **_):
        calls.append(1)
        if len(calls) == (3 if name == "noise" else 33):  # in the third step
            raise ConnectionError("the judge is gone")
        return noise(*args) if name == "noise" else True

    functions = {"rewards": {"noise": fails_later}} if name == "noise" else {name: fails_later}
    config = config_of(tiny_model, tmp_path, **STEPS | {"save_every": 0})
    with pytest.raises(RewardError, match=f"{name}: ConnectionError: the judge is gone"):
        run(config, **functions)
    assert checkpoint.latest(config.folder).name == "step-000002"


# Gradients, checkpoints, folders


def test_updates_without_a_finite_gradient_end_the_run(tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(updates, "MOST_BAD", 4)
    config = config_of(tiny_model, tmp_path, **STEPS | {"steps": 9})
    trainer = trainer_of(config, rollout=lambda _: SameForAnyRanks())
    clip, weights = trainer.accelerator.clip_grad_norm_, []

    def broken(parameters, most):
        parameters = list(parameters)
        weights.append(weights_of(trainer))
        if len(weights) not in (1, 2, 4):
            parameters[0].grad *= torch.nan
        return clip(parameters, most)

    trainer.accelerator.clip_grad_norm_ = broken
    with pytest.raises(RuntimeError, match=r"4 updates in a row .* checkpoint: .*step-000002"):
        trainer.train()
    assert len(weights) == 8  # two, one, one, and four in a row
    assert [row.get("bad_updates") for row in rows_of(config.folder)] == [None, None, 2]
    assert "the update was left out" in capsys.readouterr().out
    for earlier, later in ((2, 3), (4, 7)):  # between them all were left out
        assert_same_weights(weights[later], weights[earlier])
    assert not torch.equal(*(next(iter(weights[i].values())) for i in (3, 4)))


@pytest.mark.parametrize("damage", ("truncated", "bit", "gone", "hashes"))
def test_a_damaged_checkpoint_is_told_with_the_one_before(
    damage, undisturbed, tiny_model, tmp_path
):
    config = config_of(tiny_model, tmp_path, **STEPS)
    run(config)
    last = checkpoint.latest(config.folder)
    folders = sorted((config.folder / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step-000002", "step-000003"]
    files = {str(x.relative_to(last)) for x in last.rglob("*") if x.is_file()}
    assert json.loads((last / "sha256.json").read_text()).keys() == files - {"sha256.json"}
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
    assert_same_weights(weights_of(actual), undisturbed[1])


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


def dies(_):
    raise ConnectionError("the sampler is gone")


def first_is(**values):
    """What makes the first completion one with other values."""
    return lambda done: [replace(done[0], **values), *done[1:]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    (
        (dies, "rollout: ConnectionError: the sampler is gone"),
        (lambda _: None, "rollout: TypeError: 'NoneType' object is not iterable"),
        (lambda done: done[1:], "rollout: expected 4 completions of 4 prompts; got 15"),
        (
            lambda done: ["four", *done[1:]],
            r"completions\[0\]: expected a Completion .* got 'four'",
        ),
        (first_is(token_ids=[]), r"expected a Completion with a token; got Completion"),
        (first_is(token_ids=[10**6]), r"\.token_ids: expected ints from 0 to 256; got 1000000"),
        (first_is(token_ids=[-1]), r"\.token_ids: expected ints from 0 to 256; got -1"),
        (first_is(token_ids=[5.0]), r"\.token_ids: expected ints from 0 to 256; got 5\.0"),
        (first_is(logps=[-1.0] * 9), r"\.logps: expected \d finite numbers, .* got \[-1"),
        (first_is(token_ids=[5], logps=[math.nan]), r"\.logps: expected 1 finite .* got \[nan"),
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
    config = config_of(tiny_model, tmp_path, **STEPS | {"steps": 9})
    trainer = trainer_of(config, rollout=lambda _: SameForAnyRanks())

    def spoil(row, _):
        if row["step"] == 2:
            with torch.no_grad():
                trainer.policy.model.model.norm.weight[0] = math.nan

    with pytest.raises(BadUpdates, match=r"10 updates in a row .* checkpoint: .*step-000001"):
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


def test_a_clock_that_jumps(undisturbed, tiny_model, tmp_path, monkeypatch):
    """Seconds are of a clock that does not; nothing but the report's date is of the other."""
    jumps = itertools.cycle((1e9, 0.0, 2e9, -5.0))
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    again = config_of(tiny_model, tmp_path, **STEPS)
    actual = run(again)
    assert_same_weights(weights_of(actual), undisturbed[1])
    for line in (again.folder / "metrics.jsonl").read_text().splitlines():
        assert 0 <= json.loads(line)["seconds"] < 600


@pytest.mark.skipif(sys.platform != "linux", reason="folders of Linux")
def test_a_folder_that_cannot_be_written(tiny_model, tmp_path):
    tmp_path.chmod(0o500)
    folder = tmp_path if os.geteuid() else Path("/sys")  # root may write anywhere else
    with pytest.raises(PermissionError, match=str(folder)):
        run(config_of(tiny_model, folder, **STEPS))


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

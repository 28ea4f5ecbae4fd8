"""Interruptions of a step: nothing is lost but the step, and the gradient is the same."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from grpo_kernels.training import checkpoint
from grpo_kernels.training.interruptions import RESUME, Preempted
from grpo_kernels.training.rollout import RolloutError
from tests.helpers.trainer_runs import (
    STEPS,
    assert_same_rows,
    assert_same_weights,
    config_of,
    rows_of,
    run,
    same_trainer_of,
    trainer_of,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("real_memory", "curves")


def at_calls(numbers, act, work, what=None):
    """`work` that acts after its calls of these numbers; of the policy, those for `what`."""
    calls = []

    def done(*args, **kwargs):
        result = work(*args, **kwargs)
        if what in (None, *args[:1]):
            calls.append(1)
            if len(calls) in numbers:
                act()
        return result

    return done


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def without_memory_at(numbers, config):
    trainer = same_trainer_of(config)
    trainer.policy.forward = at_calls(numbers, out_of_memory, trainer.policy.forward, "loss")
    return trainer


def test_memory_that_runs_out_in_a_micro_batch_changes_nothing(tiny_model, tmp_path, capsys):
    """In a forward, while the reference scores, and in the middle of an update's backwards."""
    options = {**STEPS, "beta": 0.1, "micro_batch_size": 16}
    config = config_of(tiny_model, tmp_path / "a", **options)
    expected = run(config)
    again = replace(config, output=str(tmp_path / "b"))
    trainer = without_memory_at({2}, again)
    reference, accelerator = trainer.reference.copy, trainer.accelerator
    reference.forward = at_calls({2}, out_of_memory, reference.forward, "logps")
    accelerator.backward = at_calls({9}, out_of_memory, accelerator.backward)
    trainer.train()
    told = capsys.readouterr().out
    for size in (8, 4, 2):
        assert f"memory ran out: from now on micro_batch_size is {size}" in told
    assert_same_rows(rows_of(again.folder), rows_of(config.folder))
    assert_same_weights(weights_of(trainer), weights_of(expected), 1e-4, 1e-6)


@pytest.mark.parametrize(("first", "kept"), ((9, "step-000001"), (13, None)))
def test_memory_that_never_suffices(first, kept, undisturbed, tiny_model, tmp_path, capsys):
    """The step before is kept, unless an update of this one has moved the weights since."""
    config = config_of(tiny_model, tmp_path, **STEPS | {"save_every": 0})
    with pytest.raises(RuntimeError, match="memory ran out in a micro-batch of one completion"):
        without_memory_at(range(first, 999), config).train()
    latest = checkpoint.latest(config.folder)
    assert (latest and latest.name) == kept
    assert ("no checkpoint was kept" in capsys.readouterr().out) == (kept is None)
    if kept is not None:
        again = run(config_of(tiny_model, tmp_path, **STEPS, resume=True))
        assert_same_rows(rows_of(config.folder), undisturbed[0])
        # The last micro-batches were smaller.
        assert_same_weights(weights_of(again), undisturbed[1], 1e-4, 1e-6)


@pytest.mark.parametrize("step", (1, 2))
@pytest.mark.parametrize("where", ("optimizer", "reference", "metrics"))
def test_memory_that_runs_out_once_weights_have_moved(where, step, tiny_model, tmp_path, capsys):
    """No checkpoint has a step's number and other weights: AdamW's states, the copy, the row."""
    options = STEPS | {"save_every": 0, "beta": 0.1, "sync_ref_every": 1}
    trainer = same_trainer_of(config_of(tiny_model, tmp_path, **options))
    if where == "optimizer":
        owner, name, calls = trainer.optimizer, "step", {2 * step - 1}
    elif where == "reference":
        owner, name, calls = trainer.reference, "sync", {step}
    else:
        owner, name, calls = trainer.metrics, "take", {step}
    setattr(owner, name, at_calls(calls, out_of_memory, getattr(owner, name)))
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert checkpoint.latest(trainer.config.folder) is None
    assert "no checkpoint was kept" in capsys.readouterr().out


def test_memory_that_runs_out_while_sampling(tiny_model, tmp_path):
    """Ends the run, after a checkpoint of the step before."""
    config = config_of(tiny_model, tmp_path, **STEPS)
    trainer = trainer_of(config)
    trainer.policy.forward = at_calls({2}, out_of_memory, trainer.policy.forward, "generate")
    with pytest.raises(RolloutError, match="while sampling 16 completions: lower prompts"):
        trainer.train()
    assert checkpoint.latest(config.folder).name == "step-000001"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a limit of Linux")
def test_a_limit_of_the_system():
    """A real allocator tells memory beyond the limit as memory that ran out."""
    code = (
        "import resource, torch; from grpo_kernels.base.memory import ran_out_of_memory\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, -1))\n"
        "try: torch.ones(1 << 30)\n"
        "except Exception as error: print(ran_out_of_memory(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n", done.stderr


def test_what_is_left_of_memory_is_kept(tiny_model, tmp_path):
    whole, cut = (config_of(tiny_model, tmp_path / name, **STEPS | {"steps": 2}) for name in "ab")
    for config, steps in ((whole, 2), (cut, 1)):
        trainer = trainer_of(replace(config, steps=steps))
        trainer.policy.forward = at_calls({1}, out_of_memory, trainer.policy.forward, "loss")
        trainer.train()
    again = trainer_of(replace(cut, resume=True))
    again.train()
    assert again.run.micro_batch_size == 2
    assert rows_of(cut.folder) == rows_of(whole.folder)
    # Another option is taken as given.
    given = trainer_of(replace(cut, resume=True, micro_batch_size=8, steps=3))
    given.train()
    assert given.run.micro_batch_size == 8


@pytest.mark.parametrize(
    ("call", "number"), ((1, signal.SIGTERM), (7, signal.SIGINT), (12, signal.SIGTERM))
)
def test_a_signal_loses_the_step_at_most(call, number, undisturbed, tiny_model, tmp_path):
    """Whenever it comes: what goes on from there is the run without it."""
    config = config_of(tiny_model, tmp_path, **STEPS | {"save_every": 0, "resume": True})
    trainer = same_trainer_of(config)
    trainer.policy.forward = at_calls(
        {call}, lambda: os.kill(os.getpid(), number), trainer.policy.forward
    )
    before = signal.getsignal(number)
    with pytest.raises(Preempted) as stopped:
        trainer.train()
    assert stopped.value.code == RESUME == 75 and signal.getsignal(number) is before
    step, place = divmod(call - 1, 8)
    assert trainer.run.step == step + (place >= 4)  # after an update the step is gone through with
    if trainer.run.step:
        assert checkpoint.latest(config.folder).name == f"step-{trainer.run.step:06d}"
    again = run(config)
    assert signal.getsignal(number) is before
    assert rows_of(config.folder) == undisturbed[0]
    assert_same_weights(weights_of(again), undisturbed[1])


def test_a_second_signal_ends_at_once(tiny_model, tmp_path, capfd):
    trainer = same_trainer_of(config_of(tiny_model, tmp_path))

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        while not trainer.run.interruptions.signal:  # two that wait are one
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    trainer.policy.forward = at_calls({1}, twice, trainer.policy.forward)
    # What runs in the background of a shell ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert "SIGINT: ends as soon as nothing is lost; again: at once" in capfd.readouterr().err

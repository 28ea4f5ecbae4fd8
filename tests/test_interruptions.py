"""Interruptions of a step: nothing is lost but the step, and the gradient is the same."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from grpo_kernels.training.run import checkpoint
from grpo_kernels.training.run.interruptions import RESUME, Preempted
from tests.helpers.trainer_runs import (
    STEPS,
    assert_same_rows,
    assert_same_weights,
    rows_of,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("real_memory")


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


def without_memory_at(calls, trainer, what="loss"):
    """The trainer, whose memory runs out in these calls of the policy."""
    trainer.policy.forward = at_calls(calls, out_of_memory, trainer.policy.forward, what)
    return trainer


def test_memory_that_runs_out_in_a_micro_batch_changes_nothing(make, capsys):
    """In a forward, while the reference scores, and in the middle of an update's backwards."""
    options = STEPS | {"beta": 0.1, "micro_batch_size": 16, "steps": 2}
    expected, trainer = make(name="a", **options), without_memory_at({2}, make(name="b", **options))
    reference, accelerator = trainer.reference.copy, trainer.accelerator
    reference.forward = at_calls({2}, out_of_memory, reference.forward, "logps")
    accelerator.backward = at_calls({9}, out_of_memory, accelerator.backward)
    assert_same_rows(rows_of(trainer.train()), rows_of(expected.train()))
    assert_same_weights(weights_of(trainer), weights_of(expected), 1e-4, 1e-6)
    printed = capsys.readouterr().out
    for size in (8, 4, 2):
        assert f"memory ran out: from now on micro_batch_size is {size}" in printed


@pytest.mark.parametrize(("first", "kept"), ((9, "step-000001.pt"), (13, None)))
def test_memory_that_never_suffices(first, kept, undisturbed, make, capsys):
    """The step before is kept, unless an update of this one has moved the weights since."""
    trainer = without_memory_at(range(first, 999), make(**STEPS | {"save_every": 0}))
    with pytest.raises(RuntimeError, match="ran out with micro_batch_size=1: lower max_completion"):
        trainer.train()
    latest = checkpoint.latest(trainer.config.folder)
    assert (latest and latest.name) == kept
    assert ("no checkpoint was kept" in capsys.readouterr().out) == (kept is None)
    if kept is not None:
        again = make(**STEPS, resume=True)
        assert_same_rows(rows_of(again.train()), undisturbed[0])
        # The last micro-batches were smaller.
        assert_same_weights(weights_of(again), undisturbed[1], 1e-4, 1e-6)


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    (("optimizer", "step", 3), ("reference", "sync", 2), ("metrics", "take", 2)),
)
def test_memory_that_runs_out_once_weights_have_moved(owner, name, call, make, capsys):
    """No checkpoint has a step's number and other weights: AdamW's states, the copy, the row."""
    trainer = make(**STEPS | {"save_every": 0, "beta": 0.1, "sync_ref_every": 1})
    owned = getattr(trainer, owner)
    setattr(owned, name, at_calls({call}, out_of_memory, getattr(owned, name)))
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert checkpoint.latest(trainer.config.folder) is None
    assert "no checkpoint was kept" in capsys.readouterr().out


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


def test_what_is_left_of_memory_is_kept(make):
    options = STEPS | {"rollout": "generate"}
    whole = without_memory_at({1}, make(name="whole", **options | {"steps": 2})).train()
    without_memory_at({1}, make(name="cut", **options | {"steps": 1})).train()
    again = make(name="cut", resume=True, **options | {"steps": 2})
    assert rows_of(again.train()) == rows_of(whole) and again.run.micro_batch_size == 2
    # Another option is taken as it is.
    other = make(name="cut", resume=True, **options | {"micro_batch_size": 8})
    other.train()
    assert other.run.micro_batch_size == 8


@pytest.mark.parametrize(("call", "number"), ((7, signal.SIGINT), (12, signal.SIGTERM)))
def test_a_signal_loses_the_step_at_most(call, number, undisturbed, make):
    """Whenever it comes: what goes on from there is the run without it."""
    trainer, again = (make(**STEPS | {"save_every": 0, "resume": True}) for _ in range(2))
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
        name = checkpoint.latest(trainer.config.folder).name
        assert name == f"step-{trainer.run.step:06d}.pt"
    assert rows_of(again.train()) == undisturbed[0] and signal.getsignal(number) is before
    assert_same_weights(weights_of(again), undisturbed[1])


def test_a_second_signal_ends_at_once(make, capfd):
    trainer = make(**STEPS)

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

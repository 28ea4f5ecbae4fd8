"""What ends a step before its time: nothing is lost but the step, and the gradient is the same."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from grpo_kernels.training import checkpoint, scoring
from grpo_kernels.training.interruptions import RESUME, Preempted
from grpo_kernels.training.rollout import SamplingParams
from tests.helpers.trainer_runs import (
    STEPS,
    assert_same_rows,
    assert_same_weights,
    config_of,
    rows_of,
    run,
    trainer_of,
    weights_of,
)
from tests.ranks.training_jobs import SameForAnyRanks

pytestmark = pytest.mark.usefixtures("real_memory", "curves")


class FailingPolicy:
    """Raises in the calls of these numbers, as a device without memory does."""

    def __init__(self, policy, what, numbers):
        self.forward, self.what, self.numbers, self.calls = policy.forward, what, numbers, 0

    def __call__(self, what, *args, **kwargs):
        if what == self.what:
            self.calls += 1
            if self.calls in self.numbers:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return self.forward(what, *args, **kwargs)


def out_of_memory(config, what, numbers):
    trainer = trainer_of(config, rollout=lambda _: SameForAnyRanks())
    trainer.policy.forward = FailingPolicy(trainer.policy, what, numbers)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("where", "place"), (("forward", 1), ("forward", 6), ("backward", 3), ("backward", 8))
)
def test_memory_that_runs_out_in_any_micro_batch_changes_nothing(
    where, place, undisturbed, tiny_model, tmp_path
):
    """In each of both updates of a step; those of the second one compare with log-probs."""
    config = config_of(tiny_model, tmp_path, **STEPS)
    if where == "forward":
        actual = out_of_memory(config, "loss", {place})
    else:
        actual = trainer_of(config, rollout=lambda _: SameForAnyRanks())
        backward, calls = actual.accelerator.backward, []

        def failing(loss):
            calls.append(1)
            backward(loss)
            if len(calls) == place:
                raise torch.OutOfMemoryError("CUDA out of memory")

        actual.accelerator.backward = failing
        actual.train()
    assert actual.scorer.micro_batch_size == 2
    rows, weights = undisturbed
    assert_same_rows(rows_of(config.folder), rows)
    assert_same_weights(weights_of(actual), weights, 1e-4, 1e-6)


def test_memory_that_runs_out_while_scoring(tiny_model, tmp_path, capsys):
    options = {**STEPS, "beta": 0.1}
    config = config_of(tiny_model, tmp_path / "a", **options)
    expected = run(config)
    again = config_of(tiny_model, tmp_path / "b", **options)
    trainer = trainer_of(again, rollout=lambda _: SameForAnyRanks())
    reference = trainer.reference.copy
    reference.forward = FailingPolicy(reference, "logps", {2})
    trainer.train()
    assert_same_rows(rows_of(again.folder), rows_of(config.folder))
    assert_same_weights(weights_of(trainer), weights_of(expected), 1e-4, 1e-6)
    said = "memory ran out: from now on micro_batch_size is 2; the gradients are the same"
    assert said in capsys.readouterr().out


def test_less_memory_down_to_chunks_of_one_completion(
    undisturbed, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(scoring, "_LEAST_CHUNK_BYTES", 1)
    config = config_of(tiny_model, tmp_path, **STEPS)
    actual = out_of_memory(config, "loss", {1, 2, 3, 4})
    assert actual.scorer.micro_batch_size == 1
    left = 512 * 4 * 257 // 4
    assert actual.scorer.execution().chunk_bytes == left
    rows, weights = undisturbed
    for row in rows_of(config.folder):
        assert (row["micro_batch_size"], row["chunk_mib"]) == (1, left / 2**20)
    assert all("chunk_mib" not in row for row in rows)
    assert_same_rows(rows_of(config.folder), rows)
    assert_same_weights(weights_of(actual), weights, 1e-4, 1e-6)


@pytest.mark.parametrize(
    ("first", "save_every", "kept"), ((9, 0, "step-000001"), (13, 1, "step-000001"), (13, 0, None))
)
def test_memory_that_never_suffices(
    first, save_every, kept, undisturbed, tiny_model, tmp_path, capsys
):
    """The step before is kept, unless an update of this one has moved the weights since."""
    config = config_of(tiny_model, tmp_path, **STEPS | {"save_every": save_every})
    with pytest.raises(RuntimeError, match="memory ran out in a micro-batch of one completion"):
        out_of_memory(config, "loss", range(first, 999))
    latest, told = checkpoint.latest(config.folder), capsys.readouterr().out
    assert (latest and latest.name) == kept
    assert ("no checkpoint was kept" in told) == (kept is None)
    if kept is None:
        return
    assert "resume goes on after step 1" in told
    again = run(config_of(tiny_model, tmp_path, **STEPS, resume=True))
    rows, weights = undisturbed
    assert_same_rows(rows_of(config.folder), rows)
    # Where the checkpoint was written later than memory ran out, with smaller micro-batches.
    rtol, atol = (0, 0) if save_every else (1e-4, 1e-6)
    assert_same_weights(weights_of(again), weights, rtol, atol)


def test_memory_that_runs_out_elsewhere_leaves_a_checkpoint(tiny_model, tmp_path, capsys):
    """Where AdamW makes its states, say: nothing can be made smaller there."""
    config = config_of(tiny_model, tmp_path, **STEPS | {"save_every": 0})
    trainer = trainer_of(config, rollout=lambda _: SameForAnyRanks())
    step, calls = trainer.updates.optimizer.step, []

    def failing():
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        step()

    trainer.updates.optimizer.step = failing
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    # Its first update may have moved some of the weights: the step is not kept.
    assert checkpoint.latest(config.folder) is None
    assert "no checkpoint was kept" in capsys.readouterr().out


def test_memory_that_runs_out_while_sampling(tiny_model, tmp_path):
    """Greedy, so that how many prompts are sampled at a time makes no difference."""
    config = config_of(tiny_model, tmp_path, steps=1, save_every=-1)
    trainer = trainer_of(config)
    prompts = [trainer.encode(problem) for problem in trainer.train_problems[:7]]
    sampling = SamplingParams(5, temperature=0.0)
    rollout = trainer.sampler.rollout
    expected = rollout(prompts, 2, sampling)
    forward, sizes = trainer.policy.forward, []

    def failing(what, ids, *args):
        sizes.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(what, ids, *args)

    trainer.policy.forward = failing
    with pytest.warns(UserWarning, match="while sampling: from now on 1 prompts at a time"):
        assert rollout(prompts, 2, sampling) == expected
    assert sizes == [7, 3, *[1] * 7]
    rollout(prompts, 2, sampling)
    assert sizes[9:] == [1] * 7  # it goes on so

    def never(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.policy.forward = never
    with pytest.raises(torch.OutOfMemoryError):
        rollout(prompts, 2, sampling)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a limit of Linux")
def test_a_limit_of_the_system(tiny_model, tmp_path):
    """What is beyond it is told as memory that ran out, by a real allocator."""
    code = (
        "import resource, torch; from grpo_kernels.training import interruptions\n"
        "from tests.helpers.trainer_runs import *\n"
        f"trainer = trainer_of(config_of({str(tiny_model)!r}, {str(tmp_path)!r}))\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, -1))\n"
        "held = torch.ones(1 << 28)\n"  # 1 GiB
        "try:\n"
        "    with trainer.interruptions.shared(waits=False): held = torch.ones(1 << 30)\n"
        "except interruptions.OutOfMemory: print('ran out')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=os.getcwd(), timeout=120,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert done.stdout.endswith("ran out\n"), done.stderr


def test_what_is_left_of_memory_is_kept(tiny_model, tmp_path):
    """Also how many prompts are sampled at a time, which changes what is drawn."""
    whole, cut = (config_of(tiny_model, tmp_path / name, **STEPS | {"steps": 2}) for name in "ab")
    for config, steps in ((whole, 2), (cut, 1)):
        trainer = trainer_of(replace(config, steps=steps))
        trainer.policy.forward = FailingPolicy(trainer.policy, "loss", {1})
        trainer.sampler.rollout.most_prompts = 1
        trainer.train()
    again = trainer_of(replace(cut, resume=True))
    again.train()
    assert again.scorer.micro_batch_size == 2 and again.sampler.rollout.most_prompts == 1
    assert rows_of(cut.folder) == rows_of(whole.folder)
    # Another option is taken as given.
    given = trainer_of(replace(cut, resume=True, micro_batch_size=8, steps=3))
    given.train()
    assert given.scorer.micro_batch_size == 8


@pytest.mark.parametrize("calls", (1, 7, 12))
def test_a_signal_loses_the_step_at_most(calls, undisturbed, tiny_model, tmp_path):
    """Whenever it comes: what goes on from there is the run without it."""
    again = config_of(tiny_model, tmp_path, **STEPS | {"save_every": 0, "resume": True})
    trainer = trainer_of(again, rollout=lambda _: SameForAnyRanks())
    forward, seen = trainer.policy.forward, []

    def signalled(*args, **kwargs):
        seen.append(1)
        if len(seen) == calls:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(*args, **kwargs)

    trainer.policy.forward = signalled
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted) as stopped:
        trainer.train()
    assert stopped.value.code == RESUME == 75 and signal.getsignal(signal.SIGTERM) is before
    done = trainer.step
    step, place = divmod(calls - 1, 8)
    assert done == step + (place >= 4)  # after the first update the step is gone through with
    if done:
        assert checkpoint.latest(again.folder).name == f"step-{done:06d}"
    rows, weights = undisturbed
    actual = run(again)
    assert rows_of(again.folder) == rows
    assert_same_weights(weights_of(actual), weights)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tiny_model, tmp_path):
    """As users see it: a process, two signals, and their statuses."""
    code = (
        "import sys, time; from tests.helpers.trainer_runs import *\n"
        "from tests.ranks.training_jobs import SameForAnyRanks\n"
        "def slow(prompts, completions, **_):\n"
        "    print('judging', flush=True); time.sleep(2); return noise(prompts, completions)\n"
        f"config = config_of({str(tiny_model)!r}, {str(tmp_path)!r}, steps=50)\n"
        "trainer_of(config, rewards={'noise': slow}, rollout=lambda _: SameForAnyRanks()).train()\n"
    )
    for signals, status in ((1, RESUME), (2, -signal.SIGTERM)):
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=os.getcwd(),
        ) as child:  # fmt: skip
            try:
                while "judging" not in child.stdout.readline():
                    assert child.poll() is None
                child.send_signal(signal.SIGTERM)
                while "SIGTERM: ends as soon as nothing is lost" not in child.stderr.readline():
                    assert child.poll() is None
                if signals == 2:
                    child.send_signal(signal.SIGTERM)
                child.communicate(timeout=60)
            finally:
                child.kill()
        assert child.returncode == status

"""Faults of what a run is given: reward functions, rollouts, gradients, checkpoints, folders."""

import json
import math
import re
import resource
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from tokenizers import normalizers

from grpo_kernels.explain.records import read_rows
from grpo_kernels.training import Completion, load_model
from grpo_kernels.training.problems.rewards import RewardError
from grpo_kernels.training.run import checkpoint, logs
from grpo_kernels.training.run.interruptions import BadUpdates, StepError
from tests.helpers.tiny_models import make_model, make_tokenizer
from tests.helpers.trainer_runs import (
    STEPS,
    FakeRollout,
    assert_same_weights,
    config_of,
    freeze_all_but,
    noise,
    rows_of,
    untimed,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("real_memory")


def steps_of(path):
    return [row["step"] for row in read_rows(path)]


# Rewards and rollouts that fail


FAILING = (
    "reward function noise", "is_correct", "rollout", "rollout's weights", "on_step", "loss_type",
)  # fmt: skip


class Outcome(BaseException):
    """An outcome of pytest, say, or a timeout of a package."""


@pytest.mark.parametrize(
    ("who", "error", "message"),
    (
        *(
            (who, kind("it is gone"), f"{kind.__name__}: it is gone")
            for who, kind in zip(
                FAILING, [ConnectionError, ImportError, SystemExit] * 2, strict=True
            )
        ),
        *((FAILING[0], error, type(error).__name__) for error in (Outcome(), StopIteration())),
        ("policy", torch.OutOfMemoryError("CUDA"), "while sampling 16 completions: lower prompts"),
        ("log-probs", None, "is_correction='token_truncate' needs log-probs"),
    ),
    ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else None,
)
def test_who_fails_is_told_and_leaves_a_checkpoint(who, error, message, make):
    def failing(name, work):
        def done(*args, **options):
            if name == who and trainer.run.step == 2:
                raise error
            return work(*args, **options)

        return done

    class Scored(FakeRollout):
        def __call__(self, *args):
            self.logps = None if who == "log-probs" and trainer.run.step == 2 else -5.0
            return super().__call__(*args)

    options = {
        "log-probs": {"is_correction": "token_truncate", "rollout": lambda _: Scored()},
        "policy": {"rollout": "generate"},
        "loss_type": {"loss_type": failing("loss_type", lambda x: -x.advantages * x.logps)},
    }  # fmt: skip
    trainer = make(
        rewards={"noise": failing("reward function noise", noise)},
        is_correct=failing("is_correct", lambda text, answer: True),
        **STEPS | {"save_every": 0} | options.get(who, {}),
    )
    trainer.policy.forward = failing("policy", trainer.policy.forward)
    trainer.rollout = rollout = failing("rollout", trainer.rollout)
    rollout.update_weights = failing("rollout's weights", lambda: None)
    named = "" if who in ("log-probs", "policy") else who.partition("'")[0]
    with pytest.raises(StepError, match=f"{named}.*{message}"):
        trainer.train(failing("on_step", lambda *_: None))
    last = 2 if who == "on_step" else 1
    assert checkpoint.latest(trainer.config.folder).name == f"step-{last:06d}.pt"


def test_an_end_in_the_last_evaluation_loses_nothing_but_it(undisturbed, make):
    """The run that goes on evaluates, and trains no step."""
    options = STEPS | {"eval_size": 2, "save_every": 0, "resume": True}
    trainer, again = make(**options), make(**options)
    judge = trainer.is_correct

    def ends(*args):
        if trainer.run.step == 3 and not trainer.run.evaluated and trainer.run.trained == 3:
            raise ValueError
        return judge(*args)

    trainer.is_correct = ends
    with pytest.raises(RewardError):
        trainer.train()
    folder = trainer.config.folder
    assert checkpoint.latest(folder).name == "step-000003.pt"
    logs.append(folder / "answers.jsonl", {"step": 3})  # of the evaluation that was not ended
    again.train_step = None
    again.train()
    assert steps_of(folder / "evaluations.jsonl") == [0, 3]
    assert steps_of(folder / "answers.jsonl") == [0, 0, 3, 3]
    assert steps_of(folder / "metrics.jsonl") == [1, 2, 3]
    assert_same_weights(weights_of(again), undisturbed[1])
    make(**options).train()  # is not evaluated again
    assert steps_of(folder / "evaluations.jsonl") == [0, 3]


def test_the_best_checkpoint_and_the_last_two_are_kept(make):
    def right(*_):
        return trainer.run.step == 1

    trainer = make(**STEPS | {"steps": 4, "eval_size": 2, "eval_every": 1}, is_correct=right)
    folder = trainer.train()
    assert [int(x.stem[5:]) for x in sorted((folder / "checkpoints").iterdir())] == [1, 3, 4]


def test_numbers_of_any_kind_are_taken(make):
    trainer = make()
    ids, logps = [5, numpy.int64(6), torch.tensor(7)], [-1, numpy.float32(-1.5), torch.tensor(-2.0)]
    trainer.sampler.rollout = lambda *_: [Completion(ids, True, logps)]
    (one,) = trainer.sampler(trainer.train_problems[:1], 1, 1.0)
    assert one.token_ids == ids


# Gradients


def test_updates_without_a_finite_gradient_end_the_run(make, capsys):
    trainer = make(**STEPS | {"steps": 9})
    clip, weights = trainer.accelerator.clip_grad_norm_, []

    def broken(parameters, most):
        parameters = list(parameters)
        weights.append(weights_of(trainer))
        if len(weights) not in (1, 2, 4):
            parameters[0].grad *= torch.nan
        return clip(parameters, most)

    trainer.accelerator.clip_grad_norm_ = broken
    with pytest.raises(BadUpdates, match=r"10 updates in a row .* checkpoint: .*step-000002"):
        trainer.train()
    assert len(weights) == 14  # two, one, one, and ten in a row
    bad = [row.get("bad_updates") for row in rows_of(trainer.config.folder)]
    assert bad == [None, None, 2, 4, 6, 8]
    assert "grpo_kernels skips the update" in capsys.readouterr().out
    for earlier, later in ((2, 3), (4, 13)):  # between them all were left out
        assert_same_weights(weights[later], weights[earlier])
    assert not torch.equal(*(next(iter(weights[i].values())) for i in (3, 4)))


@pytest.fixture
def scaled(monkeypatch):
    """Has a trainer scale its loss, as where GEMMs are in float16; some scales are too large."""

    def scale(trainer, limit):
        accelerator, scaler = trainer.accelerator, torch.amp.GradScaler("cpu")
        monkeypatch.setattr(accelerator.state, "_mixed_precision", "fp16")
        monkeypatch.setattr(accelerator, "autocast", nullcontext)
        accelerator.scaler, accelerator.native_amp = scaler, True
        trainer.optimizer = AcceleratedOptimizer(trainer.optimizer.optimizer, scaler=scaler)
        accelerator._optimizers, backward = [trainer.optimizer], accelerator.backward

        def overflowing(loss):
            backward(loss)
            if scaler.get_scale() > limit:
                trainer.policy.model.model.norm.weight.grad += torch.inf

        accelerator.backward = overflowing

    return scale


def test_a_loss_scale_that_is_too_large_skips_updates_and_ends_no_run(make, scaled, capsys):
    """The first two of six updates; the others are those of a run without a scale."""
    options = STEPS | {"explain_every": 0, "max_grad_norm": 0.01}
    trainer, plain = (make(name=name, **options) for name in ("scaled", "plain"))
    scaled(trainer, limit=2.0**14)
    rows = rows_of(trainer.train())
    assert [row["loss_scale"] for row in rows] == [3 * 2.0**14, 2.0**14, 2.0**14]
    assert [row["grad_norm"] is None for row in rows] == [True, False, False]
    assert not any("bad_updates" in row for row in rows)
    out = capsys.readouterr().out
    assert "too large for float16" in out and "look for NaN" not in out
    assert checkpoint.latest(trainer.config.folder).name == "step-000003.pt"
    step, calls = plain.optimizer.step, []

    def from_the_third(*args):
        calls.append(1)
        if len(calls) > 2:
            step(*args)

    plain.optimizer.step = from_the_third
    plain.train()
    assert_same_weights(weights_of(trainer), weights_of(plain), 1e-5, 1e-7)


def test_gradients_that_no_loss_scale_helps_end_the_run(make, scaled):
    trainer = make(**STEPS | {"steps": 20})
    scaled(trainer, limit=0.0)
    with pytest.raises(BadUpdates, match="10 updates in a row"):
        trainer.train()
    assert trainer.accelerator.scaler.get_scale() == 2.0**-9  # 16 updates to a scale of 1


# Checkpoints


def test_what_is_half_written_or_foreign_is_no_checkpoint(make):
    folder = make().config.folder
    model, tokenizer = load_model(make().config)
    freeze_all_but(model, "layers.1.")
    left = folder / "checkpoints" / "step-000000.tmp"
    left.parent.mkdir(parents=True)
    left.touch()  # by a kill
    whole = checkpoint.latest(make(model, tokenizer, save_every=1).train())
    assert whole.name == "step-000002.pt" and not left.exists()
    (whole.parent / "step-last.pt").touch()
    (whole.parent / "step-000010.tmp").write_bytes(whole.read_bytes()[:-100])
    assert checkpoint.latest(folder) == whole
    # Frozen weights are in none.
    saved = checkpoint.tensors_of(whole)["trained"]
    assert saved and all("layers.1." in name for name in saved)
    assert not list(folder.rglob("model.safetensors"))


def test_a_scaler_goes_on():
    """And where a checkpoint has none, one begins."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0, 2.0)]
    policy = torch.nn.Linear(1, 1)
    saved, goes_on, begins = (checkpoint.TrainedState(policy, scaler=scaler) for scaler in scalers)
    tensors = saved.state_dict()
    goes_on.load_state_dict(tensors)
    del tensors["scaler"]
    begins.load_state_dict(tensors)
    assert [scaler.get_scale() for scaler in scalers] == [8.0, 8.0, 2.0]


HAS_ONE = r"output: .*/t has a run already"


def test_a_run_is_not_replaced_and_not_mixed(make, capsys):
    config = make().config
    folder = make().train()
    for begin in (make, lambda: load_model(replace(config, model="not there"))):
        with pytest.raises(FileExistsError, match=HAS_ONE):
            begin()
    assert config.in_new_folder().folder == folder.with_name("t-2")
    before = (folder / "config.json").read_text()
    changed = replace(config, resume=True, lora_rank=2, model="not there")
    with pytest.raises(ValueError, match=r"model: was .*; lora_rank: was 0, is 2"):
        load_model(changed)
    assert (folder / "config.json").read_text() == before
    last = checkpoint.latest(folder)
    known = checkpoint.state_of(last)
    known["config"]["precision"] = "no"  # an option that is gone
    torch.save({"state": json.dumps(known), **checkpoint.tensors_of(last)}, last)
    make(resume=True, steps=3).train()
    assert steps_of(folder / "metrics.jsonl") == [1, 2, 3]
    assert "no longer exist are left out: precision='no'" in capsys.readouterr().out


@pytest.mark.parametrize("trained", ({"save_model": True}, {"steps": 1}), ids=str)
def test_a_run_without_checkpoints_is_not_replaced(trained, make, capsys):
    folder = make(save_every=-1, **trained).train()
    before = sorted(folder.rglob("*"))
    with pytest.raises(FileExistsError, match=HAS_ONE):
        make(save_every=-1, **trained)
    if "save_model" in trained:
        with pytest.raises(FileExistsError, match=r"resume: the run in .* is finished"):
            make(save_every=-1, resume=True, **trained)
        assert sorted(folder.rglob("*")) == before
    else:  # it may have been killed before its first checkpoint
        make(save_every=-1, resume=True, **trained).train()
        assert len(rows_of(folder)) == 1
        assert f"resume: no checkpoint in {folder}: begins at step 1" in capsys.readouterr().out


CHANGED = "differ from the checkpoint's: "


def sums(count, tags=(0, 8)):
    """Problems; every process writes sets and objects in them in another way."""
    return [{"prompt": f"{i}+{i}=", "answer": 2 * i, "tags": {*tags}, "v": object()}
            for i in range(count)]  # fmt: skip


SUMS, ANSWER = sums(8), {"answer": 11}
REFERENCE = {"beta": 0.1, "ref_model": "reference"}
PROBLEMS, TOKENS = "problems", "tokens of the prompts"
TRAINED, WEIGHTS = "trained parameters", "weights that are not trained"
# A run's options, what is not as it was when it goes on, and what the message names.
CHANGES = {
    "sets in another order": ({}, {"train": sums(6, tags=(8, 0))}, []),
    "another answer": ({}, {"train": [*SUMS[:5], {**SUMS[5], **ANSWER}]}, [PROBLEMS]),
    "another order of evaluations": ({}, {"held_out": SUMS[7:5:-1]}, [PROBLEMS, TOKENS]),
    "another tokenizer": ({}, {"minus": True}, [TOKENS]),
    "another buffer": ({}, {"buffer": 1.5}, [WEIGHTS]),
    # The checkpoint has weights that are trained, but not those of a copy from the beginning.
    "trained weights": ({}, {"factor": 1.5}, []),
    "frozen weights": ({}, {"factor": 1.5, "trained": ("layers.1.",) * 2}, [WEIGHTS]),
    "other frozen weights": ({}, {"trained": ("layers.1.", "layers.")}, [TRAINED, WEIGHTS]),
    "weights and their copy": ({"beta": 0.1}, {"factor": 1.5}, [WEIGHTS]),
    "weights of the reference": (REFERENCE, {"reference": 1.5}, [WEIGHTS]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_goes_on_with_the_inputs_of_its_checkpoint(name, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, change, names = CHANGES[name]

    def inputs(train=SUMS[:6], held_out=SUMS[6:], minus=False, buffer=1.0, factor=1.0,
               reference=1.0, trained=""):  # fmt: skip
        model, other, tokenizer = make_model("llama"), make_model("llama"), make_tokenizer()
        with torch.no_grad():
            model.model.norm.weight.mul_(factor)
            other.model.norm.weight.mul_(reference)
        model.register_buffer("offset", torch.full((2,), buffer))
        other.save_pretrained("reference")
        if minus:
            tokenizer.backend_tokenizer.normalizer = normalizers.Replace("+", "-")
        freeze_all_but(model, trained)
        return make(model, tokenizer, problems=(train, held_out), **options).run.inputs

    before, after = change.get("trained", ("", ""))
    state = {"inputs": inputs(trained=before)}
    parts = [f"{name}: was .*sha256 [0-9a-f]{{12}}, is .*sha256 [0-9a-f]{{12}}" for name in names]
    message = f"problems or models differ from the checkpoint's: {'; '.join(parts)}$"
    with pytest.raises(ValueError, match=message) if names else nullcontext():
        checkpoint.check_inputs(state, inputs(**change | {"trained": after}))


def test_a_run_with_other_inputs_does_not_go_on(make):
    make(steps=1, problems=(SUMS[:6], SUMS[6:])).train()
    with pytest.raises(ValueError, match=r"problems or models .* problems: was 6 \+ 2, "):
        make(resume=True, problems=(SUMS[:5], SUMS[6:])).train()
    folder = make(resume=True, problems=(SUMS[:6], SUMS[6:])).train()
    assert len(rows_of(folder)) == 2


# Disks and folders


def test_a_full_disk_leaves_the_last_checkpoint(make, monkeypatch, capsys):
    original, calls = torch.save, []

    def full(saved, file):
        calls.append(file)
        if len(calls) == 2:
            file.write(b"x")
            raise OSError(28, "No space left on device")
        return original(saved, file)

    monkeypatch.setattr(torch, "save", full)
    folder = make(steps=3, save_every=1).train()
    assert len(calls) == 3 and "no checkpoint of step 2 (OSError" in capsys.readouterr().out
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert names == ["step-000001.pt", "step-000003.pt"] and len(rows_of(folder)) == 3


def test_half_a_row_is_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        logs.append(path, {"step": step, "loss": math.nan})
    logs.open_folder(tmp_path, {}, 2)
    with path.open("a") as file:  # as a kill leaves it
        file.write('{"step": 3, "lo')
    assert read_rows(path) == [{"step": 1, "loss": None}, {"step": 2, "loss": None}]
    logs.open_folder(tmp_path, {}, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            logs.append(path, {"step": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    logs.append(path, {"step": 4})
    assert steps_of(path) == [1, 2, 4]


LOGS = ("metrics", "evaluations", "answers")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full, of Linux")
def test_rows_that_find_no_room_are_written_with_the_next_ones(make, capsys):
    options = STEPS | {"eval_size": 2, "eval_every": 1, "save_every": 0}
    expected, trainer = make(name="a", **options), make(name="b", **options)
    logs_of_run = [trainer.config.folder / f"{x}.jsonl" for x in LOGS]

    def fill(row, _):
        for log in logs_of_run:
            own = log.with_suffix(".own")
            if row["step"] == 1:
                log.rename(own)
                log.symlink_to("/dev/full")
            elif row["step"] == 3:
                own.rename(log)

    trainer.train(fill)
    said, whole = capsys.readouterr().out, expected.train()
    for log in logs_of_run:
        message = rf"warning: {log.name} cannot be written \(.*No space left"
        assert len(re.findall(message, said)) == 1
        rows = [read_rows(x) for x in (log, whole / log.name)]
        assert [*map(untimed, rows[0])] == [*map(untimed, rows[1])]
    assert checkpoint.latest(trainer.config.folder).name == "step-000003.pt"


def test_two_runs_in_one_folder(make):
    first, second = make(**STEPS), make(**STEPS)

    def and_another(*_):
        with pytest.raises(RuntimeError, match="output: another process trains in"):
            second.train()

    assert steps_of(first.train(and_another) / "metrics.jsonl") == [1, 2, 3]


def test_options_that_a_checkpoint_does_not_know_are_at_their_defaults():
    config = config_of("m", "runs")
    before = config.as_json()
    for name in ("loss_options", "min_p", "trackers", "chat"):
        del before[name]
    checkpoint.check_options({"config": before}, config)
    with pytest.raises(ValueError, match="differ from the checkpoint's: chat: was False, is True"):
        checkpoint.check_options({"config": before}, replace(config, chat=True))

"""Checkpoints: what is stored, and that a run goes on from it."""

from pathlib import Path

import pytest
import torch

from grpo_kernels.training import checkpoint, load_model
from tests.helpers.trainer_runs import config_of, rows_of, trainer_of

pytestmark = pytest.mark.usefixtures("real_memory", "curves")


def test_a_full_disk_leaves_the_last_checkpoint(tiny_model, tmp_path, monkeypatch, capsys):
    from accelerate import Accelerator

    config = config_of(tiny_model, tmp_path, steps=3, save_every=1)
    trainer = trainer_of(config)
    original, calls = Accelerator.save_state, []

    def full(self, folder, **options):
        calls.append(folder)
        if len(calls) == 2:
            Path(folder, "half").write_text("x")
            raise OSError(28, "No space left on device")
        return original(self, folder, **options)

    monkeypatch.setattr(Accelerator, "save_state", full)
    folder = trainer.train()
    assert len(calls) == 3 and "no checkpoint of step 2 (OSError" in capsys.readouterr().out
    kept = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000003"]
    assert len(rows_of(folder)) == 3


def test_what_is_half_written_or_half_deleted_is_no_checkpoint(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, save_every=1)
    left = config.folder / "checkpoints" / ".step-000000.gone"
    left.mkdir(parents=True)
    (left / "trained.pt").write_text("half")
    folder = trainer_of(config).train()
    assert not left.exists()
    whole = checkpoint.latest(folder)
    assert whole.name == "step-000002"
    (folder / "checkpoints" / "step-000009").mkdir()
    (folder / "checkpoints" / ".step-000010.tmp").mkdir()
    assert checkpoint.latest(folder) == whole


def test_checkpoints_hold_what_is_trained(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, trainable=r"layers\.1\.", steps=1)
    folder = trainer_of(config).train()
    saved = torch.load(folder / "checkpoints" / "step-000001" / "trained.pt", weights_only=True)
    assert saved and all("layers.1." in name for name in saved)
    assert not list(folder.rglob("model.safetensors"))


def test_a_run_is_not_replaced_and_not_mixed(tiny_model, tmp_path):
    trainer_of(config_of(tiny_model, tmp_path)).train()
    with pytest.raises(FileExistsError, match="name: expected one without checkpoints"):
        trainer_of(config_of(tiny_model, tmp_path)).train()
    with pytest.raises(FileExistsError, match="name: expected one without checkpoints"):
        load_model(config_of("not there", tmp_path))
    assert config_of(tiny_model, tmp_path).unused().name == "t-2"
    before = (tmp_path / "t" / "config.json").read_text()
    other = config_of(tiny_model, tmp_path, resume=True, trainable="layers", steps=3)
    with pytest.raises(ValueError, match="trainable: was None, is 'layers'"):
        trainer_of(other).train()
    assert (tmp_path / "t" / "config.json").read_text() == before
    folder = trainer_of(config_of(tiny_model, tmp_path, resume=True, steps=3)).train()
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "processes", "message"),
    (
        ({"model": "other"}, 1, "model: was 'm', is 'other'"),
        ({"steps": 4}, 1, "steps: expected 3, on which schedule = 'linear' depends; got 4"),
        ({}, 2, "resume: expected 1 processes, as the checkpoint has; got 2"),
    ),
)
def test_a_checkpoint_is_for_the_options_it_was_made_with(change, processes, message):
    config = {"model": "m", "steps": 3, "schedule": "linear"}
    state = {"config": config, "processes": 1}
    checkpoint.check_same(state, config, 1)
    with pytest.raises(ValueError, match=message):
        checkpoint.check_same(state, {**config, **change}, processes)

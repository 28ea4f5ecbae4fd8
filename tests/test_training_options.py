"""Options that are misspelled or another library's, the hook of `train`, and a missing extra."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_kernels.experimental import column_draw
from grpo_kernels.losses import Sapo
from grpo_kernels.training import data, parse_config
from grpo_kernels.training.metrics import Clock
from grpo_kernels.training.requirements import NEEDED
from tests.helpers.trainer_runs import config_of, no_curves, rows_of, trainer_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("flag", "answer"),
    (
        ("--stepz", "--steps INT"),
        ("--step", "--steps INT"),
        ("--num-generation", "--num_generations INT"),
        ("--learning_rat=3", "--learning_rate FLOAT"),
        ("--no_share_promts", "--share_prompts, --no_share_prompts"),
        ("--xyzzy", "--help"),
    ),
)
def test_an_unknown_flag_is_answered(flag, answer, capsys):
    with pytest.raises(SystemExit) as exit:
        parse_config(["--model", "m", flag, "3"])
    text = capsys.readouterr().err
    assert exit.value.code == 2 and flag in text and answer in text
    assert len(text.splitlines()) < 25


def test_a_key_of_a_file_is_answered(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("modell: m\neval_evry: 3\n")
    with pytest.raises(SystemExit):
        parse_config([str(path)])
    text = capsys.readouterr().err
    assert "--modell" in text and "--model STR" in text and "--eval_every INT" in text
    path.write_text("steps")
    with pytest.raises(SystemExit):
        parse_config([str(path)])
    assert "expected options, one per line as `steps: 100`; got 'steps'" in capsys.readouterr().err


def test_every_step_is_handed_out(tiny_model, tmp_path, real_memory):
    seen = []
    config = config_of(tiny_model, tmp_path, save_every=-1)
    with no_curves():
        folder = trainer_of(config).train(lambda row, samples: seen.append((row, samples)))
    assert [row["step"] for row, _ in seen] == [1, 2]
    row, samples = seen[0]
    assert row["reward"] == pytest.approx(samples.totals.mean().item()) and row["grad_norm"] > 0
    assert len(samples.prompts) == len(samples.problems) == 4 and len(samples.texts) == 16
    assert samples.prompt_of == [i // 4 for i in range(16)]
    assert samples.logps.shape == samples.mask.shape
    assert not (folder / "checkpoints").exists()


def test_prompts_are_tokenized_once(tiny_model, tmp_path, real_memory):
    trainer = trainer_of(config_of(tiny_model, tmp_path, eval_size=3))
    again = []
    trainer.encode._encode = again.append
    with no_curves():
        trainer.train()
    assert again == []
    messages = [{"role": "user", "content": "a"}]
    encode = data.PromptEncoder(None, chat=False)
    encode._encode = lambda prompt: [prompt]
    assert encode({"prompt": messages}) == [messages] != encode({"prompt": repr(messages)})


HOOK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import grpo_kernels  # needs none of them
try:
    import grpo_kernels.training
except ImportError as error:
    print(error)
"""


def test_a_missing_extra_is_named():
    missing = ("accelerate", "yaml")
    run = subprocess.run(
        [sys.executable, "-c", HOOK.format(missing=missing)], capture_output=True, text=True,
        timeout=120, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    packages = ", ".join(NEEDED[module] for module in missing)
    expected = f"grpo_kernels.training needs {packages}: pip install 'grpo_kernels[train]'"
    assert run.stdout.strip() == expected
    extra = (ROOT / "pyproject.toml").read_text().split("\ntrain = [")[1].split("]")[0]
    assert all(f'"{package}>=' in extra for package in NEEDED.values())


def train(config):
    with no_curves():
        return rows_of(trainer_of(config).train())


def test_a_loss_by_instance_is_that_of_its_name(tiny_model, tmp_path, real_memory):
    """Its repr is recorded, by which a run goes on."""
    config = config_of(tiny_model, tmp_path, loss_type=Sapo(temperature_neg=1.3), beta=0.1)
    by_instance = train(config)
    named = replace(config, name="named", loss_type="sapo", sapo_temperature_neg=1.3)
    assert by_instance == train(named)
    recorded = json.loads((config.folder / "config.json").read_text())["loss_type"]
    assert recorded == "Sapo(temperature_pos=1.0, temperature_neg=1.3)"
    assert len(train(replace(config, steps=3, resume=True))) == 3
    with pytest.raises(ValueError, match=r"loss_type: was 'Sapo.*1\.3.*', is 'Sapo.*1\.05"):
        train(replace(config, steps=4, resume=True, loss_type=Sapo()))


def pulls(tokens):
    """A loss that trains tokens of advantage 0 as well."""
    return -(1 + tokens.advantages) * tokens.logps


def test_nothing_is_skipped_that_trains(tiny_model, tmp_path, real_memory):
    equal = {"noise": lambda prompts, completions, **_: [1.0] * len(completions)}
    for loss_type, skips in (("dapo", True), (Sapo(), True), (pulls, False)):
        trainer = trainer_of(config_of(tiny_model, tmp_path, loss_type=loss_type), rewards=equal)
        samples = trainer.sampling(
            trainer.train_problems[:4], trainer.step, Clock(torch.device("cpu"))
        )
        assert not any(samples.may_train)
        rows = list(range(len(samples.texts)))
        assert trainer.scorer.trained(samples, 0, rows) == ([] if skips else rows)


def test_the_sampled_backward(tiny_model, tmp_path, real_memory, monkeypatch):
    """Other columns in every micro-batch, and the same ones in a run from the same seed."""
    monkeypatch.setattr(column_draw, "_FLAT_SHARE", 2.0)  # that of a small model
    drawn = {"backward": "sampled", "tolerance": 0.5, "micro_batch_size": 4}
    first, again, exact = (
        train(config_of(tiny_model, tmp_path, name=name, **options))
        for name, options in (("a", drawn), ("b", drawn), ("c", {}))
    )
    assert first == again and first[0]["loss"] == pytest.approx(exact[0]["loss"], abs=1e-5)
    assert first[0]["grad_norm"] != pytest.approx(exact[0]["grad_norm"], rel=1e-3)

"""Options that are misspelled or another library's, the hook of `train`, and a missing extra."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_kernels import training
from grpo_kernels.training import TrainingConfig, data, demo_model, parse_config
from grpo_kernels.training.command_line import _OF_TRL
from grpo_kernels.training.requirements import NEEDED
from tests.support.trainer_runs import config_of, no_curves, trainer_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("flag", "answer"),
    (
        ("--stepz", "--stepz: did you mean --steps?"),
        ("--step", "--step: did you mean --steps"),
        ("--num-generation", "--num-generation: did you mean --num_generations?"),
        ("--learning_rat=3", "--learning_rat: did you mean --learning_rate?"),
        ("--no_share_promts", "--no_share_promts: did you mean --no_share_prompts?"),
        ("--xyzzy", "--xyzzy: --help lists all options"),
        ("--output_dir", "--output_dir is TRL's; here: a run is kept in output/name: --output"),
        ("--model-name-or-path", "--model-name-or-path is TRL's; here: --model"),
        ("--per_device_train_batch_size", "here: --micro_batch_size (completions in a forward"),
        ("--gradient_accumulation_steps", "here: nothing to set"),
        ("--num_train_epochs", "here: --steps (rollouts"),
        ("--max_steps", "here: --steps (rollouts"),
        ("--save_steps", "here: --save_every"),
        ("--logging_steps", "here: every step is logged"),
        ("--report_to", "here: --trackers"),
        ("--use_vllm", "--use_vllm is TRL's; here: --rollout vllm"),
    ),
)
def test_an_unknown_flag_is_answered(flag, answer, capsys):
    with pytest.raises(SystemExit) as exit:
        parse_config(["--model", "m", flag, "3"])
    text = capsys.readouterr().err
    assert exit.value.code == 2 and answer in text and len(text.splitlines()) < 5


def test_a_key_of_a_file_is_answered(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("modell: m\noutput_dir: x\nsave_steps: 3\n")
    with pytest.raises(SystemExit):
        parse_config([str(path)])
    text = capsys.readouterr().err
    assert "modell: did you mean model?" in text
    assert "save_steps is TRL's; here: save_every" in text and "output_dir is TRL's" in text
    path.write_text("steps")
    with pytest.raises(SystemExit):
        parse_config([str(path)])
    assert "expected options, one per line as `steps: 100`; got 'steps'" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_told_of_trls_options_is_so():
    ours = set(TrainingConfig.__dataclass_fields__)
    assert not ours & set(_OF_TRL)
    pytest.importorskip("trl", reason="needs the extra 'peers'")
    from trl import GRPOConfig, ModelConfig, ScriptArguments

    theirs = {n for c in (GRPOConfig, ModelConfig, ScriptArguments) for n in c.__dataclass_fields__}
    # Some are arguments of its trainer, or options of its older versions.
    made_up = (
        set(_OF_TRL) - theirs - {"reward_funcs", "torch_dtype", "use_liger_loss", "warmup_ratio"}
    )
    assert not made_up


def test_trls_num_iterations_is_another():
    with pytest.raises(ValueError, match=r"\(TRL's num_iterations is epochs_per_rollout here\)"):
        TrainingConfig(model="m", num_iterations=2)


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


def test_the_demo_model_is_found_by_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = demo_model.cache_folder()
    folder.mkdir(parents=True)
    assert training.resolve_model("smollm2-135m") == str(folder)
    assert training.resolve_model("some/model") == "some/model"


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

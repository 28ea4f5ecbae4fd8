"""Options of a run: from Python, as flags and in files; the commands, and a missing extra.

Their refusals are in `tests/refusals`, and what they do in `test_training_matrix.py`.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_kernels.base.hints import ELSEWHERE
from grpo_kernels.training import (
    TrainingConfig,
    command_line,
    parse_config,
)
from grpo_kernels.training import __main__ as training_command
from grpo_kernels.training.config import DTYPES
from grpo_kernels.training.run import ranks
from grpo_kernels.training.run.ranks import make_accelerator
from tests.helpers import trainer_runs

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Own(TrainingConfig):
    """Options of one's own."""

    high: float = 1.0
    """A number of one's own."""
    way: Literal["x", 2] = "x"
    """One of two."""
    some: "list[int] | None" = None
    """Numbers, or none."""
    folders: tuple[Path, ...] = (Path("a"), Path("b"))
    """Some folders."""
    either: int | str = 0
    """A number, or text."""
    table: dict[str, int] = field(default_factory=dict)
    """Numbers by name."""


def config_of(**options):
    return trainer_runs.config_of("m", "runs", **options)


def test_a_launcher_s_environment_is_none_of_a_run_s(monkeypatch):
    for value in ("", "1"):
        monkeypatch.setenv("WORLD_SIZE", value)
        assert make_accelerator(config_of()).num_processes == 1


# Flags and files


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    (
        ("learning_rate: 1e-6\nstop: [</answer>]\nsteps: 7\nscale_rewards: none\nbeta: 1\n"
         "ref_model: '0123456'\nchat: true\nreplay_support: false",
         ["--steps", "9", "--no_share_prompts", "--top-k=3"],
         {"learning_rate": 1e-6, "stop": ["</answer>"], "steps": 9, "share_prompts": False,
          "scale_rewards": "none", "beta": 1.0, "ref_model": "0123456", "chat": True,
          "replay_support": False, "output": "n", "top_k": 3}),
        ("ref_model: null\nstop: [no, '007']\nrewards: [answer, format]\nreward_weights: [1, .5]\n"
         "steps: 1_000\nchat: yes\nloss_options: {epsilon: 1e-1}\nsome: null", [],
         {"ref_model": None, "stop": ["no", "007"], "reward_weights": [1.0, 0.5], "steps": 1000,
          "chat": True, "loss_options": {"epsilon": 0.1}, "some": None}),
        ("high: 0.5\nway: x\nsome: [3, 4]",
         ["--either", "7", "--model", "0123456", "--stop", "no", "007"],
         {"high": 0.5, "way": "x", "some": [3, 4], "either": 7, "model": "0123456",
          "stop": ["no", "007"]}),
    ),
)  # fmt: skip
def test_an_option_gets_what_is_written(text, flags, expected, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: m\n{text}\n")
    defaults = {"output": "n", "beta": 0.1, "ref_model": "r", "some": [3]}
    config = parse_config([str(path), *flags], kind=Own, **defaults)
    for name, value in expected.items():
        assert getattr(config, name) == value and type(getattr(config, name)) is type(value), name


def test_a_run_has_a_file_of_its_options(tmp_path):
    config = Own(
        model="m", loss_type="sapo", loss_options={"temperature_neg": 1.3}, stop=["no", "1"],
        trackers=["wandb"], eval_max_completion_length=5, chat=True, beta=1e-3, some=[2],
        table={"a": 1}, save_model=False, is_correction="token_mask", is_clip_min=0.5,
    )  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.as_json(), indent=1))
    assert parse_config([str(path)], kind=Own) == config and config.as_json()["table"] == {"a": 1}
    assert config.as_json()["folders"] == ["a", "b"]


def test_one_value_is_a_list_of_one(tmp_path):
    values = {"rewards": "answer", "reward_weights": 0.5, "stop": "###", "trackers": "wandb"}
    (tmp_path / "run.yaml").write_text(json.dumps({"model": "m", **values}))
    flags = [x for name, value in values.items() for x in (f"--{name}", str(value))]
    for config in (
        config_of(**values),
        parse_config([str(tmp_path / "run.yaml")]),
        parse_config(["--model", "m", *flags]),
    ):
        assert all(getattr(config, name) == [value] for name, value in values.items())
    assert config_of(stop=[]).stop == []


def test_the_home_folder_is_written_out_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = {name: f"~/{name}" for name in ("model", "ref_model", "dataset", "output")}
    config = TrainingConfig(beta=0.1, **paths)
    assert all(getattr(config, name) == f"/home/me/{name}" for name in paths)


def test_names_that_people_bring_have_a_hint():
    """Each is an option elsewhere and none here."""
    options = TrainingConfig.__dataclass_fields__
    for name, instead in ELSEWHERE.items():
        option = re.match(r"Set (\w+)", instead)
        assert name not in options and (option is None or option[1] in options), name


def test_every_option_is_explained(capsys):
    with pytest.raises(SystemExit):
        parse_config(["--help"], kind=Own)
    words = " ".join(capsys.readouterr().out.split())
    assert "Weight of the KL to the reference policy" in words and "(type:" not in words
    # A name, its values, its text.
    option = r"--(\w+)(?: X(?:, --\w+\+ X)?|, --\w+\+ X| \[X \.\.\.\]| \{.*?\}|, --no_\w+) "
    _, *parts = re.split(option, words)
    explained = dict(zip(parts[::2], parts[1::2], strict=True))
    for name in Own.__dataclass_fields__:
        assert len(explained[name].split("(default")[0].split()) >= 2, name


# The command


@pytest.mark.usefixtures("real_memory")
def test_the_command_trains_from_a_file(tiny_model, tmp_path):
    options = trainer_runs.config_of(tiny_model, tmp_path, steps=1, rewards=["answer"]).as_json()
    (tmp_path / "run.yaml").write_text(json.dumps(options))
    folder = training_command.main([str(tmp_path / "run.yaml"), f"--output={tmp_path}/other"])
    assert folder == tmp_path / "other" and len(trainer_runs.rows_of(folder)) == 1


def test_errors_of_users_are_a_sentence_and_others_are_raised(monkeypatch, capsys):
    """The first of several processes speaks; its launcher then ends the others, or they speak."""
    waited = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    for rank, seconds in (("0", []), ("1", [20.0])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended, command_line.user_errors([]):
            raise ValueError("x: expected y")
        said = "error: x: expected y\n(--traceback shows where this was raised)\n"
        assert (ended.value.code, capsys.readouterr().err, waited) == (2, said, seconds)
    with pytest.raises(SystemExit):
        training_command.main(["--model=m", "--dataset=nowhere.jsonl", "--traceback"])
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and "data.py" in printed
    for error in (RuntimeError, TypeError, KeyError, KeyboardInterrupt):
        with pytest.raises(error), command_line.user_errors([]):
            raise error("x")


COMMAND = "import runpy; sys.argv[0] = '-m'; runpy.run_module('grpo_kernels.training')"


def test_a_missing_extra_is_named():
    code = f"import sys; sys.modules['jsonargparse'] = None; import grpo_kernels\n{COMMAND}"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    expected = "grpo_kernels.training needs jsonargparse: pip install -e '.[train]' in the checkout"
    assert (run.returncode, run.stderr.strip()) == (2, f"error: {expected}")


@pytest.mark.parametrize(
    ("dtype", "weights", "autocast", "gemms"),
    (
        ("mixed", "float32", "bf16", "bfloat16"),
        ("fp32", "float32", "no", "float32"),
        ("bf16", "bfloat16", "bf16", "bfloat16"),
    ),
)
def test_a_dtype_is_that_of_weights_and_gemms(dtype, weights, autocast, gemms, monkeypatch):
    """On a GPU with bf16; on one without mixed is fp16, and on a CPU fp32."""
    config = config_of(dtype=dtype)

    def chosen():
        return ranks.mixed_precision(config), ranks.gemm_dtype(config)

    assert (DTYPES[dtype], *chosen()) == (weights, "no", weights)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # A T4 says that it has bf16: by emulation, slower than float32.
    without = ("fp16", "float16") if dtype == "mixed" else ("no", weights)
    for native, expected in ((False, without), (True, (autocast, gemms))):
        answer = {True: True, False: native}
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported",
            lambda including_emulation=True, answer=answer: answer[including_emulation],
        )  # fmt: skip
        assert chosen() == expected
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert chosen() == ("no", weights)


# What `accelerate launch` may have put there, but for what is refused.
ENVIRONMENT = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_DYNAMO_BACKEND": "EAGER",
    "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_CLIPPING": "0.1",
}  # fmt: skip


def test_the_environment_changes_neither_gradients_nor_names(make, tmp_path, monkeypatch, capsys):
    AcceleratorState._reset_state(reset_partial_state=True)  # which has what it read before
    plain = make(name="plain").train()
    AcceleratorState._reset_state(reset_partial_state=True)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    try:
        other = make(name="other").train()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert trainer_runs.rows_of(other) == trainer_runs.rows_of(plain)
    said = capsys.readouterr().out
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 is not used: " in said

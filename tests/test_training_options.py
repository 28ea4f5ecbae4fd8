"""Options of a run: from Python, as flags and in files, what refuses them, and a missing extra."""

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from filelock import FileLock
from safetensors.torch import load_file

from grpo_kernels import GRPOLossConfig
from grpo_kernels.base.hints import ELSEWHERE
from grpo_kernels.training import (
    TrainingConfig,
    command_line,
    load_model,
    loading,
    parse_config,
)
from grpo_kernels.training import __main__ as training_command
from grpo_kernels.training.checks import check_host, start
from grpo_kernels.training.config import DEFAULTS, DTYPES
from grpo_kernels.training.run import checkpoint, logs, ranks
from grpo_kernels.training.run.ranks import make_accelerator
from tests.helpers import trainer_runs
from tests.helpers.fake_vllm import install

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


# What refuses options


def config_of(**options):
    return trainer_runs.config_of("m", "runs", **options)


SYNCED = {"beta": 0.1, "sync_ref_every": 2}
VALUES = {
    "steps: expected at least 1; got 0": {"steps": 0},
    "num_generations: expected at least 2": {"num_generations": 1},
    "learning_rate: expected a number > 0": {"learning_rate": 0.0},
    "weight_decay: expected at least 0; got nan": {"weight_decay": math.nan},
    "max_grad_norm: expected a number > 0; got inf": {"max_grad_norm": math.inf},
    r"top_p: expected a number in \(0, 1\]; got 1.5": {"top_p": 1.5},
    r"min_p: expected a number in \[0, 1\]": {"min_p": 1.5},
    r"epsilon: expected a number in \[0, 1\]": {"epsilon": 2.0},
    "rewards: expected at least one": {"rewards": []},
    "reward_weights: expected a finite number for each of": {"reward_weights": [1.0, 2.0]},
    "reward_weights: expected a finite .*nan": {"reward_weights": [math.nan, 1.0]},
    r"output: expected a folder with a name; got 'runs/\.\.'": {"output": "runs/.."},
    "seed: expected a number from 0 to": {"seed": -1},
    r"seed: expected a number from 0 to 2\^32 - 1; got 4294967296": {"seed": 2**32},
    "minibatches: expected a divisor of prompts_per_step = 4": {"minibatches": 3},
    "eval_every=2 has no effect without eval_size: set": {"eval_every": 2},
    r"stop: expected strings that are not empty, .*; got \['a', ''\]": {"stop": ["a", ""]},
    r"stop: expected strings that are not empty": {"stop": ""},
    "kl_estimator='k1' has no effect without beta": {"kl_estimator": "k1"},
    "lora_alpha=8 has no effect without lora_rank": {"lora_alpha": 8},
    "sync_ref_every=2 has no effect without beta": {"sync_ref_every": 2},
    "ref_model='m' has no effect without beta": {"ref_model": "m"},
    "kl_estimator='exact' needs the full": {"beta": 0.1, "kl_estimator": "exact", "top_k": 5},
    "sync_ref_every=2 does not work with lora_rank": {**SYNCED, "lora_rank": 2},
    # Before the advice to set beta, which leads nowhere.
    "sync_ref_every=3 does not work with lora_rank": {"sync_ref_every": 3, "lora_rank": 2},
    "sync_ref_every=2 does not work with ref_model": {**SYNCED, "ref_model": "m"},
    "entropy_coef=0.1 does not work": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    "vllm_enable_sleep_mode=True has no effect without": {"vllm_enable_sleep_mode": True},
}  # fmt: skip
# All numbers have a bound, but `seed`, which may be any number.
VALUES |= {
    f"{name}: expected": {"beta": 0.1, "rollout": "vllm", name: -2}
    for name, default in DEFAULTS.items()
    if type(default) in (int, float) and name not in {"seed", *GRPOLossConfig.__dataclass_fields__}
}


@pytest.mark.parametrize("message", VALUES)
def test_values_are_checked(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        config_of(**VALUES[message])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    (
        ("steps", 1.5, "expected int; got 1.5"),
        ("steps", "3", "expected int; got '3'"),
        ("stop", 3, r"expected list\[str\]; got \[3\]"),
        ("stop", ["x", 1], r"expected list\[str\]; got \['x', 1\]"),
        ("resume", 1, "expected bool; got 1"),
        ("output", 3, "expected str"),
        ("output", None, "expected str"),
        ("dtype", "fp8", r"expected one of 'mixed', 'fp32', 'bf16'; got"),
        ("high", "x", "expected float; got 'x'"),
        ("way", "y", r"expected one of 'x', 2; got 'y'"),
        ("some", ["x"], r"expected .*list\[int\].*; got \['x'\]"),
    ),
)
def test_types_are_checked(option, value, message):
    with pytest.raises(TypeError, match=f"^{option}: {message}"):
        Own(model="m", **{option: value})


@pytest.mark.usefixtures("real_memory")
@pytest.mark.parametrize(
    ("options", "environment", "message"),
    (
        ({"model": "no/where"}, {}, r"model: 'no/where' is not a folder with a model, and not on"),
        ({"rewards": ["nobody"]}, {}, "rewards: expected some of answer, .*; got 'nobody'"),
        ({"is_correction": "token_mask"}, {}, "is_correction='token_mask' needs log-probs"),
        ({"max_prompt_length": 1}, {}, "max_prompt_length=1: every prompt is longer"),
        ({"rollout": "vllm"}, {}, "rollout: vllm is not installed: pip install"),
        ({"rollout": "vllm", "vllm_enable_sleep_mode": True}, {},
         "vllm_enable_sleep_mode: expected False on a CPU, .*; got True"),
        ({"rollout": "vllm", "vllm_gpu_memory_utilization": 0.5}, {},
         "vllm_gpu_memory_utilization: expected .* on a CPU, .*; got 0.5"),
        # As torchrun starts processes, which accelerate ignores on a CPU.
        ({}, {"WORLD_SIZE": "2"}, r"WORLD_SIZE=2, but .* one process: .*ACCELERATE_USE_CPU"),
        *(({"model": "no/where"}, {f"ACCELERATE_USE_{kind}": "true"},
           f"ACCELERATE_USE_{kind} does .*FusedGRPOTrainer")
          for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")),
        ({"model": "no/where"}, {"ACCELERATE_FP8_BACKEND": "TE"}, "ACCELERATE_FP8_BACKEND=TE does"),
    ),
)  # fmt: skip
def test_what_does_not_fit_is_refused(options, environment, message, make, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it asks for long
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, OSError, ImportError), match=f"^{message}"):
        make(**options)


def test_what_fits_is_not_refused(monkeypatch):
    for value in ("", "1"):
        monkeypatch.setenv("WORLD_SIZE", value)
        assert make_accelerator(config_of()).num_processes == 1
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP"):
        make_accelerator(config_of())
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    install(monkeypatch)
    config = config_of(rollout="vllm", is_correction="token_truncate")
    start(config, own_rollout=False)  # its log-probs may correct
    check_host(config_of(rollout="vllm", vllm_enable_sleep_mode=True), on_cpu=False)


# Flags and files


def test_options_of_ones_own():
    config = Own(model="m", high=2, way=2, some=[1], either="x", steps=3)
    assert (config.high, config.way, config.some, config.steps) == (2, 2, [1], 3)
    written = config.as_json()
    assert written == json.loads(json.dumps(written)) and written["folders"] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    (
        ("learning_rate: 1e-6\nstop: [</answer>]\nsteps: 7", ["--steps", "9", "--no_share_prompts"],
         {"learning_rate": 1e-6, "stop": ["</answer>"], "steps": 9, "share_prompts": False}),
        ("chat: true\nreplay_support: false", [], {"chat": True, "replay_support": False}),
        ("ref_model: '0123456'", [], {"ref_model": "0123456"}),
        ("ref_model: null", [], {"ref_model": None}),
        ("scale_rewards: none", [], {"scale_rewards": "none"}),
        ("stop: [no, '007']", [], {"stop": ["no", "007"]}),
        ("rewards: [answer, format]\nreward_weights: [1, .5]", [], {"reward_weights": [1.0, 0.5]}),
        ("steps: 1_000\nchat: yes", [], {"steps": 1000, "chat": True}),
        ("beta: 1", [], {"beta": 1.0, "output": "n"}),
        ("loss_options: {epsilon: 1e-1}", [], {"loss_options": {"epsilon": 0.1}}),
        ("", ["--model", "0123456", "--stop", "no", "007"],
         {"model": "0123456", "stop": ["no", "007"]}),
        ("", ["--top-k=3"], {"top_k": 3}),
        ("high: 0.5\nway: x\nsome: [3, 4]\nsteps: 5", ["--either", "7"],
         {"high": 0.5, "way": "x", "some": [3, 4], "steps": 5, "either": 7}),
        ("some: null", [], {"some": None}),
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
    assert parse_config([str(path)], kind=Own) == config


@pytest.mark.parametrize("source", ("python", "yaml", "flags"))
def test_one_value_is_a_list_of_one(source, tmp_path):
    values = {"rewards": "answer", "reward_weights": 0.5, "stop": "###", "trackers": "wandb"}
    if source == "python":
        config = config_of(**values)
    elif source == "yaml":
        (tmp_path / "run.yaml").write_text(json.dumps({"model": "m", **values}))
        config = parse_config([str(tmp_path / "run.yaml")])
    else:
        flags = [x for name, value in values.items() for x in (f"--{name}", str(value))]
        config = parse_config(["--model", "m", *flags])
    assert all(getattr(config, name) == [value] for name, value in values.items())
    assert config_of(stop=[]).stop == []


def test_the_home_folder_is_written_out_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = {name: f"~/{name}" for name in ("model", "ref_model", "dataset", "output")}
    for config in (
        TrainingConfig(beta=0.1, **paths),
        parse_config(["--beta=0.1", *(f"--{name}={path}" for name, path in paths.items())]),
    ):
        assert {name: getattr(config, name) for name in paths} == {
            name: f"/home/me/{name}" for name in paths
        }


NO_SUCH = f"--batch_size does not exist here. {ELSEWHERE['batch_size']}"


@pytest.mark.parametrize(
    ("text", "flags", "messages"),
    (
        ("model: m", ["--step", "3"], ["--step does not exist: did you mean --steps"]),
        ("modell: m", [], ["--modell does not exist: did you mean --model"]),
        ("model: m\nlearning-rat: 1", [], ["--learning_rat does not exist: did you mean --learn"]),
        ("model: m\ngrad-clip: 1", [], ["--grad_clip does not exist here. Set max_grad_norm."]),
        ("model: m\nbeta: high", [], ['"beta"', "Got value: high"]),
        ("model: 0123456", [], ['"model"', "Got value: 123456"]),
        ("model: m\nsteps: 3\nbeta: 0.1\nsteps: 4", [], ['duplicate key "steps"', "line 4"]),
        ("model: m", ["--loss_type", "ppo"], ["loss_type: expected one of grpo"]),
        ("steps: 3", [], ["model: expected a hub name or a folder"]),
        ("model: m\noutput:", [], ["output: expected str; got None"]),
        ("steps", [], ["Unexpected config: steps"]),
        (": {", [], ["Problems parsing config", "line 1"]),
        (None, [], ["File does not exist"]),
        # A switch that turns off is known.
        ("model: m", ["--kl_estimator=exact", "--beta=0.1", "--top_p=0.9"],
         ["--no_replay_support or another kl_estimator"]),
        ("model: m", ["--no_replay_suport"], ["did you mean --no_replay_support"]),
        ("model: m", ["--chat", "true"], ["Switches take no value: --chat turns one on"]),
        ("model: m", ["--chat", "1"], ["Switches take no value: --chat turns one on"]),
        # Names that people bring.
        ("model: m", ["--batch_size", "2"], [NO_SUCH]),
        ("model: m", ["--batch-size=2"], [NO_SUCH]),
        ("model: m\nbatch_size: 2", [], [NO_SUCH]),
        ("model: m", ["--gae_lambda", "1"], ["--gae_lambda does not exist here. There is no"]),
        ("model: m", ["--iters", "1"], ["--iters does not exist here. Set steps: each takes"]),
    ),
)  # fmt: skip
def test_what_is_not_understood_is_answered(text, flags, messages, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as exit:
        parse_config([str(path), *flags])
    printed = capsys.readouterr().err
    assert exit.value.code == 2 and len(printed.splitlines()) < 25
    assert all(message in printed for message in messages)
    assert "--no_replay_support does not exist" not in printed
    assert "did you mean" not in printed or "does not exist here" not in printed
    assert ("Switches" in printed) == ("--chat" in flags)


def test_an_option_that_nobody_has_is_no_default():
    with pytest.raises(TypeError, match=r"parse_config: expected options of .*; got \['modell'\]"):
        parse_config([], modell="m")


def test_options_of_elsewhere_are_none_of_ours():
    page = (ROOT / "docs" / "training.md").read_text()
    shown, quoted = re.search(r"^--(\w+) does not exist here\. (.*)$", page, re.M).groups()
    assert quoted == ELSEWHERE[shown]
    options = TrainingConfig.__dataclass_fields__
    for name, instead in ELSEWHERE.items():
        assert name not in options, name
        option = re.match(r"Set (\w+)", instead)
        assert option is None or option[1] in options, name


# Options of TRL 1.16, verl, OpenRLHF, Stable-Baselines3, vLLM and tutorials that have another name
# here, or none.
FOREIGN = """
adv_estimator attn_implementation batch_size beta1 bf16 clip_eps clip_range clip_ratio
clip_ratio_high cliprange dataset_name dataset_split deepspeed device entropy_coeff epochs eps_clip
epsilon_low eta eval_steps eval_strategy experiment_name fp16 fsdp gae_lambda gamma grad_clip
gradient_accumulation_steps iters kl_coef kl_loss_coef load_in_4bit logging_steps lora_dropout
lora_r lr lr_scheduler_type max_new_tokens max_response_length max_steps max_tokens
model_name_or_path model_revision mu n_samples num_epochs num_iterations num_return_sequences
num_train_epochs optim output_dir per_device_train_batch_size ppo_epochs push_to_hub
ref_model_mixup_alpha ref_model_sync_steps report_to resume_from_checkpoint revision reward_funcs
reward_model rollout_batch_size run_name save_steps save_total_limit target_kl tokenizer
train_batch_size train_file use_liger_kernel use_lora use_peft use_vllm wandb_project warmup_ratio
"""


def test_names_that_people_bring_have_a_hint():
    assert not {*FOREIGN.split()} - {*ELSEWHERE}
    assert [*ELSEWHERE] == sorted(ELSEWHERE)


# Groups of `--help`, each with one of its options.
GROUPS = {
    "Model": "lora_rank", "Data and rewards": "rewards", "Sampling": "temperature",
    "Loss": "epsilon",
    "Updates": "learning_rate", "Logs and checkpoints": "save_every", "This command": "high",
    "Options of some loss types only": "sapo_temperature_pos",
}  # fmt: skip


def test_every_option_is_explained_in_its_group(capsys):
    with pytest.raises(SystemExit):
        parse_config(["--help"], kind=Own)
    printed = capsys.readouterr().out
    titles = re.findall(r"^(\S.*):$", printed, re.MULTILINE)
    assert titles == ["options", *GROUPS]
    texts = re.split(r"^\S.*:$", printed, flags=re.MULTILINE)[2:]
    for text, (title, name) in zip(texts, GROUPS.items(), strict=True):
        assert f"--{name} " in text, title
    words = " ".join(printed.split())
    assert "Weight of the KL to the reference policy" in words and "(type:" not in words
    # A name, its values, its text.
    option = r"--(\w+)(?: X(?:, --\w+\+ X)?| \[X \.\.\.\]| \{.*?\}|, --no_\w+) "
    _, *parts = re.split(option, words)
    explained = dict(zip(parts[::2], parts[1::2], strict=True))
    for name in Own.__dataclass_fields__:
        assert len(explained[name].split("(default")[0].split()) >= 2, name


# The command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "takes"),
    (("training", "[FILE.yaml]"), ("training.evaluate", "RUN_FOLDER"), ("training.memory", "[FILE"))
)  # fmt: skip
def test_a_command_names_itself_and_does_not_warn(module, takes):
    command = f"python -m grpo_kernels.{module}"
    done = subprocess.run(
        [sys.executable, *command.split()[1:], "run", "--modell", "m"], capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "RuntimeWarning" not in done.stderr
    assert done.stderr.startswith(f"usage: {command} {takes}")


@pytest.mark.usefixtures("real_memory")
def test_the_command_trains_from_a_file(tiny_model, tmp_path):
    options = trainer_runs.config_of(tiny_model, tmp_path, steps=1, rewards=["answer"]).as_json()
    (tmp_path / "run.yaml").write_text(json.dumps(options))
    folder = training_command.main([str(tmp_path / "run.yaml"), f"--output={tmp_path}/other"])
    assert folder == tmp_path / "other" and len(trainer_runs.rows_of(folder)) == 1


# What a command is refused for, before a model is loaded.
REFUSED = {
    "rewards: expected some of answer, format, or module:function; got 'breif'":
        ["--rewards", "breif"],
    "reward function score: .* its parameters .*entry":
        ["--rewards", "answer", "examples.problems:score"],
    "dataset: expected a file or folder; no.jsonl does not exist": ["--dataset", "no.jsonl"],
    "dataset: expected a column question .*answer": ["--dataset", "odd.jsonl"],
    "output: run has a run already. Pass resume": ["--output", "run"],
    "output: taken.txt is not a folder that can be written to": ["--output", "taken.txt/t"],
    "output: another process trains in locked: pass another": ["--output", "locked"],
    "resume: options differ from the checkpoint's: .*steps: was 3, is 100":
        ["--output", "run", "--resume"],
    "resume: expected as many processes as the checkpoint has, 2; got 1":
        ["--output", "run", "--resume"],
    "model: ./nowhere does not exist": ["--model", "./nowhere"],
    "model: empty has no model in it": ["--model", "empty"],
    "model: run is the folder of a run: pass run/model": ["--model", "run"],
    "model: bare is the folder of a run: it saved no model": ["--model", "bare"],
    "model: adapters is a folder of adapters, which training": ["--model", "adapters"],
    "ref_model: odd has another tokenizer than the model": ["--beta=0.1", "--ref_model", "odd"],
    "ref_model: run is the folder of a run: pass run/model": ["--beta=0.1", "--ref_model", "run"],
    "lora_rank: adapters need peft: pip install peft": ["--lora_rank", "2"],
    "rollout: vllm is not installed: pip install -e": ["--rollout", "vllm"],
    "vllm_enable_sleep_mode: expected False on a CPU":
        ["--rollout", "vllm", "--vllm_enable_sleep_mode"],
    "is_correction='token_mask' needs log-probs": ["--is_correction", "token_mask"],
    "trackers: expected some of .*tensorboard, .*; got nothing": ["--trackers", "nothing"],
    "trackers: aim is not installed: pip install aim": ["--trackers", "aim"],
    "chat: the tokenizer of m has no chat template": ["--chat"],
}  # fmt: skip


@pytest.fixture
def folders(tiny_model, tmp_path, monkeypatch):
    """A model, problems and runs in the folder here, on a machine without some packages."""
    monkeypatch.chdir(tmp_path)
    for name in ("vllm", "peft", "aim"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: [])
    Path("m").symlink_to(tiny_model)
    Path("a.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 10)
    Path("odd.jsonl").write_text('{"text": "1 + 1 ="}\n')
    Path("taken.txt").touch()
    for name in ("empty", "run/model", "bare", "adapters", "locked"):
        Path(name).mkdir(parents=True)
    for name in ("run", "bare"):
        logs.write_json(Path(name, logs.TRAINED_ON), {})
    Path("adapters/adapter_config.json").touch()
    shutil.copytree(tiny_model, "odd")
    words = json.loads(Path("odd/tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    Path("odd/tokenizer.json").write_text(json.dumps(words))
    with FileLock("locked/.lock"):
        yield


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize("message", REFUSED)
def test_a_command_is_refused_in_a_sentence(message, monkeypatch, capsys):
    monkeypatch.setattr(loading, "_pretrained", lambda *_: pytest.fail("loads a model"))
    if "resume" in message:
        others = "options differ" in message
        state = {"config": {"steps": 3}, "processes": 2}
        monkeypatch.setattr(checkpoint, "latest", lambda _: Path("run"))
        monkeypatch.setattr(checkpoint, "state_of", lambda _: state)
        may = set() if others else {x.name for x in fields(TrainingConfig)}
        monkeypatch.setattr(checkpoint, "MAY_CHANGE", may)
    flags = ["--model=m", "--dataset=a.jsonl", "--output=t", "--eval_size=0", "--rewards", "answer"]
    with pytest.raises(SystemExit) as ended:
        training_command.main([*flags, *REFUSED[message]])
    line, hint = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and re.match(f"error: {message}", line), line
    assert hint == "(--traceback shows where this was raised)" and not Path("t").exists()


@pytest.mark.usefixtures("folders")
def test_a_traceback_is_shown_if_it_is_asked_for(capsys):
    with pytest.raises(SystemExit) as ended:
        training_command.main(["--model=m", "--dataset=nowhere.jsonl", "--traceback"])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.startswith("Traceback") and "data.py" in printed


def test_of_several_processes_the_first_one_speaks(monkeypatch, capsys):
    """The launcher ends the others when it has ended; one that fails alone speaks later."""
    waited = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    for rank, seconds in (("0", []), ("1", [20.0])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit), command_line.user_errors([]):
            raise ValueError("x: expected y")
        assert "error: x: expected y" in capsys.readouterr().err and waited == seconds


@pytest.mark.parametrize("error", (RuntimeError, TypeError, KeyError, KeyboardInterrupt))
def test_other_errors_are_no_user_s(error):
    with pytest.raises(error), command_line.user_errors([]):
        raise error("x")


@pytest.mark.parametrize("missing", ("accelerate", "jsonargparse"))
def test_a_missing_extra_is_named(missing):
    code = f"import sys; sys.modules['{missing}'] = None; import grpo_kernels\n"
    expected = f"grpo_kernels.training needs {missing}: pip install -e '.[train]' in the checkout"
    command = "import runpy; sys.argv[0] = '-m'; runpy.run_module('grpo_kernels.training')"
    for text, begins, status in (
        ("import grpo_kernels.training", "ImportError: ", 1), (command, "error: ", 2),
    ):  # fmt: skip
        run = subprocess.run(
            [sys.executable, "-c", code + text], capture_output=True, text=True, timeout=120,
            env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert run.returncode == status
        *before, last = run.stderr.strip().split("\n")
        assert last == f"{begins}{expected}" and (status == 1 or not before)
    extra = (ROOT / "pyproject.toml").read_text().split("\ntrain = [")[1].split("\n]")[0]
    assert f'"{missing}>=' in extra


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
    "ACCELERATE_DYNAMO_MODE": "max-autotune", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "true", "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true", "ACCELERATE_DOWNCAST_BF16": "true",
    "ACCELERATE_GRADIENT_CLIPPING": "0.1", "ACCELERATE_BYPASS_DEVICE_MAP": "true",
    "ACCELERATE_DEBUG_MODE": "true", "ACCELERATE_ALLOW_CP_STANDALONE": "true",
    "ACCELERATE_INIT_INCLUDE_BUFFERS": "true", "ACCELERATE_FP8_BACKEND": "NO",
    "ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "2", "PARALLELISM_CONFIG_CP_SIZE": "2",
}  # fmt: skip


def test_the_environment_changes_neither_gradients_nor_names(make, tmp_path, monkeypatch, capsys):
    AcceleratorState._reset_state(reset_partial_state=True)  # which has what it read before
    plain = make(name="plain", save_model=True).train()
    said = capsys.readouterr().out
    AcceleratorState._reset_state(reset_partial_state=True)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    try:
        other = make(name="other", save_model=True).train()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert trainer_runs.rows_of(other) == trainer_runs.rows_of(plain)
    saved, expected = (load_file(x / "model" / "model.safetensors") for x in (other, plain))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    lines = capsys.readouterr().out
    for text in ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4", "ACCELERATE_DYNAMO_BACKEND=eager"):
        assert f"{text} is not used: " in lines and text not in said


def test_an_accelerator_made_before_compiles_nothing(make):
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        Accelerator(dynamo_backend="eager")
        with pytest.raises(ValueError, match="accelerator: an Accelerator was made with torch"):
            make()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("part", ("model", "layer"))
def test_a_compiled_model_is_refused(part, make, tiny_model, tmp_path):
    model, tokenizer = load_model(trainer_runs.config_of(tiny_model, tmp_path))
    if part == "layer":
        model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="model: expected one that was not passed to torch"):
        make(model, tokenizer)

"""Two processes with this library's head in TRL's trainer, against TRL's own in one process."""

import functools
import importlib.util
import os

import pytest

pytest.importorskip("trl", reason="needs the extra 'peers'")
from peft import LoraConfig
from trl import GRPOTrainer

from grpo_kernels.integrations.trl import FusedGRPOTrainer
from tests.helpers.ranks import ROOT
from tests.helpers.trl_runs import assert_same_run, folder_of, on_a_cpu
from tests.ranks.trl_jobs import train

pytestmark = pytest.mark.usefixtures("real_memory")
OPTIONS = {
    "a reference": {"beta": 0.04, "num_iterations": 2},
    "two passes": {"loss_type": "vespo", "gradient_accumulation_steps": 2},
    "LoRA, entropy": {
        "peft_config": LoraConfig(r=4, task_type="CAUSAL_LM"), "beta": 0.1,
        "loss_type": "grpo", "entropy_coef": 0.1, "num_iterations": 2,
    },
}  # fmt: skip
MEANS = ("entropy",)


def environment_of(kind):
    """The environment that `accelerate launch` would set for this kind's config file, on a CPU."""
    from accelerate.commands.launch import (
        _validate_launch_command,
        launch_command_parser,
        prepare_multi_gpu_env,
    )
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    config = str(ROOT / f"examples/configs/{kind}.yaml")
    arguments = ["--config_file", config, "--mixed_precision", "no", "script"]
    before = dict(os.environ)
    try:
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
        if args.use_deepspeed:
            args.deepspeed_fields_from_accelerate_config, args.nproc_per_node = "", 2
            _, set_here = prepare_deepspeed_cmd_env(args)
        else:
            set_here = prepare_multi_gpu_env(args)
    finally:
        os.environ.clear()
        os.environ.update(before)
    found = {name: value for name, value in set_here.items() if before.get(name) != value}
    return found | {"ACCELERATE_USE_CPU": str(kind != "zero3").lower()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The log and weights of TRL's own trainer in one process, made once for the same options."""

    @functools.cache
    def run(name):
        folder = str(tmp_path_factory.mktemp("alone"))
        return train("", GRPOTrainer, folder_of("qwen2"), folder, dict(OPTIONS[name]))

    return run


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ("ddp", "fsdp2", "zero3"))
def test_two_processes_are_as_one_of_trl(kind, name, ranks, alone, tmp_path):
    """Losses, gradient norms, KL and all else that TRL logs, and the weights afterwards."""
    skip_without_deepspeed(kind)
    mine, _ = ranks(
        "tests.ranks.trl_jobs:train", kind, FusedGRPOTrainer, folder_of("qwen2"), str(tmp_path),
        OPTIONS[name], environment=environment_of(kind),
    )  # fmt: skip
    assert_same_run(run_of(*mine, OPTIONS[name]), run_of(*alone(name), OPTIONS[name]))


def skip_without_deepspeed(kind):
    if kind == "zero3" and not importlib.util.find_spec("deepspeed"):
        pytest.skip("needs DeepSpeed: make test-rest has it")


def run_of(log, weights, options):
    """The run as `assert_same_run` takes it, without TRL's means of the means of micro-batches."""
    if options.get("gradient_accumulation_steps", 1) > 1:
        log = [{key: x for key, x in row.items() if key not in MEANS} for row in log]
    return [row["loss"] for row in log if "loss" in row], log, weights


SHARDED = {"qwen2.5-1.5b-2x24gb-zero3": "zero3", "qwen2.5-7b-8x80gb-fsdp2-vllm": "fsdp2"}


@pytest.mark.parametrize("name", SHARDED)
def test_a_first_step_of_a_sharded_recipe(name, ranks, tiny_model, tmp_path):
    kind = SHARDED[name]
    skip_without_deepspeed(kind)
    recipe = f"examples/configs/trl/{name}.yaml"
    assert f"examples/configs/{kind}.yaml" in (ROOT / recipe).read_text()
    argv = ["--config", recipe, *on_a_cpu(tiny_model, tmp_path)]
    first, second = ranks(
        "tests.ranks.trl_jobs:example", kind, argv, environment=environment_of(kind)
    )
    assert first[0]["step"] == 1 and first[0]["grad_norm"] == second[0]["grad_norm"] > 0

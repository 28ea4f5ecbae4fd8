"""Two processes with this library's head in TRL's trainer, against TRL's own in one process."""

import copy
import functools
import importlib.util
import os
import random
import sys

import pytest

pytest.importorskip("trl", reason="needs the extra 'peers'")
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from trl import GRPOTrainer

from grpo_kernels.integrations.trl import FusedGRPOTrainer
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_models import make_tokenizer
from tests.helpers.trl_runs import (
    arguments_of,
    assert_same_run,
    folder_of,
    noise,
    on_a_cpu,
    prompts,
)

pytestmark = pytest.mark.usefixtures("real_memory")
KINDS = {"": "NO", "ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}
OPTIONS = {
    "a reference": {"beta": 0.04, "num_iterations": 2},
    "two passes": {"loss_type": "vespo", "gradient_accumulation_steps": 2},
    "unequal ranks": {"num_iterations": 2},
    "LoRA, entropy": {
        "peft_config": LoraConfig(r=4, task_type="CAUSAL_LM"), "beta": 0.1,
        "loss_type": "grpo", "entropy_coef": 0.1, "num_iterations": 2,
    },
    "skipped": {"loss_type": "grpo", "gradient_accumulation_steps": 4},
    "skipped, whole processes": {"loss_type": "grpo"},
    "skipped, gradients reduced in each micro-batch": {
        "gradient_accumulation_steps": 4,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    },
    "sorted, a KL": {"loss_type": "grpo", "beta": 0.1, "gradient_accumulation_steps": 4},
    "skipped, two passes, twice": {
        "loss_type": "vespo", "gradient_accumulation_steps": 2, "num_iterations": 2,
    },
}  # fmt: skip


def for_some(prompts, completions, **_):
    """Rewards that are equal for two prompts of three."""
    numbers = [int(prompt.split()[0]) for prompt in prompts]
    return [0.3 if number % 3 else x for number, x in zip(numbers, noise(completions), strict=True)]


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
    changed = {name: value for name, value in set_here.items() if before.get(name) != value}
    return changed | {"ACCELERATE_USE_CPU": str(kind != "zero3").lower()}


def set_up(kind):
    """Has accelerate take the processes as they are, on a CPU, for a job of this kind."""
    if kind == "zero3":
        import deepspeed

        # Its own reduce for CPUs, which it would compile first; gloo reduces as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if kind:
        PartialState(cpu=True)
    if kind == "fsdp2":
        # accelerate has it for GPUs alone, though it works with gloo as well.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def train(kind, trainer_class, model, name, output):
    """Returns the losses, the log, and the weights afterwards, in the first process at least."""
    options, skips = copy.deepcopy(OPTIONS[name]), name.startswith("skipped")
    peft_config = options.pop("peft_config", None)
    set_up(kind)
    arguments = arguments_of(
        output,
        accelerator_config={
            "use_configured_state": bool(kind), **options.pop("accelerator_config", {})
        },
        per_device_train_batch_size=4 if kind else 8, **options,
    )  # fmt: skip
    if kind == "zero3":
        # Else it leaves weights whole that are as small as these.
        config = arguments.deepspeed_plugin.deepspeed_config["zero_optimization"]
        config["stage3_param_persistence_threshold"] = 0

    rows = []  # of the model's calls for losses

    class SameForAnyRanks(trainer_class):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            sampled, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            assert len(sampled) == len(prompt_ids) and all(sampled)
            return completions_of(prompt_ids, equal=name != "unequal ranks"), logps

        gradient_needs_advantage = True

        def _compute_loss(self, model, inputs):
            layer = self.model.get_input_embeddings()
            hook = layer.register_forward_hook(lambda _, args, __: rows.append(len(args[0])))
            loss = super()._compute_loss(model, inputs)
            hook.remove()
            return loss

    ours = {"skip_untrained": skips, "sort_by_length": name.startswith("sorted")}
    ours = ours if trainer_class is FusedGRPOTrainer else {}
    trainer = SameForAnyRanks(
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=for_some if skips else noise, args=arguments, train_dataset=prompts(),
        processing_class=make_tokenizer(), peft_config=peft_config, **ours,
    )  # fmt: skip
    assert trainer.accelerator.distributed_type.value == KINDS[kind]
    assert trainer.accelerator.num_processes == (2 if kind else 1)
    trainer.train()
    if skips and ours:
        everywhere = trainer.accelerator.gather(torch.tensor([sum(rows)]))
        assert 0 < everywhere.sum() < 0.7 * 8 * trainer._step
    weights = list(trainer.model.parameters())
    assert kind != "fsdp2" or all(hasattr(weight, "full_tensor") for weight in weights)
    assert kind != "zero3" or all(weight.numel() == 0 for weight in weights)
    gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    log = trainer.state.log_history
    # TRL logs the mean of the means of its processes and micro-batches.
    means = {"two passes": ("entropy",), "unequal ranks": ("entropy", "clip_ratio")}.get(name, ())
    if skips or name.startswith("sorted"):
        means = ("entropy", "clip_ratio", "vespo", "kl")
    log = [{key: x for key, x in row.items() if not key.startswith(means)} for row in log]
    return [row["loss"] for row in log if "loss" in row], log, gathered


def completions_of(prompts, equal):
    """Returns completions that differ within a group, the same in any number of processes.

    With `equal` each group of four, and so each process, has as many tokens.
    """
    draws, lengths, done = {}, {}, []
    for prompt in map(str, prompts):
        draw = draws.setdefault(prompt, random.Random(prompt))
        left = lengths.setdefault(prompt, draw.sample((1, 3, 4, 6), 4))
        length = left.pop() if equal else draw.randrange(1, 7)
        done.append([draw.randrange(33, 90) for _ in range(length)])
    return done


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of TRL's own trainer in one process, made once for the same options."""

    @functools.cache
    def run(name):
        folder = str(tmp_path_factory.mktemp("alone"))
        return train("", GRPOTrainer, folder_of("qwen2"), name, folder)

    return run


def skip_without_deepspeed(kind):
    if kind == "zero3" and not importlib.util.find_spec("deepspeed"):
        pytest.skip("needs DeepSpeed: make test-rest has it")


# Where completions are left out a process may have nothing to call the model for.
ON_ALL = [(kind, name) for kind in ("ddp", "fsdp2", "zero3") for name in OPTIONS if "skip" in name]
SOME = [
    ("ddp", "unequal ranks"), ("ddp", "sorted, a KL"), ("fsdp2", "a reference"),
    ("fsdp2", "two passes"), ("fsdp2", "LoRA, entropy"), ("zero3", "LoRA, entropy"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [*ON_ALL, *SOME])
def test_two_processes_are_as_one_of_trl(kind, name, ranks, alone, tmp_path):
    """Losses, gradient norms, KL and all else that TRL logs, and the weights afterwards."""
    skip_without_deepspeed(kind)
    mine, _ = ranks(
        train, kind, FusedGRPOTrainer, folder_of("qwen2"), name, str(tmp_path),
        environment=environment_of(kind),
    )  # fmt: skip
    assert_same_run(mine, alone(name))


def example(kind, argv):
    """Returns the log of `examples/trl_gsm8k.py` with these arguments."""
    sys.path.append("examples")
    from examples import trl_gsm8k

    set_up(kind)
    trainer = trl_gsm8k.main([*argv, "--accelerator_config", '{"use_configured_state": true}'])
    accelerator = trainer.accelerator
    assert (accelerator.distributed_type.value, accelerator.num_processes) == (KINDS[kind], 2)
    return trainer.state.log_history


@pytest.mark.parametrize(
    ("name", "kind"),
    (("qwen2.5-1.5b-2x24gb-zero3", "zero3"), ("qwen2.5-7b-8x80gb-fsdp2-vllm", "fsdp2")),
)
def test_a_first_step_of_a_sharded_recipe(name, kind, ranks, tiny_model, tmp_path):
    skip_without_deepspeed(kind)
    recipe = f"examples/configs/trl/{name}.yaml"
    assert f"examples/configs/{kind}.yaml" in (ROOT / recipe).read_text()
    argv = ["--config", recipe, *on_a_cpu(tiny_model, tmp_path)]
    first, second = ranks(example, kind, argv, environment=environment_of(kind))
    assert first[0]["step"] == 1 and first[0]["grad_norm"] == second[0]["grad_norm"] > 0

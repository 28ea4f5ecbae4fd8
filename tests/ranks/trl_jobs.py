"""A job of the ranks: one run of TRL's trainer, whose weights the ranks may share."""

import random
import sys

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType

from tests.helpers.tiny_models import make_tokenizer
from tests.helpers.trl_runs import arguments_of, noise, prompts

KINDS = {"": "NO", "ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}


def set_up(kind: str) -> None:
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


def train(kind: str, trainer_class: type, model: str, output: str, options: dict):
    """Returns the rows of the log, and the weights afterwards, in the first process at least."""
    peft_config = options.pop("peft_config", None)
    set_up(kind)
    arguments = arguments_of(
        output, accelerator_config={"use_configured_state": bool(kind)},
        per_device_train_batch_size=4 if kind else 8, **options,
    )  # fmt: skip
    if kind == "zero3":
        # Else it leaves weights whole that are as small as these.
        config = arguments.deepspeed_plugin.deepspeed_config["zero_optimization"]
        config["stage3_param_persistence_threshold"] = 0

    class SameForAnyRanks(trainer_class):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            sampled, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            assert len(sampled) == len(prompt_ids) and all(sampled)
            return completions_of(prompt_ids), logps

    trainer = SameForAnyRanks(
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=noise, args=arguments, train_dataset=prompts(),
        processing_class=make_tokenizer(), peft_config=peft_config,
    )  # fmt: skip
    assert trainer.accelerator.distributed_type.value == KINDS[kind]
    assert trainer.accelerator.num_processes == (2 if kind else 1)
    trainer.train()
    weights = list(trainer.model.parameters())
    assert kind != "fsdp2" or all(hasattr(weight, "full_tensor") for weight in weights)
    assert kind != "zero3" or all(weight.numel() == 0 for weight in weights)
    gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return trainer.state.log_history, gathered


def example(kind: str, argv: list[str]) -> list[dict]:
    """Returns the log of `examples/trl_gsm8k.py` with these arguments."""
    sys.path.append("examples")
    from examples import trl_gsm8k

    set_up(kind)
    trainer = trl_gsm8k.main([*argv, "--accelerator_config", '{"use_configured_state": true}'])
    found = trainer.accelerator
    assert (found.distributed_type.value, found.num_processes) == (KINDS[kind], 2)
    return trainer.state.log_history


def completions_of(prompts: list[list[int]]) -> list[list[int]]:
    """Returns completions that differ within a group, the same in any number of processes.

    Each group of four has as many tokens, as TRL logs the mean of its processes' means.
    """
    draws: dict[str, random.Random] = {}
    lengths: dict[str, list[int]] = {}
    done = []
    for prompt in map(str, prompts):
        draw = draws.setdefault(prompt, random.Random(prompt))
        left = lengths.setdefault(prompt, draw.sample((1, 3, 4, 6), 4))
        done.append([draw.randrange(33, 90) for _ in range(left.pop())])
    return done

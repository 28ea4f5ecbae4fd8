"""Run by test_training_ranks, in each process: one run of the trainer, and its weights."""

import gc
import json
import sys

import torch
from test_training import config_of, noise

from grpo_kernels.training import Trainer, load_model, load_problems


def main(kind: str, model: str, output: str, options: str) -> None:
    if kind in ("fsdp2", "zero3"):
        # accelerate has these for GPUs alone, though they work with gloo as well.
        from accelerate import PartialState
        from accelerate.utils import DistributedType

        PartialState(cpu=True)
    if kind == "fsdp2":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    config = config_of(model, output, **json.loads(options))
    train, held_out = load_problems(config)
    trainer = Trainer(
        config, *load_model(config), train, held_out, rewards={"noise": noise},
        rollout=lambda _: SameForAnyRanks(),
    )  # fmt: skip
    told = (trainer.accelerator.distributed_type.value, trainer.accelerator.num_processes)
    assert (
        told
        == {
            "": ("NO", 1),
            "ddp": ("MULTI_CPU", 2),
            "fsdp2": ("FSDP", 2),
            "zero3": ("DEEPSPEED", 2),
        }[kind]
    ), told
    if kind == "fsdp2":
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        for part in filter(None, (trainer.policy, trainer.reference and trainer.reference.copy)):
            # The whole, and each of the two layers.
            assert sum(isinstance(module, FSDPModule) for module in part.modules()) == 3
        assert trainer.accelerator.is_fsdp2
        assert all(isinstance(p, DTensor) for p in trainer.policy.parameters())
    folder = trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.policy)
    if trainer.accelerator.is_main_process:
        torch.save(state, folder / "weights.pt")


class SameForAnyRanks:
    """Completions that depend on their prompt alone, so that any number of ranks sees the same."""

    def __call__(self, prompts, count, sampling):
        import random

        from grpo_kernels.training import Completion

        done = []
        for prompt in prompts:
            draw = random.Random(str(prompt))
            for _ in range(count):
                length = draw.randrange(1, sampling.max_new_tokens + 1)
                done.append(Completion([draw.randrange(33, 90) for _ in range(length)], True))
        return done


if __name__ == "__main__":
    main(*sys.argv[1:])
    # The threads of a gloo group that is still there at the end may abort the process; a DDP module
    # that outlives its group may hang.
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()

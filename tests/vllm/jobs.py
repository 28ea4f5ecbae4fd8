"""A job of two ranks: a run of the trainer that samples by vLLM."""

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from tests.helpers.trainer_runs import no_curves, trainer_of, untimed
from tests.helpers.vllm_runs import vllm_config


def train(kind, model, output, options):
    """The rows of a run."""
    # accelerate has these for GPUs alone, though they work with gloo as well.
    PartialState(cpu=True)
    if kind == "fsdp2":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = trainer_of(vllm_config(model, output, **options))
    expected = {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}[kind]
    assert trainer.accelerator.distributed_type.value == expected
    assert torch.distributed.get_world_size() == 2
    rows = []
    with no_curves():
        trainer.train(lambda row, samples: rows.append(untimed(row)))
    return rows

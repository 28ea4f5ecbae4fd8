"""A job of two ranks: a run of the trainer that samples by vLLM."""

import torch

from tests.helpers.trainer_runs import no_curves, trainer_of, untimed
from tests.helpers.vllm_runs import vllm_config


def train(model, output, options):
    """The rows of a run."""
    trainer = trainer_of(vllm_config(model, output, **options))
    assert trainer.accelerator.distributed_type.value == "MULTI_CPU"
    assert torch.distributed.get_world_size() == 2
    rows = []
    with no_curves():
        trainer.train(lambda row, samples: rows.append(untimed(row)))
    return rows

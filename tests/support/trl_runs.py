"""Helpers that runs of TRL's trainer share."""

import functools
import tempfile

import datasets
import torch
from trl import GRPOConfig

from tests.support.model_families import family_model, llava

STEPS = 3


def noise(completions, **_):
    """Depends on the words alone, and seldom twice the same."""
    return [float(sum(map(ord, text)) % 17) for text in completions]


def arguments_of(folder, **options):
    return GRPOConfig(**{
        "output_dir": str(folder), "max_steps": STEPS, "use_cpu": True, "bf16": False,
        "report_to": "none", "per_device_train_batch_size": 4, "num_generations": 4,
        "max_completion_length": 6, "learning_rate": 0.05, "optim": "sgd", "logging_steps": 1,
        "lr_scheduler_type": "constant", "save_strategy": "no", "disable_tqdm": True,
        "gradient_checkpointing": False, "max_grad_norm": 1.0, "seed": 0, **options,
    })  # fmt: skip


def prompts(count=24):
    return datasets.Dataset.from_list([{"prompt": f"{i} + {i % 5} ="} for i in range(count)])


def decided_model(family):
    """A model with favourite tokens, the end of a completion among them."""
    model = llava() if family == "llava" else family_model(family)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.mul_(3.0)
        head[0].mul_(8.0)
    return model


@functools.cache
def folder_of(family):
    """The folder of the stored model, from which TRL loads its reference."""
    folder = tempfile.mkdtemp()
    model = decided_model(family)
    # With it generate fails, in transformers; TRL asks for the routers' logits itself.
    model.config.output_router_logits = False
    model.save_pretrained(folder)
    return folder

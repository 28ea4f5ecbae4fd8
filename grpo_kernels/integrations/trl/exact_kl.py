"""The exact KL in TRL's trainer: the reference's states for each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl.trainer import grpo_trainer

from ...head.lm_head import Reference
from ..private import trl_part
from ..transformers import Objective


def check(trainer: Any, token_local: bool, replay_support: bool) -> None:
    """Raises ValueError for a trainer whose options exclude an exact KL."""
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    for wrong, reason in (
        (not trainer.beta, "has no effect with beta=0.0: set beta"),
        (replay_support, "does not work with replay_support=True, whose softmax is over the kept "
                         "sets: pass one of them"),
        (sharded, "does not work with FSDP or DeepSpeed, which gather the reference's head only in "
                  "its forward: pass exact_kl=False"),
        (not token_local, f"does not work with loss_type={trainer.loss_type!r} and these options, "
                          "which are not token-local: pass exact_kl=False"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(f"exact_kl=True {reason}")


def reference_of(trainer: Any, inputs: Mapping[str, Any], keyword: str) -> Reference:
    """The reference's states and head on the inputs of a fused head's call."""
    states_only = Objective(states=True)
    with torch.no_grad(), _model(trainer) as model:
        model(**{**inputs, keyword: states_only})
    assert states_only.reference is not None
    return states_only.reference


@contextmanager
def _model(trainer: Any) -> Iterator[Any]:
    """The model that computes TRL's reference log-probs."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    if "ref" in model.peft_config:  # of an adapter that is trained on
        with grpo_trainer.use_adapter(model, adapter_name="ref"):
            yield trainer.model
    else:
        with model.disable_adapter():
            yield trainer.model


def log(trainer: Any, kl: Tensor) -> None:
    """Logs the KL, 0-d, averaged over processes."""
    mode = "train" if trainer.model.training else "eval"
    mean = trainer.accelerator.gather(kl).mean().item()
    trl_part(trainer, "_metrics")[mode]["kl_exact"].append(mean)

"""`ReferenceModel`: the policy from which the KL is measured."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from torch import nn

from . import ranks
from .config import TrainingConfig
from .policy import Policy


class ReferenceModel:
    """A frozen copy of the model; with LoRA no copy, but the model without its adapters."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, config: TrainingConfig) -> None:
        self.accelerator = accelerator
        self.copy: Any = None if config.lora_rank else self._copy_of(model, config)

    def _copy_of(self, model: nn.Module, config: TrainingConfig) -> Any:
        """A copy on the device, sharded as the policy will be.

        Parameters that are frozen in both are shared, unless each is to be sharded.
        """
        sharded = ranks.sharding(self.accelerator) is not None
        frozen = [] if sharded else [p for p in model.parameters() if not p.requires_grad]
        copied = copy.deepcopy(model, {id(p): p for p in frozen}).eval().requires_grad_(False)
        policy = Policy.of_run(copied, config)
        if self.accelerator.is_fsdp2:
            from accelerate.utils.fsdp_utils import fsdp2_prepare_model

            return fsdp2_prepare_model(self.accelerator, policy)
        return policy.to(self.accelerator.device)

    @contextmanager
    def active(self, policy: Any) -> Iterator[Any]:
        """The reference as a `Policy`, for as long as the context lasts."""
        if self.copy is not None:
            yield self.copy
            return
        with self.accelerator.unwrap_model(policy).model.disable_adapter():
            yield policy

"""`ReferenceModel`: the policy from which the KL is measured."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .config import TrainingConfig
from .loading import load_reference
from .policy import Policy
from .rollout import vocabulary_of


class ReferenceModel:
    """A frozen copy of the model, or `ref_model`; with LoRA the model without its adapters.

    A copy follows the policy every `sync_ref_every` steps, and is then in the run's checkpoints.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, config: TrainingConfig) -> None:
        self.accelerator, self.alpha = accelerator, config.ref_mixup_alpha
        self.copy: Any = None
        if config.ref_model is not None:
            self.copy = self._placed(load_reference(config), config)
            found, wanted = (vocabulary_of(x) for x in (self.copy.model, model))
            if found != wanted:
                raise ValueError(
                    f"ref_model: expected a vocabulary of {wanted}, as the model has; got {found}"
                )
        elif not config.lora_rank:
            # Parameters that are frozen in both are shared.
            frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
            copied = copy.deepcopy(model, frozen)
            self.copy = self._placed(copied, config)
        if config.sync_ref_every:
            accelerator.register_for_checkpointing(self)

    def _placed(self, model: nn.Module, config: TrainingConfig) -> Any:
        """The model on the device."""
        policy = Policy.from_config(model.eval().requires_grad_(False), config)
        return policy.to(self.accelerator.device)

    @torch.no_grad()
    def sync(self, policy: Any) -> None:
        """Moves the copy to the policy, by `ref_mixup_alpha` of the way."""
        trained = dict(self.accelerator.unwrap_model(policy).named_parameters())
        for name, mine in self.copy.named_parameters():
            theirs = trained[name]
            if mine is theirs:  # frozen in both
                continue
            mine.lerp_(theirs.to(mine), self.alpha)

    def state_dict(self) -> dict[str, Tensor]:
        """The copy's weights, for a checkpoint."""
        return {name: p.cpu() for name, p in self.copy.named_parameters()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes the weights of a checkpoint."""
        for name, mine in self.copy.named_parameters():
            mine.copy_(state[name])

    @contextmanager
    def active(self, policy: Any) -> Iterator[Any]:
        """The reference as a `Policy`, for as long as the context lasts."""
        if self.copy is not None:
            yield self.copy
            return
        with self.accelerator.unwrap_model(policy).model.disable_adapter():
            yield policy

"""`ReferenceModel`: the reference of the KL."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import TrainingConfig
from ..sampling.completions import vocabulary_of
from .policy import Policy


class ReferenceModel:
    """A frozen copy of the model, or another model; with LoRA the model without its adapters.

    With `sync_ref_every` a copy is updated from the policy, and saved in the run's checkpoints.
    `other`: the model of `ref_model`, or None.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, other: Any, config: TrainingConfig
    ) -> None:
        self.accelerator = accelerator
        self.copy: Any = None
        # The model whose weights no checkpoint has: `other`, or the copied model.
        self.origin = [other or model] if other is not None or not config.lora_rank else []
        if other is not None:
            self.copy = self._placed(other, config)
            sizes = vocabulary_of(model), vocabulary_of(other)
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"ref_model: expected a vocabulary of {sizes[0]}, like the model's; got "
                    f"{sizes[1]}"
                )
        elif not config.lora_rank:
            # Parameters that are frozen in both are shared.
            frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
            copied = copy.deepcopy(model, frozen)
            self.copy = self._placed(copied, config)
        self._shared = {id(p) for p in model.parameters() if not p.requires_grad}

    def _placed(self, model: nn.Module, config: TrainingConfig) -> Any:
        policy = Policy.from_config(model.eval().requires_grad_(False), config)
        return policy.to(self.accelerator.device)

    @torch.no_grad()
    def sync(self, policy: Any) -> None:
        """Copies the policy's weights."""
        trained = dict(self.accelerator.unwrap_model(policy).named_parameters())
        for name, weight in self._moving():
            weight.copy_(trained[name])

    def _moving(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The copy's parameters that it does not share with the policy."""
        return ((n, p) for n, p in self.copy.named_parameters() if id(p) not in self._shared)

    def state_dict(self) -> dict[str, Tensor]:
        """The copy's weights that `sync` moves, for a checkpoint."""
        return {name: p.detach() for name, p in self._moving()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, weight in self._moving():
            weight.copy_(state[name])

    @contextmanager
    def active(self, policy: Any) -> Iterator[Any]:
        """The reference as a `Policy`, within the context."""
        if self.copy is not None:
            yield self.copy
            return
        with self.accelerator.unwrap_model(policy).model.disable_adapter():
            yield policy


def check_tokens(name: str, tokenizer: Any) -> None:
    """Refuses a reference with another tokenizer than the policy's.

    Added tokens are not compared, as a chat model may rename a base model's. A reference without a
    tokenizer passes.

    Raises:
        ValueError: tokens with the same id differ.
    """
    from transformers import AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return
    added = {*tokenizer.added_tokens_decoder, *other.added_tokens_decoder}
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    changed = {
        number: token for token, number in other.get_vocab().items()
        if number not in added and tokens.get(number, token) != token
    }  # fmt: skip
    if changed:
        number = min(changed)
        raise ValueError(
            f"ref_model: {name} has another tokenizer than the model, with {len(changed):,} other "
            f"tokens: token {number} is {changed[number]!r}, not {tokens[number]!r}. Use a "
            "reference with the same tokenizer"
        )

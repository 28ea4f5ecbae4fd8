"""Gives OpenRLHF's actor this library's log-probs and entropies, without packing.

Import this file in the script that launches OpenRLHF: Ray sends its classes from there.
"""

from typing import Any

from openrlhf.models import Actor
from openrlhf.trainer.ray import ppo_actor
from torch import Tensor

from grpo_kernels.integrations.transformers import attach_fused_head


class FusedActor(Actor):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attach_fused_head(self.model, temperature=self.temperature)

    def forward(
        self,
        sequences: Tensor,
        action_mask: Tensor | None = None,
        attention_mask: Any = None,
        **options: Any,
    ) -> Any:
        if action_mask is None or self.packing_samples or self.is_vlm:
            return super().forward(sequences, action_mask, attention_mask, **options)
        T = action_mask.shape[1]
        labels = sequences.clone()
        labels[:, :-T] = -100
        labels[:, -T:].masked_fill_(action_mask == 0, -100)
        positions = attention_mask.long().cumsum(-1) - 1
        positions = positions.masked_fill(attention_mask == 0, 1)
        out = self.model(
            sequences, attention_mask=attention_mask, position_ids=positions, labels=labels,
            fused_head=True, logits_to_keep=T,
        )  # fmt: skip
        return (out.logps, out) if options.get("return_output") else out.logps


ppo_actor.Actor = FusedActor

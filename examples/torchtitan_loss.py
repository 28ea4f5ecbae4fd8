"""A DAPO loss for torchtitan, instead of `ChunkedLossWrapper.Config(loss_fn=DAPOLoss.Config())`."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import ChunkedLossWrapper

from grpo_kernels import GRPOLossConfig, fused_grpo_loss


class FusedDAPOLoss(ChunkedLossWrapper):
    """Torchtitan's trainer calls `set_lm_head` of a subclass of its wrapper."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        epsilon: float = 0.2
        epsilon_high: float = 0.2

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.lm_head: Any = None
        self.config = GRPOLossConfig(epsilon=config.epsilon, epsilon_high=config.epsilon_high)

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: float | None = None,
        *,
        generator_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if isinstance(self.lm_head, FSDPModule):
            self.lm_head.unshard()  # the end of the backward reduces its gradient
        out = fused_grpo_loss(
            pred, self.lm_head.weight, labels, advantages,
            loss_mask & generator_logprobs.isfinite(), old_logps=generator_logprobs,
            config=self.config, num_items=global_valid_tokens or 1,
        )  # fmt: skip
        if isinstance(self.lm_head, FSDPModule) and not out.loss.requires_grad:
            self.lm_head.reshard()
        return out.loss, {"loss/mean": out.loss.detach()}

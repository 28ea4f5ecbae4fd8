"""GRPO loss and gradients directly from hidden states, without storing the logits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base.outputs import DistillationOutput, GRPOLossOutput, LogprobOutput
from .base.sequences import completion_mask, gather_tokens
from .fused_grpo_loss import FusedGRPOLoss, fused_grpo_loss
from .head.execution import Execution
from .head.linear_logprobs import linear_logprobs
from .head.lm_head import LMHead, Reference, Support, VocabRanks
from .head.selective_log_softmax import selective_log_softmax
from .loss.config import GRPOLossConfig
from .loss.grpo_loss import grpo_loss

if TYPE_CHECKING:
    from .fused_distillation import fused_distillation_loss
    from .head.support import batch_support
    from .loss.advantages import group_advantages, per_token_kl
    from .loss.distillation import topk_kl
    from .sampler_check import SamplerCheck, check_sampler

__version__ = "0.4.0.dev0"

__all__ = [
    "DistillationOutput",
    "Execution",
    "FusedGRPOLoss",
    "GRPOLossConfig",
    "GRPOLossOutput",
    "LMHead",
    "LogprobOutput",
    "Reference",
    "SamplerCheck",
    "Support",
    "VocabRanks",
    "batch_support",
    "check_sampler",
    "completion_mask",
    "fused_distillation_loss",
    "fused_grpo_loss",
    "gather_tokens",
    "group_advantages",
    "grpo_loss",
    "linear_logprobs",
    "per_token_kl",
    "selective_log_softmax",
    "topk_kl",
]

# Names that an exact call does not load, and their modules.
_NOT_OF_A_CALL = {
    "fused_distillation_loss": "fused_distillation",
    "group_advantages": "loss.advantages",
    "per_token_kl": "loss.advantages",
    "batch_support": "head.support",
    "SamplerCheck": "sampler_check",
    "check_sampler": "sampler_check",
    "topk_kl": "loss.distillation",
}


def __getattr__(name: str) -> Any:
    if name in _NOT_OF_A_CALL:
        return getattr(import_module(f".{_NOT_OF_A_CALL[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

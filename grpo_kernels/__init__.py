"""GRPO loss and gradients directly from hidden states, without ever holding the logits."""

from .advantages import group_advantages, per_token_kl
from .config import GRPOLossConfig
from .fused_grpo_loss import fused_grpo_loss
from .grpo_loss import grpo_loss
from .linear_logprobs import linear_logprobs
from .outputs import GRPOLossOutput, LogprobOutput
from .sampler_check import SamplerCheck, check_sampler
from .selective_log_softmax import selective_log_softmax
from .sequences import gather_tokens
from .support import batch_support

__version__ = "0.2.0"

__all__ = [
    "GRPOLossConfig",
    "GRPOLossOutput",
    "LogprobOutput",
    "SamplerCheck",
    "batch_support",
    "check_sampler",
    "fused_grpo_loss",
    "gather_tokens",
    "group_advantages",
    "grpo_loss",
    "linear_logprobs",
    "per_token_kl",
    "selective_log_softmax",
]

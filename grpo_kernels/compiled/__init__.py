"""The public calls as operators, one each (`calls.py`, `losses.py`); loaded where one is traced."""

from .calls import fused_grpo_loss, linear_logprobs
from .losses import grpo_loss, selective_log_softmax

__all__ = ["fused_grpo_loss", "grpo_loss", "linear_logprobs", "selective_log_softmax"]

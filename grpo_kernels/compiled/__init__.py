"""The public calls as operators of `torch.library`, loaded where `torch.compile` traces one.

A call is a loop of kernels and GEMMs whose lengths follow from the data, which a compiler has
nothing to add to; the sizes of its results do not. So each is one operator with a fake kernel.
"""

from .logprobs import linear_logprobs, selective_log_softmax
from .losses import fused_distillation_loss, fused_grpo_loss, grpo_loss

__all__ = [
    "fused_distillation_loss",
    "fused_grpo_loss",
    "grpo_loss",
    "linear_logprobs",
    "selective_log_softmax",
]

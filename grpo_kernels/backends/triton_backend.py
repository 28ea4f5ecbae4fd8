"""Triton kernels: CUDA, ROCm and XPU, and any CPU under `TRITON_INTERPRET=1`."""

from .triton_column_scores import column_level, column_scores
from .triton_logits import logit_grads_, token_stats
from .triton_policy_loss import policy_loss
from .triton_words import segment_sums, word_dots, word_grads, word_stats

__all__ = [
    "column_level", "column_scores", "logit_grads_", "policy_loss", "segment_sums", "token_stats",
    "word_dots", "word_grads", "word_stats",
]  # fmt: skip

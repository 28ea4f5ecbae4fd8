"""Triton kernels: CUDA, ROCm and XPU, and any CPU under `TRITON_INTERPRET=1`."""

from .triton_entries import entry_dots, segment_sums
from .triton_logits import logit_grads_, token_stats
from .triton_policy_loss import policy_loss

PAIRS_MODULE = ".triton_pairs"

__all__ = ["entry_dots", "logit_grads_", "policy_loss", "segment_sums", "token_stats"]

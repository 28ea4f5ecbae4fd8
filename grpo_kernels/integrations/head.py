"""Deprecated: moved to `grpo_kernels.hf_head`."""

import warnings

from ..hf_head import check_logits as check_logits
from ..hf_head import evaluating as evaluating
from ..hf_head import head_of as head_of

warnings.warn(
    "grpo_kernels.integrations.head has moved to grpo_kernels.hf_head",
    DeprecationWarning,
    stacklevel=2,
)

"""What a fused head is compared with when it is attached, and what it refuses at a call."""

import pytest
import torch

from grpo_kernels.hf_head import check_logits
from grpo_kernels.integrations.transformers import attach_fused_head
from tests.helpers.model_families import FAMILIES, LORAS, family_model, with_lora
from tests.peers.test_transformers import (
    batch_of,
    check_scores,
    expected,
    hooked,
    with_head,
)

pytestmark = pytest.mark.usefixtures("real_memory")

"""Gives SkyRL this library's log-probs, with Megatron and `fused_lm_head_logprob: true`.

Import this file in each worker.
"""

import torch
from skyrl.backends.skyrl_train.distributed.megatron import model_utils
from torch import Tensor
from torch.distributed import ProcessGroup

from grpo_kernels import LMHead, VocabRanks, linear_logprobs


def fused_logprobs(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    start: int,
    end: int,
    chunk_size: int,
    tp_group: ProcessGroup,
    inference_only: bool,
) -> Tensor:
    head = LMHead(weight, ranks=VocabRanks(tp_group, hidden="partial"))
    with torch.set_grad_enabled(not inference_only and torch.is_grad_enabled()):
        return linear_logprobs(hidden, head, target).logps


model_utils._fused_lm_head_logprob_apply = fused_logprobs

"""Score centering in a run: the sampler's likeliest ids of each token, and the loss with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import GRPOLossConfig, grpo_loss, linear_logprobs, score_centering
from ..execution import Execution
from ..head import LMHead
from ..objective import aggregation_weights
from .rollout import Completion, RolloutError

if TYPE_CHECKING:
    from .policy import Batch

# Corrections for the sampler by the weight that they are of a score.
WEIGHTS = {"none": "none", "token_truncate": "truncate", "token_mask": "mask"}


def top_of(completions: Sequence[Completion], mask: Tensor, K: int) -> dict[str, Any]:
    """`top_ids [B, T, K]` and `top_logps`, on the mask's device; nothing where K is 0.

    Raises:
        RolloutError: a completion without them, or with a cross-entropy.
    """
    if not K:
        return {}
    ids = torch.zeros((*mask.shape, K), dtype=torch.int64)
    logps = torch.full(ids.shape, -torch.inf)
    for row, one in enumerate(completions):
        if one.top is None or one.ce_weights is not None:
            got = "ce_weights" if one.top is not None else None
            raise RolloutError(
                "score_centering: expected Completion.top, the log-probs of the sampler's "
                f"{K} likeliest ids, which rollout vllm returns, and no ce_weights; got {got}"
            )
        ids[row, : len(one.token_ids)] = torch.tensor([[*of_token] for of_token in one.top])
        values = [[*of_token.values()] for of_token in one.top]
        logps[row, : len(one.token_ids)] = torch.tensor(values)
    return {"top_ids": ids.to(mask.device), "top_logps": logps.to(mask.device)}


def centred_loss(
    hidden: Tensor, head: LMHead, batch: Batch, advantages: Tensor, config: GRPOLossConfig, *,
    top_ids: Tensor, top_logps: Tensor, sampling_logps: Tensor, num_items: float | Tensor,
    execution: Execution = Execution(), **others: Any,  # noqa: B008
) -> tuple[Tensor, dict[str, Tensor], Tensor]:  # fmt: skip
    """As `Policy.loss`, of `score_centering`; its metrics are those of the config's own loss."""
    ids = torch.cat([batch.completions[..., None], top_ids], -1)
    out = linear_logprobs(hidden, head, ids, batch.mask, entropy=True, execution=execution)
    logps, of_top = out.logps[..., 0], out.logps[..., 1:]
    bounds = {"low": config.is_clip_min or 0.0}
    if config.is_clip_max is not None:
        bounds["high"] = config.is_clip_max
    per_token = score_centering(
        logps, of_top, advantages[:, None].expand_as(logps), sampling_logps, top_logps,
        weight=WEIGHTS[config.is_correction], **bounds,
    )  # fmt: skip
    mask = batch.mask.float()
    weights = aggregation_weights(config, mask, mask.sum(), None, num_items)
    loss = (weights * per_token).sum()
    with torch.no_grad():
        about = grpo_loss(
            logps.detach(), advantages, batch.mask, sampling_logps=sampling_logps,
            entropy=out.entropy, config=config, num_items=num_items, **others,
        )  # fmt: skip
    return loss, about.metrics, logps.detach()

"""`FusedLinearGRPOLoss`: called as Liger's `LigerFusedLinearGRPOLoss`, computed here.

    from grpo_kernels.integrations.liger import FusedLinearGRPOLoss
    grpo = FusedLinearGRPOLoss(beta=0.04, loss_type="dapo")
    loss, metrics = grpo(hidden, lm_head.weight, ids, mask, advantages, ref_per_token_logps=ref)

Arguments and results are those of Liger 0.8.5, which need not be installed, with these differences:

- `luspo` leaves padding out, and `advantages` may be `[B, T]`; there Liger's gradients are wrong.
- What is masked may hold anything, NaN included.
- In half precision logits, and the weight's gradient over chunks, are float32.
- A reference that comes with `use_ref_model=False` is an error and not ignored.
- `vespo` with `vllm_is_ratio` needs `old_per_token_logps`, of which that ratio is made.
- `compiled` and `chunk_size` say how Liger computes; nothing here is to be compiled, and the chunk
  is a budget in bytes, `chunk_bytes`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import GRPOLossConfig
from ..fused_grpo_loss import fused_grpo_loss
from ..inputs import loss_inputs
from ..layout import Layout, ValueChecks
from ..linear_logprobs import linear_logprobs
from ..objective import Tokens, clipped_tokens, importance_ratio
from .head import check_options, corrected

_SEQUENCE_REFUSED = ("cispo", "sapo", "vespo")
_STEP_WIDE = ("dapo", "cispo", "vespo")


class FusedLinearGRPOLoss(nn.Module):
    """The GRPO loss of a linear head over hidden states, by Liger's names.

    Args:
        beta: weight of the KL to the reference; without a reference (`use_ref_model=False`) the KL
            is 0.
        compiled, chunk_size: taken for Liger's sake; see above.
        use_ref_model: whether there is one, by its log-probs or by its states and head.
        epsilon_low, epsilon_high: the clip range; for `cispo` the latter is the bound itself.
        loss_type: `"grpo"`, `"bnpo"`, `"dr_grpo"`, `"dapo"`, `"cispo"`, `"sapo"`, `"luspo"`,
            `"vespo"`.
        max_completion_length: of the `dr_grpo` average, which needs it.
        importance_sampling_level: `"token"` or `"sequence"`.
        sapo_temperature_pos, sapo_temperature_neg, delta, use_bias_correction_kl, vespo_k_pos,
            vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: as in `GRPOLossConfig`; an option the
            loss type has no use for is left out, as by Liger.
        temperature: what logits are divided by.
        head_options: `backward`, `tolerance`, `seed` (a `torch.Generator`), `backend`,
            `chunk_bytes` of `fused_grpo_loss`.

    Raises:
        ValueError, TypeError: as `GRPOLossConfig`.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        **head_options: Any,
    ) -> None:
        super().__init__()
        if importance_sampling_level == "sequence" and loss_type in _SEQUENCE_REFUSED:
            raise ValueError(
                "importance_sampling_level: expected 'token' with loss_type="
                f"{loss_type!r}; got 'sequence'"
            )
        own: dict[str, dict[str, Any]] = {
            "cispo": {"epsilon_high": epsilon_high},
            "sapo": {
                "sapo_temperature_pos": sapo_temperature_pos,
                "sapo_temperature_neg": sapo_temperature_neg,
            },
            "vespo": {
                "vespo_k_pos": vespo_k_pos, "vespo_lambda_pos": vespo_lambda_pos,
                "vespo_k_neg": vespo_k_neg, "vespo_lambda_neg": vespo_lambda_neg,
            },
        }  # fmt: skip
        clip: dict[str, Any] = {
            "epsilon": epsilon_low,
            "epsilon_high": epsilon_high,
            "delta": delta,
        }
        if loss_type == "dr_grpo":
            clip["max_completion_length"] = max_completion_length
        check_options(head_options, stored=True)
        self.beta, self.use_ref_model = beta, use_ref_model
        self.head_options = head_options
        self.config = GRPOLossConfig(
            loss_type=loss_type, beta=beta if use_ref_model else 0.0, temperature=temperature,
            importance_sampling_level=importance_sampling_level,
            use_bias_correction_kl=use_bias_correction_kl, **own.get(loss_type, clip),
        )  # fmt: skip

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss, and as metrics the mean KL, where `beta` is not 0, and the share clipped.

        Args:
            _input: hidden states `[B, T, H]`.
            lin_weight: `[V, H]`, the head.
            selected_token_ids: `[B, T]`.
            attention_mask: `[B, T]`, 1 for the tokens that count.
            advantages: `[B]` or `[B, T]`.
            bias: `[V]` or None.
            ref_per_token_logps: `[B, T]` log-probs under the reference; or, to make them of,
            ref_input: its hidden states `[B, T, H]`,
            ref_weight: its head `[V, H]`,
            ref_bias: and `[V]` or None.
            old_per_token_logps: `[B, T]`; None is on-policy.
            vllm_is_ratio: `[B, T]`, `[B, 1]` or `[B]`, >= 0: the sampler's correction.
            num_items_in_batch: of `dapo`, `cispo` and `vespo`: the tokens of the whole step over
                all ranks. None: those of this call, over all ranks.

        Raises:
            ValueError, TypeError: as `fused_grpo_loss`, by its names; a reference where there
                should be none, or none where there should be one.
        """
        config, mask = self.config, attention_mask
        ref = self._reference(
            selected_token_ids, mask, ref_per_token_logps, ref_input, ref_weight, ref_bias
        )
        arguments: dict[str, Any] = {
            "advantages": advantages, "old_logps": old_per_token_logps, "ref_logps": ref,
        }  # fmt: skip
        if vllm_is_ratio is not None:
            config, arguments = _corrected(config, vllm_is_ratio, mask, arguments)
        num_items = None
        if config.loss_type in _STEP_WIDE:
            num_items = _tokens_a_rank(num_items_in_batch, mask)
        out = fused_grpo_loss(
            _input, lin_weight, selected_token_ids, mask=mask, bias=bias, config=config,
            num_items=num_items, **arguments, **self.head_options,
        )  # fmt: skip
        kl = (out.metrics["kl"] if config.beta else torch.zeros_like(out.loss),)
        clipped = _clipped(self.config, out.logps, advantages, mask, old_per_token_logps)
        return out.loss, (*(kl if self.beta else ()), clipped)

    def _reference(
        self, targets: Tensor, mask: Tensor, logps: Tensor | None, hidden: Tensor | None,
        weight: Tensor | None, bias: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        if not self.use_ref_model:
            if logps is not None or hidden is not None:
                name = "ref_input" if logps is None else "ref_per_token_logps"
                raise ValueError(f"{name}: expected None with use_ref_model=False; got a tensor")
            return None
        if logps is not None:
            return logps
        if hidden is None or weight is None:
            raise ValueError(
                "ref_per_token_logps: expected [B, T] log-probs, or ref_input and ref_weight, with "
                "use_ref_model=True; got None"
            )
        with torch.no_grad():
            return linear_logprobs(
                hidden, weight, targets, bias=bias, mask=mask, temperature=self.config.temperature
            ).logps


def _corrected(
    config: GRPOLossConfig, ratio: Tensor, mask: Tensor, arguments: dict[str, Any]
) -> tuple[GRPOLossConfig, dict[str, Any]]:
    if config.loss_type != "vespo":
        return config, {**arguments, "advantages": corrected(arguments["advantages"], ratio, mask)}
    old = arguments["old_logps"]
    if old is None:
        raise ValueError(
            "old_per_token_logps: expected [B, T] log-probs, as vllm_is_ratio came with "
            "loss_type='vespo'; got None"
        )
    # It sums the ratio's logarithm over the sequence: what the sampler's log-probs are made of.
    log_ratio = ratio.float().clamp(min=1e-8).log()
    if log_ratio.ndim == 1:
        log_ratio = log_ratio[:, None]
    if log_ratio.shape[1] == 1 and mask.shape[1] > 1:
        # Once a sequence, on its first token.
        first = mask.bool() & (mask.bool().cumsum(1) == 1)
        log_ratio = torch.where(first, log_ratio, 0.0)
    config = replace(config, is_correction="token_truncate", is_clip_max=float(2**30))
    return config, {**arguments, "sampling_logps": old - log_ratio}


def _tokens_a_rank(num_items: float | Tensor | None, mask: Tensor) -> Tensor:
    """What Liger divides by: the tokens over all ranks, by the number of ranks."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_items is not None:
        total = torch.as_tensor(num_items, dtype=torch.float32, device=mask.device)
    else:
        total = mask.sum(dtype=torch.float32)
        if distributed:
            torch.distributed.all_reduce(total)
    ranks = torch.distributed.get_world_size() if distributed else 1
    return (total / ranks).clamp(min=1)


@torch.no_grad()
def _clipped(
    config: GRPOLossConfig,
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_logps: Tensor | None,
) -> Tensor:
    """The share of tokens, of those that count, whose ratio or whose sequence's is clipped."""
    config = replace(config, beta=0.0, delta=None)
    checks = ValueChecks()
    layout = Layout.of("attention_mask", mask, None, checks)
    inputs = flat_tokens(
        config, layout, checks, advantages, mask, num_items=None, entropy_threshold=None,
        old_logps=old_logps, ref_logps=None, sampling_logps=None,
    )  # fmt: skip
    tokens = Tokens.of(inputs, logps.flatten(), None)
    low, high = clipped_tokens(config, tokens, importance_ratio(config, tokens))
    return ((low | high) & (tokens.mask != 0)).sum() / tokens.mask.sum().clamp(min=1)

"""`FusedLinearGRPOLoss`: the call of Liger's `LigerFusedLinearGRPOLoss`, by `fused_grpo_loss`.

    from grpo_kernels.integrations.liger import FusedLinearGRPOLoss
    grpo = FusedLinearGRPOLoss(beta=0.04, loss_type="dapo")
    loss, metrics = grpo(hidden, lm_head.weight, ids, mask, advantages, ref_per_token_logps=ref)

Arguments and results are as in Liger 0.8.5, which need not be installed. The differences:

- `luspo` ignores padding, and `advantages` may be `[B, T]`; Liger's gradients are wrong there.
- Masked positions may hold anything, NaN included.
- In half precision, the logits and the sum of the weight's gradient over chunks are float32.
- An argument that Liger ignores is an error: a second reference, or one with `use_ref_model=False`.
- `vespo` with `vllm_is_ratio` and no `old_per_token_logps` computes the log-probs twice.
- `cispo` may have sequence ratios.
- `compiled` and `chunk_size` have no effect: nothing here is compiled, and the chunk size is a
  budget in bytes, `Execution.chunk_bytes`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.checks import FLOATS, as_number, check_choice, check_number, check_tensor, scalar
from ..fused_grpo_loss import fused_grpo_loss
from ..head.execution import Execution
from ..head.linear_logprobs import linear_logprobs
from ..head.lm_head import LMHead, Reference
from ..loss.advantages import apply_is_weights
from ..loss.config import GRPOLossConfig
from ..loss.losses import flat_fields
from .patching import Patch, check_head_options, check_version

_NAME = "LigerFusedLinearGRPOLoss"
_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


@dataclass(eq=False, repr=False)
class FusedLinearGRPOLoss(nn.Module):
    """The GRPO loss of a linear head over hidden states, under Liger's names.

    Options may change between calls. Options that the loss type does not use are ignored, as in
    Liger.

    Args:
        beta: weight of the KL to the reference. With `use_ref_model=False` the KL is 0.
        compiled, chunk_size: accepted for compatibility, without effect.
        use_ref_model: whether calls come with a reference, as log-probs or as states and head.
        epsilon_low, epsilon_high: the clip range; in `cispo` `epsilon_high` is the bound itself.
        loss_type: `"grpo"`, `"bnpo"`, `"dr_grpo"`, `"dapo"`, `"cispo"`, `"sapo"`, `"luspo"`,
            `"vespo"`.
        max_completion_length: the denominator per sequence of `dr_grpo`, which needs it.
        importance_sampling_level, delta, use_bias_correction_kl, sapo_..., vespo_...: as in
            `GRPOLossConfig`.
        temperature, logits_dtype: as in `LMHead`.
        execution: backend and memory of the calls.

    Raises:
        TypeError, ValueError: as in `GRPOLossConfig` and `LMHead`.
    """

    beta: float = 0.04
    compiled: bool = True
    use_ref_model: bool = True
    chunk_size: int = 1
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    execution: Execution = Execution()  # noqa: RUF009 - frozen
    logits_dtype: str = "fp32"

    def __post_init__(self) -> None:
        super().__init__()
        temperature, logits_dtype = self.temperature, self.logits_dtype
        check_head_options(self.execution, temperature=temperature, logits_dtype=logits_dtype)
        self._config()  # refuses now what the calls would refuse

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
        """Returns the loss, 0-d, and the metrics, 0-d each.

        The metrics are the mean KL, if `beta` is not 0, and the share of clipped tokens.

        Args:
            _input: hidden states `[B, T, H]`.
            lin_weight: `[V, H]`, the head.
            selected_token_ids: `[B, T]`.
            attention_mask: `[B, T]`, 1 for the tokens that count.
            advantages: `[B]` or `[B, T]`.
            bias: `[V]` or None.
            ref_per_token_logps: `[B, T]`, log-probs under the reference, instead of the next three.
            old_per_token_logps: `[B, T]`; None: on-policy.
            ref_input: `[B, T, H]`, hidden states of the reference.
            ref_weight: `[V, H]`, its head.
            ref_bias: `[V]` or None.
            vllm_is_ratio: `[B, T]`, `[B, 1]` or `[B]`, >= 0: importance-sampling weights that
                correct for another sampler.
            num_items_in_batch: for `dapo`, `cispo` and `vespo`, the tokens of the whole step over
                all ranks; None: the tokens of this call over all ranks.

        Raises:
            TypeError, ValueError: as in `fused_grpo_loss`, under its names; a reference with
                `use_ref_model=False`, or none or two with True.
        """
        config, head = self._config(), self._head(lin_weight, bias)
        shape = check_tensor("_input", _input).shape[:2]
        mask = check_tensor("attention_mask", attention_mask, shape=shape)
        advantages = weighted = _per_token("advantages", advantages, mask)
        old_logps, sampling_logps, reference, num_items = old_per_token_logps, None, None, None
        if vllm_is_ratio is not None and config.loss_type == "vespo":
            # Vespo weighs sequences by the sampler's log-probs, and bounds the weights by e^20.
            config = replace(config, is_correction="token_truncate", is_clip_max=float(2**30))
            if old_logps is None:
                options: dict[str, Any] = {"execution": self.execution}
                with torch.no_grad():
                    scored = linear_logprobs(_input, head, selected_token_ids, mask, **options)
                old_logps = scored.logps
            sampling_logps = _sampling_logps(old_logps, vllm_is_ratio, mask)
        elif vllm_is_ratio is not None:
            weights = _per_token("vllm_is_ratio", vllm_is_ratio, mask)
            weighted = apply_is_weights(advantages, weights, mask)
        references = (ref_per_token_logps is not None) + (ref_input is not None)
        if references != self.use_ref_model:
            raise ValueError(
                f"use_ref_model={self.use_ref_model} needs "
                + ("one reference: pass ref_per_token_logps, or ref_input and ref_weight"
                   if self.use_ref_model else "no reference: leave out ref_per_token_logps and "
                   "ref_input") + f"; got {references}"
            )  # fmt: skip
        if ref_input is not None:
            ref_weight = check_tensor("ref_weight", ref_weight)
            reference = Reference(ref_input, self._head(ref_weight, ref_bias))
        if config.effective_aggregation == "dapo":
            num_items = _tokens_per_rank(num_items_in_batch, mask)
        out = fused_grpo_loss(
            _input,
            head,
            selected_token_ids,
            weighted.expand(mask.shape),
            mask,
            old_logps=old_logps,
            ref_logps=ref_per_token_logps,
            sampling_logps=sampling_logps,
            reference=reference,
            config=config,
            num_items=num_items,
            execution=self.execution,
        )
        clipped = self._clipped_share(out.logps, old_per_token_logps, advantages, mask)
        if not self.beta:
            return out.loss, (clipped,)
        kl = out.metrics["kl"] if config.beta else torch.zeros_like(out.loss)
        return out.loss, (kl, clipped)

    def _config(self) -> GRPOLossConfig:
        """The options that the loss type uses, under this library's names."""
        check_choice("loss_type", self.loss_type, _LOSS_TYPES)
        beta = self.beta if self.use_ref_model else 0.0
        values = {**vars(self), "beta": beta, "epsilon": self.epsilon_low}
        used = {"loss_type", "beta", "importance_sampling_level", "use_bias_correction_kl"}
        used.update(flat_fields(self.loss_type))
        if self.loss_type == "dr_grpo":
            used.add("max_completion_length")
        return GRPOLossConfig(**{name: values[name] for name in used & values.keys()})

    def _head(self, weight: Tensor, bias: Tensor | None) -> LMHead:
        return LMHead(weight, bias, temperature=self.temperature, logits_dtype=self.logits_dtype)

    @torch.no_grad()
    def _clipped_share(
        self, logps: Tensor, old_logps: Tensor | None, advantages: Tensor, mask: Tensor
    ) -> Tensor:
        """The share of unmasked tokens whose ratio, or whose sequence's, is clipped."""
        epsilon_low, epsilon_high = map(as_number, (self.epsilon_low, self.epsilon_high))
        low, high = 1 - epsilon_low, 1 + epsilon_high
        if self.loss_type in ("cispo", "sapo", "vespo"):
            low, high = -math.inf, epsilon_high if self.loss_type == "cispo" else math.inf
        counts, log_ratio = mask != 0, torch.zeros_like(logps)
        if old_logps is not None:
            log_ratio = torch.where(counts, logps - old_logps, log_ratio)
        if self.importance_sampling_level == "sequence":
            log_ratio = log_ratio.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)
        ratio = log_ratio.exp()
        clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
        return (clipped & counts).sum() / counts.sum().clamp(min=1)


class patch_liger(Patch):
    """Replaces Liger's `LigerFusedLinearGRPOLoss` by `FusedLinearGRPOLoss`.

    Use it for trainers that construct Liger's class themselves, such as ms-swift's. It also works
    in modules that have imported the class already, but not for losses constructed before. Called
    as a function, the patch lasts until `undo()`; as a context manager, until the end of the block:

        with patch_liger():
            trainer = TheirTrainer(...)

    Args:
        execution, logits_dtype: as in `FusedLinearGRPOLoss`.

    Raises:
        ImportError: no Liger 0.6 or newer is installed.
        TypeError, ValueError: naming the option, what was expected and what came.
        RuntimeError: Liger is patched already.
    """

    def __init__(
        self,
        *,
        execution: Execution = Execution(),  # noqa: B008 - frozen
        logits_dtype: str = "fp32",
    ) -> None:
        check_version("liger-kernel", "0.6")
        options: dict[str, Any] = {"execution": execution, "logits_dtype": logits_dtype}
        FusedLinearGRPOLoss(**options)  # refuses now what would be refused later
        import liger_kernel.chunked_loss as where

        class Replacing(FusedLinearGRPOLoss):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**options, **kwargs})

        Replacing.__doc__, Replacing.__name__ = FusedLinearGRPOLoss.__doc__, _NAME
        theirs, modules = vars(where)[_NAME], list(sys.modules.values())
        importers = [x for x in modules if getattr(x, "__dict__", {}).get(_NAME) is theirs]
        super().__init__((module, _NAME, Replacing) for module in importers)


def _per_token(name: str, x: object, mask: Tensor) -> Tensor:
    """Values of tokens or sequences, checked, as float32 `[B, T]` or `[B, 1]`."""
    x = check_tensor(name, x, dtypes=FLOATS, device=mask.device)
    B, T = mask.shape
    if tuple(x.shape) not in ((B,), (B, 1), (B, T)):
        raise ValueError(f"{name}: expected shape {[B, T]}, {[B, 1]} or {[B]}; got {list(x.shape)}")
    return (x if x.ndim == 2 else x[:, None]).float()


def _sampling_logps(old_logps: object, weights: object, mask: Tensor) -> Tensor:
    """The log-probs under the sampler; the weight of a sequence is divided among its tokens."""
    name, shape = "old_per_token_logps", mask.shape
    old_logps = check_tensor(name, old_logps, shape=shape, dtypes=FLOATS, device=mask.device)
    log_weights = _per_token("vllm_is_ratio", weights, mask).clamp(min=1e-8).log()
    if log_weights.shape != shape:
        log_weights = log_weights / mask.sum(1, keepdim=True, dtype=torch.float32).clamp(min=1)
    return old_logps - log_weights


def _tokens_per_rank(num_items: object, mask: Tensor) -> float | Tensor:
    """Liger's divisor: the tokens over all ranks, divided by the number of ranks; at least 1."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if distributed else 1
    if num_items is None:
        total: float | Tensor = mask.sum(dtype=torch.float32)
        if distributed:
            torch.distributed.all_reduce(total)
    else:
        total = scalar("num_items_in_batch", num_items, mask.device)
    if not isinstance(total, Tensor):
        return max(check_number("num_items_in_batch", total, ">= 0") / ranks, 1.0)
    total = total.float() / ranks
    return torch.where(total < 0, total, total.clamp(min=1))  # fused_grpo_loss refuses one below 0

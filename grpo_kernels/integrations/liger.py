"""`FusedLinearGRPOLoss`: the call of Liger's `LigerFusedLinearGRPOLoss`, computed by this library.

    from grpo_kernels.integrations.liger import FusedLinearGRPOLoss
    grpo = FusedLinearGRPOLoss(beta=0.04, loss_type="dapo")
    loss, metrics = grpo(hidden, lm_head.weight, ids, mask, advantages, ref_per_token_logps=ref)

Arguments and results are those of Liger 0.8.5, which need not be installed. The differences:

- `luspo` leaves padding out, and `advantages` may be `[B, T]`; Liger's gradients are wrong there.
- Masked positions may hold anything, NaN included.
- In half precision, the logits and the sum of the weight's gradient over chunks are float32.
- A reference that comes with `use_ref_model=False` is an error; Liger ignores it.
- `vespo` with `vllm_is_ratio` and no `old_per_token_logps` makes the policy's log-probs once more,
  to turn the ratio into those of the sampler.
- `compiled` and `chunk_size` have no effect: nothing here is compiled, and the chunk size is a
  budget in bytes, `Execution.chunk_bytes`.
- A call also takes `support`, what top-p, top-k or min-p kept for each token.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.checks import FLOATS, check_tensor, scalar
from ..fused_grpo_loss import fused_grpo_loss
from ..head.execution import Execution
from ..head.linear_logprobs import linear_logprobs
from ..head.lm_head import LMHead, Support
from ..loss.advantages import apply_is_weights
from ..loss.config import GRPOLossConfig
from .patching import Patch, check_options, check_version, is_ours

_NAME = "LigerFusedLinearGRPOLoss"
# Liger refuses the sequence level with these.
_TOKEN_LEVEL_ONLY = ("cispo", "sapo", "vespo")
# The options that a loss type uses; those that are not named use `_CLIP`.
_CLIP = ("epsilon", "epsilon_high", "delta")
_USED = {
    "dr_grpo": (*_CLIP, "max_completion_length"),
    "cispo": ("epsilon_high",),
    "sapo": ("sapo_temperature_pos", "sapo_temperature_neg"),
    "vespo": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
}
# These divide by the tokens of the whole step over all ranks.
_STEP_WIDE = ("dapo", "cispo", "vespo")


class FusedLinearGRPOLoss(nn.Module):
    """The GRPO loss of a linear head over hidden states, under Liger's names.

    Options that the loss type does not use are ignored, as in Liger.

    Equivalent PyTorch, for `loss_type="dapo"` without a reference:

        logits = (hidden @ weight.T).float() / temperature
        logps = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        ratio = (logps - old_logps).exp()
        clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
        surrogate = torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
        loss = -(surrogate * mask).sum() / mask.sum()

    Args:
        beta: weight of the KL to the reference. With `use_ref_model=False` the KL is 0.
        compiled, chunk_size: accepted for compatibility, without effect.
        use_ref_model: whether calls come with a reference, as log-probs or as states and head.
        epsilon_low, epsilon_high: the clip range; in `cispo` the latter is the bound itself.
        loss_type: `"grpo"`, `"bnpo"`, `"dr_grpo"`, `"dapo"`, `"cispo"`, `"sapo"`, `"luspo"`,
            `"vespo"`.
        max_completion_length: the denominator per sequence of `dr_grpo`, which needs it.
        importance_sampling_level: `"token"` or `"sequence"`.
        temperature: divides the logits.
        delta, use_bias_correction_kl, sapo_..., vespo_...: as in `GRPOLossConfig`.
        execution: backend and memory of the calls.
        logits_dtype: as in `LMHead`.

    Raises:
        TypeError: an option of another type.
        ValueError: as in `GRPOLossConfig`; the sequence level with a loss type that has none.
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
        execution: Execution = Execution(),  # noqa: B008 - frozen
        logits_dtype: str = "fp32",
    ) -> None:
        super().__init__()
        if not isinstance(loss_type, str):
            raise TypeError(f"loss_type: expected a string; got {loss_type!r}")
        if importance_sampling_level == "sequence" and loss_type in _TOKEN_LEVEL_ONLY:
            # Begins as Liger's does, which its users match.
            raise ValueError(
                f"Sequence-level importance sampling is not supported for loss_type={loss_type!r}: "
                "importance_sampling_level: expected 'token'; got 'sequence'"
            )
        arguments = {
            "epsilon": epsilon_low,
            "epsilon_high": epsilon_high,
            "delta": delta,
            "max_completion_length": max_completion_length,
            "sapo_temperature_pos": sapo_temperature_pos,
            "sapo_temperature_neg": sapo_temperature_neg,
            "vespo_k_pos": vespo_k_pos,
            "vespo_lambda_pos": vespo_lambda_pos,
            "vespo_k_neg": vespo_k_neg,
            "vespo_lambda_neg": vespo_lambda_neg,
        }
        options: dict[str, Any] = {name: arguments[name] for name in _USED.get(loss_type, _CLIP)}
        self.beta, self.use_ref_model = beta, use_ref_model
        check_options(execution, temperature=temperature, logits_dtype=logits_dtype)
        self.temperature, self.logits_dtype = temperature, logits_dtype
        self.execution = execution
        self.config = GRPOLossConfig(
            loss_type=loss_type,
            beta=beta if use_ref_model else 0.0,
            importance_sampling_level=importance_sampling_level,
            use_bias_correction_kl=use_bias_correction_kl,
            **options,
        )
        # Ratios outside are clipped, as the metric counts them.
        self.clip_range = (-math.inf, math.inf)
        if loss_type == "cispo":
            self.clip_range = (-math.inf, epsilon_high)
        elif "epsilon" in options:
            self.clip_range = (1.0 - epsilon_low, 1.0 + epsilon_high)

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
        support: Support | None = None,
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
            ref_per_token_logps: `[B, T]`, log-probs under the reference; None computes them from
                the next three.
            ref_input: `[B, T, H]`, hidden states of the reference.
            ref_weight: `[V, H]`, its head.
            ref_bias: `[V]` or None.
            old_per_token_logps: `[B, T]`; None: on-policy.
            vllm_is_ratio: `[B, T]`, `[B, 1]` or `[B]`, >= 0: importance-sampling weights that
                correct for another sampler.
            num_items_in_batch: for `dapo`, `cispo` and `vespo`, the tokens of the whole step over
                all ranks; None counts those of this call over all ranks.
            support: the ids that the sampler kept for each of the `B * T` tokens, as in
                `fused_grpo_loss`. Log-probs computed from `ref_input` use it, too;
                `old_per_token_logps` and `ref_per_token_logps` must be over it already.

        Raises:
            TypeError, ValueError: as in `fused_grpo_loss`, under its names; a reference with
                `use_ref_model=False`, or none without it.
        """
        config = self.config
        targets = check_tensor("selected_token_ids", selected_token_ids)
        mask = check_tensor("attention_mask", attention_mask, shape=targets.shape)
        head = self._head(lin_weight, bias)
        ref_logps, old_logps = ref_per_token_logps, old_per_token_logps
        self._check_reference(ref_logps, ref_input, ref_weight)
        if self.use_ref_model and ref_logps is None:
            assert ref_input is not None and ref_weight is not None
            ref_head = self._head(ref_weight, ref_bias)
            ref_logps = self._logps(ref_input, ref_head, targets, mask, support)
        sampling_logps = None
        if vllm_is_ratio is not None:
            _check_is_weights(vllm_is_ratio, advantages, old_logps, mask)
        if vllm_is_ratio is not None and config.loss_type == "vespo":
            # It sums the log of the weights over a sequence, which is computed from the sampler's
            # log-probs.
            if old_logps is None:
                old_logps = self._logps(_input, head, targets, mask, support)
            sampling_logps = old_logps - _log_weights(vllm_is_ratio, mask)
            config = replace(config, is_correction="token_truncate", is_clip_max=float(2**30))
        weighted = advantages
        if vllm_is_ratio is not None and sampling_logps is None:
            weighted = apply_is_weights(advantages, vllm_is_ratio, mask)
        num_items = None
        if config.loss_type in _STEP_WIDE:
            num_items = _tokens_per_rank(num_items_in_batch, mask)
        out = fused_grpo_loss(
            _input,
            head,
            targets,
            weighted,
            mask,
            old_logps=old_logps,
            ref_logps=ref_logps,
            sampling_logps=sampling_logps,
            support=support,
            config=config,
            num_items=num_items,
            execution=self.execution,
        )
        clipped = self._clipped_share(out.logps, advantages, mask, old_per_token_logps)
        if not self.beta:
            return out.loss, (clipped,)
        kl = out.metrics["kl"] if config.beta else torch.zeros_like(out.loss)
        return out.loss, (kl, clipped)

    def _head(self, weight: Tensor, bias: Tensor | None) -> LMHead:
        return LMHead(weight, bias, temperature=self.temperature, logits_dtype=self.logits_dtype)

    def _check_reference(
        self, logps: Tensor | None, hidden: Tensor | None, weight: Tensor | None
    ) -> None:
        """Raises ValueError for a reference with `use_ref_model=False`, or none with True."""
        if not self.use_ref_model:
            if logps is not None or hidden is not None:
                name = "ref_input" if logps is None else "ref_per_token_logps"
                raise ValueError(f"{name} does not work with use_ref_model=False: leave it out")
        elif logps is not None and hidden is not None:
            warnings.warn(
                "Both ref_per_token_logps and ref_input are provided. Using "
                "ref_per_token_logps, as Liger does",
                stacklevel=3,
            )
        elif logps is None and (hidden is None or weight is None):
            raise ValueError(
                "ref_per_token_logps: expected [B, T] log-probs, or ref_input and ref_weight, with "
                "use_ref_model=True; got None"
            )

    @torch.no_grad()
    def _logps(
        self,
        hidden: Tensor,
        head: LMHead,
        targets: Tensor,
        mask: Tensor,
        support: Support | None,
    ) -> Tensor:
        return linear_logprobs(
            hidden, head, targets, mask, support=support, execution=self.execution
        ).logps

    @torch.no_grad()
    def _clipped_share(
        self, logps: Tensor, advantages: Tensor, mask: Tensor, old_logps: Tensor | None
    ) -> Tensor:
        """The share of unmasked tokens whose own or whose sequence's ratio is clipped."""
        counts, (low, high) = mask != 0, self.clip_range
        log_ratio = torch.zeros_like(logps)
        if old_logps is not None:
            log_ratio = torch.where(counts, logps - old_logps, log_ratio)
        if self.config.importance_sampling_level == "sequence":
            length = counts.sum(1, keepdim=True).clamp(min=1)
            log_ratio = (log_ratio.sum(1, keepdim=True) / length).expand_as(logps)
        ratio = log_ratio.exp()
        A = advantages if advantages.ndim == 2 else advantages[:, None]
        clipped = ((ratio < low) & (A < 0)) | ((ratio > high) & (A > 0))
        return (clipped & counts).sum() / counts.sum().clamp(min=1)


class patch_liger(Patch):
    """Replaces Liger's `LigerFusedLinearGRPOLoss` by `FusedLinearGRPOLoss`.

    Use it for trainers that construct Liger's class themselves, such as ms-swift's and TRL's with
    `use_liger_kernel=True`. It also reaches modules that have imported the class already, but not
    losses that have been constructed. Called as a function, the patch lasts until `undo()`; as a
    context manager, until the end of the block:

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
        check_options(execution, logits_dtype=logits_dtype)
        options: dict[str, Any] = {"execution": execution, "logits_dtype": logits_dtype}

        class Replacing(FusedLinearGRPOLoss):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**options, **kwargs})

        Replacing.__doc__, Replacing.__name__ = FusedLinearGRPOLoss.__doc__, _NAME
        super().__init__((module, _NAME, Replacing) for module in _modules_with_ligers())

    @staticmethod
    def active() -> bool:
        """Returns True while Liger is patched."""
        import liger_kernel.chunked_loss as where

        return is_ours(vars(where)[_NAME])


def _modules_with_ligers() -> Iterator[Any]:
    """The modules that have Liger's class, or what stands in its place, under Liger's name."""
    import liger_kernel.chunked_loss as where

    original = vars(where)[_NAME]
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is original:
            yield module


def _check_is_weights(weights: object, advantages: object, old_logps: object, mask: Tensor) -> None:
    """Checks importance-sampling weights, and what they are put into, before they are."""
    B, T = mask.shape
    weights = check_tensor("vllm_is_ratio", weights, dtypes=FLOATS, device=mask.device)
    if tuple(weights.shape) not in ((B,), (B, 1), (B, T)):
        raise ValueError(
            f"vllm_is_ratio: expected shape {[B, T]}, {[B, 1]} or {[B]}; got {list(weights.shape)}"
        )
    advantages = check_tensor("advantages", advantages, dtypes=FLOATS, device=mask.device)
    if tuple(advantages.shape) not in ((B,), (B, T)):
        raise ValueError(
            f"advantages: expected shape {[B]} or {[B, T]}; got {list(advantages.shape)}"
        )
    if old_logps is not None:
        check_tensor(
            "old_per_token_logps", old_logps, shape=(B, T), dtypes=FLOATS, device=mask.device
        )


def _log_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """The log of importance-sampling weights; one per sequence is put on its first token."""
    log_weights = weights.float().clamp(min=1e-8).log()
    if log_weights.ndim == 1:
        log_weights = log_weights[:, None]
    if log_weights.shape[1] == 1 and mask.shape[1] > 1:
        first = mask.bool() & (mask.bool().cumsum(1) == 1)
        log_weights = torch.where(first, log_weights, 0.0)
    return log_weights


def _tokens_per_rank(num_items: float | Tensor | None, mask: Tensor) -> Tensor:
    """Returns Liger's divisor: the tokens over all ranks, divided by the number of ranks."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_items is not None:
        number = scalar("num_items_in_batch", num_items, mask.device)
        if not isinstance(number, Tensor):
            if number < 0:
                raise ValueError(f"num_items_in_batch: expected a number >= 0; got {number}")
            number = torch.full((), number, dtype=torch.float32, device=mask.device)
        total = number.float()
    else:
        total = mask.sum(dtype=torch.float32)
        if distributed:
            torch.distributed.all_reduce(total)
    ranks = torch.distributed.get_world_size() if distributed else 1
    total = total / ranks
    return torch.where(total < 0, total, total.clamp(min=1))  # a tensor below 0 is refused

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
  budget in bytes, `chunk_bytes`.
- A call also takes `support`, the words that top-p, top-k or min-p kept for each token.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import GRPOLossConfig
from ..fused_grpo_loss import fused_grpo_loss
from ..hf_head import apply_is_weights, check_head_options
from ..inputs import loss_inputs, scalar
from ..layout import FLOATS, Layout, ValueChecks, check_tensor
from ..linear_logprobs import linear_logprobs
from ..objective import Tokens, clipped_tokens, importance_ratio

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
        sapo_temperature_pos, sapo_temperature_neg: as in `GRPOLossConfig`.
        temperature: divides the logits.
        delta, use_bias_correction_kl: as in `GRPOLossConfig`.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: as in `GRPOLossConfig`.
        head_options: `backward`, `tolerance`, `seed` (a `torch.Generator`), `backend`,
            `chunk_bytes`, `logits_dtype`, `batch_invariant`, `matmul` of `fused_grpo_loss`.

    Raises:
        TypeError: an unknown option.
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
        **head_options: Any,
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
        check_head_options(head_options, reused=True)
        given = {
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
        options: dict[str, Any] = {name: given[name] for name in _USED.get(loss_type, _CLIP)}
        self.beta, self.use_ref_model = beta, use_ref_model
        self.head_options = head_options
        self.config = GRPOLossConfig(
            loss_type=loss_type,
            beta=beta if use_ref_model else 0.0,
            temperature=temperature,
            importance_sampling_level=importance_sampling_level,
            use_bias_correction_kl=use_bias_correction_kl,
            **options,
        )

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
        support: tuple[Tensor, Tensor] | None = None,
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
            old_per_token_logps: `[B, T]`; None is on-policy.
            vllm_is_ratio: `[B, T]`, `[B, 1]` or `[B]`, >= 0: importance-sampling weights that
                correct for another sampler.
            num_items_in_batch: for `dapo`, `cispo` and `vespo`, the tokens of the whole step over
                all ranks; None counts those of this call over all ranks.
            support: `(token_ids, offsets)`, the words that sampling kept for each of the `B * T`
                tokens, as in `fused_grpo_loss`; also those of log-probs computed from `ref_input`.
                `old_per_token_logps` and `ref_per_token_logps` have to be over them as they come.

        Raises:
            TypeError, ValueError: as in `fused_grpo_loss`, under its names; a reference with
                `use_ref_model=False`, or none without it.
        """
        config = self.config
        targets = check_tensor("selected_token_ids", selected_token_ids)
        mask = check_tensor("attention_mask", attention_mask, shape=targets.shape)
        replay: dict[str, Any] = {} if support is None else {"support": support}
        ref_logps = self._ref_logps(
            selected_token_ids, mask, ref_per_token_logps, ref_input, ref_weight, ref_bias, replay
        )
        arguments: dict[str, Any] = {
            "advantages": advantages,
            "old_logps": old_per_token_logps,
            "ref_logps": ref_logps,
        }
        if vllm_is_ratio is not None:
            _check_is_weights(vllm_is_ratio, advantages, old_per_token_logps, mask)
            if config.loss_type == "vespo" and old_per_token_logps is None:
                arguments["old_logps"] = self._logps(
                    _input, lin_weight, selected_token_ids, mask, bias, self.head_options | replay
                )
            config, arguments = _with_is_weights(config, vllm_is_ratio, mask, arguments)
        num_items = None
        if config.loss_type in _STEP_WIDE:
            num_items = _tokens_per_rank(num_items_in_batch, mask)
        out = fused_grpo_loss(
            _input,
            lin_weight,
            selected_token_ids,
            mask=mask,
            bias=bias,
            config=config,
            num_items=num_items,
            **arguments,
            **self.head_options,
            **replay,
        )
        clipped = _clipped_share(self.config, out.logps, advantages, mask, old_per_token_logps)
        if not self.beta:
            return out.loss, (clipped,)
        kl = out.metrics["kl"] if config.beta else torch.zeros_like(out.loss)
        return out.loss, (kl, clipped)

    def _ref_logps(
        self,
        targets: Tensor,
        mask: Tensor,
        logps: Tensor | None,
        hidden: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        replay: dict[str, Any],
    ) -> Tensor | None:
        if not self.use_ref_model:
            if logps is not None or hidden is not None:
                name = "ref_input" if logps is None else "ref_per_token_logps"
                raise ValueError(f"{name}: expected None with use_ref_model=False; got a tensor")
            return None
        if logps is not None:
            if hidden is not None:
                warnings.warn(
                    "Both ref_per_token_logps and ref_input are provided. Using "
                    "ref_per_token_logps, as Liger does",
                    stacklevel=3,
                )
            return logps
        if hidden is None or weight is None:
            raise ValueError(
                "ref_per_token_logps: expected [B, T] log-probs, or ref_input and ref_weight, with "
                "use_ref_model=True; got None"
            )
        return self._logps(hidden, weight, targets, mask, bias, replay)

    @torch.no_grad()
    def _logps(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        mask: Tensor,
        bias: Tensor | None,
        head: dict[str, Any],
    ) -> Tensor:
        options = {"bias": bias, "mask": mask, "temperature": self.config.temperature, **head}
        return linear_logprobs(hidden, weight, targets, **options).logps


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


def _with_is_weights(
    config: GRPOLossConfig, weights: Tensor, mask: Tensor, arguments: dict[str, Any]
) -> tuple[GRPOLossConfig, dict[str, Any]]:
    """Puts importance-sampling weights into the config and arguments of `fused_grpo_loss`."""
    if config.loss_type != "vespo":
        advantages = apply_is_weights(arguments["advantages"], weights, mask)
        return config, arguments | {"advantages": advantages}
    # vespo sums the log of the weights over a sequence, which `fused_grpo_loss` computes from the
    # sampler's log-probs.
    log_weights = weights.float().clamp(min=1e-8).log()
    if log_weights.ndim == 1:
        log_weights = log_weights[:, None]
    if log_weights.shape[1] == 1 and mask.shape[1] > 1:
        # A weight per sequence enters the sum once: on the sequence's first token.
        first = mask.bool() & (mask.bool().cumsum(1) == 1)
        log_weights = torch.where(first, log_weights, 0.0)
    config = replace(config, is_correction="token_truncate", is_clip_max=float(2**30))
    return config, arguments | {"sampling_logps": arguments["old_logps"] - log_weights}


def _tokens_per_rank(num_items: float | Tensor | None, mask: Tensor) -> Tensor:
    """Returns Liger's divisor: the tokens over all ranks, divided by the number of ranks."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_items is not None:
        number = scalar("num_items_in_batch", num_items, mask.device)
        if not isinstance(number, Tensor) and number < 0:
            raise ValueError(f"num_items_in_batch: expected a number >= 0; got {number}")
        total = torch.as_tensor(number).to(mask.device, torch.float32)
    else:
        total = mask.sum(dtype=torch.float32)
        if distributed:
            torch.distributed.all_reduce(total)
    ranks = torch.distributed.get_world_size() if distributed else 1
    total = total / ranks
    return torch.where(total < 0, total, total.clamp(min=1))  # a tensor below 0 is refused


@torch.no_grad()
def _clipped_share(
    config: GRPOLossConfig,
    logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_logps: Tensor | None,
) -> Tensor:
    """Returns the share of unmasked tokens whose own or whose sequence's ratio is clipped."""
    config = replace(config, beta=0.0, delta=None)
    checks = ValueChecks()
    layout = Layout.of("attention_mask", mask, None, checks)
    inputs = loss_inputs(
        config,
        layout,
        checks,
        advantages,
        layout.flat_mask(mask, checks),
        num_items=None,
        entropy_threshold=None,
        old_logps=old_logps,
        ref_logps=None,
        sampling_logps=None,
    )
    tokens = Tokens.of(inputs, logps.flatten(), None)
    low, high = clipped_tokens(config, tokens, importance_ratio(config, tokens))
    return ((low | high) & (tokens.mask != 0)).sum() / tokens.mask.sum().clamp(min=1)

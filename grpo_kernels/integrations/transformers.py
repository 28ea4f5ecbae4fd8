"""A causal language model of transformers that returns log-probs, or the GRPO loss, not logits.

    attach_fused_head(model)
    out = model(input_ids, attention_mask=mask, labels=labels, fused_head=True)
    out.logps, out.entropy                                    # [B, S - 1], differentiable
    out = model(input_ids, attention_mask=mask, labels=labels, fused_head=True,
                advantages=advantages, old_logps=old_logps)
    out.loss.backward()

Everything happens inside the model's own forward: what wraps it (DDP, FSDP2, ZeRO-3, PEFT) gathers
weights and reduces gradients there.
"""

from __future__ import annotations

import functools
import types
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..config import GRPOLossConfig
from ..fused_grpo_loss import fused_grpo_loss
from ..linear_logprobs import linear_logprobs
from .head import Head, check_head, head_of, register_with_zero3, unadapted, whole

_ATTRIBUTE = "_grpo_kernels_head"
# How the log-probs are computed: given to `attach_fused_head`, or to a single call.
_OPTIONS = ("temperature", "backward", "tolerance", "seed", "backend", "chunk_bytes")
# What makes a loss of them, given to a call together with `advantages`.
_LOSS_OPTIONS = (
    "mask", "old_logps", "ref_logps", "sampling_logps", "config", "num_items",
    "entropy_threshold", "skip_untrained",
)  # fmt: skip


@dataclass
class FusedHeadOutput(ModelOutput):
    """Of a call with `fused_head=True`; per-token values are 0 where nothing is scored.

    Args:
        loss: the GRPO loss; None without `advantages`.
        logps: float32 `[B, S - 1]`, or `[B, logits_to_keep]`: the log-prob of each label, which
            the position before it predicts (`[B, S]` with `shift_labels`). Differentiable without
            `advantages`, detached with them.
        entropy: likewise, in nats.
        mask: likewise, bool: what has been scored.
        metrics: those of `fused_grpo_loss`; None without `advantages`.
        aux_loss: the load-balancing loss of a mixture of experts, where the config or
            `output_router_logits` asks for it. It is not part of `loss`.
    """

    loss: Tensor | None = None
    logps: Tensor | None = None
    entropy: Tensor | None = None
    mask: Tensor | None = None
    metrics: dict[str, Tensor] | None = None
    aux_loss: Tensor | None = None

    @property
    def log_probs(self) -> Tensor | None:
        """`logps`, by TRL's name."""
        return self.logps


@dataclass
class _Attached:
    own_forward: Any  # the model's, bound
    in_instance: bool  # whether it was an attribute of the instance already
    float32: bool
    options: dict[str, Any]
    forward: Any = None  # the one put in its place


def attach_fused_head(
    model: Any,
    *,
    keyword: str = "fused_head",
    float32: bool = False,
    check: bool = True,
    **options: Any,
) -> None:
    """Gives a causal language model a second way to be called, `fused_head=True`.

    `model(input_ids, attention_mask=..., labels=..., fused_head=True)` returns a
    `FusedHeadOutput`: log-probs and entropy of the labels other than -100, as `linear_logprobs`
    makes them. With `advantages` (`[B]`, or in the shape of the log-probs) it also returns the
    loss of `fused_grpo_loss`, which takes its options from the call: `mask`, `old_logps`,
    `ref_logps`, `sampling_logps`, `config`, `num_items`, `entropy_threshold`, `skip_untrained`.
    Per-token ones have the shape of the log-probs. With `logits_to_keep=T` only the last T labels
    are scored, and all per-token shapes are `[B, T]`. `shift_labels` are labels that have been
    shifted already. Called in any other way, `model.generate` included, the model is as it was.

    The equivalent PyTorch:

        logits = model(input_ids, attention_mask=...).logits[:, :-1].float() / temperature
        logps = logits.log_softmax(-1).gather(-1, labels[:, 1:, None])[..., 0]

    Args:
        model: a causal language model of transformers whose logits are a linear layer of its last
            states (biased, scaled, capped as the config says), or PEFT around one: LoRA, on the
            body and on the head. Not yet wrapped by DDP, FSDP2 or DeepSpeed.
        keyword: the name of the argument that asks for it.
        float32: multiply hidden states and head in float32, outside autocast.
        check: compare with the model's own logits on a few ids, which takes one forward.
        options: `temperature`, `backward`, `tolerance`, `seed`, `backend`, `chunk_bytes` of
            `linear_logprobs`, for all calls; a call may name its own.

    Raises:
        TypeError, ValueError: not such a model; PEFT with virtual tokens; logits that are made in
            another way; an unknown option.
    """
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        raise TypeError(f"{unknown[0]}: expected one of {', '.join(_OPTIONS)}; got {unknown[0]!r}")
    model = unadapted(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            "model: expected a model of transformers, or PEFT around one; got "
            f"{type(model).__name__}"
        )
    if hasattr(model, _ATTRIBUTE):
        raise ValueError("model: expected one without a fused head; detach_fused_head it first")
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder alone; got {type(model).__name__}")
    head_of(model)
    if check:
        check_head(model)
    attached = _Attached(model.forward, "forward" in vars(model), float32, options)

    # With the signature that generate and the Trainer look at.
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.pop(keyword, False):
            return getattr(self, _ATTRIBUTE).own_forward(*args, **kwargs)
        return _fused_forward(self, getattr(self, _ATTRIBUTE), args, kwargs)

    attached.forward = model.forward = types.MethodType(forward, model)
    setattr(model, _ATTRIBUTE, attached)


def detach_fused_head(model: Any) -> None:
    """Undoes `attach_fused_head`.

    Raises:
        ValueError: the model has no fused head, or its forward has been wrapped since.
    """
    model = unadapted(model)
    attached = getattr(model, _ATTRIBUTE, None)
    if attached is None:
        raise ValueError("model: expected one with a fused head; got one without")
    if vars(model).get("forward") is not attached.forward:
        raise ValueError(
            "model: expected the forward that attach_fused_head put there; it has been replaced "
            "since (accelerate does: accelerator.unwrap_model first)"
        )
    if attached.in_instance:
        model.forward = attached.own_forward
    else:
        del model.forward
    delattr(model, _ATTRIBUTE)


def _fused_forward(
    model: Any, attached: _Attached, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FusedHeadOutput:
    options = attached.options | {k: kwargs.pop(k) for k in _OPTIONS if k in kwargs}
    advantages = kwargs.pop("advantages", None)
    loss_options = {k: kwargs.pop(k) for k in _LOSS_OPTIONS if k in kwargs}
    if advantages is None and loss_options:
        raise ValueError(f"advantages: expected, as {', '.join(loss_options)} came; got None")
    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    targets = _Targets.of(kwargs)
    if kwargs.pop("use_cache", None) or kwargs.get("past_key_values") is not None:
        raise ValueError(
            "past_key_values, use_cache: expected none, as whole sequences are scored; got them "
            "(PEFT's prefix tuning passes them)"
        )
    outputs = model.base_model(*args, use_cache=False, **kwargs)
    head = head_of(model)
    register_with_zero3(model, head.weight)
    hidden, labels = targets.states_and_labels(outputs.last_hidden_state, head.weight.device)
    context: Any = nullcontext()
    if attached.float32:
        hidden = hidden.float()
        context = torch.autocast(hidden.device.type, enabled=False)
    with context:
        out = _scored(head, hidden, labels, options, advantages, loss_options)
    if kwargs.get("output_router_logits"):
        out.aux_loss = _load_balancing_loss(text, outputs, kwargs.get("attention_mask"))
    return out


@dataclass
class _Targets:
    """Whose log-probs are wanted: labels, still to be shifted or not, all or the last few."""

    labels: Tensor
    shifted: bool
    keep: int

    @staticmethod
    def of(kwargs: dict[str, Any]) -> _Targets:
        labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        keep = kwargs.pop("logits_to_keep", 0)
        if (labels is None) == (shifted is None):
            raise ValueError(
                "labels: expected token ids [B, S], -100 where nothing is to be scored, or "
                f"shift_labels; got {'neither' if labels is None else 'both'}"
            )
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
            raise ValueError(f"logits_to_keep: expected an int >= 0; got {keep!r}")
        return _Targets(labels if shifted is None else shifted, shifted is not None, keep)

    def states_and_labels(self, hidden: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        labels = self.labels
        if labels.shape != hidden.shape[:2]:
            raise ValueError(
                f"labels: expected shape {list(hidden.shape[:2])}, that of the states; got "
                f"{list(labels.shape)}"
            )
        if not self.shifted:
            hidden, labels = hidden[:, :-1], labels[:, 1:]
        if self.keep > labels.shape[1]:
            raise ValueError(
                f"logits_to_keep: expected at most {labels.shape[1]}, as many as there are labels "
                f"after the first; got {self.keep}"
            )
        # Where the model is spread over devices the body may end on another one than the head's.
        return hidden[:, -self.keep :].to(device), labels[:, -self.keep :].to(device)


def _scored(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    options: dict[str, Any],
    advantages: Tensor | None,
    loss_options: dict[str, Any],
) -> FusedHeadOutput:
    mask = labels != -100
    weight = whole(head.weight)
    given = {**head.arguments(hidden), **options}
    if advantages is None:
        scored = linear_logprobs(hidden, weight, labels, mask=mask, entropy=True, **given)
        return FusedHeadOutput(logps=scored.logps, entropy=scored.entropy, mask=mask)
    if "mask" in loss_options:
        mask = mask & loss_options.pop("mask").bool()
    config = loss_options.get("config") or GRPOLossConfig()
    if config.temperature != 1.0 and "temperature" in given:
        raise ValueError(
            "temperature: expected it in the config or given to the call or attach_fused_head; got "
            "two of them"
        )
    out = fused_grpo_loss(hidden, weight, labels, advantages, mask, **given, **loss_options)
    return FusedHeadOutput(
        loss=out.loss, logps=out.logps, entropy=out.entropy, mask=mask, metrics=out.metrics
    )


def _load_balancing_loss(config: Any, outputs: Any, attention_mask: Tensor | None) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = next(
        getattr(config, name)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
        if getattr(config, name, None) is not None
    )
    loss = load_balancing_loss_func(
        outputs.router_logits, experts, config.num_experts_per_tok, attention_mask
    )
    assert isinstance(loss, Tensor)
    return loss

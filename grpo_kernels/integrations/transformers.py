"""A causal language model of transformers that returns log-probs, or the GRPO loss, not logits.

    attach_fused_head(model)
    out = model(input_ids, attention_mask=mask, labels=labels, fused_head=True)
    out.logps, out.entropy                                    # [B, S - 1], differentiable
    objective = Objective(advantages, old_logps=old_logps)
    model(input_ids, attention_mask=mask, labels=labels, fused_head=objective).loss.backward()

Everything happens inside the model's own forward: what wraps it (DDP, FSDP2, ZeRO-3, PEFT) gathers
weights and reduces gradients there.
"""

from __future__ import annotations

import inspect
import types
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, TransformersKwargs

from ..config import GRPOLossConfig
from ..fused_grpo_loss import fused_grpo_loss
from ..linear_logprobs import linear_logprobs
from .head import (
    check_logits,
    check_options,
    head_of,
    is_prompt_learning,
    is_sharded,
    register_with_zero3,
    unadapted,
    whole,
)

_ATTRIBUTE = "_grpo_kernels_head"
# What a call may be given besides what the model's own forward and its body name.
_COMMON = {"labels", "shift_labels", "logits_to_keep", *TransformersKwargs.__annotations__}


@dataclass
class FusedHeadOutput(ModelOutput):
    """Of a call with a fused head; per-token values are 0 where nothing is scored.

    Args:
        loss: the GRPO loss; None without advantages.
        logps: float32 `[B, S - 1]`, or `[B, logits_to_keep]`: the log-prob of each label, which
            the position before it predicts (`[B, S]` with `shift_labels`). Differentiable without
            advantages, detached with them.
        entropy: likewise, in nats.
        mask: likewise, bool: what has been scored.
        metrics: those of `fused_grpo_loss`; None without advantages.
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


class Objective:
    """What a fused head is asked for: a loss, or, without advantages, log-probs alone.

    A class of its own, and not arguments of the model's forward, as FSDP's mixed precision rounds
    those to bf16, and log-probs in bf16 are not worth having. For the same reason it keeps what
    came out, `output`, before a wrapper rounds that.

    Args:
        advantages: `[B]`, or in the shape of the log-probs, as all per-token values are; None asks
            for log-probs alone.
        mask: bool or 0/1: of the labels other than -100, those that count.
        old_logps, ref_logps, sampling_logps, config, num_items, entropy_threshold, skip_untrained:
            as in `fused_grpo_loss`. The temperature is the head's, not the config's.
        head_options: `temperature`, `backward`, `tolerance`, `seed`, `backend`, `chunk_bytes` for
            this call, instead of those of `attach_fused_head`.

    Raises:
        TypeError: an unknown option.
        ValueError: what belongs to a loss without advantages; a temperature in the config.
    """

    def __init__(
        self,
        advantages: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        old_logps: Tensor | None = None,
        ref_logps: Tensor | None = None,
        sampling_logps: Tensor | None = None,
        config: GRPOLossConfig | None = None,
        num_items: float | Tensor | None = None,
        entropy_threshold: float | Tensor | None = None,
        skip_untrained: bool = False,
        **head_options: Any,
    ) -> None:
        check_options(head_options)
        given = {
            "old_logps": old_logps, "ref_logps": ref_logps, "sampling_logps": sampling_logps,
            "config": config, "num_items": num_items, "entropy_threshold": entropy_threshold,
        }  # fmt: skip
        self.loss_options = {name: x for name, x in given.items() if x is not None}
        if skip_untrained:
            self.loss_options["skip_untrained"] = True
        if advantages is None and self.loss_options:
            raise ValueError(
                f"advantages: expected a tensor, as {', '.join(self.loss_options)} came; got None"
            )
        if config is not None and config.temperature != 1.0:
            raise ValueError(
                "config: expected no temperature in it, as log-probs without a loss would not know "
                f"of it: give it to attach_fused_head, or to Objective; got {config.temperature}"
            )
        self.advantages, self.mask, self.old_logps = advantages, mask, old_logps
        self.head_options = head_options
        self.output: FusedHeadOutput | None = None


@dataclass
class _Attached:
    own_forward: Any  # the model's, bound
    in_instance: bool  # whether it was an attribute of the instance already
    float32: bool
    options: dict[str, Any]
    names: list[str]  # of the own forward's arguments, in order
    forward: Any = None  # the one put in its place


def attach_fused_head(
    model: Any,
    *,
    keyword: str = "fused_head",
    float32: bool = False,
    check: bool = True,
    **options: Any,
) -> None:
    """Gives a causal language model a second way to be called, with `fused_head`.

    `model(input_ids, attention_mask=..., labels=..., fused_head=True)` returns a
    `FusedHeadOutput`: log-probs and entropy of the labels other than -100, as `linear_logprobs`
    makes them. `fused_head=Objective(advantages, ...)` returns the loss of `fused_grpo_loss`, too.
    With `logits_to_keep=T` only the last T labels are scored, and all per-token shapes are
    `[B, T]`. `shift_labels` are labels that have been shifted already. Called in any other way,
    `model.generate` included, the model is as it was.

    The equivalent PyTorch:

        logits = model(input_ids, attention_mask=...).logits[:, :-1].float() / temperature
        logps = logits.log_softmax(-1).gather(-1, labels[:, 1:, None])[..., 0]

    Args:
        model: a causal language model of transformers whose logits are a linear layer of its last
            states (biased, scaled, capped as the config says), or PEFT around one: LoRA, on the
            body and on the head. Not yet wrapped by DDP, FSDP2 or DeepSpeed.
        keyword: the name of the argument that asks for it.
        float32: multiply hidden states and head in float32, outside autocast.
        check: compare with the model's own logits on a few ids, which takes one forward; left out
            where the weights are not here yet (ZeRO-3, the meta device).
        options: `temperature`, `backward`, `tolerance`, `seed`, `backend`, `chunk_bytes` of
            `linear_logprobs`, for all calls; an `Objective` may name its own. `seed` here is a
            `torch.Generator`: an int would draw the same columns in every call.

    Raises:
        TypeError, ValueError: not such a model; PEFT with virtual tokens; logits that are made in
            another way; an unknown option.
    """
    check_options(options, stored=True)
    if is_prompt_learning(model):
        raise ValueError(
            "model: expected adapters inside the layers (LoRA and its kind), or none; got PEFT's "
            f"{model.active_peft_config.peft_type.value}, which puts virtual tokens before the "
            "prompt"
        )
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
    head = head_of(model)
    if check and not is_sharded(head.weight):
        check_logits(model)
    signature = inspect.signature(type(model).forward)
    names = [*signature.parameters][1:]
    attached = _Attached(model.forward, "forward" in vars(model), float32, options, names)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.pop(keyword, False)
        if asked is False:
            return getattr(self, _ATTRIBUTE).own_forward(*args, **kwargs)
        return _fused_forward(self, getattr(self, _ATTRIBUTE), asked, args, kwargs)

    # What generate and the Trainer look at. Not functools.wraps: accelerate takes off what it finds
    # in __wrapped__.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = type(model).forward.__doc__
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
            "model: expected the forward that attach_fused_head put there; it has been wrapped "
            "since: undo that first (accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
        )
    if attached.in_instance:
        model.forward = attached.own_forward
    else:
        del model.forward
    delattr(model, _ATTRIBUTE)


def has_fused_head(model: Any) -> bool:
    return hasattr(unadapted(model), _ATTRIBUTE)


def _fused_forward(
    model: Any, attached: _Attached, asked: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FusedHeadOutput:
    objective = Objective() if asked is True else asked
    if not isinstance(objective, Objective):
        raise TypeError(f"fused_head: expected True or an Objective; got {asked!r}")
    kwargs = dict(zip(attached.names, args, strict=False)) | kwargs
    kwargs.pop("return_dict", None)  # PEFT passes it; there is one form of output
    _check_names(model, attached, kwargs)
    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    targets = _Targets.of(kwargs)
    if kwargs.pop("use_cache", None) or kwargs.get("past_key_values") is not None:
        raise ValueError(
            "past_key_values, use_cache: expected none, as whole sequences are scored; got them "
            "(PEFT's prefix tuning passes them)"
        )
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "input_ids: expected token ids; got inputs_embeds (PEFT's virtual tokens pass them)"
        )
    outputs = model.base_model(use_cache=False, **kwargs)
    head = head_of(model)
    for weight in (head.weight, *(adapter.outer for adapter in head.adapters)):
        register_with_zero3(model, weight)
    device = head.weight.device
    hidden, labels = targets.states_and_labels(outputs.last_hidden_state, device)
    context: Any = nullcontext()
    if attached.float32:
        hidden = hidden.float()
        context = torch.autocast(device.type, enabled=False)
    with context:
        given = head.arguments(hidden) | attached.options | objective.head_options
        out = _scored(whole(head.weight), hidden, labels, given, objective)
    if kwargs.get("output_router_logits"):
        out.aux_loss = _load_balancing_loss(text, outputs, kwargs.get("attention_mask"))
    objective.output = out
    return out


def _check_names(model: Any, attached: _Attached, kwargs: dict[str, Any]) -> None:
    """A model's forward takes any name and ignores what it does not know."""
    body = inspect.signature(type(model.base_model).forward).parameters
    unknown = sorted(kwargs.keys() - {*attached.names, *body} - _COMMON)
    if unknown:
        raise TypeError(
            f"{unknown[0]}: expected an argument of {type(model).__name__}.forward (a loss's own "
            f"are given as fused_head=Objective(...)); got {unknown[0]!r}"
        )


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
    weight: Tensor, hidden: Tensor, labels: Tensor, given: dict[str, Any], objective: Objective
) -> FusedHeadOutput:
    def here(x: Any) -> Any:
        return x.to(weight.device) if isinstance(x, Tensor) else x

    mask = labels != -100
    if objective.mask is not None:
        mask = mask & here(objective.mask).bool()
    if objective.advantages is None:
        scored = linear_logprobs(hidden, weight, labels, mask=mask, entropy=True, **given)
        return FusedHeadOutput(logps=scored.logps, entropy=scored.entropy, mask=mask)
    loss_options = {name: here(x) for name, x in objective.loss_options.items()}
    out = fused_grpo_loss(
        hidden, weight, labels, here(objective.advantages), mask, **given, **loss_options
    )
    return FusedHeadOutput(
        loss=out.loss, logps=out.logps, entropy=out.entropy, mask=mask, metrics=out.metrics
    )


def _load_balancing_loss(config: Any, outputs: Any, attention_mask: Tensor | None) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((x for name in names if (x := getattr(config, name, None)) is not None), None)
    if experts is None:
        raise ValueError(
            f"output_router_logits: expected a config with one of {', '.join(names)}; got "
            f"{type(config).__name__}"
        )
    loss = load_balancing_loss_func(
        outputs.router_logits, experts, config.num_experts_per_tok, attention_mask
    )
    assert isinstance(loss, Tensor)
    return loss

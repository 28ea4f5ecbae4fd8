"""The head of a transformers model: which layer it is, and what the model does to its output.

    logits = softcap(logit_scale * (hidden @ weight.T + inner @ outer.T + bias))

`inner` and `outer` are PEFT's LoRA on the head, where there is one. Families differ in how their
config names the scale and the cap; `check_head` compares with the model's own logits, so that one
that does something else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# What a config may say, and the families that do (model types as of transformers 5.23).
SOFTCAPS = (
    "final_logit_softcapping",  # gemma2, gemma3, gemma3n, gemma4, nanochat, ...
    "logits_soft_cap",  # recurrent_gemma
)
FACTORS = (
    "logit_scale",  # cohere, cohere2
    "output_multiplier",  # muse_glimmer, muse_spark
    "lm_head_multiplier",  # falcon_h1
)
DIVISOR = "logits_scaling"  # granite, granitemoe, granitemoehybrid, ...
FACTOR_BY_DIVISOR_S_NAME = ("hyperclovax",)
UNUSED = {"mpt": "logit_scale"}
# The share of the largest logit by which the check may be off: rounding in bf16, not a scale.
_TOLERANCE = 0.05


class Head(NamedTuple):
    """The last linear layer, and what happens to its output."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None
    logit_scale: float
    adapters: tuple[Adapter, ...] = ()

    def arguments(self, hidden: Tensor) -> dict[str, Any]:
        """What `fused_grpo_loss` and `linear_logprobs` take besides hidden states and weight."""
        low_rank = None
        if self.adapters:
            inner = torch.cat([adapter.inner(hidden) for adapter in self.adapters], -1)
            outer = torch.cat([whole(adapter.outer) for adapter in self.adapters], 1)
            low_rank = (inner, outer)
        return {
            "bias": whole(self.bias), "softcap": self.softcap, "logit_scale": self.logit_scale,
            "low_rank": low_rank,
        }  # fmt: skip


class Adapter(NamedTuple):
    """A LoRA: `scaling * outer @ down(dropout(hidden))` is added to the layer's output."""

    down: nn.Module  # [H] -> [r]
    outer: Tensor  # [V, r]
    scaling: float
    dropout: nn.Module

    def inner(self, hidden: Tensor) -> Tensor:
        dtype = next(self.down.parameters()).dtype
        return self.scaling * self.down(self.dropout(hidden.to(dtype)))


def unadapted(model: Any) -> Any:
    """The transformers model inside a PEFT one, whose layers have the adapters in them."""
    if is_prompt_learning(model):
        raise ValueError(
            "model: expected adapters inside the layers (LoRA and its kind), or none; got PEFT's "
            f"{model.active_peft_config.peft_type.value}, which puts virtual tokens before the "
            "prompt"
        )
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_prompt_learning(model: Any) -> bool:
    config = getattr(model, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


def head_of(model: Any) -> Head:
    """The head of a model of transformers, or of PEFT around one, as it is at this moment.

    Raises:
        ValueError: it has none that is a linear layer, or an adapter on it of another kind.
    """
    model = unadapted(model)
    config = model.config.get_text_config()
    layer, adapters = _without_adapters(model.get_output_embeddings())
    if not isinstance(layer, nn.Linear) or not layer.weight.is_floating_point():
        raise ValueError(
            "model: expected an output layer that is a torch.nn.Linear of floating-point weights; "
            f"got {type(layer).__name__}"
        )
    softcaps = (getattr(config, name, None) for name in SOFTCAPS)
    softcap = next((cap for cap in softcaps if cap is not None), None)
    return Head(layer.weight, layer.bias, softcap, _logit_scale(config), adapters)


def _logit_scale(config: Any) -> float:
    kind = config.model_type
    for name in FACTORS:
        value = getattr(config, name, None)
        if value is not None and UNUSED.get(kind) != name:
            return float(value)
    divisor = float(getattr(config, DIVISOR, None) or 1.0)
    return divisor if kind.startswith(FACTOR_BY_DIVISOR_S_NAME) else 1.0 / divisor


def _without_adapters(layer: Any) -> tuple[Any, tuple[Adapter, ...]]:
    """The layer that PEFT has wrapped, or a copy that it trains, and the adapters in force."""
    if hasattr(layer, "modules_to_save"):
        off = layer.disable_adapters or not layer.active_adapters
        active = layer.original_module if off else layer.modules_to_save[layer.active_adapters[0]]
        return active, ()
    if not hasattr(layer, "base_layer"):
        return layer, ()
    if layer.disable_adapters:
        if layer.merged:
            layer.unmerge()
        return layer.base_layer, ()
    if layer.merged:
        return layer.base_layer, ()
    names = [name for name in layer.active_adapters if name in getattr(layer, "lora_A", {})]
    plain = hasattr(layer, "lora_A") and not any(
        name in getattr(layer, "lora_variant", {}) or getattr(layer, "lora_bias", {}).get(name)
        for name in names
    )
    if not plain or not isinstance(layer.base_layer, nn.Linear):
        raise ValueError(
            "model: expected LoRA without variants (DoRA and the like) and without a bias, or no "
            f"adapter, on the output layer; got {type(layer).__module__}.{type(layer).__name__}"
        )
    return layer.base_layer, tuple(
        Adapter(
            layer.lora_A[name], layer.lora_B[name].weight, layer.scaling[name],
            layer.lora_dropout[name],
        )
        for name in names
    )  # fmt: skip


@torch.no_grad()
def check_head(model: Any, ids: Tensor | None = None) -> None:
    """Compares the head, as the loss will use it, with the model's own logits.

    Args:
        model: whole: not yet sharded.
        ids: `[1, T]`, of a prompt; None is a few ids from the middle of the vocabulary.

    Raises:
        ValueError: the model does something to its logits that is not known here.
    """
    model, head = unadapted(model), head_of(model)
    V = head.weight.shape[0]
    if ids is None:
        ids = torch.arange(8).mul(V // 97 + 1).add(V // 3).remainder(V)[None]
    ids = ids.to(model.get_input_embeddings().weight.device)
    with evaluating(model):
        logits = model(input_ids=ids, use_cache=False).logits.double()
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        states = states.to(head.weight.device, head.weight.dtype)
        given = head.arguments(states)
        mine = nn.functional.linear(states, head.weight, head.bias).double()
        if given["low_rank"] is not None:
            inner, outer = given["low_rank"]
            mine += nn.functional.linear(inner, outer).double()
    mine *= head.logit_scale
    if head.softcap is not None:
        mine = head.softcap * torch.tanh(mine / head.softcap)
    worst = float((mine - logits).abs().max() / logits.abs().max().clamp(min=1e-6))
    if not worst < _TOLERANCE:
        raise ValueError(
            f"model: expected logits that are a linear layer of the last states, scaled and capped "
            f"as its config says; those of {type(model).__name__} are off by {worst:.1%}"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No module in training mode, in which layers that are checkpointed take no cache."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def register_with_zero3(module: nn.Module, weight: Tensor) -> None:
    """ZeRO-3 gathers a module's own parameters around its forward; the head is used outside."""
    if hasattr(weight, "ds_id"):
        import deepspeed

        deepspeed.zero.register_external_parameter(module, weight)


def whole(parameter: Any) -> Any:
    """FSDP2 shows a parameter of a part that it has not gathered as the shard that is here.

    Its gradient is the mean over the ranks, as FSDP2 makes it for those that it gathers itself.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial

    placements = [Partial("avg")] * parameter.device_mesh.ndim
    return parameter.full_tensor(grad_placements=placements)

"""The head of a transformers model: which layer it is, and what the model does to its output.

    logits = softcap(logit_scale * (hidden @ weight.T + inner @ outer.T + bias))

`inner` and `outer` are PEFT's LoRA on the head, where there is one. Families differ in how their
config names the scale and the cap; `check_logits` compares with the model's own logits, so that one
that does something else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..reference import linear_logits

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
# How log-probs are computed, which the caller of a trainer may want to say.
OPTIONS = ("temperature", "backward", "tolerance", "seed", "backend", "chunk_bytes")
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
        weight = next(self.down.parameters())
        hidden = self.dropout(hidden.to(weight.dtype))
        if hasattr(weight, "full_tensor"):
            return self.scaling * nn.functional.linear(hidden, whole(weight))
        # Called, for the sake of those who gather a module's weights around its forward.
        return self.scaling * self.down(hidden)


def unadapted(model: Any) -> Any:
    """The transformers model inside a PEFT one, whose layers have the adapters in them."""
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
        name in getattr(layer, "lora_variant", {})  # from PEFT 0.16 on
        or getattr(layer, "use_dora", {}).get(name)
        or getattr(layer, "lora_bias", {}).get(name)
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
def check_logits(model: Any, ids: Tensor | None = None) -> None:
    """Compares the head, as the loss will use it, with the model's own logits.

    Args:
        model: whole: not yet sharded.
        ids: `[1, T]`, of a prompt; None is a few ids from the middle of the vocabulary.

    Raises:
        ValueError: the model does something to its logits that is not known here.
    """
    model, head = unadapted(model), head_of(model)
    device, V = head.weight.device, head.weight.shape[0]
    if ids is None:
        ids = torch.arange(8).mul(V // 97 + 1).add(V // 3).remainder(V)[None]
    ids = ids.to(model.get_input_embeddings().weight.device)
    with evaluating(model):
        logits = model(input_ids=ids, use_cache=False).logits.to(device).double()
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        states = states.to(device, head.weight.dtype)
        mine = linear_logits(states, head.weight, **head.arguments(states)).double()
    worst = float((mine - logits).abs().max() / logits.abs().max().clamp(min=1e-6))
    if not worst < _TOLERANCE:
        raise ValueError(
            f"model: expected logits that are a linear layer of the last states, scaled and capped "
            f"as its config says; those of {type(model).__name__} are off by {worst:.1%}"
        )


def is_sharded(weight: Tensor) -> bool:
    """Whether it is elsewhere: with other ranks, or nowhere yet."""
    return hasattr(weight, "ds_id") or hasattr(weight, "full_tensor") or weight.is_meta


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


def corrected(advantages: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Advantages with a sampler's correction, `[B, T]`, in them.

    Every surrogate that is multiplied by one is linear in the advantage, but for its sign, and the
    correction is >= 0.

    Args:
        advantages: `[B]` or `[B, T]`.
        weights: `[B]`, `[B, 1]` or `[B, T]`.
        mask: `[B, T]`, whose shape it takes.
    """
    advantages, weights = (x[:, None] if x.ndim == 1 else x for x in (advantages, weights))
    return (advantages * weights).expand(mask.shape)


def check_options(options: dict[str, Any], *, stored: bool = False) -> None:
    """Of a head; `stored` ones are for more than one call."""
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        raise TypeError(f"{unknown[0]}: expected one of {', '.join(OPTIONS)}; got {unknown[0]!r}")
    if stored and isinstance(options.get("seed"), int):
        raise ValueError(
            "seed: expected a torch.Generator, or None for torch's own, as an int would draw the "
            f"same columns in every call; got {options['seed']}"
        )

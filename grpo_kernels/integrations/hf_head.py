"""Finds the LM head of a Hugging Face model, and its scale and softcap.

    logits = softcap(logit_scale * (hidden @ weight.T + lora_a_out @ lora_b.T + bias))

`lora_a_out` and `lora_b` come from PEFT's LoRA on the head, if there is one. Model families name
the scale and the softcap differently in their configs; `check_logits` compares the result with the
model's own logits, so that a model that does something else is refused. transformers is not
imported: a model is known by its attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.checks import is_dense
from ..head.lm_head import LMHead
from ..reference import linear_logits
from .private import hooks_of, is_unit_within, variants_of_lora

# Config fields with a softcap, and the model types that have them (as of transformers 5.24).
SOFTCAP_FIELDS = (
    "final_logit_softcapping",  # gemma2, gemma3, gemma3n, gemma4, nanochat, ...
    "logits_soft_cap",  # recurrent_gemma
    "output_logit_soft_cap",  # xlstm
)
# Config fields that logits are multiplied by.
SCALE_FIELDS = (
    "logit_scale",  # cohere, cohere2
    "output_multiplier",  # muse_glimmer, muse_spark
    "lm_head_multiplier",  # falcon_h1
)
# The config field that logits are divided by: granite, granitemoe, granitemoehybrid, ...
SCALING_FIELD = "logits_scaling"
# Model types that multiply logits by SCALING_FIELD.
SCALING_IS_A_FACTOR = ("hyperclovax",)
# Config fields that a model type has but does not use.
UNUSED_FIELDS = {"mpt": "logit_scale"}
# `check_logits` allows this share of the largest logit, or a few roundings in half precision.
_CHECK_TOLERANCE = 1e-3
# The largest logit of its comparison: a softcap hardly changes logits far below the cap.
_LARGE_LOGIT = 100.0
# Modules of these packages may wrap the head: their hooks and forwards only gather, move or cast.
_KNOWN_HOOKS = ("torch.distributed.", "deepspeed.", "accelerate.", "transformers.", "trl.")


class Head(NamedTuple):
    """The LM head: its linear layer, and the scale and softcap of that layer's output."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None
    logit_scale: float
    adapters: tuple[Adapter, ...] = ()

    def at(
        self,
        hidden: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        logits_dtype: str = "fp32",
    ) -> LMHead:
        """Returns the `LMHead` for `hidden [..., H]`, with weights gathered from all ranks."""
        low_rank = None
        if self.adapters:
            a_out = torch.cat([adapter.lora_a_out(hidden) for adapter in self.adapters], -1)
            lora_b = torch.cat([full_tensor(adapter.lora_b.weight) for adapter in self.adapters], 1)
            low_rank = (a_out, lora_b)
        return LMHead(
            full_tensor(self.weight),
            full_tensor(self.bias),
            low_rank,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            temperature=temperature,
            logits_dtype=logits_dtype,
        )


class Adapter(NamedTuple):
    """A LoRA, which adds `scaling * lora_b(lora_a(dropout(hidden)))` to the logits."""

    lora_a: nn.Module  # [..., H] -> [..., r]
    lora_b: nn.Linear  # [..., r] -> [..., V]
    scaling: float
    dropout: nn.Module

    @property
    def not_called(self) -> tuple[nn.Module, ...]:
        """The modules that PEFT calls; here only their weight is used."""
        is_sharded = hasattr(next(self.lora_a.parameters()), "full_tensor")
        return (self.lora_a, self.lora_b) if is_sharded else (self.lora_b,)

    def lora_a_out(self, hidden: Tensor) -> Tensor:
        """Returns `scaling * lora_a(dropout(hidden))`, `[..., r]`."""
        weight = next(self.lora_a.parameters())
        hidden = self.dropout(hidden.to(weight.dtype))
        if hasattr(weight, "full_tensor"):
            return self.scaling * nn.functional.linear(hidden, full_tensor(weight))
        # Calls the module: ZeRO-3 gathers its weight in a hook around the call.
        return self.scaling * self.lora_a(hidden)


def base_model(model: Any) -> Any:
    """Returns the transformers model inside a PEFT model; its layers hold the adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def body_of(model: Any) -> Any:
    """Returns the module inside a transformers model that makes the last hidden states.

    Raises:
        ValueError: the model computes them in its own forward.
    """
    # Some (Llama4ForCausalLM, MllamaForCausalLM) have it under another name than they say.
    body = model.base_model if model.base_model is not model else getattr(model, "model", None)
    if not isinstance(body, nn.Module):
        raise ValueError(
            "model: expected a causal language model whose layers are in one module (model.model), "
            f"such as LlamaForCausalLM; got {type(model).__name__}"
        )
    return body


def is_prompt_learning(model: Any) -> bool:
    """Returns True for a PEFT model that puts virtual tokens before the prompt."""
    config = getattr(model, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


def head_of(model: Any) -> Head:
    """Returns the current head of a transformers or PEFT model.

    Raises:
        ValueError: the output layer is not a linear layer with floating-point weights, or has an
            adapter that is not plain LoRA, or a hook or forward that would not run.
    """
    model = base_model(model)
    config = model.config.get_text_config()
    outer = model.get_output_embeddings()
    layer, adapters = _split_adapters(outer)
    weight = _weight_of(layer)
    for part in (outer, layer, *(part for adapter in adapters for part in adapter.not_called)):
        _check_forward(part)
    softcaps = (getattr(config, name, None) for name in SOFTCAP_FIELDS)
    softcap = next((cap for cap in softcaps if cap is not None), None)
    return Head(weight, layer.bias, softcap, _logit_scale(config), adapters)


def _weight_of(layer: Any) -> Tensor:
    kind, weight = type(layer).__name__, layer.weight if isinstance(layer, nn.Linear) else None
    if weight is not None and weight.is_floating_point() and is_dense(weight):
        return weight
    if weight is not None:
        kind += f" with a {type(weight).__name__}: exclude the output layer from quantisation"
    raise ValueError(
        "model: expected an output layer that is a torch.nn.Linear with floating-point weights; "
        f"got {kind}"
    )


def _check_forward(layer: nn.Module) -> None:
    """Raises ValueError for hooks or a forward on a layer whose weight is used without a call."""
    hooks = hooks_of(layer)
    if "forward" in vars(layer):
        hooks.append(vars(layer)["forward"])
    for function in hooks:
        function = getattr(function, "func", function)  # of a partial
        module, name = (str(getattr(function, x, "")) for x in ("__module__", "__qualname__"))
        if not module.startswith(_KNOWN_HOOKS):
            hint = "move it to the model's body"
            if "_adapter_names" in name:
                hint = "leave out PEFT's adapter_names"
            raise ValueError(
                f"model: {module}.{name} on the output layer does not work with a fused head, "
                f"which never calls that layer: {hint}"
            )


def check_is_loaded(weight: Tensor) -> None:
    """Checks that a weight is in memory.

    Raises:
        ValueError: the weight is on the meta device.
    """
    if weight.is_meta:
        raise ValueError(
            "model: expected the output layer's weight in memory; got it on the meta device: do "
            "not offload the output layer (accelerate's cpu_offload, device_map)"
        )


def _logit_scale(config: Any) -> float:
    model_type = config.model_type
    for name in SCALE_FIELDS:
        value = getattr(config, name, None)
        if value is not None and UNUSED_FIELDS.get(model_type) != name:
            return float(value)
    scaling = float(getattr(config, SCALING_FIELD, None) or 1.0)
    return scaling if model_type.startswith(SCALING_IS_A_FACTOR) else 1.0 / scaling


def _split_adapters(layer: Any) -> tuple[Any, tuple[Adapter, ...]]:
    """Splits PEFT's wrapper into the layer in use and its active adapters."""
    if hasattr(layer, "modules_to_save"):  # PEFT trains a copy of the layer
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
    # AdaLoRA's are parameters.
    plain = isinstance(getattr(layer, "lora_A", None), nn.ModuleDict)
    plain = plain and not any(beyond_lora(layer, name) for name in names)
    if not plain or not isinstance(layer.base_layer, nn.Linear):
        raise ValueError(
            "model: expected no adapter on the output layer, or plain LoRA (no bias, no variant "
            f"such as DoRA); got {type(layer).__module__}.{type(layer).__name__}"
        )
    adapters = (
        Adapter(
            lora_a=layer.lora_A[name],
            lora_b=layer.lora_B[name],
            scaling=layer.scaling[name],
            dropout=layer.lora_dropout[name],
        )
        for name in names
    )
    return layer.base_layer, tuple(adapters)


def beyond_lora(layer: Any, adapter: str) -> str | None:
    """Names a part of a layer's adapter that plain LoRA does not have; None: no such part."""
    if not hasattr(layer, "lora_A"):
        return None
    variant = variants_of_lora(layer).get(adapter)
    if variant:
        return "use_dora" if variant is True else type(variant).__name__
    biased = adapter in layer.lora_B and getattr(layer.lora_B[adapter], "bias", None) is not None
    return "lora_bias" if biased else None


@torch.no_grad()
def check_logits(model: Any, ids: Tensor | None = None) -> None:
    """Compares the logits of `head_of` with the model's, as they are and enlarged.

    Args:
        model: a transformers or PEFT model whose weights are not sharded.
        ids: `[1, T]`, token ids of a prompt; None takes a few from the middle of the vocabulary.

    Raises:
        ValueError: the logits differ, because the model does something unknown to them; or its head
            is offloaded.
    """
    model, head = base_model(model), head_of(model)
    check_is_loaded(head.weight)
    V = head.weight.shape[0]
    if ids is None:
        ids = torch.arange(8, device="cpu").mul(V // 97 + 1).add(V // 3).remainder(V)[None]
    ids = ids.to(model.get_input_embeddings().weight.device)
    with evaluating(model):
        largest = _compare_logits(model, head, ids, scale=1.0)
        if largest < _LARGE_LOGIT:
            # Multiplying by a power of 2 rounds nothing.
            power = min(max(math.ceil(math.log2(_LARGE_LOGIT / largest)), 0), 10)
            _compare_logits(model, head, ids, scale=2.0**power)


def _compare_logits(model: Any, head: Head, ids: Tensor, scale: float) -> float:
    """Compares logits of states `scale` times as large; returns the model's largest logit."""
    inputs = {"input_ids": ids, "use_cache": False}
    hidden = body_of(model)(**inputs).last_hidden_state
    with _scaled_input(model.get_output_embeddings(), scale) as output_dtypes:
        expected = model(**inputs).logits
    # Under autocast the layer's output has another dtype than the model's.
    dtypes = {hidden.dtype, head.weight.dtype, expected.dtype, *output_dtypes}
    tolerance = max(3 * torch.finfo(x).eps for x in dtypes)
    largest, error = max(float(expected.abs().max()), 1e-6), math.inf
    if (expected.shape[-1], hidden.shape[-1]) == head.weight.shape:
        scaled = scale * hidden.to(head.weight.device, head.weight.dtype)
        logits = linear_logits(scaled, head.at(scaled))
        difference = logits.double() - expected.to(logits.device).double()
        error = float(difference.abs().max()) / largest
    if not error < max(tolerance, _CHECK_TOLERANCE):
        raise ValueError(
            "model: expected logits that are a linear layer of the last hidden states, scaled and "
            f"capped as the config says; those of {type(model).__name__} differ by {error:.1%} of "
            f"the largest, {largest:.3g}: such a model is not supported"
        )
    return largest


@contextmanager
def _scaled_input(layer: nn.Module, scale: float) -> Iterator[set[torch.dtype]]:
    """Multiplies the layer's input by `scale`; yields the dtypes of its outputs."""
    output_dtypes: set[torch.dtype] = set()
    hooks = (
        layer.register_forward_pre_hook(lambda _, args: (scale * args[0], *args[1:])),
        layer.register_forward_hook(lambda _, __, out: output_dtypes.add(out.dtype)),
    )
    try:
        yield output_dtypes
    finally:
        for hook in hooks:
            hook.remove()


def is_sharded(weight: Tensor) -> bool:
    """Returns True if the values are spread over ranks (ZeRO-3, FSDP2) or not loaded (meta)."""
    return hasattr(weight, "ds_id") or hasattr(weight, "full_tensor") or weight.is_meta


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module in eval mode within a `with` block, then restores each module's mode.

    In training mode, layers with gradient checkpointing take no key-value cache.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def register_with_zero3(module: nn.Module, weight: Tensor) -> None:
    """Makes ZeRO-3 gather `weight`, which `module` does not own, around the module's forward."""
    if hasattr(weight, "ds_id"):
        import deepspeed

        deepspeed.zero.register_external_parameter(module, weight)


def gather_head(model: Any) -> None:
    """Makes FSDP2 gather an output layer that is a separate unit, for a call that does not run it.

    The end of the backward reduces its gradient and shards it again. Without a backward,
    `reshard_head` does.
    """
    layer = base_model(model).get_output_embeddings()
    # FSDP2 calls nothing at the end of a backward for a head outside of any unit.
    if hasattr(layer, "unshard") and is_unit_within(layer):
        layer.unshard()


def head_snapshot(model: Any, head: LMHead) -> LMHead:
    """A snapshot of a call's head, with copies of tensors that may change in place.

    An optimizer changes trained weights (torch's fused ones without a new version), PEFT a frozen
    weight when it unmerges adapters. FSDP2 and ZeRO-3 free gathered weights.
    """
    inner = base_model(model)
    layer = inner.get_output_embeddings()
    changes = getattr(layer, "merged", False) or any(hasattr(x, "unshard") for x in (inner, layer))

    def constant(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        copies = changes or x.requires_grad or hasattr(x, "ds_id")
        return x.detach().clone() if copies else x.detach()

    low_rank = None  # of tensors that `Head.at` has made
    if head.low_rank is not None:
        low_rank = (head.low_rank[0].detach(), head.low_rank[1].detach())
    return head.replace(weight=constant(head.weight), bias=constant(head.bias), low_rank=low_rank)


def reshard_head(model: Any) -> None:
    """Shards the head after `gather_head`, if no backward follows the forward."""
    layer = base_model(model).get_output_embeddings()
    if hasattr(layer, "reshard") and not torch.is_grad_enabled():
        layer.reshard()


def full_tensor(parameter: Any) -> Any:
    """Returns a DTensor gathered from all ranks, any other value as it is.

    For a head that is sharded outside of any wrapped module, for which `gather_head` does nothing.
    The gradient is averaged over ranks, as in FSDP2.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial

    placements = [Partial("avg")] * parameter.device_mesh.ndim
    return parameter.full_tensor(grad_placements=placements)

"""Weights of a policy for vLLM: the sender, and `WorkerExtension`, the receiver inside vLLM.

It depends on vLLM's `worker_extension_cls`, `collective_rpc` and
`reload_weights(weights_iterator=)`, unchanged since 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from .hf_head import base_model, beyond_lora, is_prompt_learning, is_sharded
from .private import checkpoint_weights


class WorkerExtension:
    """Methods that vLLM adds to its worker, which must not have their names."""

    def grpo_kernels_about(self) -> dict[str, Any]:
        """Returns facts about the engine for the trainer."""
        import vllm

        config = self.model_config  # type: ignore[attr-defined]
        text = config.hf_config.get_text_config()
        return {
            "vllm": vllm.__version__,
            "dtype": str(config.dtype).removeprefix("torch."),
            "logprobs_mode": str(config.logprobs_mode).rsplit(".")[-1].lower(),
            "sampling_mask": getattr(config, "return_sampling_mask", False),
            **{name: getattr(text, name) for name in SHAPE},
        }  # fmt: skip

    def grpo_kernels_load(self, weights: Iterable[tuple[str, Tensor]], count: int) -> None:
        """Replaces the model's weights by `count` weights, named as in a checkpoint.

        Raises:
            RuntimeError: another number came, or an earlier load failed.
        """
        failed = getattr(self, "grpo_kernels_failed", "")
        if failed:
            # vLLM still has some weights of the failed load.
            raise RuntimeError(f"weights failed to load before ({failed}): start vLLM again")
        seen = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal seen
            for row in weights:
                seen += 1
                yield row

        try:
            self.reload_weights(weights_iterator=counted())  # type: ignore[attr-defined]
        except BaseException as error:
            self.grpo_kernels_failed = str(error) or type(error).__name__
            raise
        repack(self.model_runner.get_model())  # type: ignore[attr-defined]
        if seen != count:
            raise RuntimeError(f"weights: expected {count} tensors; got {seen}")


# Fields of a model's config that must be equal in engine and policy.
SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


def repack(model: Any) -> int:
    """Renews the packed copies of weights that vLLM multiplies by on a CPU; returns their number.

    `reload_weights` renews the copies of weights that are sent by name, which a tied head's is not:
    without this its logits would silently stay the initial model's (vLLM up to 0.32; on a GPU there
    is no copy).
    """
    layers = [
        layer for layer in model.modules()
        if hasattr(layer, "cpu_linear") and getattr(layer, "weight", None) is not None
        and layer.weight.numel()
    ]  # fmt: skip
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    return len(layers)


_PLAIN = "model: expected plain LoRA, which can be merged into the weights that vLLM gets"


def check_can_be_sent(model: Any) -> None:
    """Checks that a model's weights can be sent to vLLM.

    Raises:
        ValueError: a sharded weight, an adapter that cannot be merged into a weight, an adapter on
            a tied head or embedding, which vLLM has as one weight, or a model whose weights
            transformers cannot convert to a checkpoint's.
    """
    sharded = next((name for name, p in model.named_parameters() if is_sharded(p)), None)
    if sharded is not None:
        raise ValueError(
            f"model: expected unsharded weights; {sharded} is sharded: use TRL's trainer, which "
            "gathers weights and sends them to vLLM"
        )
    if hasattr(model, "peft_config"):
        _check_adapters(model)
    try:
        names_of(model)
    except Exception as error:  # of any of transformers' conversions
        raise ValueError(
            f"model: {type(base_model(model)).__name__} does not work with vLLM here, as "
            f"transformers does not turn its weights into those of a checkpoint ({error}): use "
            "another rollout"
        ) from error


def _check_adapters(model: Any) -> None:
    """Checks that the adapters of a PEFT model can be merged into its weights."""
    if is_prompt_learning(model):
        raise ValueError(f"{_PLAIN}; got {model.active_peft_config.peft_type.value}")
    for name, layer in model.named_modules():
        inner = dict(layer.named_children())
        if "base_layer" in inner and (kind := _beyond_merging(layer)) is not None:
            raise ValueError(f"{_PLAIN}; got {kind} in {name}")
    base = base_model(model)
    if not base.config.get_text_config().tie_word_embeddings:
        return
    layers = base.get_input_embeddings(), base.get_output_embeddings()
    adapted = [hasattr(x, "base_layer") or hasattr(x, "modules_to_save") for x in layers]
    tied = (getattr(x, "ensure_weight_tying", False) for x in model.peft_config.values())
    if any(adapted) and not (all(adapted) and all(tied)):
        raise ValueError(
            "model: expected no adapter on a tied output layer or embedding, as vLLM has one "
            f"weight for both; got one on the {'embedding' if adapted[0] else 'output layer'}: "
            "leave it out of lora_target, or tie both with PEFT's ensure_weight_tying=True"
        )


def _beyond_merging(layer: Any) -> str | None:
    """Names a part of an adapted layer that cannot be merged into its weight; None without one."""
    weight = getattr(layer.base_layer, "weight", None)
    merges = hasattr(layer, "scaling") and hasattr(layer, "get_delta_weight")
    if weight is None or not merges:
        return f"{type(layer).__module__}.{type(layer).__name__}"
    if not weight.is_floating_point():
        return f"a weight in {weight.dtype}"
    kinds = (beyond_lora(layer, a) for a in layer.active_adapters if a in layer.scaling)
    return next(filter(None, kinds), None)


def names_and_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights as `save_pretrained` writes them, a layer at a time; a tied weight comes once.

    LoRA is merged into a copy, `W + B A * scaling` in the dtype of W.

    Raises:
        ValueError: as in `check_can_be_sent`.
    """
    check_can_be_sent(model)
    tensors, base = _tensors(model), base_model(model)
    layers: dict[str, Any] = dict(model.named_modules()) if hasattr(model, "peft_config") else {}
    for names in _layers_of(tensors, base):
        merged = {name: _merged(*tensors[name], layers) for name in names}
        yield from checkpoint_weights(base, merged).items()


def names_of(model: Any) -> list[str]:
    """The names that `names_and_weights` yields."""
    return [*_checkpoint_shapes(_tensors(model), base_model(model))]


def _tensors(model: Any) -> dict[str, tuple[str, Tensor]]:
    """Parameters and buffers to send, with their names, by their names without adapters."""
    is_peft = hasattr(model, "peft_config")
    adapters = (f".{model.prefix}", ".original_module.", ".ranknum.") if is_peft else ()
    first: dict[int, tuple[str, Tensor]] = {}  # a tied weight is one object
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor) and not any(part in name for part in adapters):
            first.setdefault(id(x), (name, x))
    return {_plain(row[0]) if is_peft else row[0]: row for row in first.values()}


def _layers_of(tensors: dict[str, tuple[str, Tensor]], base: Any) -> list[list[str]]:
    """The names by layer, or all in one list if a checkpoint joins tensors of several layers."""
    layers: dict[str, list[str]] = {}
    for name in tensors:
        layers.setdefault("".join(re.findall(r"^.*?\.\d+\.", name)), []).append(name)
    by_layer: dict[str, Any] = {}
    for names in layers.values():
        by_layer |= _checkpoint_shapes({name: tensors[name] for name in names}, base)
    alike = by_layer == _checkpoint_shapes(tensors, base)
    return [*layers.values()] if alike else [[*tensors]]


def _checkpoint_shapes(tensors: dict[str, tuple[str, Tensor]], base: Any) -> dict[str, Any]:
    """The shapes of these tensors in a checkpoint, by name."""
    empty = {name: x.detach().to("meta") for name, (_, x) in tensors.items()}
    return {name: x.shape for name, x in checkpoint_weights(base, empty).items()}


def _merged(name: str, tensor: Tensor, layers: dict[str, Any]) -> Tensor:
    """A tensor of the model with the active adapters of its layer added."""
    layer: Any = layers.get(name.removesuffix(".base_layer.weight"))
    adapters = [] if layer is None else [a for a in layer.active_adapters if a in layer.scaling]
    weight = tensor.detach()
    for adapter in adapters:
        weight = weight + layer.get_delta_weight(adapter).to(weight)
    return weight


def _plain(name: str) -> str:
    """A tensor's name in the model without adapters, from its name in a PEFT model."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)

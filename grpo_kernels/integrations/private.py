"""Private parts of torch and other packages, and the error of a version without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..base.checks import version_numbers

# The tested versions, as in docs/testing.md.
TESTED_VERSIONS = {
    "torch": "2.10 to 2.15",
    "transformers": "5.0 to 5.24",
    "peft": "0.15 to 0.21",
    "trl": "1.15 to 1.16",
}


def forget_forward(wrapped: Any) -> None:
    """Makes DDP expect no backward of a forward without one, or of an interrupted forward."""
    _private(wrapped, "reducer._reset_state")()


def is_unit_within(layer: Any) -> bool:
    """Returns True if FSDP2 shards the layer as a unit within another; False before a forward."""
    return _private(_private(layer, "_get_fsdp_state")(), "_is_root") is False


def hooks_of(layer: nn.Module) -> list[Any]:
    """The hooks that run with the layer's forward and with its backward."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [hook for kind in kinds for hook in _private(layer, kind).values()]


@contextmanager
def without_memory() -> Iterator[None]:
    """A block in which tensors have no memory and behave like CPU tensors."""
    with _private(torch, "_subclasses.fake_tensor.FakeTensorMode")(), _GroupedProducts():
        yield


class _GroupedProducts(TorchFunctionMode):
    """Experts' products by one product with the same shape, memory and FLOPs.

    Without memory torch supports them in bf16 only, and does not count their FLOPs.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "grouped_mm" not in str(func):
            return func(*args, **(kwargs or {}))
        states, weights = args[:2]  # [N, H], sorted by expert, and [experts, H, M]
        with torch.autocast("cpu", enabled=False):  # as there
            return states @ weights[0]


def is_recurrent(model: Any) -> bool:
    """True for a transformers model that declares a recurrent state."""
    return bool(_private(model, "_is_stateful", "transformers"))


def logits_processors(model: Any, config: Any, input_ids: torch.Tensor) -> list[Any]:
    """The processors that transformers' `generate` makes of a `GenerationConfig`."""
    processors = _private(model, "_get_logits_processor", "transformers")
    shape = {"input_ids_seq_length": input_ids.shape[1], "encoder_input_ids": input_ids}
    return [*processors(config, device=input_ids.device, **shape)]


def checkpoint_weights(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a transformers model, named and split as in its checkpoint."""
    loading = import_module("transformers.core_model_loading")
    return dict(_private(loading, "revert_weight_conversion", "transformers")(model, tensors))


def variants_of_lora(layer: Any) -> Any:
    """The variant of LoRA of each PEFT adapter on a layer: none, True for DoRA, or an object."""
    has_variants = version_numbers(import_module("peft").__version__) >= (0, 16)
    return _private(layer, "lora_variant" if has_variants else "use_dora", "peft")


def trl_part(owner: Any, name: str) -> Any:
    """A private attribute of TRL's class or module."""
    return _private(owner, name, "trl")


def _private(owner: Any, name: str, package: str = "torch") -> Any:
    try:
        return attrgetter(name)(owner)
    except AttributeError as error:
        of = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"{package}: expected {TESTED_VERSIONS[package]}, which have {of}.{name}; got "
            f"{import_module(package).__version__}"
        ) from error

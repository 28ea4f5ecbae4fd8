"""Weights of a policy for vLLM: what is sent, and `WorkerExtension`, which takes it inside vLLM.

A server loads the extension by name, and answers for it on its development endpoints:

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL
        --logprobs-mode processed_logprobs
        --worker-extension-cls grpo_kernels.integrations.vllm.WorkerExtension

Used of vLLM: `worker_extension_cls`, `collective_rpc`, `reload_weights(weights_iterator=)`, whose
arguments have been the same since 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..hf_head import beyond_lora

# What the two sides say to each other; they may be of different versions.
PROTOCOL = 1


class WorkerExtension:
    """Methods that vLLM adds to its worker; each name has to be none of the worker's own."""

    def grpo_kernels_about(self) -> dict[str, Any]:
        """The facts of the engine that a client needs, and the tag of the weights it was sent."""
        import vllm

        config = self.model_config  # type: ignore[attr-defined]
        text = config.hf_config.get_text_config()
        return {
            "protocol": PROTOCOL, "vllm": vllm.__version__,
            "dtype": str(config.dtype).removeprefix("torch."),
            "max_model_len": config.max_model_len,
            "logprobs_mode": str(config.logprobs_mode).rsplit(".")[-1].lower(),
            "sampling_mask": getattr(config, "return_sampling_mask", False),
            "sent": getattr(self, "grpo_kernels_sent", ""),
            **{name: getattr(text, name) for name in SHAPE},
        }  # fmt: skip

    def grpo_kernels_load(
        self, weights: str | Iterable[tuple[str, Tensor]], count: str, tag: str
    ) -> dict[str, Any]:
        """Replaces the model's weights.

        Args:
            weights: names and tensors as a checkpoint has them, or a folder of safetensors files.
            count: how many there are, in digits.
            tag: what `grpo_kernels_about` is to answer as `sent`.

        Raises:
            RuntimeError: as many did not come, or vLLM did not take some before.
        """
        failed = getattr(self, "grpo_kernels_failed", "")
        if failed:
            # What it had of those weights is still between its own and the next ones.
            raise RuntimeError(f"weights failed to load before ({failed}): start vLLM again")
        if isinstance(weights, str) and not Path(weights).is_dir():
            raise RuntimeError(
                f"vllm_sync_dir: expected one that trainer and server share; {weights} is not here"
            )
        seen, rows = 0, read(weights) if isinstance(weights, str) else weights

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal seen
            for row in rows:
                seen += 1
                yield row

        self.grpo_kernels_sent = ""
        runner = self.model_runner  # type: ignore[attr-defined]
        try:
            self.reload_weights(weights_iterator=counted())  # type: ignore[attr-defined]
        except BaseException as error:
            self.grpo_kernels_failed = str(error) or type(error).__name__
            raise
        repacked = repack(runner.get_model())
        if seen != int(count):
            raise RuntimeError(f"weights: expected {count} tensors; got {seen}")
        self.grpo_kernels_sent = tag
        return {"loaded": seen, "repacked": repacked}


# Names of a model's config that engine and policy must have in common.
SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


def repack(model: Any) -> int:
    """Renews the copies of weights that vLLM multiplies by on a CPU; returns how many.

    There a layer multiplies by a packed copy of its weight. `reload_weights` renews those of layers
    whose weight comes by name, which a tied head's does not: without this its logits would be
    those of the weights it was loaded with, and nothing would say so (vLLM 0.28 to 0.32; on a GPU
    there is no copy).
    """
    layers = [
        layer for layer in model.modules()
        if hasattr(layer, "cpu_linear") and getattr(layer, "weight", None) is not None
        and layer.weight.numel()
    ]  # fmt: skip
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    return len(layers)


def read(folder: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `write` wrote, one at a time."""
    from safetensors import safe_open

    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


# Bytes of a file, about: what a sender holds beside its own weights.
FILE_BYTES = 2**30


def write(weights: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype) -> None:
    """Writes tensors to safetensors files, of which one at a time is held in memory.

    Raises:
        OSError: the folder is full, or not to be written to.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    held: dict[str, Tensor] = {}
    files = 0

    def flush() -> None:
        nonlocal files
        try:
            save_file(held, folder / f"{files:05d}.safetensors")
        except SafetensorError as error:
            raise OSError(str(error)) from error
        files += 1
        held.clear()

    for name, weight in weights:
        held[name] = weight.to("cpu", dtype).contiguous()
        if sum(x.nbytes for x in held.values()) >= FILE_BYTES:
            flush()
    if held:
        flush()


def names_of(model: Any) -> list[str]:
    """The names of the parameters that `names_and_weights` yields, as the model has them."""
    prefix = model.prefix if hasattr(model, "peft_config") else None
    return [
        name for name, _ in model.named_parameters()
        if prefix is None or not (f".{prefix}" in name or ".original_module." in name)
    ]  # fmt: skip


def names_and_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights as a checkpoint names them, one at a time and whole; a tied one comes once.

    LoRA is merged on the way, `W + B A * scaling` in the dtype of W, and the model stays as it is.
    Every process of a sharded model has to go through all of them: FSDP2 and ZeRO-3 gather each.

    Args:
        model: a transformers or PEFT model, its parameters sharded or not.

    Raises:
        ValueError: an adapter that is no plain LoRA.
    """
    layers: dict[str, Any] = dict(model.named_modules()) if hasattr(model, "peft_config") else {}
    parameters = dict(model.named_parameters())
    for name in names_of(model):
        parameter = parameters[name]
        layer: Any = layers.get(name.removesuffix(".base_layer.weight"))
        adapters = [] if layer is None else [a for a in layer.active_adapters if a in layer.scaling]
        with _gathered([parameter, *(layer.parameters() if adapters else ())]):
            weight = _whole(parameter.detach())
            for adapter in adapters:
                if (kind := beyond_lora(layer, adapter)) is not None:
                    raise ValueError(
                        f"model: expected plain LoRA, which can be merged on the way to vLLM; got "
                        f"{kind} in {name}"
                    )
                weight = weight + _whole(layer.get_delta_weight(adapter)).to(weight)
            yield _plain(name) if layers else name, weight


def _plain(name: str) -> str:
    """The name in a checkpoint of a parameter's name in a PEFT model."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def _gathered(parameters: list[Tensor]) -> Any:
    if not any(hasattr(p, "ds_id") for p in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)

r"""Will it fit, and how long will it take? Predicts both from the model's config alone.

    python -m grpo_kernels.training.memory run.yaml --gpu-gib 24 --gpu-tflops 80
    python -m grpo_kernels.training.memory --model Qwen/Qwen2.5-1.5B --num-generations 8 \
        --max-completion-length 1024 --dtype bf16 [--lora-rank 16] [--processes 8 | --cpu]

The command takes the options of a run. Of the model it needs the config alone, from the hub or a
folder with a config.json. The model is built without memory; its forward and backward on a
micro-batch are counted, the bytes that are kept and the floating-point operations of GEMMs.

    seconds = (micro-batches * epochs_per_rollout * FLOPs(layers, forward and backward)
               + 2 * tokens * V * H * GEMMs of the head + forwards that score) / FLOP/s of the GPU

Every prompt and completion counts as long as it may be. Attention scores, elementwise work, the
optimizer and communication are left out, and so is the time of sampling.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..head.budget import default_chunk_bytes
from ..integrations.hf_head import head_of
from ..integrations.private import without_memory
from .checks import check_model_name
from .command_line import parse_config, user_errors
from .config import DTYPES, TrainingConfig
from .loading import explain_missing_model, set_trainable
from .sampling.vllm_rollout import kv_cache_bytes
from .step.policy import Batch, Policy, without_values

GIB = 2**30


@dataclass(frozen=True)
class Prediction:
    """Bytes in one process, and FLOPs of a step there."""

    weights: int
    gradients: int
    optimizer: int
    buckets: int  # DDP's, in which gradients are averaged: a copy of them
    reference: int
    activations: int  # kept by the body's forward for the backward of a micro-batch
    activation_gradients: int  # of activations, while they are needed
    head: int  # this library's head, in that micro-batch
    accumulates: bool  # whether gradients are held during a forward
    kv_cache: int  # keys and values while sampling
    sampling_logits: int  # and copies of them
    flops: Mapping[str, int]  # of GEMMs, by what is computed; the last one is the sampling

    @property
    def peak(self) -> int:
        """The most, while sampling, while the head works, or in the backward of the body."""
        working = self.activations + max(self.head, self.activation_gradients)
        # The backward makes gradients as it frees activations, if there are none yet.
        both = self.gradients + working if self.accumulates else max(self.gradients, working)
        sampling = self.kv_cache + self.sampling_logits
        always = self.weights + self.optimizer + self.buckets + self.reference
        return always + max(both, sampling)

    def table(self) -> str:
        """The bytes in GiB, one figure per line."""
        return "\n".join(
            f"{name.replace('_', ' '):28}{value / GIB:9.2f} GiB"
            for name, value in {**vars(self), "peak": self.peak}.items()
            if name not in ("accumulates", "flops")
        )

    def work(self, steps: int, tflops: float | None = None) -> str:
        """The FLOPs of a step, one figure per line, and its time where `tflops` is known."""
        *names, sampling = self.flops
        counts = {name: self.flops[name] / 1e12 for name in names if self.flops[name]}
        counts["step without sampling"] = total = sum(counts.values())
        lines = [
            f"{name:28}{count:9.2f} TFLOP" + (f"{count / tflops:9.2f} s" if tflops else "")
            for name, count in counts.items()
        ]
        lines.append(f"{sampling:28}{self.flops[sampling] / 1e12:9.2f} TFLOP  (time not predicted)")
        if tflops:
            minutes = steps * total / tflops / 60
            lines.append(
                f"\nPredicted, not measured: {steps:,} steps take {minutes:.3g} min and the time "
                f"of sampling,\nif GEMMs run at {tflops:g} TFLOP/s and every prompt and completion "
                "is as long as it may be.\nSampling waits for memory rather than GEMMs: time it in "
                "a short run (seconds/generate)."
            )
        return "\n".join(lines)


def predict(
    config: TrainingConfig, model_config: Any, *, gpu: bool = True, gpu_bytes: int | None = None,
    processes: int = 1,
) -> Prediction:  # fmt: skip
    """Predicts one process of a run, with prompts and completions as long as they may be.

    Args:
        config: the run's options.
        model_config: transformers' config of the model.
        gpu: whether it runs on one.
        gpu_bytes: the memory of each GPU, if it is known.
        processes: how many share the prompts of a step.
    """
    with torch.device("meta"):
        model = _model(config, model_config)
    weights = sum(map(_bytes, model.parameters()))
    gradients = sum(_bytes(p) for p in model.parameters() if p.requires_grad)
    has_reference = bool(config.beta) and (config.ref_model or not config.lora_rank)
    policy = Policy(model, share_prompts=config.share_prompts)
    sampled = -(-config.prompts_per_step // processes) * config.num_generations
    rows = min(config.micro_batch_size, sampled // config.minibatches)
    activations, forward, backward = _counted(policy, config, rows, gpu)
    text = model_config.get_text_config()
    head = head_of(model)
    V, H = head.weight.shape
    T = config.max_completion_length
    N = rows * T
    width = 2 if config.dtype == "bf16" or _autocasts(config, gpu) else 4
    layers = text.num_hidden_layers
    prompts = -(-rows // config.num_generations) if policy.shares_prompts else rows
    tokens = prompts * config.max_prompt_length + N
    if config.gradient_checkpointing:
        # The input of each layer, and the activations of one layer, recomputed.
        activations = layers * tokens * H * width + activations // layers
    d_weight = 4 * V * H if head.weight.requires_grad else 0
    # In two passes over a frozen head: the gradient of each log-prob by its state, and the result.
    by_states = 1 if head.weight.requires_grad or config.one_pass else 2
    # Logits, and on a GPU their gradient in half precision.
    most = (6 if gpu and width == 2 else 4) * N * V
    chunk = min(most, default_chunk_bytes(V, "cuda" if gpu else "cpu", gpu_bytes))
    accumulates = sampled // config.minibatches > rows
    generates = config.rollout == "generate"  # or vLLM does, in its share of the card
    longest = config.max_prompt_length + config.longest_completion
    cache = kv_cache_bytes(text, sampled * longest, width)
    parts = config.minibatches * -(
        -sampled // config.minibatches // rows
    )  # micro-batches of a pass
    logits = 2 * sampled * T * V * H
    gemms = (3 if config.one_pass else 4) if head.weight.requires_grad else 2
    if config.gradient_checkpointing:
        backward += forward
    scored = (config.minibatches > 1) + (
        config.top_entropy_quantile < 1 and config.entropy_threshold is None
    )
    compared = bool(config.beta) * (config.epochs_per_rollout if config.exact_kl else 1)
    flops = {
        "layers": config.epochs_per_rollout * parts * (forward + backward),
        "head": config.epochs_per_rollout * gemms * logits,
        "scores of the policy": scored * (parts * forward + logits),
        "scores of the reference": compared * (parts * forward + logits),
        "sampling": parts * forward + logits,
    }
    return Prediction(
        weights=weights,
        gradients=gradients,
        optimizer=2 * gradients,
        buckets=gradients if processes > 1 else 0,
        reference=(weights if config.ref_model else gradients) if has_reference else 0,
        activations=activations,
        # In a layer's widest part: the gate and what it gates, for all tokens.
        activation_gradients=3 * tokens * getattr(text, "intermediate_size", 4 * H) * width,
        head=chunk + d_weight + by_states * N * H * width,
        accumulates=accumulates,
        kv_cache=generates * cache,
        sampling_logits=generates * 4 * 4 * sampled * V,
        flops=flops,
    )


def _model(config: TrainingConfig, model_config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, DTYPES[config.dtype])
    model = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    model.tie_weights()  # transformers 5.0 leaves them apart where there is no memory
    return set_trainable(model, config)


def _counted(policy: Policy, config: TrainingConfig, rows: int, gpu: bool) -> tuple[int, int, int]:
    """Returns bytes kept for the backward of the body, and FLOPs of its forward and backward.

    The micro-batch of `rows` completions is of tensors without memory, computed by a CPU's kernels.
    Those of a GPU keep the same for attention (queries, keys, values, output, log-sum-exp). Each
    storage counts once. Nothing is recomputed in the backward.
    """
    P, T = config.max_prompt_length, config.max_completion_length
    prompts = -(-rows // config.num_generations)
    storages: set[torch.UntypedStorage] = set()
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages.add(x.untyped_storage())
        return x

    model: Any = policy.model
    if config.gradient_checkpointing:
        model.gradient_checkpointing_disable()
    with without_memory():
        state = without_values(policy)
        ids, ones = (
            torch.ones(n, m, dtype=torch.int64, device="cpu") for n, m in ((prompts, P), (rows, T))
        )
        batch = Batch(
            ids, ids, torch.arange(rows, device="cpu") // config.num_generations, ones, ones, ones
        )
        low = _autocasts(config, gpu)
        autocast = torch.autocast("cpu", torch.bfloat16) if low else nullcontext()
        policy.train()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), autocast, forward:
            hidden = torch.func.functional_call(policy, state, ("hidden", batch))
        with backward:
            if hidden.requires_grad:
                hidden.sum().backward()
    own = {x.untyped_storage() for x in state.values()}
    kept_bytes = sum(storage.nbytes() for storage in storages - own)
    return kept_bytes, forward.get_total_flops(), backward.get_total_flops()


def _autocasts(config: TrainingConfig, gpu: bool) -> bool:
    return config.dtype == "mixed" and gpu


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


@dataclass(frozen=True, kw_only=True)
class Forecast(TrainingConfig):
    """The options of a run, and its hardware."""

    gpu_gib: float | None = None
    """Memory of the GPU in GiB, to say whether the run fits (exit status 1 if not)."""
    gpu_tflops: float | None = None
    """TFLOP/s that a GPU sustains in GEMMs (less than its data sheet says), to predict times."""
    cpu: bool = False
    """Predict a run on a CPU."""
    processes: int = 1
    """Number of processes (GPUs)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("processes", self.processes >= 1, "at least 1")
        self.require("gpu_tflops", self.gpu_tflops is None or self.gpu_tflops > 0, "more than 0")
        for name in ("gpu_gib", "gpu_tflops"):
            if self.cpu and getattr(self, name) is not None:
                raise ValueError(f"{name}: expected none with cpu; got {getattr(self, name)}")


def main(argv: Sequence[str] | None = None) -> None:
    from transformers import AutoConfig

    config = parse_config(argv, kind=Forecast)
    gpu_bytes = None if config.gpu_gib is None else int(config.gpu_gib * GIB)
    with user_errors(argv):
        check_model_name("model", config.model)
        with explain_missing_model(config.model):
            model_config = AutoConfig.from_pretrained(config.model)
        prediction = predict(
            config, model_config, gpu=not config.cpu, gpu_bytes=gpu_bytes,
            processes=config.processes,
        )  # fmt: skip
    print(prediction.table(), prediction.work(config.steps, config.gpu_tflops), sep="\n\n")
    if gpu_bytes is None:
        return
    share = 0.08 + (config.rollout == "vllm") * config.vllm_gpu_memory_utilization
    fits = prediction.peak <= int((1 - share) * gpu_bytes)
    print(
        f"\n{'fits' if fits else 'does not fit'} into {config.gpu_gib:g} GiB, of which {share:.0%} "
        "are left to vLLM, the driver and fragmentation"
    )
    if not fits:
        print("Smaller: micro_batch_size, gradient_checkpointing, lora_rank, dtype bf16")
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    main()

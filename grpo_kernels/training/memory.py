r"""Will it fit, and how long will it take? Predicts both from the model's config alone.

    python -m grpo_kernels.training.memory run.yaml --gpu 4090
    python -m grpo_kernels.training.memory --model Qwen/Qwen2.5-1.5B --num-generations 8 \
        --max-completion-length 1024 --dtype bf16 [--lora-rank 16] [--processes 8 | --cpu]

The command takes the options of a run. It needs only the model's config, from the hub or a folder
with a config.json. It builds the model without memory and counts the saved bytes and the FLOPs of
GEMMs in its forward and backward on a micro-batch.

    updates  = (micro-batches * epochs_per_rollout * FLOPs(layers, forward and backward)
                + 2 * tokens * V * H * GEMMs of the head + forwards that score) / (FLOP/s)
    sampling = max(FLOPs(forward) / (FLOP/s), bytes read / (bytes/s))
               + tokens of a completion * layers * time of the host, for `generate`

For each token of a completion the GPU reads weights, keys, values and logits. Every prompt and
completion counts with its largest length. Attention scores, elementwise work, the optimizer,
communication, rewards and evaluations are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..head.budget import default_chunk_bytes
from ..integrations.hf_head import head_of
from ..integrations.private import without_memory
from .cards import CARDS, HOST_SECONDS, Card, Work
from .checks import check_model_name
from .command_line import parse_config, user_errors
from .config import DTYPES, TrainingConfig
from .loading import explain_missing_model, set_trainable
from .sampling.vllm_rollout import kv_cache_bytes
from .step.policy import Batch, Policy, fake_cpu_tensors

GIB = 2**30


@dataclass(frozen=True)
class Prediction:
    """Bytes in one process, and the work of a step there."""

    weights: int
    gradients: int
    optimizer: int
    buckets: int  # DDP's, a copy of the gradients
    reference: int
    activations: int  # saved by the body's forward for the backward of a micro-batch
    activation_gradients: int  # of activations, while they are needed
    head: int  # this library's head, in that micro-batch
    accumulates: bool  # whether gradients are held during a forward
    kv_cache: int  # keys and values while sampling
    sampling_logits: int  # and copies of them
    work: Work

    @property
    def peak(self) -> int:
        """The largest sum: while sampling, in the head, or in the backward of the body."""
        working = self.activations + max(self.head, self.activation_gradients)
        # The first backward allocates gradients while it frees activations.
        both = self.gradients + working if self.accumulates else max(self.gradients, working)
        sampling = self.kv_cache + self.sampling_logits
        always = self.weights + self.optimizer + self.buckets + self.reference
        return always + max(both, sampling)

    def table(self) -> str:
        """The bytes in GiB, one figure per line."""
        return "\n".join(
            f"{name.replace('_', ' '):28}{value / GIB:9.2f} GiB"
            for name, value in {**vars(self), "peak": self.peak}.items()
            if name not in ("accumulates", "work")
        )


class _Step:
    """Sizes of a step in one process."""

    def __init__(self, config: TrainingConfig, gpu: bool, processes: int) -> None:
        self.sampled = -(-config.prompts_per_step // processes) * config.num_generations
        update = self.sampled // config.minibatches
        self.rows = min(config.micro_batch_size, update)
        self.parts = config.minibatches * -(-update // self.rows)  # micro-batches of a pass
        self.accumulates = update > self.rows
        # Bytes per number in a GEMM.
        self.width = 2 if config.dtype == "bf16" or _autocasts(config, gpu) else 4


def predict(
    config: TrainingConfig, model_config: Any, *, gpu: bool = True, card: Card | None = None,
    processes: int = 1,
) -> Prediction:  # fmt: skip
    """Predicts one process of a run, with prompts and completions of their largest lengths.

    `processes` share the prompts of a step; each has the GPU `card`, if known.
    """
    with torch.device("meta"):
        model = _model(config, model_config)
    weights = sum(map(_bytes, model.parameters()))
    gradients = sum(_bytes(p) for p in model.parameters() if p.requires_grad)
    has_reference = bool(config.beta) and (config.ref_model or not config.lora_rank)
    policy, step = Policy(model, share_prompts=config.share_prompts), _Step(config, gpu, processes)
    activations, forward, backward = _counted(policy, config, step.rows, gpu)
    text, head = model_config.get_text_config(), head_of(model)
    V, H = head.weight.shape
    layers = text.num_hidden_layers
    prompts = -(-step.rows // config.num_generations) if policy.shares_prompts else step.rows
    tokens = prompts * config.max_prompt_length + step.rows * config.max_completion_length
    if config.gradient_checkpointing:
        # The input of each layer, and the recomputed activations of one layer.
        activations = layers * tokens * H * step.width + activations // layers
        backward += forward
    generates = config.rollout == "generate"  # or vLLM does, in its share of the card
    longest = config.max_prompt_length + config.longest_completion
    logits = 2 * step.sampled * config.max_completion_length * V * H
    gemms = (3 if config.one_pass else 4) if head.weight.requires_grad else 2
    return Prediction(
        weights=weights,
        gradients=gradients,
        optimizer=2 * gradients,
        buckets=gradients if processes > 1 else 0,
        reference=(weights if config.ref_model else gradients) if has_reference else 0,
        activations=activations,
        # In a layer's widest part: the gate, the up projection and their product, for all tokens.
        activation_gradients=3 * tokens * _widest(text) * step.width,
        head=_head_bytes(config, step, head.weight, gpu, card),
        accumulates=step.accumulates,
        kv_cache=generates * kv_cache_bytes(text, step.sampled * longest, step.width),
        sampling_logits=generates * 4 * 4 * step.sampled * V,
        work=Work(
            updates=_flops(config, step, forward, backward, logits, gemms),
            sampling=step.parts * forward + logits,
            reads=_reads(config, step, model, text, V),
            host_seconds=generates * config.max_completion_length * layers * HOST_SECONDS,
            half=step.width == 2,
        ),
    )


def _head_bytes(
    config: TrainingConfig, step: _Step, weight: torch.Tensor, gpu: bool, card: Card | None
) -> int:
    (V, H), N = weight.shape, step.rows * config.max_completion_length
    # Two passes over a frozen head: the gradient of each log-prob by its state, and the result.
    by_states = 1 if weight.requires_grad or config.one_pass else 2
    # Logits, and on a GPU their gradient in half precision.
    most = (6 if gpu and step.width == 2 else 4) * N * V
    memory = None if card is None else int(card.gib * GIB)
    chunk = min(most, default_chunk_bytes(V, "cuda" if gpu else "cpu", memory))
    d_weight = 4 * V * H if weight.requires_grad else 0
    return chunk + d_weight + by_states * N * H * step.width


def _flops(
    config: TrainingConfig, step: _Step, forward: int, backward: int, logits: int, gemms: int
) -> dict[str, int]:
    """Returns the FLOPs of updates by part, from a micro-batch's layers and all logits."""
    scored = (config.minibatches > 1) + (
        config.top_entropy_quantile < 1 and config.entropy_threshold is None
    )
    compared = bool(config.beta) * (config.epochs_per_rollout if config.exact_kl else 1)
    return {
        "layers": config.epochs_per_rollout * step.parts * (forward + backward),
        "head": config.epochs_per_rollout * gemms * logits,
        "scores of the policy": scored * (step.parts * forward + logits),
        "scores of the reference": compared * (step.parts * forward + logits),
    }


def _reads(config: TrainingConfig, step: _Step, model: nn.Module, text: Any, V: int) -> int:
    """Returns the bytes read, and written as copies, while sampling a step."""
    T, cast = config.max_completion_length, 0
    if config.rollout == "generate":
        # Autocast caches its copy of a trained weight, and copies a frozen weight in every call.
        cast = sum(
            _bytes(p) + step.width * p.numel()
            for p in model.parameters()
            if p.element_size() > step.width and not p.requires_grad
        )
    weights = step.width * sum(p.numel() for p in model.parameters()) + cast
    length = config.max_prompt_length + T // 2  # on average
    # Four passes over float32 logits, as many as copies.
    logits = 2 * 4 * 4 * step.sampled * V
    return T * (weights + kv_cache_bytes(text, step.sampled * length, step.width) + logits)


def _widest(text: Any) -> int:
    """Returns the number of units per token in the widest part of a layer."""
    dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    return max(dense, chosen * (getattr(text, "moe_intermediate_size", None) or dense))


def _model(config: TrainingConfig, model_config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, DTYPES[config.dtype])
    model = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    model.tie_weights()  # transformers 5.0 does not tie weights without memory
    return set_trainable(model, config)


def _counted(policy: Policy, config: TrainingConfig, rows: int, gpu: bool) -> tuple[int, int, int]:
    """Returns bytes saved for the backward of the body, and FLOPs of its forward and backward.

    The micro-batch of `rows` completions has no memory and runs CPU kernels; a GPU's save the same
    for attention (queries, keys, values, output, log-sum-exp). Each storage counts once. Nothing is
    recomputed in the backward.
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
        state = fake_cpu_tensors(policy)
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
    weights = {x.untyped_storage() for x in state.values()}
    kept_bytes = sum(storage.nbytes() for storage in storages - weights)
    return kept_bytes, forward.get_total_flops(), backward.get_total_flops()


def _autocasts(config: TrainingConfig, gpu: bool) -> bool:
    return config.dtype == "mixed" and gpu


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


@dataclass(frozen=True, kw_only=True)
class Forecast(TrainingConfig):
    """The options of a run, and its hardware."""

    gpu: Literal["t4", "l4", "a10g", "3090", "4090", "5090", "l40s", "a6000", "a100", "h100",
                 "h200", "b200"] | None = None  # fmt: skip
    """GPU of each process, to tell whether the run fits (exit status 1 if not) and how long it
    takes; a100 has 80 GB. None: another GPU; compare the peak with its memory."""
    cpu: bool = False
    """Predict a run on a CPU."""
    processes: int = 1
    """Number of processes (GPUs)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("processes", self.processes >= 1, "at least 1")
        self.require("gpu", not (self.cpu and self.gpu), "none with cpu")


def main(argv: Sequence[str] | None = None) -> None:
    from transformers import AutoConfig

    config = parse_config(argv, kind=Forecast)
    card = None if config.gpu is None else CARDS[config.gpu]
    with user_errors(argv):
        check_model_name("model", config.model)
        with explain_missing_model(config.model):
            model_config = AutoConfig.from_pretrained(config.model)
        prediction = predict(
            config, model_config, gpu=not config.cpu, card=card, processes=config.processes
        )
    print(prediction.table(), prediction.work.table(config.steps, card), sep="\n\n")
    if card is None:
        return
    share = 0.08 + (config.rollout == "vllm") * config.vllm_gpu_memory_utilization
    others = "vLLM, " * (config.rollout == "vllm") + "the driver and fragmentation"
    fits = prediction.peak <= int((1 - share) * card.gib * GIB)
    print(
        f"\n{'fits' if fits else 'does not fit'} into {card.gib:g} GiB less {share:.0%} for "
        f"{others}"
    )
    if not fits:
        print("Smaller: micro_batch_size, gradient_checkpointing, lora_rank, dtype bf16")
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    main()

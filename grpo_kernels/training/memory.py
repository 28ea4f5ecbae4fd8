r"""Will it fit? Predicts the peak memory of a run from the model's config alone.

    python -m grpo_kernels.training.memory --model Qwen/Qwen2.5-1.5B --num-generations 8 \
        --max-completion-length 1024 --dtype bf16 [--lora-rank 16] [--gpu-gib 24]

Takes the options of a run. No weights are downloaded: the model is built without memory, and every
tensor that a forward would keep for its backward is counted as it is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..hf_head import head_of
from ..row_plan import default_chunk_bytes
from .command_line import parse_config
from .config import DTYPES, TrainingConfig
from .loading import explain_missing_model, resolve_model, set_trainable
from .policy import Batch, Policy

GIB = 2**30


@dataclass(frozen=True)
class Prediction:
    """Bytes in one process."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int  # kept by the body's forward for the backward of a micro-batch
    backward: int  # gradients of activations, while they are needed
    head: int  # this library's head, in that micro-batch
    eager_head: int  # the same with materialized logits
    accumulates: bool  # whether gradients are held during a forward
    cache: int  # keys and values while sampling
    sampling: int  # logits, and copies that sampling makes of them

    @property
    def state(self) -> int:
        """Bytes that are held all the time."""
        return self.weights + self.optimizer + self.reference

    @property
    def training_peak(self) -> int:
        """The larger of two: while the head works, and in the backward of the body."""
        return self._training_peak(self.head)

    def _training_peak(self, head: int) -> int:
        working = self.activations + max(head, self.backward)
        if self.accumulates:
            return self.state + self.gradients + working
        # The backward makes gradients as it frees activations.
        return self.state + max(self.gradients, working)

    @property
    def peak(self) -> int:
        """The larger of training's and sampling's."""
        return max(self.state + self.cache + self.sampling, self.training_peak)

    @property
    def eager_peak(self) -> int:
        """The peak with an eager head."""
        return max(self.peak, self._training_peak(self.eager_head))

    def table(self) -> str:
        """The figures in GiB, one per line."""
        names = {
            "weights": "weights", "gradients": "gradients", "optimizer": "optimizer (AdamW)",
            "reference": "reference model", "activations": "activations of a micro-batch",
            "backward": "gradients of activations", "head": "head, this library",
            "eager_head": "head, eager", "cache": "KV cache while sampling",
            "sampling": "logits while sampling",
        }  # fmt: skip
        lines = [f"{text:32}{getattr(self, name) / GIB:9.2f} GiB" for name, text in names.items()]
        lines.append(f"{'peak':32}{self.peak / GIB:9.2f} GiB")
        lines.append(f"{'peak with an eager head':32}{self.eager_peak / GIB:9.2f} GiB")
        return "\n".join(lines)


def predict(
    config: TrainingConfig, model_config: Any, *, gpu: bool = True, gpu_bytes: int | None = None
) -> Prediction:
    """Predicts a run in one process, with prompts and completions as long as they may be."""
    with torch.device("meta"):
        model = _model(config, model_config)
    weights = sum(map(_bytes, model.parameters()))
    gradients = sum(_bytes(p) for p in model.parameters() if p.requires_grad)
    has_reference = bool(config.beta) and not config.lora_rank
    policy = Policy(model, share_prompts=config.share_prompts)
    activations = _kept(policy, config, gpu)
    text = model_config.get_text_config()
    head = head_of(model)
    V, H = head.weight.shape
    rows, T = config.micro_batch_size, config.max_completion_length
    N = rows * T
    width = 2 if config.dtype == "bf16" or _autocasts(config, gpu) else 4
    layers = text.num_hidden_layers
    tokens = _tokens(config, policy)
    if config.gradient_checkpointing:
        # The input of each layer, and the activations of one layer, recomputed.
        activations = layers * tokens * H * width + activations // layers
    d_weight = 4 * V * H if head.weight.requires_grad else 0
    # Logits, and on a GPU their gradient in half precision.
    most = (6 if gpu and width == 2 else 4) * N * V
    chunk = min(most, default_chunk_bytes(V, "cuda" if gpu else "cpu", gpu_bytes))
    sampled = config.prompts_per_step * config.num_generations
    accumulates = sampled // config.minibatches > rows
    length = config.max_prompt_length + T
    return Prediction(
        weights=weights,
        gradients=gradients,
        optimizer=2 * gradients,
        reference=gradients if has_reference else 0,
        activations=activations,
        # In a layer's widest part: the gate and what it gates, for all tokens.
        backward=3 * tokens * getattr(text, "intermediate_size", 4 * H) * width,
        head=chunk + d_weight + N * H * width,
        eager_head=3 * 4 * N * V + d_weight,
        accumulates=accumulates,
        cache=kv_cache_bytes(text, sampled * length, width),
        sampling=4 * 4 * sampled * V,
    )


def kv_cache_bytes(text_config: Any, tokens: int, width: int) -> int:
    """Bytes of the keys and values of tokens, `width` bytes per number."""
    c = text_config
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * c.num_hidden_layers * heads * size * tokens * width


def _model(config: TrainingConfig, model_config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, DTYPES[config.dtype])
    return set_trainable(AutoModelForCausalLM.from_config(model_config, dtype=dtype), config)


def _kept(policy: Policy, config: TrainingConfig, gpu: bool) -> int:
    """Bytes of the tensors that the backward of the body needs, each storage once.

    The forward runs on tensors without memory, by a CPU's kernels; a GPU's keep the same for
    attention (queries, keys, values, output, log-sum-exp).
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    rows, P, T = config.micro_batch_size, config.max_prompt_length, config.max_completion_length
    prompts = -(-rows // config.num_generations)
    seen: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        # Kept alive, so that no other storage gets its address.
        seen.setdefault(x.untyped_storage()._cdata, x)
        return x

    with FakeTensorMode():
        weights = {
            name: torch.empty(p.shape, dtype=p.dtype, requires_grad=p.requires_grad)
            for name, p in policy.named_parameters()
        }
        buffers = {n: torch.empty(b.shape, dtype=b.dtype) for n, b in policy.named_buffers()}
        batch = Batch(
            torch.ones(prompts, P, dtype=torch.int64), torch.ones(prompts, P, dtype=torch.int64),
            torch.arange(rows) // config.num_generations, torch.ones(rows, T, dtype=torch.int64),
            torch.ones(rows, T, dtype=torch.int64),
        )  # fmt: skip
        low = _autocasts(config, gpu)
        autocast = torch.autocast("cpu", torch.bfloat16) if low else nullcontext()
        policy.train()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), autocast:
            torch.func.functional_call(policy, {**weights, **buffers}, ("hidden", batch))
    own = {x.untyped_storage()._cdata for x in (*weights.values(), *buffers.values())}
    return sum(x.untyped_storage().nbytes() for key, x in seen.items() if key not in own)


def _autocasts(config: TrainingConfig, gpu: bool) -> bool:
    return config.dtype == "fp32" and (
        config.precision == "bf16" or (config.precision == "auto" and gpu)
    )


def _tokens(config: TrainingConfig, policy: Policy) -> int:
    rows = config.micro_batch_size
    prompts = -(-rows // config.num_generations) if policy.shares_prompts else rows
    return prompts * config.max_prompt_length + rows * config.max_completion_length


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def main(argv: Sequence[str] | None = None) -> None:
    from transformers import AutoConfig

    argv = list(sys.argv[1:] if argv is None else argv)
    gpu_gib, argv = _take(argv, "--gpu-gib")
    config = parse_config(argv)
    gpu_bytes = None if gpu_gib is None else int(gpu_gib * GIB)
    try:
        name = resolve_model(config.model)
        with explain_missing_model(name):
            model_config = AutoConfig.from_pretrained(name)
    except OSError as error:
        sys.exit(str(error))
    prediction = predict(config, model_config, gpu_bytes=gpu_bytes)
    print(prediction.table())
    if gpu_gib is not None:
        fits = prediction.peak <= 0.92 * gpu_gib * GIB
        print(f"{'fits' if fits else 'does not fit'} into {gpu_gib:g} GiB, of which 8 % are left "
              "to the driver and to fragmentation")  # fmt: skip
        if not fits:
            print("Smaller: micro_batch_size; gradient_checkpointing; lora_rank; dtype bf16")
        sys.exit(0 if fits else 1)


def _take(argv: list[str], flag: str) -> tuple[float | None, list[str]]:
    if flag not in argv:
        return None, argv
    place = argv.index(flag)
    try:
        value = float(argv[place + 1])
    except (IndexError, ValueError):
        sys.exit(f"{flag}: expected a number of GiB")
    return value, argv[:place] + argv[place + 2 :]


if __name__ == "__main__":
    main()

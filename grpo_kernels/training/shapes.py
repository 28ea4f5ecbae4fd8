"""Shapes of models that are often trained, as their config.json on the hub has them.

So that memory can be predicted without a connection. A name is one of the hub's, with or without
its owner and what says how the model was tuned: `Qwen/Qwen2.5-1.5B-Instruct`, `qwen2.5-1.5b`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class Shape(NamedTuple):
    kind: str  # model_type
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
    "qwen2.5-1.5b": Shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    "qwen2.5-3b": Shape("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True),
    "qwen2.5-7b": Shape("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "qwen2.5-14b": Shape("qwen2", 5120, 13824, 48, 40, 8, 128, 152064, False),
    "qwen2.5-32b": Shape("qwen2", 5120, 27648, 64, 40, 8, 128, 152064, False),
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "qwen3-1.7b": Shape("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    "qwen3-4b": Shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "qwen3-8b": Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "qwen3-14b": Shape("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False),
    "qwen3-32b": Shape("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False),
    "llama-3.2-1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-3.2-3b": Shape("llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "llama-3.1-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "smollm2-135m": Shape("llama", 576, 1536, 30, 9, 3, 64, 49152, True),
    "smollm2-360m": Shape("llama", 960, 2560, 32, 15, 5, 64, 49152, True),
    "smollm2-1.7b": Shape("llama", 2048, 8192, 24, 32, 32, 64, 49152, True),
    "gemma-2-2b": Shape("gemma2", 2304, 9216, 26, 8, 4, 256, 256000, True),
    "gemma-2-9b": Shape("gemma2", 3584, 14336, 42, 16, 8, 256, 256000, True),
    "gemma-3-1b": Shape("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, True),
}
# How a model was tuned, and in which variant, changes no shape.
_TUNED = re.compile(r"-(instruct|base|it|pt|math|coder|2507|thinking)(?=-|$)")


def config_of(name: str) -> Any:
    """The transformers config of a model by its name; None for one that is not in the table."""
    from transformers import AutoConfig

    shape = SHAPES.get(_TUNED.sub("", name.rsplit("/", 1)[-1].lower()))
    if shape is None:
        return None
    return AutoConfig.for_model(
        shape.kind, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied, max_position_embeddings=32768,
    )  # fmt: skip

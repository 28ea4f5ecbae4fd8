"""Causal language models of a few thousand parameters, one of each kind that differs."""

from typing import NamedTuple

import torch


class Family(NamedTuple):
    config: str
    shares: bool  # whether its cache carries prompts over
    options: dict | None = None


FAMILIES = {
    "llama": Family("LlamaConfig", True),
    "qwen2": Family("Qwen2Config", True),
    "qwen3": Family("Qwen3Config", True, {"head_dim": 16}),
    "gemma2": Family(
        "Gemma2Config",
        False,
        {"head_dim": 16, "sliding_window": 4, "final_logit_softcapping": 30.0},
    ),
    "cohere": Family("CohereConfig", True, {"logit_scale": 0.5}),
    "granite": Family("GraniteConfig", True, {"logits_scaling": 4.0}),
    "gpt2": Family("GPT2Config", True, {
        "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }),
}  # fmt: skip
V = 257
COMMON = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0, "max_position_embeddings": 128,
}  # fmt: skip


def make_model(family: str, **more):
    kind = FAMILIES[family]
    options = {**COMMON, "tie_word_embeddings": True, **(kind.options or {}), **more}
    return random_model(kind.config, options, 5.0)


def random_model(config: str, options: dict, scale: float):
    """A model of the class, with weights larger than models begin with, so that words differ."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config)(**options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model


def perturbed(folder, copy, scale: float) -> str:
    """Saves a copy of the model and its tokenizer with other weights, and returns its folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, g = AutoModelForCausalLM.from_pretrained(folder), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p += scale * p.std() * torch.randn(p.shape, generator=g)
    model.save_pretrained(copy)
    AutoTokenizer.from_pretrained(folder).save_pretrained(copy)
    return str(copy)


def make_tokenizer():
    """Returns a tokenizer with one token per byte and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {t: i for i, t in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")

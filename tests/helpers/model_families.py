"""Tiny models of the families that transformers has, and LoRA around them."""

import torch

from tests.helpers import tiny_models

COMMON = {**tiny_models.COMMON, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 16}  # fmt: skip
# id: (config class, what differs)
FAMILIES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "phi": ("PhiConfig", {"num_key_value_heads": 2}),  # a bias
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}),
    "gemma2": ("Gemma2Config", {"final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", {"final_logit_softcapping": 3.0}),
    "recurrent_gemma": ("RecurrentGemmaConfig", {"logits_soft_cap": 4.0, "lru_width": 32}),
    "nanochat": ("NanoChatConfig", {"final_logit_softcapping": 6.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.3}),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.4}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0}),
    "granitemoe": ("GraniteMoeConfig", {"logits_scaling": 3.0, **EXPERTS}),
    "hyperclovax": ("HyperCLOVAXConfig", {"logits_scaling": 0.25}),
    "falcon_h1": (
        "FalconH1Config",
        {"lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16,
         "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8},
    ),
    "mpt": ("MptConfig", {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64,
                          "logit_scale": 3.0}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "output_router_logits": True}),
    "mixtral": ("MixtralConfig", {**EXPERTS, "output_router_logits": True}),
    # Its `base_model` is the model itself.
    "llama4": ("Llama4TextConfig", {"num_key_value_heads": 2, "intermediate_size_mlp": 64,
                                    "num_local_experts": 2, "num_experts_per_tok": 1}),
}  # fmt: skip


def family_model(family, **changed):
    name, options = FAMILIES[family]
    return tiny_models.random_model(name, COMMON | options | changed, 4.0).float().eval()


def llava():
    """Returns a LLaVA: pixels pass through its body, and its config nests a text config."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    text = {k: v for k, v in COMMON.items() if k != "head_dim"} | {"model_type": "llama"}
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=3)
    ).eval()


LORAS = {
    "body": {"target_modules": ["q_proj", "v_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "head_rslora": {"target_modules": ["lm_head"], "use_rslora": True},
    "head_copied": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def with_lora(model, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model

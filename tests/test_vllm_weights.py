"""The weights that vLLM is sent: names, values, adapters merged on the way, and their files."""

from types import SimpleNamespace

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from grpo_kernels.integrations import vllm as extension
from grpo_kernels.integrations.vllm import names_and_weights, names_of
from tests.helpers.model_families import COMMON, family_model, llava
from tests.helpers.tiny_models import make_model, random_model

pytestmark = pytest.mark.usefixtures("real_memory")


def sent(model):
    """Weights that vLLM gets, by name; no name comes twice."""
    rows = list(names_and_weights(model))
    weights = dict(rows)
    assert len(weights) == len(rows) == len(names_of(model))
    return weights


def adapted(model, kind=LoraConfig, **options):
    """A PEFT model whose adapters are not those that it begins with, which add 0."""
    options = {"r": 3, "lora_alpha": 7, "target_modules": "all-linear", **options}
    model = get_peft_model(model, kind(task_type="CAUSAL_LM", **options))
    shake(model)
    return model


@torch.no_grad()
def shake(model, seed=0, name=".default"):
    torch.manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        if ".lora_" in parameter_name and name in parameter_name:
            parameter.normal_(std=0.3)
        elif ".modules_to_save." in parameter_name:
            parameter.mul_(1.3)


DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
# id: (a model, a tensor of its checkpoint that has another name or other parts in the model)
RENAMED = {
    "qwen3_moe": (lambda: family_model("qwen3_moe"), "model.layers.1.mlp.experts.3.up_proj.weight"),
    # With a buffer that a checkpoint has, too.
    "deepseek_v3": (
        lambda: random_model("DeepseekV3Config", COMMON | DEEPSEEK, 4.0),
        "model.layers.1.mlp.experts.0.gate_proj.weight",
    ),
    "gpt_neox": (lambda: family_model("gpt_neox"), None),
    "llava": (llava, "language_model.model.embed_tokens.weight"),
}  # fmt: skip


def checkpoint_of(model, folder):
    """The tensors that `save_pretrained` writes, by name."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_same_weights(weights, expected):
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert weights[name].dtype == weight.dtype and torch.equal(weights[name], weight), name


@pytest.mark.parametrize("case", RENAMED)
def test_names_and_parts_are_those_of_a_checkpoint(case, tmp_path):
    make, name = RENAMED[case]
    model = make().to(torch.bfloat16)
    weights = sent(model)
    assert_same_weights(weights, checkpoint_of(model, tmp_path))
    assert name is None or (name in weights and name not in model.state_dict())
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same_weights(sent(loaded), checkpoint_of(loaded, tmp_path / "again"))


def test_experts_are_copied_a_layer_at_a_time(monkeypatch):
    calls, own = [], extension.checkpoint_weights

    def noted(base, tensors):
        calls.append({name.split(".experts.")[0] for name in tensors if ".experts." in name})
        assert next(iter(tensors.values())).is_meta or len(calls[-1]) < 2
        return own(base, tensors)

    monkeypatch.setattr(extension, "checkpoint_weights", noted)
    weights = names_and_weights(family_model("qwen3_moe"))
    first = next(name for name, _ in weights if ".experts." in name)
    count = len(calls)
    assert first.startswith("model.layers.0.") and calls[-1] == {"model.layers.0.mlp"}
    assert sum(".experts." in name for name, _ in weights) == 23
    assert calls[count:] == [{"model.layers.1.mlp"}]


def test_layers_that_a_checkpoint_joins_are_turned_together(monkeypatch):
    def joined(base, tensors):
        norms = [x for name, x in sorted(tensors.items()) if "input_layernorm" in name]
        return {"norms": torch.cat(norms)} if norms else {}

    monkeypatch.setattr(extension, "checkpoint_weights", joined)
    assert sent(make_model("llama"))["norms"].shape == (64,)


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["up_proj"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"]},
        {"kind": peft.AdaLoraConfig, "target_modules": ["q_proj"], "total_step": 9},
    ),
    ids=("all-linear", "rslora", "modules_to_save", "embedding", "head", "adalora"),
)
def test_adapters_are_merged_as_peft_merges_them(options):
    base = dict(make_model("llama", tie_word_embeddings=False).named_parameters())
    model = adapted(make_model("llama", tie_word_embeddings=False), **options)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    weights = sent(model)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    expected = dict(model.merge_and_unload().named_parameters())
    assert weights.keys() == base.keys() == expected.keys()
    targets = options.get("target_modules", ["_proj"]) + options.get("modules_to_save", [])
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-6, msg=name)
        moved = not torch.equal(weights[name], base[name])
        assert moved is any(target in name for target in targets), name


TIED = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "head_copied": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding_copied": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("name", TIED)
def test_an_adapter_on_a_tied_weight_is_refused_unless_it_is_tied(name):
    """For vLLM has one weight: the head's adapter would be lost, the embedding's doubled."""
    model = adapted(make_model("llama"), **TIED[name])
    message = "model: expected no adapter on a tied output layer or embedding, .*; got one on the"
    with pytest.raises(ValueError, match=message):
        list(names_and_weights(model))
    if "ensure_weight_tying" not in LoraConfig.__dataclass_fields__:
        pytest.skip("PEFT has no such option")
    model = adapted(make_model("llama"), ensure_weight_tying=True, **TIED[name]).eval()
    weights = sent(model)
    weights.pop("lm_head.weight", None)  # vLLM ties it again
    sampler = make_model("llama").eval()
    before = sampler.model.embed_tokens.weight.clone()
    sampler.load_state_dict(weights, strict=False)
    assert sampler.lm_head.weight is sampler.model.embed_tokens.weight
    assert not torch.equal(sampler.lm_head.weight, before)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(sampler(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_extension_counts():
    worker = extension.WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: make_model("llama"))
    worker.reload_weights = lambda weights_iterator: dict(weights_iterator)
    weights = sent(make_model("llama"))
    worker.grpo_kernels_load(iter(weights.items()), len(weights))
    with pytest.raises(RuntimeError, match=rf"weights: expected 99 tensors; got {len(weights)}"):
        worker.grpo_kernels_load(iter(weights.items()), 99)

"""The weights that vLLM is sent: names, values, adapters merged on the way, and their files."""

from types import SimpleNamespace

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from grpo_kernels.integrations import vllm as extension
from grpo_kernels.integrations.vllm import names_and_weights, names_of
from tests.helpers.tiny_models import make_model

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


@pytest.mark.parametrize("tied", (True, False), ids=("tied", "untied"))
@pytest.mark.parametrize("family", ("llama", "qwen2", "qwen3"))
def test_names_are_those_of_a_checkpoint(family, tied, tmp_path):
    model = make_model(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    weights = sent(model)
    assert weights.keys() == expected.keys()
    assert ("lm_head.weight" in weights) is not tied
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


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


def test_active_adapters_are_added_up():
    model = adapted(make_model("llama"))
    second = LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=7, target_modules=["q_proj"])
    model.add_adapter("second", second)
    shake(model, seed=1, name=".second")
    name, seen = "model.layers.0.self_attn.q_proj.weight", []
    for active in ("default", "second", ["default", "second"]):
        model.base_model.set_adapter(active)
        seen.append(sent(model)[name].clone())
    expected = model.merge_and_unload(adapter_names=["default", "second"])
    expected = dict(expected.named_parameters())[name]
    torch.testing.assert_close(seen[2], expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(seen[2], seen[0]) and not torch.equal(seen[2], seen[1])


QUERY = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
# What is no sum of a weight and a product: words of the error, and the adapter.
BEYOND_LORA = {
    "TrainableTokensLayer": LoraConfig(**QUERY, trainable_token_indices=[1, 2]),
    "ia3": peft.IA3Config(**QUERY, feedforward_modules=[]),
    "vera": peft.VeraConfig(**QUERY),
    "ln_tuning": peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"]),
    "PROMPT_TUNING": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "(Dora.*|use_dora) in .*q_proj": LoraConfig(**QUERY, use_dora=True),
    # LoRA's bias is added to that of a layer, which a query of Qwen2 has.
    "lora_bias in .*q_proj": LoraConfig(**QUERY, lora_bias=True),
    "a weight in torch.uint8": LoraConfig(**QUERY),
}


@pytest.mark.parametrize("words", BEYOND_LORA)
def test_adapters_that_are_no_product_are_refused(words):
    model = get_peft_model(make_model("qwen2"), BEYOND_LORA[words])
    if "uint8" in words:
        layer = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
        layer.weight = torch.nn.Parameter(layer.weight.to(torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=rf"model: expected plain LoRA, .*; got .*{words}"):
        list(names_and_weights(model))


def test_a_sharded_weight_is_refused():
    model = make_model("llama")
    model.model.norm.weight.ds_id = 7  # as ZeRO-3 marks its parameters
    with pytest.raises(
        ValueError, match=r"expected unsharded weights; model\.norm\.weight is sharded: use TRL"
    ):
        list(names_and_weights(model))


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


class Packed(torch.nn.Linear):
    """A layer that multiplies by a copy of its weight, as vLLM's do on a CPU."""

    def __init__(self):
        super().__init__(2, 2, bias=False)
        self.quant_method, self.packed, self.cpu_linear = self, 0, None

    def process_weights_after_loading(self, layer):
        layer.packed += 1


def test_the_extension_counts_and_packs_again():
    plain, packed, empty = torch.nn.Linear(2, 2), Packed(), Packed()
    empty.weight = torch.nn.Parameter(torch.empty(0))
    model, got = torch.nn.ModuleList([plain, packed, empty]), {}
    worker = extension.WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.reload_weights = lambda weights_iterator: got.update(weights_iterator)
    weights = sent(make_model("llama"))
    worker.grpo_kernels_load(iter(weights.items()), len(weights))
    assert packed.packed == 1 and empty.packed == 0
    assert all(torch.equal(got[name], weight) for name, weight in weights.items())
    with pytest.raises(RuntimeError, match=rf"weights: expected 99 tensors; got {len(weights)}"):
        worker.grpo_kernels_load(iter(weights.items()), 99)

"""The fused head on tiny models of many families: their own logits' log-probs and gradients."""

import copy
import math

import pytest
import torch
import transformers

from grpo_kernels import GRPOLossConfig, grpo_loss
from grpo_kernels.execution import Execution
from grpo_kernels.experimental import Sampled
from grpo_kernels.hf_head import head_of
from grpo_kernels.integrations.transformers import (
    Objective,
    attach_fused_head,
    detach_fused_head,
)
from tests.helpers.model_families import FAMILIES, LORAS, family_model, llava, with_lora
from tests.helpers.tiny_models import V, make_model

pytestmark = pytest.mark.usefixtures("real_memory")
T = 5


def batch_of(B=3, S=11):
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(5, V, (B, S), generator=g)
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :2] = 0  # padded on the left,
    attention_mask[1, -2:] = 0  # and on the right
    labels = ids.masked_fill(attention_mask == 0, -100)
    labels[:, :-T] = -100
    return {"input_ids": ids, "attention_mask": attention_mask}, labels


def expected(model, inputs, labels, temperature=1.0):
    """Log-probs and entropy from the model's own logits."""
    logits = model(**inputs, use_cache=False).logits[:, :-1].float() / temperature
    log_p = logits.log_softmax(-1)
    mask = labels[:, 1:] != -100
    ids = labels[:, 1:].clamp(min=0)
    logps = log_p.gather(-1, ids[..., None])[..., 0] * mask
    return logps, -(log_p.exp() * log_p).sum(-1) * mask, mask


def gradients_of(model, value):
    model.zero_grad()
    value.backward()
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(mine, theirs, tolerance=2e-4):
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        if float(gradient.norm()) < 1e-7:
            continue
        error = float((mine[name] - gradient).norm() / gradient.norm())
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    model = family_model(family)
    inputs, labels = batch_of()
    weights = torch.randn(labels[:, 1:].shape, generator=torch.Generator().manual_seed(5))
    logps, entropy, mask = expected(model, inputs, labels, 0.7)
    wanted = gradients_of(model, (weights * logps + 0.1 * entropy).sum())
    attach_fused_head(model, temperature=0.7)
    out = model(**inputs, labels=labels, fused_head=True)
    assert torch.equal(out.mask, mask) and out.loss is None
    torch.testing.assert_close(out.logps, logps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.entropy, entropy, rtol=1e-4, atol=1e-4)
    assert_same_gradients(
        gradients_of(model, (weights * out.logps + 0.1 * out.entropy).sum()), wanted
    )


def test_families_differ_from_a_plain_head():
    """Checks that the table is read at all."""
    scaled = {name for name in FAMILIES if head_of(family_model(name)).logit_scale != 1.0}
    capped = {name for name in FAMILIES if head_of(family_model(name)).softcap is not None}
    assert scaled == {"cohere", "cohere2", "granite", "granitemoe", "hyperclovax", "falcon_h1"}
    assert capped == {"gemma2", "gemma3", "recurrent_gemma", "nanochat"}


@pytest.mark.parametrize("objective", ("dapo", "gspo"))
def test_loss(objective):
    model = make_model("llama")
    inputs, labels = batch_of()
    config = GRPOLossConfig(loss_type=objective, beta=0.1)
    advantages = torch.tensor([1.0, -0.5, 0.7])
    logps, _, mask = expected(model, inputs, labels)
    old, ref = (
        logps.detach() + 0.3 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(s))
        for s in (1, 2)
    )
    given = {"old_logps": old, "ref_logps": ref, "config": config}
    loss = grpo_loss(logps, advantages, mask, **given).loss
    wanted = gradients_of(model, loss)
    attach_fused_head(model)
    out = model(**inputs, labels=labels, fused_head=Objective(advantages, **given))
    torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-6)
    assert not out.logps.requires_grad and out.metrics["tokens"] == mask.sum()
    assert_same_gradients(gradients_of(model, out.loss), wanted)
    # The last T labels alone, in whose shape the rest then comes.
    last = {"old_logps": old[:, -T:], "ref_logps": ref[:, -T:], "config": config}
    kept = model(
        **inputs, labels=labels, fused_head=Objective(advantages, **last), logits_to_keep=T
    )
    assert kept.logps.shape == (3, T)
    torch.testing.assert_close(kept.loss, out.loss)
    # A mask of the caller's own, as of a tool's words.
    spoken = torch.ones_like(mask)
    spoken[:, -1] = False
    masked = model(**inputs, labels=labels, fused_head=Objective(advantages, mask=spoken, **given))
    torch.testing.assert_close(
        masked.loss, grpo_loss(logps, advantages, mask & spoken, **given).loss
    )


@pytest.mark.parametrize("mask", (None, "of_its_own"))
def test_cross_entropy_beside_the_loss(mask):
    """On labels that the mask leaves out, such as what a tool answered."""
    model = make_model("llama")
    inputs, labels = batch_of()
    advantages = torch.tensor([1.0, -0.5, 0.7])
    logps, _, scored = expected(model, inputs, labels)
    spoken = torch.ones_like(scored)
    ce_weights = 0.1 * torch.rand(scored.shape, generator=torch.Generator().manual_seed(1))
    ce_weights[:, :-2] = 0.0
    ce_weights[~scored] = 0.0
    if mask is not None:
        spoken[:, -1] = False
    loss = grpo_loss(logps, advantages, scored & spoken).loss - (ce_weights * logps).sum()
    wanted = gradients_of(model, loss)
    attach_fused_head(model)
    objective = Objective(advantages, mask=None if mask is None else spoken, ce_weights=ce_weights)
    out = model(**inputs, labels=labels, fused_head=objective)
    torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-6)
    assert torch.equal(out.mask, (scored & spoken) | (ce_weights != 0))
    assert (out.logps[out.mask] != 0).all() and out.metrics["ce_tokens"] == (ce_weights != 0).sum()
    assert_same_gradients(gradients_of(model, out.loss), wanted)
    with pytest.raises(ValueError, match="advantages: expected a tensor, as ce_weights came"):
        Objective(ce_weights=ce_weights)
    everywhere = Objective(advantages, ce_weights=torch.ones_like(ce_weights))
    with pytest.raises(ValueError, match="targets: expected ids in"):
        model(**inputs, labels=labels, fused_head=everywhere)


def test_labels_shifted_already():
    model = make_model("llama")
    inputs, labels = batch_of()
    attach_fused_head(model)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    out = model(**inputs, shift_labels=shifted, fused_head=True)
    torch.testing.assert_close(
        out.logps[:, :-1], model(**inputs, labels=labels, fused_head=True).logps
    )


def test_otherwise_the_model_is_as_it_was():
    model = make_model("gemma2").eval()
    inputs, labels = batch_of()
    before = model(**inputs, labels=labels)
    ids = inputs["input_ids"][:, :4]
    words = model.generate(ids, max_new_tokens=6, do_sample=False)
    attach_fused_head(model)
    after = model(**inputs, labels=labels)
    torch.testing.assert_close(after.logits, before.logits)
    torch.testing.assert_close(after.loss, before.loss)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), words)
    with pytest.raises(ValueError, match="model_kwargs"):
        model.generate(ids, max_new_tokens=2, nonsense=True)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    # The copy's head, not that of the model it was copied from.
    flat = copied(**inputs, labels=labels, fused_head=True)
    assert (flat.entropy[flat.mask] - math.log(V)).abs().max() < 1e-4
    detach_fused_head(model)
    assert "forward" not in vars(model)
    assert not hasattr(model(**inputs, labels=labels), "logps")


def test_gradient_checkpointing():
    model = make_model("llama").train()
    inputs, labels = batch_of()
    attach_fused_head(model)
    wanted = gradients_of(model, model(**inputs, labels=labels, fused_head=True).logps.sum())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mine = gradients_of(model, model(**inputs, labels=labels, fused_head=True).logps.sum())
    assert_same_gradients(mine, wanted, 1e-5)


def test_load_balancing_of_experts():
    model = family_model("mixtral")
    inputs, labels = batch_of()
    own = model(**inputs, labels=labels)
    attach_fused_head(model)
    out = model(**inputs, labels=labels, fused_head=True)
    torch.testing.assert_close(out.aux_loss, own.aux_loss)
    assert out.aux_loss.requires_grad


def test_arguments_by_position():
    model = family_model("mixtral")
    attach_fused_head(model)
    inputs, labels = batch_of()
    ids, attention_mask = inputs.values()
    by_name = model(**inputs, labels=labels, fused_head=True)
    out = model(ids, attention_mask, labels=labels, fused_head=True)
    torch.testing.assert_close(out.aux_loss, by_name.aux_loss)
    torch.testing.assert_close(out.logps, by_name.logps)


def test_accelerate_leaves_it_alone():
    """PEFT unwraps a forward by `__wrapped__`, and reads its signature."""
    import inspect

    from accelerate.utils import extract_model_from_parallel

    model = make_model("llama")
    own = inspect.signature(model.forward)
    attach_fused_head(model)
    assert inspect.signature(model.forward) == own
    inputs, labels = batch_of()
    for keep in (True, False):
        unwrapped = extract_model_from_parallel(model, keep_fp32_wrapper=keep)
        assert unwrapped(**inputs, labels=labels, fused_head=True).logps is not None


def test_vision_language_model():
    model = llava()
    inputs, labels = batch_of()
    inputs["input_ids"][:, 2:6] = 3  # four patches
    inputs["pixel_values"] = torch.randn(3, 3, 8, 8)
    logps, _, _ = expected(model, inputs, labels)
    attach_fused_head(model)
    out = model(**inputs, labels=labels, fused_head=True)
    torch.testing.assert_close(out.logps, logps, rtol=1e-4, atol=1e-4)
    assert_same_gradients(gradients_of(model, out.logps.sum()), gradients_of(model, logps.sum()))


@pytest.mark.parametrize("when", ("before", "after"))
@pytest.mark.parametrize("kind", LORAS)
def test_lora(kind, when):
    model = family_model("qwen2")
    if when == "before":
        attach_fused_head(model)
    model = with_lora(model, **LORAS[kind])
    inputs, labels = batch_of()
    logps, _, _ = expected(model, inputs, labels)
    wanted = gradients_of(model, logps.sum())
    assert any("lm_head" in name for name in wanted) == (kind != "body")
    if when == "after":
        attach_fused_head(model)
    out = model(**inputs, labels=labels, fused_head=True)
    torch.testing.assert_close(out.logps, logps, rtol=1e-4, atol=1e-4)
    assert_same_gradients(gradients_of(model, out.logps.sum()), wanted)
    # As the reference: adapters off.
    with model.disable_adapter(), torch.no_grad():
        reference, _, _ = expected(model, inputs, labels)
        out = model(**inputs, labels=labels, fused_head=True)
    assert not torch.allclose(reference, logps, atol=1e-3)
    torch.testing.assert_close(out.logps, reference, rtol=1e-4, atol=1e-4)
    model.merge_adapter()
    out = model(**inputs, labels=labels, fused_head=True)
    torch.testing.assert_close(out.logps, logps, rtol=1e-4, atol=1e-4)


def test_two_loras_on_the_head():
    from peft import LoraConfig

    model = with_lora(family_model("qwen2"), **LORAS["head"])
    model.add_adapter("other", LoraConfig(r=3, target_modules=["lm_head"]))
    with torch.no_grad():
        model.base_model.lm_head.lora_B["other"].weight.normal_(std=0.3)
    model.base_model.set_adapter(["default", "other"])
    inputs, labels = batch_of()
    logps, _, _ = expected(model, inputs, labels)
    wanted = gradients_of(model, logps.sum())
    attach_fused_head(model)
    out = model(**inputs, labels=labels, fused_head=True)
    torch.testing.assert_close(out.logps, logps, rtol=1e-4, atol=1e-4)
    assert_same_gradients(gradients_of(model, out.logps.sum()), wanted)


def test_lora_on_the_head_makes_no_weight():
    """Nothing has the size of the head but one chunk of logits."""
    from grpo_kernels.dense import Gradients

    model = with_lora(family_model("qwen2"), **LORAS["head"])
    attach_fused_head(model)
    inputs, labels = batch_of()
    asked = []
    original = Gradients.__init__

    def watched(self, terms, wanted, **options):
        asked.append(tuple(wanted))
        original(self, terms, wanted, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "__init__", watched)
        model(**inputs, labels=labels, fused_head=Objective(torch.ones(3))).loss.backward()
    assert asked == [(True, False, True, True)]


def test_the_sampled_backward():
    model = make_model("llama")
    inputs, labels = batch_of()
    generator = torch.Generator().manual_seed(0)
    attach_fused_head(model, execution=Execution(backward=Sampled(0.1, generator)))
    advantages = torch.tensor([1.0, -1.0, 0.5])
    out = model(**inputs, labels=labels, fused_head=Objective(advantages))
    assert "gradient_noise" in out.metrics
    other = Objective(advantages, execution=Execution())
    exact = model(**inputs, labels=labels, fused_head=other)
    assert "gradient_noise" not in exact.metrics
    torch.testing.assert_close(out.loss, exact.loss)


def test_bf16_with_a_float32_head():
    model = family_model("llama").bfloat16()
    attach_fused_head(model, float32=True, check=False)
    inputs, labels = batch_of()
    states = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1].double()
    log_p = (states @ model.lm_head.weight.double().T).log_softmax(-1)
    mask = labels[:, 1:] != -100
    wanted = log_p.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0] * mask
    out = model(**inputs, labels=labels, fused_head=True)
    torch.testing.assert_close(out.logps.double(), wanted, rtol=1e-5, atol=1e-4)


class TestMistakes:
    def test_twice(self):
        model = make_model("llama")
        attach_fused_head(model)
        with pytest.raises(ValueError, match="without a fused head"):
            attach_fused_head(model)

    def test_detached_from_nothing(self):
        with pytest.raises(ValueError, match="expected one with a fused head"):
            detach_fused_head(make_model("llama"))

    def test_detached_under_a_wrapper(self):
        model = make_model("llama")
        attach_fused_head(model)
        inner = model.forward
        model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
        with pytest.raises(ValueError, match="wrapped since"):
            detach_fused_head(model)

    def test_no_model(self):
        with pytest.raises(TypeError, match="expected a model of transformers"):
            attach_fused_head(torch.nn.Linear(2, 2))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        (
            ({"temperature": 0.0}, ValueError, "temperature: expected a number > 0; got 0.0"),
            ({"logits_dtype": "bf16"}, ValueError, "logits_dtype: expected 'fp32' or 'model'"),
            ({"execution": "torch"}, TypeError, "execution: expected an Execution; got 'torch'"),
            ({"execution": Execution(backward=Sampled(seed=3))}, ValueError,
             r"seed: expected a torch\.Generator"),
        ),
    )  # fmt: skip
    def test_options(self, options, error, message):
        with pytest.raises(error, match=message):
            attach_fused_head(make_model("llama"), **options)

    def test_logits_of_another_kind(self):
        model = make_model("llama")
        own = model.forward

        def forward(*args, **kwargs):
            out = own(*args, **kwargs)
            out.logits = out.logits.sinh()
            return out

        model.forward = forward
        with pytest.raises(ValueError, match="scaled and capped as the config says"):
            attach_fused_head(model)

    def test_encoder_and_decoder(self):
        config = transformers.T5Config(
            vocab_size=V, d_model=16, d_ff=32, num_layers=1, num_heads=2, d_kv=8
        )
        with pytest.raises(ValueError, match="expected a decoder-only model"):
            attach_fused_head(transformers.T5ForConditionalGeneration(config))

    @pytest.mark.parametrize("kind", ("prompt", "prefix"))
    def test_virtual_tokens(self, kind):
        from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

        config = {"prompt": PromptTuningConfig, "prefix": PrefixTuningConfig}[kind]
        config = config(task_type="CAUSAL_LM", num_virtual_tokens=3)
        with pytest.raises(ValueError, match="virtual tokens before the prompt"):
            attach_fused_head(get_peft_model(family_model("llama"), config))

    def test_dora_on_the_head(self):
        model = with_lora(family_model("qwen2"), target_modules=["lm_head"], use_dora=True)
        with pytest.raises(ValueError, match="without variants such as DoRA"):
            attach_fused_head(model)

    @pytest.mark.parametrize(
        ("given", "message"),
        (
            ({}, "labels: expected token ids .* got neither"),
            ({"labels": "L", "shift_labels": "L"}, "got both"),
            ({"labels": "short"}, r"labels: expected shape \[3, 11\]"),
            ({"labels": "L", "logits_to_keep": 11}, "logits_to_keep: expected at most 10"),
            ({"labels": "L", "logits_to_keep": -1}, "logits_to_keep: expected an int >= 0"),
            ({"labels": "L", "use_cache": True}, "use_cache: expected none"),
        ),
    )
    def test_calls(self, given, message):
        model = make_model("llama")
        attach_fused_head(model)
        inputs, labels = batch_of()
        tensors = {"L": labels, "short": labels[:, :-1]}
        given = {k: tensors.get(v, v) if isinstance(v, str) else v for k, v in given.items()}
        with pytest.raises(ValueError, match=message):
            model(**inputs, fused_head=True, **given)

    @pytest.mark.parametrize("name", ("advantages", "old_logps", "old_logp", "beta", "cu_seqlens"))
    def test_arguments_that_the_model_would_ignore(self, name):
        model = make_model("llama")
        attach_fused_head(model)
        inputs, labels = batch_of()
        with pytest.raises(TypeError, match=f"{name}: expected an argument of LlamaForCausalLM"):
            model(**inputs, labels=labels, fused_head=True, **{name: torch.ones(3)})

    @pytest.mark.parametrize(
        ("given", "error", "message"),
        (
            ({"old_logps": torch.zeros(1)}, ValueError, "advantages: expected a tensor, as old"),
            ({"execution": {}}, TypeError, "execution: expected an Execution; got {}"),
        ),
    )  # fmt: skip
    def test_objectives(self, given, error, message):
        with pytest.raises(error, match=message):
            Objective(**given)

    def test_no_objective(self):
        model = make_model("llama")
        attach_fused_head(model)
        inputs, labels = batch_of()
        with pytest.raises(TypeError, match="fused_head: expected True or an Objective"):
            model(**inputs, labels=labels, fused_head=1.0)

    def test_virtual_tokens_around_a_fused_head(self):
        from peft import PromptTuningConfig, get_peft_model

        model = family_model("llama")
        attach_fused_head(model)
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = get_peft_model(model, config)
        inputs, labels = batch_of()
        with pytest.raises(ValueError, match="input_ids: expected token ids; got inputs_embeds"):
            model(**inputs, labels=labels, fused_head=True)


@pytest.mark.parametrize(
    ("options", "error"),
    (
        ({"mask": torch.ones(9)}, r"mask: expected shape \[4, 9\]; got \[9\]"),  # not broadcast
        ({"mask": [1] * 9}, "mask: expected a tensor; got list"),
        ({"mask": 0.5 * torch.ones(4, 9)}, "mask: expected 0 or 1; got other values"),
        ({"config": {"beta": 0.1}}, "config: expected a GRPOLossConfig; got dict"),
        ({"temperature": 0.0}, "temperature: expected a number > 0"),
        ({"support": [torch.ones(2)]}, "support: expected"),
    ),
)
def test_what_an_objective_does_not_take(options, error):
    model = make_model("llama")
    attach_fused_head(model)
    ids = torch.randint(1, 257, (4, 10), generator=torch.Generator().manual_seed(0))
    with pytest.raises((TypeError, ValueError), match=error):
        model(ids, labels=ids, fused_head=Objective(torch.ones(4), **options))


def test_labels_are_a_tensor():
    model = make_model("llama")
    attach_fused_head(model)
    ids = torch.ones(2, 3, dtype=torch.long)
    for labels, error in ((ids.tolist(), "labels: expected a tensor"), (ids.to("meta"), "meta")):
        with pytest.raises((TypeError, ValueError), match=error):
            model(ids, labels=labels, fused_head=True)

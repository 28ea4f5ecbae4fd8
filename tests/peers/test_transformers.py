"""The fused head on tiny models of many families: their own logits' log-probs and gradients."""

import inspect
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import transformers

from grpo_kernels import GRPOLossConfig, grpo_loss
from grpo_kernels.head.execution import Execution
from grpo_kernels.head.products import INVARIANT_ROWS
from grpo_kernels.integrations.transformers import Objective, attach_fused_head, detach_fused_head
from tests.helpers.head_options import watch_products
from tests.helpers.model_families import COMMON, FAMILIES, LORAS, family_model, llava, with_lora
from tests.helpers.quantised import Quantised
from tests.helpers.tiny_models import V, make_model

pytestmark = pytest.mark.usefixtures("real_memory")
T = 5
ADVANTAGES = torch.tensor([1.0, -0.5, 0.7])


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
    """Log-probs and entropy from the model's own logits, and the mask."""
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


def assert_same_gradients(actual, expected, tolerance=2e-4):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        if float(gradient.norm()) < 1e-7:
            continue
        error = float((actual[name] - gradient).norm() / gradient.norm())
        assert error < tolerance, (name, error)


def check_scores(model, attach=True, temperature=1.0, **more):
    """Log-probs, entropy and gradients by the attached head, against those of the model's logits.

    Returns the names of the parameters that have a gradient.
    """
    inputs, labels = batch_of()
    inputs |= more
    weights = torch.randn(labels[:, 1:].shape, generator=torch.Generator().manual_seed(5))
    *scores, mask = expected(model, inputs, labels, temperature)
    expected_grads = gradients_of(model, (weights * scores[0] + 0.1 * scores[1]).sum())
    if attach:
        attach_fused_head(model, temperature=temperature)
    out = model(**inputs, labels=labels, fused_head=True)
    assert torch.equal(out.mask, mask) and out.loss is None
    for actual, score in zip((out.logps, out.entropy), scores, strict=True):
        torch.testing.assert_close(actual, score, rtol=1e-4, atol=1e-4)
    actual = gradients_of(model, (weights * out.logps + 0.1 * out.entropy).sum())
    assert_same_gradients(actual, expected_grads)
    return set(expected_grads)


def with_head(model=None, **options):
    """A model with a fused head, and `call(request)` on the batch, with its labels."""
    model = make_model("llama") if model is None else model
    attach_fused_head(model, **options)
    inputs, labels = batch_of()

    def call(request=True, **more):
        return model(**{**inputs, "labels": labels, "fused_head": request, **more})

    return model, call


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    check_scores(family_model(family), temperature=0.7)
    # Rounded logits are no reason to refuse a model.
    for dtype in (torch.bfloat16, torch.float16):
        attach_fused_head(family_model(family).to(dtype))


def test_vision_language_model():
    ids = batch_of()[0]["input_ids"]
    ids[:, 2:6] = 3  # four patches
    check_scores(llava(), input_ids=ids, pixel_values=torch.randn(3, 3, 8, 8))


def test_a_body_by_another_name_than_the_model_says():
    from transformers.models.mllama.modeling_mllama import MllamaForCausalLM, MllamaTextConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = MllamaTextConfig(**COMMON, cross_attention_layers=[], rope_parameters=rope)
    torch.manual_seed(0)
    model = MllamaForCausalLM(config).float().eval()
    assert model.base_model is model
    check_scores(model)


def test_a_softcap_of_a_model_without_a_mask():
    """The softcap of xLSTM is 30: small logits do not show it."""
    config = transformers.xLSTMConfig(
        vocab_size=V, hidden_size=32, embedding_dim=32, num_hidden_layers=2, num_blocks=2,
        num_heads=2, chunk_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    attach_fused_head(model)
    inputs, labels = batch_of()
    del inputs["attention_mask"]
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
        model.lm_head.weight.mul_(60.0 / logits.abs().max())
        assert model(**inputs, use_cache=False).logits.abs().max() > 20.0
        expected_logps, _, _ = expected(model, inputs, labels)
        out = model(**inputs, labels=labels, fused_head=True)
    torch.testing.assert_close(out.logps, expected_logps, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("when", ("before", "after"))
@pytest.mark.parametrize("kind", LORAS)
def test_lora(kind, when):
    model = family_model("qwen2")
    if when == "before":
        attach_fused_head(model)
    model = with_lora(model, **LORAS[kind])
    trained = check_scores(model, attach=when == "after")
    assert any("lm_head" in name for name in trained) == (kind != "body")
    inputs, labels = batch_of()
    logps = model(**inputs, labels=labels, fused_head=True).logps
    # The reference: adapters off.
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
    check_scores(model)


@pytest.mark.parametrize("objective", ("dapo", "gspo"))
def test_loss(objective):
    model = make_model("llama")
    inputs, labels = batch_of()
    config = GRPOLossConfig(loss_type=objective, beta=0.1)
    logps, _, mask = expected(model, inputs, labels)
    old, ref = (
        logps.detach() + 0.3 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(s))
        for s in (1, 2)
    )
    kwargs = {"old_logps": old, "ref_logps": ref, "config": config}
    loss = grpo_loss(logps, ADVANTAGES, mask, **kwargs).loss
    expected_grads = gradients_of(model, loss)
    _, call = with_head(model)
    out = call(Objective(ADVANTAGES, **kwargs))
    torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-6)
    assert not out.logps.requires_grad and out.metrics["tokens"] == mask.sum()
    assert_same_gradients(gradients_of(model, out.loss), expected_grads)
    # The last T labels alone, in whose shape the rest then comes.
    last = {"old_logps": old[:, -T:], "ref_logps": ref[:, -T:], "config": config}
    summed = call(Objective(ADVANTAGES, **last), logits_to_keep=T)
    assert summed.logps.shape == (3, T)
    torch.testing.assert_close(summed.loss, out.loss)
    # A mask of the caller's own, as of a tool's words.
    spoken = torch.ones_like(mask)
    spoken[:, -1] = False
    masked = call(Objective(ADVANTAGES, mask=spoken, **kwargs)).loss
    torch.testing.assert_close(masked, grpo_loss(logps, ADVANTAGES, mask & spoken, **kwargs).loss)


def test_cross_entropy_beside_the_loss():
    """On labels that the mask leaves out, such as what a tool answered."""
    model = make_model("llama")
    inputs, labels = batch_of()
    logps, _, scored = expected(model, inputs, labels)
    spoken = torch.ones_like(scored)
    spoken[:, -1] = False
    ce_weights = 0.1 * torch.rand(scored.shape, generator=torch.Generator().manual_seed(1))
    ce_weights[:, :-2] = 0.0
    ce_weights[~scored] = 0.0
    loss = grpo_loss(logps, ADVANTAGES, scored & spoken).loss - (ce_weights * logps).sum()
    expected_grads = gradients_of(model, loss)
    _, call = with_head(model)
    out = call(Objective(ADVANTAGES, mask=spoken, ce_weights=ce_weights))
    torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-6)
    assert torch.equal(out.mask, (scored & spoken) | (ce_weights != 0))
    assert (out.logps[out.mask] != 0).all() and out.metrics["ce_tokens"] == (ce_weights != 0).sum()
    assert_same_gradients(gradients_of(model, out.loss), expected_grads)
    with pytest.raises(ValueError, match="targets: expected ids in"):
        call(Objective(ADVANTAGES, ce_weights=torch.ones_like(ce_weights)))


@pytest.mark.parametrize("loss_type", ("dapo", "grpo"))
def test_a_trainer_of_transformers_accumulates(loss_type, tmp_path):
    """The Trainer passes `num_items_in_batch` and does not divide by the accumulation steps."""
    g = torch.Generator().manual_seed(0)
    rows = [(torch.randint(5, 60, (7,), generator=g), (-1.0) ** i) for i in range(4)]

    def batch(some):
        ids = torch.stack([ids for ids, _ in some])
        advantages = torch.tensor([a for _, a in some])
        options = {"num_items": 4} if loss_type == "grpo" else {}
        objective = Objective(advantages, config=GRPOLossConfig(loss_type=loss_type), **options)
        return {"input_ids": ids, "labels": ids, "fused_head": objective}

    model, _ = with_head(family_model("qwen2"))
    model(**batch(rows)).loss.backward()
    gradient = model.lm_head.weight.grad
    assert gradient.norm() > 1e-3
    for size in (4, 2):
        model, _ = with_head(family_model("qwen2"))
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=size, gradient_accumulation_steps=4 // size,
            max_steps=1, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant",
            max_grad_norm=0.0, remove_unused_columns=False, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        before = model.lm_head.weight.detach().clone()
        transformers.Trainer(model, arguments, batch, rows).train()
        step = before - model.lm_head.weight.detach()
        torch.testing.assert_close(step, gradient, rtol=1e-4, atol=1e-6)


def merged(model):
    model.merge_adapter()
    return model


# Models as they are when states are taken of them, and what then changes the head.
STATES = {
    "untied": lambda: family_model("qwen2"),
    "tied": lambda: family_model("llama"),
    "bias": lambda: family_model("phi"),
    "LoRA": lambda: with_lora(family_model("qwen2"), **LORAS["head"]),
    "merged LoRA": lambda: merged(with_lora(family_model("qwen2"), **LORAS["head"])),
    "copied": lambda: with_lora(family_model("qwen2"), **LORAS["head_copied"]),
}


@pytest.mark.parametrize("case", STATES)
@pytest.mark.parametrize("grad", (False, True))
def test_states_are_of_the_model_as_it_was(case, grad):
    """A step of a fused optimizer leaves no trace on a tensor's version."""
    model, call = with_head(STATES[case]())
    inputs, labels = batch_of()

    def log_p():
        with torch.no_grad():
            return model(**inputs).logits[:, :-1].double().log_softmax(-1)

    states, old = Objective(states=True), log_p()
    with torch.set_grad_enabled(grad):
        call(states)
    if case == "merged LoRA":
        model.unmerge_adapter()
        with torch.no_grad():
            model.base_model.model.lm_head.lora_B["default"].weight.mul_(2.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        call().logps.sum().backward()
        optimizer.step()
    config = GRPOLossConfig(beta=0.5, kl_estimator="exact")
    out = call(Objective(torch.ones(3), config=config, reference=states.reference))
    new = log_p()
    kl = (new.exp() * (new - old)).sum(-1)[labels[:, 1:] != -100].mean()
    assert kl > 1e-3
    torch.testing.assert_close(out.metrics["kl"].double(), kl, rtol=1e-4, atol=1e-6)
    out.loss.backward()


def test_a_frozen_head_is_not_copied():
    model, call = with_head(family_model("qwen2").requires_grad_(False))
    call(states := Objective(states=True))
    assert states.reference.head.weight.data_ptr() == model.lm_head.weight.data_ptr()


@pytest.mark.parametrize("kind", (int, float, torch.tensor))
def test_the_parts_of_a_step_add_up(kind):
    """Micro-batches' losses, divided by the Trainer's `num_items_in_batch`, sum to the batch's."""
    model, call = with_head()
    (inputs, labels), advantages = batch_of(), torch.tensor([1.0, -0.5, 0.7])
    items = int((labels[:, 1:] != -100).sum())

    def loss(rows, **kwargs):
        ids = {name: x[rows] for name, x in inputs.items()}
        return call(Objective(advantages[rows]), **ids, labels=labels[rows], **kwargs).loss

    total = loss(slice(0, 3))
    parts = [loss(rows, num_items_in_batch=kind(items)) for rows in (slice(0, 2), slice(2, 3))]
    torch.testing.assert_close(sum(parts), total)
    assert_same_gradients(gradients_of(model, sum(parts)), gradients_of(model, total))


@pytest.mark.parametrize("name", ("qwen2", "gpt2", "gemma2"))
def test_a_config_that_asks_for_another_result(name):
    model, call = with_head(family_model(name))
    expected_logps = call().logps
    model.config.return_dict, model.config.output_hidden_states = False, True
    torch.testing.assert_close(call(past_key_values=None).logps, expected_logps)


def test_labels_shifted_already():
    _, call = with_head()
    shifted = torch.nn.functional.pad(batch_of()[1][:, 1:], (0, 1), value=-100)
    out = call(labels=None, shift_labels=shifted)
    torch.testing.assert_close(out.logps[:, :-1], call().logps)


def test_otherwise_the_model_is_as_it_was():
    model = make_model("gemma2").eval()
    inputs, labels = batch_of()
    ids = inputs["input_ids"][:, :4]
    before = model(**inputs, labels=labels)
    words = model.generate(ids, max_new_tokens=6, do_sample=False)
    signature = inspect.signature(model.forward)
    attach_fused_head(model)
    after = model(**inputs, labels=labels)
    torch.testing.assert_close(after.logits, before.logits)
    torch.testing.assert_close(after.loss, before.loss)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), words)
    assert inspect.signature(model.forward) == signature
    with pytest.raises(ValueError, match="model_kwargs"):
        model.generate(ids, max_new_tokens=2, nonsense=True)
    detach_fused_head(model)
    assert "forward" not in vars(model)
    assert not hasattr(model(**inputs, labels=labels), "logps")
    attach_fused_head(model)


def test_accelerate_leaves_it_alone():
    """Unwrapping a model follows `__wrapped__` of its forward."""
    from accelerate.utils import extract_model_from_parallel

    model, _ = with_head()
    inputs, labels = batch_of()
    for keep in (True, False):
        unwrapped = extract_model_from_parallel(model, keep_fp32_wrapper=keep)
        assert unwrapped(**inputs, labels=labels, fused_head=True).logps is not None


def test_gradient_checkpointing():
    model, call = with_head(make_model("llama").train())
    expected_grads = gradients_of(model, call().logps.sum())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_gradients(gradients_of(model, call().logps.sum()), expected_grads, 1e-5)


def test_load_balancing_of_experts():
    """The auxiliary loss is the model's, whether arguments come by name or by position."""
    model = family_model("mixtral")
    inputs, labels = batch_of()
    plain = model(**inputs, labels=labels)
    _, call = with_head(model)
    by_name = call()
    by_position = model(*inputs.values(), labels=labels, fused_head=True)
    for out in (by_name, by_position):
        torch.testing.assert_close(out.aux_loss, plain.aux_loss)
        torch.testing.assert_close(out.logps, by_name.logps)
        assert out.aux_loss.requires_grad


def test_the_execution(monkeypatch):
    """Each product of an invariant call has as many rows."""
    watch_products(monkeypatch, product := MagicMock(wraps=torch.mm))
    _, call = with_head(execution=Execution(batch_invariant=True))
    loss = call(Objective(ADVANTAGES)).loss
    assert {len(call.args[0]) for call in product.mock_calls} == {INVARIANT_ROWS}
    product.reset_mock()
    other = call(Objective(ADVANTAGES, execution=Execution())).loss
    torch.testing.assert_close(other, loss)
    assert product.called
    assert not any(len(call.args[0]) == INVARIANT_ROWS for call in product.mock_calls)


@pytest.mark.parametrize("kinds", ((np.float32, np.int64), (np.array, np.array)), ids=str)
def test_numbers_of_numpy(kinds):
    real, whole = kinds
    expected, actual = (
        with_head(temperature=first)[1](
            Objective(ADVANTAGES, temperature=second, num_items=items), logits_to_keep=keep
        )
        for first, second, items, keep in (
            (0.5, 0.75, 7, T), (real(0.5), real(0.75), whole(7), whole(T)),
        )
    )  # fmt: skip
    assert torch.equal(actual.loss, expected.loss) and torch.equal(actual.logps, expected.logps)
    assert expected.loss != 0 and actual.logps.shape[1] == T


def test_advantages_are_numbers():
    _, call = with_head()
    with pytest.raises(ValueError, match=r"^advantages: expected finite numbers at unmasked"):
        call(Objective(ADVANTAGES.clone().index_fill(0, torch.tensor([0]), torch.nan)))


def test_bf16_with_a_float32_head():
    model, call = with_head(family_model("llama").bfloat16(), float32=True, check=False)
    inputs, labels = batch_of()
    states = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1].double()
    log_p = (states @ model.lm_head.weight.double().T).log_softmax(-1)
    mask = labels[:, 1:] != -100
    expected_logps = log_p.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0] * mask
    torch.testing.assert_close(call().logps.double(), expected_logps, rtol=1e-5, atol=1e-4)


def virtual_tokens(kind, model):
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(model, config)


def adalora():
    from peft import AdaLoraConfig, get_peft_model

    config = AdaLoraConfig(target_modules=["lm_head"], total_step=10, task_type="CAUSAL_LM")
    return get_peft_model(family_model("qwen2"), config)


def kosmos():
    text = {"vocab_size": V, "embed_dim": 16, "layers": 1, "ffn_dim": 16, "attention_heads": 2}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "head_dim": 8}  # fmt: skip
    return transformers.Kosmos2_5ForConditionalGeneration(
        transformers.Kosmos2_5Config(text_config=text, vision_config=vision)
    )


def quantised():
    model = family_model("qwen2")
    weight = Quantised(model.lm_head.weight.detach())
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


T5 = {"vocab_size": V, "d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}
ELECTRA = {"vocab_size": V, "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 1,
           "num_attention_heads": 2, "intermediate_size": 32, "is_decoder": True}  # fmt: skip
DORA = {"target_modules": ["lm_head"], "use_dora": True}
# id: (a model, options of `attach_fused_head`, the error)
NOT_ATTACHED = {
    "twice": (lambda: with_head()[0], {"keyword": "other"}, "has a fused head already"),
    "no model": (lambda: torch.nn.Linear(2, 2), {}, "expected a model of transformers"),
    "encoder": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)), {},
        "expected a decoder-only model",
    ),
    **{
        kind: (lambda kind=kind: virtual_tokens(kind, family_model("llama")), {},
               "virtual tokens before the prompt")
        for kind in ("PromptTuningConfig", "PrefixTuningConfig")
    },
    "dora": (lambda: with_lora(family_model("qwen2"), **DORA), {}, "no variant such as DoRA"),
    "adalora": (adalora, {}, r"no variant such as DoRA.; got .*adalora\.layer\.SVDLinear"),
    "body": (kosmos, {}, "layers are in one module .*; got Kosmos2_5ForConditionalGeneration"),
    "head of a transform": (
        lambda: transformers.ElectraForCausalLM(transformers.ElectraConfig(**ELECTRA)), {},
        "those of ElectraForCausalLM differ by inf",
    ),
    "quantised": (quantised, {}, "got Linear with a Quantised: exclude the output layer"),
    "temperature": (None, {"temperature": 0.0}, "temperature: expected a number > 0, .*; got 0.0"),
    "logits_dtype": (None, {"logits_dtype": "bf16"}, "logits_dtype: expected 'fp32' or 'model'"),
    "execution": (None, {"execution": "torch"}, "execution: expected an Execution; got 'torch'"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_ATTACHED)
def test_models_and_options_that_are_refused(case):
    make, options, message = NOT_ATTACHED[case]
    model = make() if make else make_model("llama")
    with pytest.raises((TypeError, ValueError), match=message):
        attach_fused_head(model, **options)


def test_detached_from_nothing_or_under_a_wrapper():
    with pytest.raises(ValueError, match="has no fused head"):
        detach_fused_head(make_model("llama"))
    model, _ = with_head()
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    with pytest.raises(ValueError, match="wrapped after"):
        detach_fused_head(model)

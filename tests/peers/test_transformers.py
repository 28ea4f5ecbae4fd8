"""The fused head on tiny models of many families: their own logits' log-probs and gradients."""

import inspect
from itertools import product
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
from tests.helpers.model_families import FAMILIES, LORAS, family_model, llava, with_lora
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


def two_loras():
    from peft import LoraConfig

    model = with_lora(family_model("qwen2"), **LORAS["head"])
    model.add_adapter("other", LoraConfig(r=3, target_modules=["lm_head"]))
    with torch.no_grad():
        model.base_model.lm_head.lora_B["other"].weight.normal_(std=0.3)
    model.base_model.set_adapter(["default", "other"])
    return model


OTHERS = {"llava": llava, "two LoRAs": two_loras}


@pytest.mark.parametrize("name", (*FAMILIES, *OTHERS))
def test_log_probs(name):
    if name in FAMILIES:
        check_scores(family_model(name), temperature=0.7)
        # Rounded logits are no reason to refuse a model.
        for dtype in (torch.bfloat16, torch.float16):
            attach_fused_head(family_model(name).to(dtype))
        return
    ids, more = batch_of()[0]["input_ids"], {}
    if name == "llava":
        ids[:, 2:6] = 3  # four patches
        more = {"input_ids": ids, "pixel_values": torch.randn(3, 3, 8, 8)}
    check_scores(OTHERS[name](), **more)


def test_a_softcap_of_a_model_without_a_mask():
    """The softcap of xLSTM is 30: small logits do not show it; attaching would refuse the model."""
    config = transformers.xLSTMConfig(
        vocab_size=V, hidden_size=32, embedding_dim=32, num_hidden_layers=2, num_blocks=2,
        num_heads=2, chunk_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    attach_fused_head(model)


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


MODELS = {
    "tied": lambda: family_model("llama"),
    "bias": lambda: family_model("phi"),
    "softcap": lambda: family_model("gemma2"),
    "LoRA": lambda: with_lora(family_model("qwen2"), **LORAS["head"]),
}
# Options of the config, and the tensors of an objective.
OBJECTIVES = {
    "dapo": ({"beta": 0.1}, ("old_logps", "ref_logps")),
    "gspo": ({"loss_type": "gspo", "beta": 0.1}, ("old_logps", "ref_logps")),
    "tool": ({}, ("mask", "sampling_logps")),
    # Also of labels that the mask leaves out, such as what a tool answered.
    "cross-entropy": ({}, ("mask", "ce_weights")),
}
# How a call's labels and sequences come.
LAYOUTS = ("padded", "last labels", "shifted labels", "packed")


def tensors_of(scored, logps):
    """Per-token arguments of an objective; the mask leaves the last token out."""
    g = torch.Generator().manual_seed(1)
    spoken = torch.ones_like(scored)
    spoken[:, -1] = False
    ce_weights = 0.1 * torch.rand(scored.shape, generator=g) * scored
    ce_weights[:, :-2] = 0.0
    names = ("old_logps", "ref_logps", "sampling_logps")
    near = {n: logps.detach() + 0.3 * torch.randn(logps.shape, generator=g) for n in names}
    return {"mask": spoken, "ce_weights": ce_weights, **near}


@pytest.mark.parametrize(
    ("objective", "layout"),
    [x for x in product(OBJECTIVES, LAYOUTS) if x != ("gspo", "packed")],  # which is refused
)
def test_the_loss(objective, layout):
    """Loss and gradients of each objective in each layout, of the models in turn."""
    turn = [*OBJECTIVES].index(objective) + LAYOUTS.index(layout)
    model, (inputs, labels) = MODELS[[*MODELS][turn % 4]](), batch_of()
    if layout == "packed":  # a second sequence begins within each row
        inputs["position_ids"] = torch.cat([torch.arange(7), torch.arange(4)]).expand(3, 11)
    options, names = OBJECTIVES[objective]
    config = GRPOLossConfig(**options)
    logps, _, scored = expected(model, inputs, labels)
    tensors = {name: x for name, x in tensors_of(scored, logps).items() if name in names}
    mask = scored & tensors.get("mask", scored)
    rest = {k: x for k, x in tensors.items() if k != "mask"}
    loss = grpo_loss(logps, ADVANTAGES, mask, config=config, **rest).loss
    expected_grads = gradients_of(model, loss)
    attach_fused_head(model)
    call = {**inputs, "labels": labels}
    if layout == "last labels":
        tensors, call["logits_to_keep"] = {k: x[:, -T:] for k, x in tensors.items()}, np.array(T)
    elif layout == "shifted labels":
        end = torch.nn.functional.pad
        tensors = {k: end(x, (0, 1)) for k, x in tensors.items()}
        call["shift_labels"] = end(call.pop("labels")[:, 1:], (0, 1), value=-100)
    out = model(**call, fused_head=Objective(ADVANTAGES, config=config, **tensors))
    torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-6)
    assert not out.logps.requires_grad and out.metrics["tokens"] == mask.sum()
    counted = mask | (rest["ce_weights"] != 0) if "ce_weights" in rest else mask
    assert torch.equal(out.logps != 0, out.mask) and out.mask.sum() == counted.sum()
    assert_same_gradients(gradients_of(model, out.loss), expected_grads)


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
    **{name: MODELS[name] for name in ("tied", "bias", "LoRA")},
    "merged LoRA": lambda: merged(MODELS["LoRA"]()),
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


@pytest.mark.parametrize("name", ("qwen2", "gpt2"))
def test_a_config_that_asks_for_another_result(name):
    model, call = with_head(family_model(name))
    expected_logps = call().logps
    model.config.return_dict, model.config.output_hidden_states = False, True
    torch.testing.assert_close(call(past_key_values=None).logps, expected_logps)


def test_otherwise_the_model_is_as_it_was():
    from accelerate.utils import extract_model_from_parallel

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
    # Unwrapping a model follows `__wrapped__` of its forward.
    unwrapped = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert unwrapped(**inputs, labels=labels, fused_head=True).logps is not None
    detach_fused_head(model)
    assert "forward" not in vars(model)
    assert not hasattr(model(**inputs, labels=labels), "logps")
    attach_fused_head(model)


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
    """Each product of an invariant call has as many rows; an objective may have its own."""
    watch_products(monkeypatch, mm := MagicMock(wraps=torch.mm))
    _, call = with_head(execution=Execution(batch_invariant=True))
    loss = call(Objective(ADVANTAGES)).loss
    assert {len(call.args[0]) for call in mm.mock_calls} == {INVARIANT_ROWS}
    mm.reset_mock()
    other = call(Objective(ADVANTAGES, execution=Execution(), temperature=np.array(1.0))).loss
    torch.testing.assert_close(other, loss)
    assert mm.called
    assert not any(len(call.args[0]) == INVARIANT_ROWS for call in mm.mock_calls)


def test_bf16_with_a_float32_head():
    model, call = with_head(family_model("llama").bfloat16(), float32=True, check=False)
    inputs, labels = batch_of()
    states = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1].double()
    log_p = (states @ model.lm_head.weight.double().T).log_softmax(-1)
    mask = labels[:, 1:] != -100
    expected_logps = log_p.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0] * mask
    torch.testing.assert_close(call().logps.double(), expected_logps, rtol=1e-5, atol=1e-4)

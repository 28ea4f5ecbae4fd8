"""Checks of a fused head: at attachment against the model's logits, and at each call."""

from unittest.mock import MagicMock

import pytest
import torch
from transformers.utils import TransformersKwargs

from grpo_kernels import GRPOLossConfig
from grpo_kernels.integrations.call_arguments import Labels, check_one_sequence
from grpo_kernels.integrations.hf_head import check_logits
from grpo_kernels.integrations.transformers import Objective, attach_fused_head, detach_fused_head
from tests.helpers.model_families import LORAS, family_model, with_lora
from tests.peers.test_transformers import (
    assert_same_gradients,
    batch_of,
    check_scores,
    expected,
    gradients_of,
    with_head,
)

pytestmark = pytest.mark.usefixtures("real_memory")


def lora_model(kind):
    return with_lora(family_model("qwen2"), **LORAS[kind])


def test_an_adapter_per_row_of_the_body():
    """PEFT puts it into hooks of the layers; of a head, which is not called, it is refused."""
    inputs, labels = batch_of()
    names = ["default", "__base__", "default"]
    model = lora_model("body").eval()
    check_scores(model)
    with torch.no_grad():
        expected_logps, _, _ = expected(model, inputs | {"adapter_names": names}, labels)
        out = model(**inputs, labels=labels, fused_head=True, adapter_names=names)
        assert not torch.allclose(expected_logps, expected(model, inputs, labels)[0], atol=1e-3)
    torch.testing.assert_close(out.logps, expected_logps, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("part", "kind"),
    (
        ("lm_head.lora_A.default", "forward_hook"),
        ("lm_head.lora_dropout.default", "full_backward_hook"),
        ("model.norm", "full_backward_hook"),
    ),
)
def test_hooks_on_what_is_called_run(part, kind):
    model, call = with_head(lora_model("head"))
    getattr(model.base_model.model.get_submodule(part), f"register_{kind}")(
        lambda *x: 2 * x[2] if kind == "forward_hook" else tuple(2 * d for d in x[1])
    )
    expected_grads = gradients_of(model, expected(model, *batch_of())[0].sum())
    assert_same_gradients(gradients_of(model, call().logps.sum()), expected_grads)


def test_accelerates_hooks_on_the_head():
    """Hooks that move states to a layer's device run."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = family_model("qwen2")
    add_hook_to_module(model.lm_head, AlignDevicesHook("cpu", io_same_device=True))
    check_scores(model)


def test_autocast_inside_a_wrapped_forward_is_known():
    """Accelerate wraps it so, and returns float32."""
    model = family_model("llama")
    original = model.forward

    def wrapped(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            out = original(*args, **kwargs)
        out.logits = out.logits.float()
        return out

    model.forward = wrapped
    check_logits(model)


def half_lora(model):
    """The model with a LoRA on its head, in the model's dtype."""
    return with_lora(model, **LORAS["head"]).to(model.dtype)


# Models whose logits take more than one step, from one in half precision.
ROUNDED = {
    **{name: (name, lambda x: x) for name in (
        "phi", "gemma2", "recurrent_gemma", "nanochat", "cohere", "granitemoe", "falcon_h1")},
    "lora": ("qwen2", lambda x: with_lora(x, **LORAS["head"])),
    "lora of its dtype": ("qwen2", half_lora),
    "lora, softcap": ("gemma2", half_lora),
}  # fmt: skip


@pytest.mark.parametrize("case", ROUNDED)
def test_rounded_logits_are_the_model_s_own(case):
    family, change = ROUNDED[case]
    model = change(family_model(family).to(torch.bfloat16)).eval()
    inputs, labels = batch_of()
    gaps = {}
    with torch.no_grad():
        logps, _, _ = expected(model, inputs, labels)
        for kind in ("fp32", "model"):
            attach_fused_head(model, logits_dtype=kind)
            out = model(**inputs, labels=labels, fused_head=True)
            gaps[kind] = (out.logps - logps).abs().mean().item()
            detach_fused_head(model)
    # Sums and tanh that lie between two half-precision numbers may go the other way.
    assert gaps["model"] < 0.1 * gaps["fp32"]


# Values of transformers' own arguments of all models, of which none may be left out.
KNOWN = {
    "num_items_in_batch": 9, "output_hidden_states": True, "output_attentions": True,
    "return_dict": False, "past_key_values": (), "cache": (),
}  # fmt: skip
LAYERS = {"output_router_logits": True, "is_causal": True, "max_length_q": 11, "max_length_k": 11,
          "seq_idx": None, "cu_seq_lens_q": None, "cu_seq_lens_k": None,
          "position_ids": torch.arange(11).expand(3, 11)}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*TransformersKwargs.__annotations__, *KNOWN}))
def test_what_transformers_hands_to_any_model_is_used_or_refused(name):
    model, call = with_head(family_model("qwen3_moe"))
    if name in LAYERS:
        body = MagicMock(wraps=model.model.forward)
        model.model.forward = body
        call(**{name: LAYERS[name]})
        assert body.call_args.kwargs[name] is LAYERS[name]
        return
    refusal = rf"^'?{name}\b.*(does not work|is not an argument)"
    with pytest.raises((TypeError, ValueError), match=refusal):
        call(**{name: KNOWN.get(name, 1)})
    harmless = {"return_dict": True}.get(name, False if "output" in name else None)
    if name in KNOWN and name not in ("past_key_values", "cache"):
        call(**{name: harmless})


def sequence_loss(model, ids, labels, mask=None, **more):
    """A loss that needs one sequence per row, and its gradients."""
    advantages = torch.tensor([1.0, -0.5, 0.7])[: len(ids)]
    config = GRPOLossConfig(loss_type="gspo")
    old_logps = torch.full(labels[:, 1:].shape, -5.0)
    objective = Objective(advantages, config=config, old_logps=old_logps, mask=mask)
    loss = model(ids, labels=labels, fused_head=objective, **more).loss
    return loss, gradients_of(model, loss)


@pytest.mark.parametrize("padding", (0, 1))
def test_positions_of_padding_are_no_sequence(padding):
    """On the left of one row and on the right of another, with positions of any kind."""
    model, _ = with_head()
    inputs, _ = batch_of()
    ids, attention = inputs.values()
    labels = ids.masked_fill(attention == 0, -100)
    labels[0, 2] = -100  # of the first token after padding
    positions = (attention.cumsum(-1) - 1).masked_fill(attention == 0, padding)
    kinds = positions, positions[None].expand(3, -1, -1), positions[None].expand(4, -1, -1)
    for of_a_kind in kinds:
        scored = labels[:, 1:] != -100
        check_one_sequence({"position_ids": of_a_kind}, Labels(labels, False, 0), scored, "gspo")
    # Tokens that the loss's own mask leaves out are not scored either.
    masked = {"labels": ids, "mask": attention[:, 1:] * (labels[:, 1:] != -100)}
    sequence_loss(model, ids, **masked, attention_mask=attention, position_ids=positions)
    loss, _ = sequence_loss(model, ids, labels, attention_mask=attention, position_ids=positions)
    rows = [ids[i, attention[i] == 1][None] for i in range(3)]
    apart = [model(row, labels=row, fused_head=True).logps for row in rows]
    together = model(
        ids, labels=labels, attention_mask=attention, position_ids=positions, fused_head=True
    )
    torch.testing.assert_close(together.logps[together.mask], torch.cat(apart, 1)[0])
    assert loss.isfinite() and loss != 0


def test_one_scored_sequence_of_a_row():
    """The others are context of nobody: the loss is that of the sequence alone."""
    model, _ = with_head()
    ids = batch_of()[0]["input_ids"]
    labels = ids.clone()
    labels[:, :5] = -100  # none of the first sequence's four, nor the first of the second's seven
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None].expand(3, -1)
    loss, grads = sequence_loss(model, ids, labels, position_ids=positions)
    alone, expected_grads = sequence_loss(model, ids[:, 4:], labels[:, 4:])
    assert abs(alone) > 1e-3
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-6)
    assert_same_gradients(grads, expected_grads)

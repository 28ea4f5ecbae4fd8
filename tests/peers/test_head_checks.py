"""What a fused head is compared with when it is attached, and what it refuses at a call."""

import pytest
import torch

from grpo_kernels.integrations.hf_head import check_logits
from grpo_kernels.integrations.transformers import attach_fused_head
from tests.helpers.model_families import LORAS, family_model, with_lora
from tests.peers.test_transformers import batch_of, check_scores, expected, hooked, with_head

pytestmark = pytest.mark.usefixtures("real_memory")


def test_an_adapter_per_row_is_refused_on_the_head_alone():
    """PEFT puts it into hooks of the layers, which a head that is not called does not run."""
    inputs, labels = batch_of()
    names = ["default", "__base__", "default"]
    model = with_lora(family_model("qwen2"), **LORAS["body"]).eval()
    check_scores(model)
    with torch.no_grad():
        wanted, _, _ = expected(model, inputs | {"adapter_names": names}, labels)
        out = model(**inputs, labels=labels, fused_head=True, adapter_names=names)
        assert not torch.allclose(wanted, expected(model, inputs, labels)[0], atol=1e-3)
    torch.testing.assert_close(out.logps, wanted, rtol=1e-4, atol=1e-4)
    for kind in ("head", "head_copied"):
        model = with_lora(family_model("qwen2"), **LORAS[kind]).eval()
        attach_fused_head(model)
        with pytest.raises(ValueError, match=r"without hooks .* \(PEFT's adapter_names\)"):
            model(**inputs, labels=labels, fused_head=True, adapter_names=names)


def test_what_only_a_call_of_the_head_would_run_is_refused():
    model, inputs, labels = with_head(family_model("qwen2"))
    hooked(model)
    with pytest.raises(ValueError, match=r"model: expected .* without hooks .*; got .*double"):
        model(**inputs, labels=labels, fused_head=True)
    model, inputs, labels = with_head(family_model("qwen2"))
    own = model.lm_head.forward
    model.lm_head.forward = lambda states: 2 * own(states)
    with pytest.raises(ValueError, match=r"without a forward of its own, .*; got .*lambda"):
        model(**inputs, labels=labels, fused_head=True)


def test_accelerates_hooks_on_the_head():
    """They move states to where a layer is; weights that they load for a call alone are refused."""
    from accelerate import cpu_offload
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = family_model("qwen2")
    add_hook_to_module(model.lm_head, AlignDevicesHook("cpu", io_same_device=True))
    check_scores(model)
    model = family_model("qwen2")
    cpu_offload(model)
    inputs, labels = batch_of()
    attach_fused_head(model)
    with pytest.raises(ValueError, match=r"model: expected .* in memory; .*cpu_offload"):
        model(**inputs, labels=labels, fused_head=True)
    with pytest.raises(ValueError, match=r"model: expected .* in memory; .*cpu_offload"):
        check_logits(model)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    "change",
    (
        torch.sinh,
        lambda x: 0.96 * x,
        lambda x: x.clamp(-50.0, 50.0),
        lambda x: 30.0 * (x / 30.0).tanh(),
        lambda x: x - 9.0 * (x > 60.0),
        lambda x: x[..., :-1],
    ),
    ids=("sinh", "factor", "clamp", "softcap", "large", "fewer"),
)
def test_logits_of_another_kind_are_refused_while_they_are_small(change, dtype):
    model = family_model("qwen2").to(dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.05)
    own = model.forward

    def forward(*args, **kwargs):
        out = own(*args, **kwargs)
        out.logits = change(out.logits)
        return out

    model.forward = forward
    inputs, _ = batch_of()
    assert own(**inputs).logits.abs().max() < 2
    with pytest.raises(ValueError, match="scaled and capped as the config says; those of Qwen2"):
        attach_fused_head(model)


def test_autocast_inside_a_wrapped_forward_is_known():
    """Accelerate wraps it so, and returns float32."""
    model = family_model("llama")
    own = model.forward

    def forward(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            out = own(*args, **kwargs)
        out.logits = out.logits.float()
        return out

    model.forward = forward
    check_logits(model)

"""Copies of a model with a fused head, in memory and by pickle: each has its own head."""

import copy
import math
import pickle
import types

import pytest
import torch
import transformers
from accelerate import Accelerator

from grpo_kernels.integrations.transformers import (
    Objective,
    attach_fused_head,
    detach_fused_head,
    has_fused_head,
)
from tests.helpers.model_families import LORAS, family_model, with_lora
from tests.helpers.tiny_models import V
from tests.peers.test_transformers import (
    ADVANTAGES,
    assert_same_gradients,
    batch_of,
    gradients_of,
)

pytestmark = pytest.mark.usefixtures("real_memory", "own_precision")


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=0)),
}


OWN = 42.0  # the loss of a forward that the instance has


def attached(model, **options):
    attach_fused_head(model, keyword="fused", temperature=0.7, **options)
    return model


def with_own_forward():
    """A model whose instance has a forward, as Liger and others patch one."""
    model = family_model("qwen2")

    def forward(self, *args, **kwargs):
        out = transformers.Qwen2ForCausalLM.forward(self, *args, **kwargs)
        out.loss = torch.tensor(OWN)
        return out

    model.forward = types.MethodType(forward, model)
    return attached(model)


# Modules that contain a model with a fused head.
MODULES = {
    "model": lambda: attached(family_model("qwen2")),
    "own forward": with_own_forward,
    "within LoRA": lambda: with_lora(attached(family_model("qwen2")), **LORAS["head"]),
    "accelerate": lambda: Accelerator(cpu=True, mixed_precision="bf16").prepare(
        attached(family_model("qwen2"))
    ),
}


@pytest.mark.parametrize("by", COPIES)
@pytest.mark.parametrize("case", MODULES)
def test_a_copy_has_its_own_head(case, by):
    inputs, labels = batch_of()
    module = MODULES[case]()
    copied = COPIES[by](module)
    results = []
    for one in (module, copied):
        objective = Objective(ADVANTAGES, old_logps=torch.full(labels[:, 1:].shape, -5.0))
        one(**inputs, labels=labels, fused=objective)
        results.append((objective.output.logps, gradients_of(one, objective.output.loss)))
    # Pickle leaves out accelerate's autocast, as of any model.
    tolerance = 0.1 if case == "accelerate" else 1e-4
    (logps, expected_grads), (actual, actual_grads) = results
    assert logps.abs().max() > 1
    torch.testing.assert_close(actual, logps, rtol=tolerance, atol=tolerance)
    assert_same_gradients(actual_grads, expected_grads, tolerance)
    if case == "accelerate":
        return
    with torch.no_grad():
        for parameter in copied.get_output_embeddings().parameters():
            parameter.zero_()
        flat, kept = (x(**inputs, labels=labels, fused=True) for x in (copied, module))
    assert (flat.entropy[flat.mask] - math.log(V)).abs().max() < 1e-4
    torch.testing.assert_close(kept.logps, logps, rtol=1e-4, atol=1e-4)
    # A call without the keyword is that of the instance, which pickle does not restore.
    own = [case == "own forward" and (by == "deepcopy" or i == 0) for i in range(2)]
    for attached_still in (True, False):
        assert has_fused_head(module) and has_fused_head(copied) == attached_still
        outputs = [one(**inputs, labels=labels) for one in (module, copied)]
        assert [float(out.loss) == OWN for out in outputs] == own
        assert not any(hasattr(out, "logps") for out in outputs)
        if attached_still:
            detach_fused_head(copied)
    attach_fused_head(copied, check=False)


def test_a_replica_s_head_is_on_the_replica_s_device():
    """DataParallel copies the attributes of a model, then replaces its parts."""
    model = attached(family_model("qwen2"))
    inputs, labels = batch_of()
    replica = model._replicate_for_data_parallel()
    replica._modules = copy.deepcopy(model._modules)
    with torch.no_grad():
        replica.lm_head.weight.zero_()
    flat = replica(**inputs, labels=labels, fused=True)
    assert (flat.entropy[flat.mask] - math.log(V)).abs().max() < 1e-4


def test_the_class_is_the_model_s_for_whoever_asks(tmp_path):
    model = family_model("qwen2")
    cls = type(model)
    attached(model)
    assert isinstance(model, cls) and repr(type(model)) == repr(cls)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is cls and loaded.config.architectures == ["Qwen2ForCausalLM"]
    # One that a callback makes of its class has no head.
    assert not has_fused_head(type(model)(model.config))
    detach_fused_head(model)
    assert type(model) is cls
    assert type(pickle.loads(pickle.dumps(model))) is cls


def test_detached_after_accelerate():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(attached(family_model("qwen2")))
    with pytest.raises(ValueError, match="wrapped after"):
        detach_fused_head(model)
    detach_fused_head(accelerator.unwrap_model(model, keep_fp32_wrapper=False))
    assert not has_fused_head(model) and "forward" not in vars(model)
    accelerator.free_memory()


def test_a_model_of_the_class_of_one_with_a_head():
    """The class is the model's own again; attaching to a copy leaves the original alone."""
    model = attached(family_model("qwen2"))
    other = attached(type(model)(model.config))
    restored = pickle.loads(pickle.dumps(other))
    assert has_fused_head(restored)
    detach_fused_head(other)
    assert type(other) is transformers.Qwen2ForCausalLM
    inputs, labels = batch_of()
    before = model(**inputs, labels=labels, fused=True).logps
    shallow = copy.copy(model)
    attach_fused_head(shallow, keyword="fused", temperature=2.0)
    assert torch.equal(model(**inputs, labels=labels, fused=True).logps, before)
    assert not torch.equal(shallow(**inputs, labels=labels, fused=True).logps, before)

"""A low-rank addition to the head: the values and gradients of the float64 reference."""

import pytest
import torch
from torch import Tensor

from tests.helpers import flat_calls
from tests.helpers.batches import config, make_batch, relative_error
from tests.helpers.flat_calls import reference

R = 5
NAMES = ("hidden", "weight", "bias", "inner", "outer")


def operands(batch, dtype=torch.float32, low_rank=torch.float32, frozen=()):
    """Leaves: those of the batch, and an addition that is a tenth of the head."""
    g = torch.Generator().manual_seed(1)
    inner = batch.hidden[..., :R].clone()  # NaN where masked, as the rest is
    outer = 0.3 * torch.randn(len(batch.weight), R, generator=g)
    leaves = dict(zip(NAMES, (batch.hidden, batch.weight, batch.bias, inner, outer), strict=True))
    return {
        name: x.detach()
        .to(low_rank if name in ("inner", "outer") else dtype)
        .clone()
        .requires_grad_(name not in frozen)
        for name, x in leaves.items()
    }


def run(batch, leaves, package=flat_calls, call="loss", **options):
    """Loss or log-probs, and the gradients of all that are trained."""
    head = {"bias": leaves["bias"], "low_rank": (leaves["inner"], leaves["outer"])}
    given = (leaves["hidden"], leaves["weight"], batch.targets)
    if call == "logps":
        options.pop("config", None)
        value = package.linear_logprobs(*given, mask=batch.mask, **head, **options).logps
        (value * batch.advantages[:, None]).sum().backward()
    else:
        out = package.fused_grpo_loss(
            *given, batch.advantages, batch.mask, old_logps=batch.old_logps, **head, **options
        )
        value = out.loss
        value.backward()
    return value.detach(), {k: x.grad for k, x in leaves.items()}


def exactly(leaves):
    return {k: x.detach().double().requires_grad_(x.requires_grad) for k, x in leaves.items()}


def test_equals_the_weight_it_stands_for():
    batch = make_batch()
    leaves = operands(batch)
    with torch.no_grad():
        down = torch.randn(R, 48, generator=torch.Generator().manual_seed(2)) / 48**0.5
        leaves["inner"] = (leaves["hidden"] @ down.T).requires_grad_()
    value, _ = run(batch, leaves, config=config())
    with torch.no_grad():
        merged = leaves["weight"] + leaves["outer"] @ down
    other = flat_calls.fused_grpo_loss(
        leaves["hidden"], merged, batch.targets, batch.advantages, batch.mask,
        old_logps=batch.old_logps, bias=leaves["bias"], config=config(),
    ).loss  # fmt: skip
    torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", ("loss", "logps"))
def test_next_to_a_frozen_weight(call, monkeypatch):
    from grpo_kernels.head.dense import Gradients

    batch = make_batch()
    leaves = operands(batch, frozen=("weight", "bias"))
    made: list[Tensor] = []
    original = Gradients.all

    def watched(gradients):
        made.append(gradients.found[1])
        return original(gradients)

    monkeypatch.setattr(Gradients, "all", watched)
    _, wanted = run(batch, exactly(leaves), reference, call, config=config())
    _, gradients = run(batch, leaves, call=call, config=config())
    assert made == [None] and gradients["weight"] is None
    for key in ("hidden", "inner", "outer"):
        assert relative_error(gradients[key], wanted[key]) < 1e-4, key


def test_bf16_head_and_float32_adapter():
    # What PEFT makes of a bf16 model.
    batch = make_batch()
    leaves = operands(batch, torch.bfloat16, torch.float32, frozen=("weight",))
    expected, wanted = run(batch, exactly(leaves), reference, config=config())
    value, gradients = run(batch, leaves, config=config())
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-4)
    assert gradients["outer"].dtype == torch.float32
    for key in ("hidden", "inner", "outer"):
        assert relative_error(gradients[key], wanted[key]) < 2.5e-3, key


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_on_a_gpu(dtype):
    batch = make_batch()
    leaves = operands(batch, dtype, frozen=("weight",))
    _, wanted = run(batch, exactly(leaves), reference, config=config())
    batch = batch.to("cuda", dtype)
    leaves = {k: x.detach().cuda().requires_grad_(x.requires_grad) for k, x in leaves.items()}
    _, gradients = run(batch, leaves, config=config())
    for key in ("hidden", "inner", "outer"):
        tolerance = 1e-4 if dtype == torch.float32 else 5e-3
        assert relative_error(gradients[key].cpu(), wanted[key]) < tolerance, key

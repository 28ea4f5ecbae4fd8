"""`ce_weights` at their limits: small shares, no other loss, no weight, no mask, any value."""

from dataclasses import replace

import pytest
import torch

from grpo_kernels import Execution, grpo_loss
from tests.helpers.batches import (
    HEAD,
    NAN,
    config,
    make_batch,
    relative_error,
    run_fused,
    with_cross_entropy,
)
from tests.helpers.head_options import CHUNK, TOLERANCE, expect_equal


def mixed_batch():
    batch = with_cross_entropy(make_batch(B=6, T=11))
    chosen = batch.ce_weights != 0
    # Tokens of the policy loss only, of both, of the cross-entropy only; there are some of neither.
    kinds = (batch.mask & ~chosen, batch.mask & chosen, ~batch.mask & chosen)
    assert all(kind.any() for kind in (*kinds, ~batch.mask & ~chosen))
    assert batch.hidden[~batch.mask & ~chosen].isnan().all()
    return batch


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("share", (1.0, 1 / 131_072))
def test_half_precision(share, dtype):
    """Alone, of which a small share must not underflow, nor its scale overflow."""
    batch = mixed_batch().to("cpu", dtype)
    batch = replace(batch, ce_weights=share * batch.ce_weights, mask=torch.zeros_like(batch.mask))
    options = {"ce_weights": True, "scale": 4.0 / share}
    expected, actual = (run_fused(batch, exact=exact, **options) for exact in (True, False))
    for name in ("hidden", "weight"):
        error = relative_error(actual.gradients[name], expected.gradients[name])
        assert error <= TOLERANCE[dtype], name


@pytest.mark.parametrize(
    ("without", "loss_type", "backend"),
    (("mask", "dapo", "triton"), ("mask", "gspo", "torch"), ("advantages", "dapo", "torch")),
)
def test_alone_is_torchs_cross_entropy(without, loss_type, backend):
    """With a mask of zeros, or with advantages of zero."""
    batch = mixed_batch()
    setattr(batch, without, torch.zeros_like(getattr(batch, without)))
    chosen = batch.ce_weights != 0
    batch.ce_weights = chosen / chosen.sum()
    head = [x.double().requires_grad_() for x in (batch.hidden, batch.weight, batch.bias)]
    logits = head[0][chosen] @ head[1].T + head[2]
    expected = torch.nn.functional.cross_entropy(logits, batch.targets[chosen])
    expected.backward()
    actual = run_fused(
        batch, exact=False, config=config(loss_type=loss_type), head={"bias": True},
        ce_weights=True, execution=Execution(backend=backend, chunk_bytes=CHUNK),
    )  # fmt: skip
    for value in (actual.loss, actual.metrics["ce_loss"], actual.metrics["ce_nll"]):
        assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, x in zip(HEAD, head, strict=True):
        assert relative_error(actual.gradients[name], x.grad) <= 2e-5, name


@pytest.mark.parametrize("other", (NAN, -torch.inf, torch.inf))
def test_log_probs_without_a_weight_may_be_anything(other):
    """Log-probs of banned ids and of padding, which the caller computed, stay out of the sum."""
    logps = torch.tensor([[-0.5, other, -2.0]], requires_grad=True)
    mask, weights = torch.tensor([[True, False, False]]), torch.tensor([[0.0, 0.0, 0.25]])
    out = grpo_loss(logps, torch.ones(1), mask, ce_weights=weights)
    out.loss.backward()
    assert out.loss.item() == -1 + 0.25 * 2
    assert out.metrics["ce_loss"].item() == 0.5 and out.metrics["ce_nll"].item() == 2
    assert logps.grad.tolist() == [[-1.0, 0.0, -0.25]]


@pytest.mark.parametrize("share", (0.0, 1.0))
def test_equals_the_reference(share):
    """Advantages of some tokens, NaN outside the mask, and weights in half precision, or of 0."""
    batch = mixed_batch()
    batch.ce_weights = share * batch.ce_weights.half()
    some = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    advantages = (batch.advantages[:, None] * some).masked_fill(~batch.mask, NAN)
    options = {"old_logps": True, "advantages": advantages, "ce_weights": True}
    metrics = expect_equal(batch, options, execution=Execution(chunk_bytes=CHUNK)).metrics
    assert any(metrics[name] for name in ("ce_loss", "ce_tokens", "ce_nll")) == bool(share)

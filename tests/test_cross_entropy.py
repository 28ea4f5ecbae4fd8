"""`ce_weights`, a cross-entropy term on any tokens: against the reference and torch's own."""

from dataclasses import replace

import pytest
import torch

from grpo_kernels import Execution, fused_grpo_loss, grpo_loss, linear_logprobs
from tests.helpers.batches import (
    HEAD,
    NAN,
    config,
    make_batch,
    relative_error,
    run_fused,
    with_cross_entropy,
)
from tests.helpers.head_options import BACKENDS, CHUNK, TOLERANCE, expect_equal
from tests.helpers.tiers import cases


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
    cases(
        ("mask", "advantages"), ("dapo", "grpo", "gspo", "gmpo", "vespo", "cispo"), BACKENDS,
        fast=lambda _, loss_type, backend: loss_type in ("dapo", "gspo") or backend == "torch",
    ),
)  # fmt: skip
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


@pytest.mark.parametrize("weights_dtype", (None, torch.bfloat16, torch.float16, torch.float64))
def test_where_advantages_are_per_token(weights_dtype):
    """A token may have an advantage of 0, or NaN outside the mask, and still a weight."""
    batch = mixed_batch()
    batch.ce_weights = batch.ce_weights.to(weights_dtype)
    sparse = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    advantages = (batch.advantages[:, None] * sparse).masked_fill(~batch.mask, NAN)
    options = {"old_logps": True, "ce_weights": True, "advantages": advantages}
    expect_equal(batch, options, execution=Execution(chunk_bytes=CHUNK))


def test_an_entropy_threshold_keeps_to_the_policys_tokens():
    batch, cfg = mixed_batch(), config(top_entropy_quantile=0.5, entropy_threshold=1.0)
    out = expect_equal(batch, {"config": cfg, "old_logps": True, "ce_weights": True})
    assert out.metrics["tokens"] == batch.mask.sum()


def test_an_objective_of_ones_own_sees_the_policys_tokens_alone():
    batch, seen = mixed_batch(), []

    def objective(tokens):
        seen.append(tokens)
        return -tokens.advantages * tokens.ratio - 0.1 * tokens.entropy

    cfg = config(loss_type=objective)
    expect_equal(batch, {"config": cfg, "old_logps": True, "ce_weights": True})
    assert seen and all((x.entropy[~batch.mask.flatten()] == 0).all() for x in seen)


def test_without_a_mask_every_token_is_the_policys():
    batch = make_batch()
    batch.hidden, batch.targets = torch.randn_like(batch.hidden), batch.targets.clamp(min=0)
    batch.ce_weights = torch.rand(batch.mask.shape).masked_fill(batch.mask, 0.0)
    expect_equal(batch, {"config": config(loss_type="grpo"), "mask": False, "ce_weights": True})


@pytest.mark.parametrize("loss_type", ("dapo", "gspo"))
def test_the_policys_results_are_as_without_it(loss_type):
    batch = mixed_batch()
    names = ("old_logps", "ref_logps", "sampling_logps")
    options = {name: getattr(batch, name) for name in names}
    options["config"] = config(loss_type=loss_type, beta=0.1)
    args = (batch.hidden, batch.weight, batch.targets, batch.advantages, batch.mask)
    chosen = batch.ce_weights != 0
    with torch.no_grad():
        plain = fused_grpo_loss(*args, **options)
        mixed = fused_grpo_loss(*args, **options, ce_weights=batch.ce_weights)
        scored = linear_logprobs(*args[:3], mask=batch.mask | chosen, entropy=True)
    term = -(batch.ce_weights * mixed.logps)[chosen].sum()
    own = {
        "ce_loss": term,
        "ce_tokens": chosen.sum().float(),
        "ce_nll": -mixed.logps[chosen].mean(),
    }
    torch.testing.assert_close(mixed.metrics, plain.metrics | own)
    torch.testing.assert_close(mixed.loss, plain.loss + term)
    torch.testing.assert_close(mixed.logps[batch.mask], plain.logps[batch.mask])
    torch.testing.assert_close(mixed.logps, scored.logps)
    torch.testing.assert_close(mixed.entropy, scored.entropy)
    assert (mixed.logps[~batch.mask & ~chosen] == 0).all()


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


def test_without_any_weight_the_metrics_are_0():
    batch = mixed_batch()
    batch.ce_weights = torch.zeros_like(batch.ce_weights)
    out = expect_equal(batch, {"config": config(loss_type="dapo"), "ce_weights": True})
    assert all(out.metrics[name] == 0 for name in ("ce_loss", "ce_tokens", "ce_nll"))

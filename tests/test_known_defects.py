"""One test for each defect that kernels of this kind have shipped with elsewhere."""

import pytest
import torch

from tests.helpers.batches import config, make_batch, packed, relative_error, run_fused
from tests.helpers.flat_calls import fused_grpo_loss, linear_logprobs, reference

BACKENDS = ("torch", "triton")


def fused_and_exact(batch, backend, **options):
    expected = run_fused(batch, exact=True, **options)
    return run_fused(batch, exact=False, backend=backend, **options), expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_past_the_vocabulary_do_not_enter(backend):
    """V one past a block, logits far below 0: each phantom column at 0 would outweigh them all."""
    batch = make_batch(V=4097, logit_offset=-30.0)
    actual, expected = fused_and_exact(batch, backend, bias=True)
    assert (actual.logps - expected.logps).abs().max() < 1e-4
    assert actual.metrics["entropy"].item() == pytest.approx(
        expected.metrics["entropy"].item(), rel=1e-4
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_running_maximum_starts_at_minus_infinity(backend):
    """Logits around -500: without a shift their exp is 0 and the logsumexp log 0."""
    batch = make_batch(logit_offset=-500.0)
    actual, expected = fused_and_exact(batch, backend, bias=True)
    assert (actual.logps - expected.logps).abs().max() < 2e-4
    assert relative_error(actual.gradients["hidden"], expected.gradients["hidden"]) < 2e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss_type", ("grpo", "bnpo", "dr_grpo", "dapo"))
def test_padding_contributes_nothing(loss_type, backend):
    """The same loss and gradients with ten more columns of padding that hold NaN and inf."""
    batch = make_batch()
    B, T = batch.mask.shape
    wide = make_batch()
    for name, fill in (
        ("hidden", float("nan")), ("targets", -100), ("mask", False),
        ("old_logps", float("inf")), ("ref_logps", float("nan")),
    ):  # fmt: skip
        x = getattr(batch, name)
        pad = torch.full((B, 10, *x.shape[2:]), fill, dtype=x.dtype)
        setattr(wide, name, torch.cat([x, pad], 1))
    options = {
        "config": config(loss_type=loss_type, beta=0.1), "old_logps": True, "ref_logps": True,
        "backend": backend,
    }  # fmt: skip
    a, b = (run_fused(x, exact=False, **options) for x in (batch, wide))
    assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-6)
    assert relative_error(b.gradients["weight"], a.gradients["weight"]) < 1e-6
    assert relative_error(b.gradients["hidden"][:, :T], a.gradients["hidden"]) < 1e-6
    assert (b.gradients["hidden"][:, T:] == 0).all()


def test_advantages_per_token_do_not_depend_on_chunks():
    batch = make_batch()
    batch.advantages = torch.randn(batch.mask.shape)
    for rows in (1, 4, 100):
        actual, expected = fused_and_exact(batch, "torch", chunk_bytes=4 * 1003 * rows)
        assert relative_error(actual.gradients["weight"], expected.gradients["weight"]) < 2e-5


def test_step_wide_normaliser_over_micro_batches():
    """Four micro-batches of unequal length with num_items: the gradient of the whole batch."""
    batch = make_batch(B=8, T=12)
    whole = run_fused(batch, exact=False, scale=1.0)
    weight = batch.weight.clone().requires_grad_()
    for i in range(0, 8, 2):
        part = slice(i, i + 2)
        fused_grpo_loss(
            batch.hidden[part], weight, batch.targets[part], batch.advantages[part],
            batch.mask[part], num_items=batch.mask.sum(),
        ).loss.backward()  # fmt: skip
    assert relative_error(weight.grad, whole.gradients["weight"]) < 1e-5


def test_truncated_tokens_are_not_counted():
    """Masking a sequence out is the same as not having it, for the token-mean losses."""
    batch = make_batch(B=4)
    batch.mask[3] = False
    kept = make_batch(B=4)
    for name in ("hidden", "targets", "mask", "advantages"):
        setattr(kept, name, getattr(batch, name)[:3])
    for loss_type in ("bnpo", "dapo"):
        a, b = (
            run_fused(x, exact=False, config=config(loss_type=loss_type)) for x in (batch, kept)
        )
        assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-6)
        assert a.metrics["tokens"] == b.metrics["tokens"] == batch.mask.sum()


@pytest.mark.parametrize("layout", ("padded", "packed"))
def test_hidden_states_keep_their_graph(layout):
    """Flattened inside, and still a gradient for the layer before."""
    batch = make_batch() if layout == "padded" else packed(make_batch())
    layer = torch.nn.Linear(48, 48)
    states = layer(batch.hidden.nan_to_num())
    fused_grpo_loss(
        states, batch.weight, batch.targets, batch.advantages, batch.mask,
        cu_seqlens=batch.cu_seqlens,
    ).loss.backward()  # fmt: skip
    assert layer.weight.grad.norm() > 0


def test_targets_are_used_as_given():
    """The library never shifts: hidden[t] is scored on targets[t], also for a slice of them."""
    batch = make_batch()
    batch.mask[:] = True
    batch.hidden, batch.targets = torch.randn(4, 9, 48), torch.randint(0, 1003, (4, 9))
    whole = linear_logprobs(batch.hidden, batch.weight, batch.targets).logps
    part = linear_logprobs(batch.hidden[:, 3:7], batch.weight, batch.targets[:, 3:7]).logps
    torch.testing.assert_close(part, whole[:, 3:7])
    log_p = (batch.hidden[1, 4] @ batch.weight.T).log_softmax(-1)
    assert whole[1, 4].item() == pytest.approx(log_p[batch.targets[1, 4]].item(), abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_entropy_has_its_gradient(backend):
    """The bonus alone (no advantage) still moves the weights."""
    batch = make_batch()
    batch.advantages = torch.zeros(4)
    actual, expected = fused_and_exact(batch, backend, config=config(entropy_coef=0.1))
    assert expected.gradients["weight"].norm() > 0
    assert relative_error(actual.gradients["weight"], expected.gradients["weight"]) < 2e-5


def test_no_gradient_slice_is_rounded_before_summing():
    """Forty chunks of bf16 input: rounding each chunk's dW would show, one rounding does not."""
    batch = make_batch(B=8, T=40, V=300).to("cpu", torch.bfloat16)
    actual, expected = fused_and_exact(batch, "torch", chunk_bytes=4 * 300 * 4, scale=1.0)
    rounding = relative_error(expected.gradients["weight"].bfloat16(), expected.gradients["weight"])
    error = relative_error(actual.gradients["weight"], expected.gradients["weight"])
    assert error < 1.05 * rounding


def test_reference_agrees_with_plain_pytorch():
    batch = make_batch()
    batch.mask[:] = True
    hidden, targets = torch.randn(4, 9, 48).double(), torch.randint(0, 1003, (4, 9))
    logits = hidden @ batch.weight.double().T
    cross_entropy = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    out = reference.linear_logprobs(hidden, batch.weight.double(), targets)
    torch.testing.assert_close(out.logps.flatten(), -cross_entropy)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(out.entropy, entropy)

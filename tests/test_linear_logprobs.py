"""`linear_logprobs` against the float64 reference: values and gradients, every option."""

import pytest
import torch

from grpo_kernels import linear_logprobs, reference
from tests.helpers.batches import make_batch, relative_error
from tests.helpers.half_gemms import imitate


def test_the_reference_agrees_with_plain_pytorch():
    """Each state is scored on the target at its own place: nobody shifts."""
    batch = make_batch()
    hidden, targets = torch.randn(4, 9, 48).double(), torch.randint(0, 1003, (4, 9))
    logits = hidden @ batch.weight.double().T
    cross_entropy = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    out = reference.linear_logprobs(hidden, batch.weight.double(), targets)
    torch.testing.assert_close(out.logps.flatten(), -cross_entropy)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(out.entropy, entropy)


@pytest.mark.parametrize("shape", ((0, 9), (3, 0)))
def test_empty(shape):
    hidden = torch.randn(*shape, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    out = linear_logprobs(hidden, weight, torch.zeros(shape, dtype=torch.long), entropy=True)
    (out.logps.sum() + out.entropy.sum()).backward()
    assert out.logps.shape == shape
    assert (weight.grad == 0).all() and hidden.grad.shape == hidden.shape


def test_entropy_is_none_unless_asked_for():
    batch = make_batch()
    out = linear_logprobs(batch.hidden, batch.weight, batch.targets, mask=batch.mask)
    assert out.entropy is None


@pytest.mark.parametrize("N", (1, 131_072))
def test_half_precision_products_keep_small_gradients(N, monkeypatch):
    """Imitates a GPU's float16 gradient of the logits, for which 1 / N times p is far too small."""
    imitate(monkeypatch, torch.float16)
    batch = make_batch(B=6, T=11)
    grads = []
    for call, dtype in (
        (linear_logprobs, torch.float32),
        (reference.linear_logprobs, torch.float64),
    ):
        head = [x.half().to(dtype).requires_grad_() for x in (batch.hidden, batch.weight)]
        (call(*head, batch.targets, mask=batch.mask).logps.sum() / N).backward()
        grads.append([x.grad for x in head])
    for actual, truth in zip(*grads, strict=True):
        assert relative_error(actual, truth) <= 1e-3


@pytest.mark.parametrize("weights", ((1.0, 0.3, 0.0), (0.0, 0.3, 0.0), (1.0, 0.0, -0.2)))
def test_a_frozen_head_with_more_than_a_log_prob_s_gradient(weights):
    """The gradient that the forward keeps is that of the log-probs alone."""
    batch, grads = make_batch(), []
    mask = batch.mask
    for call, dtype in (
        (linear_logprobs, torch.float32),
        (reference.linear_logprobs, torch.float64),
    ):
        hidden = torch.nan_to_num(batch.hidden).to(dtype).requires_grad_()
        head = batch.weight.to(dtype)
        options = {"entropy": True} if call is linear_logprobs else {}
        out = call(hidden, head, batch.targets, mask=mask, **options)
        outputs = out.logps, out.entropy, out.logsumexp
        used = [(w, x) for w, x in zip(weights, outputs, strict=True) if w]
        sum(w * (x * mask * batch.advantages[:, None]).sum() for w, x in used).backward()
        grads.append(hidden.grad)
    assert grads[1].norm() > 0 and relative_error(*grads) <= 2e-5

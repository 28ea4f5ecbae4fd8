"""`linear_logprobs` beyond pairs of options, which are in `test_pairs.py`."""

import pytest
import torch

from grpo_kernels import linear_logprobs, reference
from tests.helpers.batches import make_batch, relative_error
from tests.helpers.half_gemms import imitate
from tests.helpers.head_options import exact_and_actual


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
    args = hidden, weight, torch.zeros(shape, dtype=torch.long)
    out = linear_logprobs(*args, entropy=True)
    (out.logps.sum() + out.entropy.sum()).backward()
    assert out.logps.shape == shape
    assert (weight.grad == 0).all() and hidden.grad.shape == hidden.shape
    assert linear_logprobs(*args).entropy is None


@pytest.mark.parametrize("N", (1, 131_072))
def test_half_precision_products_keep_small_gradients(N, monkeypatch):
    """Imitates a GPU's float16 gradient of the logits, for which 1 / N times p is far too small."""
    imitate(monkeypatch, torch.float16)
    batch = make_batch(B=6, T=11)

    def loss(package, *head):
        return package.linear_logprobs(*head, batch.targets, batch.mask).logps.sum() / N

    exact, actual = exact_and_actual(loss, batch.hidden.half(), batch.weight.half())
    for x, truth in zip(actual, exact, strict=True):
        assert relative_error(x, truth) <= 1e-3


@pytest.mark.parametrize("factors", ((1.0, 0.3, 0.0), (0.0, 0.3, 0.0), (1.0, 0.0, -0.2)))
def test_a_frozen_head_with_more_than_a_log_prob_s_gradient(factors):
    """The gradient that the forward keeps is that of the log-probs alone."""
    batch = make_batch()
    signs = batch.mask * batch.advantages[:, None]

    def loss(package, hidden, **how):
        head = batch.weight.to(hidden.dtype)
        out = package.linear_logprobs(hidden, head, batch.targets, batch.mask, **how)
        outputs = zip(factors, (out.logps, out.entropy, out.logsumexp), strict=True)
        return sum(factor * (x * signs).sum() for factor, x in outputs if factor)

    (exact,), (actual,) = exact_and_actual(loss, batch.hidden.nan_to_num(), entropy=True)
    assert exact.norm() > 0 and relative_error(actual, exact) <= 2e-5

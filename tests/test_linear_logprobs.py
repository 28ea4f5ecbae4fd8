"""`linear_logprobs` against the float64 reference: values and gradients, every option."""

import pytest
import torch

from tests.helpers.batches import make_batch, packed, relative_error
from tests.helpers.flat_calls import linear_logprobs, reference
from tests.helpers.half_gemms import imitate
from tests.helpers.head_options import BACKENDS, CHUNK, TOLERANCE

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "temperature_per_token": {"temperature": True},
    "bias": {"bias": True},
    "softcap": {"softcap": 5.0},
    "everything": {"temperature": True, "bias": True, "softcap": 6.0, "logit_scale": 1.3},
}
# Which outputs the caller's loss is made of.
USES = {"logps": (1, 0, 0), "entropy": (0, 1, 0), "logsumexp": (0, 0, 1), "all": (1, -0.3, 0.2)}


def run(batch, options, use, *, exact, **fast):
    options = dict(options)
    head = {}
    for name in ("hidden", "weight", "bias"):
        x = getattr(batch, name).detach().clone()
        head[name] = (x.double() if exact else x).requires_grad_()
    if options.get("bias"):
        options["bias"] = head["bias"]
    if options.get("temperature") is True:
        options["temperature"] = batch.temperature.double() if exact else batch.temperature
    call = reference.linear_logprobs if exact else linear_logprobs
    if not exact:
        options = {**options, **fast, "entropy": True}
    out = call(head["hidden"], head["weight"], batch.targets, mask=batch.mask, **options)
    if not exact:  # outputs may be changed in place
        out = type(out)(*(x if x is None else x.mul_(1.0) for x in out))
    g = torch.Generator().manual_seed(5)
    coef = torch.randn(batch.mask.shape, generator=g).to(batch.mask.device)
    coef[coef.abs() < 0.3] = 0.0  # rows without a gradient
    loss = sum(u * (coef * x).sum() for u, x in zip(use, out, strict=False) if u)
    loss.backward()
    return out, {name: x.grad for name, x in head.items()}


def expect_equal(batch, options, use, tolerance, **fast):
    expected, expected_grads = run(batch, options, use, exact=True)
    actual, grads = run(batch, options, use, exact=False, **fast)
    for name, a, e in zip(expected._fields, actual, expected, strict=True):
        if e is None:
            assert a is None
            continue
        assert a.dtype == torch.float32 and a.shape == batch.mask.shape
        assert (a.double() - e).abs().max() <= 1e-4, name
        assert (a[~batch.mask] == 0).all()
    for name, e in expected_grads.items():
        if e is None:
            assert grads[name] is None
            continue
        assert grads[name].dtype == getattr(batch, name).dtype
        if e.norm() > 1e-12:
            assert relative_error(grads[name], e) <= tolerance, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("option", OPTIONS)
def test_padded(option, use, backend):
    expect_equal(make_batch(), OPTIONS[option], USES[use], 2e-5, backend=backend, chunk_bytes=CHUNK)


@pytest.mark.parametrize("option", OPTIONS)
def test_packed(option):
    expect_equal(packed(make_batch()), OPTIONS[option], USES["all"], 2e-5, chunk_bytes=CHUNK)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_half_precision(option, dtype):
    batch = make_batch().to("cpu", dtype)
    expect_equal(batch, OPTIONS[option], USES["all"], TOLERANCE[dtype], chunk_bytes=CHUNK)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("option", OPTIONS)
def test_cuda(option, use, backend, dtype):
    batch = make_batch(V=5003).to("cuda", dtype)
    # On few tokens the rounding of dZ and then of dH to bf16 scatters around 2.4e-3.
    tolerance = 6e-3 if dtype == torch.bfloat16 else TOLERANCE[dtype]
    expect_equal(batch, OPTIONS[option], USES[use], tolerance, backend=backend)


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
    for mine, truth in zip(*grads, strict=True):
        assert relative_error(mine, truth) <= 1e-3

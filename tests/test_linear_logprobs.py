"""`linear_logprobs` beyond pairs of options, which are in `test_pairs.py`."""

import threading
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from grpo_kernels import Execution, linear_logprobs, reference
from grpo_kernels.base.memory import lend
from grpo_kernels.head.chunked_head import ChunkedHead, ChunkLogits
from tests.helpers.batches import NAN, make_batch, relative_error
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


def test_rows_without_a_gradient_may_be_no_numbers_under_a_frozen_head():
    """A row of NaN whose gradient is 0, and NaN as the gradient of masked rows."""
    batch, g = make_batch(), torch.Generator().manual_seed(0)
    d_logps = torch.randn(batch.mask.shape, generator=g).masked_fill(~batch.mask, NAN)
    spoilt = tuple(batch.mask.nonzero()[1].tolist())
    d_logps[spoilt] = 0.0
    hidden = batch.hidden.index_put([torch.tensor(i) for i in spoilt], torch.tensor(NAN))
    hidden = hidden.detach().requires_grad_()
    logps = linear_logprobs(hidden, batch.weight.detach(), batch.targets, batch.mask).logps
    logps.backward(d_logps)
    exact = batch.hidden.detach().nan_to_num().double().requires_grad_()
    args = exact, batch.weight.detach().double(), batch.targets, batch.mask
    (reference.linear_logprobs(*args).logps * d_logps.nan_to_num()).sum().backward()
    assert (hidden.grad[~batch.mask] == 0).all() and (hidden.grad[spoilt] == 0).all()
    assert exact.grad.norm() > 0 and relative_error(hidden.grad, exact.grad) <= 2e-5


# Between a call and its backward: forwards over the head in all, and arguments of the call.
KEPT = {
    "one backward": (1, {}),
    "two backwards": (1, {}),
    "moved to the CPU": (1, {}),
    "checkpoint": (3, {}),
    "another call": (3, {}),
    "few rows": (2, {}),
    "a spoilt row": (2, {}),
    "little memory": (2, {}),
    "float16": (2, {}),
    "an entropy": (2, {"entropy": True}),
    "the same bits": (2, {"execution": Execution(batch_invariant=True)}),
    "two chunks": (4, {"execution": Execution(chunk_bytes=4 * 1003 * 18)}),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("case", KEPT)
def test_one_chunk_s_exponentials_are_kept(case, dtype, monkeypatch):
    """The backward makes no logits, unless the memory has gone or something else asks for them."""
    # In half precision, a chunk's logits are strips.
    dtype = {"float16": torch.float16, "two chunks": torch.float32}.get(case, dtype)
    if dtype != torch.float32:
        imitate(monkeypatch, dtype)
    batch, (expected, arguments) = make_batch(B=5, T=11), KEPT[case]
    factors = batch.old_logps * batch.mask
    hidden = batch.hidden.nan_to_num()
    if case == "few rows":
        factors[1:] = 0.0
    if case == "a spoilt row":
        assert factors[0, 1] != 0
        factors[0, 1], hidden[0, 1] = 0.0, NAN
    forwards, forward, backward = [], ChunkLogits.compute, ChunkedHead.backward
    monkeypatch.setattr(ChunkLogits, "compute", lambda *x: forwards.append(x) or forward(*x))

    def out_of_memory(head, *_):
        monkeypatch.setattr(ChunkedHead, "backward", backward)
        raise torch.OutOfMemoryError("CUDA out of memory")

    def loss(package, *head, **how):
        scored = batch.mask & (factors != 0) if package is reference else batch.mask

        def logps(*head):
            return package.linear_logprobs(*head, batch.targets, scored, **how).logps

        if package is reference:
            return (logps(*head) * factors).sum()
        with save_on_cpu() if case == "moved to the CPU" else nullcontext():
            checkpointed = partial(checkpoint, logps, use_reentrant=False)
            result = ((checkpointed if case == "checkpoint" else logps)(*head) * factors).nansum()
        if case == "two backwards":
            result.backward(retain_graph=True)
            for x in head:
                x.grad = None
        if case == "another call":
            logps(*head)
        if case == "little memory":
            monkeypatch.setattr(ChunkedHead, "backward", out_of_memory)
        return result

    exact, actual = exact_and_actual(loss, hidden, batch.weight, **arguments)
    for truth, x in zip(exact, actual, strict=True):
        assert truth.norm() > 0
        assert relative_error(x, truth) <= (2e-5 if dtype == torch.float32 else 5e-3)
    assert len(forwards) == expected


def test_kept_exponentials_are_held_once(monkeypatch):
    """Several calls before their backwards would hold more memory than one backward takes."""
    batch, kept = make_batch(), []
    module = "grpo_kernels.head.linear_logprobs"
    monkeypatch.setattr(f"{module}.lend", lambda x: kept.append(weakref.ref(x)) or lend(x))
    weight = batch.weight.requires_grad_()
    call = partial(linear_logprobs, batch.hidden, weight, batch.targets, batch.mask)
    losses = [call().logps.sum() for _ in range(2)]
    assert [x().untyped_storage().size() > 0 for x in kept] == [False, True]
    with torch.no_grad():  # keeps none of its own
        call()
    assert [x().untyped_storage().size() > 0 for x in kept] == [False, False]
    sum(losses).backward()
    # After the backward nothing holds them, though the loss is still there.
    assert [x() for x in kept] == [None, None]
    first, weight.grad = weight.grad, None
    call().logps.sum().backward()
    assert relative_error(first, 2 * weight.grad) <= 1e-6 and weight.grad.norm() > 0


def test_threads_do_not_take_what_another_one_reads():
    """Each of them lends the memory of its exponentials to the next call of any."""
    batch, failed = make_batch(), []

    def work():
        try:
            for _ in range(50):
                weight = batch.weight.clone().requires_grad_()
                call = linear_logprobs(batch.hidden, weight, batch.targets, batch.mask)
                call.logps.sum().backward()
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for step in ("start", "join"):
        for thread in threads:
            getattr(thread, step)()
    assert not failed

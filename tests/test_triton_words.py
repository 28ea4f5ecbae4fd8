"""The kernels over single words against float64, at the sizes that bite; calls on a GPU."""

import functools

import pytest
import torch

from grpo_kernels import fused_grpo_loss, linear_logprobs, reference
from grpo_kernels.backends import Words, torch_backend, triton_backend, triton_words
from tests.support.batches import assert_matches, config, make_batch, relative_error, run_fused
from tests.support.supports import make_support, with_logps_of
from tests.support.tiers import INTERPRETED

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
DTYPES = (torch.float32, torch.bfloat16)
# Of a LoRA and a bias; one more than two blocks of a sum; rows that begin anywhere.
WIDTHS = (1, 16, 50, 4097)


@functools.cache
def some_words(V=40, N=23):
    """Tokens of none, one, some and 200 words; id 3 is common, others have no word at all."""
    g = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 9, (N,), generator=g)
    counts[:3] = torch.tensor([0, 200, 1])
    tokens = torch.arange(N).repeat_interleave(counts)
    ids = torch.randint(0, V // 2, (len(tokens),), generator=g)
    ids[::2] = 3
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Words(ids, tokens, offsets, torch.zeros(N, dtype=torch.int64), ids.argsort(stable=True))


def on(device, words):
    return Words(*(getattr(words, name).to(device) for name in words.__dataclass_fields__))


def operands(K, device, dtype, V=40, N=23):
    g = torch.Generator().manual_seed(K)
    # Rows of a wider tensor.
    x, rows = (torch.randn(n, K + 3, generator=g).to(device, dtype)[:, :K] for n in (N, V))
    return x, rows


@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_dots(device, dtype, K):
    words, (x, rows) = on(device, some_words()), operands(K, device, dtype)
    begin = torch.randn(len(words), device=device)
    expected = begin.double() + (x[words.tokens].double() * rows[words.ids].double()).sum(1)
    for backend in (torch_backend, triton_backend):
        out = begin.clone()
        backend.word_dots(x, rows, words, out)
        assert relative_error(out, expected) <= 1e-6


@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("into", ("new", "float32", "own"))
@pytest.mark.parametrize("device", DEVICES)
def test_sums_over_tokens_and_over_ids(device, into, dtype, K):
    words, (x, rows) = on(device, some_words()), operands(K, device, dtype)
    g = torch.Generator().manual_seed(0)
    factors = torch.randn(len(words), generator=g).to(device)
    factors[::5] = 0.0
    begins = words.begins_of(torch.arange(len(rows) + 1, device=device))
    groups = (
        (factors, words.ids, words.offsets, rows, words.tokens, len(x)),
        (factors[words.order], words.tokens_by_id, begins, x, words.ids[words.order], len(rows)),
    )
    for weights, index, offsets, given, segments, count in groups:
        expected = torch.zeros(count, K, dtype=torch.float64, device=device)
        out, wanted = None, torch.float32 if into == "float32" else dtype
        if into != "new":
            out = torch.randn(count, K, device=device).to(wanted)
            expected += out
        expected.index_add_(0, segments, weights[:, None].double() * given[index].double())
        result = triton_backend.segment_sums(weights, index, offsets, given, wanted, out)
        assert result.dtype == wanted and (out is None or result is out)
        # Rounded once; the interpreter cuts digits off.
        unit = 1e-6 if wanted == torch.float32 else 2**-7 if INTERPRETED else 2**-8
        assert expected.norm() > 0
        torch.testing.assert_close(result.double(), expected, rtol=unit, atol=2e-5)


# A long segment is one of more than 2 * PART words. Some begin or end at a multiple of PART, others
# one before or behind it.
PART = triton_words.PART
SIZES = (0, 1, 2 * PART - 1, 2 * PART, 2 * PART + 1, 1000)
ORDERS = {
    "rising": SIZES,
    "falling": SIZES[::-1],
    "neighbours": (3 * PART, 0, 3 * PART - 1, 2, 2 * PART + 1, 0, 2 * PART + 1, 0),
    "one": (5 * PART + 3,),
    "around_nothing": (0, 0, 8 * PART, 0, 0),
}


def long_segments(sizes, device, dtype, K):
    g = torch.Generator().manual_seed(sum(sizes))
    factors = torch.randn(sum(sizes), generator=g)
    index = torch.randint(9, factors.shape, generator=g)
    factors[::7] = 0.0
    rows = torch.randn(9, K, generator=g).to(device, dtype)
    offsets = torch.tensor((0, *sizes)).cumsum(0)
    return factors.to(device), index.to(device), offsets.to(device), rows


@pytest.mark.parametrize("into", ("new", "float32", "own"))
@pytest.mark.parametrize("sizes", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_sums_of_long_segments(device, dtype, sizes, into):
    factors, index, offsets, rows = long_segments(sizes, device, dtype, K=50)
    segments = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device)
    wanted = torch.float32 if into == "float32" else dtype
    before = None if into == "new" else torch.randn(len(sizes), 50, device=device).to(wanted)
    expected = torch.zeros(len(sizes), 50, dtype=torch.float64, device=device)
    expected.index_add_(0, segments, factors[:, None].double() * rows[index].double())
    results = []
    for backend in (triton_backend, triton_backend, torch_backend):
        out = None if before is None else before.clone()
        results.append(backend.segment_sums(factors, index, offsets, rows, wanted, out))
        assert results[-1].dtype == wanted and (out is None or results[-1] is out)
    assert results[0].equal(results[1])
    expected += 0.0 if before is None else before
    unit = 1e-6 if wanted == torch.float32 else 2**-7 if INTERPRETED else 2**-8
    for result in results:
        torch.testing.assert_close(result.double(), expected, rtol=unit, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_of_long_segments_of_wide_rows(device):
    """More columns than a block of words or of parts has, and more parts than one."""
    factors, index, offsets, rows = long_segments((3, 9 * PART), device, torch.float32, K=2050)
    result = triton_backend.segment_sums(factors, index, offsets, rows, rows.dtype, None)
    products = factors[:, None].double() * rows[index].double()
    expected = torch.stack([products[:3].sum(0), products[3:].sum(0)])
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_words_without_a_gradient_are_not_read(device):
    words, (_, rows) = on(device, some_words()), operands(16, device, torch.float32)
    factors = torch.ones(len(words), device=device)
    factors[words.ids == 3] = 0.0
    rows[3] = float("nan")
    result = triton_backend.segment_sums(factors, words.ids, words.offsets, rows, rows.dtype, None)
    assert result.isfinite().all() and result.norm() > 0


HEADS = {
    "plain": {},
    "everything": {"softcap": 5.0, "logit_scale": 1.3, "temperature": True, "bias": True},
}


def on_cuda(dtype, head, without):
    batch = make_batch(B=6, T=30, H=200).to("cpu", dtype)
    sets = make_support(batch, without=without)
    batch = with_logps_of(batch, sets, **head)
    return batch.to("cuda", dtype), tuple(x.cuda() for x in sets)


@pytest.mark.gpu
@pytest.mark.parametrize("without", (0.0, 0.3))
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_loss(dtype, head, without):
    batch, sets = on_cuda(dtype, HEADS[head], without)
    options = {"config": config(beta=0.1, entropy_coef=0.05), "old_logps": True, "ref_logps": True}
    options |= {"support": sets, **HEADS[head]}
    expected = run_fused(batch, exact=True, **options)
    ours = run_fused(batch, exact=False, **options)
    gathered = ours.metrics.pop("support/gathered")
    assert gathered == 1 or without
    ours.metrics = {k: v for k, v in ours.metrics.items() if k in expected.metrics}
    tolerance = 2e-5 if dtype == torch.float32 else 6e-3
    assert_matches(ours, expected, tolerance, logps=1e-4, rounded_to=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_log_probs(dtype, head):
    batch, sets = on_cuda(dtype, HEADS[head], 0.3)
    given = {k: getattr(batch, k) if v is True else v for k, v in HEADS[head].items()}
    results = []
    for call, widened, wants in (
        (linear_logprobs, dtype, {"entropy": True}),
        (reference.linear_logprobs, torch.float64, {}),
    ):
        given |= {k: x.to(widened) for k, x in given.items() if k == "bias"}
        hidden, weight = (
            x.detach().to(widened).requires_grad_() for x in (batch.hidden, batch.weight)
        )
        out = call(hidden, weight, batch.targets, mask=batch.mask, support=sets, **given, **wants)
        total = (batch.old_logps.nan_to_num() * out.logps + 0.3 * out.entropy).sum()
        results.append((out.logps, *torch.autograd.grad(total, (hidden, weight))))
    (logps, *gradients), (true_logps, *expected) = results
    assert (logps - true_logps).abs().max() <= 1e-4
    for mine, true in zip(gradients, expected, strict=True):
        assert relative_error(mine, true) <= (2e-5 if dtype == torch.float32 else 6e-3)


@pytest.mark.gpu
def test_cuda_gives_the_same_bits_twice():
    batch, sets = on_cuda(torch.bfloat16, {}, 0.0)
    results = []
    for _ in range(2):
        hidden, weight = (x.clone().requires_grad_() for x in (batch.hidden, batch.weight))
        out = fused_grpo_loss(
            hidden, weight, batch.targets, batch.advantages, batch.mask, support=sets
        )
        results.append((out.logps, *torch.autograd.grad(out.loss, (hidden, weight))))
    for one, two in zip(*results, strict=True):
        assert one.norm() > 0 and one.equal(two)

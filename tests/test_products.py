"""The GEMMs of a call: their dtype, how much of the weight they take at a time, their errors."""

import warnings

import pytest
import torch

from grpo_kernels import Execution
from grpo_kernels.base.autograd import scaled_gradient
from grpo_kernels.head import call as head_calls
from grpo_kernels.head.call import head_call
from grpo_kernels.head.products import (
    WeightGrad,
    as_operand,
    column_slices,
    new_buffers,
    slices_of,
)
from tests.helpers.batches import config, make_batch
from tests.helpers.fake_cuda import CountedCUDA, EmulatedCUDA
from tests.helpers.half_gemms import imitate
from tests.helpers.head_options import OPTIONS, TOLERANCE, expect_equal

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
EMULATED = "pass float16 hidden states"


@pytest.mark.parametrize(
    ("major", "hidden", "weight", "autocast", "expected", "said"),
    (
        (8, BF16, BF16, None, BF16, []),
        (7, BF16, BF16, None, FULL, [EMULATED]),
        (7, FULL, FULL, BF16, FULL, [EMULATED]),
        (7, BF16, BF16, HALF, HALF, []),
        (7, FULL, FULL, None, FULL, []),
        # Operands of two dtypes.
        (8, BF16, FULL, None, FULL, ["bfloat16 hidden states and a float32 head are multiplied"]),
        (8, BF16, FULL, BF16, BF16, []),
    ),
)
def test_what_a_gpu_multiplies_in_float32(
    major, hidden, weight, autocast, expected, said, real_memory, monkeypatch
):
    """Bf16 on a T4, whose half precision is float16; the warning comes once."""
    head_calls._warn_of_emulated_bf16.cache_clear()
    head_calls._warn_of_float32_products.cache_clear()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: autocast is not None)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: autocast)
    with CountedCUDA(major=major), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        x, y = (torch.empty(4, 8, dtype=dtype, device="cuda") for dtype in (hidden, weight))
        targets = torch.empty(4, dtype=torch.int64, device="cuda")
        for _ in range(2):
            call = head_call(x, y, targets, None, None, Execution(backend="torch"))
            assert call.spec.dtype == expected
    assert all(text in str(x.message) for text, x in zip(said, warned, strict=True))


def test_values_of_a_gpu_without_bf16(real_memory):
    """Operands and gradients in bf16; the products of the head are those of float32."""
    head_calls._warn_of_emulated_bf16.cache_clear()
    with EmulatedCUDA(major=7), pytest.warns(UserWarning, match="multiplied in float32"):
        batch = make_batch(V=1003).to("cuda", torch.bfloat16)
        options = {"old_logps": True, "execution": Execution(backend="torch"), "config": config()}
        expect_equal(batch, options, tolerance=3e-3)  # the rounding of gradients to bf16


def test_a_bf16_weight_is_upcast_in_slices():
    """Slices have 16 MiB on a CPU, whatever the budget."""
    weight = torch.empty(1, dtype=torch.bfloat16).expand(3000, 2048)
    parts = list(slices_of(weight, torch.float32, len(weight)))
    assert [(c.start, c.stop) for c, _ in parts] == [(0, 2048), (2048, 3000)]
    assert {part.dtype for _, part in parts} == {torch.float32}


@pytest.mark.parametrize(
    ("V", "dtype", "major", "expected"),
    (
        (1003, torch.bfloat16, 8, [(0, 960), (960, 1003)]),
        (1000, torch.bfloat16, 8, [(0, 1000)]),
        (1003, torch.float32, 8, [(0, 1003)]),
        (1003, torch.bfloat16, 9, [(0, 1003)]),
    ),
)
def test_columns_that_tensor_cores_cannot_take_go_apart(V, dtype, major, expected, real_memory):
    with CountedCUDA(major=major):
        weight = torch.empty(V, 16, dtype=dtype, device="cuda")
        assert [(x.start, x.stop) for x in column_slices(weight)] == expected
        (rows,) = new_buffers(weight, V, [(2, dtype)])
        assert rows.shape == (2, V) and rows.stride() == (1024, 1)  # where vectors begin
    assert new_buffers(torch.empty(0), V, [(2, dtype)])[0].is_contiguous()


def test_buffers_are_parts_of_one_block(real_memory):
    """On a GPU of a size that calls share."""
    sizes, V = [(3, torch.float32), (5, torch.bfloat16)], 100
    with CountedCUDA():
        like = torch.empty(1, device="cuda")
        logits, grads = new_buffers(like, V, sizes, budget=4096)
        assert grads.data_ptr() == 3 * 4 * 128 and logits.data_ptr() == 0
        assert grads.held.untyped_storage().nbytes() == 4096  # 2,816 are taken
    values = new_buffers(torch.empty(1), V, sizes, budget=4096)
    for i, x in enumerate(values):
        x.fill_(i + 1)
    assert all((x == i + 1).all() for i, x in enumerate(values))
    assert values[0].untyped_storage().nbytes() == V * (3 * 4 + 5 * 2)  # as much as is taken


@pytest.mark.parametrize("factor", (None, 3.0))
@pytest.mark.parametrize(("V", "K"), ((128, 1), (129, 16), (1003, 3), (5000, 2)))
def test_a_bf16_gradient_is_rounded_once_where_it_was_summed(V, K, factor):
    """The result has the memory of one half of the sums; the other half is free."""
    sums, y = torch.randn(V, K), torch.empty(V, K, dtype=torch.bfloat16)
    grad = WeightGrad(y, one_product=False)
    for columns in column_slices(y, grad.rows):
        grad[columns].copy_(sums[columns])
    stored = grad.finalize()
    scale = None if factor is None else torch.tensor(factor)
    copied = stored.rounded(scale, in_place=False)
    result = scaled_gradient(stored, scale, torch.bfloat16, fresh=True)
    assert result.equal((sums * (factor or 1.0)).to(torch.bfloat16)) and result.equal(copied)
    whole = WeightGrad(y, one_product=True).parts[0]
    sizes = {x.untyped_storage().nbytes() for x in (*stored, result, whole)}
    assert len(sizes) == 1 and max(sizes) < 2 * (V + 128) * K
    assert result.data_ptr() == stored.first.data_ptr() != copied.data_ptr()


def test_a_weight_that_no_gemm_takes_is_copied():
    weight, dtype = torch.randn(6, 8), torch.float32
    assert as_operand(weight, dtype) is weight and as_operand(weight.T, dtype).T.equal(weight)
    assert as_operand(weight.T, dtype).data_ptr() == weight.data_ptr()
    assert as_operand(weight[:, ::2], dtype).is_contiguous()


# Half-precision products of a GPU, imitated on a CPU, in one sweep and in two


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("option", OPTIONS)
def test_half_precision_products(option, dtype, monkeypatch):
    """Two buffers as on a GPU: logits in strips of 5 rows, gradients of up to 50."""
    imitate(monkeypatch, dtype)
    config_options, options = OPTIONS[option]
    how = {"execution": Execution(chunk_bytes=24 * 1003 * 5), "scale": 4.0}
    batch = make_batch(B=8, T=16).to("cpu", dtype)
    # So few tokens that the roundings of E, of r h and of the result do not average out.
    tolerance = 5e-3 if dtype == torch.bfloat16 else TOLERANCE[dtype]
    options = {**options, **how, "config": config(**config_options)}
    expect_equal(batch, options, tolerance=tolerance)

"""The GEMMs of a call: their dtype, and how much of the weight they take at a time."""

import torch

from grpo_kernels import Execution, linear_logprobs
from grpo_kernels.arguments import head_call
from grpo_kernels.dense import Dense
from grpo_kernels.products import Products, columns_at_once, slices_of
from grpo_kernels.row_plan import Chunk, RowPlan


def call_of(hidden, weight):
    targets = torch.zeros(len(hidden), dtype=torch.int64)
    return head_call(hidden, weight, targets, None, None, Execution(backend="torch"))


def test_gemms_on_a_cpu_take_float32():
    half = torch.zeros(1, 1, dtype=torch.bfloat16)
    assert call_of(half, half).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call_of(half.float(), half.float()).dtype == torch.float32


def test_a_bf16_weight_is_upcast_in_slices():
    """Of 16 MiB on a CPU, whatever is asked for at once."""
    weight = torch.empty(1, dtype=torch.bfloat16).expand(3000, 2048)
    parts = list(slices_of(weight, torch.float32, len(weight)))
    assert [(c.start, c.stop) for c, _ in parts] == [(0, 2048), (2048, 3000)]
    assert {part.dtype for _, part in parts} == {torch.float32}


def test_products_with_a_bf16_weight_are_those_of_its_values():
    torch.manual_seed(0)
    weight, hidden = torch.randn(100, 8).bfloat16(), torch.randn(5, 8)
    dense = Dense(call_of(hidden, weight), RowPlan(None, 5, 5, 5, 5), entropy=False, keeps=False)
    dense.resume(Chunk(slice(0, 5), 5, True), None)
    torch.testing.assert_close(dense.logits(slice(0, 5)), hidden @ weight.float().T)
    d = torch.randn(5, 100)
    torch.testing.assert_close(dense.times(d, weight, own=True), d @ weight.float())


def test_a_cpu_makes_a_chunk_s_logits_a_part_of_the_vocabulary_at_a_time():
    hidden, weight, sizes = torch.randn(5, 8), torch.randn(5000, 8), []

    def matmul(a, b):
        sizes.append(b.shape[1])
        return a @ b

    targets = torch.zeros(5, dtype=torch.int64)
    linear_logprobs(hidden, weight, targets, execution=Execution(matmul=matmul))
    most = columns_at_once(weight)
    assert most % torch.get_num_threads() == 0 and max(sizes) == min(most, 5000)
    assert sum(sizes) == 5000


def test_rows_of_a_multiple_are_products_of_one_shape():
    """Each is the same bits in any company, which one product over all rows need not be."""
    shapes = []

    def matmul(a, b):
        shapes.append(tuple(a.shape))
        return a @ b

    a, b, out = torch.randn(12, 7), torch.randn(7, 9), torch.empty(12, 9)
    Products(torch.float32, 4, matmul).rows(a, b, out)
    assert shapes == [(4, 7)] * 3
    torch.testing.assert_close(out, a @ b)

"""`tests/helpers/fake_cuda.py` sees what it is there to see, and names the line."""

from contextlib import suppress

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from tests.helpers.fake_cuda import FakeCUDA, backward, reads_nothing

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.usefixtures("real_memory")


@triton.jit
def copy_kernel(x_ptr, out_ptr, N, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    tl.store(out_ptr + offs_n, tl.load(x_ptr + offs_n, mask=offs_n < N), mask=offs_n < N)


BAD = {
    # The True is a tensor on the CPU.
    "set_from_a_number": lambda x, ids: (x > 0).__setitem__((ids, ids), True),
    "multiply_by_a_cpu_number": lambda x, ids: x * torch.tensor(2.0),
    "make_from_a_number": lambda x, ids: torch.tensor(2.0, device=CUDA),
    "index_by_a_list": lambda x, ids: x[[0, 1]],
    "copy_to_the_device": lambda x, ids: torch.ones(5).to(CUDA),
    "copy_into": lambda x, ids: x.copy_(torch.ones(5)),
    "copy_to_the_cpu": lambda x, ids: x.cpu(),
    "read_a_number": lambda x, ids: x.sum().item(),
    "read_numbers": lambda x, ids: ids.tolist(),
    "branch_on_a_value": lambda x, ids: 1 if x.sum() > 0 else 2,
    "index_by_a_value": lambda x, ids: x[ids[0]],
    "slice_by_a_value": lambda x, ids: x[: ids[0]],
    "select_by_a_mask": lambda x, ids: x[x > 0],
    "write_by_a_mask": lambda x, ids: x.__setitem__(x > 0, x[0, 0]),
    "find_nonzero": lambda x, ids: x.nonzero(),
    "find_unique": lambda x, ids: ids.unique(),
    "repeat_by_values": lambda x, ids: ids.repeat_interleave(ids),
    "compare_as_a_whole": lambda x, ids: torch.equal(ids, ids),
    "launch_on_the_cpu": lambda x, ids: copy_kernel[(1,)](x, torch.ones(8), 8, BLOCK_N=16),
}


@pytest.mark.parametrize("name", BAD)
def test_flags(name):
    line = BAD[name].__code__.co_firstlineno
    with pytest.raises(AssertionError) as failure, FakeCUDA() as gpu:
        x, ids = torch.empty(8, 5, device=CUDA), torch.arange(4, device=CUDA)
        assert not gpu.transfers
        with suppress(DataDependentOutputException, DynamicOutputShapeException):
            BAD[name](x, ids)
        assert not gpu.transfers, gpu.report()
    assert len(gpu.transfers) == 1
    assert f'tests/test_fake_cuda_can_fail.py:{line}: "{name}": ' in str(failure.value)


def test_flags_nothing_else():
    def call():
        x, ids = torch.empty(8, 5, device=CUDA), torch.arange(4, device=CUDA)
        x[2:] = 0.0
        x[ids] = x[:4]
        (2.0 * x).view(-1).index_fill_(0, ids, 1.0)
        x.masked_fill_(x > 0, 1.0)
        torch.where(x > 0, x, 0.0).sum().clamp(min=1)
        torch.nonzero_static(x > 0, size=3)
        ids.repeat_interleave(3, output_size=12)
        torch._assert_async((ids < 5).all())
        torch.ones(3).sum().item()
        torch.randint(5, (3,), device=CUDA, generator=torch.Generator(CUDA).manual_seed(0))
        copy_kernel[(1,)](x, torch.empty_like(x), 40, BLOCK_N=64)

    reads_nothing(call)


def test_reads_nothing_fails():
    with pytest.raises(AssertionError, match=r"torch\.ones\(3, device=CUDA\)\.tolist\(\)"):
        reads_nothing(lambda: torch.ones(3, device=CUDA).tolist())


def test_a_read_is_answered():
    with FakeCUDA(lambda x: [7] * len(x)) as gpu:
        assert torch.empty(3, device=CUDA).tolist() == [7, 7, 7]
    assert [event.name for event in gpu.transfers] == ["tolist"]
    assert not gpu.counts().total()


def test_launches_are_counted():
    with FakeCUDA() as gpu:
        x = torch.empty(8, 5, device=CUDA)
        assert not gpu.launches
        y = (x + 1).view(-1)[3:].unsqueeze(0).expand(2, -1)
        torch.mm(y.contiguous().t(), y, out=y.new_empty(37, 37))
        copy_kernel[(1,)](x, x, 40, BLOCK_N=64)
        torch.ones(3) + 1
    assert gpu.counts() == {"add.Tensor": 1, "clone": 1, "mm.out": 1, "copy_kernel": 1}
    assert all("test_fake_cuda_can_fail.py" in event.where for event in gpu.launches)


def test_keys_follow_what_triton_specializes():
    def keys(sizes, offset=0, **options):
        with FakeCUDA() as gpu:
            x = torch.empty(100, device=CUDA)
            for N in sizes:
                copy_kernel[(1,)](x[offset * N :], x, N, BLOCK_N=64, **options)
        return [len(found) for found in gpu.keys.values()]

    assert keys((32, 48)) == [1]
    assert keys((32, 33, 1)) == [3]  # divisible by 16, not, and 1
    assert keys((32, 48), offset=1) == [1]
    assert keys((17, 18, 20), offset=1) == [2]  # memory that begins where vectors do, and not
    with FakeCUDA() as gpu:
        x = torch.empty(100, device=CUDA)
        for num_warps in (4, 8):
            copy_kernel[(1,)](x, x, 32, BLOCK_N=64, num_warps=num_warps)
    assert [len(found) for found in gpu.keys.values()] == [1, 1]


def test_backward_is_run():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, d_out):
            return d_out * torch.tensor(2.0)

    with FakeCUDA() as gpu:
        x = torch.empty(4, device=CUDA, requires_grad=True)
        out = Double.apply(x).reshape(2, 2)
        assert not gpu.transfers
        backward(out, torch.ones(4, device=CUDA))
    assert "d_out * torch.tensor(2.0)" in gpu.report()

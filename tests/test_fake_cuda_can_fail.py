"""`tests/helpers/fake_cuda.py` sees what it is there to see, and names the line."""

import inspect
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


def set_from_a_number(x, targets):
    # As the sampled backward once did: the True is a tensor on the CPU.
    certain, block_of_row = x > 0, targets // 2
    certain[block_of_row, targets] = True


def multiply_by_a_cpu_number(x, ids):
    return x * torch.tensor(2.0)


def make_from_a_number(x, ids):
    return torch.tensor(2.0, device=CUDA)


def index_by_a_list(x, ids):
    return x[[0, 1]]


def copy_to_the_device(x, ids):
    return torch.ones(5).to(CUDA)


def copy_into(x, ids):
    x.copy_(torch.ones(5))


def copy_to_the_cpu(x, ids):
    return x.cpu()


def read_a_number(x, ids):
    return x.sum().item()


def read_numbers(x, ids):
    return ids.tolist()


def branch_on_a_value(x, ids):
    return 1 if x.sum() > 0 else 2


def index_by_a_value(x, ids):
    return x[ids[0]]


def slice_by_a_value(x, ids):
    return x[: ids[0]]


def select_by_a_mask(x, ids):
    return x[x > 0]


def write_by_a_mask(x, ids):
    x[x > 0] = x[0, 0]


def find_nonzero(x, ids):
    return x.nonzero()


def find_unique(x, ids):
    return ids.unique()


def repeat_by_values(x, ids):
    return ids.repeat_interleave(ids)


def compare_as_a_whole(x, ids):
    return torch.equal(ids, ids)


def launch_on_the_cpu(x, ids):
    copy_kernel[(1,)](x, torch.ones(8), 8, BLOCK_N=16)


BAD = [f for f in globals().values() if inspect.isfunction(f) and f.__module__ == __name__]


@pytest.mark.parametrize("snippet", BAD, ids=lambda f: f.__name__)
def test_flags(snippet):
    statement = inspect.getsource(snippet).splitlines()[-1].strip()
    with pytest.raises(AssertionError) as failure, FakeCUDA() as gpu:
        x, ids = torch.empty(8, 5, device=CUDA), torch.arange(4, device=CUDA)
        assert not gpu.transfers
        with suppress(DataDependentOutputException, DynamicOutputShapeException):
            snippet(x, ids)
        assert not gpu.transfers, gpu.report()
    assert len(gpu.transfers) == 1
    assert statement in str(failure.value)
    assert f"tests/{__name__.rpartition('.')[2]}.py:" in str(failure.value)


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

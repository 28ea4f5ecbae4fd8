"""Transfers, launches and compilations of calls, counted without a GPU.

`tests/helpers/fake_cuda.py` counts.
"""

import ast
import random
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.testing._internal.distributed.fake_pg import FakeStore

import grpo_kernels
from grpo_kernels import Execution, LMHead, Reference, VocabRanks, grpo_loss, selective_log_softmax
from grpo_kernels.head import call as head_calls
from tests.helpers.batches import OBJECTIVES, config
from tests.helpers.fake_cuda import CUDA, CountedCUDA
from tests.helpers.flat_calls import fused_grpo_loss, linear_logprobs

V, H, B, N = 151_936, 1536, 4, 2048
# Half of the rows at a time: gradients in half precision, logits in strips of 128 rows.
HALVES = {"chunk_bytes": 2 * V * 1024 + 4 * V * 128}
EXACT_KL = {"beta": 0.1, "kl_estimator": "exact"}

# Memory that conftest.py poisons is written to.
pytestmark = pytest.mark.usefixtures("real_memory")


def empty(*shape, dtype=torch.float32, train=False):
    return torch.empty(shape, dtype=dtype, device=CUDA, requires_grad=train)


def tensors_of(names, shape, entries):
    """The tensors of these names beside a head's, for tokens `[B, T]` or `[N]`."""
    count = torch.Size(shape).numel()
    makers = {
        "mask": lambda: empty(*shape, dtype=torch.bool),
        "bias": lambda: empty(V, train=True),
        "low_rank": lambda: (empty(*shape, 16, train=True), empty(V, 16, train=True)),
        "support": lambda: (
            empty(count * entries, dtype=torch.int32), empty(count + 1, dtype=torch.long)
        ),
        "reference": lambda: Reference(empty(*shape, 2 * H), LMHead(empty(V, 2 * H))),
        "cu_seqlens": lambda: empty(B + 1, dtype=torch.int32),
        "num_items": empty,
    }  # fmt: skip
    return {name: makers.get(name, lambda: empty(*shape))() for name in names.split()}


def head_call(
    kind, names="", *, shape=(B, N // B), K=(), dtype=torch.bfloat16, frozen=False, entries=8,
    objective=None, **options,
):  # fmt: skip
    """A call over a head, that makes its tensors and returns what is differentiated.

    A loss takes other denominators than its own.
    """

    def call(**num_items):
        tensors = tensors_of(names, shape, entries) | num_items
        rows = shape[0] if len(shape) > 1 else B
        hidden = empty(*shape, H, dtype=dtype, train=True)
        weight = empty(V, H, dtype=dtype, train=not frozen)
        targets = empty(*shape, *K, dtype=torch.long)
        if kind == "distillation":
            out = grpo_kernels.fused_distillation_loss(
                hidden, weight, **tensors, execution=Execution(**options)
            )
        elif kind == "logps":
            out = linear_logprobs(hidden, weight, targets, entropy=not frozen, **tensors, **options)
            return out.logps.sum() if frozen else out.logps.sum() + out.entropy.sum()
        else:
            cfg = config(**(objective or {}))
            kwargs = {"config": cfg, **tensors, **options}
            out = fused_grpo_loss(hidden, weight, targets, empty(rows), **kwargs)
        return out.loss

    call.is_loss = kind != "logps"
    return call


loss, logps, distillation = (partial(head_call, kind) for kind in ("loss", "logps", "distillation"))


def logps_loss(objective, shape=(B, N // B)):
    """The loss of log-probs that are there."""

    def call(**num_items):
        cfg, names = OBJECTIVES[objective]
        tensors = tensors_of(" ".join(("entropy", "mask", *names)), shape, 0) | num_items
        logps = empty(*shape, train=True)
        return grpo_loss(logps, empty(B), config=config(**cfg), **tensors).loss

    call.is_loss = True
    return call


def log_softmax():
    logits = empty(B, 65, V, dtype=torch.bfloat16, train=True)[:, :-1]
    targets, temperature = empty(B, 64, dtype=torch.long), empty(B, 64)
    return selective_log_softmax(logits, targets, temperature=temperature).sum()


log_softmax.is_loss = False


EVERYTHING = loss(
    "mask old_logps ref_logps sampling_logps bias low_rank temperature",
    objective={"beta": 0.1, "entropy_coef": 0.1, "is_correction": "token_mask"},
    softcap=30.0, logit_scale=0.5,
)  # fmt: skip
GSPO = {"loss_type": "gspo"}
# Name: the call; for it and its backward the answers to reads (the last numbers of each, counts of
# rows or entries), the launches of Triton kernels and of GEMMs, and the maximum of other launches.
CALLS = {
    # One pass reads how many rows take part, where there is a mask, and how many have a gradient.
    # A strip of logits is a GEMM and a sweep, a chunk two GEMMs and the objective.
    "loss": (loss("old_logps"), [[N]], 5, 6, 65),
    "two chunks": (loss("old_logps", **HALVES), [[N]], 18, 20, 75),
    "one sequence": (loss("old_logps", shape=(1, N)), [[N]], 5, 6, 65),
    "masked": (loss("mask old_logps"), [[900, 900]], 3, 4, 90),
    "packed": (
        loss("mask old_logps cu_seqlens num_items", shape=(N,)), [[900, 900]], 3, 4, 110
    ),
    "cross-entropy": (loss("mask old_logps ce_weights"), [[N, 900]], 6, 6, 140),
    "LoRA": (loss("old_logps bias low_rank temperature"), [[N]], 5, 13, 95),
    "capturable": (loss("mask old_logps", capturable=True), [], 5, 6, 80),
    # Logits and gradients on the same memory.
    "float32": (loss("old_logps", dtype=torch.float32, **HALVES), [[N]], 8, 12, 95),
    # A second sweep makes the gradient.
    "float16": (loss("old_logps", dtype=torch.float16), [[N]], 3, 3, 80),
    "entropy": (loss("old_logps", objective={"entropy_coef": 0.1}), [[]], 3, 3, 75),
    "everything": (EVERYTHING, [[N]], 3, 7, 140),
    # Products of 256 rows.
    "batch-invariant": (
        loss("old_logps", batch_invariant=True, **HALVES), [[N]], 10, 18, 75
    ),
    # Two passes: the second makes the logits again, of rows that it reads the number of.
    "log-probs": (logps(**HALVES), [[], [N]], 20, 24, 55),
    "log-probs, capturable": (logps("mask", capturable=True), [], 5, 7, 50),
    "several targets": (logps(K=(4,), **HALVES), [[], [N]], 20, 24, 430),
    "two passes": (loss("old_logps mask", objective=GSPO, **HALVES), [[N], [N]], 20, 24, 170),
    # With a frozen head the forward keeps the gradients.
    "frozen": (logps(frozen=True, **HALVES), [[]], 16, 18, 35),
    "not kept": (logps(frozen=True, keep_gradients=False, **HALVES), [[], [N]], 20, 22, 35),
    # Two heads: their logits side by side, in one sweep.
    "distillation": (
        distillation("mask reference", chunk_bytes=10 * V * 1024), [[N]], 4, 8, 35
    ),
    "distillation, capturable": (
        distillation("mask reference", capturable=True), [], 2, 4, 40
    ),
    "exact KL": (loss("mask old_logps reference", objective=EXACT_KL), [[N]], 3, 4, 80),
    "reference": (loss("mask old_logps reference", objective={"beta": 0.1}), [[N]], 9, 10, 80),
    # Tokens of a support: how many there are is read, and how many entries. Launches depend on
    # neither, but where segments are so short that programs share none.
    "support": (loss("old_logps support"), [[0, 0, 8 * N, N]], 8, 1, 230),
    "larger support": (
        loss("old_logps support", shape=(B, N), entries=64), [[0, 0, 256 * N, 4 * N]], 8, 1, 230
    ),
    "small support": (
        loss("old_logps support", shape=(B, 32), entries=2), [[0, 0, 256, 128]], 4, 1, 225
    ),
    "support of some": (
        logps("support"), [[900, 8 * (N - 900), N - 900], [900]], 10, 6, 230
    ),
    # Without a head.
    "log_softmax": (log_softmax, [], 8, 0, 20),
    "loss of log-probs": (logps_loss("kl_old_delta"), [], 1, 0, 70),
}  # fmt: skip


# Operations that PyTorch has NVRTC compile in the first call of each process.
COMPILED_AT_RUN_TIME = {
    "digamma", "entr", "erfcx", "exp2", "gcd", "i0", "i0e", "i1", "i1e", "kaiser_window", "lcm",
    "lgamma", "log_ndtr", "ndtri", "polygamma", "sinc", "zeta",
}  # fmt: skip


def count(call, *answers, **num_items):
    """Returns counts of a call and its backward."""
    with CountedCUDA(*answers) as gpu:
        call(**num_items).backward()
    operations = {name.split(".")[0].removeprefix("special_") for name in gpu.launches}
    assert not operations & COMPILED_AT_RUN_TIME
    return gpu


@pytest.mark.parametrize("name", CALLS)
def test_what_a_call_asks(name):
    call, answers, *expected, most = CALLS[name]
    gpu = count(call, *answers)
    kernels = sum(n for kernel, n in gpu.launches.items() if kernel.endswith("_kernel"))
    gemms = sum(n for operation, n in gpu.launches.items() if "mm" in operation)
    assert len(gpu.transfers) == len(answers), gpu.transfers
    assert [kernels, gemms] == expected, gpu.launches
    assert gpu.launches.total() - kernels - gemms <= most, gpu.launches


def test_the_gradient_of_a_head_is_a_float32_sum_unless_one_product_is_all_of_it():
    """A chunk after the first adds to a sum in float32, which no GEMM rounds in between."""
    one, two = (count(CALLS[name][0], [N]).launches for name in ("loss", "two chunks"))
    assert [one["mm.out"], one["addmm.dtype_out"], one["addmm.out"]] == [1, 0, 0]
    assert [two["mm.out"], two["addmm.dtype_out"], two["addmm.out"]] == [0, 1, 0]


@pytest.mark.parametrize("num_items", (7, 7.5))
@pytest.mark.parametrize("name", [x for x in CALLS if CALLS[x][0].is_loss])
def test_a_number_goes_with_a_launch(name, num_items):
    call, answers, *_ = CALLS[name]
    counted, other = count(call, *answers), count(call, *answers, num_items=num_items)
    assert len(counted.transfers) == len(other.transfers)
    assert other.launches.total() <= counted.launches.total()


@pytest.mark.parametrize("num_items", ({}, {"num_items": 7}, {"num_items": 7.5}))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_objective_reads(name, num_items):
    """A capturable call, where every row is computed, and a loss of log-probs read nothing."""
    objective, names = OBJECTIVES[name]
    tensors = " ".join(("mask", *names))
    for call in (logps_loss(name), loss(tensors, objective=objective, capturable=True)):
        assert not count(call, **num_items).transfers


@pytest.fixture
def two_ranks():
    """A group of two processes, of which the other one does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield VocabRanks(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("chunks", (1, 2))
def test_ranks_read_what_they_have_and_their_row_counts(two_ranks, chunks):
    """Each of the two once, after an upload of what is asked; a chunk is gathered once."""

    def with_ranks(x):
        answer = torch.zeros(x.shape, dtype=torch.float64)
        answer[:, 1] = V  # the columns that each has
        return answer.view(torch.int64)

    call = loss(ranks=two_ranks, chunk_bytes=2 * HALVES["chunk_bytes"] // chunks)
    gpu = count(call, with_ranks, (N,))
    assert [x.split()[0] for x in gpu.transfers] == ["_to_copy", "read"] * 2, gpu.transfers
    assert gpu.launches["policy_loss_kernel"] == chunks
    assert gpu.launches["c10d::_allgather_base_"] == 2 + chunks


@pytest.fixture(scope="module", params=(3, pytest.param(60, marks=pytest.mark.slow)))
def keys(request):
    """Returns the compilation keys of each kernel over batches of random sizes.

    That is a kernel's options, the dtypes of its tensors, and the width of what entries are of.
    """
    draw, by_kind = random.Random(0), {}
    options = {"objective": {"beta": 0.1, "entropy_coef": 0.1}}
    for _ in range(request.param):
        shape, entries = (B, draw.randint(40, 150)), draw.randint(1, 99)
        tokens = B * shape[1]
        some, without = draw.randint(1, tokens), draw.randint(1, tokens // 3)
        how = {"shape": shape, "chunk_bytes": 4 * V * draw.choice((37, 128, 384))}
        entry_shape = entries * (tokens - without), tokens - without
        calls = (
            (loss("old_logps ref_logps temperature", **options, **how),),
            (logps_loss("kl_old_delta", shape),),
            (logps(**how), [], [some]),
            (logps("bias support", entries=entries, **how), [without, *entry_shape], [without]),
        )
        for call, *answers in calls:
            for (kernel, constants), launch_keys in count(call, *answers).keys.items():
                for key in map(ast.literal_eval, launch_keys):
                    dtypes = [kind[0] for name, kind in key.items() if name.endswith("_ptr")]
                    kind = kernel, constants, *dtypes, key.get("K")
                    by_kind.setdefault(kind, set()).add(str(key))
    return by_kind


def test_no_size_compiles_a_kernel_again(keys):
    assert len({kernel for kernel, *_ in keys}) == 7
    for kind, variants in keys.items():
        assert len(variants) == 1, (kind, variants)


def test_operands_of_two_dtypes_are_warned_of_once(monkeypatch):
    """Outside autocast: their GEMMs run in float32."""
    head_calls._warn_of_float32_products.cache_clear()
    said = "weight: bfloat16 hidden states and a float32 head are multiplied in float32"
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    for autocast, expected in ((True, 0), (False, 1), (False, 0)):
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda _, on=autocast: on)
        with CountedCUDA(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            hidden = empty(8, H, dtype=torch.bfloat16)
            linear_logprobs(hidden, empty(V, H), empty(8, dtype=torch.long))
        assert [said in str(x.message) for x in warned].count(True) == expected


# The counts see what they are there to see.


@triton.jit
def copy_kernel(x_ptr, out_ptr, N, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    tl.store(out_ptr + offs_n, tl.load(x_ptr + offs_n, mask=offs_n < N), mask=offs_n < N)


# Counted, or what torch refuses to do without values.
BAD = {
    # The True is a tensor on the CPU.
    "set from a number": lambda x, ids: (x > 0).__setitem__((ids, ids), True),
    "select by a CPU number": lambda x, ids: torch.where(x > 0, x, torch.tensor(2.0)),
    "make from a number": lambda x, ids: torch.tensor(2.0, device=CUDA),
    "index by a list": lambda x, ids: x[[0, 1]],
    "copy to the device": lambda x, ids: torch.ones(5).to(CUDA),
    "copy into": lambda x, ids: x.copy_(torch.ones(5)),
    "copy to the CPU": lambda x, ids: x.cpu(),
    "read numbers": lambda x, ids: ids.tolist(),
    "branch on a value": lambda x, ids: 1 if x.sum() > 0 else 2,
    "slice by a value": lambda x, ids: x[: ids[0]],
    "select by a mask": lambda x, ids: x[x > 0],
    "write by a mask": lambda x, ids: x.__setitem__(x > 0, x[0, 0]),
    "find nonzero": lambda x, ids: x.nonzero(),
    "repeat by values": lambda x, ids: ids.repeat_interleave(ids),
    "launch on the CPU": lambda x, ids: copy_kernel[(1,)](x, torch.ones(8), 8, BLOCK_N=16),
}


@pytest.mark.parametrize("name", BAD)
def test_reads_are_seen(name):
    said = ""
    with CountedCUDA() as gpu:
        x, ids = torch.empty(8, 5, device=CUDA), torch.arange(4, device=CUDA)
        try:
            BAD[name](x, ids)
        except (RuntimeError, AssertionError) as error:
            said = str(error)
    assert len(gpu.transfers) == 1 or "meta" in said or "on the CPU" in said


def test_nothing_else_is_a_read():
    with CountedCUDA() as gpu:
        x, ids = torch.empty(8, 5, device=CUDA), torch.arange(4, device=CUDA)
        x[2:] = 0.0
        x[ids] = x[:4]
        (2.0 * x).view(-1).index_fill_(0, ids, 1.0)
        torch.where(x > 0, x, 0.0).sum().clamp(min=1)
        ids.repeat_interleave(3, output_size=12)
        torch._assert_async((ids < 5).all())
        torch.ones(3).sum().item()
    assert not gpu.transfers


def test_launches_and_compilations_are_counted():
    with CountedCUDA() as gpu:
        x = torch.empty(8, 5, device=CUDA)
        y = (x + 1).view(-1)[3:].unsqueeze(0).expand(2, -1)
        torch.mm(y.contiguous().t(), y, out=y.new_empty(37, 37))
        torch.ones(3) + 1
        for N, begin in ((32, 0), (48, 4), (33, 8), (1, 0), (32, 1)):
            copy_kernel[(1,)](x.view(-1)[begin:], x, N, BLOCK_N=64)
        copy_kernel[(1,)](x, x, 32, BLOCK_N=64, num_warps=8)
    assert gpu.launches == {"add.Tensor": 1, "clone": 1, "mm.out": 1, "copy_kernel": 6}
    # Sizes that 16 divides are one; a size of 1, others, and memory between vectors are not.
    assert [len(variants) for variants in gpu.keys.values()] == [4, 1]

"""Transfers, launches and compilations of calls, counted without a GPU.

`tests/helpers/fake_cuda.py` counts.
"""

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import grpo_kernels
from grpo_kernels import Execution, LMHead, Reference, VocabRanks
from tests.helpers.batches import OBJECTIVES, config
from tests.helpers.fake_cuda import CUDA, CountedCUDA

V, H, B, N = 151_936, 1536, 4, 2048
# Half of the rows at a time: gradients in half precision, logits in strips of 128 rows.
HALVES = {"chunk_bytes": 2 * V * 1024 + 4 * V * 128}
GSPO, EXACT_KL = {"loss_type": "gspo"}, {"beta": 0.1, "kl_estimator": "exact"}
# Memory that conftest.py poisons is written to.
pytestmark = pytest.mark.usefixtures("real_memory")


def empty(*shape, dtype=torch.float32, train=False):
    return torch.empty(shape, dtype=dtype, device=CUDA, requires_grad=train)


def tensors_of(names, shape, entries=8):
    """The tensors of these names for tokens `[B, T]` or `[N]`."""
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


def call_of(
    kind, names="", head="", *, shape=(B, N // B), K=(), dtype=torch.bfloat16, frozen="",
    entries=8, cfg=(), numbers=(), entropy=True, metrics=False, **execution,
):  # fmt: skip
    """A call that makes its tensors, `names` of its own and those of the `head`, and a sum.

    A loss takes other denominators than its own; `metrics` are read.
    """

    def loss_of(out):
        assert not metrics or len(out.metrics) > 5
        return out.loss

    def call(**num_items):
        tensors = tensors_of(names, shape, entries) | num_items
        advantages = empty(shape[0] if len(shape) > 1 else B)
        targets, how = empty(*shape, *K, dtype=torch.long), {"config": config(**dict(cfg))}
        function = getattr(grpo_kernels, kind)
        if kind == "grpo_loss":
            return loss_of(function(empty(*shape, train=True), advantages, **how, **tensors))
        if kind == "selective_log_softmax":
            logits = empty(B, shape[1] + 1, V, dtype=dtype, train=True)[:, :-1]
            return function(logits, targets, **tensors).sum()
        lm_head = LMHead(
            empty(V, H, dtype=dtype, train="weight" not in frozen), **tensors_of(head, shape),
            **dict(numbers),
        )  # fmt: skip
        args = empty(*shape, H, dtype=dtype, train="hidden" not in frozen), lm_head
        tensors["execution"] = Execution(**execution)
        if kind == "linear_logprobs":
            entropy_has_grad = entropy and not frozen
            out = function(*args, targets, entropy=entropy_has_grad, **tensors)
            return out.logps.sum() + (out.entropy.sum() if entropy_has_grad else 0.0)
        if kind == "fused_distillation_loss":
            return loss_of(function(*args, **tensors))
        return loss_of(function(*args, targets, advantages, **how, **tensors))

    call.is_loss = kind.endswith("loss")
    return call


loss, logps, distillation = (
    partial(call_of, kind)
    for kind in ("fused_grpo_loss", "linear_logprobs", "fused_distillation_loss")
)


def loss_of_logps(objective, **how):
    cfg, names = OBJECTIVES[objective]
    return call_of("grpo_loss", " ".join(("entropy", "mask", *names)), cfg=cfg, **how)


# Name: the call; for it and its backward the answers to reads (the last numbers of each, counts of
# rows or entries), the launches of Triton kernels and of GEMMs, and the maximum of other launches.
CALLS = {
    # One pass reads how many rows take part, where there is a mask, and how many have a gradient.
    # A strip of logits is a GEMM and a sweep, a chunk two GEMMs and the objective; of several
    # chunks three GEMMs: the sum of the weight's gradient has two parts, rounded at the end.
    "loss": (loss("old_logps", metrics=True), [[N]], 5, 6, 70),
    "two chunks": (loss("old_logps", **HALVES), [[N]], 18, 22, 60),
    "packed": (
        loss("mask old_logps cu_seqlens num_items ce_weights", shape=(N,)), [[N, 900]], 6, 6, 100
    ),
    # What is frozen costs no GEMM.
    "frozen head": (loss("old_logps", frozen="weight"), [[N]], 5, 5, 25),
    # Logits and gradients on the same memory.
    "float32": (loss("old_logps", dtype=torch.float32, **HALVES), [[N]], 8, 12, 55),
    # A second sweep makes the gradient.
    "float16": (loss("old_logps", dtype=torch.float16), [[N]], 3, 3, 40),
    "everything": (
        loss("mask old_logps ref_logps sampling_logps", "bias low_rank temperature",
             numbers={"softcap": 30.0, "logit_scale": 0.5},
             cfg={"beta": 0.1, "entropy_coef": 0.1, "is_correction": "token_mask"}),
        [[N]], 3, 7, 75,
    ),
    # Products of 256 rows.
    "batch-invariant": (loss("old_logps", batch_invariant=True, **HALVES), [[N]], 10, 20, 60),
    # Two passes: the first keeps the exponentials of rows that are one chunk. The second reads how
    # many rows have a gradient, and makes the logits of few, or of more chunks, again.
    "kept": (loss("old_logps mask", cfg=GSPO), [[N], [N, 0]], 4, 6, 115),
    "two passes": (logps(K=(4,), **HALVES), [[], [N]], 20, 26, 490),
    # With a frozen head the forward keeps the gradients.
    "scores": (logps(frozen="weight", **HALVES), [[]], 16, 18, 35),
    # Two heads: statistics of both, the divergence, the gradient.
    "distillation": (
        distillation("mask reference", frozen="weight", metrics=True), [[N]], 3, 3, 30
    ),
    "exact KL": (loss("mask old_logps reference", cfg=EXACT_KL), [[N]], 4, 4, 35),
    "reference": (loss("mask old_logps reference", cfg={"beta": 0.1}), [[N]], 9, 10, 35),
    # Tokens of a support: how many there are is read, and how many entries. Launches depend on
    # neither, but where segments are so short that programs share none.
    "support": (
        loss("old_logps support", shape=(B, N), entries=64), [[0, 0, 256 * N, 4 * N]], 8, 1, 240
    ),
    "support of some": (logps("support"), [[900, 8 * (N - 900), N - 900], [900]], 10, 6, 235),
    # Without a head.
    "log_softmax": (call_of("selective_log_softmax", "temperature", shape=(B, 64)), [], 8, 0, 20),
    "loss of log-probs": (loss_of_logps("kl_old_delta"), [], 1, 0, 25),
}  # fmt: skip


# Operations that PyTorch has NVRTC compile in the first call of each process.
COMPILED_AT_RUN_TIME = {
    "digamma", "entr", "erfcx", "exp2", "gcd", "i0", "i0e", "i1", "i1e", "kaiser_window", "lcm",
    "lgamma", "log_ndtr", "ndtri", "polygamma", "sinc", "zeta",
}  # fmt: skip


def count(call, *answers, **num_items):
    """Returns counts of a call and its backward."""
    with CountedCUDA(*answers) as gpu:
        total = call(**num_items)
        if total.requires_grad:
            total.backward()
    operations = {name.split(".")[0].removeprefix("special_") for name in gpu.launches}
    assert not operations & COMPILED_AT_RUN_TIME
    return gpu


@pytest.mark.parametrize("name", CALLS)
def test_what_a_call_asks(name):
    """Also with another number of items, which goes with a launch."""
    call, answers, *expected, most = CALLS[name]
    gpu = count(call, *answers)
    kernels = sum(n for kernel, n in gpu.launches.items() if kernel.endswith("_kernel"))
    gemms = sum(n for operation, n in gpu.launches.items() if "mm" in operation)
    assert len(gpu.transfers) == len(answers), gpu.transfers
    assert [kernels, gemms] == expected, gpu.launches
    assert gpu.launches.total() - kernels - gemms <= most, gpu.launches
    for num_items in (7.5,) if call.is_loss else ():
        other = count(call, *answers, num_items=num_items)
        assert len(other.transfers) == len(answers)
        assert other.launches.total() <= gpu.launches.total()


class Allocated(CountedCUDA):
    """Notes the bytes of large tensors, in the order in which they are made."""

    def __init__(self, *answers):
        super().__init__(*answers)
        self.large = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if "empty" in func.overloadpacket.__name__ and out.numel() * out.itemsize >= 64 << 20:
            self.large.append(out.numel() * out.itemsize)
        return out


BUDGET, WEIGHT = HALVES["chunk_bytes"], 2 * V * H


@pytest.mark.parametrize(
    ("call", "answers", "expected"),
    (
        # The block of all buffers; then the weight's gradient, the sum of each half as large as it.
        (loss("mask old_logps", **HALVES), [[N, N]], [BUDGET, WEIGHT, WEIGHT]),
        (logps(frozen="hidden weight", **HALVES), [[]], [BUDGET]),
        (logps(**HALVES), [[], [N]], [BUDGET, BUDGET, WEIGHT, WEIGHT]),
        # So few tokens that a quarter of the budget is enough.
        (loss("old_logps", shape=(B, 25), **HALVES), [[100]], [BUDGET // 4, WEIGHT]),
    ),
    ids=("masked", "scores", "two passes", "quarter"),
)
def test_large_tensors_have_two_sizes_and_the_block_comes_first(call, answers, expected):
    """In another order, or with more sizes, the allocator would cut one out of another's memory."""
    with Allocated(*answers) as gpu:
        total = call()
        gpu.large.remove(WEIGHT)  # itself
        if total.requires_grad:
            total.backward()
    assert gpu.large == expected


@pytest.mark.parametrize(("dtype", "in_place"), ((torch.bfloat16, False), (torch.float32, True)))
def test_rows_of_a_buffer_of_their_own_are_swept_once(dtype, in_place):
    """Twice only where exponentials take the memory of their logits, not where they have its dtype.

    A first sweep then looks for the maximum.
    """
    gpu = count(loss("old_logps", dtype=dtype), [N])
    sweeps = [
        kwargs for kernel, _, kwargs in gpu.kernels if kernel.__name__ == "token_stats_kernel"
    ]
    assert len(sweeps) > 0 and {kwargs["INVARIANT"] for kwargs in sweeps} == {in_place}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_objective_reads(name):
    """A loss of log-probs and its metrics read nothing: a CUDA graph can capture them."""
    assert not count(loss_of_logps(name, metrics=True)).transfers


@pytest.mark.parametrize("chunks", (1, 2))
def test_ranks_read_what_they_have_and_their_row_counts(chunks):
    """Each of the two once, after an upload of what is asked; a chunk is gathered once."""
    # Of two processes the other one does not exist.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

    def with_ranks(x):
        answer = torch.zeros(x.shape, dtype=torch.float64)
        answer[:, 1] = V  # the columns that each has
        return answer.view(torch.int64)

    try:
        ranks, size = {"ranks": VocabRanks(dist.group.WORLD)}, HALVES["chunk_bytes"]
        gpu = count(loss(numbers=ranks, chunk_bytes=2 * size // chunks), with_ranks, (N,))
    finally:
        dist.destroy_process_group()
    assert [x.split()[0] for x in gpu.transfers] == ["_to_copy", "read"] * 2, gpu.transfers
    assert gpu.launches["policy_loss_kernel"] == chunks
    assert gpu.launches["c10d::_allgather_base_"] == 2 + chunks


def compilations(gpu):
    """Per launch the kernel, its constants and options, and what Triton compiles it for besides."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    for kernel, args, kwargs in gpu.kernels:
        if not isinstance(kernel, JITFunction):  # but the interpreter's
            kernel = JITFunction(kernel.fn, **kernel.kwargs)
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        params, specialization, options = bind(*args, **kwargs)
        constants = {x.name: params[x.name] for x in kernel.params if x.is_constexpr}
        key = dict(zip(params, specialization, strict=True))
        key = {name: kind for name, kind in key.items() if name not in constants}
        yield kernel.__name__, str(constants | options), key


@pytest.mark.parametrize("batches", (3, pytest.param(60, marks=pytest.mark.slow)))
def test_no_size_compiles_a_kernel_again(batches):
    """Batches of random sizes; a kernel is its options, dtypes, and the width of its entries."""
    draw, by_kind = random.Random(0), {}
    for _ in range(batches):
        shape, entries = (B, draw.randint(40, 150)), draw.randint(1, 99)
        tokens = B * shape[1]
        some, without = draw.randint(1, tokens), draw.randint(1, tokens // 3)
        how = {"shape": shape, "chunk_bytes": 4 * V * draw.choice((37, 128, 384))}
        read = [without, entries * (tokens - without), tokens - without], [without]
        cfg = {"beta": 0.1, "entropy_coef": 0.1}
        calls = (
            (loss("old_logps ref_logps", "temperature", cfg=cfg, **how),),
            (loss_of_logps("kl_old_delta", shape=shape),),
            (logps(**how), [], [some]),
            (logps("support", "bias", entries=entries, **how), *read),
        )
        for call, *answers in calls:
            for kernel, constants, key in compilations(count(call, *answers)):
                dtypes = [kind[0] for name, kind in key.items() if name.endswith("_ptr")]
                kind = kernel, constants, *dtypes, key.get("K")
                by_kind.setdefault(kind, set()).add(str(key))
    assert len({kernel for kernel, *_ in by_kind}) == 7
    assert all(len(keys) == 1 for keys in by_kind.values()), by_kind

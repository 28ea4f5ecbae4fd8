"""What the calls ask of a GPU, seen without one: transfers, launches, compile keys.

`tests/helpers/fake_cuda.py` records them. A transfer is a read of the device, a copy between it and
the CPU, or an operation that mixes their tensors.
"""

import ast
import functools
import random
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import grpo_kernels
from grpo_kernels import (
    Execution,
    LMHead,
    Reference,
    VocabRanks,
    grpo_loss,
    selective_log_softmax,
)
from grpo_kernels.base.checks import ValueChecks
from grpo_kernels.head import call as head_calls
from grpo_kernels.head import dense
from grpo_kernels.head.plan import RowPlan
from grpo_kernels.kernels import torch_backend
from tests.helpers.batches import OBJECTIVES, config
from tests.helpers.fake_cuda import (
    FakeCUDA,
    answer_with,
    backward,
    backward_of_all,
    reads_nothing,
)
from tests.helpers.flat_calls import fused_grpo_loss, linear_logprobs

V, H, B = 151_936, 1536, 4
CUDA = torch.device("cuda", 0)
CHUNK_ROWS = 1024
# As chunks are made of strips of logits, beside their gradients.
STRIP_ROWS = 128


class Budget(NamedTuple):
    """The most launches of a forward with its backward.

    A call of c chunks of r rows may have `fixed + c * (per_chunk + r / STRIP_ROWS * per_part)`.
    """

    fixed: int
    per_chunk: int
    per_part: float


# A part is a strip of logits.
BUDGETS = {
    "off_policy": Budget(fixed=100, per_chunk=15, per_part=2),
    # dH of all tokens is scaled so many bytes at a time.
    "mask": Budget(fixed=115, per_chunk=20, per_part=2.2),
}


# Memory that conftest.py poisons is written to.
pytestmark = pytest.mark.usefixtures("real_memory")


def empty(*shape, dtype=torch.float32, train=False):
    return torch.empty(shape, dtype=dtype, device=CUDA, requires_grad=train)


def head(*tokens, dtype=torch.bfloat16):
    """Operands and targets of a head, of `[B, T]` or `[N]` tokens."""
    hidden, weight = (
        empty(*tokens, H, dtype=dtype, train=True),
        empty(V, H, dtype=dtype, train=True),
    )
    return hidden, weight, empty(*tokens, dtype=torch.long)


def bytes_of(rows, layout="strips"):
    """The `chunk_bytes` of chunks of so many rows: logits, and their gradient in half precision."""
    if layout == "strips":
        assert rows <= 24 * STRIP_ROWS  # beyond, strips grow
        return 2 * V * rows + 4 * V * STRIP_ROWS
    return {"one": 4, "two": 6}[layout] * V * rows


def options_of(names, *tokens):
    """The optional tensors of these names."""
    made = {name: empty(*tokens) for name in names}
    if "mask" in made:
        made["mask"] = empty(*tokens, dtype=torch.bool)
    if "bias" in made:
        made["bias"] = empty(V, dtype=torch.bfloat16, train=True)
    if "low_rank" in made:
        made["low_rank"] = empty(*tokens, 16, train=True), empty(V, 16, train=True)
    return made


# id: (names of the tensors to pass, options of the objective, of the call)
_KL, _HEAD = ("old_logps", "ref_logps"), ("mask", "bias", "low_rank", "temperature")
CASES = {
    "on_policy": ((), {}, {}),
    "off_policy": (("old_logps",), {}, {}),
    "mask": (("mask", "old_logps"), {}, {}),
    "cross_entropy": (("mask", "old_logps", "ce_weights"), {}, {}),
    "kl": (_KL, {"beta": 0.1}, {}),
    "entropy": (("mask", "old_logps"), {"entropy_coef": 0.1}, {}),
    "corrected": (("old_logps", "sampling_logps"), {"is_correction": "token_truncate"}, {}),
    "head": (_HEAD, {}, {"softcap": 30.0}),
    "frozen": (("mask",), {}, {"frozen": True}),
    "fp16": (("old_logps",), {}, {"dtype": torch.float16}),
    "fp32": (("old_logps", "bias", "low_rank"), {}, {"dtype": torch.float32}),
    "everything": (
        (*_KL, "sampling_logps", *_HEAD),
        {"beta": 0.1, "entropy_coef": 0.1, "is_correction": "token_mask"},
        {"softcap": 30.0, "logit_scale": 0.5},
    ),
}


def has_two_counts(objective):
    """Whether rows that need no gradient are counted, too."""
    return not {"beta", "entropy_coef"} & objective.keys()


def record(case, call="loss", *, tokens=2048, counts=(), entries=0, without=0, **more):
    """Forward and backward of a call, recorded; and the number of forward transfers.

    With a support of so many `entries` per token, but for those `without` a set. Losses are of
    `[B, T]` tokens, log-probs of `[N]`.
    """
    names, objective, options = CASES[case]
    options = {**options, **more}
    dtype, frozen = options.pop("dtype", torch.bfloat16), options.pop("frozen", False)
    shape = (tokens,) if call == "logps" else (B, tokens // B)
    if entries:
        with_set = tokens - without
        counts = [without] * (1 + (call == "loss" and has_two_counts(objective)))
        counts += [entries * with_set, with_set]
    with FakeCUDA(answer_with(*counts)) as gpu:
        hidden, weight, targets = head(*shape, dtype=dtype)
        if entries:
            ids = empty(tokens * entries, dtype=torch.int32)
            options["support"] = ids, empty(tokens + 1, dtype=torch.long)
        if call == "logps":
            names = [name for name in names if name in _HEAD]
        head_and_targets = hidden, weight.detach() if frozen else weight, targets
        given = options_of(names, *shape)
        assert not gpu.launches
        if call == "logps":
            out = linear_logprobs(*head_and_targets, entropy=True, **given, **options)
            in_forward = len(gpu.transfers)
            if entries:
                backward_of_all(out.logps, out.entropy)
            else:
                backward(out.logps, *torch.ones(2, tokens, device=CUDA), None)
            return gpu, in_forward
        out = fused_grpo_loss(
            *head_and_targets, empty(B), config=config(**objective), **given, **options
        )
        in_forward = len(gpu.transfers)
        if entries:
            backward_of_all(out.loss)
        else:
            backward(out.loss)
    return gpu, in_forward


def record_chunks(case="mask", *, chunks=2, chunk_rows=CHUNK_ROWS, **call):
    """The same of a loss over so many chunks."""
    names, objective, options = CASES[case]
    layout = "strips"
    if objective.get("entropy_coef") or "dtype" in options:
        layout = "one" if options.get("dtype") == torch.float32 else "two"
    rows, masked = chunks * chunk_rows, "mask" in names
    counts = [rows] * (masked + has_two_counts(objective))
    call |= {"tokens": rows + 8 * B * masked, "chunk_bytes": bytes_of(chunk_rows, layout)}
    gpu, in_forward = record(case, counts=counts, **call)
    assert gpu.counts()["policy_loss_kernel"] == chunks
    return gpu, in_forward


@pytest.mark.parametrize("case", CASES)
def test_reads_its_row_counts_and_nothing_else(case):
    for chunks in (2, 4):
        gpu, in_forward = record_chunks(case, chunks=chunks)
        assert in_forward == len(gpu.transfers) == 1, gpu.report()
        assert "checks.py" in gpu.transfers[0].where


def test_a_packed_batch_reads_its_row_counts():
    N, trained = 3000, 900
    with FakeCUDA(answer_with(trained, trained)) as gpu:
        out = fused_grpo_loss(
            *head(N), empty(B), empty(N, dtype=torch.int64), old_logps=empty(N),
            cu_seqlens=empty(B + 1, dtype=torch.int32), num_items=empty(), temperature=empty(),
        )  # fmt: skip
        backward(out.loss)
    assert len(gpu.transfers) == 1, gpu.report()


@pytest.mark.parametrize(
    ("call", "case"), [("logps", "everything"), *(("loss", case) for case in CASES)]
)
def test_a_capturable_call_reads_nothing(call, case):
    """As the capture of a CUDA graph forbids it; forward and backward."""
    gpu, _ = record(case, call, capturable=True)
    assert not gpu.transfers, gpu.report()
    assert any("_assert_async" in name for name in gpu.counts())  # of the ids


@pytest.mark.parametrize("capturable", (False, True))
@pytest.mark.parametrize("what", ("distillation", "exact", "k3"))
def test_two_models_read_what_one_does(what, capturable):
    """One transfer with a mask, none in a graph; four GEMMs a chunk."""
    with FakeCUDA(answer_with(2048)) as gpu:
        hidden, weight, targets = head(B, 512)
        other = Reference(empty(B, 512, 2 * H), LMHead(empty(V, 2 * H)))
        mask = empty(B, 512, dtype=torch.bool)
        how = {"execution": Execution(capturable=capturable, chunk_bytes=10 * V * 2048)}
        if what == "distillation":
            out = grpo_kernels.fused_distillation_loss(hidden, weight, other, mask, **how)
        else:
            out = grpo_kernels.fused_grpo_loss(
                hidden, weight, targets, empty(B), mask, reference=other,
                config=config(beta=0.1, kl_estimator=what), **how,
            )  # fmt: skip
        backward(out.loss)
    assert len(gpu.transfers) == (not capturable), gpu.report()
    launched = gpu.counts()
    of_pairs = {name: n for name, n in launched.items() if "pair" in name or "divergences" in name}
    if what == "k3":
        assert not of_pairs
    else:
        assert set(of_pairs) == {"pair_stats_kernel", "pair_grads_kernel"}
        assert len(set(of_pairs.values())) == 1


@pytest.fixture
def two_ranks():
    """A group of two processes, of which the other one does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("chunks", (1, 3))
def test_ranks_read_what_they_have_and_their_row_counts(two_ranks, chunks):
    """Each of the two once, whatever the chunks are, after an upload of what is asked."""

    def answer(x):
        if x.dim() != 2:
            return answer_with(B * 512)(x)
        told = torch.zeros(x.shape, dtype=torch.float64)
        told[:, 1] = V  # the columns that each has
        return told.view(torch.int64).tolist()

    with FakeCUDA(answer) as gpu:
        hidden, weight, targets = head(B, 512)
        how = Execution(chunk_bytes=6 * V * B * 512 // chunks)
        of_ranks = LMHead(weight, ranks=VocabRanks(two_ranks))
        call = (hidden, of_ranks, targets, empty(B))
        backward(fused_grpo_loss(*call, config=config(), execution=how).loss)
    assert [event.name for event in gpu.transfers if "cuda" in event.operands] == [
        "_to_copy", "tolist"
    ], gpu.report()  # fmt: skip
    assert len(gpu.transfers) == 4, gpu.report()
    launched = gpu.counts()
    assert (launched["policy_loss_kernel"] > 1) == (chunks > 1)
    assert launched["c10d::_allgather_base_"] == 2 + launched["policy_loss_kernel"]


@torch.no_grad()
@pytest.mark.parametrize("objective", ("gspo", "off_policy", "top_entropy_bonus", "everything"))
def test_two_passes_read_their_row_counts(objective):
    options, names = OBJECTIVES[objective]
    with FakeCUDA(answer_with()) as gpu:
        given = options_of(names, B, 512)
        fused_grpo_loss(*head(B, 512), empty(B), config=config(**options), **given)
    assert len(gpu.transfers) == 1, gpu.report()


def test_log_probs_read_their_row_counts():
    """Once per pass."""
    rows, chunk_bytes = 3 * CHUNK_ROWS, bytes_of(CHUNK_ROWS, "two")
    options = {"tokens": rows, "counts": [rows], "chunk_bytes": chunk_bytes}
    gpu, in_forward = record("head", "logps", **options)
    assert in_forward == 1 and len(gpu.transfers) == 2, gpu.report()


def has_kernel(cfg):
    plain_kl = cfg.kl_estimator in ("k1", "k2", "k3") and cfg.kl_clamp is None
    return cfg.loss.kernel() is not None and (plain_kl or not cfg.beta)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_of_log_probs_reads_nothing(objective):
    options, names = OBJECTIVES[objective]
    cfg = config(**options)

    # The others are differentiated by autograd's engine, which wants a device.
    reason = cfg.why_two_passes(has_old_logps="old_logps" in names)
    by_hand = reason is None and has_kernel(cfg)

    def call():
        logps, given = empty(B, 512, train=by_hand), options_of(("entropy", "mask", *names), B, 512)
        out = grpo_loss(logps, empty(B), config=cfg, **given)
        if by_hand:
            backward(out.loss, torch.ones((), device=CUDA), None, None)

    reads_nothing(call)


def test_operands_of_two_dtypes_are_warned_of_once(monkeypatch):
    """Outside autocast: their GEMMs run in float32."""
    head_calls._warn_of_float32_products.cache_clear()
    said = "weight: bfloat16 hidden states and a float32 head are multiplied in float32"
    for how, expected in (("autocast", 0), ("", 1), ("", 0)):
        with FakeCUDA(answer_with()), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            hidden, weight, targets = head(B, 8)
            monkeypatch.setattr(torch, "is_autocast_enabled", lambda _, on=how == "autocast": on)
            monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
            linear_logprobs(hidden, weight.detach().float(), targets)
        assert [said in str(x.message) for x in warned].count(True) == expected


def test_log_softmax_reads_nothing():
    def call():
        logits = empty(B, 65, V, dtype=torch.bfloat16, train=True)[:, :-1]
        targets, temperature = empty(B, 64, dtype=torch.long), empty(B, 64)
        logps = selective_log_softmax(logits, targets, temperature=temperature)
        backward(logps)

    reads_nothing(call)


@pytest.mark.parametrize("case", BUDGETS)
@pytest.mark.parametrize("of", Budget._fields)
def test_launches(case, of):
    launches, parts = launches_of(case), CHUNK_ROWS // STRIP_ROWS
    two, three, larger = (found.total() for found in launches)
    found = {"fixed": two - 2 * (three - two), "per_part": (larger - two) / (2 * parts)}
    found["per_chunk"] = three - two - parts * found["per_part"]
    assert found[of] <= getattr(BUDGETS[case], of), (found, [x.most_common() for x in launches])


@pytest.mark.parametrize("keep", (True, False), ids=("kept", "made_again"))
def test_gemms_of_a_frozen_head(keep):
    """The product of the forward that the backward then does not make, nor the logits."""
    tokens, found = 2048, []
    with FakeCUDA(answer_with()) as gpu:
        hidden, weight, targets = head(tokens)
        options = {"chunk_bytes": bytes_of(tokens), "keep_gradients": keep}
        out = linear_logprobs(hidden, weight.detach(), targets, **options)
        for after_forward in (False, True):
            if after_forward:
                gpu.answer = answer_with(tokens)
                backward(out.logps, torch.ones(tokens, device=CUDA), None, None)
            products = [count for name, count in gpu.counts().items() if "mm" in name]
            found.append(sum(products))
    strips, (forward, whole) = tokens // STRIP_ROWS, found
    if keep:  # logits strip by strip, and one product of the whole chunk
        assert (forward, whole) == (strips + 1, strips + 1)
    else:
        assert forward >= 1 and whole - forward >= 2


@functools.cache
def launches_of(case):
    """The launches of a call of two chunks, of three, and of two of twice as many rows."""
    return [
        record_chunks(case, **sizes)[0].counts()
        for sizes in ({"chunks": 2}, {"chunks": 3}, {"chunks": 2, "chunk_rows": 2 * CHUNK_ROWS})
    ]


@pytest.fixture(scope="module", params=(15, pytest.param(100, marks=pytest.mark.slow)))
def keys(request):
    """Compile keys of every kernel by its options, over so many batches of all sizes."""
    draw, keys = random.Random(0), {}
    for index in range(request.param):
        T, masked = draw.randint(1, 150), index % 2
        row_counts = [draw.randint(1, B * T)] * masked
        options = {
            "config": config(beta=0.1, entropy_coef=0.1),
            "chunk_bytes": bytes_of(draw.choice((37, 128, 384)), "one"),
        }
        with FakeCUDA(answer_with(*row_counts)) as gpu:
            given = options_of(("old_logps", "ref_logps", *["mask"] * masked), B, T)
            temperature = empty(B, T)
            fused_grpo_loss(*head(B, T), empty(B), temperature=temperature, **options, **given)
            given["entropy"] = empty(B, T)
            grpo_loss(empty(B, T), empty(B), config=options["config"], **given)
        for kernel, found in gpu.keys.items():
            keys.setdefault(kernel, set()).update(found)
    return keys


@pytest.mark.parametrize(
    "kernel", ("token_stats_kernel", "logit_grads_kernel", "policy_loss_kernel")
)
def test_no_batch_size_compiles_a_kernel_again(kernel, keys):
    mine = {options: found for (name, options), found in keys.items() if name == kernel}
    assert mine
    for options, found in mine.items():
        assert len(found) == 1, (options, found)


# With fake tensors on the CPU, which autograd's engine takes: whoever asks for a value raises


@pytest.fixture
def without_the_one_transfer(real_memory, monkeypatch):
    """Replaces the transfer, and the looks at values that only a CPU takes."""

    def plan_rows(wanted, with_grad, checks, weight, num_tokens, *_):
        return RowPlan(None, num_tokens, num_tokens, 4, 4)

    monkeypatch.setattr(dense, "plan_rows", plan_rows)
    monkeypatch.setattr(ValueChecks, "check_without_sync", lambda self: None)
    monkeypatch.setattr(torch_backend, "_sum_of_products", lambda exps, x: (exps * x).sum(1))


# The torch backend compares addresses to see whether it works in place.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.usefixtures("without_the_one_transfer")
@pytest.mark.parametrize("objective", (*OBJECTIVES, "cross_entropy"))
def test_the_engine_reads_nothing(objective):
    options, names = OBJECTIVES.get(objective, ({}, ("old_logps", "ce_weights")))
    cfg = config(**options)
    with FakeTensorMode():
        given = {name: torch.ones(3, 5) for name in names}
        given["num_items"] = torch.ones(()) if cfg.effective_aggregation == "dapo" else None
        hidden, weight = (torch.ones(*n, 8, requires_grad=True) for n in ((3, 5), (11,)))
        targets, mask = torch.ones(3, 5, dtype=torch.long), torch.ones(3, 5, dtype=torch.bool)
        out = fused_grpo_loss(hidden, weight, targets, torch.ones(3), mask, config=cfg, **given)
        out.loss.backward()
        assert hidden.grad.shape == hidden.shape
        with pytest.raises(DataDependentOutputException):
            out.loss.item()


# With a support: tokens are scored over entries, some over rows of logits beside them

# The most launches of a forward with its backward if every token has a support, whatever the number
# of tokens and of entries.
LAUNCHES_OF_SUPPORT = {
    ("off_policy", "loss"): 265,
    ("mask", "loss"): 275,
    ("on_policy", "logps"): 175,
}
OF_SUPPORT = [
    *((x, "loss") for x in CASES if x not in ("cross_entropy", "corrected", "everything")),
    *((x, "logps") for x in ("on_policy", "mask", "head", "frozen", "fp32")),
]


@pytest.mark.parametrize(("case", "call"), OF_SUPPORT)
def test_a_support_reads_its_sizes_and_nothing_else(case, call):
    for tokens, entries in ((8192, 8), (4096, 65)):
        gpu, in_forward = record(case, call, tokens=tokens, entries=entries)
        assert in_forward == len(gpu.transfers) == 1, gpu.report()
        assert "checks.py" in gpu.transfers[0].where
        assert gpu.counts()["segment_sums_kernel"] >= 1 + (case != "frozen")


@pytest.mark.parametrize("call", ("loss", "logps"))
@pytest.mark.parametrize("case", ("mask", "fp32"))
def test_rows_of_logits_are_read_as_without_a_support(case, call):
    """Those take two passes: the backward reads its row count."""
    gpu, in_forward = record(case, call, tokens=8192, entries=8, without=CHUNK_ROWS)
    assert in_forward == 1, gpu.report()
    assert len(gpu.transfers) == 2, gpu.report()


@functools.cache
def launches_of_support(case, call, tokens, entries, **without):
    return record(case, call, tokens=tokens, entries=entries, **without)[0].counts()


@pytest.mark.parametrize(("case", "call"), LAUNCHES_OF_SUPPORT)
def test_launches_of_a_support(case, call):
    few = launches_of_support(case, call, 512, 2)
    assert few.total() <= LAUNCHES_OF_SUPPORT[case, call], (few.total(), few.most_common())
    for tokens, entries in ((512, 300), (16_384, 2), (16_384, 64)):
        more = launches_of_support(case, call, tokens, entries)
        assert more == few, (more - few, few - more)


@pytest.mark.parametrize("call", ("loss", "logps"))
def test_sums_of_parts_are_launched_where_a_segment_can_be_long(call):
    for tokens, entries, long in ((128, 2, False), (256, 2, True)):
        of = launches_of_support("mask", call, tokens, entries)
        assert of["segment_sums_kernel"] == 2
        assert of["part_sums_kernel"] == of["sum_parts_kernel"] == 2 * long


@pytest.mark.parametrize("rows", (CHUNK_ROWS, 2 * CHUNK_ROWS))
def test_tokens_without_a_support_launch_what_they_launch_alone(rows):
    of_support = launches_of_support("mask", "loss", 8192, 8).total()
    mixed = launches_of_support("mask", "loss", 8192, 8, without=rows).total()
    budget = BUDGETS["mask"]
    alone = budget.fixed + budget.per_chunk + rows // STRIP_ROWS * budget.per_part
    assert mixed - of_support <= alone


@pytest.fixture(scope="module", params=(6, pytest.param(60, marks=pytest.mark.slow)))
def keys_of_support(request):
    """Compile keys of every kernel by what its launches may differ in, over batches of all sizes.

    That is its options, dtypes, and the width of the operand.
    """
    draw, keys = random.Random(0), {}
    for index in range(request.param):
        tokens, entries = B * draw.randint(40, 400), draw.randint(1, 99)
        without = draw.randint(1, tokens // 3) if index % 3 else 0
        for call, rest in (("loss", 0), ("logps", 0), ("logps", draw.randint(1, 3))):
            gpu, _ = record(
                "head", call, tokens=tokens + rest, entries=entries, without=without,
                chunk_bytes=bytes_of(128, "two"),
            )  # fmt: skip
            for (kernel, options), found in gpu.keys.items():
                for key in (tuple(ast.literal_eval(x).items()) for x in found):
                    dtypes = [kind[0] for name, kind in key if name.endswith("_ptr")]
                    kind = options, *dtypes, dict(key).get("K")
                    keys.setdefault(kernel, {}).setdefault(kind, set()).add(key)
    return keys


@pytest.mark.parametrize(
    "kernel",
    ("entry_dots_kernel", "segment_sums_kernel", "part_sums_kernel", "sum_parts_kernel"),
)
def test_no_size_of_a_support_compiles_a_kernel_again(kernel, keys_of_support):
    assert len(keys_of_support[kernel]) > 1
    for kind, found in keys_of_support[kernel].items():
        assert len(found) == 1, (kind, found)

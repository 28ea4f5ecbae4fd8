"""What the calls ask of a GPU, seen without one: transfers, launches, compile keys.

`tests/support/fake_cuda.py` records them. A transfer is a read of the device, a copy between it and
the CPU, or an operation that mixes their tensors.
"""

import functools
import random
from typing import NamedTuple

import pytest
import torch

from grpo_kernels import fused_grpo_loss, grpo_loss, linear_logprobs, selective_log_softmax
from grpo_kernels.column_sampling import row_blocks
from tests.support.batches import OBJECTIVES, config
from tests.support.fake_cuda import FakeCUDA, answer_with, backward, reads_nothing

V, H, B = 151_936, 1536, 4
CUDA = torch.device("cuda", 0)
CHUNK_ROWS = 1024


class Budget(NamedTuple):
    """The most launches of a forward with its backward; `fixed` beside its chunks."""

    fixed: int
    per_chunk: int
    per_block: int = 0  # of rows that share their columns, in the sampled backward


# (backward, case)
BUDGETS = {
    ("exact", "off_policy"): Budget(fixed=95, per_chunk=15),
    ("exact", "mask"): Budget(fixed=110, per_chunk=20),
    ("sampled", "off_policy"): Budget(fixed=135, per_chunk=60, per_block=20),
}
# Not met yet.
MISSED = {
    ("sampled", "off_policy", "per_chunk"): "238 launches per chunk",
    ("sampled", "off_policy", "per_block"): "37 launches per block",
}

# Memory that conftest.py poisons is written to.
pytestmark = [
    pytest.mark.usefixtures("real_memory"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer"),
]


def head(rows=2048, dtype=torch.bfloat16, **options):
    """Operands and targets of a head, `[B, T]` tokens."""
    T = rows // B
    hidden = torch.empty(B, T, H, dtype=dtype, device=CUDA, requires_grad=True)
    weight = torch.empty(V, H, dtype=dtype, device=CUDA, requires_grad=True)
    return hidden, weight, torch.empty(B, T, dtype=torch.long, device=CUDA)


def per_token(rows, dtype=torch.float32):
    return torch.empty(B, rows // B, dtype=dtype, device=CUDA)


def options_of(names, rows):
    """The optional tensors of these names."""
    made = {name: per_token(rows) for name in names}
    if "mask" in made:
        made["mask"] = per_token(rows, torch.bool)
    if "bias" in made:
        made["bias"] = torch.empty(V, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    if "low_rank" in made:
        lora_a_out = torch.empty(B, rows // B, 16, device=CUDA, requires_grad=True)
        made["low_rank"] = lora_a_out, torch.empty(V, 16, device=CUDA, requires_grad=True)
    return made


# id: (names of the tensors to pass, options of the objective, of the call)
_KL = ("old_logps", "ref_logps")
CASES = {
    "on_policy": ((), {}, {}),
    "off_policy": (("old_logps",), {}, {}),
    "mask": (("mask", "old_logps"), {}, {}),
    "kl": (_KL, {"beta": 0.1}, {}),
    "entropy": (("mask", "old_logps"), {"entropy_coef": 0.1}, {}),
    "corrected": (("old_logps", "sampling_logps"), {"is_correction": "token_truncate"}, {}),
    "softcap": (("old_logps",), {}, {"softcap": 30.0}),
    "bias": (("old_logps", "bias"), {}, {}),
    "low_rank": (("mask", "low_rank"), {}, {}),
    "temperature": (("mask", "temperature"), {}, {}),
    "fp16": (("old_logps",), {}, {"dtype": torch.float16}),
    "fp32": (("old_logps",), {}, {"dtype": torch.float32}),
    "everything": (
        (*_KL, "sampling_logps", "mask", "bias", "low_rank", "temperature"),
        {"beta": 0.1, "entropy_coef": 0.1, "is_correction": "token_mask"},
        {"softcap": 30.0, "logit_scale": 0.5},
    ),
}


def record_fused(case="mask", *, chunks=2, chunk_rows=CHUNK_ROWS, **call):
    """Forward and backward of `fused_grpo_loss`, recorded; and the number of forward transfers."""
    names, objective, options = CASES[case]
    options = {"chunk_bytes": 4 * V * chunk_rows, **options, **call}
    rows = chunks * chunk_rows
    counts = ["mask" in names, "beta" not in objective and "entropy_coef" not in objective]
    tokens = rows + 8 * B * counts[0]
    with FakeCUDA(answer_with(*[rows] * sum(counts))) as gpu:
        tensors = head(tokens, options.pop("dtype", torch.bfloat16))
        advantages, given = torch.empty(B, device=CUDA), options_of(names, tokens)
        gpu.launches.clear()
        out = fused_grpo_loss(*tensors, advantages, config=config(**objective), **given, **options)
        in_forward = len(gpu.transfers)
        backward(out.loss)
    assert gpu.counts()["policy_loss_kernel"] == chunks
    return gpu, in_forward


@pytest.mark.parametrize("case", CASES)
def test_reads_its_row_counts_and_nothing_else(case):
    for chunks in (2, 4):
        gpu, in_forward = record_fused(case, chunks=chunks)
        assert in_forward == len(gpu.transfers) == 1, gpu.report()
        assert "row_plan.py" in gpu.transfers[0].where


@pytest.mark.parametrize("case", ("mask", "everything"))
def test_sampled_backward_reads_once_per_chunk(case):
    for chunks in (2, 4):
        gpu, in_forward = record_fused(case, chunks=chunks, backward="sampled", seed=0)
        assert in_forward == len(gpu.transfers) == 1 + chunks, gpu.report()
        assert {event.name for event in gpu.transfers} == {"tolist"}, gpu.report()


@pytest.mark.parametrize("way", ("exact", "sampled"))
def test_log_probs_read_their_row_counts(way):
    options = {"seed": 0} if way == "sampled" else {}
    chunks, rows = 3, 3 * CHUNK_ROWS
    with FakeCUDA(answer_with(rows)) as gpu:
        given = options_of(("mask", "temperature", "low_rank", "bias"), rows)
        out = linear_logprobs(
            *head(rows), entropy=True, backward=way, chunk_bytes=4 * V * CHUNK_ROWS, **given,
            **options,
        )  # fmt: skip
        assert len(gpu.transfers) == (1 if way == "exact" else 1 + chunks), gpu.report()
        gpu.transfers.clear()
        ones = torch.ones(rows, device=CUDA)
        backward(out.logps, ones, ones, None, None)
    # The ids of the rows come back from pinned memory, without waiting.
    assert len(gpu.transfers) == (1 if way == "exact" else 2), gpu.report()
    assert "non_blocking" in gpu.transfers[-1].where or way == "exact"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_of_log_probs_reads_nothing(objective):
    options, names = OBJECTIVES[objective]
    cfg = config(**options)

    # The others are differentiated by autograd's engine, which wants a device.
    reason = cfg.two_pass_reason(has_old_logps="old_logps" in names, has_entropy_threshold=False)
    by_hand = reason is None

    def call():
        logps = per_token(2048).requires_grad_(by_hand)
        given = options_of(("entropy", "mask", *names), 2048)
        out = grpo_loss(logps, torch.empty(B, device=CUDA), config=cfg, **given)
        if by_hand:
            backward(out.loss, torch.ones((), device=CUDA), None, None)

    reads_nothing(call)


def test_log_softmax_reads_nothing():
    def call():
        logits = torch.empty(B, 65, V, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
        targets, temperature = torch.empty(2, B, 64, dtype=torch.long, device=CUDA).unbind()
        logps = selective_log_softmax(logits[:, :-1], targets, temperature=temperature.float())
        backward(logps)

    reads_nothing(call)


@pytest.mark.parametrize(("way", "case"), BUDGETS)
@pytest.mark.parametrize("of", Budget._fields)
def test_launches(way, case, of, request):
    if (way, case, of) in MISSED:
        reason = MISSED[way, case, of]
        request.applymarker(pytest.mark.xfail(strict=False, reason=reason))
    measured, launches = launches_of(way, case)
    found = {name: event_counts.most_common() for name, event_counts in launches.items()}
    assert measured[of] <= getattr(BUDGETS[way, case], of), (measured, found[of])


@functools.cache
def launches_of(way, case):
    """How many of each part of a budget, and which: by runs of other chunks, in number and size."""
    sampled = {"backward": "sampled", "seed": 0} if way == "sampled" else {}
    one, two, larger = (
        record_fused(case, **sizes, **sampled)[0].counts()
        for sizes in ({"chunks": 1}, {"chunks": 2}, {"chunks": 1, "chunk_rows": 2 * CHUNK_ROWS})
    )
    blocks, more = (len(row_blocks(n * CHUNK_ROWS, CUDA)) for n in (1, 2))
    launches = {"fixed": one - (two - one), "per_chunk": two - one, "per_block": larger - one}
    measured = {name: events.total() for name, events in launches.items()}
    measured["per_block"] /= more - blocks
    measured["per_chunk"] -= blocks * measured["per_block"]
    return measured, launches


@pytest.fixture(scope="module", params=(15, pytest.param(100, marks=pytest.mark.slow)))
def keys(request):
    """Compile keys of every kernel by its options, over so many batches of all sizes."""
    draw, keys = random.Random(0), {}
    for index in range(request.param):
        rows, masked = B * draw.randint(1, 150), index % 2
        row_counts = [draw.randint(1, rows)] * masked
        options = {
            "config": config(beta=0.1, entropy_coef=0.1),
            "chunk_bytes": 4 * V * draw.choice((37, 128, 384)),
            **({"backward": "sampled", "seed": 0} if index % 3 == 0 else {}),
        }
        with FakeCUDA(answer_with(*row_counts, kept=draw.randint(1, 9999))) as gpu:
            given = options_of(("old_logps", "ref_logps", *["mask"] * masked), rows)
            advantages = torch.empty(B, device=CUDA)
            temperature = per_token(rows)
            fused_grpo_loss(*head(rows), advantages, temperature=temperature, **options, **given)
            given["entropy"] = per_token(rows)
            grpo_loss(per_token(rows), advantages, config=options["config"], **given)
        for kernel, found in gpu.keys.items():
            keys.setdefault(kernel, set()).update(found)
    return keys


KERNELS = (
    "token_stats_kernel",
    "logit_grads_kernel",
    "column_scores_kernel",
    pytest.param(
        "policy_loss_kernel",
        marks=pytest.mark.xfail(strict=False, reason="4 keys: specialized on alignment"),
    ),
)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_batch_size_compiles_a_kernel_again(kernel, keys):
    mine = {options: found for (name, options), found in keys.items() if name == kernel}
    assert mine
    for options, found in mine.items():
        assert len(found) == 1, (options, found)

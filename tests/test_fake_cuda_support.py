"""What the calls ask of a GPU with a support, seen without one; see `test_fake_cuda.py`."""

import ast
import functools
import random

import pytest
import torch

from tests.helpers.batches import config
from tests.helpers.fake_cuda import FakeCUDA, answer_with, backward
from tests.helpers.flat_calls import fused_grpo_loss, linear_logprobs
from tests.test_fake_cuda import BUDGETS, CHUNK_ROWS, CUDA, B, V, head, options_of

# The most launches of a forward with its backward if every token has a support, whatever the number
# of tokens and of entries.
LAUNCHES = {
    ("loss", "off_policy"): 265,
    ("loss", "mask"): 275,
    ("log-probs", "plain"): 175,
}
# id: (names of the tensors to pass, options of the objective, of the call)
CASES = {
    "off_policy": (("old_logps",), {}, {}),
    "mask": (("mask", "old_logps"), {}, {}),
    "kl": (("old_logps", "ref_logps"), {"beta": 0.1}, {}),
    "entropy": (("mask", "old_logps"), {"entropy_coef": 0.1}, {}),
    "softcap": (("old_logps",), {}, {"softcap": 30.0}),
    "bias": (("old_logps", "bias"), {}, {}),
    "low_rank": (("mask", "low_rank"), {}, {}),
    "temperature": (("mask", "temperature"), {}, {}),
    "frozen": (("mask",), {}, {"frozen": True}),
    "fp16": (("old_logps",), {}, {"dtype": torch.float16}),
    "fp32": (("old_logps", "bias", "low_rank"), {}, {"dtype": torch.float32}),
}
CASES_OF_LOGPS = {
    "plain": ((), {}),
    "mask": (("mask",), {}),
    "everything": (("mask", "bias", "low_rank", "temperature"), {"softcap": 30.0}),
    "frozen": ((), {"frozen": True}),
    "fp32": ((), {"dtype": torch.float32}),
}
# Tokens of 8,192 that have no set.
WITHOUT = {"none": 0, "some": CHUNK_ROWS}
ROW_BUDGET = 6 * V * 128  # logits, and their gradient in half precision
# Memory that conftest.py poisons is written to.
pytestmark = pytest.mark.usefixtures("real_memory")


def answers(row_counts, tokens, entries, without):
    """Answers the transfer of the row counts and of the sizes of a support."""
    with_set = tokens - without
    return answer_with(*row_counts, entries * with_set, with_set)


def support_of(tokens, entries):
    offsets = torch.empty(tokens + 1, dtype=torch.int64, device=CUDA)
    return torch.empty(tokens * entries, dtype=torch.int32, device=CUDA), offsets


def operands(tokens, dtype=torch.bfloat16, frozen=False):
    hidden, weight, targets = head(tokens, dtype)
    return hidden, weight.detach() if frozen else weight, targets


def record_loss(case, *, tokens=8192, entries=8, without=0, **call):
    """Forward and backward of `fused_grpo_loss`, recorded; and the number of forward transfers."""
    names, objective, options = CASES[case]
    options = {**options, **call}
    made = {name: options.pop(name) for name in ("dtype", "frozen") if name in options}
    rest_has_no_gradient = not {"beta", "entropy_coef"} & objective.keys()
    row_counts = [without] * (1 + rest_has_no_gradient)
    with FakeCUDA(answers(row_counts, tokens, entries, without)) as gpu:
        given = options_of(names, tokens)
        out = fused_grpo_loss(
            *operands(tokens, **made), torch.empty(B, device=CUDA), config=config(**objective),
            support=support_of(tokens, entries), **given, **options,
        )  # fmt: skip
        in_forward = len(gpu.transfers)
        d_logps, d_entropy, *_ = backward(out.loss)
        if not without:
            # Two passes: what came back is the gradient of the log-probs.
            (of_logps, _), *_ = function_of(out.loss).next_functions
            backward_of(of_logps, d_logps, d_entropy, None)
    return gpu, in_forward


def record_logps(case, *, tokens=8192, entries=8, without=0, **call):
    """The same of `linear_logprobs`."""
    names, options = CASES_OF_LOGPS[case]
    options = {**options, **call}
    made = {name: options.pop(name) for name in ("dtype", "frozen") if name in options}
    with FakeCUDA(answers([without], tokens, entries, without)) as gpu:
        given = options_of(names, tokens)
        out = linear_logprobs(
            *operands(tokens, **made), entropy=True, support=support_of(tokens, entries), **given,
            **options,
        )  # fmt: skip
        in_forward = len(gpu.transfers)
        backward(out.logps, *torch.ones(2, tokens, device=CUDA), None)
    return gpu, in_forward


def function_of(output):
    """The library's autograd Function that `output` comes from."""
    node = output.grad_fn
    while not hasattr(node, "_forward_cls"):
        node = node.next_functions[0][0]
    return node


def backward_of(function, *gradients):
    with torch.no_grad():
        return function.apply(*gradients)


RECORD = {"loss": record_loss, "log-probs": record_logps}


@pytest.mark.parametrize("case", CASES)
def test_loss_reads_its_sizes_and_nothing_else(case):
    for tokens, entries in ((8192, 8), (4096, 65)):
        gpu, in_forward = record_loss(case, tokens=tokens, entries=entries)
        assert in_forward == len(gpu.transfers) == 1, gpu.report()
        assert "checks.py" in gpu.transfers[0].where
        assert gpu.counts()["segment_sums_kernel"] >= 1 + ("frozen" not in case)


@pytest.mark.parametrize("case", CASES_OF_LOGPS)
def test_log_probs_read_their_sizes_and_nothing_else(case):
    gpu, in_forward = record_logps(case)
    assert in_forward == len(gpu.transfers) == 1, gpu.report()
    assert gpu.counts()["segment_sums_kernel"] >= 1 + (case != "frozen")


@pytest.mark.parametrize("without", WITHOUT)
@pytest.mark.parametrize("call", RECORD)
@pytest.mark.parametrize("case", ("mask", "fp32"))
def test_rows_of_logits_are_read_as_without_a_support(call, case, without):
    """Nothing in the backward of one pass, and in that of two its row count."""
    gpu, in_forward = RECORD[call](case, without=WITHOUT[without])
    one_pass = without == "none" or call == "loss"
    assert in_forward == 1, gpu.report()
    assert len(gpu.transfers) == (1 if one_pass else 2), gpu.report()


@functools.cache
def launches_of(call, case, **sizes):
    return RECORD[call](case, **sizes)[0].counts()


@pytest.mark.parametrize(("call", "case"), LAUNCHES)
def test_launches(call, case):
    few = launches_of(call, case, tokens=512, entries=2)
    assert few.total() <= LAUNCHES[call, case], (few.total(), few.most_common())
    for tokens, entries in ((512, 300), (16_384, 2), (16_384, 64)):
        more = launches_of(call, case, tokens=tokens, entries=entries)
        assert more == few, (more - few, few - more)


@pytest.mark.parametrize("call", RECORD)
def test_sums_of_parts_are_launched_where_a_segment_can_be_long(call):
    for tokens, entries, long in ((128, 2, False), (256, 2, True)):
        of = launches_of(call, "mask", tokens=tokens, entries=entries)
        assert of["segment_sums_kernel"] == 2
        assert of["part_sums_kernel"] == of["sum_parts_kernel"] == 2 * long


@pytest.mark.parametrize("rows", (CHUNK_ROWS, 2 * CHUNK_ROWS))
def test_tokens_without_a_support_launch_what_they_launch_alone(rows):
    of_support = launches_of("loss", "mask").total()
    mixed = launches_of("loss", "mask", without=rows).total()
    budget = BUDGETS["exact", "mask"]
    alone = budget.fixed + budget.per_chunk + rows // budget.part_rows * budget.per_part
    assert mixed - of_support <= alone


def record_packed(tokens, entries, without):
    """The same of `linear_logprobs` of so many tokens, which need not divide by any number."""
    with FakeCUDA(answers([without], tokens, entries, without)) as gpu:
        hidden, weight, _ = head()
        hidden = torch.empty(tokens, hidden.shape[-1], dtype=hidden.dtype, device=CUDA)
        hidden.requires_grad_()
        targets = torch.empty(tokens, dtype=torch.long, device=CUDA)
        mask = torch.empty(tokens, dtype=torch.bool, device=CUDA)
        out = linear_logprobs(
            hidden, weight, targets, mask=mask, entropy=True, support=support_of(tokens, entries),
            chunk_bytes=ROW_BUDGET,
        )  # fmt: skip
        backward(out.logps, *torch.ones(2, tokens, device=CUDA), None)
    return gpu


@pytest.fixture(scope="module", params=(6, pytest.param(60, marks=pytest.mark.slow)))
def keys(request):
    """Compile keys of every kernel by its options, over so many batches of all sizes."""
    draw, keys = random.Random(0), {}
    for index in range(request.param):
        tokens, entries = B * draw.randint(40, 400), draw.randint(1, 99)
        without = draw.randint(1, tokens // 3) if index % 3 else 0
        sizes = {"tokens": tokens, "entries": entries, "without": without}
        recorded = [
            record_loss("low_rank", **sizes, chunk_bytes=ROW_BUDGET)[0],
            record_logps("everything", **sizes, chunk_bytes=ROW_BUDGET)[0],
            record_packed(tokens + draw.randint(0, 3), entries, without),
        ]
        for gpu in recorded:
            for (kernel, options), found in gpu.keys.items():
                for key in (tuple(ast.literal_eval(x).items()) for x in found):
                    keys.setdefault(kernel, {}).setdefault(kind_of(options, key), set()).add(key)
    return keys


def kind_of(options, key):
    """What launches of a kernel may differ in: options, dtypes, the width of the operand."""
    dtypes = [kind[0] for name, kind in key if name.endswith("_ptr")]
    return options, *dtypes, dict(key).get("K")


KERNELS = (
    "entry_dots_kernel", "segment_sums_kernel", "part_sums_kernel", "sum_parts_kernel",
    "token_stats_kernel", "logit_grads_kernel",
)  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_size_compiles_a_kernel_again(kernel, keys):
    assert len(keys[kernel]) > 1
    for kind, found in keys[kernel].items():
        assert len(found) == 1, (kind, found)

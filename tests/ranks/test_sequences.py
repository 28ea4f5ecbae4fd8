"""Sequences of which every rank has some tokens, compared with float64 on one process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from grpo_kernels import LMHead, gather_tokens, grpo_loss, linear_logprobs
from tests.helpers.batches import (
    Result,
    assert_matches,
    make_batch,
    packed,
    run_fused,
    with_cross_entropy,
)
from tests.helpers.head_options import objective_options
from tests.ranks.traffic import Traffic

PER_TOKEN = (
    "hidden", "targets", "mask", "temperature", "old_logps", "ref_logps", "sampling_logps",
    "ce_weights",
)  # fmt: skip
HEAD = {"bias": True, "temperature": True}
# Objectives that read neighbouring tokens in different ways.
NAMES = ("everything", "gspo", "vespo", "top_entropy_bonus", "is_sequence_mask")
LOSSES = {
    **{name: objective_options(name) | {"head": HEAD} for name in NAMES},
    "num_items": {"num_items": 40.0, "old_logps": True, "head": HEAD},
    "cross-entropy": {"ce_weights": True, "old_logps": True, "head": HEAD},
}


def batch_of(name):
    return with_cross_entropy(make_batch()) if name == "cross-entropy" else make_batch()


def part_of(batch, index):
    """The batch with some of its tokens or sequences."""
    parts = {name: x[index] for name in PER_TOKEN if (x := getattr(batch, name)) is not None}
    return replace(batch, **parts)


def loss(part, name, cu_seqlens=None):
    """Scores this rank's tokens, joins those of all ranks, and computes the loss on every rank."""
    leaves = {n: getattr(part, n).clone().requires_grad_() for n in ("hidden", "weight", "bias")}
    hidden, *head = leaves.values()
    scored = part.mask if part.ce_weights is None else part.mask | (part.ce_weights != 0)
    lm_head = LMHead(*head, temperature=part.temperature)
    local = linear_logprobs(hidden, lm_head, part.targets, scored, entropy=True)
    options = {n: getattr(part, n) if x is True else x for n, x in LOSSES[name].items()}
    options |= {"entropy": local.entropy, "logps": local.logps, "mask": part.mask}
    for field, x in options.items():
        if isinstance(x, torch.Tensor):
            options[field] = gather_tokens(x, dist.group.WORLD)
    del options["head"]
    out = grpo_loss(advantages=part.advantages, cu_seqlens=cu_seqlens, **options)
    out.loss.backward()
    gradients = {n: x.grad.double() for n, x in leaves.items()}
    return Result(out.loss.detach(), out.metrics, local.logps.detach(), gradients)


def joined(results, dim=1):
    """The result of all ranks: their gradients of the head add up; all else is the same on each."""
    first = results[0]
    for other in results[1:]:
        assert torch.equal(first.loss, other.loss)
        for name, value in first.metrics.items():
            assert torch.equal(value, other.metrics[name]), name
    gradients = {n: sum(r.gradients[n] for r in results) for n in ("weight", "bias")}
    gradients["hidden"] = torch.cat([r.gradients["hidden"] for r in results], dim)
    return Result(first.loss, first.metrics, torch.cat([r.logps for r in results], dim), gradients)


def losses(cuts):
    """Returns, for every case, the loss and this rank's part of the gradients."""
    columns = (slice(None), slice(*cuts[dist.get_rank() : dist.get_rank() + 2]))
    return [loss(part_of(batch_of(name), columns), name) for name in LOSSES]


# Nine tokens per sequence.
@pytest.mark.parametrize("cuts", ((0, 1, 9), (0, 9, 9)), ids=("uneven", "none"))
def test_losses(ranks, cuts):
    for name, *results in zip(LOSSES, *ranks(losses, cuts), strict=True):
        expected = run_fused(batch_of(name), exact=True, scale=1.0, **LOSSES[name])
        assert_matches(joined(results), expected, 3e-5, logps=1e-4)


def whole_sequences(name):
    """The same where every rank has sequences of its own, packed: the last one some tokens less."""
    batch, rank = make_batch(), dist.get_rank()
    local = part_of(batch, slice(2 * rank, 2 * rank + 2))
    flat = replace(packed(local), advantages=batch.advantages)
    counts = gather_tokens(flat.cu_seqlens.diff(), dist.group.WORLD)
    return loss(flat, name, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))


def test_packed_sequences(ranks):
    """Ranks that have sequences of their own: the joined tokens are packed, too."""
    batch = make_batch()
    expected = run_fused(batch, exact=True, scale=1.0, **LOSSES["gspo"])
    # Rows of the padded batch that are packed away have no gradient.
    ends = (batch.mask * torch.arange(1, 10)).amax(1)
    keep = torch.arange(9) < ends[:, None]
    expected.logps = expected.logps[keep]
    expected.gradients["hidden"] = expected.gradients["hidden"][keep]
    assert_matches(joined(ranks(whole_sequences, "gspo"), 0), expected, 3e-5, logps=1e-4)


def gathered(sizes):
    """Gathers parts of these sizes, `[3, T_r]` and `[T_r]`, in every dtype."""
    rank, pairs = dist.get_rank(), []
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.uint8, torch.int64):
        for shape in ((3, sizes[rank]), (sizes[rank],)):
            g = torch.Generator().manual_seed(rank)
            local = (4 * torch.rand(shape, generator=g)).to(dtype)
            strided = torch.stack([local, local], -1)[..., 0]
            pairs.append((local, gather_tokens(strided, dist.group.WORLD)))
    return pairs


@pytest.mark.parametrize("sizes", ((1, 4), (5, 0), (0, 0)), ids=str)
def test_what_is_gathered(ranks, sizes):
    for results in zip(*ranks(gathered, sizes), strict=True):
        expected = torch.cat([local for local, _ in results], -1)
        assert sum(sizes) < 3 or expected.any()
        for _, full in results:
            assert full.dtype == expected.dtype and torch.equal(full, expected)


def gradient(sizes):
    """The gradient of this rank's part, by a loss that weighs every token, and what was sent."""
    x = torch.zeros(2, sizes[dist.get_rank()], requires_grad=True)
    full = gather_tokens(x, dist.group.WORLD)
    weights = torch.arange(float(full.numel())).view_as(full)
    with Traffic() as traffic:
        (weights * full).sum().backward()
    return x.grad, traffic.seen


def test_the_backward_is_a_slice_and_sends_nothing(ranks):
    for sizes in ((1, 3), (0, 4)):
        grads, sent = zip(*ranks(gradient, sizes), strict=True)
        assert torch.equal(torch.cat(grads, 1), torch.arange(8.0).view(2, 4))
        assert sent == ([], [])


# Fault: `x` and group of rank `r`, and the error on both ranks.
REFUSED = {
    "rows": (lambda x, r: (x[r:], dist.group.WORLD), "x: expected the same rows, dimensions and "
             "dtype on all ranks; got [2, 3] of torch.flo"),
    "dimensions": (lambda x, r: (x.flatten() if r else x, dist.group.WORLD),
                   "got [2, 3] of torch.float32, [6] of torch.float32"),
    "dtypes": (lambda x, r: (x.bool() if r else x, dist.group.WORLD),
               "got [2, 3] of torch.float32, [2, 3] of torch.bool"),
}  # fmt: skip


def refusals():
    """The errors of calls that cannot be."""
    messages = {}
    for kind, (arguments, _) in REFUSED.items():
        with pytest.raises((ValueError, TypeError)) as error:
            gather_tokens(*arguments(torch.zeros(2, 3), dist.get_rank()))
        messages[kind] = str(error.value)
    return messages


def test_refused_on_all_ranks(ranks):
    for messages in ranks(refusals):
        assert [kind for kind, (_, words) in REFUSED.items() if words not in messages[kind]] == []

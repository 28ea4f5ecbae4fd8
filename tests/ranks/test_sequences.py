"""Sequences of which every rank has some tokens, compared with float64 on one process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from grpo_kernels import LMHead, gather_tokens, grpo_loss, linear_logprobs
from tests.helpers.batches import (
    Result,
    assert_matches,
    config,
    make_batch,
    packed,
    run_fused,
    with_cross_entropy,
)
from tests.helpers.head_options import objective_options
from tests.ranks.traffic import Traffic

CONSTANTS = ("old_logps", "ref_logps", "sampling_logps", "ce_weights")
PER_TOKEN = ("hidden", "targets", "mask", "temperature", *CONSTANTS)


def part_of(batch, index):
    """The batch with some of its tokens or sequences."""
    parts = {name: x[index] for name in PER_TOKEN if (x := getattr(batch, name)) is not None}
    return replace(batch, **parts)


def loss(part, options, cu_seqlens=None):
    """Scores this rank's tokens, joins those of all ranks, and computes the loss on every rank."""
    options, group = dict(options), dist.group.WORLD
    head = {name: getattr(part, name).clone().requires_grad_() for name in ("hidden", "weight")}
    fields = options.pop("head", {})
    if "bias" in fields:
        head["bias"] = part.bias.clone().requires_grad_()
    temperature = part.temperature if "temperature" in fields else 1.0
    lm_head = LMHead(head["weight"], head.get("bias"), temperature=temperature)
    scored = part.mask
    if options.get("ce_weights"):
        scored = part.mask | (part.ce_weights != 0)
    local = linear_logprobs(head["hidden"], lm_head, part.targets, scored, entropy=True)
    logps, entropy, mask = (
        gather_tokens(x, group) for x in (local.logps, local.entropy, part.mask)
    )
    kwargs = {
        name: gather_tokens(getattr(part, name), group)
        for name in CONSTANTS if options.pop(name, False)
    }  # fmt: skip
    out = grpo_loss(
        logps, part.advantages, mask, entropy=entropy, cu_seqlens=cu_seqlens, **kwargs, **options
    )
    out.loss.backward()
    gradients = {name: x.grad.double() for name, x in head.items()}
    return Result(out.loss.detach(), out.metrics, local.logps.detach(), gradients)


def joined(results, dim=1):
    """The result of all ranks: their gradients of the head add up; all else is the same on each."""
    first = results[0]
    for other in results[1:]:
        assert torch.equal(first.loss, other.loss)
        for name, value in first.metrics.items():
            assert torch.equal(value, other.metrics[name]), name
    gradients = {name: sum(r.gradients[name] for r in results) for name in first.gradients
                 if name != "hidden"}  # fmt: skip
    gradients["hidden"] = torch.cat([r.gradients["hidden"] for r in results], dim)
    gradients.setdefault("bias", None)
    return Result(first.loss, first.metrics, torch.cat([r.logps for r in results], dim), gradients)


def batch_of(options):
    return with_cross_entropy(make_batch()) if "ce_weights" in options else make_batch()


def losses(cuts, cases):
    """This rank's result of every case: the whole loss, and its own part of the gradients."""
    columns = (slice(None), slice(*cuts[dist.get_rank() : dist.get_rank() + 2]))
    return [loss(part_of(batch_of(options), columns), options) for options in cases]


# Each objective that reads neighbouring tokens in a different way.
LOSSES = [
    *map(objective_options, ("on_policy", "everything", "gspo", "vespo", "top_entropy_bonus",
                             "is_sequence_mask")),
    *({"config": config(loss_type=kind), "old_logps": True}
      for kind in ("grpo", "bnpo", "luspo", "dr_grpo")),
    {"config": config(loss_type="dapo"), "num_items": 40.0},
    {"config": config(entropy_coef=0.05), "old_logps": True, "head": {"temperature": True}},
    {"ce_weights": True, "old_logps": True},
]  # fmt: skip


# Nine tokens per sequence.
@pytest.mark.parametrize(
    "cuts", ((0, 4, 9), (0, 1, 9), (0, 9, 9)), ids=("halves", "uneven", "none")
)
def test_losses(ranks, cuts):
    for options, *results in zip(LOSSES, *ranks(losses, cuts, LOSSES), strict=True):
        expected = run_fused(batch_of(options), exact=True, scale=1.0, **options)
        assert_matches(joined(results), expected, 3e-5, logps=1e-4)


def whole_sequences(options):
    """The same where every rank has sequences of its own, packed: the last one some tokens less."""
    batch, rank = make_batch(), dist.get_rank()
    local = part_of(batch, slice(2 * rank, 2 * rank + 2))
    flat = replace(packed(local), advantages=batch.advantages)
    counts = gather_tokens(flat.cu_seqlens.diff(), dist.group.WORLD)
    return loss(flat, options, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))


@pytest.mark.parametrize("name", ("gspo", "everything"))
def test_packed_sequences(ranks, name):
    """Ranks that have sequences of their own: the joined tokens are packed, too."""
    options, batch = objective_options(name), make_batch()
    actual = joined(ranks(whole_sequences, options), 0)
    expected = run_fused(batch, exact=True, scale=1.0, **options)
    # Rows of the padded batch that are packed away have no gradient.
    ends = (batch.mask * torch.arange(1, 10)).amax(1)
    keep = torch.arange(9) < ends[:, None]
    expected.logps = expected.logps[keep]
    expected.gradients["hidden"] = expected.gradients["hidden"][keep]
    assert_matches(actual, expected, 3e-5, logps=1e-4)


DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def gathered(sizes):
    """Gathers parts of these sizes, `[3, T_r]` and `[T_r]`, in every dtype."""
    rank, pairs = dist.get_rank(), []
    for dtype in DTYPES:
        for shape in ((3, sizes[rank]), (sizes[rank],)):
            g = torch.Generator().manual_seed(rank)
            local = (4 * torch.rand(shape, generator=g)).to(dtype)
            strided = torch.stack([local, local], -1)[..., 0]
            pairs.append((local, gather_tokens(strided, dist.group.WORLD)))
    return pairs


@pytest.mark.parametrize("sizes", ((3, 3), (1, 4), (0, 2), (5, 0), (0, 0)), ids=str)
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


@pytest.mark.parametrize("sizes", ((2, 2), (1, 3), (0, 4)), ids=str)
def test_the_backward_is_a_slice_and_sends_nothing(ranks, sizes):
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
    "no group": (lambda x, r: (x, "ranks"), "group: expected a torch.distributed process group "
                 "that this rank is in; got 'ran"),
    "no tensor": (lambda x, r: ([1.0], dist.group.WORLD), "x: expected a tensor; got list"),
    "complex": (lambda x, r: (x.to(torch.complex64), dist.group.WORLD),
                "x: expected real numbers or bools; got torch.complex64"),
    "three": (lambda x, r: (x[None], dist.group.WORLD),
              "x: expected shape [B, T] or [N]; got [1, 2, 3]"),
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

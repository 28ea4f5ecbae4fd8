"""Jobs of ranks that have parts of the same sequences: log-probs of each, a loss over all."""

from dataclasses import replace

import torch
import torch.distributed as dist

from grpo_kernels import LMHead, gather_tokens, grpo_loss, linear_logprobs
from tests.helpers.batches import Result, make_batch, packed, with_cross_entropy
from tests.ranks.shard_jobs import Traffic

PER_TOKEN = ("hidden", "targets", "mask", "temperature")
CONSTANTS = ("old_logps", "ref_logps", "sampling_logps", "ce_weights")


def batch_of(options):
    batch = make_batch()
    return with_cross_entropy(batch) if options.get("ce_weights") else batch


def part_of(batch, cuts):
    """The tokens of every sequence that this rank has, which may be none."""
    columns = slice(*cuts[dist.get_rank() : dist.get_rank() + 2])
    names = (*PER_TOKEN, *CONSTANTS)
    parts = {name: x[:, columns] for name in names if (x := getattr(batch, name)) is not None}
    return replace(batch, **parts)


def losses(cuts, cases):
    """Each rank's result of every case: the whole loss, and its own part of the gradients."""
    return [loss(part_of(batch_of(options), cuts), dict(options)) for options in cases]


PER_SEQUENCE = (
    "hidden", "targets", "mask", "old_logps", "ref_logps", "sampling_logps", "temperature",
    "advantages", "ce_weights",
)  # fmt: skip


def sequences_of(batch, places):
    """Some sequences of a batch."""
    parts = {n: x[list(places)] for n in PER_SEQUENCE if (x := getattr(batch, n)) is not None}
    return replace(batch, **parts)


def whole_sequences(options):
    """The same where every rank has sequences of its own, packed: the last one some tokens less."""
    batch, rank = make_batch(), dist.get_rank()
    flat = packed(
        replace(sequences_of(batch, (2 * rank, 2 * rank + 1)), advantages=batch.advantages)
    )
    counts = gather_tokens(flat.cu_seqlens.diff(), dist.group.WORLD)
    return loss(flat, dict(options), torch.nn.functional.pad(counts.cumsum(0), (1, 0)))


def loss(part, options, cu_seqlens=None):
    """Scores this rank's tokens, joins those of all ranks, and computes the loss on every rank."""
    group = dist.group.WORLD
    head = [x.clone().requires_grad_() for x in (part.hidden, part.weight, part.bias)]
    fields = options.pop("head", {})
    bias = head[2] if "bias" in fields else None
    lm_head = LMHead(
        head[1], bias, temperature=part.temperature if "temperature" in fields else 1.0
    )
    scored = part.mask
    if options.get("ce_weights"):
        scored = part.mask | (part.ce_weights != 0)
    local = linear_logprobs(head[0], lm_head, part.targets, scored, entropy=True)
    parts = local.logps, local.entropy, part.mask
    logps, entropy, mask = (gather_tokens(x, group) for x in parts)
    kwargs = {
        name: gather_tokens(getattr(part, name), group)
        for name in CONSTANTS if options.pop(name, False)
    }  # fmt: skip
    out = grpo_loss(
        logps, part.advantages, mask, entropy=entropy, cu_seqlens=cu_seqlens, **kwargs, **options
    )
    out.loss.backward()
    names = ("hidden", "weight", "bias")
    gradients = {
        name: None if x.grad is None else x.grad.double()
        for name, x in zip(names, head, strict=True)
    }
    return Result(out.loss.detach(), out.metrics, local.logps.detach(), gradients)


DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def gathered(sizes):
    """Gathers parts of these sizes, `[3, T_r]` and `[T_r]`, in every dtype."""
    pairs = []
    for dtype in DTYPES:
        for shape in ((3, sizes[dist.get_rank()]), (sizes[dist.get_rank()],)):
            g = torch.Generator().manual_seed(dist.get_rank())
            local = (4 * torch.rand(shape, generator=g)).to(dtype)
            strided = torch.stack([local, local], -1)[..., 0]
            pairs.append((local, gather_tokens(strided, dist.group.WORLD)))
    return pairs


def gradient(sizes):
    """The gradient of this rank's part, by a loss that weighs every token, and what was said."""
    x = torch.zeros(2, sizes[dist.get_rank()], requires_grad=True)
    full = gather_tokens(x, dist.group.WORLD)
    weights = torch.arange(float(full.numel())).view_as(full)
    with Traffic() as traffic:
        (weights * full).sum().backward()
    return x.grad, len(traffic.seen)


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
        try:
            messages[kind] = str(gather_tokens(*arguments(torch.zeros(2, 3), dist.get_rank())))
        except (ValueError, TypeError) as error:
            messages[kind] = str(error)
    return messages

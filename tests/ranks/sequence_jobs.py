"""Jobs of ranks that share sequences: calls on each rank's tokens of every sequence."""

from dataclasses import replace

import torch
import torch.distributed as dist

from grpo_kernels import fused_grpo_loss, grpo_loss
from tests.support.batches import make_batch, packed, run_fused, with_cross_entropy

PER_TOKEN = (
    "hidden", "targets", "mask", "old_logps", "ref_logps", "sampling_logps", "temperature",
    "ce_weights",
)  # fmt: skip


def batch_of(options):
    batch = make_batch()
    return with_cross_entropy(batch) if options.get("ce_weights") else batch


def part_of(batch, cuts):
    """The tokens of every sequence that this rank has, which may be none."""
    columns = slice(*cuts[dist.get_rank() : dist.get_rank() + 2])
    parts = {name: x[:, columns] for name in PER_TOKEN if (x := getattr(batch, name)) is not None}
    return replace(batch, **parts)


def losses(cases):
    """Each rank's result of every case."""
    found = []
    for cuts, is_packed, options in cases:
        part = part_of(batch_of(options), cuts)
        if is_packed:
            part = packed(part)
        found.append(run_fused(part, exact=False, seq_group=dist.group.WORLD, **options))
    return found


def from_logps(cuts, config):
    """`grpo_loss` over each rank's log-probs, and the gradient of these."""
    batch = make_batch()
    columns = slice(*cuts[dist.get_rank() : dist.get_rank() + 2])
    logps = torch.where(batch.mask, batch.old_logps + 0.1, 0.0)[:, columns].requires_grad_()
    out = grpo_loss(
        logps, batch.advantages, batch.mask[:, columns], old_logps=batch.old_logps[:, columns],
        config=config, seq_group=dist.group.WORLD,
    )  # fmt: skip
    out.loss.backward()
    return out.loss.detach(), logps.grad


def refused(kind):
    """The error of a call that cannot be."""
    rank, batch = dist.get_rank(), make_batch()
    args = [batch.hidden, batch.weight, batch.targets, batch.advantages, batch.mask]
    options = {"seq_group": dist.group.WORLD}
    if kind == "other sequences":
        args = [x if x is batch.weight else x[rank:] for x in args]
    elif kind == "no group":
        options["seq_group"] = "ranks"
    elif kind == "packed":
        rows = batch.mask
        args = [batch.hidden[rows], batch.weight, batch.targets[rows], torch.ones(int(rows.sum()))]
    elif kind == "input of one":
        args[2] = batch.targets.masked_fill(batch.mask, 999999 * rank)
    else:
        from tests.support.batches import config

        options["config"] = config(top_entropy_quantile=0.5)
    try:
        fused_grpo_loss(*args, **options)
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing"

"""Jobs of ranks that share a vocabulary: calls on each rank's part of a head, and their truth.

Options are those of a call, and `layout`, `starts` (of `VocabRanks`).
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo_kernels
from grpo_kernels import (
    Execution,
    LMHead,
    Support,
    VocabRanks,
    fused_grpo_loss,
    linear_logprobs,
    reference,
)
from grpo_kernels.explain import explain
from grpo_kernels.integrations.verl import linear_cross_entropy
from tests.helpers.batches import OBJECTIVES, called, config, make_batch, run_fused

RANK_OPTIONS = ("layout", "starts")
VOCABULARY_FIELDS = ("weight", "bias", "b")


class Traffic(TorchDispatchMode):
    """Notes each collective: its name, and the tensors that it was given."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            if tensors:
                self.seen.append((func.name().split("::")[1].replace("_", ""), tensors))
        return func(*args, **(kwargs or {}))


def on_rank(options: dict[str, Any]) -> dict[str, Any]:
    """A call's options, with the `VocabRanks` of this rank."""
    starts, layout = options.get("starts"), options.get("layout", "replicated")
    start = None if starts is None else starts[dist.get_rank()]
    rest = {name: x for name, x in options.items() if name not in RANK_OPTIONS}
    return {**rest, "ranks": VocabRanks(dist.group.WORLD, start, layout)}


def rows_of(cuts, starts=None) -> slice:
    """The rows of the head that this rank has."""
    begin, end = cuts[dist.get_rank() : dist.get_rank() + 2]
    at = begin if starts is None else starts[dist.get_rank()]
    return slice(at, at + end - begin)


def said(cuts, head: dict[str, Any], chunk_bytes: int) -> list[str]:
    """The names of the collectives of a call, once the ranks have met."""
    head = {**head, "ranks": VocabRanks(dist.group.WORLD)}
    rows = rows_of(cuts)
    batch = make_batch()
    part = replace(batch, weight=batch.weight[rows], bias=batch.bias[rows])
    for _ in range(2):
        with Traffic() as traffic:
            execution = Execution(chunk_bytes=chunk_bytes)
            run_fused(part, exact=False, head=head, execution=execution, old_logps=True)
    return [name for name, _ in traffic.seen]


def scores(cuts, options: dict[str, Any], exact: bool = False) -> dict[str, torch.Tensor]:
    """The results of a call on a head with a LoRA and a bias, and all gradients of a loss.

    More options: `call`, which is `"loss"`, `"verl"` (without LoRA and bias) or else
    `linear_logprobs`; `biased`, ids that are then no targets, and what is added to their bias;
    `lift`, added to every bias; `dtensors`; `several` targets per token, one twice.

    With `exact` they are those of the reference in float64 on the whole head.
    """
    batch, options = make_batch(), dict(options)
    call, dtensors = options.pop("call", None), options.pop("dtensors", False)
    several, lift = options.pop("several", False), options.pop("lift", 0.0)
    ids, added = options.pop("biased", ((), 0.0))
    g, (V, _), mask = torch.Generator().manual_seed(3), batch.weight.shape, batch.mask
    bias, targets = batch.bias + lift, batch.targets
    bias[list(ids)] += added
    if several:
        targets = torch.stack([targets, targets * 7 % V, 0 * targets, targets], -1)
    targets = torch.where(torch.isin(targets, torch.tensor(ids)), 777, targets)
    head = {
        "hidden": torch.where(mask[..., None], batch.hidden, 0.0), "weight": batch.weight,
        "bias": bias, "a_out": torch.randn(*mask.shape, 4, generator=g),
        "b": 0.3 * torch.randn(V, 4, generator=g),
    }  # fmt: skip
    dtype = torch.float64 if exact else torch.float32
    for name, x in head.items():
        if name in VOCABULARY_FIELDS and not exact:
            mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),)) if dtensors else None
            rows = rows_of(cuts, options.get("starts"))
            x = distribute_tensor(x, mesh, [Shard(0)]) if dtensors else x[rows]
        head[name] = x.detach().clone().to(dtype).requires_grad_()
    kwargs = {name: x for name, x in options.items() if name not in RANK_OPTIONS} | {"mask": mask}
    if call != "verl":
        kwargs |= {"bias": head["bias"], "low_rank": (head["a_out"], head["b"])}
    if not exact and not dtensors:
        kwargs["ranks"] = on_rank(options)["ranks"]
    package = reference if exact else grpo_kernels
    tensors = head["hidden"], head["weight"]
    kwargs |= dict(zip(("hidden", "weight"), tensors, strict=True))
    if call == "loss":
        kwargs |= {"targets": targets, "advantages": batch.advantages.to(dtype)}
        out = called(package, "fused_grpo_loss", kwargs)
        results, total = {"logps": out.logps, "entropy": out.entropy}, out.loss
    else:
        if call == "verl" and not exact:
            call_args = (kwargs["temperature"], "none", dist.group.WORLD)
            out = linear_cross_entropy(*tensors, targets, *call_args, mask=mask)
        else:
            kwargs |= {} if exact else {"entropy": True}
            kwargs["targets"] = None if options.get("entries") else targets
            out = called(package, "linear_logprobs", kwargs)
        names = ("logps", "entropy", "logsumexp")[: 2 if call == "verl" else 3]
        results = dict(zip(names, out, strict=False))
        total = sum((weights_like(x) * x).sum() for x in results.values())
    total.backward()
    grads = {f"d_{k}": x.grad for k, x in head.items() if x.grad is not None}
    if dtensors and not exact:
        for name in ("d_weight", "d_bias", "d_b"):
            assert grads[name].placements == (Shard(0),)
            grads[name] = grads[name].full_tensor()
    return {name: x.detach() for name, x in (results | grads).items()}


def weights_like(x: torch.Tensor) -> torch.Tensor:
    """Weights of every entry of `x`, the same on all ranks."""
    return (torch.arange(x.numel()) % 7 / 3 - 0.8).view(x.shape)


def own_tokens() -> dict[str, torch.Tensor]:
    """The gradients of a head over data-parallel ranks, as the page on ranks composes it."""
    batch, rank = make_batch(), dist.get_rank()
    rows, local = rows_of((0, 300, 1003)), slice(2 * rank, 2 * rank + 2)
    hidden = batch.hidden.nan_to_num()[local].clone().requires_grad_()
    weight = batch.weight[rows].clone().requires_grad_()
    everyone, targets, mask, advantages = (
        torch.cat(all_gather(x, dist.group.WORLD))
        for x in (hidden, batch.targets[local], batch.mask[local], batch.advantages[local])
    )
    head = LMHead(weight, ranks=VocabRanks(dist.group.WORLD, hidden="partial"))
    out = fused_grpo_loss(everyone, head, targets, advantages, mask)
    out.loss.backward()
    return {"loss": out.loss.detach(), "hidden": hidden.grad, "weight": weight.grad}


def sizes(all_cuts) -> list[int]:
    """The vocabulary's size that each call finds."""
    batch, chunk_sizes = make_batch(), []
    targets = torch.where(batch.mask, batch.targets, 0)
    targets[0, 0] = 2000  # in none of them
    for cuts in all_cuts:
        head = LMHead(batch.weight[rows_of(cuts)], **on_rank({}))
        try:
            linear_logprobs(batch.hidden, head, targets, batch.mask)
        except ValueError as error:
            chunk_sizes.append(int(str(error).split("[0, ")[1].split(")")[0]))
    return chunk_sizes


def raises_alone() -> str:
    """Returns the other rank's error when one rank has left."""
    batch, rows = make_batch(), rows_of((0, 500, 1003))
    group = dist.new_group(timeout=timedelta(seconds=3))
    if dist.get_rank():
        return "gone"
    part = replace(batch, weight=batch.weight[rows], bias=batch.bias[rows])
    try:
        run_fused(part, exact=False, head={"ranks": VocabRanks(group)})
    except RuntimeError as error:
        return str(error)
    return "nothing"


def _low_rank(c, r, ranks=(2, 2)):
    return {"low_rank": (torch.zeros(4, 9, ranks[r]), torch.zeros(len(c.weight), ranks[r]))}


def _distributed(c, placement, **more):
    weight = distribute_tensor(make_batch().weight, dist.init_device_mesh("cpu", (2,)), [placement])
    return {"weight": weight, "ranks": None, **more}


def _support(c, r, apart=False):
    """A set of its target alone for each token; on the second rank `apart` has an entry more."""
    ids, sizes = c.targets.clamp(min=0).flatten(), torch.arange(c.targets.numel() + 1)
    if apart:
        ids = torch.cat([(ids[:r] + 1) % 1003, ids])
        sizes[1:] += r
    return {"support": Support(ids, sizes)}


_ON_ALL = "expected on all ranks or on none; got it on ranks "
_SAME, _PLAN = "expected the same on all ranks; got ", "mask, advantages, chunk_bytes: expected "
_BF16 = torch.bfloat16
# Fault: changes by rank `r` of the call's arguments `c`, and the error on both ranks.
REFUSED: dict[str, tuple[Callable[[Any, int], dict[str, Any]], str]] = {
    "overlap": (lambda c, r: {"start": [0, 400][r]},
                "ranks.start: expected every column on one rank; got columns 0 to 501, 400 to 900"),
    "hole": (lambda c, r: {"start": [0, 600][r]},
             "ranks.start: expected every column on one rank; got columns 0 to 501, 600 to 1100"),
    "start on one": (lambda c, r: {"start": [None, 502][r]}, f"ranks.start: {_ON_ALL}[1]"),
    "dtype": (lambda c, r: {"weight": c.weight.to([torch.float32, _BF16][r])},
              f"weight's dtype: {_SAME}['float32', 'bfloat16']"),
    "bias": (lambda c, r: {"bias": c.weight[:, 0]} if r else {}, f"bias: {_ON_ALL}[1]"),
    "low_rank on one": (lambda c, r: _low_rank(c, r) if r else {}, f"low_rank: {_ON_ALL}[1]"),
    "low_rank's rank": (lambda c, r: _low_rank(c, r, (2, 3)), f"rank of low_rank: {_SAME}[2, 3]"),
    "frozen on one": (lambda c, r: {"hidden": c.hidden.requires_grad_(not r)},
                      f"gradient of hidden: {_ON_ALL}[0]"),
    "width": (lambda c, r: {n: torch.nn.functional.pad(getattr(c, n), (0, r))
                            for n in ("weight", "hidden")}, f"H: {_SAME}[48, 49]"),
    "empty": (lambda c, r: {"weight": make_batch().weight[: 1003 * r]},
              "weight: expected a row or more on every rank; got [0, 1003] rows"),
    "targets": (lambda c, r: {"targets": c.targets + r * (c.targets == c.targets[0, 0])},
                "targets: expected the same on all ranks that share the vocabulary"),
    "mask": (lambda c, r: {"mask": c.mask & (torch.arange(9) < 9 - r)}, _PLAN),
    "advantages": (lambda c, r: {"advantages": c.advantages * torch.tensor([1.0, 0, 1, 1 - r])},
                   _PLAN),
    "chunk_bytes": (lambda c, r: {"chunk_bytes": 4 * 502 * (3 + r)}, _PLAN),
    "shape": (lambda c, r: {n: getattr(c, n)[r:] for n in (
        "hidden", "targets", "mask", "advantages")}, f"tokens: {_SAME}[36, 27]"),
    "target ids": (lambda c, r: {"targets": c.targets.clamp(min=1003)},
                   "targets: expected ids in [0, 1003)"),
    "banned targets": (lambda c, r: {
        "bias": make_batch().bias.masked_fill(torch.arange(1003) == c.targets[0, 0], -torch.inf)
                .chunk(2)[r]},
                "bias: expected more than -inf at every unmasked target"),
    "group": (lambda c, r: {"group": "tensor"},
              "ranks.group: expected a torch.distributed process group that this rank is in"),
    "no group": (lambda c, r: {"group": None, "start": 3},
                 "ranks.group: expected a process group, as weight is no DTensor; got None"),
    "no ranks": (lambda c, r: {"ranks": dist.group.WORLD},
                 "ranks: expected a VocabRanks, or None; got <"),
    "start": (lambda c, r: {"start": 0.5}, "ranks.start: expected an int, or None; got 0.5"),
    "layout": (lambda c, r: {"layout": "tokens"},
               "ranks.hidden: expected one of replicated, partial; got 'tokens'"),
    "layouts": (lambda c, r: {"layout": ["partial", "replicated"][r]},
                f"ranks.hidden: {_SAME}['partial', 'replicated']"),
    **{name: (lambda c, r, name=name: {name: 1.0 + r}, f"{label}: {_SAME}[1, 2]")
       for name, label in (("temperature", "temperature"), ("logit_scale", "logit_scale"),
                           ("softcap", "softcap (0: none)"))},
    "logits_dtype": (lambda c, r: {
        "hidden": c.hidden.to(_BF16), "weight": c.weight.to(_BF16),
        "logits_dtype": ["fp32", "model"][r]}, f"logits_dtype='model': {_ON_ALL}[1]"),
    "temperature per token": (lambda c, r: {"temperature": torch.ones(4, 9)} if r else {},
                              f"temperature per token: {_ON_ALL}"),
    "batch_invariant": (lambda c, r: {"batch_invariant": bool(r)},
                        f"batch_invariant: {_ON_ALL}[1]"),
    "entropy_coef": (lambda c, r: {"config": config(entropy_coef=0.1 * r)},
                     f"entropy_coef: {_SAME}[0, 0.1]"),
    "passes": (lambda c, r: {"config": config(loss_type="gspo")} if r else {},
               f"one pass: {_SAME}[1, 0]"),
    "gradient": (lambda c, r: {"trained": bool(r)}, f"gradient: {_ON_ALL}[1]"),
    "capturable": (lambda c, r: {"capturable": True},
                   "capturable: expected False where ranks share the vocabulary; got True"),
    "supports": (lambda c, r: _support(c, r, apart=True),
                 "support: expected the same on all ranks that share the vocabulary; got others"),
    "columns": (lambda c, r: _distributed(c, Shard(1)),
                "weight: expected a DTensor with Shard(0) on a mesh of one dimension"),
    "dtensor and group": (
        lambda c, r: _distributed(c, Shard(0), ranks=VocabRanks(dist.group.WORLD)),
        "ranks.group: expected None with a DTensor, which has its own"),
    "plain bias": (lambda c, r: _distributed(c, Shard(0), bias=make_batch().bias),
                   "bias: expected a DTensor, as another tensor of the head is one"),
}  # fmt: skip


def refusals() -> dict[str, str]:
    """The errors of calls that cannot be."""
    return {kind: refused(change) for kind, (change, _) in REFUSED.items()}


def refused(change: Callable[[Any, int], dict[str, Any]]) -> str:
    rank, batch = dist.get_rank(), make_batch()
    kwargs = {
        "hidden": torch.where(batch.mask[..., None], batch.hidden, 0.0),
        "weight": batch.weight.chunk(2)[rank], "targets": batch.targets, "mask": batch.mask,
        "advantages": batch.advantages, "trained": True,
        "group": dist.group.WORLD, "start": None, "layout": "replicated",
    }  # fmt: skip
    kwargs |= change(SimpleNamespace(**kwargs), rank)
    rank_args = [kwargs.pop(name) for name in ("group", "start", "layout")]
    kwargs["weight"] = kwargs["weight"].detach().requires_grad_(kwargs.pop("trained"))
    try:
        kwargs.setdefault("ranks", VocabRanks(*rank_args) if "ranks" not in kwargs else None)
        called(grpo_kernels, "fused_grpo_loss", kwargs)
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing"


def explained(cuts) -> dict[str, torch.Tensor]:
    """The columns of an explanation of a call on this rank's part of the head."""
    batch, (options, names) = make_batch(), OBJECTIVES["is_token_truncate"]
    kwargs = {name: getattr(batch, name) for name in names} | {"config": config(**options)}
    tensors = batch.targets, batch.advantages, batch.mask
    head = LMHead(batch.weight[rows_of(cuts)], ranks=VocabRanks(dist.group.WORLD))
    out = fused_grpo_loss(batch.hidden, head, *tensors, **kwargs)
    return explain(out, *tensors, **kwargs).columns

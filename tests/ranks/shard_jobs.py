"""Jobs of ranks that share a vocabulary: calls on each rank's part of a head."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo_kernels import Support, VocabRanks
from grpo_kernels.experimental import Sampled
from grpo_kernels.integrations.verl import linear_cross_entropy
from tests.helpers import flat_calls
from tests.helpers.batches import (
    config,
    exact_batch,
    make_batch,
    run_fused,
    with_cross_entropy,
)
from tests.helpers.flat_calls import fused_grpo_loss, linear_logprobs, reference
from tests.helpers.supports import make_support, with_logps_of_call


def on_rank(options: dict[str, Any]) -> dict[str, Any]:
    """A case's options, with the `VocabRanks` of this rank for its `layout` and `starts`."""
    rest = {name: x for name, x in options.items() if name not in ("layout", "starts")}
    starts, layout = options.get("starts"), options.get("layout", "replicated")
    start = None if starts is None else starts[dist.get_rank()]
    return {**rest, "ranks": VocabRanks(dist.group.WORLD, start, layout)}


def with_kept_sets(options: dict[str, Any]):
    """The batch and the options of a case in which most tokens have a support."""
    batch = make_batch()
    kept = make_support(batch, without=options["without"])
    batch = with_logps_of_call(batch, kept, options)
    return batch, {k: v for k, v in options.items() if k != "without"} | {"support": kept}


def with_support(cases: list[tuple[tuple[int, ...], dict[str, Any]]]) -> list:
    """The result of every case, in which most tokens have a support."""
    found = []
    for cuts, options in cases:
        batch, options = with_kept_sets(options)
        found.append(run_fused(part_of(batch, cuts), exact=False, **on_rank(options)))
    return found


def logprobs_of_kept_sets(cuts) -> dict[str, torch.Tensor]:
    """The results of `linear_logprobs` over supports, and all gradients."""
    support = make_support(make_batch(), without=0.3)
    return logprobs(cuts, {"support": support, "low_rank": True, "bias": True, "softcap": 6.0})


def batch_of(options: dict[str, Any]):
    batch = exact_batch() if "logits_dtype" in options else make_batch()
    return with_cross_entropy(batch) if options.get("ce_weights") else batch


def part_of(batch, cuts):
    """The rows of the head that this rank has."""
    rows = slice(*cuts[dist.get_rank() : dist.get_rank() + 2])
    return replace(batch, weight=batch.weight[rows], bias=batch.bias[rows])


def losses(cases: list[tuple[tuple[int, ...], dict[str, Any]]]) -> list:
    """The result of every case, and how often the ranks spoke."""
    return [loss(cuts, options) for cuts, options in cases]


def loss(cuts, options):
    batch = part_of(batch_of(options), cuts)
    run_fused(batch, exact=False, **on_rank(options))  # the ranks meet
    with Counted() as counted:
        result = run_fused(batch, exact=False, **on_rank(options))
    return result, counted.calls


def sequences_of(batch, places):
    """Some sequences of a batch, which has `[B, ...]` tensors; perhaps none."""
    names = (
        "hidden", "targets", "mask", "old_logps", "ref_logps", "sampling_logps", "temperature",
        "advantages", "ce_weights",
    )  # fmt: skip
    parts = {name: x[list(places)] for name in names if (x := getattr(batch, name)) is not None}
    return replace(batch, **parts)


def own_rows(cases):
    """The result of every case, on sequences that this rank alone has."""
    found = []
    for cuts, places, options in cases:
        batch = sequences_of(batch_of(options), places[dist.get_rank()])
        found.append(run_fused(part_of(batch, cuts), exact=False, **on_rank(options)))
    return found


def sequences_of_head(head, places):
    """What `head_of` returns, of some sequences."""
    mine, head = list(places), dict(head)
    for name in ("hidden", "a_out"):
        head[name] = head[name].detach()[mine].requires_grad_()
    head |= {name: head[name][mine] for name in ("targets", "mask")}
    return head | {"weights": head["weights"][:, mine]}


def own_logprobs(cuts, places, options):
    """`linear_logprobs` over tokens that this rank alone has, and the gradients."""
    head = sequences_of_head(head_of(cuts), places[dist.get_rank()])
    return scored(linear_logprobs, head, on_rank(options))


def bytes_of_rows(tokens: list[int], low_rank: int, biased: bool) -> dict[str, int]:
    """Bytes that a call on tokens of this rank alone gets from others, by the shape of a row."""
    H, V, rank, world = 64, 400, dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens[rank], H, generator=g).requires_grad_()
    weight = torch.randn(V // world, H, generator=g).requires_grad_()
    targets = torch.randint(V, (tokens[rank],), generator=g)
    options: dict[str, Any] = {"layout": "data", "chunk_bytes": 4 * V * 50}
    if low_rank:
        parts = torch.randn(tokens[rank] + V // world, low_rank, generator=g)
        options["low_rank"] = tuple(
            x.clone().requires_grad_() for x in parts.split([tokens[rank], V // world])
        )
    if biased:
        options["bias"] = torch.randn(V // world, generator=g).requires_grad_()
    found: dict[str, int] = {}
    names = ("reduce_scatter_single", "reduce_scatter_tensor")
    name = next(name for name in names if hasattr(dist, name))
    gather, scatter = dist.all_gather, getattr(dist, name)

    def note(kind: str, rows: torch.Tensor) -> None:
        name = f"{kind} {rows.dtype} {list(rows.shape[1:])}"
        found[name] = found.get(name, 0) + (world - 1) * rows.nbytes

    def all_gather(out, mine, **options):
        note("gather", mine)
        return gather(out, mine, **options)

    def reduce_scatter(mine, parts, **options):
        note("scatter", mine)
        return scatter(mine, parts, **options)

    dist.all_gather = all_gather
    setattr(dist, name, reduce_scatter)
    try:
        advantages = torch.randn(tokens[rank], generator=g)
        out = fused_grpo_loss(hidden, weight, targets, advantages, **on_rank(options))
        out.loss.backward()
    finally:
        dist.all_gather = gather
        setattr(dist, name, scatter)
    return found


def entropy_of_one() -> list:
    """Gradients where one rank's loss is of log-probs and entropies, the other's of log-probs."""
    batch, rank = make_batch(), dist.get_rank()
    part = part_of(sequences_of(batch, [(0, 1), (2, 3)][rank]), (0, 300, 1003))
    hidden = torch.where(part.mask[..., None], part.hidden, 0.0).requires_grad_()
    weight = part.weight.clone().requires_grad_()
    out = linear_logprobs(
        hidden, weight, part.targets, part.mask, entropy=True, **on_rank({"layout": "sequence"})
    )
    (out.logps + (0.5 * out.entropy if rank else 0.0)).sum().backward()
    return [hidden.grad, weight.grad]


def scales_apart() -> str:
    """The error of ranks that scale their losses differently."""
    batch, rank = make_batch(), dist.get_rank()
    part = part_of(sequences_of(batch, [(0, 1), (2, 3)][rank]), (0, 300, 1003))
    weight = part.weight.clone().requires_grad_()
    out = fused_grpo_loss(
        part.hidden, weight, part.targets, part.advantages, part.mask, **on_rank({"layout": "data"})
    )
    try:
        (out.loss * (1 + rank)).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


class Counted:
    """Counts collectives."""

    def __enter__(self):
        self.calls = {"all_gather": 0, "all_reduce": 0}
        self.before = {name: getattr(dist, name) for name in self.calls}
        for name, call in self.before.items():
            setattr(dist, name, self._counting(name, call))
        return self

    def __exit__(self, *_):
        for name, call in self.before.items():
            setattr(dist, name, call)

    def _counting(self, name, call):
        def counting(*args, **kwargs):
            self.calls[name] += 1
            return call(*args, **kwargs)

        return counting


def logprobs(cuts, options) -> dict[str, torch.Tensor]:
    """The results of `linear_logprobs` and all gradients of a loss over them."""
    return scored(linear_logprobs, head_of(cuts), on_rank(options))


def scored(call, head, options):
    weights, options = head.pop("weights"), dict(options)
    low_rank = (head["a_out"], head["b"]) if options.pop("low_rank", False) else None
    bias = head["bias"] if options.pop("bias", False) else None
    if call is linear_logprobs:
        options["entropy"] = True
    out = call(
        head["hidden"], head["weight"], head["targets"], mask=head["mask"], bias=bias,
        low_rank=low_rank, **options,
    )  # fmt: skip
    total = sum((w * x).sum() for w, x in zip(weights, out, strict=True))
    total.backward()
    grads = {f"d_{k}": x.grad for k, x in head.items() if x.requires_grad and x.grad is not None}
    return {"logps": out.logps, "entropy": out.entropy, "logsumexp": out.logsumexp, **grads}


def head_of(cuts=None, dtype=torch.float32) -> dict[str, Any]:
    batch = make_batch()
    g = torch.Generator().manual_seed(3)
    V = len(batch.weight)
    b = 0.3 * torch.randn(V, 4, generator=g)
    a_out = torch.randn(*batch.mask.shape, 4, generator=g)
    rows = slice(None) if cuts is None else slice(*cuts[dist.get_rank() : dist.get_rank() + 2])
    leaves = {
        "hidden": torch.where(batch.mask[..., None], batch.hidden, 0.0),
        "weight": batch.weight[rows], "bias": batch.bias[rows], "b": b[rows], "a_out": a_out,
    }  # fmt: skip
    leaves = {k: x.detach().clone().to(dtype).requires_grad_() for k, x in leaves.items()}
    weights = torch.randn(3, *batch.mask.shape, generator=g) * batch.mask
    return {**leaves, "targets": batch.targets, "mask": batch.mask, "weights": weights.to(dtype)}


def sizes(all_cuts) -> list[int]:
    """The vocabulary's size that each call finds."""
    batch, found = make_batch(), []
    targets = torch.where(batch.mask, batch.targets, 0)
    targets[0, 0] = 2000  # in none of them
    for cuts in all_cuts:
        part = part_of(batch, cuts)
        try:
            linear_logprobs(batch.hidden, part.weight, targets, batch.mask, **on_rank({}))
        except ValueError as error:
            found.append(int(str(error).split("[0, ")[1].split(")")[0]))
    return found


def masked_columns(call: str, masked: float, whole: bool = False) -> dict[str, torch.Tensor]:
    """A call whose bias makes all columns of the first rank, and more, impossible."""
    batch, cuts = make_batch(), (0, 300, 1003)
    bias = batch.bias.clone()
    bias[:350] = masked
    dtype = torch.float64 if whole else torch.float32
    rows = slice(None) if whole else slice(*cuts[dist.get_rank() : dist.get_rank() + 2])
    hidden, weight, bias = (
        x.to(dtype).detach().clone().requires_grad_()
        for x in (torch.where(batch.mask[..., None], batch.hidden, 0.0), batch.weight[rows],
                  bias[rows])
    )  # fmt: skip
    targets = torch.where(batch.mask & (batch.targets >= 350), batch.targets, 777)
    options: dict[str, Any] = {"bias": bias, "mask": batch.mask}
    module = reference if whole else flat_calls
    if not whole:
        options = on_rank(options)
    if call == "loss":
        out = module.fused_grpo_loss(hidden, weight, targets, batch.advantages, **options)
        total = out.loss
    else:
        options |= {} if whole else {"entropy": True}
        out = module.linear_logprobs(hidden, weight, targets, **options)
        total = (out.logps + 0.3 * out.entropy - 0.1 * out.logsumexp).sum()
    total.backward()
    return {
        "total": total.detach(), "logps": out.logps.detach(), "entropy": out.entropy.detach(),
        "d_hidden": hidden.grad, "d_weight": weight.grad, "d_bias": bias.grad,
    }  # fmt: skip


def partial() -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of rows, added up in the call and not."""
    layouts = ("replicated", "partial")
    return {name: of_adapted_head((0, 300, 1003), layout=name) for name in layouts}


def of_adapted_head(cuts, dtype=torch.float32, **options) -> dict[str, torch.Tensor]:
    """The gradients of a loss over a head with a LoRA and a bias; without cuts exact."""
    head, batch = head_of(cuts, dtype), make_batch()
    options |= {"low_rank": (head["a_out"], head["b"]), "bias": head["bias"]}
    module = reference if cuts is None else flat_calls
    module.fused_grpo_loss(
        head["hidden"], head["weight"], head["targets"], batch.advantages.to(dtype), head["mask"],
        **(options if cuts is None else on_rank(options)),
    ).loss.backward()  # fmt: skip
    return {name: head[name].grad for name in ("hidden", "a_out", "weight", "bias", "b")}


def of_dtensors(places) -> dict[str, torch.Tensor]:
    """As `logprobs`, from DTensors; gradients are DTensors, too.

    `places`: the sequences that each rank alone has, whose losses are of one batch; None: all have
    all of them.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    head, options = head_of(), {"low_rank": True, "bias": True}
    for name in ("weight", "bias", "b"):
        whole = head[name].detach()
        head[name] = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    if places is not None:
        head = sequences_of_head(head, places[dist.get_rank()])
        options["ranks"] = VocabRanks(hidden="data")
    found = scored(linear_logprobs, head, options)
    for name in ("d_weight", "d_bias", "d_b"):
        assert found[name].placements == (Shard(0),)
        found[name] = found[name].full_tensor()
    return found


def by_verl(cuts) -> dict[str, torch.Tensor]:
    """A call of verl on a part of the head, its gradient of `hidden` added up by the caller."""
    head = head_of(cuts)
    w, v, _ = head["weights"]
    logps, entropy = linear_cross_entropy(
        head["hidden"], head["weight"], head["targets"], 1.5, "none", dist.group.WORLD,
        mask=head["mask"],
    )  # fmt: skip
    d_hidden, d_weight = torch.autograd.grad(
        (logps, entropy), (head["hidden"], head["weight"]), (w, v)
    )
    dist.all_reduce(d_hidden)
    return {"logps": logps, "entropy": entropy, "d_hidden": d_hidden, "d_weight": d_weight}


def refused(kind: str) -> str:
    """The error of a call that cannot be."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank, batch = dist.get_rank(), make_batch()
    weight, targets = batch.weight.chunk(2)[rank], batch.targets
    hidden = torch.where(batch.mask[..., None], batch.hidden, 0.0)
    ranks: dict[str, Any] | None = {"group": dist.group.WORLD}
    options: dict[str, Any] = {}
    trained = True
    if kind == "overlap":
        ranks["start"] = [0, 400][rank]
    elif kind == "hole":
        ranks["start"] = [0, 600][rank]
    elif kind == "start on one":
        ranks |= {"start": 502} if rank else {}
    elif kind == "start":
        ranks["start"] = 0.5
    elif kind == "dtype":
        weight = weight.to([torch.float32, torch.bfloat16][rank])
    elif kind == "bias":
        options |= {"bias": batch.bias.chunk(2)[rank]} if rank else {}
    elif kind.startswith("low_rank"):
        r = 2 + rank * (kind == "low_rank's rank")
        parts = torch.zeros(*targets.shape, r), torch.zeros(len(weight), r)
        options |= {} if kind == "low_rank on one" and not rank else {"low_rank": parts}
    elif kind == "width":
        weight = torch.nn.functional.pad(weight, (0, rank))
        hidden = torch.nn.functional.pad(hidden, (0, rank))
    elif kind == "empty":
        weight = batch.weight[: 1003 * rank]
    elif kind == "targets":
        targets = targets + rank * (targets == targets[0, 0])
    elif kind == "mask":
        options["mask"] = batch.mask & (torch.arange(9) < 9 - rank)
    elif kind == "mask on one":
        targets = targets.clamp(min=0)
        options |= {"mask": None} if rank else {}
    elif kind == "advantages":
        options["advantages"] = batch.advantages * torch.tensor([1.0, 0, 1, 1 - rank])
    elif kind == "chunk_bytes":
        options["chunk_bytes"] = 4 * 502 * (3 + rank)
    elif kind == "frozen on one":
        hidden.requires_grad_(not rank)
    elif kind == "target ids":
        targets = targets.clamp(min=1003)
    elif kind == "shape":
        hidden, targets = hidden[rank:], targets[rank:]
        options["mask"] = batch.mask[rank:]
    elif kind == "group":
        ranks["group"] = "tensor"
    elif kind == "no group":
        ranks = {"start": 3}
    elif kind == "layout alone":
        ranks = {"hidden": "partial"}
    elif kind == "no ranks":
        options["ranks"] = dist.group.WORLD
    elif kind == "layout":
        ranks["hidden"] = "tokens"
    elif kind == "layouts":
        ranks["hidden"] = ["data", "replicated"][rank]
    elif kind in ("temperature", "logit_scale", "softcap"):
        ranks["hidden"], options[kind] = "data", 1.0 + rank
    elif kind == "softcap on one":
        options |= {"softcap": 2.5} if rank else {}
    elif kind == "logits_dtype":
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
        ranks["hidden"], options[kind] = "data", ["fp32", "model"][rank]
    elif kind == "temperature per token":
        options |= {"temperature": torch.ones(4, 9)} if rank else {}
    elif kind == "batch_invariant":
        options[kind] = bool(rank)
    elif kind == "entropy_coef":
        options["config"] = config(entropy_coef=0.1 * rank)
    elif kind == "passes":
        options |= {"config": config(loss_type="gspo")} if rank else {}
    elif kind == "gradient":
        ranks["hidden"], trained = "data", bool(rank)
    elif kind == "a rank refused":
        ranks["hidden"] = "data"
        targets = targets.clamp(min=0) + 2000 * rank
    elif kind == "sampled":
        options["backward"] = Sampled()
    elif kind == "capturable":
        options["capturable"] = True
    elif kind.startswith("support"):
        ids, sizes = targets.clamp(min=0).flatten(), torch.arange(targets.numel() + 1)
        if kind == "supports":  # one entry more on one rank
            ids = torch.cat([(ids[:rank] + 1) % 1003, ids])
            sizes[1:] += rank
        else:
            ranks["hidden"] = "data"
        options["support"] = Support(ids, sizes)
    else:
        mesh = dist.init_device_mesh("cpu", (2,))
        placement = {"columns": Shard(1), "replicated": Replicate()}.get(kind, Shard(0))
        weight = distribute_tensor(batch.weight, mesh, [placement])
        if kind != "dtensor and group":
            ranks = None
        if kind == "plain bias":
            options["bias"] = batch.bias
    mask = options.pop("mask", batch.mask)
    advantages = options.pop("advantages", batch.advantages)[-len(hidden) :]
    weight = weight.detach().requires_grad_(trained)
    try:
        options = {"ranks": None if ranks is None else VocabRanks(**ranks), **options}
        fused_grpo_loss(hidden, weight, targets, advantages, mask, **options)
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing"


def raises_alone() -> str:
    """What the other rank says when one has left."""
    batch = part_of(make_batch(), (0, 500, 1003))
    group = dist.new_group(timeout=timedelta(seconds=3))
    if dist.get_rank():
        return "gone"
    try:
        run_fused(batch, exact=False, ranks=VocabRanks(group))
    except RuntimeError as error:
        return str(error)
    return "nothing"

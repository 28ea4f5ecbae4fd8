"""A head whose vocabulary lies on several ranks, compared with float64 on one."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import grpo_kernels
from grpo_kernels import (
    Execution,
    LMHead,
    Support,
    VocabRanks,
)
from grpo_kernels.integrations.verl import linear_cross_entropy
from tests import test_pairs as pairs
from tests.helpers.batches import (
    OBJECTIVES,
    called,
    config,
    make_batch,
    relative_error,
    run_fused,
)
from tests.helpers.head_options import BACKENDS, CHUNK
from tests.helpers.ranks import Ranks
from tests.ranks.traffic import Traffic
from tests.test_logits import SURE_CALLS, score_sure, sure_tokens

UNEVEN = (0, 300, 1003)


def rows_of(cuts, starts=None):
    """The rows of the head that this rank has."""
    begin, end = cuts[dist.get_rank() : dist.get_rank() + 2]
    at = begin if starts is None else starts[dist.get_rank()]
    return slice(at, at + end - begin)


# Every pair of options, and every objective


def wrong(cases, cuts, starts=None, layout="replicated"):
    """Checks each, with other rows of the head on each rank; says what differs."""
    rows, problems = rows_of(cuts, starts), []
    start = None if starts is None else starts[dist.get_rank()]
    vocab_ranks = VocabRanks(dist.group.WORLD, start, layout)
    for names, call, objective in cases:
        batch = pairs.batch_of(names)
        options = {"call": call, "objective": objective}
        expected = pairs.run(batch, names, truth=True, **options)
        with mock.patch.object(pairs, "VocabRanks", lambda _: vocab_ranks):
            actual = pairs.run(batch, names, truth=False, rows=rows, **options)
        for name in sorted(actual.gradients.keys() - pairs.VOCABULARY_FIELDS):
            if layout == "partial" and actual.gradients[name] is not None:
                dist.all_reduce(actual.gradients[name])
        for value in (actual.loss, actual.logps, actual.gradients["hidden"]):
            first = value.clone()
            dist.broadcast(first, 0)
            if not torch.equal(first, value):
                problems.append(f"{names}, {objective}: other bits than on the first rank")
        for name in pairs.VOCABULARY_FIELDS:
            if (grad := expected.gradients.get(name)) is not None:
                expected.gradients[name] = grad[rows]
        try:
            # A rank with one column may have a gradient of 0 there.
            pairs.compare(actual, expected, batch.hidden.dtype, call, floor=1e-6)
        except AssertionError as error:
            problems.append(f"{names}, {objective}: {error}")
    return problems


def taken(pair, call):
    """Selects pairs for several ranks, without the many that the interpreter makes slow.

    With Triton's kernels there is each option of the head, in the call that makes gradients in the
    same sweep; what becomes of their sums is the same for both backends.
    """
    if "ranks" in pair or pairs.refusals(pair, call):
        return False
    has_head_option = any(pairs.NAMED[name][0] == "head" for name in pair)
    return "triton" not in pair or (call == "loss" and has_head_option)


CALLS = ("loss", "logps", "targets", "entries", "frozen logps", "reverse", "jsd")


@pytest.mark.parametrize("call", CALLS)
def test_every_pair_of_options(ranks, call):
    cases = [(pair, call, None) for pair in pairs.CALLS[call][0] if taken(pair, call)]
    assert ranks(wrong, cases, (0, 100, pairs.V)) == [[], []]


def test_every_objective(ranks):
    """Alone, and beside tokens that have kept sets."""
    others = ("chunk_bytes", "support")
    cases = [(("bias", x), "loss", name) for name in OBJECTIVES for x in others]
    assert ranks(wrong, cases, (0, 100, pairs.V)) == [[], []]


SOME = [
    ("softcap", "chunk_bytes"), ("temperatures", "entropy_bonus"), ("bias", "support"),
    ("low_rank", "ce_weights"), ("old_logps", "two_passes"), ("logits_dtype", "old_logps"),
    ("batch_invariant", "sampling_logps"),
]  # fmt: skip


def test_four_ranks(tmp_path):
    """A rank has three columns."""
    session = Ranks(tmp_path, world=4)
    problems = session(wrong, [(pair, "loss", None) for pair in SOME], (0, 3, 57, 160, 211))
    session.close()
    assert problems == [[]] * 4


# Columns in another order, states whose gradients the caller adds up, DTensors, verl's call

LAYOUTS = {
    # Rank 0 has the first rows that it is given, but they are the last columns.
    "columns do not follow the ranks": {"starts": (111, 0)},
    "the caller adds up": {"layout": "partial"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(ranks, name):
    cases = [*((pair, "loss", None) for pair in SOME[:5]), (("bias", "softcap"), "entries", None)]
    assert ranks(partial(wrong, cases, (0, 100, pairs.V), **LAYOUTS[name])) == [[], []]


def errors(kind):
    """Errors of log-probs, entropies and gradients, relative to those of the whole head."""
    batch, results = make_batch(), []
    head = {"weight": batch.weight}
    if kind == "DTensors":
        b = 0.3 * torch.randn(len(batch.bias), 4, generator=torch.Generator().manual_seed(3))
        head |= {"bias": batch.bias, "b": b}
    for whole in (True, False):
        leaves = {"hidden": torch.where(batch.mask[..., None], batch.hidden, 0.0), **head}
        for name, x in head.items():
            if not whole and kind == "DTensors":
                mesh = dist.init_device_mesh("cpu", (2,))
                leaves[name] = distribute_tensor(x, mesh, [Shard(0)])
            elif not whole:
                leaves[name] = x[rows_of(UNEVEN)]
        leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
        hidden, weight, *rest = leaves.values()
        if kind == "verl" and not whole:
            how = 1.5, "none", dist.group.WORLD
            scores = linear_cross_entropy(hidden, weight, batch.targets, *how, mask=batch.mask)
        else:
            low_rank = (hidden[..., :4].detach(), rest.pop()) if rest else None
            lm_head = LMHead(weight, *rest, low_rank=low_rank, temperature=1.5)
            args = hidden, lm_head, batch.targets, batch.mask
            scores = grpo_kernels.linear_logprobs(*args, entropy=True)[:2]
        (scores[0].square() + scores[1]).sum().backward()
        grads = {name: x.grad for name, x in leaves.items()}
        if not whole and kind == "DTensors":
            assert all(grads[name].placements == (Shard(0),) for name in head)
            grads |= {name: grads[name].full_tensor() for name in head}
        elif kind == "verl":
            if whole:
                grads["weight"] = grads["weight"][rows_of(UNEVEN)]
            else:
                dist.all_reduce(grads["hidden"])
        results.append([x.detach() for x in (*scores, *grads.values())])
    return [relative_error(x, truth.double()) for truth, x in zip(*results, strict=True)]


@pytest.mark.parametrize("kind", ("DTensors", "verl"))
def test_other_calls(ranks, kind):
    for found in ranks(errors, kind):
        assert max(found) < 2e-5


def sure(cuts, call, backend):
    """Errors of a call on this rank's rows of the head: relative, of the worst token."""
    z, targets, logps, rest, entropy, grads = sure_tokens()
    rows, hidden = rows_of(cuts), torch.eye(len(targets)).requires_grad_()
    weight, d = z[rows].clone().requires_grad_(), 1 / rest.float()
    head = LMHead(weight, ranks=VocabRanks(dist.group.WORLD))
    how = Execution(backend=backend, batch_invariant=call == "batch_invariant")
    actual_logps, actual_entropy = score_sure(call, hidden, head, targets, d, how)
    actual = actual_logps, actual_entropy, weight.grad, hidden.grad.T
    exact = logps, entropy, grads[rows], z.double().T @ grads
    both = [
        [x.double().reshape(-1, len(d)) for x in pair] for pair in zip(actual, exact, strict=True)
    ]
    return [((x - truth).norm(dim=0) / truth.norm(dim=0)).max() for x, truth in both]


@pytest.mark.parametrize("call", SURE_CALLS[:-2])
def test_sure_tokens_keep_their_digits(ranks, call):
    """The target's rank may have the first or the last block, nearly all ids or few."""
    for cuts in ((0, 2100, 5003), (0, 4990, 5003)):
        for backend in BACKENDS:
            for errors in ranks(sure, cuts, call, backend):
                assert max(errors) <= 5e-5, (cuts, backend, errors)


def collectives(cuts, head):
    """The names of the collectives of a call in chunks, and how many there are."""
    rows, batch = rows_of(cuts), make_batch()
    part = replace(batch, weight=batch.weight[rows], bias=batch.bias[rows])
    head = {**head, "ranks": VocabRanks(dist.group.WORLD)}
    for _ in range(2):  # the second call has nothing from the first
        with Traffic() as traffic:
            run_fused(
                part, exact=False, head=head, execution=Execution(chunk_bytes=CHUNK), old_logps=True
            )
    return Counter(name for name, _ in traffic.seen)


@pytest.mark.parametrize("head", ({}, {"bias": True, "temperature": True}), ids="-".join)
def test_collectives_per_chunk(ranks, head):
    # 21 of 36 tokens take part; 14 of these have an advantage.
    batch = make_batch()
    trained = int((batch.mask & (batch.advantages != 0)[:, None]).sum())
    rest = int(batch.mask.sum()) - trained
    at_once = CHUNK // (4 * 703)  # on the rank with the most columns
    chunks = -(-trained // at_once), -(-rest // at_once)
    # Two more gathers, of the columns and of the plan; and the targets that a bias bans.
    expected = {"allgatherbase": sum(chunks) + 2, "allreduce": chunks[0] + ("bias" in head)}
    assert ranks(collectives, UNEVEN, head) == [expected, expected]


# Errors


def _low_rank(c, r, ranks=(2, 2)):
    return {"low_rank": (torch.zeros(4, 9, ranks[r]), torch.zeros(len(c.weight), ranks[r]))}


def _support(c, r):
    """A set of its target alone for each token; on the second rank one has an entry more."""
    ids, sizes = c.targets.clamp(min=0).flatten(), torch.arange(c.targets.numel() + 1)
    sizes[1:] += r
    return {"support": Support(torch.cat([(ids[:r] + 1) % 1003, ids]), sizes)}


_ON_ALL = "expected on all ranks or on none; got it on ranks "
_SAME, _PLAN = "expected the same on all ranks; got ", "mask, advantages, chunk_bytes: expected "
_BF16 = torch.bfloat16
# Fault: changes by rank `r` of the call's arguments `c`, and the error on both ranks.
REFUSED: dict[str, tuple[Callable[[Any, int], dict[str, Any]], str]] = {
    "overlap": (lambda c, r: {"start": [0, 400][r]},
                "ranks.start: expected every column on one rank; got columns 0 to 501, 400 to 900"),
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
    "supports": (_support,
                 "support: expected the same on all ranks that share the vocabulary; got others"),
}  # fmt: skip


def refused(change):
    """The error of a call with these changes."""
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
    with pytest.raises((ValueError, TypeError)) as error:
        called(grpo_kernels, "fused_grpo_loss", {**kwargs, "ranks": VocabRanks(*rank_args)})
    return str(error.value)


def refusals():
    return {kind: refused(change) for kind, (change, _) in REFUSED.items()}


def test_refused_on_all_ranks(ranks):
    for messages in ranks(refusals):
        assert [kind for kind, (_, words) in REFUSED.items() if words not in messages[kind]] == []


def raises_alone():
    """Returns the error of a call when the other rank has left."""
    group, batch = dist.new_group(timeout=timedelta(seconds=3)), make_batch()
    part = replace(batch, weight=batch.weight[:500], bias=batch.bias[:500])
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            run_fused(part, exact=False, head={"ranks": VocabRanks(group)})


def test_a_rank_that_is_gone_does_not_hang_the_other(ranks):
    ranks(raises_alone)

"""Pairs of options, and objectives, where the ranks of a group share the vocabulary."""

import torch
import torch.distributed as dist

from tests import test_pairs as pairs
from tests.helpers.batches import OBJECTIVES

UNEVEN = (0, 100, pairs.V)


def taken(pair: tuple[str, str], call: str) -> bool:
    """Selects pairs for several ranks, without the many that the interpreter makes slow.

    With Triton's kernels there is each option of the head, in the call that makes gradients in the
    same sweep; what becomes of their sums is the same for both backends.
    """
    if {"ranks", "capturable"} & set(pair) or pairs.refusals(pair, call):
        return False
    has_head_option = any(pairs.NAMED[name][0] == "head" for name in pair)
    return "triton" not in pair or (call == "loss" and has_head_option)


def every_pair(call: str) -> list[str]:
    return these_pairs(call, [pair for pair in pairs.CALLS[call][0] if taken(pair, call)])


def these_pairs(call: str, chosen: list[tuple[str, str]], cuts=UNEVEN) -> list[str]:
    return wrong([(pair, call, None) for pair in chosen], cuts)


def every_objective() -> list[str]:
    """Alone, and beside tokens that have kept sets."""
    others = ("chunk_bytes", "support")
    return wrong([(("bias", x), "loss", name) for name in OBJECTIVES for x in others], UNEVEN)


def wrong(cases, cuts) -> list[str]:
    """Checks each, with other rows of the head on each rank; says what differs."""
    rows, problems = slice(*cuts[dist.get_rank() : dist.get_rank() + 2]), []
    for names, call, objective in cases:
        batch = pairs.batch_of(names)
        options = {"call": call, "objective": objective}
        expected = pairs.run(batch, names, truth=True, **options)
        actual = pairs.run(batch, names, truth=False, rows=rows, **options)
        for value in (actual.loss, actual.logps, actual.gradients["hidden"]):
            first = value.clone()
            dist.broadcast(first, 0)
            if not torch.equal(first, value):
                problems.append(f"{names}, {objective}: other bits than on the first rank")
        rank_grads = {k: x[rows] for k, x in expected.gradients.items()
                   if k in pairs.VOCABULARY_FIELDS and x is not None}  # fmt: skip
        expected.gradients |= rank_grads
        try:
            # A rank with one column may have a gradient of 0 there.
            pairs.compare(actual, expected, batch.hidden.dtype, call, floor=1e-6)
        except AssertionError as error:
            problems.append(f"{names}, {objective}: {error}")
    return problems

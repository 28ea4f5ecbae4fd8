"""Pairs of options where the ranks of a group share the vocabulary."""

import torch
import torch.distributed as dist

from tests import test_pairs as pairs


def taken(pair: tuple[str, str], call: str) -> bool:
    """Whether a pair is of several ranks, and not one of the many that the interpreter makes slow.

    With Triton's kernels there is each option of the head, in the call that makes gradients in the
    same sweep; what becomes of their sums is the same for both backends.
    """
    if {"ranks", "capturable", "exp_gemm"} & set(pair) or pairs.refused(pair, call):
        return False
    of_head = any(pairs.NAMED[name][0] == "head" for name in pair)
    return "triton" not in pair or (call == "loss" and of_head)


def every_pair(call: str) -> list[str]:
    of_call = {"loss": pairs.PAIRS, "distillation": pairs.PAIRS_OF_HEADS}
    every = of_call.get(call, pairs.PAIRS_OF_HEAD)
    return these_pairs(call, [pair for pair in every if taken(pair, call)], (0, 100, 211))


def these_pairs(call: str, chosen: list[tuple[str, str]], cuts: tuple[int, ...]) -> list[str]:
    """Checks each, with other rows of the head on each rank; says what differs."""
    rows, wrong = slice(*cuts[dist.get_rank() : dist.get_rank() + 2]), []
    for pair in chosen:
        batch = pairs.batch_of(pair)
        expected = pairs.run(batch, pair, truth=True, call=call)
        actual = pairs.run(batch, pair, truth=False, call=call, rows=rows)
        value, logps, gradients = actual
        for mine in (value, logps, gradients["hidden"]):
            first = mine.clone()
            dist.broadcast(first, 0)
            if not torch.equal(first, mine):
                wrong.append(f"{pair}: other bits than on the first rank")
        try:
            pairs.check(actual, expected, batch.hidden.dtype, rows)
        except AssertionError as error:
            wrong.append(f"{pair}: {error}")
    return wrong

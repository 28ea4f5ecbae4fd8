"""Every pair of options where the ranks of a group share the vocabulary."""

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
    """Checks all, with other rows of the head on each rank; says what differs."""
    begin = 100 * dist.get_rank()
    rows = slice(begin, 100 if begin == 0 else 211)
    wrong = []
    of_call = {"loss": pairs.PAIRS, "distillation": pairs.PAIRS_OF_HEADS}
    for pair in of_call.get(call, pairs.PAIRS_OF_HEAD):
        if not taken(pair, call):
            continue
        batch = pairs.batch_of(pair)
        expected = pairs.run(batch, pair, truth=True, call=call)
        actual = pairs.run(batch, pair, truth=False, call=call, rows=rows)
        try:
            pairs.check(actual, expected, batch.hidden.dtype, rows)
        except AssertionError as error:
            wrong.append(f"{pair}: {error}")
    return wrong

"""Every pair of options where the ranks of a group share the vocabulary."""

import torch.distributed as dist

from tests import test_pairs as pairs


def every_pair(call: str) -> list[str]:
    """Checks all, with other rows of the head on each rank; says what differs."""
    begin = 100 * dist.get_rank()
    rows = slice(begin, 100 if begin == 0 else pairs.V)
    wrong = []
    for pair in pairs.CALLS[call][0]:
        if {"ranks", "capturable", "exp_gemm"} & set(pair) or pairs.refusals(pair, call):
            continue
        batch = pairs.batch_of(pair)
        expected = pairs.run(batch, pair, truth=True, call=call)
        actual = pairs.run(batch, pair, truth=False, call=call, rows=rows)
        of_rank = {k: x[rows] for k, x in expected.gradients.items() if k in pairs.OF_VOCABULARY}
        expected.gradients |= of_rank
        try:
            pairs.compare(actual, expected, batch.hidden.dtype, call)
        except AssertionError as error:
            wrong.append(f"{pair}: {error}")
    return wrong

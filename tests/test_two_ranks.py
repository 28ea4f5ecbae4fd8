"""A vocabulary on two ranks, which are threads: where a rank lacks targets, entries, all of a row.

Every option and every objective on ranks that are processes: `tests/ranks/test_vocab_parallel.py`.
"""

import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests import test_pairs as pairs

# A rank with few columns, which has few targets; one whose ids are all banned by the head, or have
# e^-120 of the softmax.
CUTS = {"even": (0, 100, 211), "little": (0, 3, 211), "banned": (0, 40, 211), "far": (0, 100, 211)}
CASES = {
    "loss": ("bias", "low_rank"), "loss, softcap": ("bias", "softcap", "support"),
    "loss, two sweeps": ("entropy_bonus", "ce_weights"), "logps": ("bias", "temperatures"),
    "targets": ("bias", "softcap"), "entries": ("bias", "softcap"), "frozen logps": ("bias",),
    "reverse": ("bias", "softcap"),
    "jsd": ("bias",), "forward": ("low_rank",),
}  # fmt: skip


@pytest.fixture
def on_ranks():
    """Calls a function in a thread per rank, and returns the results."""
    world = threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    results = [None, None]

    def run(function):
        store = dist.HashStore()

        def work(rank):
            dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
            try:
                results[rank] = function()
            except BaseException as error:
                results[rank] = error
                threaded.ProcessLocalGroup.exception_handle(error)
            finally:
                dist.destroy_process_group()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for step in ("start", "join"):
            for thread in threads:
                getattr(thread, step)()
        assert world is not None
        return results

    yield run
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    threaded._uninstall_threaded_pg()


def banned(batch):
    """A bias of -inf for all ids below 40, which no token has as its target."""
    targets = torch.where(batch.targets >= 40, batch.targets, batch.targets + 40)
    bias = batch.bias.masked_fill(torch.arange(len(batch.bias)) < 40, -torch.inf)
    return replace(batch, targets=targets.masked_fill(~batch.mask, -100), bias=bias)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, cuts, on_ranks):
    call, names = case.split(",")[0], CASES[case]
    batch = pairs.batch_of(names)
    if cuts == "banned" and "bias" in names and call not in ("targets", "entries"):
        batch = banned(batch)
    if cuts == "far":
        batch = replace(batch, bias=batch.bias + 120.0 * (torch.arange(pairs.V) >= 100))

    def on_this_rank():
        begin, end = CUTS[cuts][dist.get_rank() : dist.get_rank() + 2]
        return pairs.run(batch, names, truth=False, call=call, rows=slice(begin, end))

    expected = pairs.run(batch, names, truth=True, call=call)
    for rank, actual in enumerate(on_ranks(on_this_rank)):
        assert not isinstance(actual, BaseException), actual
        rows = slice(*CUTS[cuts][rank : rank + 2])
        parts = {
            name: x[rows] if name in pairs.VOCABULARY_FIELDS and x is not None else x
            for name, x in expected.gradients.items()
        }
        truth = replace(expected, gradients=parts)
        pairs.compare(actual, truth, torch.float32, call, floor=1e-6)

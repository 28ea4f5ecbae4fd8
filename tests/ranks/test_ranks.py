"""Failures of a job on ranks."""

import os
import signal

import pytest
import torch.distributed as dist

from tests.helpers.ranks import RankFailed, Ranks


def raise_on_one():
    print("about to fail")
    if dist.get_rank() == 1:
        raise ValueError("no such thing")
    dist.barrier()


def die_on_one():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()


def both(x):
    ranks = [None, None]
    dist.all_gather_object(ranks, (dist.get_rank(), x))
    return ranks


def test_what_fails_is_told_and_the_next_job_runs(tmp_path):
    ranks = Ranks(tmp_path)
    for job, message in (
        ("raise_on_one", r"(?s)rank 1: .*ValueError: no such thing.*rank 1\nabout to fail"),
        ("die_on_one", "rank 0 died, -6"),
    ):
        with pytest.raises(RankFailed, match=message):
            ranks(f"tests.ranks.test_ranks:{job}")
        assert ranks("tests.ranks.test_ranks:both", 7) == 2 * [[(0, 7), (1, 7)]]
    assert ranks.starts == 3 and ranks.close() == [0, 0]

"""A head whose vocabulary lies on several ranks, compared with float64 on one."""

import pytest
import torch

from grpo_kernels import fused_grpo_loss
from grpo_kernels.explain import explain
from tests.helpers.batches import OBJECTIVES, config, make_batch, relative_error, run_fused
from tests.helpers.head_options import CHUNK
from tests.helpers.ranks import Ranks
from tests.helpers.supports import make_support
from tests.ranks import shard_jobs

UNEVEN = (0, 300, 1003)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    session = Ranks(tmp_path_factory.mktemp("ranks"), world=4)
    yield session
    assert session.close() in ([], [0] * 4), session.printed()


def check_scores(ranks, options):
    """Compares what a call returns, and its gradients."""
    results = ranks("tests.ranks.shard_jobs:scores", UNEVEN, options)
    layout, exact = options.get("layout"), shard_jobs.scores(None, options, exact=True)
    order = sorted(range(len(results)), key=lambda rank: options.get("starts", UNEVEN)[rank])
    assert all(rank.keys() == exact.keys() for rank in results)
    for name, expected in exact.items():
        shards = [rank[name] for rank in results]
        if name in ("d_weight", "d_bias", "d_b"):
            actual = shards[0] if options.get("dtensors") else torch.cat([shards[r] for r in order])
        elif layout == "partial" and name.startswith("d_"):
            assert relative_error(shards[0], expected) > 0.1
            actual = sum(shards)
        else:
            assert all(torch.equal(shards[0], other) for other in shards), name
            actual = shards[0]
        if name.startswith("d_"):
            assert relative_error(actual, expected) < 2e-5, name
        else:
            assert (actual.double() - expected).abs().max() < 1e-4, name


@pytest.mark.parametrize("call", ("loss", "logps", "targets", "frozen logps", "reverse", "jsd"))
def test_every_pair_of_options(ranks, call):
    assert ranks("tests.ranks.pair_jobs:every_pair", call) == [[], []]


def test_every_objective(ranks):
    assert ranks("tests.ranks.pair_jobs:every_objective") == [[], []]


SOME = [
    ("softcap", "chunk_bytes"), ("temperatures", "entropy_bonus"), ("bias", "support"),
    ("low_rank", "ce_weights"), ("old_logps", "two_passes"), ("logits_dtype", "old_logps"),
    ("batch_invariant", "sampling_logps"),
]  # fmt: skip


# A rank with one column, which may own no target; and four ranks, one of them with three columns.
@pytest.mark.parametrize("cuts", ((0, 210, 211), (0, 3, 57, 160, 211)), ids=("little", "four"))
def test_other_cuts(ranks, cuts, request):
    session = ranks if len(cuts) == 3 else request.getfixturevalue("four_ranks")
    problems = session("tests.ranks.pair_jobs:these_pairs", "loss", SOME, cuts)
    assert problems == [[]] * (len(cuts) - 1)


@pytest.mark.parametrize("head", ({}, {"bias": True, "temperature": True}), ids="-".join)
def test_what_is_said_per_chunk(ranks, head):
    # 21 of 36 tokens take part; 14 of these have an advantage.
    batch = make_batch()
    trained = int((batch.mask & (batch.advantages != 0)[:, None]).sum())
    rest = int(batch.mask.sum()) - trained
    at_once = CHUNK // (4 * 703)  # on the rank with the most columns
    chunks = -(-trained // at_once), -(-rest // at_once)
    for said in ranks("tests.ranks.shard_jobs:said", UNEVEN, head, CHUNK):
        # Two more gathers, of the columns and of the plan; and the targets that a bias bans.
        expected = {"allgatherbase": sum(chunks) + 2, "allreduce": chunks[0] + ("bias" in head)}
        assert {name: said.count(name) for name in said} == expected


# Banned ids include the first of a rank; FLAT has slopes of at most 1e-3.
BANNED = {"biased": ((0, 300, 301), -torch.inf), "softcap": 6.0}
FLAT = {"lift": 60.0, "softcap": 12.0}
SETS = {"support": make_support(make_batch(), without=0.0), "entries": True}
PARTIAL = {"layout": "partial"}
SCORES = {
    # Rank 0 has the first rows that it is given, but they are the last columns.
    "columns do not follow the ranks": {"starts": (703, 0)},
    "dtensors": {"dtensors": True},
    "verl's call": {"call": "verl", "temperature": 1.5, **PARTIAL},
    "the caller adds up": {"call": "loss", **PARTIAL},
    "banned, loss": {**BANNED, "call": "loss", "chunk_bytes": CHUNK},
    "banned, several": {**BANNED, "several": True},
    "banned, partial": {**BANNED, **PARTIAL},
    "flat, loss": {**FLAT, "call": "loss", "chunk_bytes": CHUNK},
    "flat, several, partial": {**FLAT, "several": True, "chunk_bytes": CHUNK, **PARTIAL},
    "sets": {**SETS, "softcap": 6.0},
    "sets, partial": {**SETS, **PARTIAL},
    # All columns of the first rank, some of the second, are impossible, or nearly so.
    **{
        f"first columns {added}, {call}": {"biased": (tuple(range(350)), added), "call": call}
        for added in (-torch.inf, -1e4, -25.0) for call in ("loss", "logprobs")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", SCORES)
def test_scores(ranks, case):
    check_scores(ranks, SCORES[case])


def test_ranks_with_tokens_of_their_own_gather_the_states(ranks):
    batch, results = make_batch(), ranks("tests.ranks.shard_jobs:own_tokens")
    exact = run_fused(batch, exact=True)
    assert all(abs(x["loss"] - exact.loss) < 1e-6 for x in results)
    for name in ("hidden", "weight"):
        full = torch.cat([x[name] for x in results])
        assert relative_error(full, exact.gradients[name]) < 2e-5


def test_an_explanation_is_the_same_on_every_rank(ranks):
    batch, (options, names) = make_batch(), OBJECTIVES["is_token_truncate"]
    loss, tensors = config(**options), (batch.targets, batch.advantages, batch.mask)
    kwargs = {name: getattr(batch, name) for name in names} | {"config": loss}
    out = fused_grpo_loss(batch.hidden, batch.weight, *tensors, **kwargs)
    expected = explain(out, *tensors, **kwargs).columns
    assert expected["gradient"].any()
    for columns in ranks("tests.ranks.shard_jobs:explained", UNEVEN):
        torch.testing.assert_close(columns, expected, rtol=1e-4, atol=2e-5, equal_nan=True)


def test_another_cut_of_the_same_head(ranks):
    # A call reuses nothing about the columns of the call before.
    answers = ranks("tests.ranks.shard_jobs:sizes", [UNEVEN, (0, 300, 900), (0, 502, 1003)])
    assert answers[0] == answers[1] == [1003, 900, 1003]


@pytest.fixture(scope="module")
def refusals(ranks):
    return ranks("tests.ranks.shard_jobs:refusals")


@pytest.mark.parametrize("kind", shard_jobs.REFUSED)
def test_refused_on_all_ranks(refusals, kind):
    assert all(shard_jobs.REFUSED[kind][1] in answers[kind] for answers in refusals), refusals


def test_a_rank_that_is_gone_does_not_hang_the_other(ranks):
    error, gone = ranks("tests.ranks.shard_jobs:raises_alone")
    assert gone == "gone" and error != "nothing"

"""A head whose vocabulary lies on several ranks, compared with float64 on one."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.batches import (
    OBJECTIVES,
    Result,
    assert_matches,
    config,
    make_batch,
    relative_error,
    run_fused,
)
from tests.helpers.flat_calls import reference
from tests.helpers.head_options import OPTIONS, objective_options
from tests.helpers.ranks import Ranks
from tests.helpers.supports import make_support
from tests.ranks import shard_jobs

EVEN, UNEVEN = (0, 502, 1003), (0, 300, 1003)
# A rank with one column, which may own no target; and four ranks, one of them with three columns.
LITTLE, FOUR = (0, 1002, 1003), (0, 3, 257, 800, 1003)
CHUNK = 4 * 1003 * 5


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    session = Ranks(tmp_path_factory.mktemp("ranks"), world=4)
    yield session
    assert session.close() in ([], [0] * 4), session.printed()


def joined(results):
    """What all ranks have, which is the same, and the parts of the weight's gradient together."""
    first = results[0]
    for other in results[1:]:
        assert torch.equal(first.loss, other.loss) and torch.equal(first.logps, other.logps)
        assert torch.equal(first.gradients["hidden"], other.gradients["hidden"])
        for name, value in first.metrics.items():
            assert torch.equal(value, other.metrics[name]), name
    gradients = {"hidden": first.gradients["hidden"]}
    for name in ("weight", "bias"):
        parts = [result.gradients[name] for result in results]
        gradients[name] = None if parts[0] is None else torch.cat(parts)
    return Result(first.loss, first.metrics, first.logps, gradients)


def check(session, cases):
    answers = session("tests.ranks.shard_jobs:losses", cases)
    for (cuts, options), *of_ranks in zip(cases, *answers, strict=True):
        actual = joined([result for result, _ in of_ranks])
        expected = run_fused(shard_jobs.batch_of(options), exact=True, **options)
        dtype = shard_jobs.batch_of(options).hidden.dtype
        assert_matches(actual, expected, 2e-5, logps=1e-4, rounded_to=dtype)
        yield cuts, options, [calls for _, calls in of_ranks]


def test_every_objective(ranks):
    options = [objective_options(name) for name in OBJECTIVES]
    assert len([*check(ranks, [(UNEVEN, o) for o in options])]) == len(OBJECTIVES) > 40


@pytest.mark.parametrize("cuts", (EVEN, UNEVEN, LITTLE), ids=("even", "uneven", "little"))
def test_every_option_of_the_head(ranks, cuts):
    cases = []
    for config_options, options in OPTIONS.values():
        given = {"config": config(**config_options), **options}
        cases += [(cuts, {**given, "chunk_bytes": chunk}) for chunk in (None, CHUNK)]
    cases += [(cuts, {"old_logps": True, "frozen": ("weight",)})]
    cases += [(cuts, {"old_logps": True, "ce_weights": True})]
    cases += [(cuts, {"old_logps": True, "bias": True, "batch_invariant": True})]
    assert len([*check(ranks, cases)]) == len(cases)


@pytest.mark.parametrize("cuts", (UNEVEN, LITTLE), ids=("uneven", "little"))
def test_logits_as_the_model_has_them(ranks, cuts):
    given = {"old_logps": True, "scale": 4.0, "chunk_bytes": CHUNK}
    cases = [
        (cuts, {**given, "logits_dtype": "model", "bias": True, "softcap": 6.0}),
        (cuts, {**given, "logits_dtype": "model", "config": config(entropy_coef=0.05)}),
    ]
    assert len([*check(ranks, cases)]) == len(cases)


def test_four_ranks(four_ranks):
    cases = [
        (FOUR, objective_options("everything")),
        (FOUR, objective_options("gspo")),
        (FOUR, {"softcap": 5.0, "bias": True, "old_logps": True, "chunk_bytes": CHUNK}),
        (FOUR, {"config": config(entropy_coef=0.05), "old_logps": True}),
    ]
    assert len([*check(four_ranks, cases)]) == 4


@pytest.mark.parametrize("cuts", (UNEVEN, LITTLE), ids=("uneven", "little"))
def test_supports(ranks, cuts):
    """Each rank gathers its own entries; every objective once, heads with every option."""
    cases = [
        (cuts, {**objective_options(name), "without": 0.3 * (place % 2)})
        for place, name in enumerate(OBJECTIVES)
    ]
    for config_options, options in OPTIONS.values():
        cases.append((cuts, {"config": config(**config_options), **options, "without": 0.2}))
    answers = ranks("tests.ranks.shard_jobs:with_support", cases)
    for (_, options), *of_ranks in zip(cases, *answers, strict=True):
        actual = joined(of_ranks)
        assert actual.metrics["support/gathered"] > 0.5
        actual.metrics = {k: v for k, v in actual.metrics.items() if not k.startswith("support/")}
        batch, options = shard_jobs.with_kept_sets(options)
        assert_matches(actual, run_fused(batch, exact=True, **options), 2e-5, logps=1e-4)


def test_logprobs_of_supports(ranks):
    found = ranks("tests.ranks.shard_jobs:logprobs_of_kept_sets", UNEVEN)
    support = make_support(make_batch(), without=0.3)
    assert_scores(found, {"low_rank": True, "bias": True, "softcap": 6.0, "support": support})


@pytest.mark.parametrize("more", ({}, {"bias": True}, {"temperature": True}), ids="-".join)
def test_what_is_said_per_chunk(ranks, more):
    # Of 36 tokens 21 take part, and 14 of these have an advantage.
    batch = shard_jobs.batch_of({})
    trained = int((batch.mask & (batch.advantages != 0)[:, None]).sum())
    rest = int(batch.mask.sum()) - trained
    at_once = CHUNK // (4 * 703)  # of the rank with the most columns
    chunks = -(-trained // at_once), -(-rest // at_once)
    options = {"old_logps": True, "chunk_bytes": CHUNK, **more}
    ((_, _, calls),) = check(ranks, [(UNEVEN, options)])
    for of_rank in calls:
        # Two more gathers, of the columns and of the plan.
        assert of_rank == {"all_gather": sum(chunks) + 2, "all_reduce": chunks[0]}


@pytest.mark.parametrize("options", (
    {}, {"low_rank": True}, {"bias": True, "softcap": 6.0, "temperature": 0.8},
    {"low_rank": True, "logit_scale": 0.6, "chunk_bytes": CHUNK},
), ids=("plain", "low_rank", "softcap", "chunks"))  # fmt: skip
def test_logprobs(ranks, options):
    found = ranks("tests.ranks.shard_jobs:logprobs", UNEVEN, options)
    assert_scores(found, options)


def test_columns_need_not_follow_the_ranks(ranks):
    # Rank 0 has the first 300 rows that it is given, but they are the last columns.
    options = {"bias": True, "starts": [703, 0]}
    found = ranks("tests.ranks.shard_jobs:logprobs", UNEVEN, options)
    turned = shard_jobs.head_of(None, torch.float64)
    for name in ("weight", "bias"):
        turned[name] = turned[name].detach().roll(-300, 0).requires_grad_()
    expected = shard_jobs.scored(reference.linear_logprobs, turned, {"bias": True})
    for name in ("logps", "entropy", "logsumexp"):
        assert (found[0][name].double() - expected[name]).abs().max() < 1e-4
    whole = torch.cat([rank["d_weight"] for rank in found]).roll(-300, 0)
    assert relative_error(whole, expected["d_weight"]) < 2e-5


def assert_scores(found, options, parts=("weight", "bias", "b")):
    given = {k: v for k, v in options.items() if k != "chunk_bytes"}
    head = shard_jobs.head_of(None, torch.float64)
    expected = shard_jobs.scored(reference.linear_logprobs, head, given)
    for name, value in expected.items():
        mine = [rank[name] for rank in found]
        if name[2:] not in parts:
            assert all(torch.equal(mine[0], other) for other in mine), name
            whole = mine[0]
        else:
            whole = torch.cat(mine)
        if name.startswith("d_"):
            assert relative_error(whole, value) < 2e-5, name
        else:
            assert (whole.double() - value).abs().max() < 1e-4, name


def test_verls_call(ranks):
    found = ranks("tests.ranks.shard_jobs:by_verl", UNEVEN)
    head = shard_jobs.head_of(None, torch.float64)
    head["weights"][2] = 0.0
    expected = shard_jobs.scored(reference.linear_logprobs, head, {"temperature": 1.5})
    for name in ("logps", "entropy"):
        assert (found[0][name].double() - expected[name]).abs().max() < 1e-4
    assert relative_error(found[0]["d_hidden"], expected["d_hidden"]) < 2e-5
    d_weight = torch.cat([rank["d_weight"] for rank in found])
    assert relative_error(d_weight, expected["d_weight"]) < 2e-5


def test_another_cut_of_the_same_head(ranks):
    # What one call knew of the columns is not the next one's.
    cases = [(cuts, {"bias": True}) for cuts in (UNEVEN, (0, 300, 1003), (0, 300, 900), EVEN)]
    answers = ranks("tests.ranks.shard_jobs:sizes", [cuts for cuts, _ in cases])
    assert answers[0] == answers[1] == [1003, 1003, 900, 1003]


@pytest.mark.parametrize("call", ("loss", "logprobs"))
def test_columns_without_a_share(ranks, call):
    # Of the first rank all columns are impossible, of the second some; then all but impossible.
    for bias in (-torch.inf, -1e4, -25.0):
        found = ranks("tests.ranks.shard_jobs:masked_columns", call, bias)
        expected = shard_jobs.masked_columns(call, bias, whole=True)
        for name, value in expected.items():
            parts = [rank[name] for rank in found]
            mine = torch.cat(parts) if name in ("d_weight", "d_bias") else parts[0]
            assert not mine.isnan().any(), (bias, name)
            assert relative_error(mine, value) < 2e-5, (bias, name)


def test_parts_that_the_caller_adds_up(ranks):
    found = ranks("tests.ranks.shard_jobs:partial")
    exact = shard_jobs.of_adapted_head(None, torch.float64)
    for name in ("hidden", "a_out"):
        whole, again = (rank["replicated"][name] for rank in found)
        first, second = (rank["partial"][name] for rank in found)
        assert torch.equal(whole, again)
        assert relative_error(whole, exact[name]) < 2e-5
        assert relative_error(first + second, whole) < 2e-6
        assert relative_error(first, whole) > 0.1
    for name in ("weight", "bias", "b"):
        for layout in ("replicated", "partial"):
            whole = torch.cat([rank[layout][name] for rank in found])
            assert relative_error(whole, exact[name]) < 2e-5


# Sequences of each rank: as many as the other, unlike many, none.
PLACES = {"even": ((0, 1), (2, 3)), "uneven": ((3,), (2, 0, 1)), "none": ((1, 0, 2, 3), ())}


def check_own_rows(session, cases):
    answers = session("tests.ranks.shard_jobs:own_rows", cases)
    for (_, places, options), *results in zip(cases, *answers, strict=True):
        given = {k: v for k, v in options.items() if k != "layout"}
        batch, exact = shard_jobs.batch_of(options), []
        for mine, result in zip(places, results, strict=True):
            expected = run_fused(shard_jobs.sequences_of(batch, mine), exact=True, **given)
            exact.append(expected)
            own = {"hidden": result.gradients["hidden"]}
            alone = {"hidden": expected.gradients["hidden"]}
            assert_matches(
                replace(result, gradients=own), replace(expected, gradients=alone), 2e-5, logps=1e-4
            )
        for name in ("weight", "bias"):
            if exact[0].gradients[name] is None:
                continue
            total = sum(x.gradients[name] for x in exact)
            if options["layout"] == "data":
                total = total / len(places)
            mine = torch.cat([result.gradients[name] for result in results])
            assert relative_error(mine, total) < 2e-5, (name, options)


@pytest.mark.parametrize("places", PLACES)
def test_ranks_with_tokens_of_their_own(ranks, places):
    """Every objective, in one pass and in two; the layout says whether gradients are a mean."""
    cases = [
        (UNEVEN, PLACES[places], {**objective_options(name), "layout": layout})
        for place, name in enumerate(OBJECTIVES) for layout in (("sequence", "data")[place % 2],)
    ]  # fmt: skip
    check_own_rows(ranks, cases)


@pytest.mark.parametrize("layout", ("sequence", "data"))
def test_options_of_the_head_with_tokens_of_their_own(ranks, layout):
    cases = []
    for config_options, options in OPTIONS.values():
        given = {"config": config(**config_options), **options, "layout": layout}
        cases += [(EVEN, PLACES["uneven"], {**given, "chunk_bytes": chunk})
                  for chunk in (None, CHUNK)]  # fmt: skip
    cases.append((LITTLE, PLACES["even"], {"layout": layout}))
    invariant = {"old_logps": True, "bias": True, "batch_invariant": True, "layout": layout}
    cases.append((UNEVEN, PLACES["uneven"], invariant))
    check_own_rows(ranks, cases)


def test_four_ranks_with_tokens_of_their_own(four_ranks):
    places = ((3,), (), (0, 2), (1,))
    cases = [
        (FOUR, places, {**objective_options(name), "layout": "data", "chunk_bytes": CHUNK})
        for name in ("everything", "gspo", "entropy")
    ]
    check_own_rows(four_ranks, cases)


def assert_own_scores(found, places, options, layout, parts=("weight", "bias", "b")):
    """Each rank's results and gradients of its tokens; the head's are sums, or means."""
    given = {k: v for k, v in options.items() if k != "chunk_bytes"}
    of_head = {}
    for mine, result in zip(places, found, strict=True):
        head = shard_jobs.sequences_of_head(shard_jobs.head_of(None, torch.float64), mine)
        expected = shard_jobs.scored(reference.linear_logprobs, head, given)
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            if name[2:] in ("weight", "bias", "b"):
                of_head[name] = of_head.get(name, 0.0) + value
            elif mine and name.startswith("d_"):
                assert relative_error(result[name], value) < 2e-5, name
            elif mine:
                assert (result[name] - value).abs().max() < 1e-4, name
    for name, total in of_head.items():
        total = total / len(places) if layout == "data" else total
        of_ranks = [result[name] for result in found]
        whole = torch.cat(of_ranks) if name[2:] in parts else of_ranks[0]
        assert relative_error(whole, total) < 2e-5, name


@pytest.mark.parametrize("layout", ("sequence", "data"))
@pytest.mark.parametrize("options", (
    {"bias": True, "softcap": 6.0}, {"chunk_bytes": CHUNK}, {"low_rank": True, "temperature": 0.8},
    {"low_rank": True, "bias": True, "chunk_bytes": CHUNK},
), ids=("softcap", "chunks", "low_rank", "everything"))  # fmt: skip
def test_logprobs_of_tokens_of_their_own(ranks, options, layout):
    for places in PLACES.values():
        given = {**options, "layout": layout}
        found = ranks("tests.ranks.shard_jobs:own_logprobs", UNEVEN, places, given)
        assert_own_scores(found, places, options, layout)


@pytest.mark.parametrize("biased", (False, True), ids=("", "bias"))
@pytest.mark.parametrize("low_rank", (0, 80), ids=("", "low_rank"))
def test_bytes_that_move_with_tokens_of_their_own(ranks, low_rank, biased):
    """As the page on ranks says: rows of hidden states and of their gradients, and few numbers."""
    tokens, H = [600, 600], 64
    for found in ranks("tests.ranks.shard_jobs:bytes_of_rows", tokens, low_rank, biased):
        rows = tokens[0]
        wide = {
            f"{kind} torch.float32 [{width}]": 4 * width * rows
            for kind in ("gather", "scatter") for width in (H, low_rank) if width
        }  # fmt: skip
        assert {name: found.pop(name) for name in wide} == wide
        # Statistics of all rows (12 bytes each), targets (8), and the gradient of the log-prob (4).
        assert 36 * rows <= sum(found.values()) <= 36 * rows + 400


def test_dtensors(ranks):
    found = ranks("tests.ranks.shard_jobs:of_dtensors", None)
    assert_scores(found, {"low_rank": True, "bias": True}, parts=())


@pytest.mark.parametrize("places", PLACES)
def test_dtensors_and_tokens_of_their_own(ranks, places):
    found = ranks("tests.ranks.shard_jobs:of_dtensors", PLACES[places])
    assert_own_scores(found, PLACES[places], {"low_rank": True, "bias": True}, "data", parts=())


@pytest.mark.parametrize(("kind", "message"), {
    "overlap": "ranks.start: expected every column on one rank; got columns 0 to 501, 400 to 900",
    "hole": "ranks.start: expected every column on one rank; got columns 0 to 501, 600 to 1100",
    "start on one": "ranks.start: expected on all ranks or on none; got it on ranks [1]",
    "dtype": "weight's dtype: expected the same on all ranks; got ['float32', 'bfloat16']",
    "bias": "bias: expected on all ranks or on none; got it on ranks [1]",
    "low_rank on one": "low_rank: expected on all ranks or on none; got it on ranks [1]",
    "low_rank's rank": "rank of low_rank: expected the same on all ranks; got [2, 3]",
    "frozen on one": "gradient of hidden: expected on all ranks or on none; got it on ranks [0]",
    "width": "H: expected the same on all ranks; got [48, 49]",
    "empty": "weight: expected a row or more on every rank; got [0, 1003] rows",
    "targets": "targets: expected the same on all ranks that share the vocabulary",
    "mask": "mask, advantages, chunk_bytes: expected the same on all ranks that share",
    "advantages": "mask, advantages, chunk_bytes: expected the same on all ranks that share",
    "chunk_bytes": "mask, advantages, chunk_bytes: expected the same on all ranks that share",
    "shape": "tokens: expected the same on all ranks; got [36, 27]",
    "target ids": "targets: expected ids in [0, 1003)",
    "group": "ranks.group: expected a torch.distributed process group that this rank is in",
    "no group": "ranks.group: expected a process group, as weight is no DTensor; got None",
    "no ranks": "ranks: expected a VocabRanks, or None; got <",
    "start": "ranks.start: expected an int, or None; got 0.5",
    "layout": "ranks.hidden: expected one of replicated, partial, sequence, data; got 'tokens'",
    "layouts": "ranks.hidden: expected the same on all ranks; got ['data', 'replicated']",
    "temperature": "temperature: expected the same on all ranks; got [1, 2]",
    "logit_scale": "logit_scale: expected the same on all ranks; got [1, 2]",
    "softcap": "softcap (0: none): expected the same on all ranks; got [1, 2]",
    "softcap on one": "softcap (0: none): expected the same on all ranks; got [0, 2.5]",
    "logits_dtype": "logits_dtype='model': expected on all ranks or on none; got it on ranks [1]",
    "temperature per token": "temperature per token: expected on all ranks or on none; got it on",
    "batch_invariant": "batch_invariant: expected on all ranks or on none; got it on ranks [1]",
    "entropy_coef": "entropy_coef: expected the same on all ranks; got [0, 0.1]",
    "passes": "one pass: expected the same on all ranks; got [1, 0]",
    "gradient": "gradient: expected on all ranks or on none; got it on ranks [1]",
    "layout alone": "ranks.group: expected a process group, as weight is no DTensor; got None",
    "mask on one": "mask, advantages, chunk_bytes: expected the same on all ranks that share",
    "sampled": "backward: expected None where ranks share the vocabulary; got Sampled(",
    "capturable": "capturable: expected False where ranks share the vocabulary; got True",
    "support of own tokens": "support: expected None where ranks with tokens of their own share",
    "supports": "support: expected the same on all ranks that share the vocabulary; got others",
    "columns": "weight: expected a DTensor with Shard(0) on a mesh of one dimension",
    "replicated": "weight: expected a DTensor with Shard(0) on a mesh of one dimension",
    "dtensor and group": "ranks.group: expected None with a DTensor, which has its own",
    "plain bias": "bias: expected a DTensor, as another tensor of the head is one",
}.items())  # fmt: skip
def test_refused_on_all_ranks(ranks, kind, message):
    answers = ranks("tests.ranks.shard_jobs:refused", kind)
    assert all(message in answer for answer in answers), answers


def test_a_rank_whose_input_is_refused_says_so_to_the_others(ranks):
    first, second = ranks("tests.ranks.shard_jobs:refused", "a rank refused")
    assert "ranks: expected all ranks to call; rank 1 refused" in first
    assert "targets: expected ids in [0, 1003)" in second


def test_losses_of_other_results_on_each_rank(ranks):
    (d_first, d_weight), (d_second, d_other) = ranks("tests.ranks.shard_jobs:entropy_of_one")
    batch, whole = make_batch(), 0.0
    for places, d_hidden in (((0, 1), d_first), ((2, 3), d_second)):
        part = shard_jobs.sequences_of(batch, places)
        hidden = torch.where(part.mask[..., None], part.hidden, 0.0).double().requires_grad_()
        weight = part.weight.double().requires_grad_()
        out = reference.linear_logprobs(hidden, weight, part.targets, mask=part.mask)
        (out.logps + (0.5 * out.entropy if places[0] else 0.0)).sum().backward()
        assert relative_error(d_hidden, hidden.grad) < 2e-5
        whole = whole + weight.grad
    assert relative_error(torch.cat([d_weight, d_other]), whole) < 2e-5


def test_losses_that_are_scaled_apart_are_refused(ranks):
    for answer in ranks("tests.ranks.shard_jobs:scales_apart"):
        assert "expected all ranks to scale the loss alike" in answer


def test_a_rank_that_is_gone_does_not_hang_the_other(ranks):
    error, gone = ranks("tests.ranks.shard_jobs:raises_alone")
    assert gone == "gone" and error != "nothing"

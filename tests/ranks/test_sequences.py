"""Sequences of which every rank has some tokens, compared with float64 on one process."""

import pytest
import torch

from tests.helpers.batches import Result, assert_matches, config, run_fused
from tests.helpers.head_options import objective_options
from tests.ranks import sequence_jobs

# Cuts of nine tokens per sequence.
HALVES, UNEVEN, NONE = (0, 4, 9), (0, 1, 9), (0, 9, 9)
CUTS = pytest.mark.parametrize("cuts", (HALVES, UNEVEN, NONE), ids=("halves", "uneven", "none"))


def joined(results, dim=1):
    """The result of all ranks: their gradients of the head add up; all else is the same on each."""
    first = results[0]
    for other in results[1:]:
        assert torch.equal(first.loss, other.loss)
        for name, value in first.metrics.items():
            assert torch.equal(value, other.metrics[name]), name
    gradients = {
        "hidden": torch.cat([r.gradients["hidden"] for r in results], dim),
        **{k: None if first.gradients[k] is None else sum(r.gradients[k] for r in results)
           for k in ("weight", "bias")},
    }  # fmt: skip
    return Result(first.loss, first.metrics, torch.cat([r.logps for r in results], dim), gradients)


@CUTS
def test_losses(ranks, cuts):
    """Each objective that reads neighbouring tokens in a different way."""
    names = ("on_policy", "everything", "gspo", "vespo", "top_entropy_bonus", "is_sequence_mask")
    cases = [objective_options(name) for name in names]
    cases += [
        {"config": config(loss_type=kind), "old_logps": True}
        for kind in ("grpo", "bnpo", "luspo", "dr_grpo")
    ]
    cases += [
        {"config": config(loss_type="dapo"), "num_items": 40.0},
        {"config": config(entropy_coef=0.05), "old_logps": True, "head": {"temperature": True}},
        {"ce_weights": True, "old_logps": True},
    ]
    answers = ranks("tests.ranks.sequence_jobs:losses", cuts, cases)
    for options, *results in zip(cases, *answers, strict=True):
        batch = sequence_jobs.batch_of(options)
        expected = run_fused(batch, exact=True, scale=1.0, **options)
        assert_matches(joined(results), expected, 3e-5, logps=1e-4)


@pytest.mark.parametrize("sizes", ((3, 3), (1, 4), (0, 2), (5, 0), (0, 0)), ids=str)
def test_what_is_gathered(ranks, sizes):
    for results in zip(*ranks("tests.ranks.sequence_jobs:gathered", sizes), strict=True):
        expected = torch.cat([local for local, _ in results], -1)
        assert sum(sizes) < 3 or expected.any()
        for _, full in results:
            assert full.dtype == expected.dtype and torch.equal(full, expected)


@pytest.mark.parametrize("sizes", ((2, 2), (1, 3), (0, 4)), ids=str)
def test_the_backward_is_a_slice_and_says_nothing(ranks, sizes):
    (first, said), (second, said_too) = ranks("tests.ranks.sequence_jobs:gradient", sizes)
    assert torch.equal(torch.cat([first, second], 1), torch.arange(8.0).view(2, 4))
    assert said == said_too == 0


@pytest.mark.parametrize("name", ("gspo", "everything"))
def test_packed_sequences(ranks, name):
    """Ranks that have sequences of their own: the joined tokens are packed, too."""
    options, batch = objective_options(name), sequence_jobs.batch_of({})
    results = ranks("tests.ranks.sequence_jobs:whole_sequences", options)
    actual, expected = joined(results, 0), run_fused(batch, exact=True, scale=1.0, **options)
    # Rows of the padded batch that are packed away have no gradient.
    ends = (batch.mask * torch.arange(1, 10)).amax(1)
    keep = torch.arange(9) < ends[:, None]
    expected.logps = expected.logps[keep]
    expected.gradients["hidden"] = expected.gradients["hidden"][keep]
    assert_matches(actual, expected, 3e-5, logps=1e-4)


def test_refused_on_all_ranks(ranks):
    for answers in ranks("tests.ranks.sequence_jobs:refusals"):
        for kind, (_, message) in sequence_jobs.REFUSED.items():
            assert message in answers[kind], (kind, answers)

"""Sequences of which every rank has some tokens, compared with float64 on one process."""

import pytest
import torch

from tests.ranks import sequence_jobs
from tests.support.batches import OBJECTIVES, Result, assert_matches, config, run_fused
from tests.support.head_options import objective_options

# Of nine tokens per sequence.
HALVES, NONE = (0, 4, 9), (0, 9, 9)
# An objective whose quantile has to come from outside.
ALL = [name for name, (options, _) in OBJECTIVES.items() if "top_entropy_quantile" not in options]


def joined(results, cuts):
    """The ranks' shares together; metrics are the same on all of them."""
    for other in results[1:]:
        for name, value in results[0].metrics.items():
            assert torch.equal(value, other.metrics[name]), name
    gradients = {
        "hidden": torch.cat([r.gradients["hidden"] for r in results], 1),
        **{k: sum(r.gradients[k] for r in results) if results[0].gradients[k] is not None else None
           for k in ("weight", "bias")},
    }  # fmt: skip
    loss = torch.stack([r.loss for r in results]).sum()
    return Result(loss, results[0].metrics, torch.cat([r.logps for r in results], 1), gradients)


def check(ranks, cases):
    answers = ranks("tests.ranks.sequence_jobs:losses", cases)
    for (cuts, _, options), *results in zip(cases, *answers, strict=True):
        expected = run_fused(sequence_jobs.batch_of(options), exact=True, **options)
        assert_matches(joined(results, cuts), expected, 3e-5, logps=1e-4)


@pytest.mark.parametrize("cuts", (HALVES, NONE), ids=("halves", "a rank without tokens"))
def test_every_objective(ranks, cuts):
    check(ranks, [(cuts, False, objective_options(name)) for name in ALL])


def test_aggregations(ranks):
    kinds = ("grpo", "bnpo", "dapo", "luspo", "dr_grpo")
    cases = []
    for kind in kinds:
        more = {"max_completion_length": 9} if kind == "dr_grpo" else {}
        cases.append((HALVES, False, {"config": config(loss_type=kind, **more)}))
    cases += [
        (HALVES, False, {"config": config(loss_type="dapo"), "num_items": 40.0}),
        (HALVES, False, {"config": config(entropy_coef=0.05), "old_logps": True}),
        (HALVES, False, {"ce_weights": True, "old_logps": True}),
        (HALVES, False, {"old_logps": True, "skip_untrained": False}),
        (HALVES, False, {
            "config": config(top_entropy_quantile=0.5, entropy_coef=0.02),
            "entropy_threshold": 2.0, "old_logps": True,
        }),
    ]  # fmt: skip
    check(ranks, cases)


def test_packed_parts(ranks):
    """As padded ones, but for the layout of the results."""
    names = ("gspo", "vespo", "kl")
    cases = [
        (HALVES, packed, objective_options(name)) for name in names for packed in (False, True)
    ]
    answers = ranks("tests.ranks.sequence_jobs:losses", cases)
    for of_rank in answers:
        for padded, flat in zip(of_rank[::2], of_rank[1::2], strict=True):
            assert abs(padded.loss - flat.loss) < 1e-6
            torch.testing.assert_close(
                padded.gradients["weight"], flat.gradients["weight"], rtol=1e-4, atol=1e-7
            )


def test_from_log_probs(ranks):
    cfg = config(loss_type="gspo", epsilon=0.2)
    (first, d_first), (second, d_second) = ranks(
        "tests.ranks.sequence_jobs:from_logps", HALVES, cfg
    )
    from grpo_kernels import reference
    from tests.support.batches import make_batch

    batch = make_batch()
    logps = torch.where(batch.mask, batch.old_logps + 0.1, 0.0).double().requires_grad_()
    exact = reference.grpo_loss(
        logps, batch.advantages, batch.mask, old_logps=batch.old_logps.double(), config=cfg
    )
    exact.loss.backward()
    assert abs(first + second - exact.loss) < 1e-6
    d_logps = torch.cat([d_first, d_second], 1).double()
    assert logps.grad.norm() > 0
    assert (d_logps - logps.grad).norm() < 1e-5 * logps.grad.norm()


def test_input_that_one_rank_refuses(ranks):
    first, second = ranks("tests.ranks.sequence_jobs:refused", "input of one")
    assert first == "seq_group: expected good input on all ranks; another one's was refused"
    assert "targets: expected ids in [0, 1003)" in second


@pytest.mark.parametrize(("kind", "message"), {
    "other sequences": "seq_group: expected the same sequences on all ranks, of which each has "
                       "some tokens or none; got [4, 3] sequences",
    "no group": "seq_group: expected a torch.distributed process group",
    "packed": "cu_seqlens: expected offsets [B + 1] of this rank's parts of the sequences",
    "quantile": "entropy_threshold: expected the quantile over all ranks",
}.items())  # fmt: skip
def test_refused_on_all_ranks(ranks, kind, message):
    answers = ranks("tests.ranks.sequence_jobs:refused", kind)
    assert all(message in answer for answer in answers), answers

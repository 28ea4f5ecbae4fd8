"""Every option of a run in two processes: equal to the plain loop, or refused by name."""

import re

import pytest

from tests.helpers.matrix_runs import compare, of_rank, save_models
from tests.test_training_matrix import NO_LOGPS, NO_VLLM, OTHER, TOLERANCE, cases

pytestmark = pytest.mark.usefixtures("real_memory")
REFUSED = NO_LOGPS | NO_VLLM
ON_CPUS = {"ACCELERATE_USE_CPU": "true"}
AT_A_TIME = 20  # runs, which a job on ranks has time for


@pytest.fixture(scope="module")
def runs(ranks, request, tmp_path_factory):
    """The runs of the chosen cases in both processes, which are started once for some of them."""
    chosen = {x.callspec.params["case"] for x in request.session.items if x.fspath == __file__}
    model, other = save_models(tmp_path_factory)
    folder = tmp_path_factory.mktemp("runs")
    options = {
        case: {name: str(other) if x == OTHER else x for name, x in one.items()}
        for case, one in cases().items() if case in chosen
    }  # fmt: skip
    first, second, names = {}, {}, list(options)
    for i in range(0, len(names), AT_A_TIME):
        some = {case: options[case] for case in names[i : i + AT_A_TIME]}
        mine, theirs = ranks(of_rank, model, folder / str(i), some, environment=ON_CPUS)
        first |= mine
        second |= theirs
    return first, second


@pytest.mark.parametrize("case", cases())
def test_an_option_of_two_processes(case, runs):
    first, second = (run[case] for run in runs)
    message = REFUSED.get(case.partition("-")[0])
    if message is not None:
        assert re.search(message, first) and isinstance(second, str)
        return
    assert not isinstance(first, str), first
    weights, rows, options, steps = first
    for name, weight in second[0].items():
        assert weight.equal(weights[name]), name
    both = [
        ([*mine[0], *theirs[0]], [*mine[1], *theirs[1]])
        for mine, theirs in zip(steps, second[3], strict=True)
    ]
    compare(weights, rows, options, both, world=2, tolerance=TOLERANCE.get(case, 1e-3))

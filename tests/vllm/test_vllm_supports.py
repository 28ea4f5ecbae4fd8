"""The words that vLLM kept reach the loss: the policy that sampled is the one that is trained."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.helpers.trainer_runs import no_curves, rows_of, trainer_of
from tests.helpers.vllm_masks import enable_masks
from tests.helpers.vllm_runs import vllm_config, vllm_model

pytestmark = pytest.mark.usefixtures("real_memory")
CLOSE = 1e-4
CASES = {
    "top_p alone": {"top_p": 0.8},
    "all three": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7},
    "corrected": {"top_k": 10, "is_correction": "token_truncate"},
    "not replayed": {"top_k": 10, "replay_support": False},
}


@pytest.fixture(scope="module")
def with_masks():
    """A process whose vLLM returns masks."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, enable_masks) as pool:
        yield pool


def run(model, output, options):
    config = vllm_config(model, output, eval_size=3, save_every=-1, **options)
    with no_curves():
        return rows_of(trainer_of(config).train())


@pytest.mark.parametrize("name", CASES)
def test_the_policy_that_sampled_is_trained(name, with_masks, tmp_path):
    model, options = vllm_model(tmp_path), CASES[name]
    rows = with_masks.submit(run, model, tmp_path, options).result()
    assert len(rows) == 2
    for row in rows:
        if options.get("replay_support", True):
            # Over the words of the masks; over others log-probs would differ.
            assert 0 < row["sampler_gap_max"] < CLOSE
            assert 1 < row["support/mean"] < 257
        else:
            # Measured, and explained by the words that were left out.
            assert row["sampler_gap"] > 0.05 and "support/mean" not in row
        if "is_correction" in options:
            assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=CLOSE)

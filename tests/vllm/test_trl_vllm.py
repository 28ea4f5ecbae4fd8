"""TRL with a real vLLM in its process: the runs of `FusedGRPOTrainer` are those of TRL's trainer.

Two processes run them, of which one has vLLM's sampling masks (`tests/helpers/vllm_masks.py`).
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

pytest.importorskip("trl", reason="needs the extra 'test'")
from peft import LoraConfig

from tests.helpers import trl_vllm
from tests.helpers.model_families import LORAS
from tests.helpers.trl_runs import TWICE, assert_same_run
from tests.helpers.vllm_masks import why_no_masks

pytestmark = pytest.mark.usefixtures("real_memory")
TRL, FUSED = "trl:GRPOTrainer", "grpo_kernels.integrations.trl:FusedGRPOTrainer"
MASKED = "tests.helpers.masked_trainer:MaskedGRPOTrainer"
GAP = "sampling/sampling_logp_difference/max"
CLOSE = 1e-4
# New weights before each of the steps.
EACH_STEP = {"gradient_accumulation_steps": 2, "learning_rate": 0.02}
# Four steps, two of each batch.
IN_TWOS = {**TWICE, "learning_rate": 0.02, "max_steps": 4, "beta": 0.1}
TRUNCATED = {"top_k": 12, "top_p": 0.95, "min_p": 0.03, "temperature": 0.9}
LORA = LoraConfig(r=4, task_type="CAUSAL_LM", **LORAS["body"])
CASES = {
    "tied": EACH_STEP,
    "untied": {"temperature": 0.7, **IN_TWOS},
    "lora": {"peft_config": LORA, **EACH_STEP, "learning_rate": 2.0},
}
# name: (with masks, function, arguments, options)
RUNS = {
    **{f"theirs_{name}": (False, trl_vllm.run, [TRL], case) for name, case in CASES.items()},
    **{f"mine_{name}": (False, trl_vllm.run, [FUSED], case) for name, case in CASES.items()},
    "masked": (True, trl_vllm.run, [MASKED], {**TRUNCATED, **IN_TWOS}),
    "replayed": (True, trl_vllm.run_replayed, [], {**TRUNCATED, **IN_TWOS}),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All of them, as two processes finish them side by side."""
    folder = tmp_path_factory.mktemp("trl")
    models = {
        tied: trl_vllm.stored_model(folder / f"tied_{tied}", tied=tied) for tied in (True, False)
    }
    spawn = multiprocessing.get_context("spawn")
    plain, masks = (
        ProcessPoolExecutor(1, spawn, trl_vllm.prepare, (with_masks,))
        for with_masks in (False, True)
    )
    with plain, masks:
        yield {
            name: (masks if with_masks else plain).submit(
                function, *arguments, folder / name,
                stored=models[name.split("_")[-1] in ("tied", "lora")], **options,
            )
            for name, (with_masks, function, arguments, options) in RUNS.items()
            if not (with_masks and why_no_masks())
        }  # fmt: skip


def gaps_of(run):
    """Numbers of the steps that completions were sampled for."""
    return [row[GAP] for row in run[1] if GAP in row]


@pytest.mark.parametrize("case", CASES)
def test_the_same_run(case, runs):
    mine, theirs = runs[f"mine_{case}"].result(), runs[f"theirs_{case}"].result()
    assert_same_run(mine, theirs)
    assert len(gaps_of(mine)) == (2 if case == "untied" else 3)
    assert max(gaps_of(mine)) < CLOSE


@pytest.mark.skipif(why_no_masks() is not None, reason=str(why_no_masks()))
def test_supports_are_what_sampling_kept(runs):
    """And the run is that of TRL's trainer with masked rows of logits."""
    run, supports, kept = runs["replayed"].result()
    assert_same_run(run, runs["masked"].result())
    assert supports == kept
    assert len(set(map(len, supports))) > 4
    assert max(gaps_of(run)) < CLOSE

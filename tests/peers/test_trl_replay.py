"""TRL with `replay_support`: the run of a trainer that masks whole rows of logits.

Samples of vLLM are in `tests/vllm/test_trl_vllm.py`.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("trl", reason="needs the extra 'test'")
from peft import LoraConfig
from trl import GRPOTrainer

from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl
from grpo_kernels.integrations.trl.replay import _mask_supports
from tests.helpers.masked_trainer import MaskedGRPOTrainer
from tests.helpers.model_families import LORAS
from tests.helpers.trl_runs import TWICE, assert_same_run, trained

pytestmark = pytest.mark.usefixtures("real_memory")
TOP_P = {"top_p": 0.8}
FOUR = {"steps_per_generation": 4, **TWICE}
LORA = LoraConfig(r=4, task_type="CAUSAL_LM", **LORAS["body"])


CASES = {
    "top_k": {"top_k": 12, "temperature": 0.7, **FOUR},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.2, "loss_type": "bnpo"},
    "cispo, entropy_bonus": TOP_P | {
        "loss_type": "cispo", "epsilon_high": 1.5, "entropy_coef": 0.1, **TWICE
    },
    # Through log-probs that are differentiated.
    "vespo": TOP_P | {"loss_type": "vespo", **FOUR},
    "top_entropy, kl": TOP_P | {"top_entropy_quantile": 0.4, "beta": 0.1, **FOUR},
    # Sampling in between steps that share a generation.
    "evaluation, cut": TOP_P | {"evaluate": True, "mask_truncated_completions": True, **FOUR},
    # The reference is the model with its adapters off.
    "lora": TOP_P | {"peft_config": LORA, "beta": 0.1, **TWICE},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_same_run(case, tmp_path):
    theirs = trained(MaskedGRPOTrainer, tmp_path / "theirs", **CASES[case])
    actual = trained(FusedGRPOTrainer, tmp_path / "mine", replay_support=True, **CASES[case])
    assert_same_run(actual, theirs)
    assert any("eval_loss" in row for row in actual[1]) == ("evaluate" in CASES[case])


def test_patched(tmp_path):
    options = TOP_P | FOUR
    expected = trained(FusedGRPOTrainer, tmp_path / "a", replay_support=True, **options)
    with patch_trl(replay_support=True):
        assert_same_run(trained(GRPOTrainer, tmp_path / "c", **options), expected)


def test_outputs_of_a_group_of_ranks():
    """Each has the outputs of all, in the order of the ranks."""
    outputs = [
        SimpleNamespace(sampling_mask=SimpleNamespace(token_ids=token_sets))
        for token_sets in ([[1]], [[2]], [[3, 4], [5]], [[6]])
    ]
    (first, second) = _mask_supports(outputs, [[4, 5], [6]], rank=1)
    assert first[0].tolist() == [3, 4, 5] and first[1].tolist() == [0, 2, 3]
    assert second[0].tolist() == [6] and second[1].tolist() == [0, 1]

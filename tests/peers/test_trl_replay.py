"""TRL with `replay_support`: the run of a trainer that masks whole rows of logits."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

pytest.importorskip("trl", reason="needs the extra 'test'")
from peft import LoraConfig
from trl import GRPOTrainer
from trl.generation import vllm_generation

from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl
from grpo_kernels.integrations.trl.replay import _mask_supports
from tests.helpers.masked_trainer import MaskedGRPOTrainer, warpers_of
from tests.helpers.model_families import LORAS
from tests.helpers.trl_runs import TWICE, assert_same_run, trained

pytestmark = pytest.mark.usefixtures("real_memory")
TOP_P = {"top_p": 0.8}
FOUR = {"steps_per_generation": 4, **TWICE}
LORA = LoraConfig(r=4, task_type="CAUSAL_LM", **LORAS["body"])


VLLM = {"use_vllm": True, "vllm_mode": "colocate", "top_k": 12, "temperature": 0.7}
CASES = {
    "on_policy": TOP_P,
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
    "masks of vLLM": VLLM | TOP_P | {"min_p": 0.05, "learning_rate": 0.01, **FOUR},
}  # fmt: skip


class FakeLLM:
    """An engine with vLLM's interface, as far as TRL uses one in its own process, as on a GPU.

    It samples by transformers, token by token, and reports log-probs over the ids that it kept.
    `tests/vllm/test_trl_vllm.py` runs the real one, with which this has to agree.
    """

    def __init__(self, model, *, logprobs_mode, seed, return_sampling_mask=False, **options):
        if return_sampling_mask and logprobs_mode != "processed_logprobs":
            raise ValueError("sampling distribution replay requires 'processed_logprobs'")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.masks = return_sampling_mask
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))
        torch.manual_seed(seed)

    def load_weights(self, named):
        _, unknown = self.model.load_state_dict(dict(named), strict=False)
        assert not unknown

    def reset_prefix_cache(self):
        return True

    def generate(self, prompts, sampling_params, use_tqdm):
        if self.masks and min(sampling_params.temperature, sampling_params.top_k) <= 0:
            raise ValueError("sampling distribution replay requires temperature and top_k > 0")
        return [self.request(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

    @torch.no_grad()
    def request(self, prompt, sampling):
        warpers = warpers_of(SimpleNamespace(use_vllm=True, **vars(sampling)))
        ids, token_sets, logprobs = [], [], []
        while len(ids) < sampling.max_tokens and self.model.config.eos_token_id not in ids:
            scores = self.model(torch.tensor([prompt + ids])).logits[:, -1].float()
            for warper in warpers:
                scores = warper(None, scores)
            log_p = scores.log_softmax(-1)[0]
            token = int(torch.multinomial(log_p.exp(), 1))
            ids.append(token)
            token_sets.append((scores[0] > -torch.inf).nonzero()[:, 0].tolist())
            rank = int((log_p >= log_p[token]).sum())
            logprobs.append({token: SimpleNamespace(logprob=float(log_p[token]), rank=rank)})
        mask = SimpleNamespace(token_ids=token_sets) if self.masks else None
        output = SimpleNamespace(token_ids=ids, logprobs=logprobs, sampling_mask=mask)
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[output])


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM in this process, of a version that returns its masks."""
    installed = SimpleNamespace(__version__="0.28.0")
    monkeypatch.setattr(os, "environ", dict(os.environ))  # TRL writes ranks into it
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", installed)
    return installed


@pytest.mark.parametrize("case", CASES)
def test_the_same_run(case, request, tmp_path):
    if "use_vllm" in CASES[case]:
        request.getfixturevalue("vllm")
    theirs = trained(MaskedGRPOTrainer, tmp_path / "theirs", **CASES[case])
    actual = trained(FusedGRPOTrainer, tmp_path / "mine", replay_support=True, **CASES[case])
    assert_same_run(actual, theirs)
    assert any("eval_loss" in row for row in actual[1]) == ("evaluate" in CASES[case])


def test_patched(tmp_path):
    options = TOP_P | FOUR
    expected = trained(FusedGRPOTrainer, tmp_path / "a", replay_support=True, **options)
    dense = trained(FusedGRPOTrainer, tmp_path / "b", **options)
    assert dense[0][0] == pytest.approx(expected[0][0], abs=1e-5)  # both on-policy
    assert dense[1][0]["entropy"] > expected[1][0]["entropy"] + 0.01
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


# (version of vLLM, options, the error)
REFUSED = (
    ("0.27.2", {}, r"vllm 0\.27\.2 does not work .*: install vllm 0\.28"),
    ("0.28.0", {"top_k": 0, **TOP_P}, "top_k=0 does not work .* vLLM.*: pass top_k > 0"),
    ("0.28.0", {"repetition_penalty": 1.1}, "repetition_penalty=1.1 does not .*=1.0"),
)  # fmt: skip


@pytest.mark.parametrize(("version", "options", "message"), REFUSED)
def test_an_engine_that_is_refused(version, options, message, vllm, tmp_path):
    vllm.__version__ = version
    with pytest.raises(ValueError, match=message):
        trained(FusedGRPOTrainer, tmp_path, replay_support=True, **VLLM | options)

"""The weights that a colocated vLLM samples with are the policy's, after every update."""

import os
import random

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_kernels.training import load_model
from grpo_kernels.training.rollout import RolloutError, SamplingParams
from grpo_kernels.training.vllm_rollout import TESTED
from tests.helpers.vllm_runs import (
    PROMPT,
    gap,
    prompts,
    rollout_of,
    shake,
    vllm_config,
    vllm_model,
)

pytestmark = pytest.mark.usefixtures("real_memory")
# A weight moves by this; log-probs in float32 agree to the other.
MOVE, CLOSE = 0.02, 2e-4


def test_its_version_is_one_that_is_tested():
    import vllm

    version = tuple(map(int, vllm.__version__.split(".")[:2]))
    assert TESTED[0] <= version <= TESTED[1]


@pytest.mark.parametrize(
    ("family", "is_tied"), (("llama", False), ("qwen2", True), ("qwen3", True))
)
def test_new_weights_arrive(family, is_tied, tmp_path):
    folder = vllm_model(tmp_path, family, tied=is_tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert_follows(rollout_of(vllm_config(folder, tmp_path), model), model)


def assert_follows(rollout, model):
    """Without packing again, or with prompts' states of before, the gap would stay."""
    rollout.update_weights()
    assert gap(rollout, model) < CLOSE
    shake(model, MOVE)
    assert gap(rollout, model) > 0.01
    rollout.update_weights()
    assert gap(rollout, model) < CLOSE
    assert gap(rollout, model, temperature=0.7) < CLOSE


def test_adapters_arrive(tmp_path):
    folder = vllm_model(tmp_path)
    config = vllm_config(folder, tmp_path, lora_rank=4)
    model, _ = load_model(config)
    rollout = rollout_of(config, model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert_follows(rollout, model)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen and all(torch.equal(before[n], model.get_parameter(n)) for n in frozen)


def test_more_prompts_than_are_read_in_one_step(tmp_path):
    """VLLM reads up to 4,096 tokens of prompts at once, and the rest of a prompt in the next step.

    On a CPU that ends it if a request has a seed: torch's generator there has no offset.
    """
    model = AutoModelForCausalLM.from_pretrained(vllm_model(tmp_path))
    count = 4096 // PROMPT + 4
    config = vllm_config(tmp_path, tmp_path, prompts_per_step=count, num_generations=2)
    rollout = rollout_of(config, model)
    rollout.update_weights()
    done = rollout(prompts(count), 2, SamplingParams(4))
    assert len(done) == 2 * count and all(one.token_ids for one in done)


def test_the_process_is_as_it_was(tmp_path):
    def state():
        return (
            torch.get_num_threads(), torch.set_num_threads, os.sched_getaffinity(0),
            torch.random.get_rng_state().tolist(), random.getstate(),
            numpy.random.get_state()[1].tolist(),
            {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTEST_"))},
        )  # fmt: skip

    folder = vllm_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = state()
    rollout_of(vllm_config(folder, tmp_path), model)
    assert state() == before


def test_what_vllm_cannot_do_is_said(tmp_path):
    folder = vllm_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(RolloutError, match=r"replay_support wants the sets .*--no_replay_support"):
        rollout_of(vllm_config(folder, tmp_path, top_p=0.9), model)


def test_after_weights_that_did_not_fit_vllm_takes_no_others(tmp_path):
    folder = vllm_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    rollout = rollout_of(vllm_config(folder, tmp_path), model)
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight[:7].clone())
    with pytest.raises(RolloutError, match="load weight"):
        rollout.update_weights()
    norm.weight = torch.nn.Parameter(torch.ones(64))
    with pytest.raises(RolloutError, match=r"failed to load before \(.*: start vLLM again"):
        rollout.update_weights()

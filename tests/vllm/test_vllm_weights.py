"""The weights that a colocated vLLM samples with are the policy's, after every update."""

import os
import random

import numpy
import pytest
import torch

from grpo_kernels.training import load_model
from grpo_kernels.training.sampling.rollout import RolloutError, SamplingParams
from grpo_kernels.training.sampling.vllm_rollout import TESTED
from tests.helpers.vllm_runs import PROMPT, gap, prompts, rollout_of, vllm_config, vllm_model

pytestmark = pytest.mark.usefixtures("real_memory")
CLOSE = 2e-4  # log-probs in float32


def made(folder, family="llama", tied=True, **options):
    """A rollout of vLLM in this process, and the policy's model."""
    config = vllm_config(vllm_model(folder, family, tied=tied), folder, **options)
    model, _ = load_model(config)
    return rollout_of(config, model), model


def test_the_version_is_one_that_is_tested():
    import vllm

    version = tuple(map(int, vllm.__version__.split(".")[:2]))
    assert TESTED[0] <= version <= TESTED[1]


@pytest.mark.parametrize(
    ("family", "tied", "options"),
    (
        ("llama", False, {}),
        ("qwen2", True, {}),
        ("qwen3", True, {}),
        ("llama", True, {"lora_rank": 4}),
    ),
)
def test_new_weights_arrive(family, tied, options, tmp_path):
    """Without packing again, or with prompts' states of before, the gap would stay."""
    rollout, model = made(tmp_path, family, tied, **options)
    rollout.update_weights()
    assert gap(rollout, model) < CLOSE
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert bool(frozen) is bool(options)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
    assert gap(rollout, model) > 0.01
    rollout.update_weights()
    assert gap(rollout, model) < CLOSE
    assert gap(rollout, model, temperature=0.7) < CLOSE
    assert all(torch.equal(model.get_parameter(name), p) for name, p in frozen.items())


def test_more_prompts_than_are_read_in_one_step(tmp_path):
    """VLLM reads up to 4,096 tokens of prompts at once, and the rest of a prompt in the next step.

    On a CPU that ends it if a request has a seed: torch's generator there has no offset.
    """
    count = 4096 // PROMPT + 4
    rollout, _ = made(tmp_path, prompts_per_step=count, num_generations=2)
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

    config = vllm_config(vllm_model(tmp_path), tmp_path)
    model, _ = load_model(config)
    before = state()
    rollout_of(config, model)
    assert state() == before


def test_what_vllm_cannot_do_is_said(tmp_path):
    with pytest.raises(RolloutError, match=r"replay_support wants the sets .*--no_replay_support"):
        made(tmp_path, top_p=0.9)


def test_weights_that_do_not_fit_are_an_error(tmp_path):
    rollout, model = made(tmp_path)
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight[:7].clone())
    with pytest.raises(RolloutError, match="load weight"):
        rollout.update_weights()

"""Truncated sampling: what it leaves is recorded, and the policy that sampled is trained.

By the trainer, and through each drop-in against the reference.
"""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from grpo_kernels import GRPOLossConfig, LMHead, fused_grpo_loss, linear_logprobs
from grpo_kernels.integrations.transformers import Objective, attach_fused_head
from grpo_kernels.integrations.verl import linear_cross_entropy
from grpo_kernels.training import Completion
from grpo_kernels.training.sampling.rollout import GenerateRollout, SamplingParams
from grpo_kernels.training.step.policy import Policy
from tests.helpers.batches import make_batch
from tests.helpers.supports import make_support
from tests.helpers.tiny_models import V, make_model, make_tokenizer
from tests.helpers.trainer_runs import config_of, rows_of, trainer_of

pytestmark = pytest.mark.usefixtures("real_memory")

PROMPTS = [[7, 8, 9], [5, 6, 7, 8, 9, 10]]
TRUNCATIONS = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "top_k 1": {"top_k": 1},
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
}


def truncated_log_probs(model, prompt, completion, temperature=1.0, **truncation):
    """`[T, V]` log-probs of the truncated policy, by the processors that `generate` makes."""
    truncation = {"top_k": 0, **truncation}
    options = GenerationConfig(do_sample=True, temperature=temperature, **truncation)
    ids = torch.tensor([prompt + completion.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return model._get_logits_processor(options)(ids, logits).log_softmax(-1)


def kept_sets(support):
    offsets = support.offsets.tolist()
    return [set(support.token_ids[a:b].tolist()) for a, b in pairwise(offsets)]


def sample(model, sampling, share_prompts=True):
    torch.manual_seed(3)
    policy = Policy(model, share_prompts=share_prompts)
    return GenerateRollout(policy, make_tokenizer())(PROMPTS, 3, sampling)


# Recording


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_supports_are_what_generate_leaves(name):
    model = make_model("llama").eval()
    # Rows end early, by one of many tokens.
    model.generation_config.eos_token_id = list(range(40))
    sampling = SamplingParams(7, **TRUNCATIONS[name], record_support=True)
    done = sample(model, sampling)
    lengths = [len(c.token_ids) for c in done]
    assert name == "top_k 1" or len(set(lengths)) > 2
    for i, c in enumerate(done):
        expected = truncated_log_probs(model, PROMPTS[i // 3], c, **TRUNCATIONS[name])
        sets = kept_sets(c.support)
        assert sets == [set(row.isfinite().nonzero()[:, 0].tolist()) for row in expected]
        assert all(t in kept_set for t, kept_set in zip(c.token_ids, sets, strict=True))
    # Recording changes no sample, nor does encoding prompts with each completion.
    assert done == sample(model, replace(sampling, record_support=False))
    assert done == sample(model, sampling, share_prompts=False)


# Training: log-probs are those of `test_training_matrix.py`


def test_metrics_of_supports_are_of_the_rollout(tiny_model, tmp_path):
    config, seen = config_of(tiny_model, tmp_path, top_p=0.8, steps=1, micro_batch_size=3), []
    (row,) = rows_of(trainer_of(config).train(lambda _, samples: seen.append(samples)))
    sets = [kept_set for c in seen[0].completions for kept_set in kept_sets(c.support)]
    sizes = torch.tensor([len(kept_set) for kept_set in sets]).double()
    assert row["support/mean"] == pytest.approx(sizes.mean().item()) and sizes.mean() > 1
    assert row["support/p99"] == pytest.approx(sizes.quantile(0.99).item())
    assert row["support/singletons"] == pytest.approx((sizes == 1).double().mean().item())


def test_a_rollout_that_does_not_say_is_warned_of(tiny_model, tmp_path):
    def rollout(prompts, count, sampling):
        return [Completion([40 + i % 7, 6], True) for i in range(len(prompts) * count)]

    config = config_of(tiny_model, tmp_path, top_k=3)
    row = rows_of(trainer_of(config, rollout=lambda _: rollout).train())[0]
    assert "the rollout returns no support" in row["warnings"][0]["text"]
    assert not any(name.startswith("support") for name in row)


# Drop-ins, against the calls that they make


@pytest.fixture
def batch():
    batch = make_batch(B=4, T=9, H=16, V=101)
    batch.hidden, batch.targets = batch.hidden.nan_to_num(), batch.targets.clamp(0, 100)
    return batch


def test_verl(batch):
    support = make_support(batch, most=20)
    actual = linear_cross_entropy(
        batch.hidden, batch.weight, batch.targets, 0.7, "none", support=support, mask=batch.mask
    )
    head = LMHead(batch.weight, temperature=0.7)
    options = {"support": support, "entropy": True}
    expected = linear_logprobs(batch.hidden, head, batch.targets, batch.mask, **options)[:2]
    torch.testing.assert_close(actual, tuple(expected))


@pytest.mark.parametrize("labels_as", ("labels", "kept", "shifted"))
def test_transformers(labels_as):
    """With padding on both sides, and prompts of two lengths."""
    model = make_model("qwen2", tie_word_embeddings=False)
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(5, V, (3, 11), generator=g)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][0, :2] = inputs["attention_mask"][1, -2:] = 0
    labels = ids.masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, :5] = labels[2, :7] = -100
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    call, states = {
        "labels": ({"labels": labels}, slice(10)),
        "kept": ({"labels": labels, "logits_to_keep": 6}, slice(4, 10)),
        "shifted": ({"shift_labels": shifted}, slice(11)),
    }[labels_as]
    targets, own_mask = shifted[:, states].clamp(min=0), torch.ones(3, 11).bool()[:, states].clone()
    own_mask[1, -4] = False  # a tool's token
    mask = (shifted[:, states] != -100) & own_mask
    support = make_support(SimpleNamespace(weight=range(V), targets=targets, mask=mask))

    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state[:, states]
    args = (hidden, LMHead(model.lm_head.weight, temperature=0.7), targets)
    expected = linear_logprobs(*args, mask, support=support, entropy=True)
    config, advantages = GRPOLossConfig(loss_type="dapo"), torch.randn(3, generator=g)
    old_logps = expected.logps.detach() + 0.3 * torch.randn(mask.shape, generator=g)
    options = {"old_logps": old_logps, "config": config, "support": support}

    attach_fused_head(model, temperature=0.7)
    objective = Objective(advantages, mask=own_mask, **options)
    out = model(**inputs, **call, fused_head=objective)
    losses = out.loss, fused_grpo_loss(*args, advantages, mask, **options).loss
    close = {"rtol": 1e-4, "atol": 1e-6}
    for name in ("logps", "entropy"):
        torch.testing.assert_close(getattr(out, name), getattr(expected, name), **close)
    gradients = (torch.autograd.grad(loss, [*model.parameters()]) for loss in losses)
    torch.testing.assert_close(*gradients, **close)

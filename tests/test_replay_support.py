"""Truncated sampling: what it leaves is recorded, and the policy that sampled is trained."""

from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch
from transformers import GenerationConfig

from grpo_kernels import batch_support
from grpo_kernels.head import Support
from grpo_kernels.training import Completion, TrainingConfig
from grpo_kernels.training import metrics as of
from grpo_kernels.training.micro_batches import equal_parts
from grpo_kernels.training.policy import Policy
from grpo_kernels.training.rollout import (
    GenerateRollout,
    SamplingParams,
    check_support,
)
from tests.helpers.tiny_models import V, make_model, make_tokenizer
from tests.helpers.trainer_runs import config_of, rows_of, trainer_of

pytestmark = pytest.mark.usefixtures("real_memory", "curves")

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


def sample(model, sampling, count=3, share_prompts=True):
    torch.manual_seed(3)
    policy = Policy(model, share_prompts=share_prompts)
    return GenerateRollout(policy, make_tokenizer())(PROMPTS, count, sampling)


# What is recorded


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
        assert all(t in kept for t, kept in zip(c.token_ids, sets, strict=True))
    # Recording changes no sample, nor does encoding prompts with each completion.
    assert done == sample(model, replace(sampling, record_support=False))
    assert done == sample(model, sampling, share_prompts=False)


def test_supports_are_cut_with_the_completion():
    model, sampling = make_model("llama"), SamplingParams(8, top_p=0.8, record_support=True)
    full = sample(model, sampling)
    texts = [make_tokenizer().decode(c.token_ids) for c in full]
    letters = (next(x for x in text[1:] if x.isascii() and x.isalpha()) for text in texts[2:5:2])
    done = sample(model, replace(sampling, stop=tuple(letters)))
    assert {c.ended for c in done} == {True, False} and len({len(c.token_ids) for c in done}) > 2
    for whole, cut in zip(full, done, strict=True):
        T = len(cut.token_ids)
        assert kept_sets(cut.support) == kept_sets(whole.support)[:T]
        check_support("support", cut.support, T)


@pytest.mark.parametrize(
    ("support", "message"),
    (
        (([1, 2], [0, 1, 2]), r"completions\[1\].support: expected a Support; got tuple"),
        (Support([1, 2], [0, 1, 2]), "support.token_ids: expected a tensor; got list"),
        (Support(torch.ones(2), torch.tensor([0, 1, 2])), "token_ids: expected dtype int32, int64"),
        (Support(torch.ones(1, 2).int(), torch.tensor([0, 1, 2])), r"shape \[K\]; got \[1, 2\]"),
        (Support(torch.tensor([5, 6]), torch.tensor([0, 2])), r"expected shape \[3\]; got \[2\]"),
        (Support(torch.tensor([5, 6]), torch.tensor([0, 1, 3])), "number of token_ids = 2; got 0"),
        (Support(torch.tensor([5, 6]), torch.tensor([0, 3, 2])), "never to decrease"),
        (Support(torch.tensor([5, 6]), torch.tensor([1, 1, 2])), "expected to start at 0"),
    ),
)
def test_wrong_supports_of_a_rollout_are_refused(support, message, tiny_model, tmp_path):
    def rollout(prompts, count, sampling):
        assert sampling.record_support
        done = [Completion([5, 6], True) for _ in range(len(prompts) * count)]
        done[1] = replace(done[1], support=support)
        return done

    trainer = trainer_of(config_of(tiny_model, tmp_path, top_p=0.8), rollout=lambda _: rollout)
    with pytest.raises((ValueError, TypeError), match=message):
        trainer.train_step(trainer.train_problems[:4])


# What is trained


def test_supports_of_a_batch_are_joined():
    sets = [[[5], [6, 9, 2]], None, [[7, 8], [], [3]]]
    done = []
    for some in sets:
        support = None
        if some is not None:
            offsets = torch.tensor([0, *map(len, some)]).cumsum(0)
            support = Support(torch.tensor([*chain(*some)], dtype=torch.int32), offsets)
        done.append(Completion([0] * len(some or [0]), True, support=support))
    ids, offsets = batch_support([c.support for c in done], 4)
    assert ids.dtype == torch.int32
    assert kept_sets(Support(ids, offsets)) == [
        {5}, {6, 9, 2}, set(), set(), set(), set(), set(), set(), {7, 8}, set(), {3}, set(),
    ]  # fmt: skip
    ids, offsets = batch_support([None], 4)
    assert len(ids) == 0 and offsets.tolist() == [0] * 5


def scored(tiny_model, tmp_path, **options):
    config = config_of(tiny_model, tmp_path, minibatches=2, skip_untrained=False, **options)
    trainer = trainer_of(config)
    trainer.step = 1
    torch.manual_seed(0)
    samples = trainer.sampling(
        trainer.train_problems[:4], trainer.step, of.Clock(torch.device("cpu"))
    )
    trainer.scorer.score(samples, equal_parts(len(samples.texts), 2))
    return trainer, samples


def expected_of(trainer, samples, truncation):
    """Log-probs and entropies `[B, T]` of the samples under the policy, truncated or not."""
    logps, entropies = torch.zeros(2, *samples.mask.shape)
    for i, c in enumerate(samples.completions):
        log_p = truncated_log_probs(
            trainer.policy.model, samples.prompts[samples.prompt_of[i]], c, **truncation
        )
        T = len(c.token_ids)
        logps[i, :T] = log_p.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        entropies[i, :T] = torch.distributions.Categorical(logits=log_p).entropy()
    return logps, entropies


@pytest.mark.parametrize("name", ("top_p", "all"))
def test_log_probs_are_those_of_the_policy_that_sampled(name, tiny_model, tmp_path):
    truncation = TRUNCATIONS[name]
    trainer, samples = scored(
        tiny_model, tmp_path, beta=0.1, top_entropy_quantile=0.4, **truncation
    )
    expected, entropies = expected_of(trainer, samples, truncation)
    threshold = entropies[samples.mask != 0].quantile(0.6)
    assert samples.entropy_threshold == pytest.approx(float(threshold), rel=1e-4, abs=2e-5)
    torch.testing.assert_close(samples.old_logps, expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(samples.ref_logps, expected, rtol=1e-4, atol=2e-5)
    update = trainer._update(samples, 0, list(range(len(samples.texts))))
    assert update["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert update["ratio_max"] == pytest.approx(1, abs=1e-4) and update["kl"] < 1e-6
    torch.testing.assert_close(samples.logps, expected, rtol=1e-4, atol=2e-5)
    again = trainer._update(samples, 1, list(range(len(samples.texts))))
    assert again["ratio_max"] > 1.01


def test_without_replay_the_ratio_to_the_sampler_is_off(tiny_model, tmp_path):
    truncation = TRUNCATIONS["top_p"]
    trainer, samples = scored(tiny_model, tmp_path, replay_support=False, **truncation)
    assert all(c.support is None for c in samples.completions) and not samples.replay_support
    whole, _ = expected_of(trainer, samples, {})
    torch.testing.assert_close(samples.old_logps, whole, rtol=1e-4, atol=2e-5)
    acted, _ = expected_of(trainer, samples, truncation)
    ratio = (whole - acted).exp()[samples.mask != 0]
    assert ratio.max() < 1 + 1e-5 and ratio.mean() < 0.95


def test_metrics_of_supports_are_of_the_rollout(tiny_model, tmp_path):
    seen = []
    config = config_of(tiny_model, tmp_path, top_p=0.8, steps=1, micro_batch_size=3, eval_size=2)
    trainer = trainer_of(config)
    rollout, asked = trainer.sampler.rollout, []
    trainer.sampler.rollout = lambda prompts, count, sampling: (
        asked.append((sampling.temperature, sampling.record_support))
        or rollout(prompts, count, sampling)
    )
    row = rows_of(trainer.train(lambda _, samples: seen.append(samples)))[0]
    sizes = torch.tensor([
        len(kept) for c in seen[0].completions for kept in kept_sets(c.support)
    ]).double()  # fmt: skip
    assert row["support/mean"] == pytest.approx(sizes.mean().item())
    assert row["support/p99"] == pytest.approx(sizes.quantile(0.99).item())
    assert row["support/singletons"] == pytest.approx((sizes == 1).double().mean().item())
    assert 0 <= row["support/gathered"] <= 1 and "support/fallback" not in row
    assert 1 < row["support/mean"] < V and "warnings" not in row
    # Evaluations do not record.
    assert asked == [(0.0, False), (1.0, True), (0.0, False)]


def test_nothing_is_recorded_where_nothing_is_truncated(tiny_model, tmp_path):
    _, samples = scored(tiny_model, tmp_path)
    assert not samples.replay_support and samples.completions[0].support is None
    assert samples.batch([0, 1], 0)[0].support is None


def test_a_rollout_that_does_not_say_is_warned_of(tiny_model, tmp_path):
    def rollout(prompts, count, sampling):
        return [Completion([40 + i % 7, 6], True) for i in range(len(prompts) * count)]

    config = config_of(tiny_model, tmp_path, top_k=3)
    row = rows_of(trainer_of(config, rollout=lambda _: rollout).train())[0]
    assert "the rollout does not say what they kept" in row["warnings"][0]
    assert not any(name.startswith("support") for name in row)


def test_options_are_checked():
    assert TrainingConfig(model="m", top_k=5).records_support
    assert not TrainingConfig(model="m", top_k=5, replay_support=False).records_support
    assert not TrainingConfig(model="m").records_support

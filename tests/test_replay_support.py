"""Truncated sampling: what it leaves is recorded, and the policy that sampled is trained.

By the trainer, and through each drop-in against rows of logits that are masked.
"""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from grpo_kernels import GRPOLossConfig
from grpo_kernels.head import Support
from grpo_kernels.integrations.liger import FusedLinearGRPOLoss
from grpo_kernels.integrations.transformers import Objective, attach_fused_head
from grpo_kernels.integrations.verl import linear_cross_entropy
from grpo_kernels.training import Completion
from grpo_kernels.training.policy import Policy
from grpo_kernels.training.rollout import (
    GenerateRollout,
    SamplingParams,
    check_support,
)
from tests.helpers.batches import make_batch, relative_error
from tests.helpers.supports import make_support
from tests.helpers.tiny_models import V, make_model, make_tokenizer
from tests.helpers.trainer_runs import config_of, first_samples, rows_of, trainer_of

pytestmark = pytest.mark.usefixtures("real_memory", "curves")

B, T = 4, 9  # of a drop-in's batch
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


def scored(tiny_model, tmp_path, **options):
    config = config_of(tiny_model, tmp_path, minibatches=2, skip_untrained=False, **options)
    trainer = trainer_of(config)
    torch.manual_seed(0)
    return trainer, first_samples(trainer)


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
    update = trainer.updates(samples, 1, 0, list(range(len(samples.texts))))
    assert update["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert update["ratio_max"] == pytest.approx(1, abs=1e-4) and update["kl"] < 1e-6
    torch.testing.assert_close(samples.logps, expected, rtol=1e-4, atol=2e-5)
    again = trainer.updates(samples, 1, 1, list(range(len(samples.texts))))
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


# Drop-ins


def masked_logps(logits, targets, support, mask):
    """Log-probs of targets and entropies of the softmax over the kept words; 0 where masked."""
    token_ids, offsets = support
    V = logits.shape[-1]
    rows = torch.arange(targets.numel()).repeat_interleave(offsets.diff())
    exists = (token_ids >= 0) & (token_ids < V)  # masked tokens may have others
    kept = torch.zeros(targets.numel(), V, dtype=torch.bool)
    kept[rows[exists], token_ids[exists].long()] = True
    kept[~kept.any(1)] = True
    kept = kept.view(logits.shape)
    log_p = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    # The entropy's gradient has to be finite where a word is out.
    entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)
    logps = log_p.gather(-1, targets[..., None])[..., 0]
    return torch.where(mask, logps, 0.0), torch.where(mask, entropy, 0.0)


def wide(*tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def dapo(logps, old_logps, advantages, mask, ref_logps=None, beta=0.0):
    """The clipped loss, a mean over tokens."""
    ratio = (logps - old_logps).exp()
    surrogate = torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    kl = (ref_logps - logps).exp() - (ref_logps - logps) - 1 if beta else 0.0
    return ((beta * kl - surrogate) * mask).sum() / mask.sum()


def batch_with_support():
    batch = make_batch(B=B, T=T, H=16, V=101)
    batch.hidden, batch.targets = batch.hidden.nan_to_num(), batch.targets.clamp(0, 100)
    return batch, make_support(batch, most=20)


def test_verl():
    batch, support = batch_with_support()
    hidden, weight = (x.clone().requires_grad_() for x in (batch.hidden, batch.weight))
    logps, entropy = linear_cross_entropy(
        hidden, weight, batch.targets, 0.7, "none", support=support, mask=batch.mask
    )
    exact = wide(hidden, weight)
    logits = exact[0] @ exact[1].T / 0.7
    wanted, wanted_entropy = masked_logps(logits, batch.targets, support, batch.mask)
    torch.testing.assert_close(logps.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-5, atol=1e-5)
    for values in ((logps, entropy), (wanted, wanted_entropy)):
        (values[0].sum() + 0.3 * (values[1] * torch.arange(T)).sum()).backward()
    for mine, theirs in zip((hidden, weight), exact, strict=True):
        assert relative_error(mine.grad, theirs.grad) < 1e-4


@pytest.mark.parametrize("reference", ("logps", "head"))
def test_liger(reference):
    batch, support = batch_with_support()
    g = torch.Generator().manual_seed(5)
    ref_hidden = batch.hidden + 0.1 * torch.randn(batch.hidden.shape, generator=g)
    hidden, weight = (x.clone().requires_grad_() for x in (batch.hidden, batch.weight))
    exact = wide(hidden, weight)

    def exact_logps(states):
        return masked_logps(states @ exact[1].T / 0.7, batch.targets, support, batch.mask)[0]

    with torch.no_grad():
        old_logps = exact_logps(exact[0]) + 0.3 * torch.randn(B, T, generator=g)
        ref_logps = exact_logps(ref_hidden.double())
    given = {"ref_per_token_logps": ref_logps.float()}
    if reference == "head":
        given = {"ref_input": ref_hidden, "ref_weight": batch.weight}
    grpo = FusedLinearGRPOLoss(beta=0.1, loss_type="dapo", temperature=0.7)
    loss, (kl, clipped) = grpo(
        hidden, weight, batch.targets, batch.mask, batch.advantages,
        old_per_token_logps=old_logps.float(), support=support, **given,
    )  # fmt: skip
    wanted = dapo(
        exact_logps(exact[0]), old_logps, batch.advantages, batch.mask, ref_logps, beta=0.1
    )
    assert float(loss) == pytest.approx(float(wanted), rel=1e-4)
    assert kl > 0 and 0 < clipped < 1
    loss.backward()
    wanted.backward()
    for mine, theirs in zip((hidden, weight), exact, strict=True):
        assert relative_error(mine.grad, theirs.grad) < 1e-4


def model_with_labels():
    """Padding on both sides, and prompts of two lengths."""
    model = make_model("qwen2", tie_word_embeddings=False)
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(5, V, (3, 11), generator=g)
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :2] = attention_mask[1, -2:] = 0
    labels = ids.masked_fill(attention_mask == 0, -100)
    labels[:, :5] = -100
    labels[2, :7] = -100
    return model, {"input_ids": ids, "attention_mask": attention_mask}, labels


@pytest.mark.parametrize("labels_as", ("labels", "kept", "shifted"))
@pytest.mark.parametrize("asked", ("logps", "loss"))
def test_transformers(asked, labels_as):
    model, inputs, labels = model_with_labels()
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    targets, own_mask = labels[:, 1:].clamp(min=0), torch.ones(3, 10, dtype=torch.bool)
    call = {"labels": labels}
    if labels_as == "kept":
        logits, targets, own_mask = (x[:, -6:] for x in (logits, targets, own_mask))
        call["logits_to_keep"] = 6
    elif labels_as == "shifted":
        call = {"shift_labels": torch.cat([labels[:, 1:], torch.full((3, 1), -100)], 1)}
        logits, targets, own_mask = (
            torch.cat([x, x[:, -1:]], 1) for x in (logits, targets, own_mask)
        )
    own_mask = own_mask.clone()
    own_mask[1, -4] = False  # a tool's token
    mask = torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))[:, : targets.shape[1]]
    if labels_as == "kept":
        mask = labels[:, -6:] != -100
    mask = mask & own_mask
    support = make_support(SimpleNamespace(weight=range(V), targets=targets, mask=mask))
    wanted, wanted_entropy = masked_logps(logits / 0.7, targets, support, mask)

    attach_fused_head(model, temperature=0.7)
    given = {"mask": own_mask, "support": support}
    if asked == "loss":
        g = torch.Generator().manual_seed(1)
        advantages = torch.randn(3, generator=g)
        old_logps = wanted.detach() + 0.3 * torch.randn(wanted.shape, generator=g)
        config = GRPOLossConfig(loss_type="dapo")
        objective = Objective(advantages, old_logps=old_logps, config=config, **given)
        wanted_loss = dapo(wanted, old_logps, advantages, mask)
    else:
        objective = Objective(**given)
        wanted_loss = (wanted * torch.arange(targets.shape[1])).sum() + wanted_entropy.sum()
    expected = torch.autograd.grad(wanted_loss, [*model.parameters()])
    out = model(**inputs, **call, fused_head=objective)
    torch.testing.assert_close(out.logps, wanted.detach(), rtol=1e-4, atol=1e-4, check_dtype=False)
    torch.testing.assert_close(out.entropy, wanted_entropy, rtol=1e-4, atol=1e-4)
    loss = out.loss
    if asked == "logps":
        loss = (out.logps * torch.arange(targets.shape[1])).sum() + out.entropy.sum()
    loss.backward()
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-4, abs=1e-5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        if gradient.norm() > 1e-7:
            assert relative_error(parameter.grad, gradient) < 2e-4


@pytest.mark.parametrize("integration", ("transformers", "liger", "verl"))
def test_targets_that_are_out(integration):
    """An error where the kept set lacks the target."""
    batch, _ = batch_with_support()
    given = (batch.hidden, batch.weight, batch.targets)

    def out_of(targets, V):
        wrong = (targets.clamp(min=0).flatten() + 1) % V
        return Support(wrong, torch.arange(len(wrong) + 1))

    with pytest.raises(ValueError, match="support"):
        if integration == "verl":
            linear_cross_entropy(*given, support=out_of(batch.targets, 101))
        elif integration == "liger":
            FusedLinearGRPOLoss(beta=0.1, loss_type="grpo")(
                *given, torch.ones_like(batch.mask), torch.zeros(B), ref_input=batch.hidden,
                ref_weight=batch.weight, support=out_of(batch.targets, 101),
            )  # fmt: skip
        else:
            model, inputs, labels = model_with_labels()
            attach_fused_head(model)
            objective = Objective(support=out_of(labels[:, 1:], V))
            model(**inputs, labels=labels, fused_head=objective)

"""Completions with tokens that the policy did not sample, which the model alone sees."""

import random
from dataclasses import replace

import pytest
import torch

from examples import tool_use
from grpo_kernels import reference
from grpo_kernels.hf_head import head_of
from grpo_kernels.training import Completion, SamplingParams, load_model
from grpo_kernels.training import metrics as of
from grpo_kernels.training.policy import positions
from grpo_kernels.training.rollout import RolloutError
from tests.helpers.tiny_models import make_tokenizer
from tests.helpers.trainer_runs import assert_same_grads, config_of, rows_of, trainer_of

pytestmark = pytest.mark.usefixtures("real_memory", "curves")
TOOL = [7, 8, 9]  # what a tool says, in tokens


class Turns:
    """Samples two stretches by the model's own `generate`, with a tool's tokens between them."""

    def __init__(self, inner, ce_weight=None):
        self.inner, self.ce_weight = inner, ce_weight
        self.draw = random.Random(0)

    def __call__(self, prompts, count, sampling):
        firsts = self.inner(prompts, count, replace(sampling, max_new_tokens=3))
        so_far = [[*prompts[i // count], *one.token_ids, *TOOL] for i, one in enumerate(firsts)]
        seconds = self.inner(so_far, 1, replace(sampling, max_new_tokens=3))
        return [self.joined(a, b) for a, b in zip(firsts, seconds, strict=True)]

    def joined(self, first, second):
        ids = [*first.token_ids, *TOOL, *second.token_ids]
        mine = [[True] * len(first.token_ids), [False] * 3, [True] * len(second.token_ids)]
        own = [x for part in mine for x in part]
        weights = None
        if self.ce_weight is not None:
            weights = [0.0 if x else self.ce_weight for x in own]
        logps = None
        if first.logps is not None:
            logps = [*first.logps, *[-5.0] * 3, *second.logps]
        return Completion(ids, second.ended, logps, sampled=own, ce_weights=weights)


def with_turns(config, **options):
    from grpo_kernels.training.rollout import GenerateRollout

    trainer = trainer_of(config)
    own = trainer.sampler.rollout
    assert isinstance(own, GenerateRollout)
    trainer.sampler.rollout = Turns(own, **options)
    return trainer


def exact_gradients(config, samples, pad_id, ce_weight):
    """By the plain model over whole sequences, in float64, with the reference's loss."""
    model, _ = load_model(config)
    model = model.double()
    longest = max(map(len, samples.prompts))
    T = samples.mask.shape[1]
    ids = torch.full((len(samples.completions), longest + T), pad_id)
    attention = torch.zeros_like(ids)
    mask = torch.zeros(len(ids), T)
    for i, one in enumerate(samples.completions):
        prompt = samples.prompts[samples.prompt_of[i]]
        end = longest + len(one.token_ids)
        ids[i, longest - len(prompt) : end] = torch.tensor([*prompt, *one.token_ids])
        attention[i, longest - len(prompt) : end] = 1
        mask[i, : len(one.sampled)] = torch.tensor(one.sampled).float()
    states = model.base_model(
        ids, attention_mask=attention, position_ids=positions(attention)
    ).last_hidden_state[:, -T - 1 : -1]
    ce = None
    if ce_weight is not None:
        there = attention[:, longest:] * (1 - mask)
        ce = ce_weight * there / mask.sum()
    out = reference.fused_grpo_loss(
        states, head_of(model).weight, ids[:, longest:], samples.advantages.double(), mask,
        config=config.loss_config(), ce_weights=ce,
    )  # fmt: skip
    out.loss.backward()
    return out, {f"model.{n}": p.grad.float() for n, p in model.named_parameters()}


def gradient_of(trainer, samples):
    grads = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer.updates.optimizer, "step", lambda *_, **__: grads.update(
                {n: p.grad.clone() for n, p in trainer.policy.named_parameters()}
            ),
        )  # fmt: skip
        metrics = trainer.updates(samples, 1, 0, list(range(len(samples.texts))))
    return grads, metrics


@pytest.mark.parametrize("ce_weight", (None, 0.5))
@pytest.mark.parametrize("share_prompts", (True, False))
def test_the_gradient_is_that_of_whole_sequences(share_prompts, ce_weight, tiny_model, tmp_path):
    config = config_of(
        tiny_model, tmp_path, share_prompts=share_prompts, max_grad_norm=1e9, micro_batch_size=3,
        max_completion_length=9, skip_untrained=False,
    )  # fmt: skip
    trainer = with_turns(config, ce_weight=ce_weight)
    trainer.step = 1
    samples = trainer.sampling(trainer.train_problems[:4], 1, of.Clock(torch.device("cpu")))
    grads, metrics = gradient_of(trainer, samples)
    out, expected = exact_gradients(config, samples, trainer.tokenizer.pad_token_id, ce_weight)
    assert_same_grads(grads, expected, 2e-5)
    assert metrics["loss"] == pytest.approx(out.loss.item(), rel=1e-4, abs=1e-6)
    assert metrics["tokens"] == sum(samples.sampled_lengths) == sum(samples.lengths) - 16 * 3
    if ce_weight is not None:
        assert metrics["ce_nll"] == pytest.approx(out.metrics["ce_nll"].item(), rel=1e-4)
    # That mask as what the model sees as well is another gradient: this test would see it.
    hidden = type(trainer.policy).hidden
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(trainer.policy), "hidden",
            lambda self, batch: hidden(self, replace(batch, attention=batch.mask)),
        )  # fmt: skip
        wrong, _ = gradient_of(trainer, samples)
    with pytest.raises(AssertionError):
        assert_same_grads(wrong, expected, 2e-2)


def test_a_part_without_rows_counts_for_nothing(tiny_model, tmp_path):
    """A process has one where others have more micro-batches."""
    config = config_of(tiny_model, tmp_path, max_grad_norm=1e9, max_completion_length=9)
    trainer = with_turns(config, ce_weight=0.5)
    trainer.step = 1
    samples = trainer.sampling(trainer.train_problems[:4], 1, of.Clock(torch.device("cpu")))
    expected, _ = gradient_of(trainer, samples)
    plan = trainer.scorer.plan
    trainer.scorer.plan = lambda *args: [*plan(*args), []]
    grads, _ = gradient_of(trainer, samples)
    assert_same_grads(grads, expected, 1e-6)


def test_groups_of_equal_rewards_still_learn_to_predict(tiny_model, tmp_path):
    """Their advantages are 0, and the cross-entropy is not."""
    options = {"steps": 1, "max_completion_length": 9}
    moved = {}
    for ce_weight in (None, 0.5):
        trainer = with_turns(
            config_of(tiny_model, tmp_path, name=str(ce_weight), **options), ce_weight=ce_weight
        )
        trainer.sampling.rewards = {"noise": lambda prompts, texts, **_: [1.0] * len(texts)}
        before = [p.detach().clone() for p in trainer.policy.parameters()]
        trainer.train()
        after = trainer.policy.parameters()
        moved[ce_weight] = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert moved == {None: False, 0.5: True}


def test_a_run_counts_what_the_policy_sampled(tiny_model, tmp_path):
    seen = []
    trainer = with_turns(config_of(tiny_model, tmp_path, max_completion_length=9))
    folder = trainer.train(lambda row, samples: seen.append(samples))
    for row, samples in zip(rows_of(folder), seen, strict=True):
        own = [sum(c.sampled) for c in samples.completions]
        assert row["completion_length"] == pytest.approx(sum(own) / len(own))
        assert row["completion_length"] <= 6 and max(samples.lengths) > 6
        # Rewards are of the whole text.
        tool = trainer.tokenizer.decode(TOOL)
        assert all(tool in text for text in samples.texts)


def test_the_samplers_log_probs_are_compared_where_it_sampled(tiny_model, tmp_path):
    """Those of the tool, -5 here, are nobody's."""

    class Told(Turns):
        def __call__(self, prompts, count, sampling):
            done = super().__call__(prompts, count, sampling)
            return [replace(one, logps=self.told(i // count, prompts, one))
                    for i, one in enumerate(done)]  # fmt: skip

        def told(self, place, prompts, one):
            ids = torch.tensor([[*prompts[place], *one.token_ids]])
            with torch.no_grad():
                logits = self.inner.policy.model(ids).logits[0, -len(one.token_ids) - 1 : -1]
            logps = logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            own = zip(logps.tolist(), one.sampled, strict=True)
            return [x if mine else -50.0 for x, mine in own]

    config = config_of(
        tiny_model, tmp_path, max_completion_length=9, is_correction="token_truncate",
        rollout="vllm", vllm_mode="server",
    )  # fmt: skip
    trainer = trainer_of(config, rollout=lambda policy: None)
    from grpo_kernels.training.rollout import GenerateRollout

    trainer.sampler.rollout = Told(GenerateRollout(trainer.policy, trainer.tokenizer))
    rows = rows_of(trainer.train())
    assert all(row["sampler_gap_max"] < 1e-4 for row in rows)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"sampled": [True]}, r"completions\[0\].sampled: expected 9 bools, .*; got \[True\], 1"),
        ({"sampled": [False] * 9}, "sampled: expected 9 bools, one per token, and one that is tr"),
        ({"sampled": [1] * 9}, r"sampled: expected 9 bools, .*; got \[1, 1, 1, 1, 1\]"),
        ({"ce_weights": [1.0]}, r"ce_weights: expected 9 finite numbers, one per token; got \[1.0"),
        ({"ce_weights": [float("nan")] * 9}, "ce_weights: expected 9 finite numbers"),
    ),
)
def test_what_is_no_turn_is_refused(change, message, tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, max_completion_length=9)
    trainer = with_turns(config)
    whole = trainer.sampler.rollout

    def broken(prompts, count, sampling):
        done = whole(prompts, count, sampling)
        first = replace(done[0], token_ids=[65] * 9, sampled=None, **{})
        return [replace(first, **change), *done[1:]]

    trainer.sampler.rollout = broken
    with pytest.raises(RolloutError, match=message):
        trainer.train()


# The example


@pytest.mark.parametrize(
    ("text", "put_in"),
    (
        ("<calc>12*7</calc>", "\n<result>84</result>\n"),
        ("so <calc> 12 * 7 </calc>", "\n<result>84</result>\n"),
        ("<calc>12*7</calc><", ""),
        ("<calc>12*7</calc> and", ""),
        ("<calc>12+7</calc>", ""),
        ("<calc>12*7", ""),
        ("", ""),
    ),
)
def test_calls_are_answered(text, put_in):
    assert tool_use.answer_to(text) == put_in


class Scripted:
    """Says the next of its texts for each prompt, up to the room that there is."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.asked = tokenizer, list(texts), []

    def update_weights(self):
        self.asked.append("weights")

    def __call__(self, prompts, count, sampling):
        assert sampling.stop == ("</answer>", "</calc>")
        done = []
        for prompt in prompts:
            for _ in range(count):
                ids = self.tokenizer.encode(self.texts.pop(0))[: sampling.max_new_tokens]
                done.append(Completion(ids, True, [-1.0] * len(ids)))
            self.asked.append(self.tokenizer.decode(prompt))
        return done


def test_a_completion_may_call_several_times():
    tokenizer = make_tokenizer()
    inner = Scripted(
        tokenizer, "<calc>8*17</calc>", "<answer>5</answer>",  # two of the first prompt
        "<calc>136*5</calc>", "<answer>680</answer>", "nobody asked",
    )  # fmt: skip
    rollout = tool_use.WithCalculator(inner, tokenizer)
    rollout.update_weights()
    sampling = SamplingParams(200, stop=("</answer>",))
    called, other = rollout([tokenizer.encode("Q")], 2, sampling)
    text = "<calc>8*17</calc>\n<result>136</result>\n<calc>136*5</calc>\n<result>680</result>\n"
    assert tokenizer.decode(called.token_ids) == text + "<answer>680</answer>" and called.ended
    assert inner.asked[:2] == ["weights", "Q"]
    assert inner.asked[2] == "Q<calc>8*17</calc>\n<result>136</result>\n"
    assert inner.asked[3] == "Q" + text
    own = [i for i, mine in zip(called.token_ids, called.sampled, strict=True) if mine]
    said = "<calc>8*17</calc><calc>136*5</calc><answer>680</answer>"
    assert tokenizer.decode(own) == said
    assert len(called.logps) == len(called.token_ids) and set(called.logps) == {-1.0, 0.0}
    assert tokenizer.decode(other.token_ids) == "<answer>5</answer>" and all(other.sampled)


def test_there_is_room_for_what_is_put_in():
    tokenizer = make_tokenizer()
    for most in (17, 30, 39, 40, 42):
        inner = Scripted(tokenizer, "<calc>8*17</calc>", *["<answer>136</answer>"] * 5)
        rollout = tool_use.WithCalculator(inner, tokenizer)
        (one,) = rollout([[65]], 1, SamplingParams(most, stop=("</answer>",)))
        assert len(one.token_ids) <= most and len(one.sampled) == len(one.token_ids)
        # A result that the model cannot go on from is not put in.
        assert all(one.sampled) == (most <= 39)

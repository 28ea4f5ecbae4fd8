"""Columns with a planted cause, which the ranking names first, and steps with none."""

import math
import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from grpo_kernels import group_advantages, grpo_loss
from grpo_kernels.explain import Thresholds, explain
from grpo_kernels.explain.causes import rank
from tests.helpers.batches import config

B, T, G, V = 64, 300, 8, 64


@cache
def clean(seed, **options):
    """A step as a run has it: peaked softmaxes of which targets are samples, eight groups."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, T + 1, (B,), generator=g)
    if seed % 2:
        lengths = (5 * 60 ** torch.rand(B, generator=g)).long()
    peaked = torch.where(torch.rand(B, T, 1, generator=g) < 0.6, 12.0, 3.0)
    logp = (peaked * torch.randn(B, T, V, generator=g)).log_softmax(-1)
    targets = torch.multinomial(logp.exp().view(-1, V), 1, generator=g).view(B, T)
    logps, entropy = logp.gather(-1, targets[..., None])[..., 0], -(logp.exp() * logp).sum(-1)
    old, ref, new = (logps + size * torch.randn(B, T, generator=g) for size in (0.07, 0.15, 0.03))
    tensors = {"old_logps": old, "ref_logps": ref, "config": config(beta=0.04, **options),
               "sampling_logps": old + 0.02 * torch.randn(B, T, generator=g)}  # fmt: skip
    rewards = torch.rand(B // G, G, generator=g) < torch.rand(B // G, 1, generator=g) / 2 + 0.25
    rewards = rewards.float()
    rewards[:, :2], rewards[:, 2:4] = 0.0, 1.0  # no group of one odd reward
    args = group_advantages(rewards.flatten(), G), torch.arange(T) < lengths[:, None]
    out = grpo_loss(logps, *args, entropy=entropy, **tensors)
    known = {"groups": G, "truncated": lengths >= 297, "next_logps": new}
    return explain(out, targets, *args, **tensors, **known)


class Planted:
    """Columns of a clean step, which a row of the table changes."""

    def __init__(self, seed):
        e, self.g = clean(seed), torch.Generator().manual_seed(seed)
        self.columns, self.ids = dict(e.columns), e.token_ids.clone()
        self.sequence, self.position, self.N = e.sequence, e.position.clone(), len(e.sequence)
        self.facts = [dict(row) for row in e.sequences]
        self.ends = torch.cat([e.sequence.diff() > 0, torch.tensor([True])])
        self.all = torch.ones(self.N, dtype=torch.bool)

    def few(self, count):
        """Tokens with an advantage."""
        at = (self.columns["advantage"] != 0).nonzero()[:, 0]
        chosen = at[torch.randperm(len(at), generator=self.g)[:count]]
        return torch.zeros_like(self.all).index_fill(0, chosen, True)

    def of(self, *sequences):
        return torch.isin(self.sequence, torch.tensor(sequences))

    def noise(self, size):
        return size * torch.randn(self.N, generator=self.g)

    def set(self, at, share=0.0, **columns):
        """Gives tokens these values, and together this share of the gradient."""
        for name, x in columns.items():
            self.columns[name] = torch.where(at, x, self.columns.get(name, torch.zeros(self.N)))
        if share:
            part = self.columns["gradient_share"]
            others = part * (1 - share) / part[~at].sum()
            self.columns["gradient_share"] = torch.where(at, share / at.sum(), others)
        return at

    def fact(self, name, values):
        for row, x in zip(self.facts, values, strict=True):
            row[name] = x

    def explanation(self):
        groups = [{"group": row["group"], "sequences": []} for row in self.facts[::G]]
        for i in range(B):
            groups[i // G]["sequences"].append(i)
        return replace(
            clean(0), columns=self.columns, sequence=self.sequence, position=self.position,
            sequences=self.facts, groups=groups, token_ids=self.ids, causes=[],
        )  # fmt: skip


def merged(s):
    """Gives one sequence the tokens of twelve."""
    s.sequence = s.sequence.clamp(min=12)
    return s.set(s.sequence == 12, 0.4)


def one_reward(s, name, odd):
    s.fact(name, [odd * (i == 37) for i in range(B)])
    return s.set(s.of(37), 0.4)


def after_a_tool(s):
    s.position[s.position >= 15] += 6
    s.set(s.position == 21, sampler_gap=1.5)


def rare_ids(s):
    s.ids[at := s.few(120)] = 1000 + torch.arange(120)
    return s.set(at, sampler_gap=1.0)


def kl_of_few(s):
    s.set(s.ends, kl=math.nan)  # as where no reference scored it
    return s.set(s.few(1), kl=3e4)


def large_reward(s):
    s.set(s.all, advantage=0.1 * s.columns["advantage"])
    return s.set(s.of(20), 0.4, advantage=4.0)


def cut_short(s, share=0.6):
    s.fact("truncated", [i % 3 > 0 for i in range(B)])
    return s.set(s.sequence % 3 > 0, share)


# What is planted; the cause that is named, words of its text, the thresholds that decide if it is.
PLANTED = {
    "ratio": (lambda s: s.set(s.few(6), 0.4, ratio=148.0), "ratio",
              "the ratio of 6 tokens is above 2, and no clip bounds it", "share ratio"),
    "kl": (lambda s: s.set(s.few(3), 0.3, kl_loss=2e-3, kl=2e4), "kl",
           "outweighs the policy term", "times"),
    "kl_of_few": (kl_of_few, "kl", "1 token with", "mean_kl"),
    "kl_all_over": (lambda s: s.set(s.all, kl_loss=2 * (x := s.columns["loss"].abs()), loss=3 * x),
                    "kl", "spread over many tokens", "kl"),
    "short": (lambda s: s.set(s.of(3, 20) & (s.position == 0), 0.4, weight=1.0), "length",
              "the tokens of 2 sequences weigh", "length"),
    "long": (merged, "length", "the length of 1 sequence is over 5 times", "long"),
    "group": (lambda s: one_reward(s, "reward", 1.0), "group",
              "the reward of sequence 37 differs", "sequence"),
    "sampler_ends": (lambda s: s.set(s.ends, sampler_gap=2.0), "sampler",
                     "at the ends of completions", ""),
    "sampler_everywhere": (lambda s: s.set(s.all, sampler_gap=s.noise(0.17)), "sampler",
                           "all over", "median_gap"),
    "sampler_after_a_tool": (after_a_tool, "sampler", "right after a gap in the mask", ""),
    "sampler_of_rare_ids": (rare_ids, "sampler", "at ids seen once", "gap"),
    "shifted": (lambda s: s.set(s.all, logp=-9 + s.noise(2.0)), "unsampled",
                "probably shifted by one", ""),
    "colder": (lambda s: s.set(s.all, logp=0.5 * s.columns["logp"]), "unsampled",
               "sampled at a lower temperature", "mean_surprise"),
    "prompt_in_mask": (lambda s: s.set((s.sequence % 4 == 0) & (s.position < 15), logp=-17.0),
                       "unsampled", "text of a prompt, a template or a tool", "tokens"),
    "banned": (lambda s: s.set(s.few(1), logp=-40.0), "unsampled", "", "surprise"),
    "large_reward": (large_reward, "advantage",
                     "the advantage of 1 sequence is over 10 times the median one", ""),
    "collapse": (lambda s: s.set(s.all, entropy=0.004, logp=-0.004), "entropy", "", "entropy"),
    "truncated": (cut_short, "truncated", "with 60 % of the gradient", "truncated"),
    "learning_rate": (lambda s: s.set(s.all, moved=s.noise(0.6)), "learning_rate",
                      "moved log-probs by 0.4", "moved"),
    "drift": (lambda s: s.set(s.all, log_ratio=(x := s.noise(0.5)), logp=s.columns["logp"] + x),
              "learning_rate", "half of all log-probs", "moved"),
    "single_token": (lambda s: s.set(s.few(1), 0.3), "token", "", ""),
    "importance_weight": (lambda s: s.set(s.few(1), 0.3, importance_weight=30.0),
                          "importance_weight", "weight of 1 token is above 2; ", "weight"),
    "importance_mask": (lambda s: s.set(s.sequence % 2 > 0, dropped=1.0, importance_weight=0.0),
                        "importance_weight", "masks drop", "dropped"),
    "clipped": (lambda s: s.set(s.all, clip=(s.sequence % 3 > 0).float(), gradient=0.0),
                "clipped", "", "clipped"),
    "not_finite": (lambda s: s.set(s.few(2), gradient=math.nan), "not_finite",
                   "of 2 tokens is NaN or infinite", ""),
}  # fmt: skip


@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_cause_comes_first(plant, seed):
    """With its tokens, where it is, and not at all beyond a threshold that nothing passes."""
    step, (change, name, words, limits) = Planted(seed), PLANTED[plant]
    at = change(step)
    explanation = step.explanation()
    causes = rank(explanation)
    assert [x.name for x in causes][:1] == [name], causes
    assert words in causes[0].text
    assert re.search(r"sequence \d+ token \d+ (-?\d|nan)", causes[0].text)
    at = step.all if at is None else at
    places = zip(step.sequence[at].tolist(), step.position[at].tolist(), strict=True)
    assert 0 < len(causes[0].tokens) <= 20 and set(causes[0].tokens) <= set(places)
    for limit in limits.split():  # of few tokens the KL is most of all tokens', too
        beyond = Thresholds(**{"mean_kl": 1e6, limit: 1e-9 if limit == "entropy" else 1e6})
        assert name not in {x.name for x in rank(explanation, beyond)}, limit


CLEAN = {
    "dapo": {}, "grpo": {"loss_type": "grpo"}, "gspo": {"loss_type": "gspo"},
    "corrected": {"is_correction": "token_truncate"}, "entropy": {"top_entropy_quantile": 0.2},
    "bonus": {"entropy_coef": 0.01, "loss_type": "luspo"},
}  # fmt: skip


@pytest.mark.parametrize("options", CLEAN)
@pytest.mark.parametrize("seed", range(2))
def test_a_clean_step_has_no_cause(seed, options):
    explanation = clean(seed, **CLEAN[options])
    assert explanation.causes == [], str(explanation)
    assert re.match(
        r"no cause stands out: the largest shares of the gradient are \d\.\d % \(sequence \d+, "
        r"token \d+\) and \d+\.\d % \(sequence \d+\)$", str(explanation),
    )  # fmt: skip


@pytest.mark.parametrize(
    "plants", (("short", "sampler_ends"), ("truncated", "single_token"), ("drift", "ratio"))
)
def test_two_causes_are_both_named(plants):
    """The one with the larger share first, truncated completions last."""
    step = Planted(1)
    for plant in plants:
        PLANTED[plant][0](step)
    causes = rank(step.explanation())
    assert {PLANTED[plant][1] for plant in plants} <= {x.name for x in causes}
    shares = [x.share for x in causes if x.name != "truncated"]
    assert shares == sorted(shares, reverse=True)
    assert "truncated" not in [x.name for x in causes[:-1]]


def test_a_fault_comes_before_the_truncation_of_all():
    """A limit on the length that cuts most completions is no cause of a spike."""
    step = Planted(0)
    cut_short(step, 0.9)
    PLANTED["learning_rate"][0](step)
    assert rank(step.explanation())[0].name == "learning_rate"


def test_a_clip_that_leaves_the_gradient_takes_none():
    step = Planted(0)
    step.set(step.all, clip=1.0)
    assert not rank(step.explanation())
    step.set(step.all, clip=math.nan, gradient=0.0)  # nor does one that is not known
    assert not rank(step.explanation())


def test_columns_that_a_file_may_lack():
    """Causes rank what is there, of the other trainers' exports too."""
    step = Planted(0)
    PLANTED["sampler_everywhere"][0](step)
    whole = step.explanation()
    for missing in whole.columns:
        columns = {name: x for name, x in whole.columns.items() if name != missing}
        names = {x.name for x in rank(replace(whole, columns=columns))}
        assert names == (set() if missing == "sampler_gap" else {"sampler"})
    assert rank(replace(whole, columns={})) == []


def explained(logps, advantages, mask=None, *, groups=None, **options):
    """The explanation of a few log-probs."""
    args = torch.tensor(advantages), mask
    out = grpo_loss(logps, *args, **options)
    return explain(out, None, *args, groups=groups, **options)


def test_steps_that_have_little():
    logps, signs = torch.full((4, 6), -0.5), [1.0, -1.0, 1.0, -1.0]
    nothing = explained(logps, [0.0] * 4)
    assert nothing.causes == [] and not nothing.columns["gradient_share"].any()
    mask = torch.zeros(4, 6, dtype=torch.bool)
    empty = explained(logps, signs, mask)
    assert empty.causes == [] and str(empty) == "no cause stands out: no token counts"
    mask[2, 3] = True
    one = explained(logps, signs, mask)
    assert one.causes == [] and one.columns["gradient_share"].tolist() == [1.0]
    assert explained(logps[:1], [1.0], groups=1).causes == []
    assert explained(torch.zeros(0, 5), []).causes == []


def test_a_token_of_cross_entropy_alone():
    logps, weights = torch.full((1, 3), -0.5), torch.tensor([[0.0, 0.5, 0.0]])
    more = {"ce_weights": weights, "ref_logps": logps - 1, "config": config(beta=0.1)}
    explanation = explained(logps, [1.0], torch.zeros(1, 3), **more)
    assert explanation.causes == [] and explanation.columns["gradient"].tolist() == [-0.5]
    assert explanation.columns["ratio"].isnan().all() and explanation.loss == 0.25
    assert explanation.sequences[0]["kl_share"] == 0.0

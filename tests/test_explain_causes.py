"""Steps with a planted cause, which the ranking names first, and steps with none."""

import math
import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch

from grpo_kernels import group_advantages, grpo_loss
from grpo_kernels.explain import Thresholds, explain
from grpo_kernels.explain.causes import rank
from tests.helpers.batches import config

T, G, V, END = 300, 8, 64, 3
BEFORE = ("old_logps", "ref_logps", "sampling_logps")


@cache
def samples(seed, B, temperature=1.0):
    """Ids, log-probs and entropy of samples at a temperature, scored at 1."""
    g = torch.Generator().manual_seed(seed)
    peaked = torch.where(torch.rand(B, T, 1, generator=g) < 0.6, 12.0, 3.0)
    logits = peaked * torch.randn(B, T, V, generator=g)
    drawn = torch.multinomial((logits / temperature).softmax(-1).view(-1, V), 1, generator=g)
    targets, logp = drawn.view(B, T), logits.log_softmax(-1)
    return targets, logp.gather(-1, targets[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


@dataclass
class Step:
    """A step as a run has it: peaked softmaxes of which targets are samples, eight groups."""

    seed: int
    B: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        B, self.g = self.B, torch.Generator().manual_seed(self.seed + 100)
        g = self.g
        lengths = (5 * 60 ** torch.rand(B, generator=g)).long() if self.seed % 2 else None
        self.lengths = torch.randint(5, T + 1, (B,), generator=g) if lengths is None else lengths
        self.targets, self.logps, self.entropy = (x.clone() for x in samples(self.seed, B))
        self.old_logps = self.logps + self.noise(0.07)
        self.ref_logps = self.logps + self.noise(0.15)
        self.sampling_logps = self.old_logps + self.noise(0.02)
        solved = torch.rand(B // G, 1, generator=g) * 0.5 + 0.25
        self.rewards = (torch.rand(B // G, G, generator=g) < solved).float()
        self.rewards[:, :2], self.rewards[:, 2:4] = 0.0, 1.0  # no group of one odd reward
        self.rewards = self.rewards.flatten()
        self.truncated = self.lengths >= 297
        self.rows, self.hole = torch.arange(B), 0
        self.targets[self.rows, self.lengths - 1] = END

    def noise(self, size):
        return size * torch.randn(self.B, T, generator=self.g)

    @property
    def mask(self):
        at = torch.arange(T)
        return (at < self.lengths[:, None]) & ((at < 15 - self.hole) | (at >= 15))

    def score(self, at, values):
        """Gives tokens these log-probs, by every model."""
        for name in ("logps", *BEFORE):
            setattr(self, name, torch.where(at, values(), getattr(self, name)))

    def somewhere(self, count, *, positive=None):
        """Tokens that are trained, of one sign of the advantage if it says so."""
        advantages = group_advantages(self.rewards, G)
        where = self.mask & (advantages != 0)[:, None]
        if positive is not None:
            where &= ((advantages > 0) == positive)[:, None]
        at = where.flatten().nonzero().flatten()
        chosen = torch.zeros(self.B * T, dtype=torch.bool)
        chosen[at[torch.randperm(len(at), generator=self.g)[:count]]] = True
        return chosen.view(self.B, T)

    def explain(self):
        mask, known = self.mask, {"groups": G, "truncated": self.truncated, **self.known}
        advantages = known.pop("advantages", group_advantages(self.rewards, G))
        tensors = {x: getattr(self, x).masked_fill(~mask, math.nan) for x in BEFORE}
        loss = config(**{"beta": 0.04, **self.options})
        logps = self.logps.masked_fill(~mask, math.inf)
        entropy = self.entropy.masked_fill(~mask, -math.inf)
        out = grpo_loss(logps, advantages, mask, entropy=entropy, config=loss, **tensors)
        return explain(out, self.targets, advantages, mask, config=loss, **tensors, **known)


class Planted(Step):
    """Faults of a step, a method each; some return the tokens that have it."""

    def ratio(self):
        at = self.somewhere(6, positive=False)
        self.old_logps = torch.where(at, self.logps - 5.0, self.old_logps)
        self.sampling_logps = self.old_logps + self.noise(0.02)
        return at

    def kl(self):
        at = self.somewhere(3)
        self.ref_logps = torch.where(at, self.logps + 10.0, self.ref_logps)
        return at

    def kl_of_one(self):
        """A token that is nothing in the loss."""
        self.options["beta"] = 0.0
        at = self.somewhere(1)
        self.ref_logps = torch.where(at, self.logps + 8.0, self.ref_logps)
        return at

    def kl_all_over(self):
        self.ref_logps = self.logps + 4.0 + self.noise(0.3)

    def short(self):
        self.options["loss_type"] = "grpo"
        self.lengths[[3, 20, 33, 51, 62]] = 1

    def long(self):
        """A sequence that a loss of sums over sequences has for a tenth of all tokens and more."""
        self.options |= {"loss_type": "luspo", "importance_sampling_level": "sequence"}
        self.lengths = self.lengths.clamp(max=12)
        self.lengths[9] = 300

    def group(self):
        self.rewards = torch.zeros(self.B)
        self.rewards[8:12] = 1.0
        self.rewards[37] = 1.0
        self.known["rewards"] = self.rewards
        self.lengths[8:16] = self.lengths[8:16].clamp(max=40)
        self.lengths[37] = 150

    def group_by_its_advantages(self):
        self.group()
        del self.known["rewards"]

    def sampler_ends(self):
        self.sampling_logps[self.rows, self.lengths - 1] -= 2.0

    def sampler_everywhere(self):
        self.sampling_logps += self.noise(0.17)

    def sampler_after_a_tool(self):
        self.lengths, self.hole = self.lengths.clamp(min=30), 6
        self.sampling_logps[:, 15] += 1.5

    def sampler_of_rare_ids(self):
        at = self.somewhere(120)
        self.targets[at] = 1000 + torch.arange(120)
        self.sampling_logps[at] -= 1.0

    def shifted(self):
        """Targets of the next position: log-probs are those of some other token."""
        self.logps = -9.0 + self.noise(2.0)
        self.old_logps = self.logps + self.noise(0.07)
        self.ref_logps = self.logps + self.noise(0.15)
        self.sampling_logps = self.old_logps + self.noise(0.02)

    def hotter(self, temperature=1.5):
        self.targets, self.logps, self.entropy = samples(self.seed, self.B, temperature)
        for name in BEFORE:
            setattr(self, name, self.logps + self.noise(0.02))

    def colder(self):
        self.hotter(0.5)

    def large_reward(self):
        """Advantages that nothing scales, and no group is known."""
        self.known |= {"groups": None, "advantages": group_advantages(self.rewards, G)}
        self.lengths[20], self.known["advantages"][20] = 300, 40.0

    def prompt_in_mask(self):
        """Fifteen tokens of a template in a quarter of the sequences."""
        at = torch.zeros(self.B, T, dtype=torch.bool)
        at[::4, :15] = True
        self.score(at, lambda: -17.0 + self.noise(0.05))
        return at & self.mask

    def banned(self):
        at = self.somewhere(1)
        self.score(at, lambda: torch.tensor(-40.0))
        return at

    def collapse(self):
        self.entropy = self.entropy * 0 + 0.004 * torch.rand(self.B, T, generator=self.g)
        self.score(torch.tensor(True), lambda: -self.entropy + self.noise(1e-4))

    def cut_short(self):
        self.truncated = torch.rand(self.B, generator=self.g) < 0.4
        self.lengths[self.truncated] = T

    def learning_rate(self):
        self.known["next_logps"] = self.logps + self.noise(0.6)

    def drift(self):
        """Several updates on one rollout, with a learning rate that is too high."""
        self.old_logps = self.logps + self.noise(0.5)
        self.sampling_logps = self.old_logps + self.noise(0.02)

    def importance_weights(self):
        """Small differences add up over a sequence, whose weight the mask then drops."""
        self.options |= {"is_correction": "sequence_mask", "is_clip_max": 1.5}
        self.sampling_logps = (
            self.old_logps - 0.015 * torch.randn(self.B, 1, generator=self.g).abs()
        )
        self.lengths = self.lengths.clamp(min=80)

    def importance_cap(self):
        self.options |= {"is_correction": "sequence_truncate", "is_clip_max": 20.0}
        self.sampling_logps[::8] -= 4.0 / self.lengths[::8, None]

    def off_policy(self):
        self.options |= {"off_policy_threshold": 0.03}
        self.sampling_logps[::2] += 0.06

    def single_token(self):
        at = self.somewhere(1)
        self.known["d_hidden"] = torch.randn(self.B, T, 8, generator=self.g)
        self.known["d_hidden"][at] *= 1500.0
        return at

    def clipped(self):
        """Most tokens have left the clip range in the direction of their advantage."""
        sign = group_advantages(self.rewards, G).sign()[:, None]
        self.old_logps = self.logps - sign * (0.3 + self.noise(0.02).abs())
        self.sampling_logps = self.old_logps + self.noise(0.02)

    def not_finite(self):
        at = self.somewhere(2)
        self.logps[at] = math.nan
        return at


# The cause that is named, words of its text, and the thresholds that decide if it is.
PLANTED = {
    "ratio": ("ratio", "and no clip bounds it", "share ratio"),
    "kl": ("kl", "outweighs the policy term", "times"),
    "kl_of_one": ("kl", "1 token with", "mean_kl"),
    "kl_all_over": ("kl", "spread over many tokens", "kl"),
    "short": ("length", "the tokens of 5 sequences weigh", "length"),
    "long": ("length", "the length of 1 sequence is over 5 times", "long"),
    "group": ("group", "the reward of sequence 37 differs", "sequence"),
    "group_by_its_advantages": ("group", "sequence 37", ""),
    "sampler_ends": ("sampler", "at the ends of completions", ""),
    "sampler_everywhere": ("sampler", "all over", "median_gap"),
    "sampler_after_a_tool": ("sampler", "right after a gap in the mask", ""),
    "sampler_of_rare_ids": ("sampler", "at ids seen once", "gap"),
    "shifted": ("unsampled", "probably shifted by one", ""),
    "hotter": ("unsampled", "", "mean_surprise"),
    "colder": ("unsampled", "sampled at a lower temperature", ""),
    "large_reward": ("advantage", "", ""),
    "prompt_in_mask": ("unsampled", "text of a prompt, a template or a tool", "tokens"),
    "banned": ("unsampled", "", "surprise"),
    "collapse": ("entropy", "", "entropy"),
    "cut_short": ("truncated", "", "truncated"),
    "learning_rate": ("learning_rate", "moved log-probs by 0.4", "moved"),
    "drift": ("learning_rate", "half of all log-probs", ""),
    "single_token": ("token", "", ""),
    "importance_weights": ("importance_weight", "masks drop", ""),
    "importance_cap": ("importance_weight", "for several the largest, 20", "weight"),
    "off_policy": ("importance_weight", "masks drop", "dropped"),
    "clipped": ("clipped", "", "clipped"),
    "not_finite": ("not_finite", "is NaN or infinite", ""),
}


@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_cause_comes_first(plant, seed):
    """With its tokens, where it is, and not at all beyond a threshold that nothing passes."""
    step, (name, words, limits) = Planted(seed), PLANTED[plant]
    at = getattr(step, plant)()
    explanation = step.explain()
    assert [x.name for x in explanation.causes][:1] == [name], str(explanation)
    cause = explanation.causes[0]
    assert words in cause.text and re.search(r"sequence \d+ token \d+ (-?\d|nan)", cause.text)
    places = list(zip(explanation.sequence.tolist(), explanation.position.tolist(), strict=True))
    assert 0 < len(cause.tokens) <= 20 and set(cause.tokens) <= set(places)
    if at is not None:
        assert set(cause.tokens) <= {(int(b), int(t)) for b, t in at.nonzero()}
    assert rank(replace(explanation, causes=[])) == explanation.causes
    for limit in limits.split():  # of few tokens the KL is most of all tokens', too
        beyond = Thresholds(**{"mean_kl": 1e6, limit: 1e-9 if limit == "entropy" else 1e6})
        assert name not in {x.name for x in rank(explanation, beyond)}, limit


CLEAN = {
    "dapo": {}, "grpo": {"loss_type": "grpo"}, "gspo": {"loss_type": "gspo"},
    "corrected": {"is_correction": "token_truncate"}, "entropy": {"top_entropy_quantile": 0.2},
    "bonus": {"entropy_coef": 0.01, "loss_type": "luspo"},
}  # fmt: skip


@pytest.mark.parametrize("options", CLEAN)
@pytest.mark.parametrize("seed", range(4))
def test_a_clean_step_has_no_cause(seed, options):
    step = Step(seed, options=CLEAN[options])
    step.known["next_logps"] = step.logps + step.noise(0.03)
    explanation = step.explain()
    assert explanation.causes == [], str(explanation)
    assert re.match(
        r"no cause stands out: the largest shares of the gradient are \d\.\d % \(sequence \d+, "
        r"token \d+\) and \d+\.\d % \(sequence \d+\)$", str(explanation),
    )  # fmt: skip


@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize(
    "plants",
    (("ratio", "kl"), ("short", "sampler_ends"), ("learning_rate", "banned"),
     ("cut_short", "single_token"), ("drift", "ratio"), ("collapse", "kl")),
    ids="-".join,
)  # fmt: skip
def test_two_causes_are_both_named(plants, seed):
    """The one with the larger share first, truncated completions last."""
    step = Planted(seed)
    for plant in plants:
        getattr(step, plant)()
    causes = step.explain().causes
    assert {PLANTED[plant][0] for plant in plants} <= {x.name for x in causes}
    shares = [x.share for x in causes if x.name != "truncated"]
    assert shares == sorted(shares, reverse=True)
    assert "truncated" not in [x.name for x in causes[:-1]]


def test_shifted_targets_show_in_the_samplers_log_probs_too():
    step = Planted(0)
    sampler = step.sampling_logps
    step.shifted()
    step.sampling_logps = sampler
    assert {"unsampled", "sampler"} <= {x.name for x in step.explain().causes}


def tiny(logps, advantages, mask=None, **more):
    logps = torch.as_tensor(logps)
    out = grpo_loss(logps, torch.tensor(advantages), mask)
    return explain(out, None, torch.tensor(advantages), mask, **more)


def test_steps_that_have_little():
    B, T = 4, 6
    logps = torch.full((B, T), -0.5)
    nothing = tiny(logps, [0.0] * B)
    assert nothing.causes == [] and str(nothing) == "no cause stands out: no token has a gradient"
    assert not nothing.columns["gradient_share"].any()
    empty = tiny(logps, [1.0, -1.0, 1.0, -1.0], torch.zeros(B, T, dtype=torch.bool))
    assert empty.causes == [] and str(empty) == "no cause stands out: no token counts"
    assert [row["length"] for row in empty.sequences] == [0] * B
    one = torch.zeros(B, T, dtype=torch.bool)
    one[2, 3] = True
    one = tiny(logps, [1.0, -1.0, 1.0, -1.0], one)
    assert one.causes == [] and one.columns["gradient_share"].tolist() == [1.0]
    assert tiny(logps[:1], [1.0], groups=1).causes == []
    assert tiny(torch.zeros(0, 5), []).causes == []


def test_thousands_have_no_exponent():
    logps = torch.full((4, 6), -9.0)
    ref_logps = logps.clone()
    ref_logps[2, 3] += 8.5  # k3: exp(8.5) - 8.5 - 1
    more = {"ref_logps": ref_logps, "config": config(beta=0.1)}
    args = torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.ones(4, 6)
    causes = explain(grpo_loss(logps, *args, **more), None, *args, **more).causes
    assert "sequence 2 token 3 4,905" in causes[0].text


def test_a_token_of_cross_entropy_alone():
    logps, weights = torch.full((1, 3), -0.5), torch.tensor([[0.0, 0.5, 0.0]])
    args = torch.ones(1), torch.zeros(1, 3)
    more = {"ce_weights": weights, "ref_logps": logps - 1, "config": config(beta=0.1)}
    out = grpo_loss(logps, *args, **more)
    explanation = explain(out, None, *args, **more)
    assert explanation.causes == [] and explanation.columns["gradient"].tolist() == [-0.5]
    assert explanation.columns["ratio"].isnan().all() and explanation.loss == 0.25
    assert explanation.sequences[0]["kl_share"] == 0.0


def test_a_clip_that_leaves_the_gradient_takes_none():
    step = Planted(0, options={"loss_type": "cispo"})
    step.clipped()
    assert "clipped" not in {x.name for x in rank(step.explain(), Thresholds(clipped=0.1))}


def test_all_completions_truncated():
    step = Step(0)
    step.truncated[:] = True
    cause = step.explain().causes[0]
    assert (
        cause.name == "truncated"
        and "64 sequences ended at the limit of the length, with 100 %" in cause.text
    )
    assert cause.share == pytest.approx(1)


@pytest.mark.parametrize("plant", ("ratio", "shifted", "hotter", "learning_rate"))
def test_a_fault_comes_before_the_truncation_of_all(plant):
    """A limit on the length that cuts most completions is no cause of a spike."""
    step = Planted(0)
    getattr(step, plant)()
    step.truncated[:] = step.rows % 10 > 0
    assert step.explain().causes[0].name == PLANTED[plant][0]


def test_columns_that_a_file_may_lack():
    """Causes rank what is there, of the other trainers' exports too."""
    step = Planted(0)
    step.sampler_everywhere()
    whole = step.explain()
    for missing in whole.columns:
        columns = {name: x for name, x in whole.columns.items() if name != missing}
        names = {x.name for x in rank(replace(whole, columns=columns))}
        assert names == (set() if missing == "sampler_gap" else {"sampler"})
    assert rank(replace(whole, columns={})) == []

"""Causes of a step's loss, one function each, from an explanation alone.

The share of a cause that single tokens carry is their share of the gradient minus an average
token's, each; later such causes do not count these tokens. The share of a cause of the whole step
is the share of tokens, nats or gradient that shows it. So shares do not add up to 1. Truncated
completions come last: a length limit cuts many in calm steps too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.checks import check_number, convert_numbers
from .explanation import Cause, Explanation, shares, sums_of


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits from which a cause is named: numbers > 0, shares of 1, differences in nats."""

    share: float = 0.05  # of the gradient that tokens have beyond an equal part
    times: float = 10.0  # a token relative to the average one, an advantage to the median one
    ratio: float = 2.0  # of policy and old policy
    kl: float = 0.5  # share of the KL in the absolute loss of all tokens
    mean_kl: float = 0.1  # mean KL; a share of `tokens` has half of it
    length: float = 25.0  # weight of a sequence's tokens relative to the average token
    long: float = 5.0  # length of a sequence relative to the average one
    sequence: float = 0.15  # share of the gradient of a sequence beyond an equal part
    gap: float = 0.5  # difference of a token's log-prob to the sampler's
    median_gap: float = 0.1  # the same, for half of all tokens
    surprise: float = 12.0  # -log p of a token minus the entropy; twice this is enough for one
    mean_surprise: float = 0.3  # the same as a mean over the step; 0 for samples of the policy
    tokens: float = 0.01  # share that has a gap or a surprise; largest share with half of the KL
    entropy: float = 0.05  # mean entropy
    truncated: float = 0.2  # share of the gradient in truncated completions
    moved: float = 0.2  # of log-probs: mean by the optimizer step, or median since the old policy
    weight: float = 2.0  # importance weight
    dropped: float = 0.2  # share of dropped tokens
    clipped: float = 0.5  # share of tokens whose gradient a clip removes

    def __post_init__(self) -> None:
        convert_numbers(self)
        for field in fields(self):
            check_number(f"thresholds.{field.name}", getattr(self, field.name), "> 0")


# The text of a cause; its worst tokens follow, with a number each.
_TEXTS = {
    "not_finite": "the loss or gradient of {tokens} is NaN or infinite; log-probs",
    "kl": "the KL term outweighs the policy term at {tokens}; the share of the loss or gradient "
        "there is {share:.1%} beyond an equal part (limit {limit.share:.0%}); KL",
    "kl_all_over": "the KL term is {share:.0%} of the absolute loss (limit {limit.kl:.0%}), spread "
        "over many tokens; KL",
    "kl_of_few": "{tokens} with {share:.0%} of the KL, whose mean is {mean:.2g} nats (limit "
        "{limit.mean_kl:g}); KL",
    "ratio": "the ratio of {tokens} is above {limit.ratio:g}, and no clip bounds it",
    "weight": "the importance weight of {tokens} is above {limit.weight:g}",
    "weight_cap": "the importance weight of {tokens} is above {limit.weight:g}, and for several "
        "the largest, {largest:g}",
    "masks": "masks drop {share:.0%} of the tokens (limit {limit.dropped:.0%}), because the "
        "sampler's log-probs differ from the policy's; differences",
    "advantage": "the advantage of {sequences} is over {limit.times:g} times the median one, "
        "{usual:.2g}",
    "short": "the tokens of {sequences} weigh over {limit.length:g} times the average, because few "
        "tokens share the weight of a short sequence",
    "long": "the length of {sequences} is over {limit.long:g} times the average, with {share:.0%} "
        "of the gradient beyond an equal part (limit {limit.sequence:.0%}); lengths",
    "group": "the reward of sequence {b} differs from those of the {others} others of group "
        "{group}, so that its advantage is {advantage:+.2f}",
    "token": "no other cause explains the gradient of {tokens}",
    "sampler": "the sampler's log-probs differ from the policy's at {tokens} of {scored}, {where}; "
        "the median difference is {median:.2g} nats (limit {limit.median_gap:g}; {limit.gap:g} for "
        "a token); differences",
    "surprise": "the mean of -log p is {mean:.2f} nats above the entropy's (limit "
        "{limit.mean_surprise:g}), and equal for samples of the policy: targets are probably "
        "shifted by one, or sampled at a higher temperature than the loss has; -log p less entropy",
    "no_surprise": "the mean of -log p is {mean:.2f} nats below the entropy's (limit "
        "{limit.mean_surprise:g}), and equal for samples of the policy: tokens were probably "
        "sampled at a lower temperature than the loss has; -log p less entropy",
    "unsampled": "the policy can hardly have sampled {tokens}, where -log p is over "
        "{limit.surprise:g} nats above the entropy, as in text of a prompt, a template or a tool, "
        "in padding or banned ids that the mask counts; -log p less entropy",
    "entropy": "the mean entropy is {mean:.2g} nats (limit {limit.entropy:g}), and {share:.0%} of "
        "the tokens are below it: completions of a prompt will be alike; highest entropies",
    "clipped": "a clip takes the gradient from {share:.0%} of the tokens with an advantage (limit "
        "{limit.clipped:.0%}); ratios",
    "moved": "the step moved log-probs by {mean:.2g} nats on average (limit {limit.moved:g}); "
        "changes",
    "log_ratio": "half of all log-probs are {mean:.2g} nats or more from the old policy's (limit "
        "{limit.moved:g}); changes",
    "truncated": "{sequences} ended at the limit of the length, with {share:.0%} of the gradient "
        "(limit {limit.truncated:.0%}); shares of tokens",
    "carried": "; the share of the gradient there is {part:.1%}, {share:.1%} beyond an equal part "
        "(limit {least:.0%})",
}  # fmt: skip


class Evidence(NamedTuple):
    """A cause: its text in `_TEXTS`, share, tokens, a number of each, and values of the text."""

    text: str
    share: float
    chosen: Tensor
    size: Tensor
    values: Mapping[str, Any] = {}


def rank(explanation: Explanation, thresholds: Thresholds = Thresholds()) -> list[Cause]:
    """Returns the causes in an explanation's columns, largest share first, `truncated` last."""
    step = _Step(explanation, thresholds)
    known = _CAUSES.items() if step.N else ()
    causes = [step.cause(name, why, x) for name, (find, why) in known for x in find(step)]
    return sorted(causes, key=lambda cause: (cause.name == "truncated", -cause.share))


class _Step:
    """The columns by name, NaN where there is none, and each token's share of the gradient."""

    def __init__(self, explanation: Explanation, thresholds: Thresholds) -> None:
        self.explanation, self.limit, columns = explanation, thresholds, explanation.columns
        self.sequence, self.N = explanation.sequence, len(explanation.sequence)
        self.B = len(explanation.sequences)
        # Without gradients, by the loss.
        ones = torch.ones(self.N, dtype=torch.float32, device="cpu")
        self.part = shares(columns.get("gradient_share", columns.get("loss", ones)))
        self.policy = ~columns.get("advantage", self.part).isnan()

    def __getitem__(self, name: str) -> Tensor:
        column = self.explanation.columns.get(name)
        return torch.full_like(self.part, torch.nan) if column is None else column

    def fact(self, name: str) -> Tensor:
        """A fact of each sequence, float64 `[B]`, NaN where it is unknown."""
        values = [row.get(name) for row in self.explanation.sequences]
        numbers = [float("nan") if x is None else float(x) for x in values]
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")

    def sums(self, x: Tensor) -> Tensor:
        return sums_of(x, self.sequence, self.B)

    def share(self, chosen: Tensor) -> float:
        """The share of these tokens in the policy's."""
        return float((chosen & self.policy).sum() / self.policy.sum().clamp(min=1))

    def take(self, chosen: Tensor) -> None:
        """Excludes the gradient of these tokens from the following causes."""
        self.part = self.part.masked_fill(chosen, 0.0)

    def carried(
        self, text: str, chosen: Tensor, size: Tensor, least: float = 0.0, **values: Any
    ) -> Iterator[Evidence]:
        """The cause, if its tokens carry more than an equal part; later causes exclude them."""
        part, least = float(self.part[chosen].sum()), least or self.limit.share
        share = part - int(chosen.sum()) / self.N
        if share >= least:
            yield Evidence(text, share, chosen, size, {"part": part, "least": least, **values})
            self.take(chosen)

    def cause(self, name: str, remedy: str, evidence: Evidence) -> Cause:
        """The cause with its tokens by `size`; the text shows the three largest sizes."""
        size, chosen = evidence.size, evidence.chosen
        keys = size.abs().nan_to_num(torch.inf, torch.inf).masked_fill(~chosen, -1)
        order = keys.argsort(descending=True, stable=True)[: min(20, int(chosen.sum()))].tolist()
        places = [(int(self.sequence[i]), int(self.explanation.position[i])) for i in order]
        worst, texts = [], self.explanation.texts
        for i, (b, t) in zip(order[:3], places, strict=False):
            first = int(torch.searchsorted(self.sequence, b))
            word = "" if texts is None else f" {texts[b][i - first][:20]!r}"
            large = 1e3 <= abs(size[i]) < 1e6
            number = f"{size[i]:,.0f}" if large else f"{size[i]:.3g}"
            number = f"{100 * size[i]:.2g} %" if size is self.part else number
            worst.append(f"sequence {b} token {t}{word} {number}")
        known = {"limit": self.limit, "share": evidence.share, **evidence.values}
        known |= {"tokens": _count(chosen), "sequences": _count(self.sums(chosen) > 0, "sequence")}
        text = _TEXTS[evidence.text] + _TEXTS["carried"] * ("part" in known)
        text = text.format_map(known)
        text = f"{text.replace('%', ' %')}: {', '.join(worst)}"
        return Cause(name, min(evidence.share, 1.0), text, remedy, places)


def _count(chosen: Tensor, word: str = "token") -> str:
    count = int(chosen.sum())
    return f"{count} {word}{'s' * (count != 1)}"


def _not_finite(step: _Step) -> Iterator[Evidence]:
    chosen = torch.zeros_like(step.policy)
    for name in {"gradient", "loss"} & step.explanation.columns.keys():
        chosen |= ~step[name].isfinite()
    if chosen.any():
        yield Evidence("not_finite", 1.0, chosen, step["logp"])
        step.take(chosen)


def _kl(step: _Step) -> Iterator[Evidence]:
    term, limit = step["kl_loss"].abs(), step.limit
    if term.isfinite().all():  # in the loss
        size = step.part.maximum(shares(step["loss"]))
        chosen = (term > step["policy"].abs()) & (size > limit.times / step.N)
        share = float(size[chosen].sum() - chosen.sum() / step.N)
        broad = float(term.sum() / step["loss"].abs().sum())
        if share >= limit.share:
            yield Evidence("kl", share, chosen, step["kl"])
            return step.take(chosen)
        if broad >= limit.kl and step["loss"].any():
            return (yield Evidence("kl_all_over", broad, term > 0, step["kl"]))
    # As a metric: one e^d of k3 can be most of the KL, and little of the loss.
    kl, count = step["kl"].abs().nan_to_num(0.0), int(step.policy.sum())
    order = kl.argsort(descending=True)
    order = order[: 1 + int((kl[order].cumsum(0) < kl.sum() / 2).sum())]
    few = len(order) <= max(1, limit.tokens * step.N)
    if count and few and (mean := float(kl.sum() / count)) >= limit.mean_kl:
        chosen = torch.zeros_like(step.policy).index_fill_(0, order, True)
        share = float(kl[chosen].sum() / kl.sum())
        yield Evidence("kl_of_few", share, chosen, step["kl"], {"mean": mean})


def _ratio(step: _Step) -> Iterator[Evidence]:
    chosen = (step["ratio"] > step.limit.ratio) & (step["clip"].nan_to_num() == 0)
    return step.carried("ratio", chosen & (step.part > 0), step["ratio"])


def _importance_weight(step: _Step) -> Iterator[Evidence]:
    weight, dropped, limit = step["importance_weight"], step["dropped"] == 1, step.limit
    large = (weight > limit.weight) & ~dropped
    largest = float(weight[large].max()) if large.any() else 0.0
    text = "weight_cap" if (large & (weight == largest)).sum() > 1 else "weight"
    yield from step.carried(text, large, weight, largest=largest)
    # The off-policy mask drops all tokens of a sequence.
    all_dropped = step.sums(dropped) == step.sums(step.policy)
    dropped &= (weight == 0) | (all_dropped[step.sequence] & (step["advantage"] < 0))
    if (share := step.share(dropped)) >= limit.dropped:
        yield Evidence("masks", share, dropped, step["sampler_gap"])


def _advantage(step: _Step) -> Iterator[Evidence]:
    size = step["advantage"].abs()
    usual = float(size[size > 0].median()) if (size > 0).any() else torch.inf
    chosen = size > step.limit.times * usual
    return step.carried("advantage", chosen, step["advantage"], usual=usual)


def _length(step: _Step) -> Iterator[Evidence]:
    weight, limit, count = step["weight"], step.limit, step.sums(step.policy)
    heavy = weight > limit.length * weight[step.policy].mean()
    yield from step.carried("short", heavy, weight)
    long = count > limit.long * count[count > 0].mean()
    share = float(step.sums(step.part)[long].sum() - long.sum() / step.B)
    if share >= limit.sequence:
        yield Evidence("long", share, long[step.sequence], count[step.sequence])
        step.take(long[step.sequence])


def _group(step: _Step) -> Iterator[Evidence]:
    rewards, advantages = step.fact("reward"), step.fact("advantage")
    for group in step.explanation.groups:
        ids = torch.tensor(group["sequences"], dtype=torch.int64, device="cpu")
        values = advantages[ids] if rewards[ids].isnan().any() else rewards[ids]
        G, far = len(ids), (values - values.mean()).abs()
        if group["group"] is None or G < 4 or not values.std() > 0:
            continue
        # The largest possible distance, of one reward from others that are all equal.
        for b in ids[far / values.std() > 0.99 * (G - 1) / G**0.5].tolist()[:1]:
            known = {"b": b, "others": G - 1, "group": group["group"], "advantage": advantages[b]}
            chosen = (step.sequence == b) & (step.part > 0)
            yield from step.carried("group", chosen, step.part, step.limit.sequence, **known)


def _token(step: _Step) -> Iterator[Evidence]:
    chosen = step.part >= max(step.limit.share + 1 / step.N, step.limit.times / step.N)
    return step.carried("token", chosen, step.part)


def _sampler(step: _Step) -> Iterator[Evidence]:
    gap, limit, ids = step["sampler_gap"].abs(), step.limit, step.explanation.token_ids
    scored = ~gap.isnan()
    if not scored.any():
        return
    median, off = float(gap[scored].median()), gap > limit.gap
    ends, after = torch.ones_like(step.policy), torch.zeros_like(step.policy)
    ends[:-1] = step.sequence.diff() > 0
    after[1:] = (step.explanation.position.diff() > 1) & (step.sequence.diff() == 0)
    kinds = {
        "the ends of completions": ends & ~(step.fact("truncated") == 1)[step.sequence],
        "tokens right after a gap in the mask, as a tool's text is": after,
    }
    if ids is not None:
        _, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
        kinds["ids seen once"] = counts[inverse] == 1
    # Most tokens of a kind, and most of the tokens that are off.
    which = [
        f"at {kind}" for kind, tokens in kinds.items()
        if (n := (off & tokens).sum()) > 1 and 2 * n > tokens.sum() and 2 * n > off.sum()
    ]  # fmt: skip
    if median >= limit.median_gap:
        off, which = scored & (gap > limit.median_gap), ["all over"]
    share = max(step.share(off), float(step.part[off].sum()))
    if which or share >= limit.tokens:
        known = {"where": [*which, "at single tokens"][0], "scored": scored.sum(), "median": median}
        yield Evidence("sampler", share, off, step["sampler_gap"], known)


def _unsampled(step: _Step) -> Iterator[Evidence]:
    """-log p has the entropy as its expectation, for samples of the policy."""
    limit, sampled = step.limit, step["logp"] - step["log_ratio"].nan_to_num()  # when it was drawn
    surprise = -sampled - step["entropy"]
    known = step.policy & surprise.isfinite()
    if not known.any():
        return
    far = known & (surprise > limit.surprise)
    rest = surprise[known & ~far]
    mean, error = float(rest.mean()), float(rest.std() / len(rest) ** 0.5)
    if abs(mean) > limit.mean_surprise and abs(mean) > 5 * error:  # without the few that are far
        size = abs(float(surprise[known].mean()) if mean > 0 else mean)
        share = size / max(float(-sampled[known].mean()), float(step["entropy"][known].mean()))
        text = "surprise" if mean > 0 else "no_surprise"
        yield Evidence(text, share, known, surprise, {"mean": size})
        return
    share = max(step.share(far), float(step.part[far].sum()))
    if share >= limit.tokens or (surprise[known] > 2 * limit.surprise).any():
        yield Evidence("unsampled", share, far, surprise)


def _entropy(step: _Step) -> Iterator[Evidence]:
    entropy, limit = step["entropy"], step.limit.entropy
    if (mean := float(entropy[step.policy].mean())) < limit:
        yield Evidence("entropy", step.share(entropy < limit), step.policy, entropy, {"mean": mean})


def _clipped(step: _Step) -> Iterator[Evidence]:
    # A KL, or a clip of weights, leaves a gradient to a token whose ratio is cut off.
    usual = (step["weight"] * step["advantage"]).abs()
    chosen = (step["clip"].nan_to_num() != 0) & (step["gradient"].abs() < 0.1 * usual)
    share = float(chosen.sum() / (usual > 0).sum().clamp(min=1))
    if share >= step.limit.clipped:
        yield Evidence("clipped", share, chosen, step["ratio"])


def _learning_rate(step: _Step) -> Iterator[Evidence]:
    limit = step.limit.moved
    for name, mean in (("moved", torch.mean), ("log_ratio", torch.median)):
        size = step[name][step.policy].abs()
        if (middle := float(mean(size))) >= limit:
            # The part of the movement that is beyond the limit.
            share = float((size - limit).clamp(min=0).sum() / size.sum())
            far = step.policy & (step[name].abs() > limit)
            return (yield Evidence(name, share, far, step[name], {"mean": middle}))


def _truncated(step: _Step) -> Iterator[Evidence]:
    chosen = (step.fact("truncated") == 1)[step.sequence]
    if (share := float(step.part[chosen].sum())) >= step.limit.truncated:
        yield Evidence("truncated", share, chosen, step.part)


# Causes that exclude tokens from later ones come first. Remedies: our options, then peers'.
_CAUSES: dict[str, tuple[Callable[[_Step], Iterator[Evidence]], str]] = {
    "not_finite": (_not_finite, "look for NaN or inf in weights, hidden states, old_logps and "
        "ref_logps; go back to a checkpoint"),
    "kl": (_kl, "kl_clamp (verl clamps k3 to 10), kl_estimator 'k2', a lower beta (verl: "
        "kl_loss_coef), a newer reference (TRL: sync_ref_model)"),
    "ratio": (_ratio, "delta or dual_clip bound it where the advantage is negative (TRL: delta; "
        "verl: clip_ratio_c; prime-rl: token_mask_high), fewer updates per rollout"),
    "importance_weight": (_importance_weight, "is_correction 'token_truncate', as a sequence's "
        "weight is a product over its tokens; is_clip_max, off_policy_threshold (TRL: "
        "vllm_importance_sampling_mode; verl: rollout_is, rollout_is_threshold)"),
    "advantage": (_advantage, "scale_rewards 'group' or 'batch' divides by the spread of rewards "
        "(TRL: scale_rewards; verl: norm_adv_by_std_in_grpo); bound the reward"),
    "length": (_length, "aggregation 'dapo' or 'dr_grpo' weighs all tokens alike, 'grpo' all "
        "sequences (TRL: loss_type; verl: loss_agg_mode)"),
    "group": (_group, "scale_rewards 'none' or 'batch' (verl: norm_adv_by_std_in_grpo=False), "
        "larger groups, prompts that are neither too easy nor too hard"),
    "token": (_token, "max_grad_norm bounds what it does; look whether its advantage is deserved"),
    "sampler": (_sampler, "check_sampler tells whether rounding explains it; compare weights, "
        "temperature and targets; is_correction bounds what it does (TRL: "
        "vllm_importance_sampling_correction; verl: rollout_is)"),
    "unsampled": (_unsampled, "mask what the policy did not sample, check the shift of targets "
        "against hidden states, sample and train at one temperature"),
    "entropy": (_entropy, "entropy_coef, a higher epsilon_high (verl: entropy_coeff, "
        "clip_ratio_high), top_entropy_quantile, a higher temperature"),
    "clipped": (_clipped, "fewer updates per rollout, a lower learning_rate, a wider epsilon "
        "(verl: clip_ratio_low, clip_ratio_high), or cispo, whose clip leaves the gradient"),
    "learning_rate": (_learning_rate, "a lower learning_rate, max_grad_norm, warm-up; fewer "
        "updates per rollout (TRL: num_iterations; verl: ppo_epochs)"),
    "truncated": (_truncated, "mask_truncated_completions, a larger max_completion_length (TRL has "
        "both; verl: overlong_buffer)"),
}  # fmt: skip

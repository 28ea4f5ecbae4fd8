"""Causes of a step's loss, one function each, which read an explanation alone.

A cause that single tokens carry has the share of the gradient that they have beyond what as many
average tokens would have; its tokens count in none of the next such causes. A cause of the whole
step has the share of the tokens, of the nats or of the gradient, that shows it. So shares do not
add up to 1. Truncated completions come last: a limit on the length cuts many in calm steps too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..base.checks import check_number, plain_numbers
from .explanation import Cause, Explanation, shares

# The options of this library, and what peers call them.
_REMEDIES = {
    "not_finite": "look for NaN or inf in weights, hidden states, old_logps and ref_logps; go back "
    "to a checkpoint",
    "kl": "kl_clamp (verl clamps k3 to 10), another kl_estimator such as 'k2', a lower beta (verl: "
    "kl_loss_coef), a newer reference (TRL: sync_ref_model)",
    "ratio": "delta or dual_clip, which bound the ratio where the advantage is negative (TRL: "
    "delta; verl: clip_ratio_c; prime-rl: token_mask_high), fewer updates per rollout (TRL: "
    "num_iterations)",
    "importance_weight": "is_correction, is_clip_max, off_policy_threshold (TRL: "
    "vllm_importance_sampling_mode, ..._clip_max, off_policy_mask_threshold; verl: rollout_is, "
    "rollout_is_threshold); a sequence's weight is a product over its tokens, 'geometric' a mean",
    "length": "aggregation='dapo' or 'dr_grpo' weighs all tokens alike, 'grpo' all sequences (TRL: "
    "loss_type; verl: loss_agg_mode)",
    "group": "scale_rewards='none' or 'batch' (verl: norm_adv_by_std_in_grpo=False), larger "
    "groups, prompts that are neither too easy nor too hard",
    "advantage": "scale_rewards='group' or 'batch' divides by the spread of rewards (TRL: "
    "scale_rewards; verl: norm_adv_by_std_in_grpo); bound what a reward function returns",
    "truncated": "mask_truncated_completions, a larger max_completion_length (TRL has both; verl: "
    "overlong_buffer)",
    "token": "max_grad_norm bounds what it does; look whether its advantage is deserved",
    "sampler": "check_sampler tells whether rounding explains it (logits_dtype); compare weights, "
    "temperature and targets; is_correction bounds what it does (TRL: "
    "vllm_importance_sampling_correction; verl: rollout_is)",
    "unsampled": "mask what the policy did not sample, check the shift of targets against hidden "
    "states, sample and train at one temperature",
    "entropy": "entropy_coef, a higher epsilon_high, top_entropy_quantile (verl: entropy_coeff, "
    "clip_ratio_high), a higher temperature",
    "learning_rate": "a lower learning_rate, max_grad_norm, warm-up; fewer updates per rollout "
    "(TRL: num_iterations; verl: ppo_epochs)",
    "clipped": "fewer updates per rollout or a lower learning_rate; a wider epsilon, epsilon_high "
    "(verl: clip_ratio_low, clip_ratio_high); cispo, whose clip leaves the gradient",
}


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits from which a cause is named, numbers > 0.

    Args:
        share: share of the gradient that tokens have beyond that of as many average tokens.
        times: size of a token relative to the average token, and of an advantage relative to the
            median one.
        ratio: ratio of policy to old policy.
        kl: share of the KL in the absolute loss of all tokens.
        mean_kl: mean KL, in nats, from which tokens with half of it are named.
        length: weight of a sequence's tokens relative to the average token.
        long: length of a sequence relative to the average sequence.
        sequence: share of the gradient of a sequence beyond that of an average one.
        gap: difference of a token's log-prob to the sampler's, in nats.
        median_gap: the same, for half of all tokens.
        surprise: -log p of a token minus the entropy, in nats; one token with twice this is enough.
        mean_surprise: the same as a mean over the step; it is 0 for samples of the policy.
        tokens: share of tokens that differ from the sampler's or have a surprise; largest share of
            tokens that has half of the KL.
        entropy: mean entropy, in nats.
        truncated: share of the gradient in truncated completions.
        moved: change of log-probs, in nats: mean by one optimizer step, or median since the old
            policy.
        weight: importance weight.
        dropped: share of dropped tokens.
        clipped: share of tokens whose gradient a clip removes.
    """

    share: float = 0.05
    times: float = 10.0
    ratio: float = 2.0
    kl: float = 0.5
    mean_kl: float = 0.1
    length: float = 25.0
    long: float = 5.0
    sequence: float = 0.15
    gap: float = 0.5
    median_gap: float = 0.1
    surprise: float = 12.0
    mean_surprise: float = 0.3
    tokens: float = 0.01
    entropy: float = 0.05
    truncated: float = 0.2
    moved: float = 0.2
    weight: float = 2.0
    dropped: float = 0.2
    clipped: float = 0.5

    def __post_init__(self) -> None:
        plain_numbers(self)
        for field in fields(self):
            check_number(f"thresholds.{field.name}", getattr(self, field.name), "> 0")


def rank(explanation: Explanation, thresholds: Thresholds = Thresholds()) -> list[Cause]:
    """Returns the causes in an explanation's columns, largest share first, `truncated` last."""
    step = _Step(explanation, thresholds)
    # Those that take tokens from the next come first.
    every = (
        _not_finite, _kl, _ratio, _importance_weight, _advantage, _length, _group, _token, _sampler,
        _unsampled, _entropy, _clipped, _learning_rate, _truncated,
    )  # fmt: skip
    causes = [cause for find in every for cause in find(step)] if step.N else []
    return sorted(causes, key=lambda cause: (cause.name == "truncated", -cause.share))


class _Step:
    """The columns by name, NaN where there is none, and each token's share of the gradient."""

    def __init__(self, explanation: Explanation, thresholds: Thresholds) -> None:
        self.explanation, self.limit, columns = explanation, thresholds, explanation.columns
        self.sequence, self.N = explanation.sequence, len(explanation.sequence)
        self.B = len(explanation.sequences)
        # Without gradients the loss stands for them.
        ones = torch.ones(self.N, dtype=torch.float32, device="cpu")
        known = columns.get("gradient_share", columns.get("loss", ones))
        self.part = shares(known)
        self.policy = ~columns.get("advantage", self.part).isnan()

    def __getitem__(self, name: str) -> Tensor:
        column = self.explanation.columns.get(name)
        return torch.full_like(self.part, torch.nan) if column is None else column

    def fact(self, name: str) -> Tensor:
        """A fact of each sequence, float64 `[B]`, NaN where it is not known."""
        values = [row.get(name) for row in self.explanation.sequences]
        numbers = [float("nan") if x is None else float(x) for x in values]
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")

    def sums(self, x: Tensor) -> Tensor:
        """Sums over each sequence, float64 `[B]`."""
        return x.new_zeros(self.B, dtype=torch.float64).index_add_(0, self.sequence, x.double())

    def excess(self, chosen: Tensor) -> float:
        """The share of the gradient of these tokens beyond that of as many average ones."""
        return float(self.part[chosen].sum() - chosen.sum() / self.N)

    def share(self, chosen: Tensor) -> float:
        """The share of these tokens in the policy's."""
        return float((chosen & self.policy).sum() / self.policy.sum().clamp(min=1))

    def take(self, chosen: Tensor) -> None:
        """Leaves the gradient of these tokens out of the causes that follow."""
        self.part = self.part.masked_fill(chosen, 0.0)

    def cause(
        self, name: str, share: float, chosen: Tensor, size: Tensor, text: str
    ) -> Iterator[Cause]:
        """The cause, with its tokens by `size`, which stands beside those that it names."""
        keys = size.abs().nan_to_num(torch.inf, torch.inf).masked_fill(~chosen, -1)
        order = keys.argsort(descending=True, stable=True)[: min(20, int(chosen.sum()))].tolist()
        places = [(int(self.sequence[i]), int(self.explanation.position[i])) for i in order]
        worst = []
        for i, (b, t) in zip(order[:3], places, strict=False):
            word = ""
            if self.explanation.texts is not None:
                first = int(torch.searchsorted(self.sequence, b))
                word = f" {self.explanation.texts[b][i - first][:20]!r}"
            number = f"{size[i]:.1%}" if size is self.part else f"{size[i]:.3g}"
            worst.append(f"sequence {b} token {t}{word} {number}")
        yield Cause(name, min(share, 1.0), f"{text}: {', '.join(worst)}", _REMEDIES[name], places)

    def carried(
        self, name: str, chosen: Tensor, size: Tensor, text: str, least: float = 0.0
    ) -> Iterator[Cause]:
        """The cause, if its tokens carry more than average ones, of which they are then no more."""
        share, least = self.excess(chosen), least or self.limit.share
        if share >= least:
            yield from self.cause(
                name, share, chosen, size,
                f"{text}; the share of the gradient there is {float(self.part[chosen].sum()):.1%}, "
                f"{share:.1%} more than that of as many average tokens (limit {least:.0%})",
            )  # fmt: skip
            self.take(chosen)


def _count(chosen: Tensor, word: str = "token") -> str:
    count = int(chosen.sum())
    return f"{count} {word}{'s' * (count != 1)}"


def _not_finite(step: _Step) -> Iterator[Cause]:
    chosen = torch.zeros_like(step.policy)
    for name in {"gradient", "loss"} & step.explanation.columns.keys():
        chosen |= ~step[name].isfinite()
    if chosen.any():
        text = f"the loss or gradient of {_count(chosen)} is NaN or infinite; log-probs"
        yield from step.cause("not_finite", 1.0, chosen, step["logp"], text)
        step.take(chosen)


def _kl(step: _Step) -> Iterator[Cause]:
    term, loss, limit = step["kl_loss"].abs(), shares(step["loss"]), step.limit
    if not term.isfinite().all():  # none in the loss, say
        yield from _kl_of_few(step)
        return
    size = step.part.maximum(loss)
    chosen = (term > step["policy"].abs()) & (size > limit.times / step.N)
    share, broad = float(size[chosen].sum() - chosen.sum() / step.N), 0.0
    if step["loss"].any():
        broad = float(term.sum() / step["loss"].abs().sum())
    if share >= limit.share:
        text = (
            f"the KL term outweighs the policy term at {_count(chosen)}; the share of the loss or "
            f"gradient there is {share:.1%} more than that of as many average tokens (limit "
            f"{limit.share:.0%}); KL"
        )
        yield from step.cause("kl", share, chosen, step["kl"], text)
        step.take(chosen)
    elif broad >= limit.kl:
        text = (
            f"the KL term is {broad:.0%} of the absolute loss (limit {limit.kl:.0%}), spread over "
            "many tokens; KL"
        )
        yield from step.cause("kl", broad, term > 0, step["kl"], text)
    else:
        yield from _kl_of_few(step)


def _kl_of_few(step: _Step) -> Iterator[Cause]:
    """The KL as a metric: one e^d of k3 can be most of it, and little of the loss."""
    kl, limit = step["kl"].abs().nan_to_num(0.0), step.limit
    order = kl.argsort(descending=True)
    count = 1 + int((kl[order].cumsum(0) < kl.sum() / 2).sum())
    if (
        step.policy.any()
        and kl.sum() >= limit.mean_kl * step.policy.sum()
        and count <= max(1, limit.tokens * step.N)
    ):
        chosen = torch.zeros_like(step.policy)
        chosen[order[:count]] = True
        share, mean = float(kl[chosen].sum() / kl.sum()), float(kl.sum() / step.policy.sum())
        tokens = "1 token has" if count == 1 else f"{count} tokens have"
        text = (
            f"{tokens} {share:.0%} of the KL, whose mean over the step is {mean:.2g} nats (limit "
            f"{limit.mean_kl:g}); KL in nats"
        )
        yield from step.cause("kl", share, chosen, step["kl"], text)


def _ratio(step: _Step) -> Iterator[Cause]:
    chosen = (step["ratio"] > step.limit.ratio) & (step["clip"].nan_to_num() == 0)
    chosen &= step.part > 0
    text = f"the ratio of {_count(chosen)} is above {step.limit.ratio:g}, and no clip bounds it"
    yield from step.carried("ratio", chosen, step["ratio"], text)


def _importance_weight(step: _Step) -> Iterator[Cause]:
    weight, dropped, limit = step["importance_weight"], step["dropped"] == 1, step.limit
    large = (weight > limit.weight) & ~dropped
    text = f"the importance weight of {_count(large)} is above {limit.weight:g}"
    if large.any() and (large & (weight == weight[large].max())).sum() > 1:
        text += f", and for several the largest, {weight[large].max():g}"
    yield from step.carried("importance_weight", large, weight, text)
    # A sequence without any token left is one that the off-policy mask took.
    whole = step.sums(dropped) == step.sums(step.policy)
    dropped &= (weight == 0) | (whole[step.sequence] & (step["advantage"] < 0))
    if (share := step.share(dropped)) >= limit.dropped:
        text = (
            f"masks drop {share:.0%} of the tokens (limit {limit.dropped:.0%}), because the "
            "sampler's log-probs are too far from the policy's; differences in nats"
        )
        yield from step.cause("importance_weight", share, dropped, step["sampler_gap"], text)


def _length(step: _Step) -> Iterator[Cause]:
    weight, limit, count = step["weight"], step.limit, step.sums(step.policy)
    heavy = weight > limit.length * weight[step.policy].mean()
    text = (
        f"the tokens of {_count(step.sums(heavy) > 0, 'short sequence')} weigh over "
        f"{limit.length:g} times as much as the average token"
    )
    yield from step.carried("length", heavy, weight, text)
    long = count > limit.long * count[count > 0].mean()
    share = float(step.sums(step.part)[long].sum() - long.sum() / step.B)
    if share >= limit.sequence:
        text = (
            f"the length of {_count(long, 'sequence')} is over {limit.long:g} times the average; "
            f"the share of the gradient there is {share:.0%} more than that of as many average "
            f"sequences (limit {limit.sequence:.0%}); lengths in tokens"
        )
        tokens = long[step.sequence]
        yield from step.cause("length", share, tokens, count[step.sequence], text)
        step.take(tokens)


def _group(step: _Step) -> Iterator[Cause]:
    rewards, advantages = step.fact("reward"), step.fact("advantage")
    for group in step.explanation.groups:
        ids = torch.tensor(group["sequences"], dtype=torch.int64, device="cpu")
        values = advantages[ids] if rewards[ids].isnan().any() else rewards[ids]
        G, far = len(ids), (values - values.mean()).abs()
        if group["group"] is None or G < 4 or not values.std() > 0:
            continue
        # The farthest that one can be from the others, if these are all equal.
        odd = far / values.std() > 0.99 * (G - 1) / G**0.5
        if odd.any():
            b = int(ids[odd][0])
            text = (
                f"the reward of sequence {b} differs from those of the {G - 1} others of group "
                f"{group['group']}, so that its advantage is {advantages[b]:+.2f}"
            )
            chosen = (step.sequence == b) & (step.part > 0)
            yield from step.carried("group", chosen, step.part, text, step.limit.sequence)


def _advantage(step: _Step) -> Iterator[Cause]:
    size, limit = step["advantage"].abs(), step.limit
    usual = float(size[size > 0].median()) if (size > 0).any() else torch.inf
    chosen = size > limit.times * usual
    text = (
        f"the advantage of {_count(step.sums(chosen) > 0, 'sequence')} is over {limit.times:g} "
        f"times the median one, {usual:.2g}"
    )
    yield from step.carried("advantage", chosen, step["advantage"], text)


def _token(step: _Step) -> Iterator[Cause]:
    least = max(step.limit.share + 1 / step.N, step.limit.times / step.N)
    if (chosen := step.part >= least).any():
        text = f"no other cause explains the gradient of {_count(chosen)}"
        yield from step.carried("token", chosen, step.part, text)


def _sampler(step: _Step) -> Iterator[Cause]:
    gap, limit, ids = step["sampler_gap"].abs(), step.limit, step.explanation.token_ids
    scored = ~gap.isnan()
    if not scored.any():
        return
    median, off, kinds = float(gap[scored].median()), gap > limit.gap, {}
    ends = torch.ones_like(step.policy)
    ends[:-1] = step.sequence.diff() > 0
    kinds["the ends of completions"] = ends & ~(step.fact("truncated") == 1)[step.sequence]
    after = (step.explanation.position.diff() > 1) & (step.sequence.diff() == 0)
    kinds["tokens right after a gap in the mask, as a tool's text is"] = torch.cat(
        [after.new_zeros(1), after]
    )
    if ids is not None:
        _, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
        kinds["ids seen once"] = counts[inverse] == 1
    # Of most of a kind, and most of those that are off.
    which = [
        kind for kind, tokens in kinds.items()
        if (n := (off & tokens).sum()) > 1 and 2 * n > tokens.sum() and 2 * n > off.sum()
    ]  # fmt: skip
    if median >= limit.median_gap:
        off, where = scored & (gap > limit.median_gap), "all over"
    else:
        where = f"at {which[0]}" if which else "at single tokens"
    share = max(step.share(off), float(step.part[off].sum()))
    if median >= limit.median_gap or which or share >= limit.tokens:
        text = (
            f"the sampler's log-probs differ from the policy's at {int(off.sum())} of "
            f"{_count(scored)}, {where}; the median difference is {median:.2g} nats (limit "
            f"{limit.median_gap:g}; {limit.gap:g} for a single token); differences in nats"
        )
        yield from step.cause("sampler", share, off, step["sampler_gap"], text)


def _unsampled(step: _Step) -> Iterator[Cause]:
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
        mean = float(surprise[known].mean()) if mean > 0 else mean
        share = abs(mean) / max(float(-sampled[known].mean()), float(step["entropy"][known].mean()))
        side, why = ("above", "targets are probably shifted by one, or were sampled at a higher")
        if mean < 0:
            side, why = "below", "tokens were probably sampled at a lower"
        text = (
            f"the mean of -log p is {abs(mean):.2f} nats {side} the mean entropy (limit "
            f"{limit.mean_surprise:g}), but samples of the policy have the same: {why} temperature "
            "than the loss has; -log p less entropy"
        )
        yield from step.cause("unsampled", share, known, surprise, text)
        return
    share = max(step.share(far), float(step.part[far].sum()))
    if share >= limit.tokens or (surprise[known] > 2 * limit.surprise).any():
        text = (
            f"the policy can hardly have sampled {_count(far)}: -log p is over {limit.surprise:g} "
            "nats above the entropy there, as in text of a prompt, a template or a tool, in "
            "padding or at banned ids that the mask counts; -log p less entropy"
        )
        yield from step.cause("unsampled", share, far, surprise, text)


def _entropy(step: _Step) -> Iterator[Cause]:
    entropy = step["entropy"]
    if (mean := float(entropy[step.policy].mean())) < step.limit.entropy:
        low = step.policy & (entropy < step.limit.entropy)
        text = (
            f"the mean entropy is {mean:.2g} nats (limit {step.limit.entropy:g}), and "
            f"{step.share(low):.0%} of the tokens are below it: completions of a prompt will be "
            "alike; highest entropies"
        )
        yield from step.cause("entropy", step.share(low), step.policy, entropy, text)


def _learning_rate(step: _Step) -> Iterator[Cause]:
    limit = step.limit.moved
    moved, drift = (step[name][step.policy].abs() for name in ("moved", "log_ratio"))
    if (mean := float(moved.mean())) >= limit:
        text = f"the step moved log-probs by {mean:.2g} nats in the mean (limit {limit:g})"
        size, by = step["moved"], moved
    elif (median := float(drift.median())) >= limit:
        text = f"half of all log-probs are {median:.2g} nats or more from the old policy's (limit "
        text += f"{limit:g})"
        size, by = step["log_ratio"], drift
    else:
        return
    far = step.policy & (size.abs() > limit)
    # The part of the movement that is beyond the limit.
    share = float((by - limit).clamp(min=0).sum() / by.sum())
    yield from step.cause("learning_rate", share, far, size, f"{text}; changes in nats")


def _clipped(step: _Step) -> Iterator[Cause]:
    # A KL, or a clip of weights, leaves a gradient to a token whose ratio is cut off.
    usual = (step["weight"] * step["advantage"]).abs()
    chosen = (step["clip"].nan_to_num() != 0) & (step["gradient"].abs() < 0.1 * usual)
    share = float(chosen.sum() / (usual > 0).sum().clamp(min=1))
    if share >= (limit := step.limit.clipped):
        text = (
            f"a clip takes the gradient from {share:.0%} of the tokens with an advantage (limit "
            f"{limit:.0%}); ratios"
        )
        yield from step.cause("clipped", share, chosen, step["ratio"], text)


def _truncated(step: _Step) -> Iterator[Cause]:
    chosen = (step.fact("truncated") == 1)[step.sequence]
    if (carried := float(step.part[chosen].sum())) >= step.limit.truncated:
        count = _count(step.sums(chosen) > 0, "truncated completion")
        text = (
            f"the share of the gradient in {count} is {carried:.0%} (limit "
            f"{step.limit.truncated:.0%}); shares of tokens"
        )
        yield from step.cause("truncated", carried, chosen, step.part, text)
